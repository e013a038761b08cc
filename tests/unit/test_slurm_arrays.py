"""Which members of job arrays become jobs of their own, and which the limit holds back."""

from __future__ import annotations

import pytest
from fake_slurm import FakeSlurm
from slurm_world import MakeWorld, make_world, world

from slurm_synergy.core.model import JobPhase
from slurm_synergy.errors import SlurmCommandError, SlurmParseError
from slurm_synergy.slurm.arrays import plan_arrays
from slurm_synergy.slurm.facts import GpuForm, Hold, JobFacts, JobState
from slurm_synergy.slurm.fields import first_tasks

__all__ = ["make_world", "world"]  # fixtures


@pytest.mark.parametrize(
    ("text", "count", "tasks"),
    [
        ("0-5%2", 3, (0, 1, 2)),
        ("3", 4, (3,)),
        ("1-9:4,20", 9, (1, 5, 9, 20)),
        ("[2,4-5]%7", 9, (2, 4, 5)),
        ("1,3,5,7,1...", 9, (1, 3, 5, 7)),
        ("0-4000000", 2, (0, 1)),
        ("0-3", 0, ()),
    ],
)
def test_the_lowest_tasks_of_a_list_are_found(
    text: str, count: int, tasks: tuple[int, ...]
) -> None:
    assert first_tasks(text, count) == tasks


def test_a_list_of_tasks_that_is_none_is_an_error() -> None:
    with pytest.raises(SlurmParseError, match="ArrayTaskId"):
        first_tasks("1-x", 3)


def record(job_id: int, tasks: str, **given: object) -> JobFacts:
    """A record of array 7: its waiting members, or one of them."""
    values: dict[str, object] = {
        "user": "ann", "uid": 1000, "name": "a", "state": JobState.PENDING,
        "partition": "synergy", "submit_s": 1.0, "held": Hold.ADMIN, "array_job_id": 7,
        "gpu_form": GpuForm.PER_NODE, "gpus_asked": {"": 2},
    }  # fmt: skip
    return JobFacts(job_id=job_id, array_task_id=tasks, **{**values, **given})  # type: ignore[arg-type]


RUNNING = {"state": JobState.RUNNING, "held": Hold.ADMIN}


def test_as_many_members_are_split_off_as_could_run_at_once() -> None:
    plan = plan_arrays([record(7, "0-99")], pool_gpus=16)
    assert plan.split == {7: tuple(range(8))}
    plan = plan_arrays(
        [record(7, "3-99"), *(record(8 + n, str(n)) for n in range(3))], pool_gpus=16
    )
    assert plan.split == {7: (3, 4, 5, 6, 7)}
    full = [record(7, "8-99"), *(record(8 + n, str(n), **RUNNING) for n in range(8))]
    assert plan_arrays(full, pool_gpus=16).split == {}
    # Those that have ended leave their place to others.
    ended = [record(7, "1-99"), record(8, "0", state=JobState.COMPLETED)]
    assert plan_arrays(ended, pool_gpus=2).split == {7: (1,)}


def test_the_limit_of_the_array_bounds_what_is_split_off() -> None:
    plan = plan_arrays([record(7, "0-99%3", array_limit=3)], pool_gpus=1000)
    assert plan.split == {7: (0, 1, 2)}
    assert "members 0-99 of the array wait" in plan.waiting[7].text


def test_a_command_line_stays_short() -> None:
    assert len(plan_arrays([record(7, "0-999")], pool_gpus=10_000).split[7]) == 64


@pytest.mark.parametrize(
    "given",
    [
        {"held": Hold.USER},
        {"held": Hold.NONE, "priority": 5},
        {"dependency": "afterok:3(unfulfilled)"},
    ],
)
def test_nothing_is_split_off_what_is_not_held_or_waits_for_another_job(
    given: dict[str, object],
) -> None:
    assert plan_arrays([record(7, "0-9", **given)], pool_gpus=16).split == {}


def test_members_that_depend_on_their_likes_are_split_off() -> None:
    waits = record(7, "0-9", dependency="aftercorr:3_*(unfulfilled)")
    assert plan_arrays([waits], pool_gpus=4).split == {7: (0, 1)}


def test_the_limit_holds_back_the_highest_tasks() -> None:
    jobs = [
        record(7, "4", array_limit=2),
        record(8, "0", array_limit=2, **RUNNING),
        record(9, "1", array_limit=2, state=JobState.COMPLETED),
        record(10, "3", array_limit=2),
        record(11, "2", array_limit=2),
    ]
    plan = plan_arrays(jobs, pool_gpus=16)
    assert set(plan.waiting) == {7, 10}
    assert "2 members of 7 at once" in plan.waiting[10].text
    # A released member may run at any moment.
    released = [
        record(8, "0", array_limit=1, held=Hold.NONE, priority=9),
        record(9, "1", array_limit=1),
    ]
    assert set(plan_arrays(released, pool_gpus=16).waiting) == {9}


def test_the_last_member_has_a_name_of_its_own_in_commands() -> None:
    assert record(7, "0-4").address == "7"
    assert record(9, "3").address == "9"
    assert record(7, "4").address == "7_4"


def test_members_are_started_within_the_limit_and_to_the_last(make_world: MakeWorld) -> None:
    world = make_world(FakeSlurm(nodes=1))
    slurm = world.slurm
    array = slurm.submit(gpus=2, array_job_id=1, array_task_id="0,1,2,3,4", array_limit=2)
    assert world.seen(array).blocked is not None
    done: set[int] = set()
    for _ in range(30):
        world.step()
        running = {job for job, facts in slurm.jobs.items() if facts.state is JobState.RUNNING}
        assert len(running) <= 2
        if running:
            done.add(min(running))
            slurm.finish(min(running))
        if len(done) == 5:
            break
    assert len(done) == 5
    assert {facts.state for facts in slurm.jobs.values()} == {JobState.COMPLETED}
    assert {facts.array_task_id for facts in slurm.jobs.values()} == set("01234")


def test_members_carry_the_hints_and_the_request_of_their_array(make_world: MakeWorld) -> None:
    world = make_world(FakeSlurm(nodes=1))
    comment = "synergy:profile=resnet18-imagenet"
    world.slurm.submit(gpus=4, array_job_id=1, array_task_id="0,1,2", comment=comment)
    for _ in range(3):
        world.step()
    member = world.seen(2)
    assert (member.job.array, member.job.gpus, member.phase) == ("1_0", 4, JobPhase.RUNNING)
    assert member.profile_key == "resnet18-imagenet"


def test_an_array_that_cannot_be_split_is_told_and_disturbs_nobody(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world = make_world(FakeSlurm(nodes=1))
    world.slurm.submit(gpus=2, array_job_id=1, array_task_id="0,1,2", held=Hold.ADMIN)
    world.slurm.break_at[len(world.slurm.calls) + 1] = SlurmCommandError(
        ("scontrol",), 1, "no", kind="other"
    )
    world.cluster.tick()
    assert "array 1: " in caplog.text
    other = world.slurm.submit(gpus=2)
    world.step()
    assert world.slurm.jobs[other].state is JobState.RUNNING
