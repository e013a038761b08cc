"""Promises that Pollux keeps for elastic jobs, on the same random pools and histories as Sia."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import event, given, settings
from test_sia_plans import histories

from slurm_synergy.core.columns import scale_limit
from slurm_synergy.core.decide import check_plan, decide
from slurm_synergy.core.elastic import objection
from slurm_synergy.core.model import Elasticity, Snapshot
from slurm_synergy.core.snapshot import held, is_pinned
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies.pollux import POLLUX

SHORT = replace(POLLUX, population=20, generations=12, patience=6)


@settings(max_examples=30)
@given(snapshot=histories())
def test_every_plan_for_elastic_jobs_keeps_the_promises(snapshot: Snapshot) -> None:
    decision = SHORT.choose(snapshot)
    layout = MECHANISMS["tune"].place(snapshot, decision)
    assert not layout.unplaced
    plan = decide(snapshot, SHORT, MECHANISMS["tune"])
    check_plan(snapshot, plan)
    assert plan == decide(replace(snapshot), SHORT, MECHANISMS["tune"])
    by_id = {status.job.job_id: status for status in snapshot.jobs}
    for placement in plan.placements:
        status = by_id[placement.job_id]
        if is_pinned(status, snapshot) or snapshot.draining:
            continue
        assert objection(status, placement) is None
        now = held(status)
        event(f"elastic: {status.job.elasticity is not Elasticity.RIGID}, holds: {now is not None}")
        unit = max(status.job.least_gpus, status.job.scale_unit)
        most = max(scale_limit(status), 2 * unit)
        assert placement.gpus <= max(most, now.gpus if now is not None else 0)
