"""Gavel: shares of time by a linear program, and rounds that make them real."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from builders import job, node, pending, placement, res, running, snapshot

from slurm_synergy.core.goodput import ThroughputModel
from slurm_synergy.core.model import (
    JobStatus,
    Node,
    Placement,
    Profile,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.rounds_of_time import is_renewal, quantum_of, turns
from slurm_synergy.core.scaling import Scaling, TypeSpeed
from slurm_synergy.core.type_rates import type_rates
from slurm_synergy.policies import POLICIES
from slurm_synergy.policies.gavel import GAVEL, Gavel
from slurm_synergy.policies.sia import SIA
from slurm_synergy.policies.time_shares import Demand

POOL = [node("a-1", "a", gpus=1), node("b-1", "b", gpus=1)]


def runs_at(a: float, b: float) -> Profile:
    """Samples/s of one GPU of each type."""
    return Profile(gpu_rate_per_gpu={"a": a, "b": b})


def one(job_id: int, a: float, b: float, gpus: int = 1, **more: object) -> JobStatus:
    return pending(job(job_id, gpus, nodes=None, batch=(1, 1)), runs_at(a, b), **more)


def on(status: JobStatus, kind: str, name: str) -> JobStatus:
    """The same job, on GPUs of that node."""
    gpus = status.job.gpus
    where = placement(status.job.job_id, kind, **{name: res(gpus, 3 * gpus, 60_000 * gpus)})
    return running(status.job, where, status.profile, held_s=status.held_s)


def demand_of(nodes: list[Node], *jobs: JobStatus) -> Demand:
    shot = snapshot(nodes, jobs)
    rates = type_rates(shot, jobs)
    capacity = [sum(n.capacity.gpus for n in nodes if n.gpu_type == k) for k in rates.gpu_types]
    return Demand(
        snapshot=shot,
        jobs=jobs,
        rates=rates,
        gpus=np.array([float(status.job.gpus) for status in jobs]),
        capacity=np.array(capacity, dtype=float),
    )


def kinds(shot: Snapshot, policy: Gavel = GAVEL) -> dict[int, str | None]:
    return {grant.job_id: grant.configuration.gpu_type for grant in policy.choose(shot).grants}


# shares ------------------------------------------------------------------------------------------


def test_the_sum_of_speeds_decides_who_runs_where() -> None:
    # 4 + 2 steps/s, against 1 + 3 the other way round.
    found = GAVEL.shares(demand_of(POOL, one(1, 4, 1), one(2, 3, 2)))
    assert found.parts.tolist() == [[1.0, 0.0], [0.0, 1.0]]
    assert found.report["objective"] == pytest.approx(6.0)


def test_jobs_that_are_alike_share_the_time_equally() -> None:
    found = GAVEL.shares(demand_of(POOL[:1], one(1, 2, 1), one(2, 2, 1)))
    assert found.parts.tolist() == [[0.5], [0.5]]


def test_gpus_that_a_job_takes_bound_its_time() -> None:
    # Per GPU job 1 makes 3 steps/s and job 2 makes 2, so job 1 gets all that it can take.
    pool = [node("a-1", "a", gpus=4)]
    found = GAVEL.shares(demand_of(pool, one(1, 3, 0.1, gpus=2), one(2, 2, 0.1, gpus=4)))
    assert found.parts.tolist() == [[1.0], [0.5]]


def test_steps_and_not_samples_are_counted_unless_speeds_are_normalised() -> None:
    large = pending(job(1, nodes=None, batch=(100, 100)), runs_at(100, 10))  # 1 step/s
    small = one(2, 3, 2)
    steps = GAVEL.shares(demand_of(POOL[:1], large, small))
    assert steps.parts.tolist() == [[0.0], [1.0]]
    pool = [*POOL, node("b-2", "b", gpus=1)]
    relative = Gavel(normalised=True).shares(demand_of(pool, large, small))
    assert relative.parts.tolist() == [[1.0, 0.0], [0.0, 1.0]]  # ten times faster against 1.5


def test_a_type_with_too_few_gpus_is_no_choice() -> None:
    pool = [node("a-1", "a", gpus=1), node("b-1", "b", gpus=2)]
    found = GAVEL.shares(demand_of(pool, one(1, 9, 1, gpus=2)))
    assert found.parts.tolist() == [[0.0, 1.0]]


# speeds ------------------------------------------------------------------------------------------


def test_speeds_come_from_the_model_at_the_jobs_own_batch() -> None:
    model = ThroughputModel(
        compute_s=0.05,
        compute_s_per_sample=0.002,
        node_sync_s=0.02,
        node_sync_s_per_replica=0.001,
        network_sync_s=0.08,
        network_sync_s_per_replica=0.004,
        overlap=1.6,
    )
    scaling = Scaling(speeds={"a": TypeSpeed(model=model, local_most=64)})
    own = pending(job(1, 2, nodes=None, batch=(128, 128)), Profile(scaling=scaling))
    rates = type_rates(snapshot([node("a-1", "a", gpus=8)], [own]), [own])
    assert rates.rates[0, 0] == pytest.approx(705.8237, abs=1e-3)  # (1, 2, 64, 0)
    eight = pending(job(2, 8, nodes=None, batch=(1024, 1024)), Profile(scaling=scaling))
    both = type_rates(snapshot([node("a-1", "a", gpus=8)], [eight]), [eight])
    assert both.rates[0, 0] == pytest.approx(2835.9336, abs=1e-3)  # (1, 8, 64, 1)


# rounds ------------------------------------------------------------------------------------------


def test_who_is_furthest_behind_its_share_comes_first_and_leftovers_last() -> None:
    shares = np.array([[0.5, 0.0], [0.5, 0.0], [0.0, 0.9]])
    received_s = np.array([[200.0, 1.0], [100.0, 1.0], [1.0, 300.0]])
    rates = np.array([[1.0, 1.0], [1.0, 3.0], [1.0, 0.0]])
    rates[2, 0] = 0.0
    rates[2, 1] = 1.0
    order = list(turns(shares, received_s, rates, [(0.0, 1), (1.0, 2), (2.0, 3)]))
    assert order == [(1, 0), (2, 1), (0, 0), (0, 1), (1, 1)]


def test_leases_end_at_multiples_of_the_quantum() -> None:
    assert is_renewal(360.0, 359.0, 360.0) and is_renewal(725.0, 719.0, 360.0)
    assert not is_renewal(719.0, 360.0, 360.0)
    assert is_renewal(719.0, None, 360.0)


def test_plans_are_made_at_whole_multiples_of_what_the_policy_says() -> None:
    assert quantum_of(POLICIES["gavel"], 60.0) == 360.0
    assert quantum_of(POLICIES["sia"], 60.0) == quantum_of(POLICIES["pollux"], 60.0) == 60.0
    assert quantum_of(replace(SIA, moves_between_rounds=True), 60.0) == math.inf
    assert quantum_of(POLICIES["fifo"], 60.0) == math.inf


def test_equal_jobs_take_turns_and_keep_their_gpus_within_a_quantum() -> None:
    first = on(one(1, 2, 1, held_s={"a": 360.0}), "a", "a_1")
    shot = snapshot(POOL[:1], [first, one(2, 2, 1)])
    within = replace(shot, now_s=700.0, previous_s=400.0)
    assert kinds(within) == {1: "a"}
    assert GAVEL.choose(within).waiting[2].code is ReasonCode.NO_GPUS
    after = replace(shot, now_s=720.0, previous_s=400.0)
    assert kinds(after) == {2: "a"}
    assert GAVEL.choose(after).waiting[1].code is ReasonCode.PREEMPTED


def test_gpus_that_become_free_within_a_quantum_are_given_away_unless_told_otherwise() -> None:
    shot = replace(snapshot(POOL[:1], [one(1, 2, 1)]), now_s=700.0, previous_s=400.0)
    assert kinds(shot) == {1: "a"}
    assert kinds(shot, Gavel(fills=False)) == {}
    began = replace(shot, now_s=721.0, previous_s=720.0)
    assert kinds(began, Gavel(fills=False)) == {1: "a"}


def test_a_job_without_a_share_takes_what_is_left() -> None:
    # The slow job adds nothing on a; on b nobody else wants to be.
    pool = [node("a-1", "a", gpus=1), node("b-1", "b", gpus=2)]
    fast, large = one(1, 9, 5), one(2, 1, 0.1, gpus=2)
    assert kinds(snapshot(pool, [fast, large])) == {1: "a", 2: "b"}


def test_jobs_that_cannot_be_stopped_keep_their_gpus_out_of_the_program() -> None:
    fixed = on(replace_preemptible(one(1, 1, 1)), "a", "a_1")
    found = GAVEL.choose(snapshot(POOL, [fixed, one(2, 9, 1)]))
    assert {grant.job_id for grant in found.grants} == {1, 2}
    assert {g.job_id: g.configuration.gpu_type for g in found.grants} == {1: "a", 2: "b"}
    assert found.solver["jobs"] == 1


def replace_preemptible(status: JobStatus) -> JobStatus:
    return replace(status, job=replace(status.job, preemptible=False))


def test_a_job_keeps_its_place_when_its_type_stays() -> None:
    pool = [node("a-1", "a", gpus=2), node("a-2", "a", gpus=2)]
    held = on(one(1, 2, 1), "a", "a_2")
    found = GAVEL.choose(snapshot(pool, [held, one(2, 2, 1)]))
    assert found.packing is not None
    where: Placement = held.lease.placement  # type: ignore[union-attr]
    assert found.packing[1] == ("a", ((where.nodes[0], 1),))
