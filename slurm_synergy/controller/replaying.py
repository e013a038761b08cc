"""Decide a round of the past again, and tell in words where the outcome differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_synergy.cluster import Action, Resize, Start, Stop
from slurm_synergy.controller.rounds import Round
from slurm_synergy.core.decide import Mechanism, Policy, check_plan, decide
from slurm_synergy.core.model import Placement, Plan
from slurm_synergy.core.wording import share_in_words
from slurm_synergy.errors import PlanError, SolverError
from slurm_synergy.reconcile import reconcile

__all__ = ["Replayed", "replay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What the present code makes of a round. ``plan`` is None when it finds none.

    ``differences`` are sentences, empty when all is the same. ``actions_compared`` is False when
    the record does not have what actions follow from.
    """

    plan: Plan | None
    differences: tuple[str, ...]
    actions_compared: bool


def replay(record: Round, policy: Policy, mechanism: Mechanism) -> Replayed:
    """Recompute plan and actions of ``record`` and compare."""
    try:
        plan = decide(record.snapshot, policy, mechanism)
        check_plan(record.snapshot, plan)
    except (PlanError, SolverError) as err:
        return Replayed(
            plan=None, differences=(f"no valid plan now: {err}",), actions_compared=False
        )
    found = [
        *_names(record.plan, plan),
        *_jobs(_fates(record.plan), _fates(plan)),
    ]
    if record.free is None:
        return Replayed(plan=plan, differences=tuple(found), actions_compared=False)
    now = reconcile(record.snapshot, plan, record.free).actions
    found += _jobs(_deeds(record.actions), _deeds(now))
    if not found and now != record.actions:
        found.append("the same actions in another order")
    return Replayed(plan=plan, differences=tuple(found), actions_compared=True)


def _names(then: Plan, now: Plan) -> list[str]:
    return [
        f"{what}: then {before}, now {after}"
        for what, before, after in (
            ("policy", then.policy, now.policy),
            ("mechanism", then.mechanism, now.mechanism),
        )
        if before != after
    ]


def _jobs(then: Mapping[int, str], now: Mapping[int, str]) -> list[str]:
    return [
        f"job {job_id}: then {then.get(job_id, 'nothing')}; now {now.get(job_id, 'nothing')}"
        for job_id in sorted(then.keys() | now.keys())
        if then.get(job_id) != now.get(job_id)
    ]


def _fates(plan: Plan) -> Mapping[int, str]:
    """By job, its fate in words. A reason's text is left out: wordings may change."""
    placed = {one.job_id: f"placed on {_where(one)}" for one in plan.placements}
    waiting = {job_id: f"waits ({why.code.value})" for job_id, why in plan.waiting.items()}
    return {**waiting, **placed}


def _where(placement: Placement) -> str:
    return ", ".join(
        f"{node} with {share_in_words(share, placement.gpu_type)} ({share.mem_mib} MiB)"
        for node, share in placement.shares
    )


def _deeds(actions: tuple[Action, ...]) -> Mapping[int, str]:
    return {action.job_id: f"action {_deed(action)}" for action in actions}


def _deed(action: Action) -> str:
    kind = type(action).__name__.lower()
    if isinstance(action, Start | Resize):
        return f"{kind} on {_where(action.placement)}"
    if isinstance(action, Stop):
        return f"{kind} ({action.reason.code.value})"
    return kind
