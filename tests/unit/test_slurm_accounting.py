"""Limits of accounts and QOS: what Slurm prints of them, and when they leave more room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_world import World, make_world, world
from test_slurm_limits import hinder

from slurm_synergy.core.model import JobPhase
from slurm_synergy.errors import SlurmCommandError, SlurmParseError
from slurm_synergy.slurm.accounting import AccountingFacts, parse_accounting
from slurm_synergy.slurm.facts import JobState

__all__ = ["make_world", "world"]  # fixtures

TEXT = (
    Path(__file__).parent.parent / "fixtures/slurm/22.05.8/scontrol_show_assoc_mgr.out"
).read_text(encoding="utf-8")
ALL = ("edge", "root", "vision")


def facts(*changes: tuple[str, str], accounts: Iterable[str] = ALL) -> AccountingFacts:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return parse_accounting(text, accounts)


def test_limits_of_a_real_slurm_are_read_with_their_use() -> None:
    found = facts()
    assert {bound: limit for bound, limit in found.limits.items() if limit} == {
        ("root", "GrpJobs"): "100",
        ("vision", "GrpTRES cpu"): "64",
        ("vision", "GrpTRES gres/gpu"): "4",
        ("vision", "GrpTRESMins gres/gpu"): "6000",
        ("edge", "root(0) MaxJobs"): "3",
        ("edge", "root(0) MaxWallPJ"): "60",
        ("", "high(2) GrpJobs"): "7",
        ("", "high(2) edge MaxJobsPA"): "5",
        ("", "high(2) 0 MaxTRESPU gres/gpu"): "2",
    }
    # Minutes run down by themselves.
    assert ("vision", "GrpTRESMins gres/gpu") not in found.used
    assert found.used["vision", "GrpTRES gres/gpu"] == 2.0
    assert found.used["", "high(2) 0 MaxTRESPU gres/gpu"] == 2.0
    assert found.parents == {"root", "vision"}


def test_a_slurm_without_accounts_has_no_limits_and_anything_else_is_an_error() -> None:
    none = "Current Association Manager state\n\nNo QOS currently cached in Slurm.\n\n"
    assert parse_accounting(none, ("a",)) == AccountingFacts(accounts=frozenset({"a"}))
    for text in ("", "slurm_load_assoc_mgr_info error: Unable to contact\n", TEXT[:-5]):
        with pytest.raises(SlurmParseError):
            parse_accounting(text, ())


@pytest.mark.parametrize(
    ("change", "differs", "eased"),
    [
        (("gres/gpu=4(2)", "gres/gpu=6(2)"), True, True),
        (("gres/gpu=4(2)", "gres/gpu=N(2)"), True, True),
        (("gres/gpu=4(2)", "gres/gpu=4(1)"), False, True),
        (("gres/gpu=4(2)", "gres/gpu=4(3)"), False, False),
        (("GrpJobs=7(1)", "GrpJobs=7(0)"), False, True),
        (("MaxWallPJ=60", "MaxWallPJ=90"), True, True),
        (("gres/gpu=6000(0)", "gres/gpu=6000(9)"), False, False),
        # Use of what is not limited, shares, the order of associations.
        (("GrpSubmitJobs=N(1)", "GrpSubmitJobs=N(0)"), False, False),
        (("UsageRaw/Norm/Efctv=0.00", "UsageRaw/Norm/Efctv=7.00"), False, False),
        (("Lft=4", "Lft=6"), False, False),
        # Another user of the QOS, for whom its limits are printed from now on.
        (("    User Limits\n      0\n", "    User Limits\n      7\n        MaxJobsPU=N(0) "
          "MaxTRESPU=gres/gpu=2(0)\n      0\n"), False, False),
        (("QOS=normal(1)", "QOS=new(9)\n    GrpJobs=N(0)\nQOS=normal(1)"), True, True),
    ],
)  # fmt: skip
def test_what_leaves_more_room_is_told_from_what_does_not(
    change: tuple[str, str], differs: bool, eased: bool
) -> None:
    before, after = facts(), facts(change)
    assert (after.differs_from(before), after.eased_since(before)) == (differs, eased)
    assert not before.differs_from(before) and not before.eased_since(before)


def test_accounts_that_were_not_asked_for_before_are_no_change() -> None:
    root = TEXT[TEXT.index("ClusterName") : TEXT.index("ClusterName=synergy Account=vision")]
    few = parse_accounting(TEXT.replace(root, ""), ("edge", "vision"))
    assert not facts().eased_since(few) and not few.eased_since(facts())


def limit(gpus: int, used: int) -> AccountingFacts:
    bound = ("lab", "GrpTRES gres/gpu")
    return AccountingFacts(limits={bound: str(gpus)}, used={bound: float(used)})


@pytest.mark.parametrize(
    ("reason", "then", "now", "again"),
    [
        ("AssocGrpGRES", limit(4, 4), limit(8, 4), True),
        ("AssocGrpGRES", limit(4, 4), limit(4, 2), True),
        ("AssocGrpGRES", limit(4, 4), limit(4, 4), False),
        ("QOSMaxWallDurationPerJobLimit", limit(4, 4), limit(8, 4), True),
        # A limit on one job is not lifted by others' ending.
        ("QOSMaxWallDurationPerJobLimit", limit(4, 4), limit(4, 2), False),
        ("InvalidQOS", limit(4, 4), limit(8, 4), True),
    ],
)
def test_a_job_is_tried_again_when_its_limit_leaves_more_room(
    world: World, reason: str, then: AccountingFacts, now: AccountingFacts, again: bool
) -> None:
    world.slurm.accounting = then
    job_id = world.slurm.submit(gpus=4, account="lab")
    for _ in range(2):
        hinder(world, job_id, reason)
        world.clock.advance(5.1)
        world.cluster.tick()
    # The second time it waits ten seconds, unless something changes.
    assert world.seen(job_id).blocked is not None
    world.slurm.accounting = now
    world.clock.advance(2.0)
    world.cluster.tick()
    assert (world.seen(job_id).blocked is None) is again


def test_accounts_are_asked_for_only_while_a_job_waits_for_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[set[str]] = []

    def read(accounts: Iterable[str]) -> AccountingFacts:
        asked.append(set(accounts))
        above = frozenset({"lab": "top", "top": "root"}[one] for one in asked[-1] - {"root"})
        return replace(limit(4, 4), accounts=frozenset(asked[-1]), parents=above)

    monkeypatch.setattr(world.slurm, "read_accounting", read)
    job_id = world.slurm.submit(gpus=4, account="lab")
    world.cluster.tick()
    assert asked == []
    hinder(world, job_id, "AssocGrpGRES")
    whole = {"lab", "top", "root"}
    assert asked == [{"lab"}, {"lab", "top"}, whole]
    world.clock.advance(1.0)
    world.cluster.tick()
    assert len(asked) == 3, "not at every reading"
    world.clock.advance(1.0)
    world.cluster.tick()
    assert asked[3:] == [whole], "what is above is known now"
    world.clock.advance(4.0)
    world.step()
    world.slurm.schedule()
    world.cluster.tick()
    before = len(asked)
    for _ in range(3):
        world.clock.advance(5.0)
        world.cluster.tick()
    assert len(asked) == before, "it runs"


def test_limits_that_cannot_be_read_are_in_nobodys_way(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read(accounts: Iterable[str]) -> AccountingFacts:
        raise SlurmCommandError(("scontrol",), 1, "Access denied", kind="permission")

    monkeypatch.setattr(world.slurm, "read_accounting", read)
    job_id = world.slurm.submit(gpus=4, account="lab")
    hinder(world, job_id, "AssocGrpGRES")
    other = world.slurm.submit(gpus=8)
    world.clock.advance(5.1)
    world.step()
    assert world.slurm.jobs[other].state is JobState.RUNNING
    assert world.seen(job_id).phase is not JobPhase.PENDING, "tried again all the same"
    assert caplog.text.count("the limits of accounts cannot be read") == 1


def test_another_account_or_qos_is_another_try(world: World) -> None:
    job_id = world.slurm.submit(gpus=4, account="lab", qos="normal")
    for _ in range(2):
        hinder(world, job_id, "QOSGrpGRES")
        world.clock.advance(5.1)
        world.cluster.tick()
    assert world.seen(job_id).blocked is not None
    world.slurm.change(job_id, qos="high")
    world.cluster.tick()
    assert world.seen(job_id).blocked is None
