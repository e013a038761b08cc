"""synergyctl release-all on a Slurm in memory: what is sent, what is left alone, what is told."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from manual_clock import ManualClock
from ran import Ran

from slurm_synergy.cli import control
from slurm_synergy.controller.ledger import Ledger, StoredLease, holder_of
from slurm_synergy.core.model import Lease, Placement
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import SlurmCommandError
from slurm_synergy.slurm.facts import Hold, JobFacts, JobState, PartitionFacts
from slurm_synergy.slurm.original import default_memory, fields_to_give_back
from slurm_synergy.slurm.release_all import original_request
from slurm_synergy.slurm.request import read_mark


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    fake = FakeSlurm()
    monkeypatch.setattr("slurm_synergy.slurm.clients.make_client", lambda settings: fake)
    return fake


@pytest.fixture
def call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Ran]:
    """synergyctl release-all with settings of its own; no controller is anywhere."""
    file = tmp_path / "synergy.yaml"
    file.write_text(f"state_dir: {tmp_path / 'state'}\nleases: {{listen: '127.0.0.1:1'}}\n")
    monkeypatch.delenv("SYNERGY_ENDPOINT", raising=False)
    monkeypatch.setattr(control, "ENDPOINT_FILE", tmp_path / "none")
    return lambda *argv: Ran(capsys, "release-all", "--config", str(file), *argv)


def reshaped(slurm: FakeSlurm, **given: Any) -> int:
    """A waiting job that was started by us before: its record has our shape."""
    job_id = slurm.submit(gpus=4)
    slurm.create_reservation("synergy", list(slurm.nodes), ["root"]) if not (
        slurm.reservations
    ) else None
    slurm.change(
        job_id,
        held=Hold.ADMIN,
        req_nodes=("v100-1",),
        reservation="synergy",
        min_cpus_node=24,
        cpus_per_task=24,
        **given,
    )
    return job_id


def test_waiting_jobs_are_released_running_ones_left_and_the_reservation_goes(
    slurm: FakeSlurm, call: Callable[..., Ran], tmp_path: Path
) -> None:
    waiting, fresh = reshaped(slurm), slurm.submit()
    running = reshaped(slurm, state=JobState.RUNNING)
    own = slurm.submit(marked=False)  # its owner's own hold: job_submit.lua has not seen it
    done = slurm.submit()
    slurm.finish(done)
    ran = call("--yes")
    assert ran.status == 0, ran.err
    for job_id in (waiting, fresh, running):
        facts = slurm.jobs[job_id]
        assert (facts.held, facts.reservation) == (Hold.NONE, None)
    assert slurm.jobs[waiting].req_nodes == ()
    assert slurm.jobs[running].req_nodes == ("v100-1",)
    assert slurm.jobs[running].state is JobState.RUNNING
    assert slurm.jobs[own].held is Hold.USER
    assert slurm.reservations == {}
    assert "2 waiting jobs released, 1 running ones left to Slurm" in ran.out
    assert "reservation synergy deleted" in ran.out
    written = (tmp_path / "state/released.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(one) for one in written.splitlines()]
    assert [one["event"] for one in lines] == ["begin", "job", "job", "job", "end"]
    assert lines[1]["job_id"] == waiting
    assert "NumCPUs=1" in lines[1]["fields"]
    assert lines[-1]["reservation_deleted"] is True
    assert (tmp_path / "state/released.jsonl").stat().st_mode & 0o777 == 0o600
    before = len(slurm.calls)
    again = call("--yes", "--json")
    assert again.status == 0
    assert json.loads(again.out)["jobs"] == []
    assert len(slurm.calls) == before


def test_where_the_controller_keeps_no_reservation_none_is_touched(
    slurm: FakeSlurm, call: Callable[..., Ran], tmp_path: Path
) -> None:
    file = tmp_path / "synergy.yaml"
    file.write_text(f"{file.read_text()}pool: {{reservation: false}}\n")
    slurm.create_reservation("synergy", list(slurm.nodes), ["ann"])
    job_id = slurm.submit()
    assert call("--yes").status == 0
    assert slurm.jobs[job_id].held is Hold.NONE
    assert list(slurm.reservations) == ["synergy"]


def test_without_a_reservation_a_start_that_was_begun_is_found_by_its_lease(
    slurm: FakeSlurm, call: Callable[..., Ran], tmp_path: Path
) -> None:
    file = tmp_path / "synergy.yaml"
    file.write_text(f"{file.read_text()}pool: {{reservation: false}}\n")
    begun, observed = slurm.submit(), slurm.submit()
    for job_id in (begun, observed):
        # Released; nodes may be named by an owner too, while nothing is acted on.
        slurm.change(job_id, held=Hold.NONE, priority=1, req_nodes=("v100-1",), min_cpus_node=24)
    share = Resources(gpus=4, cpus=24, mem_mib=1000)
    lease = Lease(
        job_id=begun,
        generation=1,
        placement=Placement(job_id=begun, gpu_type="v100", shares=(("v100-1", share),)),
        granted={"v100-1": share},
        expires_s=9e9,
    )
    with Ledger(tmp_path / "state", clock=ManualClock()) as ledger:
        ledger.save_leases([StoredLease(lease=lease, owner_uid=1, incarnation=0)])
    content = json.loads(call("--yes", "--json").out)
    assert [one["job_id"] for one in content["jobs"]] == [begun]
    assert slurm.jobs[begun].req_nodes == ()
    assert slurm.jobs[observed].req_nodes == ("v100-1",)
    assert json.loads(call("--yes", "--json").out)["jobs"] == []


def test_only_a_job_that_was_requeued_skips_slurms_delay(
    slurm: FakeSlurm, call: Callable[..., Ran]
) -> None:
    requeued, fresh = reshaped(slurm, restarts=1), slurm.submit()
    content = json.loads(call("--yes", "--json").out)
    assert {one["job_id"]: one["start_now"] for one in content["jobs"]} == {
        requeued: True,
        fresh: False,
    }
    assert slurm.calls.count("set_start_now") == 1


def test_a_dry_run_says_it_and_changes_nothing(
    slurm: FakeSlurm, call: Callable[..., Ran], tmp_path: Path
) -> None:
    job_id = reshaped(slurm)
    before, calls = dict(slurm.jobs), len(slurm.calls)
    ran = call("--dry-run")
    assert ran.status == 0
    _, row, *_ = ran.out.splitlines()
    assert row.split()[:3] == [str(job_id), "ann", "waits"]
    assert "ReqNodeList= ReservationName= NumNodes=1-1 NumTasks=1 NumCPUs=1" in row
    assert "1 waiting job would be released, 0 running ones would be left to Slurm" in ran.out
    assert (slurm.jobs, len(slurm.calls)) == (before, calls)
    assert not (tmp_path / "state").exists()
    content = json.loads(call("--dry-run", "--json").out)
    assert (content["dry_run"], content["jobs"][0]["given"]) == (True, False)


def test_it_asks_and_where_nobody_answers_refuses(
    slurm: FakeSlurm, call: Callable[..., Ran]
) -> None:
    job_id = reshaped(slurm)
    ran = call()
    assert ran.status == 2
    assert "say --yes" in ran.err
    assert slurm.jobs[job_id].held is Hold.ADMIN


def test_a_running_controller_is_in_the_way_unless_told(
    slurm: FakeSlurm, call: Callable[..., Ran], tmp_path: Path, clock: ManualClock
) -> None:
    job_id = reshaped(slurm)
    assert holder_of(tmp_path / "state") is None
    with Ledger(tmp_path / "state", clock=clock):
        assert holder_of(tmp_path / "state") == str(os.getpid())
        ran = call("--yes")
        assert ran.status == 1
        assert f"(process {os.getpid()}); it would hold the jobs again: stop it first" in ran.err
        assert slurm.jobs[job_id].held is Hold.ADMIN
        assert call("--dry-run").status == 0
        assert call("--yes", "--force").status == 0
    assert slurm.jobs[job_id].held is Hold.NONE
    assert holder_of(tmp_path / "state") is None


def test_a_damaged_ledger_does_not_keep_jobs_from_being_given_back(
    slurm: FakeSlurm, call: Callable[..., Ran], tmp_path: Path
) -> None:
    job_id = reshaped(slurm)
    (tmp_path / "state").mkdir()
    (tmp_path / "state/ledger.sqlite").write_bytes(b"no database" * 100)
    ran = call("--yes")
    assert ran.status == 0
    assert "going on by the jobs' own marks" in ran.err
    assert slurm.jobs[job_id].held is Hold.NONE
    assert (tmp_path / "state/ledger.sqlite").read_bytes().startswith(b"no database")


def test_a_job_that_cannot_be_changed_is_named_and_the_rest_goes_on(
    slurm: FakeSlurm, call: Callable[..., Ran]
) -> None:
    first, second = reshaped(slurm), reshaped(slurm)
    slurm.break_at[len(slurm.calls) + 1] = SlurmCommandError(
        ("scontrol",), 1, "Access/permission denied", kind="permission"
    )
    ran = call("--yes")
    assert ran.status == 1
    assert "NOT given back: scontrol failed: Access/permission denied" in ran.out
    assert [slurm.jobs[one].held for one in (first, second)] == [Hold.ADMIN, Hold.NONE]
    assert call("--yes").status == 0
    assert slurm.jobs[first].held is Hold.NONE


def test_a_slurm_that_is_down_is_told_without_our_command_line(
    slurm: FakeSlurm, call: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ("squeue", "-O", "JobId:|a8ebbdaa66b162884fe7b3b9|")
    down = SlurmCommandError(
        argv, 1, "slurm_load_jobs error: Unable to contact slurm controller", kind="controller_down"
    )

    def no_answer(partition: str | None = None) -> tuple[JobFacts, ...]:
        raise down

    monkeypatch.setattr(slurm, "read_queue", no_answer)
    ran = call("--yes")
    assert ran.status == 1
    assert ran.err == "synergyctl: Slurm does not answer (Unable to contact slurm controller)\n"


def test_a_job_on_its_way_back_to_the_queue_is_waited_for(
    slurm: FakeSlurm, call: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = reshaped(slurm, state=JobState.COMPLETING)
    monkeypatch.setattr("slurm_synergy.cli.release_cmd.time.sleep", lambda _: slurm.settle())
    ran = call("--yes")
    assert ran.status == 0
    facts = slurm.jobs[job_id]
    assert (facts.state, facts.held, facts.req_nodes) == (JobState.PENDING, Hold.NONE, ())


def test_one_that_does_not_end_is_told_and_left(
    slurm: FakeSlurm, call: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = reshaped(slurm, state=JobState.COMPLETING)
    now = [0.0]
    monkeypatch.setattr("slurm_synergy.cli.release_cmd.time.monotonic", lambda: now[0])

    def sleep(_: float) -> None:
        now[0] += 10.0

    monkeypatch.setattr("slurm_synergy.cli.release_cmd.time.sleep", sleep)
    ran = call("--yes")
    assert ran.status == 1
    assert f"still ending, and not given back: {job_id}; call release-all again" in ran.out
    assert now[0] > 30.0
    assert slurm.jobs[job_id].held is Hold.ADMIN


def test_nothing_is_done_that_leaves_no_trace(
    slurm: FakeSlurm, call: Callable[..., Ran], tmp_path: Path
) -> None:
    job_id = reshaped(slurm)
    (tmp_path / "state").mkdir()
    (tmp_path / "state/released.jsonl").symlink_to(tmp_path / "elsewhere")
    ran = call("--yes")
    assert ran.status == 1
    assert "cannot write" in ran.err
    assert slurm.jobs[job_id].held is Hold.ADMIN
    assert not (tmp_path / "elsewhere").exists()


# what is sent ---------------------------------------------------------------------------------


class _Memory:
    def __init__(self, **remembered: object) -> None:
        self._remembered = remembered or None

    def request(self, job_id: int) -> dict[str, object] | None:
        return self._remembered


def facts_of(slurm: FakeSlurm, **given: Any) -> JobFacts:
    return slurm.jobs[reshaped(slurm, **given)]


def test_memory_that_was_not_asked_for_is_the_sites_default(slurm: FakeSlurm) -> None:
    facts = facts_of(slurm)
    request = read_mark(facts.admin_comment)
    partition = PartitionFacts(name="p", nodes=(), state="UP", oversubscribe=("NO", 1))
    config = slurm.read_config()
    assert "MinMemoryNode=0" in fields_to_give_back(facts, request, "synergy")
    for known, raw, field in (
        (partition, {}, "MinMemoryNode=0"),
        (partition, {"DefMemPerNode": "UNLIMITED"}, "MinMemoryNode=0"),
        (partition, {"DefMemPerCPU": "4000"}, "MinMemoryCPU=4000"),
        (partition, {"DefMemPerNode": "9000"}, "MinMemoryNode=9000"),
        (replace(partition, def_mem_per_node_mib=7), {"DefMemPerCPU": "4000"}, "MinMemoryNode=7"),
        (replace(partition, def_mem_per_cpu_mib=8), {}, "MinMemoryCPU=8"),
    ):
        memory = default_memory(known, replace(config, raw=raw))
        assert memory == field
        assert field in fields_to_give_back(facts, request, "synergy", memory)
    asked = replace(request, mem_mib_per_node=500) if request else None
    fields = fields_to_give_back(facts, asked, "synergy", "MinMemoryCPU=4000")
    assert "MinMemoryNode=500" in fields
    assert "MinMemoryCPU=4000" not in fields


def test_a_limit_that_restarts_have_cut_down_is_whole_again(slurm: FakeSlurm) -> None:
    facts = facts_of(slurm, time_limit_s=1800.0)
    used = {"used_s": 5400.0, "before_used_s": 0.0, "before_limit_s": 7200.0}
    request = original_request(facts, _Memory(run_time=used))
    assert "TimeLimit=120" in fields_to_give_back(facts, request, "synergy")
    request = original_request(facts, _Memory())
    assert not any("TimeLimit" in one for one in fields_to_give_back(facts, request, "synergy"))


def test_without_mark_the_first_sight_of_a_job_counts(slurm: FakeSlurm) -> None:
    facts = replace(facts_of(slurm), admin_comment="")
    shape = {
        "wrapped": False,
        "gpus_per_node": 4,
        "gpu_type": "v100",
        "nodes": 1,
        "tasks_per_node": 2,
        "cpus_per_task": 3,
        "mem_mib_per_node": 5,
    }
    fields = fields_to_give_back(facts, original_request(facts, _Memory(shape=shape)), "synergy")
    assert {"NumTasks=2", "NumCPUs=6", "MinCPUsNode=6", "MinMemoryNode=5"} <= set(fields)
    unknown = fields_to_give_back(facts, original_request(facts, _Memory()), "synergy")
    assert unknown == ["ReqNodeList=", "ReservationName="]
