"""GREEDY, DRF and Tetris: whole demands or nothing."""

from __future__ import annotations

import pytest
from builders import job, node, pending, placement, profile, res, running, snapshot

from slurm_synergy.core.decide import check_plan, decide
from slurm_synergy.core.model import Enforcement, Plan, ReasonCode, Snapshot
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES

WHOLE_NODE = profile(per_core=100, gpu_rate=2400)  # one GPU that 24 cores keep busy
FRUGAL = profile(per_core=1000, gpu_rate=1000)  # one core per GPU


def plan(shot: Snapshot, mechanism: str, policy: str = "fifo") -> Plan:
    found = decide(shot, POLICIES[policy], MECHANISMS[mechanism])
    check_plan(shot, found)
    return found


def placed(found: Plan) -> list[int]:
    return [one.job_id for one in found.placements]


def test_greedy_leaves_gpus_idle_that_tune_uses() -> None:
    shot = snapshot([node()], [pending(job(n), WHOLE_NODE) for n in (1, 2)])
    found = plan(shot, "greedy")
    assert placed(found) == [1]
    assert found.waiting[2].code is ReasonCode.DEMAND_TAKEN
    assert placed(plan(shot, "tune")) == [1, 2]


def test_greedy_serves_in_the_order_of_the_policy_and_lets_smaller_demands_pass() -> None:
    jobs = [pending(job(1), WHOLE_NODE), pending(job(2), WHOLE_NODE)]
    jobs += [pending(job(n), FRUGAL) for n in (3, 4)]
    assert placed(plan(snapshot([node()], jobs), "greedy")) == [1]
    frugal_first = [pending(job(1), FRUGAL), *jobs[1:]]
    assert placed(plan(snapshot([node()], frugal_first), "greedy")) == [1, 3, 4]


def test_greedy_takes_the_first_node_that_fits_not_the_tightest() -> None:
    shot = snapshot([node("v100-1"), node("v100-2", gpus=2)], [pending(job(1), FRUGAL)])
    spot = plan(shot, "greedy").placement(1)
    assert spot is not None and spot.nodes == ("v100-1",)


def test_greedy_takes_as_few_nodes_as_fit_for_a_job_free_to_split() -> None:
    pool = [node(f"v100-{n}", gpus=4, cpus=12) for n in (1, 2, 3)]
    spot = plan(snapshot(pool, [pending(job(1, 8, nodes=None), FRUGAL)]), "greedy").placement(1)
    assert spot is not None and [share.gpus for _, share in spot.shares] == [4, 4]


def test_a_running_job_stays_where_its_demand_is_free() -> None:
    run = running(job(1), placement(1, v100_2=res(1, 1, 1024)), FRUGAL)
    spot = plan(snapshot([node("v100-1"), node("v100-2")], [run]), "greedy").placement(1)
    assert spot is not None and spot.nodes == ("v100-2",)


def test_a_running_job_whose_demand_is_taken_is_preempted() -> None:
    first = pending(job(1), WHOLE_NODE)
    run = running(job(2), placement(2, v100_1=res(1, 24, 1024)), WHOLE_NODE)
    found = plan(snapshot([node()], [first, run]), "greedy")
    assert placed(found) == [1]
    assert found.waiting[2].code is ReasonCode.PREEMPTED


def test_a_job_that_cannot_be_stopped_comes_first() -> None:
    fixed = running(job(2, preemptible=False), placement(2, v100_1=res(1, 24, 1024)), WHOLE_NODE)
    found = plan(snapshot([node()], [pending(job(1), WHOLE_NODE), fixed]), "greedy")
    assert placed(found) == [2]


def test_where_only_a_restart_resizes_greedy_leaves_running_jobs_as_they_are() -> None:
    run = running(job(1), placement(1, v100_1=res(1, 20, 1024)), WHOLE_NODE)
    late = pending(job(2), FRUGAL)
    found = plan(snapshot([node()], [run, late], enforcement=Enforcement.REQUEUE), "greedy")
    spot = found.placement(1)
    assert spot is not None and spot.shares[0][1].cpus == 20
    assert placed(found) == [1, 2]


def test_drf_serves_the_smallest_dominant_share_first() -> None:
    # Of 24 cores and 8 GPUs: job 1 asks for 24 cores, job 2 for 4 GPUs, job 3 for 1 GPU.
    jobs = [pending(job(1), WHOLE_NODE), pending(job(2, 4), FRUGAL), pending(job(3), FRUGAL)]
    shot = snapshot([node()], jobs)
    assert placed(plan(shot, "greedy")) == [1]
    assert placed(plan(shot, "drf")) == [2, 3]


def test_tetris_serves_the_least_remaining_work_first() -> None:
    long = pending(job(1, total_samples=1e6), WHOLE_NODE)
    short = pending(job(2, total_samples=1e5), WHOLE_NODE)
    assert placed(plan(snapshot([node()], [long, short]), "greedy")) == [1]
    assert placed(plan(snapshot([node()], [long, short]), "tetris")) == [2]
    unknown = pending(job(1), WHOLE_NODE)
    assert placed(plan(snapshot([node()], [unknown, short]), "tetris")) == [2]


def test_alignment_prefers_the_demand_that_uses_what_is_free() -> None:
    # Equal work: the one whose demand is larger in what is there aligns better.
    hungry = pending(job(2, 8), profile(per_core=100, gpu_rate=300))
    frugal = pending(job(1, 8), FRUGAL)
    shot = snapshot([node()], [frugal, hungry])
    order = MECHANISMS["tetris_align"]
    decision = POLICIES["fifo"].choose(shot)
    assert [grant.job_id for grant in decision.grants] == [1]
    both = snapshot([node()], [pending(job(1), FRUGAL), pending(job(2), WHOLE_NODE)])
    assert placed(plan(both, "tetris_align")) == [2]
    assert placed(plan(both, "drf")) == [1]
    assert order.name == "tetris_align"


@pytest.mark.parametrize("mechanism", ["drf", "tetris", "tetris_align", "greedy"])
def test_baselines_give_running_jobs_no_memory_beyond_their_grant(mechanism: str) -> None:
    wants_all = profile(per_core=100, gpu_rate=300, dataset_mib=450_000, storage_mib_s=10)
    run = running(job(1, 4), placement(1, v100_1=res(4, 12, 300_000)), wants_all)
    spot = plan(snapshot([node()], [run]), mechanism).placement(1)
    assert spot is not None and spot.shares[0][1].mem_mib == 300_000
