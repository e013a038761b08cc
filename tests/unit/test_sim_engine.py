"""Simulated time: what jobs do between rounds, and what a simulation comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from slurm_synergy.cluster import Start
from slurm_synergy.core.model import Node, Placement, Profile
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import ClusterError, ConfigError, ModelError
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.simulator.cluster import (
    Costs,
    SimulatedCluster,
    SimulatedRecords,
    World,
)
from slurm_synergy.simulator.engine import Outline, Reordering, play, play_rounds
from slurm_synergy.simulator.floors import Floors
from slurm_synergy.simulator.generate import generate
from slurm_synergy.simulator.in_step import InStep
from slurm_synergy.simulator.metrics import job_results, percentile
from slurm_synergy.simulator.pool import make_nodes
from slurm_synergy.simulator.study import Semantics, Study, StudyResult, run_study
from slurm_synergy.simulator.traces import Trace, TraceJob
from slurm_synergy.simulator.workload import make_workload


def pool(count: int = 1, gpus: int = 8) -> tuple[Node, ...]:
    """Nodes of the paper's shape, or smaller ones with the same ratios."""
    return tuple(
        make_nodes(
            name="n", count=count, gpu_type="v100", gpus=gpus, cpus=3 * gpus, mem_gib=62.5 * gpus
        )
    )


def row(
    job_id: int, arrival_s: float, hours: float, model: str = "gnmt", gpus: int = 1
) -> TraceJob:
    return TraceJob(
        job_id=job_id, arrival_s=arrival_s, gpus=gpus, model=model, duration_s=hours * 3600
    )


def run(
    rows: Sequence[TraceJob],
    nodes: tuple[Node, ...],
    policy: str = "fifo",
    mechanism: str = "proportional",
    **more: object,
) -> StudyResult:
    study = Study(
        nodes=nodes,
        trace=Trace(jobs=tuple(rows)),
        policy=POLICIES[policy],
        mechanism=MECHANISMS[mechanism],
    )
    return run_study(replace(study, **more))  # type: ignore[arg-type]


def completions(result: StudyResult) -> list[float]:
    return [one.completed_s for one in result.jobs]


def test_jobs_that_are_started_together_start_as_one_by_one() -> None:
    def place(job_id: int, *names: str, gpus: int = 2) -> Start:
        share = Resources(gpus=gpus, cpus=3 * gpus, mem_mib=1024)
        shares = tuple((name, share) for name in names)
        return Start(
            job_id=job_id, placement=Placement(job_id=job_id, gpu_type="v100", shares=shares)
        )

    nodes = pool(count=2, gpus=4)
    jobs = make_workload(Trace(jobs=tuple(row(number, 0.0, 1.0) for number in range(1, 6))), nodes)
    n1, n2 = (node.name for node in nodes)
    again, wide, moved = place(1, n1), place(2, n1, n2, gpus=1), place(3, n2)
    many, few = place(4, n1, gpus=4), place(5, n2, gpus=1)
    worlds: list[World] = []
    for together in (True, False):
        world = (InStep if together else World)(nodes=nodes, costs=Costs())
        cluster = SimulatedCluster(world)
        for one in jobs:
            world.arrive(one)
        for starts in ([again, wide, place(3, n1, gpus=1)], [again, wide, moved, many, few]):
            if together:
                outcomes = cluster.start_all(starts, {})
                expected = [action is not many for action in starts]
                assert [one.action for one in outcomes] == starts
                assert [one.done for one in outcomes] == expected
            else:
                for action in starts:
                    if action is many:
                        with pytest.raises(ClusterError, match="not free"):
                            world.start(world.jobs[action.job_id], action.placement)
                    else:
                        world.start(world.jobs[action.job_id], action.placement)
            if starts[-1] is not few:
                _end_leases(world)
        worlds.append(world)
    ours, plain = worlds
    assert ours.usage == plain.usage
    assert ours.usage.gpus == 7
    assert ours.free() == plain.free()
    assert list(ours.held) == list(plain.held) == [1, 2, 3, 5]
    for world in worlds:
        _end_leases(world)
    assert isinstance(ours, InStep)
    ours.rest()
    assert [ours.jobs[number].restarts for number in (1, 2, 3, 5)] == [0, 0, 1, 0]
    accounts = [
        [(one.done, one.gpu_s, one.held_by_type_s, one.restarts) for one in world.jobs.values()]
        for world in worlds
    ]
    assert accounts[0] == accounts[1]
    assert [one.placement for one in ours.jobs.values()] == [None] * 5


def test_a_job_that_moves_with_its_shares_counts_on_and_is_as_one_that_began_anew() -> None:
    nodes = pool(count=2, gpus=4)
    jobs = make_workload(Trace(jobs=(row(1, 0.0, 1.0), row(2, 0.0, 1.0))), nodes)
    names = [node.name for node in nodes]

    def place(job_id: int, at: int, gpus: int) -> Start:
        share = nodes[at].proportional(gpus)
        there = Placement(job_id=job_id, gpu_type="v100", shares=((names[at], share),))
        return Start(job_id=job_id, placement=there)

    ours, plain = InStep(nodes=nodes, costs=Costs()), World(nodes=nodes, costs=Costs())
    cluster, too_many = SimulatedCluster(ours), place(2, 0, 4)
    for one in jobs:
        ours.arrive(one)
        plain.arrive(one)
    rounds = [[place(1, 0, 1)], [place(1, 1, 1)], [place(1, 0, 1), too_many], [place(1, 0, 2)]]
    fresh = []
    for starts in rounds:
        done = [one.action for one in cluster.start_all(starts, {}) if one.done]
        assert done == [action for action in starts if action is not too_many]
        fresh.append([one.job_id for one in ours.begun()])
        plain.start(plain.jobs[1], starts[0].placement)
        for world in (ours, plain):
            assert world.held.keys() == {1}
            _end_leases(world)
    # It counts on where it moved with the others, and anew where that could not be done at once.
    assert fresh == [[1], [], [1], [1]]
    ours.rest()
    accounts = [
        [(one.done, one.gpu_s, one.held_s, one.held_by_type_s, one.restarts, one.placement)]
        for world in (ours, plain)
        for one in world.jobs.values()
    ]
    assert accounts[:2] == accounts[2:]
    assert ours.jobs[1].restarts == 3
    assert ours.jobs[1].done > 0
    assert ours.usage == plain.usage
    assert ours.free() == plain.free()


def _end_leases(world: World) -> None:
    """A hundred seconds later; in a world that goes by rounds these are one."""
    if isinstance(world, InStep):
        world.settle()
        for one in world.begun():
            world.count_from_now(one, one.rate * 100.0)
        world.advance(world.now_s + 100.0)
        world.end_round(1)
        return
    world.advance(world.now_s + 100.0)
    for one in list(world.held.values()):
        world.end_lease(one)


def test_exact_jobs_end_to_the_second_and_the_next_one_follows_after_the_delay() -> None:
    result = run([row(1, 10.0, 1.0), row(2, 20.0, 0.5)], pool(gpus=1), event_delay_s=2.0)
    assert completions(result) == pytest.approx([10 + 3600, 10 + 3600 + 2 + 1800])
    assert result.jobs[1].queue_s == pytest.approx(3592)


def test_with_reference_semantics_jobs_end_with_a_round() -> None:
    rows = [row(1, 0.0, 1.01), row(2, 20.0, 0.5)]
    result = run(rows, pool(gpus=1), semantics=Semantics.REFERENCE, event_delay_s=0.0)
    assert completions(result) == [13 * 300.0, 19 * 300.0]


def test_reference_progress_is_in_whole_iterations() -> None:
    # deepspeech takes 0.757 s an iteration: 396 fit into a round, 594 into two fit only without it.
    rows = [TraceJob(job_id=1, arrival_s=0.0, gpus=1, model="deepspeech", iterations=793)]
    result = run(rows, pool(gpus=1), semantics=Semantics.REFERENCE, event_delay_s=0.0)
    assert completions(result) == [900.0]
    assert 793 * 0.757 < 601


def test_tune_speeds_up_a_hungry_job_beside_a_frugal_one() -> None:
    rows = [row(1, 0.0, 2.0, "resnet18"), row(2, 0.0, 3.0), row(3, 0.0, 3.0), row(4, 0.0, 3.0)]
    nodes = pool(gpus=4)
    slow, fast = run(rows, nodes), run(rows, nodes, mechanism="tune")
    assert slow.jobs[0].speedup == pytest.approx(1.0)
    assert fast.jobs[0].speedup == pytest.approx(2.4)
    assert [one.jct_s for one in fast.jobs[1:]] == [one.jct_s for one in slow.jobs[1:]]


def test_srtf_stops_the_longer_job_and_costs_it_checkpoint_and_restart() -> None:
    rows = [row(1, 0.0, 10.0), row(2, 1000.0, 1.0)]
    costs = Costs(restart_s=30.0, checkpoint_s=10.0)
    result = run(rows, pool(gpus=1), "srtf", costs=costs, event_delay_s=1.0)
    # Told to stop at 1001, out at 1011, the other runs from 1012.
    assert completions(result)[1] == pytest.approx(1012 + 3600)
    resumed_s = 1012 + 3600 + 1 + 30
    assert completions(result)[0] == pytest.approx(resumed_s + 36_000 - 1001)
    assert [one.restarts for one in result.jobs] == [1, 0]


def test_in_the_ideal_world_a_restart_is_free_but_counted() -> None:
    rows = [row(1, 0.0, 10.0), row(2, 1000.0, 1.0)]
    result = run(rows, pool(gpus=1), "srtf", event_delay_s=0.0)
    assert completions(result) == pytest.approx([39_600.0, 4600.0])
    assert result.summary["restarts_per_job"] == 0.5


def test_profiling_delays_the_first_start() -> None:
    result = run([row(1, 5.0, 1.0)], pool(), costs=Costs(profiling_s=60.0), event_delay_s=0.0)
    (only,) = result.jobs
    assert (only.started_s, only.jct_s) == pytest.approx((65.0, 3660.0))


@pytest.mark.parametrize("mechanism", ["greedy", "proportional", "tetris", "tune"])
@pytest.mark.parametrize("policy", ["fifo", "srtf"])
@pytest.mark.parametrize("way", [play, play_rounds])
def test_rounds_that_are_left_out_would_not_have_changed_anything(
    policy: str, mechanism: str, way: object
) -> None:
    nodes = pool(2, 4)
    jobs = make_workload(
        generate("philly-derived:load=3,jobs=25,gpus=philly,seed=5", 0), pool(16), restart_s=40.0
    )
    jobs = tuple(one for one in jobs if one.job.gpus <= 8)
    outline = Outline(
        nodes=nodes,
        jobs=jobs,
        policy=POLICIES[policy],
        mechanism=MECHANISMS[mechanism],
        round_s=1800.0,
        event_delay_s=1.0,
    )
    few = Reordering.NEVER if policy == "fifo" else Reordering.BY_EVENTS
    assert callable(way)
    every, some = way(outline), way(replace(outline, reordering=few))
    assert len(some.round_ms) < len(every.round_ms)
    ends = [[one.completed_s for one in job_results(played)] for played in (every, some)]
    assert ends[0] == pytest.approx(ends[1])


def test_results_repeat() -> None:
    trace = generate("philly-derived:load=6,jobs=30,seed=2", 0)
    results = [
        run(trace.jobs, pool(2), "srtf", "tune", profile_error=0.2, seed=4) for _ in range(2)
    ]
    assert results[0].jobs == results[1].jobs
    assert {**results[0].summary} == {**results[1].summary}


def test_beliefs_may_be_wrong_without_changing_what_a_job_really_is() -> None:
    rows = [row(1, 0.0, 2.0, "resnet18"), row(2, 0.0, 2.0)]
    right, wrong = run(rows, pool()), run(rows, pool(), profile_error=0.5, seed=9)
    assert completions(right) == completions(wrong)
    jobs = make_workload(Trace(jobs=tuple(rows)), pool(), profile_error=0.5, seed=9)
    assert all(one.truth != one.belief for one in jobs)


def test_the_measured_jobs_end_the_simulation() -> None:
    rows = [row(1, 0.0, 1.0), row(2, 0.0, 2.0), row(3, 0.0, 100.0)]
    result = run(rows, pool(), measured=(1, 2))
    assert [one.job_id for one in result.jobs] == [1, 2]
    assert result.played.world.now_s == pytest.approx(7200)
    with pytest.raises(ConfigError, match=r"job 9 is to be measured .* ids from 1 to 3"):
        run(rows, pool(), measured=range(9, 10**15))


def test_the_summary_adds_up() -> None:
    summary = run([row(1, 0.0, 1.0), row(2, 0.0, 2.0)], pool(gpus=4), event_delay_s=0.0).summary
    assert summary["jobs"] == 2
    assert summary["avg_jct_s"] == pytest.approx(5400)
    assert summary["p99_jct_s"] == summary["makespan_s"] == pytest.approx(7200)
    assert summary["gpu_hours_per_job"] == pytest.approx(1.5)
    assert summary["gpu_util"] == pytest.approx(3 / 8)
    assert summary["cpu_util"] == pytest.approx(3 / 8)
    assert summary["mem_util"] == pytest.approx(3 / 8)
    assert summary["contention"] == {"mean": pytest.approx(1.5), "max": 2}
    fair = {"worst": pytest.approx(1.0), "unfair_fraction": 0.0}
    assert summary["ftf"] == {**fair, "pooled": fair}
    assert summary["floor"] == {"judged": 2, "below": 0, "worst": pytest.approx(1.0)}


def test_a_share_with_which_a_job_is_slower_than_with_its_proportional_one_is_counted() -> None:
    nodes = pool()
    (one,) = make_workload(Trace(jobs=(row(1, 0.0, 1.0, "alexnet"),)), nodes)
    floors = Floors(nodes)
    found = []
    for cpus in (3, 24, 1, 2):  # published: 1, 2.94, 0.3 and 0.66 of the speed with three cores
        share = Resources(gpus=1, cpus=cpus, mem_mib=256_000)
        placement = Placement(job_id=1, gpu_type="v100", shares=((nodes[0].name, share),))
        floors.judge(one, placement)
        found.append((floors.judged, floors.below, floors.worst))
    assert found == [
        (1, 0, pytest.approx(1.0)),
        (2, 0, pytest.approx(1.0)),
        (3, 1, pytest.approx(0.3)),
        (4, 2, pytest.approx(0.3)),
    ]


def test_a_job_that_waits_long_is_finished_unfairly() -> None:
    result = run([row(1, 0.0, 10.0), row(2, 0.0, 0.5)], pool(gpus=1), event_delay_s=0.0)
    # Two jobs for nearly all its life: alone on half a GPU it would have taken an hour.
    assert result.jobs[1].ftf == pytest.approx(37_800 / 1800 / (73_800 / 37_800), rel=1e-6)
    assert result.summary["ftf"]["unfair_fraction"] == 0.5


def test_the_percentile_is_an_element() -> None:
    assert percentile(range(100), 0.99) == 99
    assert percentile(range(200), 0.99) == 198
    assert percentile([3.0], 0.99) == 3.0


def test_jobs_that_cannot_run_are_named() -> None:
    with pytest.raises(ConfigError, match="job 7"):
        run([row(7, 0.0, 1.0, gpus=9)], pool())
    with pytest.raises(ConfigError, match="unknown model 'gpt'"):
        run([row(7, 0.0, 1.0, "gpt")], pool())
    slow = TraceJob(job_id=3, arrival_s=0.0, gpus=1, model="resnet18", iterations=5)
    with pytest.raises(ModelError, match="job 3 does not finish an iteration"):
        run([slow], pool(), semantics=Semantics.REFERENCE, round_s=0.5)


def test_without_an_end_in_sight_the_simulation_complains() -> None:
    (job,) = make_workload(Trace(jobs=(row(4, 0.0, 1.0),)), pool())
    unknown = replace(job, belief=Profile(), job=replace(job.job, nodes=2, gpus=2))
    outline = Outline(
        nodes=pool(),
        jobs=(unknown,),
        policy=POLICIES["fifo"],
        mechanism=MECHANISMS["tune"],
        round_s=300.0,
        reordering=Reordering.NEVER,
    )
    with pytest.raises(ModelError, match="1 jobs wait, but are never started"):
        play(outline)
    with pytest.raises(ModelError, match="never started"):
        play_rounds(outline)


def test_the_world_refuses_what_slurm_would_refuse() -> None:
    jobs = make_workload(Trace(jobs=(row(1, 0.0, 1.0), row(2, 0.0, 1.0))), pool(gpus=1))
    world = World(nodes=pool(gpus=1), costs=Costs())
    for one in jobs:
        world.arrive(one)
    cluster, records = SimulatedCluster(world), SimulatedRecords(world)
    share = Resources(gpus=1, cpus=3, mem_mib=64_000)
    where = [Placement(job_id=i, gpu_type="v100", shares=(("n-001", share),)) for i in (1, 2)]
    snapshot_jobs = {one.job.job_id: one for one in cluster.observe().jobs}
    assert sorted(snapshot_jobs) == [1, 2]
    cluster.apply(Start(job_id=1, placement=where[0]), None)  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="is not free on n-001"):
        cluster.apply(Start(job_id=2, placement=where[1]), None)  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="not pending"):
        cluster.apply(Start(job_id=1, placement=where[0]), None)  # type: ignore[arg-type]
    grown = replace(where[0], shares=(("n-001", replace(share, mem_mib=64_001)),))
    with pytest.raises(ClusterError, match="not granted that much memory"):
        world.resize(world.jobs[1], grown)
    assert records.read()[2].lease is None
