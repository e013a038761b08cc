from __future__ import annotations

import pytest
from builders import job, node, pending, placement, profile, res, running, snapshot

from slurm_synergy.cluster import Action, Hold, Renew, Resize, Start, Stop
from slurm_synergy.core.model import (
    Enforcement,
    JobPhase,
    JobStatus,
    Placement,
    Plan,
    Reason,
    ReasonCode,
)
from slurm_synergy.core.resources import Resources
from slurm_synergy.reconcile import Reconciled, reconcile

POOL = [node("v100-1"), node("v100-2")]
ALL_FREE = {"v100-1": res(8, 24, 500_000), "v100-2": res(8, 24, 500_000)}
WAIT = Reason(code=ReasonCode.PREEMPTED, text="jobs ahead of it leave 0")
KNOWN = profile(per_core=100, gpu_rate=1000)


def spot(job_id: int, cpus: int = 12, mem_mib: int = 250_000, node: str = "v100_1") -> Placement:
    return placement(job_id, **{node: res(4, cpus, mem_mib)})


def act(
    jobs: list[JobStatus],
    placements: list[Placement],
    free: dict[str, Resources] | None = None,
    *,
    waiting: dict[int, Reason] | None = None,
    enforcement: Enforcement = Enforcement.SHARED,
) -> Reconciled:
    plan = Plan(
        round=1,
        policy="p",
        mechanism="m",
        placements=tuple(placements),
        waiting=waiting or {},
    )
    shot = snapshot(POOL, jobs, enforcement=enforcement)
    return reconcile(shot, plan, ALL_FREE if free is None else free)


def only(found: Reconciled) -> Action:
    (action,) = found.actions
    return action


def stop_code(action: Action) -> ReasonCode:
    assert isinstance(action, Stop)
    return action.reason.code


def test_an_unchanged_running_job_is_renewed() -> None:
    assert only(act([running(job(1, 4), spot(1))], [spot(1)])) == Renew(job_id=1)


def test_other_cores_on_the_same_gpus_are_a_resize() -> None:
    found = act([running(job(1, 4), spot(1))], [spot(1, cpus=20)])
    assert only(found) == Resize(job_id=1, placement=spot(1, cpus=20))


def test_memory_grows_at_most_to_what_was_granted() -> None:
    run = running(job(1, 4), spot(1, mem_mib=100), granted={"v100-1": res(4, 24, 300)})
    found = act([run], [spot(1, mem_mib=900)])
    assert only(found) == Resize(job_id=1, placement=spot(1, mem_mib=300))


def test_a_resize_that_the_grant_cuts_to_nothing_is_a_renewal() -> None:
    run = running(job(1, 4), spot(1, mem_mib=300))
    assert only(act([run], [spot(1, mem_mib=900)])) == Renew(job_id=1)


def test_other_nodes_mean_a_stop_now() -> None:
    found = act([running(job(1, 4), spot(1))], [spot(1, node="v100_2")])
    assert stop_code(only(found)) is ReasonCode.MOVED


def test_a_running_job_that_waits_is_stopped_with_the_policys_words() -> None:
    action = only(act([running(job(1, 4), spot(1))], [], waiting={1: WAIT}))
    assert stop_code(action) is ReasonCode.PREEMPTED
    assert isinstance(action, Stop) and action.reason.text == WAIT.text


@pytest.mark.parametrize("kind", [{"preemptible": False}, {"wrapped": False}])
def test_a_job_that_cannot_be_stopped_is_renewed_whatever_the_plan_says(kind: dict) -> None:
    run = running(job(1, 4, **kind), spot(1))
    assert only(act([run], [spot(1, node="v100_2")])) == Renew(job_id=1)
    assert only(act([run], [], waiting={1: WAIT})) == Renew(job_id=1)


def test_an_unwrapped_job_is_never_resized() -> None:
    run = running(job(1, 4, wrapped=False, preemptible=False), spot(1))
    assert only(act([run], [spot(1, cpus=4)])) == Renew(job_id=1)


def test_a_pending_job_with_a_place_starts_and_one_without_is_held() -> None:
    found = act([pending(job(1, 4)), pending(job(2, 4))], [spot(1)], waiting={2: WAIT})
    assert found.actions == (Start(job_id=1, placement=spot(1)), Hold(job_id=2))
    assert not found.deferred


def test_a_job_that_is_held_by_us_is_not_held_again_but_told_why_it_cannot_start() -> None:
    both = [pending(job(1, 4), held_by_us=True), pending(job(2, 4), held_by_us=True)]
    busy = {"v100-1": res(3, 24, 500_000)}
    found = act(both, [spot(1)], busy, waiting={2: WAIT})
    assert found.actions == (Hold(job_id=1),)
    assert list(found.deferred) == [1]


@pytest.mark.parametrize("phase", [JobPhase.STARTING, JobPhase.STOPPING, JobPhase.ENDING])
def test_jobs_in_between_are_left_alone(phase: JobPhase) -> None:
    assert act([running(job(1, 4), spot(1), phase=phase)], [spot(1)]).actions == ()


def test_a_start_waits_until_the_gpus_are_free() -> None:
    found = act([pending(job(1, 4))], [spot(1)], {"v100-1": res(3, 24, 500_000)})
    assert only(found) == Hold(job_id=1)
    assert found.deferred[1].code is ReasonCode.GPUS_BUSY
    assert "3 of 4 GPUs" in found.deferred[1].text


def test_starts_of_one_round_share_what_is_free() -> None:
    found = act(
        [pending(job(1, 4)), pending(job(2, 4))],
        [spot(1), spot(2)],
        {"v100-1": res(6, 24, 500_000)},
    )
    assert [type(action) for action in found.actions] == [Start, Hold]


def test_cores_of_a_stopping_job_are_not_given_away_yet() -> None:
    leaving = running(job(1, 4), spot(1, cpus=20), phase=JobPhase.STOPPING)
    found = act([leaving, pending(job(2, 4))], [spot(2)], {"v100-1": res(4, 24, 250_000)})
    assert found.actions == (Hold(job_id=2),)
    assert "stopping job" in found.deferred[2].text


def test_a_growth_waits_for_the_cores_of_a_stopping_job() -> None:
    leaving = running(job(1, 4), spot(1), phase=JobPhase.STOPPING)
    found = act([leaving, running(job(2, 4), spot(2))], [spot(2, cpus=20)])
    assert found.actions == (Renew(job_id=2),)


def test_shrinks_come_before_starts_and_growths_after() -> None:
    jobs = [
        running(job(1, 4), spot(1, cpus=20, mem_mib=100_000)),
        running(job(2, 4), spot(2, cpus=4, mem_mib=100_000, node="v100_2")),
        pending(job(3, 4)),
        running(job(4, 4), spot(4, node="v100_2")),
        pending(job(5, 4)),
    ]
    found = act(
        jobs,
        [
            spot(1, cpus=12, mem_mib=100_000),
            spot(2, cpus=12, mem_mib=100_000, node="v100_2"),
            spot(3),
            spot(4, node="v100_2"),
        ],
        waiting={5: WAIT},
    )
    assert [(type(action).__name__, action.job_id) for action in found.actions] == [
        ("Resize", 1),
        ("Start", 3),
        ("Resize", 2),
        ("Renew", 4),
        ("Hold", 5),
    ]


# memory that Slurm keeps at what was granted ---------------------------------------------------


def test_a_start_takes_less_memory_if_its_rate_allows() -> None:
    found = act([pending(job(2, 4), KNOWN)], [spot(2)], {"v100-1": res(4, 24, 50_000)})
    assert only(found) == Start(job_id=2, placement=spot(2, mem_mib=50_000))


def test_a_start_never_takes_less_memory_than_its_processes_need() -> None:
    needy = pending(job(2, 4, min_mem_mib_per_node=60_000), KNOWN)
    found = act([needy], [spot(2)], {"v100-1": res(4, 24, 50_000)})
    assert only(found) == Hold(job_id=2)
    assert "memory" in found.deferred[2].text


def test_a_start_takes_no_less_memory_than_its_proportional_rate_needs() -> None:
    cached = profile(per_core=100, gpu_rate=300, dataset_mib=200_000, storage_mib_s=1.0)
    found = act([pending(job(2, 4), cached)], [spot(2)], {"v100-1": res(4, 24, 150_000)})
    assert only(found) == Hold(job_id=2)


def test_a_start_of_an_unknown_job_takes_its_proportional_memory_at_least() -> None:
    found = act([pending(job(2, 4))], [spot(2)], {"v100-1": res(4, 24, 249_999)})
    assert only(found) == Hold(job_id=2)
    found = act([pending(job(2, 4))], [spot(2, mem_mib=300_000)], {"v100-1": res(4, 24, 250_000)})
    assert only(found) == Start(job_id=2, placement=spot(2))


def test_a_running_job_restarts_to_give_back_memory_that_a_start_needs() -> None:
    rich = running(job(1, 4), spot(1, mem_mib=250_000), granted={"v100-1": res(4, 24, 450_000)})
    found = act([rich, pending(job(2, 4))], [spot(1), spot(2)], {"v100-1": res(4, 24, 50_000)})
    stop, hold = found.actions
    assert stop_code(stop) is ReasonCode.RESIZED and stop.job_id == 1
    assert hold == Hold(job_id=2)


def test_no_job_restarts_for_memory_if_that_is_not_enough_or_already_coming() -> None:
    rich = running(job(1, 4), spot(1), granted={"v100-1": res(4, 24, 260_000)})
    found = act([rich, pending(job(2, 4))], [spot(1), spot(2)], {"v100-1": res(4, 24, 50_000)})
    assert found.actions == (Renew(job_id=1), Hold(job_id=2))

    tiny = placement(3, v100_1=res(1, 1, 200_000))
    leaving = running(job(3), tiny, phase=JobPhase.STOPPING)
    small = running(
        job(1, 3),
        placement(1, v100_1=res(3, 3, 40_000)),
        granted={"v100-1": res(3, 24, 250_000)},
    )
    found = act(
        [small, pending(job(2, 4)), leaving],
        [placement(1, v100_1=res(3, 3, 40_000)), spot(2)],
        {"v100-1": res(4, 24, 50_000)},
    )
    assert found.actions == (Renew(job_id=1), Hold(job_id=2))


def test_cores_that_a_stopped_job_would_have_given_up_are_not_used_for_starts() -> None:
    # Job 1 would shrink by 8 cores for job 2, but must restart for the memory of job 3.
    rich = running(
        job(1, 4),
        placement(1, v100_1=res(4, 18, 100_000)),
        granted={"v100-1": res(4, 24, 400_000)},
    )
    jobs = [
        rich,
        pending(job(2, 2), KNOWN),
        pending(job(3, 2, min_mem_mib_per_node=200_000), KNOWN),
    ]
    plan = [
        placement(1, v100_1=res(4, 10, 100_000)),
        placement(2, v100_1=res(2, 8, 100_000)),
        placement(3, v100_1=res(2, 6, 200_000)),
    ]
    found = act(jobs, plan, {"v100-1": res(4, 24, 100_000)})
    assert stop_code(found.actions[0]) is ReasonCode.RESIZED
    assert [type(action) for action in found.actions] == [Stop, Hold, Hold]


# where only a restart changes a running job ----------------------------------------------------


def by_restart(run: JobStatus, planned: Placement) -> Action:
    return only(act([run], [planned], enforcement=Enforcement.REQUEUE))


def test_shrinking_by_restart_stops_the_job() -> None:
    assert stop_code(by_restart(running(job(1, 4), spot(1)), spot(1, cpus=8))) is (
        ReasonCode.RESIZED
    )


def test_growing_by_restart_must_clearly_pay() -> None:
    # 12 -> 16 cores saves a quarter of the rest: 160 s of it is 40 s, a restart costs 30 x 1.2.
    def left(seconds: float) -> JobStatus:
        work = job(1, 4, total_samples=1200 * seconds)
        return running(work, spot(1), profile(per_core=100, gpu_rate=1000, restart_s=30))

    assert stop_code(by_restart(left(160), spot(1, cpus=16))) is ReasonCode.RESIZED
    assert by_restart(left(130), spot(1, cpus=16)) == Renew(job_id=1)
    assert by_restart(running(job(1, 4), spot(1)), spot(1, cpus=16)) == Renew(job_id=1)


def test_a_job_that_cannot_be_stopped_is_not_resized_by_restart() -> None:
    run = running(job(1, 4, preemptible=False), spot(1))
    assert by_restart(run, spot(1, cpus=8)) == Renew(job_id=1)


def test_cpus_must_be_free_where_they_are_not_shared() -> None:
    free = {"v100-1": res(4, 8, 250_000)}
    shared = act([pending(job(1, 4))], [spot(1)], free)
    exclusive = act([pending(job(1, 4))], [spot(1)], free, enforcement=Enforcement.REQUEUE)
    assert isinstance(only(shared), Start)
    assert only(exclusive) == Hold(job_id=1)
    assert "8 of 12 CPUs" in exclusive.deferred[1].text
