"""The controller's reservation: its size, its owner, its end, and others that lie ahead."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from fake_slurm import FakeSlurm
from slurm_world import MakeWorld, World, make_world, world

from slurm_synergy.cluster import Start
from slurm_synergy.core.model import JobStatus, ReasonCode
from slurm_synergy.errors import ClusterError, SlurmCommandError
from slurm_synergy.slurm.facts import JobState, ReservationFacts
from slurm_synergy.slurm.maintenance import ahead_of, end_s
from slurm_synergy.slurm.sizing import Demand, JobNeed, NodeNeed, needed_nodes

__all__ = ["make_world", "world"]  # fixtures

NAME = "synergy"


def reserved(one: World) -> tuple[str, ...]:
    found = one.slurm.reservations.get(NAME)
    return tuple(sorted(found.nodes)) if found else ()


def node(name: str, *, held: int = 0, busy: bool = False, usable: bool = True) -> NodeNeed:
    return NodeNeed(
        name=name,
        gpu_type="a100" if name.startswith("a") else "v100",
        gpus=8,
        held=held,
        ours=held > 0,
        busy=busy,
        usable=usable,
    )


def need(pieces: int, gpus: int, *types: str, apart: bool = True) -> JobNeed:
    return JobNeed(pieces=pieces, gpus=gpus, apart=apart, gpu_types=types)


@pytest.mark.parametrize(
    ("jobs", "expected"),
    [
        ([], "v1"),
        ([need(1, 4)], "v1"),
        ([need(1, 4), need(1, 4)], "v1 v2"),
        ([need(1, 8, "a100")], "a1 v1"),
        ([need(2, 4)], "v1 v2"),
        ([need(3, 8)], "v1"),  # does not fit: nothing is taken for it
        ([need(12, 1, apart=False)], "v1 v2"),
    ],
)
def test_nodes_are_taken_for_what_waits_and_those_in_use_come_first(
    jobs: list[JobNeed], expected: str
) -> None:
    nodes = (node("a1"), node("v1", held=4), node("v2"), node("v3", busy=True), node("v4"))
    demand = Demand(nodes=nodes, jobs=tuple(jobs), least=0, most=None)
    found = needed_nodes(demand, reserved={"v1", "v2"}, taken={"v4"})
    assert found == frozenset(expected.split())


def test_bounds_hold_but_a_node_in_use_is_never_given_up() -> None:
    nodes = (node("v1"), node("v2", held=8), node("v3", held=8), node("v4"))
    jobs = (need(1, 8), need(1, 8))
    for least, most, expected in (
        (0, 2, {"v2", "v3"}),
        (0, 1, {"v2", "v3"}),
        (None, 1, {"v2", "v3"}),
        (0, 3, {"v1", "v2", "v3"}),
        (None, None, {"v1", "v2", "v3", "v4"}),
    ):
        demand = Demand(nodes=nodes, jobs=jobs, least=least, most=most)
        assert needed_nodes(demand, reserved={"v2", "v3"}, taken=()) == expected
    idle = Demand(nodes=nodes, jobs=(), least=3, most=None)
    assert needed_nodes(idle, reserved={"v2", "v3", "v4"}, taken=()) == {"v2", "v3", "v4"}


def test_it_grows_with_the_queue_and_shrinks_when_nodes_have_been_idle(
    make_world: MakeWorld,
) -> None:
    one = make_world(FakeSlurm(nodes=3), pool={"reserve_least": 0, "reserve_idle_s": 60.0})
    assert reserved(one) == ()
    jobs = [one.slurm.submit(gpus=8), one.slurm.submit(gpus=8)]
    one.step()
    assert len(reserved(one)) == 2
    assert all(one.slurm.jobs[job_id].running for job_id in jobs)
    one.slurm.finish(jobs[0])
    one.step()
    assert len(reserved(one)) == 2
    one.clock.advance(61.0)
    one.step()
    assert reserved(one) == one.slurm.jobs[jobs[1]].node_list
    one.slurm.finish(jobs[1])
    one.step()
    one.clock.advance(61.0)
    one.step()
    assert reserved(one) == ()


def test_draining_gives_back_what_no_running_job_needs(make_world: MakeWorld) -> None:
    one = make_world(FakeSlurm(nodes=3), pool={"reserve_least": 2, "reserve_idle_s": 0.0})
    running = one.slurm.submit(gpus=8)
    one.step()
    one.slurm.submit(gpus=8)
    assert one.ledger is not None
    one.ledger.set_draining(True)
    one.step()
    assert reserved(one) == one.slurm.jobs[running].node_list


def test_one_of_somebody_else_is_left_alone(make_world: MakeWorld) -> None:
    slurm = FakeSlurm()
    form = frozenset({"IGNORE_JOBS", "SPEC_NODES"})
    ours = ReservationFacts(name=NAME, nodes=("v100-1",), users=("root",), flags=form, start_s=5.0)
    for theirs in (
        replace(ours, flags=frozenset({"SPEC_NODES"})),
        replace(ours, users=("ann",)),
        replace(ours, nodes=("v100-1", "other-9")),
    ):
        slurm.reservations[NAME] = theirs
        with pytest.raises(ClusterError, match="was not made by this controller"):
            make_world(slurm)
        assert slurm.reservations[NAME] == theirs
    # Another controller's jobs are in it.
    slurm.reservations[NAME] = ours
    slurm.submit(partition="blue", reservation=NAME)
    with pytest.raises(ClusterError, match="controller_name"):
        make_world(slurm)
    slurm.jobs.clear()
    one = make_world(slurm)  # of the form of ours, and we know of none: our state was lost
    one.boot()
    # Deleted, and made anew by somebody else.
    slurm.reservations[NAME] = replace(slurm.reservations[NAME], start_s=77.0)
    with pytest.raises(ClusterError, match="was not made by this controller"):
        one.boot()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_controller_that_died_while_it_made_it_knows_it_again(
    make_world: MakeWorld, after: bool
) -> None:
    one = make_world()
    one.slurm.reservations.clear()
    one.slurm.after = after
    one.slurm.break_at = {len(one.slurm.calls) + 1: SlurmCommandError(("s",), 1, "gone")}
    with pytest.raises(ClusterError):
        one.cluster.prepare()
    one.slurm.break_at = {}
    one.boot()
    assert reserved(one) == ("v100-1", "v100-2")


def test_its_end_is_put_off_long_before_it_comes(make_world: MakeWorld) -> None:
    one = make_world(pool={"reserve_window_s": 3600.0})
    one.slurm.now_s = one.clock.now_s
    first_s = one.slurm.reservations[NAME].end_s
    one.cluster.prepare()
    assert one.slurm.reservations[NAME].end_s == first_s
    one.clock.advance(1900.0)
    one.cluster.prepare()
    assert one.slurm.reservations[NAME].end_s == one.clock.now_s() + 3600.0
    # The controller was away, it ended, and Slurm forgot it.
    del one.slurm.reservations[NAME]
    one.cluster.prepare()
    assert reserved(one) == ("v100-1", "v100-2")


def test_a_refused_overlap_costs_only_the_nodes_that_overlap(make_world: MakeWorld) -> None:
    slurm = FakeSlurm(nodes=3)
    one = make_world(slurm)
    slurm.reservations.clear()
    maint = ReservationFacts(name="m", nodes=("v100-2",), flags=frozenset({"MAINT"}), start_s=9e9)
    slurm.reservations["m"] = maint
    refused = SlurmCommandError(("s",), 1, "overlaps with another reservation", kind="overlap")
    slurm.break_at = {len(slurm.calls) + 1: refused}
    one.cluster.prepare()
    assert reserved(one) == ("v100-1", "v100-3")


# Reservations of others ahead


def maintenance(slurm: FakeSlurm, *nodes: str, start_s: float, end_s: float = 9e9) -> None:
    slurm.reservations["maint"] = ReservationFacts(
        name="maint",
        nodes=nodes,
        start_s=start_s,
        end_s=end_s,
        flags=frozenset({"MAINT", "IGNORE_JOBS", "SPEC_NODES"}),
    )


def test_the_end_of_a_job_counts_what_earlier_runs_have_used_up() -> None:
    assert end_s(1000.0, None, 0.0) == math.inf
    assert end_s(1000.0, 3600.0, 0.0) == 1000.0 + 3600.0 + 60.0
    assert end_s(1000.0, 3600.0, 3000.5) == 1000.0 + 600.0 + 60.0
    assert end_s(1000.0, 3600.0, 9999.0) == 1000.0 + 60.0 + 60.0


def test_of_several_reservations_the_first_that_is_not_over_counts() -> None:
    def one(name: str, start_s: float, end_s: float) -> ReservationFacts:
        return ReservationFacts(name=name, nodes=("n",), start_s=start_s, end_s=end_s)

    others = (one("late", 900, 999), one("soon", 500, 600), one("over", 1, 2))
    assert ahead_of(others, 100.0)["n"].name == "soon"


def test_no_job_starts_that_would_reach_into_maintenance_and_it_is_told_why(
    make_world: MakeWorld,
) -> None:
    one = make_world()
    maintenance(one.slurm, "v100-1", "v100-2", start_s=1000.0 + 3600.0)
    one.cluster.prepare()
    short = one.slurm.submit(gpus=8, time_limit_s=1800.0)
    late = one.slurm.submit(gpus=8, time_limit_s=7200.0)
    endless = one.slurm.submit(gpus=8)
    one.step()
    assert one.slurm.jobs[short].running
    for job_id in (late, endless):
        assert one.slurm.jobs[job_id].priority == 0
        blocked = one.seen(job_id).blocked
        assert blocked is not None
        assert blocked.code is ReasonCode.LIMITED
        assert "would not end before reservation 'maint'" in blocked.text
        assert "--time=58 or less" in blocked.text
    del one.slurm.reservations["maint"]
    one.cluster.prepare()
    one.step()
    assert one.slurm.jobs[late].running


def test_long_jobs_get_the_nodes_without_maintenance_and_short_ones_the_others(
    make_world: MakeWorld,
) -> None:
    one = make_world(FakeSlurm(nodes=3))
    maintenance(one.slurm, "v100-1", start_s=1000.0 + 3600.0)
    one.cluster.prepare()
    long_ones = [one.slurm.submit(gpus=8) for _ in range(3)]
    short = one.slurm.submit(gpus=8, time_limit_s=600.0)
    for _ in range(3):
        one.step()
        one.clock.advance(15.0)
    on = {job_id: one.slurm.jobs[job_id].node_list for job_id in (*long_ones, short)}
    assert on[short] == ("v100-1",)
    assert {on[long_ones[0]], on[long_ones[1]]} == {("v100-2",), ("v100-3",)}
    assert one.slurm.jobs[long_ones[2]].state is JobState.PENDING
    # Nothing may start anywhere: the turn does not change, and no round follows from it.
    before = one.cluster.tick().nodes
    one.clock.advance(60.0)
    assert one.cluster.tick().nodes == before


def test_a_job_that_was_stopped_to_be_moved_does_not_start_ahead_of_maintenance(
    world: World,
) -> None:
    job_id = world.slurm.submit(gpus=8)
    world.cluster.tick()
    (start,) = [one.action for one in world.round().outcomes if isinstance(one.action, Start)]
    world.slurm.hold(job_id)
    maintenance(world.slurm, *start.placement.nodes, start_s=2000.0)
    world.cluster.prepare()
    world.cluster.tick()
    assert world.ledger is not None
    status = JobStatus(job=world.seen(job_id).job)
    outcome = world.cluster.apply(start, status)
    assert not outcome.done
    assert outcome.reason is not None
    assert "'maint'" in outcome.reason.text
    assert world.slurm.jobs[job_id].priority == 0
