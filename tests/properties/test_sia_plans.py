"""Promises that Sia keeps for elastic jobs, on random pools and histories, with every mechanism."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import Harness, quiet, running
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import jobs, nodes, profiles

from slurm_synergy.core.columns import suits
from slurm_synergy.core.configurations import tally
from slurm_synergy.core.decide import check_plan, decide
from slurm_synergy.core.elastic import objection
from slurm_synergy.core.goodput import GradientStatistics, ThroughputModel
from slurm_synergy.core.model import (
    Elasticity,
    Enforcement,
    Job,
    JobStatus,
    Node,
    Placement,
    Profile,
    Snapshot,
)
from slurm_synergy.core.rounds_of_time import is_renewal
from slurm_synergy.core.scaling import Scaling, TypeSpeed
from slurm_synergy.core.snapshot import held, is_pinned
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies.sia import SIA

FULL = ["proportional", "tune"]
every_mechanism = pytest.mark.parametrize("mechanism", FULL)


@st.composite
def scalings(draw: st.DrawFn) -> Scaling:
    """Fast or slow to synchronise, on one or both types, explored or not."""
    times = st.floats(1e-4, 1.0)
    speeds = {}
    for kind in draw(st.sampled_from([("v100",), ("a100", "v100")])):
        speeds[kind] = TypeSpeed(
            model=ThroughputModel(
                compute_s=draw(times),
                compute_s_per_sample=draw(times),
                node_sync_s=draw(times),
                network_sync_s=draw(times),
                overlap=draw(st.floats(1.0, 10.0)),
            ),
            local_least=draw(st.sampled_from([1, 8])),
            local_most=draw(st.sampled_from([16, 256])),
            explored_gpus=draw(st.sampled_from([0, 1, 2, 4, 8])),
        )
    return Scaling(
        speeds=speeds,
        statistics=GradientStatistics(square=1.0, variance=draw(st.floats(0.0, 1e3))),
        accumulate=draw(st.booleans()),
    )


@st.composite
def elastic_jobs(draw: st.DrawFn, job_id: int) -> tuple[Job, Profile]:
    """A random job, mostly an elastic one, and what is believed of it."""
    one, belief = draw(jobs(job_id)), draw(profiles())
    if draw(st.integers(0, 3)) == 0:
        return one, belief
    unit = draw(st.sampled_from([1, 1, 2]))
    least = draw(st.sampled_from([None, unit, 2 * unit]))
    one = replace(
        one,
        elasticity=draw(st.sampled_from([Elasticity.STRONG_SCALING, Elasticity.ADAPTIVE])),
        scale_unit=unit,
        min_gpus=least,
        max_gpus=max(least or unit, draw(st.sampled_from([1, 4, 16]))),
        batch=draw(st.sampled_from([None, (32, 32), (32, 2048)])),
    )
    return one, replace(belief, scaling=draw(st.one_of(st.none(), scalings())))


@st.composite
def histories(draw: st.DrawFn) -> Snapshot:
    """What some rounds of Sia, or of first in first out, have left behind."""
    pool = draw(nodes())
    harness = Harness(pool, draw(st.sampled_from(["sia", "sia", "fifo"])), "tune")
    count = draw(st.integers(1, 8))
    beliefs: dict[int, Profile] = {}
    for job_id in range(1, count + 1):
        one, beliefs[job_id] = draw(elastic_jobs(job_id))
        harness.submit(one, belief=beliefs[job_id])
        if draw(st.booleans()):
            harness.round()
    result = harness.round()
    statuses = []
    for status in result.snapshot.jobs:
        job_id = status.job.job_id
        if job_id in harness.running():
            made: JobStatus = running(status.job, harness.lease(job_id), beliefs[job_id])
            statuses.append(replace(made, profile=status.profile))
        else:
            statuses.append(JobStatus(job=status.job, profile=status.profile))
    return replace(
        result.snapshot,
        jobs=tuple(statuses),
        enforcement=draw(st.sampled_from(Enforcement)),
        draining=draw(st.integers(0, 9)) == 0,
    )


@every_mechanism
@settings(max_examples=30)
@given(snapshot=histories())
def test_every_plan_for_elastic_jobs_keeps_the_promises(mechanism: str, snapshot: Snapshot) -> None:
    decision = SIA.choose(snapshot)
    layout = MECHANISMS[mechanism].place(snapshot, decision)
    assert not layout.unplaced
    plan = decide(snapshot, SIA, MECHANISMS[mechanism])
    check_plan(snapshot, plan)
    assert plan.solver["bound"] >= plan.solver["objective"] - 1e-9  # type: ignore[operator]
    for placement in plan.placements:
        status = next(one for one in snapshot.jobs if one.job.job_id == placement.job_id)
        if not is_pinned(status, snapshot) and not snapshot.draining:
            _assert_within_reach(status, placement)
            _assert_whole(snapshot, status, placement)


@every_mechanism
@settings(max_examples=30)
@given(snapshot=histories())
def test_between_two_plans_who_runs_goes_on_unless_another_one_would_wait(
    mechanism: str, snapshot: Snapshot
) -> None:
    shot = replace(snapshot, previous_s=snapshot.now_s - 1)
    assert not is_renewal(shot.now_s, shot.previous_s, shot.round_s)
    check_plan(shot, decide(shot, SIA, MECHANISMS[mechanism]))
    found = SIA.choose(shot)
    anew = replace(SIA, moves_between_rounds=True).choose(shot)
    if found.grants == anew.grants:
        return
    granted = {one.job_id: one.configuration for one in found.grants}
    capacities = tally(shot.nodes)
    for status in shot.jobs:
        now, given = held(status), granted.get(status.job.job_id)
        if now is None:
            assert given is not None or shot.draining or not suits(capacities, status.job)
        elif objection(status, now) is None:
            assert given is not None and given.gpus == now.gpus
            assert given.gpu_type in (None, now.gpu_type)


def _assert_within_reach(status: JobStatus, placement: Placement) -> None:
    assert objection(status, placement) is None
    now, scaling = held(status), status.profile.scaling
    if status.job.elasticity is Elasticity.RIGID or (now and now.gpus == placement.gpus):
        return
    most = max(2 * scaling.explored_gpus if scaling else 0, now.gpus if now else 0)
    # The least that nodes offer is never more than twice what the job could have at the least.
    least = 2 * max(status.job.least_gpus, status.job.scale_unit)
    assert placement.gpus <= max(most, least, _largest_node(placement))


def _largest_node(placement: Placement) -> int:
    return max(share.gpus for _, share in placement.shares)


def _assert_whole(snapshot: Snapshot, status: JobStatus, placement: Placement) -> None:
    """An elastic job on several nodes has them as a whole, unless it just stays where it is.

    A piece of a larger node stands in for a whole small one that has not what the piece has.
    """
    now = held(status)
    if status.job.elasticity is Elasticity.RIGID or len(placement.shares) == 1:
        return
    if placement.batch is None and placement.gpus == status.job.gpus:
        return  # as its user asked for
    if now is None or now.gpu_layout != placement.gpu_layout:
        for name, share in placement.shares:
            assert share.gpus == snapshot.node(name).total.gpus or any(
                one.gpu_type == placement.gpu_type
                and one.total.gpus == share.gpus
                and not share.fits_in(one.capacity)
                for one in snapshot.nodes
            )


@every_mechanism
@settings(max_examples=20)
@given(data=st.data(), pool=nodes(), enforcement=st.sampled_from(Enforcement))
def test_elastic_jobs_come_to_rest(
    mechanism: str, data: st.DataObject, pool: list[Node], enforcement: Enforcement
) -> None:
    harness = Harness(pool, "sia", mechanism, enforcement)
    for job_id in range(1, data.draw(st.integers(1, 8)) + 1):
        one, belief = data.draw(elastic_jobs(job_id))
        harness.submit(one, belief=belief)
    for _ in range(8):
        harness.clock.time_s -= 300.0
        last = harness.round()
    assert quiet(last) and quiet(harness.results[-2])
