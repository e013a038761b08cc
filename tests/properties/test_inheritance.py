"""What a round takes over from the one before it changes no decision."""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest.mock import patch

from hypothesis import event, given, settings
from hypothesis import strategies as st
from promises import telling
from strategies import RIVALS, snapshots

from slurm_synergy.core.decide import check_plan, decide, reads_progress
from slurm_synergy.core.model import JobPhase, JobStatus, Snapshot
from slurm_synergy.core.packing import Requests, pack_gpus
from slurm_synergy.core.snapshot import inherit
from slurm_synergy.mechanisms import MECHANISMS, tune
from slurm_synergy.policies import POLICIES
from slurm_synergy.reconcile import reconcile
from slurm_synergy.round import Known, build_snapshot
from slurm_synergy.simulator.cluster import Costs, SimulatedCluster, SimulatedRecords, World
from slurm_synergy.simulator.generate import generate
from slurm_synergy.simulator.pool import make_nodes
from slurm_synergy.simulator.workload import make_workload

PAIRS = list(itertools.product(sorted(set(POLICIES) - RIVALS), sorted(set(MECHANISMS) - {"opt"})))
RIVAL_PAIRS = [(policy, "proportional") for policy in sorted(RIVALS)]


@st.composite
def histories(draw: st.DrawFn) -> list[Snapshot]:
    """Snapshots of the same nodes, with jobs that come, go, progress and change their state.

    Mostly all jobs wait, as in the reference semantics of the simulator. A job of which nothing has
    changed is the very same object.
    """
    first = draw(snapshots())
    waiting = [_waiting(status) for status in first.jobs]
    found = []
    for number in range(draw(st.integers(2, 4))):
        jobs: list[JobStatus] = []
        for status, idle in zip(first.jobs, waiting, strict=True):
            kind = draw(st.sampled_from(["same", "same", "same", "gone", "further", "running"]))
            if kind == "further":
                jobs.append(replace(idle, done_samples=idle.done_samples + 100.0 * number))
            elif kind != "gone":
                jobs.append(status if kind == "running" else idle)
        usable = draw(st.integers(0, 4)) > 0
        nodes = first.nodes if usable else first.nodes[1:]
        if not nodes or any(status.lease is not None for status in jobs):
            nodes = first.nodes
        found.append(replace(first, round=number, jobs=tuple(jobs), nodes=nodes))
    return found


def _waiting(status: JobStatus) -> JobStatus:
    return replace(status, phase=JobPhase.PENDING, lease=None)


@settings(max_examples=12)
@given(history=histories())
def test_an_inherited_snapshot_is_decided_like_a_fresh_one(history: list[Snapshot]) -> None:
    for policy, mechanism in PAIRS:
        with telling(policy, mechanism):
            _assert_decided_alike(policy, mechanism, history)


@settings(max_examples=12)
@given(history=histories())
def test_rivals_decide_an_inherited_snapshot_like_a_fresh_one(history: list[Snapshot]) -> None:
    for policy, mechanism in RIVAL_PAIRS:
        with telling(policy, mechanism):
            _assert_decided_alike(policy, mechanism, history)


def _assert_decided_alike(policy: str, mechanism: str, history: list[Snapshot]) -> None:
    chosen = POLICIES[policy], MECHANISMS[mechanism]
    earlier: Snapshot | None = None
    for shown in history:
        # What is taken over is kept in the snapshot: nobody else's is looked at here.
        snapshot, fresh = replace(shown), replace(shown)
        if earlier is not None:
            inherit(snapshot, earlier)
            event(f"same nodes: {snapshot.of_nodes is earlier.of_nodes}")
        plan = decide(snapshot, *chosen)
        assert plan == decide(fresh, *chosen)
        check_plan(snapshot, plan)
        check_plan(fresh, plan)
        earlier = snapshot


@settings(max_examples=40)
@given(snapshot=snapshots())
def test_a_packing_that_follows_from_the_walk_is_that_made_anew(snapshot: Snapshot) -> None:
    decision = POLICIES["fifo"].choose(snapshot)
    requests = Requests.of_snapshot(snapshot)
    granted = requests.of_grants(decision.grants)
    assert [request.job_id for request in granted] == [one.job_id for one in decision.grants]
    event(f"some stay: {any(request.held for request in granted)}")
    layouts = requests.layouts(granted)
    assert requests.pack(granted) == pack_gpus(requests.pool, granted)
    assert layouts == [requests.pack(granted)[request.job_id] for request in granted]


@settings(max_examples=40)
@given(snapshot=snapshots())
def test_jobs_that_stay_get_the_same_in_columns_as_one_by_one(snapshot: Snapshot) -> None:
    chosen = POLICIES["las"], MECHANISMS["tune"]
    with patch.object(tune, "_place_beside", wraps=tune._place_beside) as beside:
        plan = decide(snapshot, *chosen)
    event(f"in columns: {beside.called}")
    with patch.object(tune, "_place_beside", return_value=None):
        assert decide(replace(snapshot), *chosen) == plan


@settings(max_examples=40)
@given(moves=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), max_size=30))
def test_statuses_that_are_taken_over_are_those_that_would_be_made(
    moves: list[tuple[int, int]],
) -> None:
    nodes = tuple(make_nodes(name="n", count=2, gpu_type="v100", gpus=4, cpus=12, mem_gib=250))
    coming = list(make_workload(generate("philly-derived:load=9,jobs=8,seed=3", 3), nodes))
    world, known = World(nodes=nodes, costs=Costs()), Known()
    cluster, records = SimulatedCluster(world), SimulatedRecords(world)
    for kind, which in moves:
        _change(world, coming, kind, which)
        observation = cluster.observe()
        if which == 7:  # one that the taker never sees: the next news are not all that is new
            observation = cluster.observe()
        snapshots = [
            build_snapshot(
                observation,
                records.read(),
                round_number=1,
                now_s=world.now_s,
                round_s=300.0,
                profile_of=records.profile,
                known=taken,
            )
            for taken in (known, None)
        ]
        assert snapshots[0] == snapshots[1]


@settings(max_examples=15)
@given(
    moves=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 30)), min_size=3, max_size=14),
    gpus=st.sampled_from(["single", "philly"]),
    mixed=st.booleans(),
)
def test_a_round_that_goes_by_changes_is_the_round_made_anew(
    moves: list[tuple[int, int]], gpus: str, mixed: bool
) -> None:
    """Mostly nobody holds anything: who comes, goes or has got on is all that is new."""
    nodes = [
        *make_nodes(name="n", count=2, gpu_type="v100", gpus=4, cpus=12, mem_gib=250),
        *make_nodes(name="o", count=1, gpu_type="v100", gpus=2, cpus=12, mem_gib=100),
    ][: 3 if mixed else 2]
    coming = list(make_workload(generate(f"philly-derived:load=9,jobs=30,gpus={gpus},seed=3", 3),
                                make_nodes(name="n", count=8, gpu_type="v100", gpus=4, cpus=12,
                                           mem_gib=250)))  # fmt: skip
    world, known = World(nodes=tuple(nodes), costs=Costs()), Known()
    cluster, records = SimulatedCluster(world), SimulatedRecords(world)
    for kind, which in moves:
        for _ in range(which % 4 + 1 if kind > 4 else 1):
            _change(world, coming, 0 if kind > 4 else kind, which)
        if kind == 4 and world.jobs:
            world.complete(list(world.jobs.values())[which % len(world.jobs)])
        observation = cluster.observe()
        made, anew = [
            build_snapshot(
                observation,
                records.read(),
                round_number=1,
                now_s=world.now_s,
                round_s=300.0,
                profile_of=records.profile,
                known=taken,
            )
            for taken in (known, None)
        ]
        for mechanism in ("proportional", "greedy", "tune"):
            chosen = POLICIES["fifo"], MECHANISMS[mechanism]
            plan = decide(made, *chosen)
            assert plan == decide(anew, *chosen)
            assert list(plan.waiting) == sorted(plan.waiting)
            check_plan(made, plan)
            check_plan(anew, plan)
            free = observation.free
            assert reconcile(made, plan, free) == reconcile(anew, plan, free)
        event(f"somebody holds something: {bool(world.held)}")


INDIFFERENT = [
    pair
    for pair in [*PAIRS, *RIVAL_PAIRS]
    if not reads_progress(POLICIES[pair[0]], MECHANISMS[pair[1]])
]


def test_first_in_first_out_does_not_ask_how_far_jobs_are() -> None:
    assert ("fifo", "proportional") in INDIFFERENT
    assert {policy for policy, _ in INDIFFERENT} == {"fifo"}


@settings(max_examples=20)
@given(snapshot=snapshots(), amounts=st.lists(st.floats(0.0, 1e9), min_size=1, max_size=8))
def test_who_does_not_read_progress_decides_the_same_whatever_it_is(
    snapshot: Snapshot, amounts: list[float]
) -> None:
    more = itertools.cycle(amounts)
    idle = [_waiting(status) for status in snapshot.jobs]
    other = [
        replace(
            status,
            done_samples=next(more),
            attained_service_gpu_s=next(more),
            held_s={"v100": next(more)},
            restarts=int(next(more)),
        )
        for status in idle
    ]
    for policy, mechanism in INDIFFERENT:
        with telling(policy, mechanism):
            plans = [
                decide(replace(snapshot, jobs=tuple(jobs)), POLICIES[policy], MECHANISMS[mechanism])
                for jobs in (idle, other)
            ]
            assert plans[0] == plans[1]


def _change(world: World, coming: list, kind: int, which: int) -> None:  # type: ignore[type-arg]
    """One event of a simulated world: an arrival, a start, an end of a lease, of a job, time."""
    if kind == 0 and coming:
        world.arrive(coming.pop())
    waiting = [one for one in world.jobs.values() if one.placement is None]
    if kind == 1 and waiting and world.free_gpus:
        one = waiting[which % len(waiting)]
        plan = decide(_alone(world, one.spec), POLICIES["fifo"], MECHANISMS["proportional"])
        placement = plan.placements[0]
        free = world.free()[placement.nodes[0]]
        if placement.gpus <= free.gpus:
            world.start(one, placement)
    held = list(world.held.values())
    if kind == 2 and held:
        world.end_lease(held[which % len(held)])
    if kind == 3 and held:
        world.complete(held[which % len(held)])
    if kind == 4 and held:
        world.release(held[which % len(held)])
    if kind == 5:
        world.advance(world.now_s + 100.0 * which)


def _alone(world: World, spec) -> Snapshot:  # type: ignore[no-untyped-def]
    return Snapshot(
        round=1,
        now_s=world.now_s,
        round_s=300.0,
        nodes=world.nodes,
        jobs=(JobStatus(job=spec.job, profile=spec.belief),),
    )
