"""Why Slurm does not start a job: words, waits, what ends them; and a job's own limits of time."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import Crash, FakeSlurm
from slurm_world import MakeWorld, World, make_world, world

from slurm_synergy.core.model import JobPhase, ReasonCode
from slurm_synergy.slurm.facts import Hold, JobState, PartitionFacts
from slurm_synergy.slurm.limits import Trigger, obstacle_of
from slurm_synergy.slurm.request import Request, read_mark
from slurm_synergy.slurm.runtime import RunTime

__all__ = ["make_world", "world"]  # fixtures

FIXTURES = Path(__file__).parent.parent / "fixtures" / "slurm"

# Every reason of a job in the captures, and whether it keeps a released job from starting.
CAPTURED: dict[str, Trigger | None] = {
    "None": None, "Resources": None, "BeginTime": None, "Dependency": None,
    "JobHeldUser": None, "JobHeldAdmin": None, "JobArrayTaskLimit": None, "TimeLimit": None,
    "NonZeroExitCode": None, "job_requeued_in_held_state": None,
    "NodeDown": Trigger.NODES_CHANGED,
    "PartitionTimeLimit": Trigger.PARTITION_CHANGED,
    "DependencyNeverSatisfied": Trigger.TIME_ONLY,
    "ReqNodeNotAvail,_UnavailableNodes:a100-2": Trigger.NODES_CHANGED,
    "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs_in_higher_priority_partitions":
        Trigger.NODES_CHANGED,
}  # fmt: skip


def test_every_reason_of_the_captures_is_known() -> None:
    found = set()
    for path in FIXTURES.glob("*/scontrol_d_show_job_o.out"):
        text = path.read_text("utf-8", "surrogateescape")
        found |= set(re.findall(r" JobState=\S+ Reason=(\S+) ", text))
    assert found, "the captures are gone"
    assert {obstacle_of(reason) and reason for reason in found} <= set(CAPTURED) | {None}
    assert found <= set(CAPTURED)


@pytest.mark.parametrize("reason", CAPTURED)
def test_reasons_that_pass_by_themselves_are_told_from_limits(reason: str) -> None:
    found = obstacle_of(reason)
    assert (found.trigger if found else None) is CAPTURED[reason]
    assert found is None or f"({reason})" in found.text


@pytest.mark.parametrize(
    ("reason", "words", "trigger"),
    [
        ("AssocGrpGRES", "all jobs of its account together are at the limit of GPUs",
         Trigger.USE_OR_LIMIT),
        ("AssocGrpCpuLimit", "together are at the limit of CPUs", Trigger.USE_OR_LIMIT),
        ("AssocGrpCPURunMinutesLimit", "the limit of minutes of CPUs", Trigger.USE_OR_LIMIT),
        ("AssocMaxJobsLimit", "its account lets no more jobs of its user run at once",
         Trigger.USE_OR_LIMIT),
        ("AssocMaxWallDurationPerJobLimit", "sets the most time of one job",
         Trigger.LIMIT_CHANGED),
        ("QOSMaxGRESPerUser", "its QOS sets the most GPUs of all jobs of its user",
         Trigger.USE_OR_LIMIT),
        ("QOSMaxJobsPerUserLimit", "its QOS lets no more jobs of its user run at once",
         Trigger.USE_OR_LIMIT),
        ("QOSMaxJobsPerAccountLimit", "lets no more jobs of its account run", Trigger.USE_OR_LIMIT),
        ("QOSMaxMemoryPerJob", "its QOS sets the most memory of one job",
         Trigger.LIMIT_CHANGED),
        ("QOSGrpNodeLimit", "all jobs of its QOS together are at the limit of nodes",
         Trigger.USE_OR_LIMIT),
        ("QOSMinCpuNotSatisfied", "its QOS sets the least CPUs of one job", Trigger.LIMIT_CHANGED),
        ("QOSMinGRES", "its QOS sets the least GPUs", Trigger.LIMIT_CHANGED),
        ("QOSGrpFutureThing", "the limit of futurething", Trigger.USE_OR_LIMIT),
        ("Licenses", "its licenses are in use", Trigger.JOB_ENDED),
        ("PartitionNodeLimit", "MaxNodes", Trigger.PARTITION_CHANGED),
        ("PartitionDown", "the partition is down", Trigger.PARTITION_CHANGED),
        ("BadConstraints", "no node can satisfy", Trigger.NODES_CHANGED),
        ("InvalidQOS", "not valid any more", Trigger.LIMIT_CHANGED),
    ],
)  # fmt: skip
def test_limits_are_put_into_words(reason: str, words: str, trigger: Trigger) -> None:
    found = obstacle_of(reason)
    assert found is not None
    assert words in found.text
    assert found.trigger is trigger


def released(world: World, job_id: int, reason: str) -> None:
    """Slurm leaves the released job waiting, and says why."""
    world.slurm.change(job_id, reason=reason)
    world.cluster.tick()


def hinder(world: World, job_id: int, reason: str) -> None:
    """The job is started, and one of Slurm's limits is in the way."""
    world.round()
    assert world.slurm.jobs[job_id].held is Hold.NONE
    released(world, job_id, reason)
    assert world.slurm.jobs[job_id].held is Hold.NONE, "one reading may show an old reason"
    released(world, job_id, reason)
    world.cluster.tick()
    assert world.slurm.jobs[job_id].held is Hold.ADMIN
    blocked = world.seen(job_id).blocked
    assert blocked is not None
    assert blocked.code is ReasonCode.LIMITED
    assert reason in blocked.text


def test_a_job_behind_a_limit_gives_its_gpus_to_others_at_once(world: World) -> None:
    job_id = world.slurm.submit(gpus=8)
    hinder(world, job_id, "QOSMaxGRESPerUser")
    assert world.seen(job_id).phase is JobPhase.PENDING
    others = [world.slurm.submit(gpus=8) for _ in range(2)]
    world.step()
    assert all(world.slurm.jobs[one].state is JobState.RUNNING for one in others)


def test_it_is_tried_again_when_a_job_has_ended_but_not_in_a_loop(world: World) -> None:
    other = world.slurm.submit(gpus=2)
    world.step()
    job_id = world.slurm.submit(gpus=4)
    hinder(world, job_id, "AssocGrpGRES")
    world.slurm.finish(other)
    world.cluster.tick()
    assert world.seen(job_id).blocked is not None, "not sooner than the first wait"
    world.clock.advance(5.0)
    world.cluster.tick()
    assert world.seen(job_id).blocked is None
    hinder(world, job_id, "AssocGrpGRES")
    # Nothing ends any more: now it waits for twice as long.
    world.clock.advance(9.9)
    world.cluster.tick()
    assert world.seen(job_id).blocked is not None
    world.clock.advance(0.2)
    world.cluster.tick()
    assert world.seen(job_id).blocked is None


def test_a_limit_of_the_partition_is_looked_at_only_while_a_job_waits_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    partition = PartitionFacts(
        name="synergy", nodes=(), state="UP", oversubscribe=("FORCE", 8), max_time_s=600.0
    )

    def read(name: str) -> PartitionFacts:
        asked.append(name)
        return partition

    monkeypatch.setattr(world.slurm, "read_partition", read)
    job_id = world.slurm.submit(gpus=4, time_limit_s=1200.0)
    world.cluster.tick()
    assert asked == []
    hinder(world, job_id, "PartitionTimeLimit")
    assert asked
    for _ in range(3):
        world.clock.advance(1.9)
        world.cluster.tick()
    hindered_again = world.seen(job_id)
    assert hindered_again.blocked is None or hindered_again.blocked.code is ReasonCode.LIMITED
    # The second time it would wait ten seconds; the change ends that.
    hinder(world, job_id, "PartitionTimeLimit")
    world.clock.advance(5.1)
    world.cluster.tick()
    assert world.seen(job_id).blocked is not None
    partition = replace(partition, max_time_s=3600.0)
    world.cluster.tick()
    assert world.seen(job_id).blocked is None


def test_the_owner_gets_it_past_a_limit_by_a_shorter_time(world: World) -> None:
    job_id = world.slurm.submit(gpus=4, time_limit_s=1200.0)
    for _ in range(2):
        hinder(world, job_id, "PartitionTimeLimit")
        world.clock.advance(5.1)
        world.cluster.tick()
    assert world.seen(job_id).blocked is not None
    world.slurm.change(job_id, time_limit_s=300.0)
    world.cluster.tick()
    assert world.seen(job_id).blocked is None


def test_a_node_that_comes_back_ends_the_wait(make_world: MakeWorld) -> None:
    world = make_world(FakeSlurm(nodes=2))
    job_id = world.slurm.submit(gpus=8)
    for _ in range(2):
        hinder(world, job_id, "ReqNodeNotAvail,_UnavailableNodes:v100-1")
        world.clock.advance(5.1)
        world.cluster.tick()
    assert world.seen(job_id).blocked is not None
    world.slurm.nodes["v100-2"] = replace(world.slurm.nodes["v100-2"], state="DOWN")
    world.cluster.tick()
    assert world.seen(job_id).blocked is None


def test_reasons_of_a_moment_are_waited_out(world: World) -> None:
    job_id = world.slurm.submit(gpus=8)
    world.round()
    for reason in ("None", "Priority", "Resources", "Resources", "Resources"):
        released(world, job_id, reason)
    assert world.slurm.jobs[job_id].held is Hold.NONE


def test_a_failed_launch_is_not_repeated_at_once_by_a_new_controller(world: World) -> None:
    job_id = world.slurm.submit(
        gpus=4, restarts=1, reason="launch_failed_requeued_held", held=Hold.USER
    )
    world.step()
    assert world.slurm.jobs[job_id].state is JobState.PENDING
    blocked = world.seen(job_id).blocked
    assert blocked is not None and "its launch failed" in blocked.text
    world.clock.advance(5.0)
    world.step()
    assert world.slurm.jobs[job_id].state is JobState.RUNNING


# The job's own limits


def test_a_deadline_that_has_passed_is_slurms_to_deal_with(world: World) -> None:
    late = world.slurm.submit(gpus=8, held=Hold.ADMIN, deadline_s=990.0)
    soon = world.slurm.submit(gpus=8, held=Hold.ADMIN, deadline_s=998.0)
    begins = world.slurm.submit(gpus=8, held=Hold.ADMIN, deadline_s=990.0, eligible_s=2000.0)
    world.cluster.tick()
    held = {job_id: world.slurm.jobs[job_id].held for job_id in (late, soon, begins)}
    assert held == {late: Hold.NONE, soon: Hold.ADMIN, begins: Hold.ADMIN}


def test_a_dependency_that_can_never_be_satisfied_is_said_to_be_one(world: World) -> None:
    job_id = world.slurm.submit(gpus=1, dependency="afterok:7(failed)")
    blocked = world.seen(job_id).blocked
    assert blocked is not None and "can never start" in blocked.text


def test_what_a_site_leaves_to_slurm_is_neither_held_nor_planned(world: World) -> None:
    passed: dict[str, Any] = {"marked": False, "admin_comment": "synergy:pass=interactive"}
    job_id = world.slurm.submit(gpus=2, held=Hold.NONE, priority=9, batch=False, **passed)
    world.round()
    assert "hold" not in world.slurm.calls
    assert job_id not in {one.job.job_id for one in world.cluster.look().jobs}
    # Once it runs it is in the way like any other.
    world.slurm.change(job_id, req_nodes=("v100-1",), min_mem_node_mib=100)
    world.slurm.schedule()
    world.cluster.tick()
    assert world.seen(job_id).phase is JobPhase.RUNNING
    assert world.cluster.look().free["v100-1"].gpus == 6


def test_what_is_left_of_the_limit_is_given_to_the_next_run() -> None:
    run_time, limit_s = RunTime().restart(3600.0, 1500.0)
    assert run_time is not None and limit_s is not None
    assert limit_s == 2100.0
    # Before Slurm has taken it, and after.
    assert run_time.whole_s(3600.0) == 3600.0
    assert run_time.whole_s(2100.0) == 3600.0
    # Somebody gave this run ten minutes more, or less.
    assert run_time.whole_s(2700.0) == 4200.0
    assert RunTime.from_memory({"run_time": run_time.to_memory()}) == run_time
    again, limit_s = run_time.restart(2100.0, 3000.0)
    assert again is not None and limit_s == 600.0
    assert again.whole_s(600.0) == again.whole_s(2100.0) == 3600.0


@pytest.mark.parametrize(
    ("limit_s", "ran_s"), [(None, 500.0), (365 * 86400.0, 500.0), (600.0, 5.0)]
)
def test_a_limit_that_is_right_is_left_alone(limit_s: float | None, ran_s: float) -> None:
    assert RunTime().restart(limit_s, ran_s) == (None, None)


def test_at_least_a_minute_is_left() -> None:
    run_time, limit_s = RunTime().restart(600.0, 900.0)
    assert run_time is not None and limit_s == 60.0
    assert run_time.whole_s(60.0) == 600.0


def test_a_restarted_job_has_only_what_is_left_of_its_limit(world: World) -> None:
    job_id = world.slurm.submit(gpus=4, time_limit_s=1800.0)
    world.step()
    world.clock.advance(1000.0)
    world.slurm.requeue_hold(job_id)
    world.cluster.tick()
    world.slurm.settle()
    world.clock.advance(1.0)
    world.step()
    facts = world.slurm.jobs[job_id]
    assert (facts.state, facts.restarts) == (JobState.RUNNING, 1)
    assert facts.time_limit_s == 14 * 60.0
    assert world.seen(job_id).job.time_limit_s == 1800.0
    # A new controller knows it as well.
    world.boot()
    assert world.seen(job_id).job.time_limit_s == 1800.0


def test_a_crash_while_the_limit_is_set_does_not_change_what_was_meant(world: World) -> None:
    job_id = world.slurm.submit(gpus=4, time_limit_s=1800.0)
    world.step()
    world.clock.advance(1000.0)
    world.slurm.requeue_hold(job_id)
    world.cluster.tick()
    world.slurm.settle()
    for after in (False, True):
        world.slurm.after = after
        calls = world.slurm.calls
        world.slurm.break_at = {len(calls) + 2: Crash()}
        with pytest.raises(Crash):
            world.round()
        assert calls[-2:] == ["reshape", "set_time_limit"]
        world.slurm.break_at = {}
        world.boot()
        assert world.seen(job_id).job.time_limit_s == 1800.0
    world.step()
    assert world.slurm.jobs[job_id].time_limit_s == 14 * 60.0


def test_a_mark_tells_the_types_to_choose_from_and_the_limit(world: World) -> None:
    job_id = world.slurm.submit(kind="v100+a100", gpus_asked={"": 4})
    assert world.seen(job_id).job.gpu_types == ("v100", "a100")
    mark = world.slurm.jobs[job_id].admin_comment
    for text, limit_s in ((mark, None), (f"{mark},limit=0", None), (f"{mark},limit=90", 5400.0)):
        request = read_mark(text)
        assert request is not None
        assert request.time_limit_s == limit_s
        assert Request.from_json(request.to_json()) == request


def test_what_a_running_job_without_a_limit_shows_is_no_limit(world: World) -> None:
    job_id = world.slurm.submit(time_limit_s=365 * 86400.0)
    assert world.seen(job_id).job.time_limit_s is None
