"""A node whose helper is not heard: noticed, not counted on, and told."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import job, node, pending, placement, profile, res, running, snapshot
from fake_slurm import FakeSlurm
from manual_clock import ManualClock
from slurm_world import World

from slurm_synergy.cli.control import Target
from slurm_synergy.cli.helper_checks import helper_findings
from slurm_synergy.config import Settings
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.controller.node_helpers import NodeHelpers
from slurm_synergy.controller.status import StatusView
from slurm_synergy.core.decide import decide
from slurm_synergy.core.explain import explain, in_words
from slurm_synergy.core.model import Enforcement, Plan, Snapshot
from slurm_synergy.errors import LeaseError
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.slurm.facts import ConfigFacts
from slurm_synergy.slurm.findings import Grade

HELPED = {"pool": {"node_helpers": True}, "enforcement": "borrow"}


class ConfiningSlurm(FakeSlurm):
    """Its jobs are confined to the cores that they were given."""

    def __init__(self, **given: Any) -> None:
        super().__init__(oversubscribe=("NO", 1), **given)

    def read_config(self) -> ConfigFacts:
        found = super().read_config()
        return replace(
            found, task_plugins=("task/affinity", "task/cgroup"), raw={"ConstrainCores": "yes"}
        )


def planned(now: Snapshot, mechanism: str = "tune") -> Plan:
    return decide(now, POLICIES["fifo"], MECHANISMS[mechanism])


def test_a_helper_counts_from_its_first_word_until_a_lease_after_its_last() -> None:
    clock = ManualClock(1000.0)
    helpers = NodeHelpers(clock, lease_s=60.0)
    assert helpers.age_s("n1") is None
    clock.advance(59.0)
    assert not helpers.silent("n1")  # the controller has just started: it may still be heard
    clock.advance(1.0)
    assert helpers.silent("n1")
    helpers.heard("n1")
    clock.advance(20.0)
    assert helpers.age_s("n1") == 20.0
    assert not helpers.silent("n1")
    assert helpers.silent("n2")
    clock.advance(40.0)
    assert helpers.silent("n1")


def test_cores_stay_as_slurm_gave_them_where_no_helper_is_heard() -> None:
    hungry, modest = profile(per_core=10.0), profile(per_core=1000.0)
    jobs = [
        running(job(1, 4), placement(1, v100_1=res(4, 20, 250_000)), hungry),
        pending(job(2, 4), modest),
    ]
    helped = snapshot([node("v100-1")], jobs, enforcement=Enforcement.BORROW)
    shares = {one.job_id: one.on("v100-1").cpus for one in planned(helped).placements}
    assert shares[1] > 12 > shares[2]
    alone = replace(helped, nodes=(replace(node("v100-1"), fixed_shares=True),))
    shares = {one.job_id: one.on("v100-1").cpus for one in planned(alone).placements}
    assert shares == {1: 12, 2: 12}


def test_the_controller_notices_and_tells_in_its_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="slurm_synergy")
    world = World(tmp_path, ConfiningSlurm(), **HELPED)
    world.boot()
    assert not any(one.fixed_shares for one in world.cluster.look().nodes)
    world.clock.advance(60.0)
    world.book.helpers.heard("v100-1")
    fixed = {one.name: one.fixed_shares for one in world.cluster.look().nodes}
    assert fixed == {"v100-1": False, "v100-2": True}
    world.cluster.look()
    assert caplog.text.count("no helper is heard on v100-2:") == 1
    world.book.helpers.heard("v100-2")
    assert not any(one.fixed_shares for one in world.cluster.look().nodes)
    assert "the helpers of all nodes are heard" in caplog.text
    world.close()


def test_where_slurm_confines_nobody_helpers_are_not_needed(tmp_path: Path) -> None:
    world = World(tmp_path, FakeSlurm(), pool={"node_helpers": True})
    world.boot()
    world.clock.advance(60.0)
    assert not any(one.fixed_shares for one in world.cluster.look().nodes)
    world.close()


def test_status_tells_who_is_heard(tmp_path: Path) -> None:
    world = World(tmp_path, ConfiningSlurm(), **HELPED)
    world.boot()
    assert isinstance(world.ledger, Ledger)
    view = StatusView(world.settings, ledger=world.ledger, leases=world.book, clock=world.clock)
    world.clock.advance(60.0)
    world.book.helpers.heard("v100-1")
    view.observed(world.cluster.look())
    nodes = view.status()["nodes"]
    assert isinstance(nodes, list)
    assert [one["helper"] for one in nodes] == [
        {"heard_s": 0.0, "silent": False, "needed": False},
        {"heard_s": None, "silent": True, "needed": True},
    ]
    view.reload(Settings())
    nodes = view.status()["nodes"]
    assert isinstance(nodes, list)
    assert [one["helper"] for one in nodes] == [None, None]
    world.close()


def test_explain_tells_where_cores_do_not_move() -> None:
    jobs = [running(job(1, 4), placement(1, v100_1=res(4, 12, 250_000)), profile())]
    fixed = snapshot([replace(node("v100-1"), fixed_shares=True), node("v100-2")], jobs)
    lines = in_words(explain(fixed, planned(fixed), 1, order=(1,)))
    assert "cores do not move on v100-1: no slurm-synergyd --node is heard there" in lines
    free = snapshot([node("v100-1"), node("v100-2")], jobs)
    assert "do not move" not in "".join(in_words(explain(free, planned(free), 1, order=(1,))))


def test_check_asks_the_controller(tmp_path: Path) -> None:
    def nodes(*silent: bool) -> Mapping[str, Any]:
        return {
            "nodes": [
                {"node": f"n{number}", "helper": {"silent": one}}
                for number, one in enumerate(silent, start=1)
            ]
        }

    def refuses(target: Target) -> Mapping[str, Any]:
        raise LeaseError(f"{target.endpoint} does not answer")

    settings = Settings.model_validate({"state_dir": str(tmp_path), **HELPED})
    assert not list(helper_findings(Settings(), refuses))
    (found,) = helper_findings(settings, refuses)
    assert (found.grade, found.check) == (Grade.WARN, "node_helpers")  # no endpoint is written
    (tmp_path / "endpoint").write_text("here:1\n")
    (found,) = helper_findings(settings, refuses)
    assert "here:1 does not answer" in found.seen
    (found,) = helper_findings(settings, lambda target: nodes(False, False))
    assert (found.grade, found.seen) == (
        Grade.OK,
        "every node's helper is heard (2 nodes)",
    )
    (found,) = helper_findings(settings, lambda target: nodes(False, True))
    assert found.grade is Grade.WARN
    assert found.seen == "no helper is heard on 1 of 2 nodes: n2"
