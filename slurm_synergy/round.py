"""The round: observe, decide, reconcile, apply. The one loop body, live and simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeGuard, cast

from slurm_synergy.cluster import (
    Action,
    Clock,
    Cluster,
    Foresight,
    Hold,
    Observation,
    Outcome,
    Records,
    Renew,
    Resize,
    Start,
    StartTogether,
    Together,
)
from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.decide import Mechanism, Policy, check_plan, decide, uncollected
from slurm_synergy.core.model import (
    JobPhase,
    JobStatus,
    Plan,
    Profile,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.snapshot import status_of
from slurm_synergy.core.values import quick
from slurm_synergy.errors import ClusterError, PlanError, SolverError
from slurm_synergy.merging import Known, build_snapshot
from slurm_synergy.reconcile import Reconciled, reconcile

__all__ = [
    "Known",
    "Planned",
    "RoundResult",
    "build_snapshot",
    "plan_round",
    "run_round",
]


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a round would do: nothing has been changed yet.

    ``took_s`` has the seconds of each step that was taken.
    """

    snapshot: Snapshot
    plan: Plan
    actions: tuple[Action, ...]
    deferred: Mapping[int, Reason] = field(default_factory=dict)
    took_s: Mapping[str, float] = field(default_factory=dict)


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What a round did. ``deferred`` are jobs that are placed but could not start yet."""

    snapshot: Snapshot
    plan: Plan
    actions: tuple[Action, ...]
    outcomes: tuple[Outcome, ...]
    deferred: Mapping[int, Reason] = field(default_factory=dict)
    took_s: Mapping[str, float] = field(default_factory=dict)


def plan_round(
    observation: Observation,
    records: Records,
    clock: Clock,
    policy: Policy,
    mechanism: Mechanism,
    *,
    round_number: int,
    round_s: float,
    known: Known | None = None,
) -> Planned:
    """Decide from ``observation`` without changing anything.

    ``known`` is as in ``run_round``. Raises PlanError when the plan breaks one of our promises,
    SolverError when there is none.
    """
    began_s = clock.now_s()
    # A search for cyclic garbage comes after all of it, not in its middle.
    with uncollected():
        snapshot = _snapshot(
            observation, records, clock, round_number=round_number, round_s=round_s, known=known
        )
        plan = decide(snapshot, policy, mechanism)
        check_plan(snapshot, plan)
        decided_s = clock.now_s()
        found: Reconciled = reconcile(snapshot, plan, observation.free)
    return Planned(
        snapshot=snapshot,
        plan=plan,
        actions=found.actions,
        deferred=found.deferred,
        took_s={"decide": decided_s - began_s, "reconcile": clock.now_s() - decided_s},
    )


def _snapshot(
    observation: Observation,
    records: Records,
    clock: Clock,
    *,
    round_number: int,
    round_s: float,
    known: Known | None = None,
) -> Snapshot:
    found: dict[str, Profile | None] = {}

    def profile_of(key: str) -> Profile | None:
        if key not in found:
            found[key] = records.profile(key) or CATALOGUE.get(key)
        return found[key]

    return build_snapshot(
        observation,
        records.read(),
        round_number=round_number,
        now_s=clock.now_s(),
        round_s=round_s,
        profile_of=profile_of,
        draining=records.draining(),
        previous_s=None if known is None else known.previous_s,
        known=known,
    )


def run_round(
    cluster: Cluster,
    records: Records,
    clock: Clock,
    policy: Policy,
    mechanism: Mechanism,
    round_s: float,
    *,
    known: Known | None = None,
) -> RoundResult:
    """Play one round.

    With the same ``known`` in every round, what has not changed since the last one is not made
    anew. An action that fails is an Outcome and does not stop the others. Raises ClusterError when
    the cluster cannot be observed (then nothing was changed), and PlanError or SolverError when
    there is no valid plan (then running leases were renewed and nothing else was changed).
    """
    began_s = clock.now_s()
    observation = cluster.observe()
    observed_s = clock.now_s()
    number = records.next_round()
    try:
        planned = plan_round(
            observation,
            records,
            clock,
            policy,
            mechanism,
            round_number=number,
            round_s=round_s,
            known=known,
        )
    except (PlanError, SolverError):
        _renew_all(cluster, records, clock, observation, number, round_s)
        raise
    records.intend(number, planned.actions)
    apply_s = clock.now_s()
    outcomes = _apply(cluster, planned.snapshot, planned.actions, planned.deferred)
    records.commit(number, outcomes, planned.snapshot)
    done_s = clock.now_s()
    took_s = {
        "observe": observed_s - began_s,
        **planned.took_s,
        "apply": done_s - apply_s,
        "total": done_s - began_s,
    }
    records.journal(
        planned.snapshot, planned.plan, planned.actions, outcomes, took_s, observation.free
    )
    return RoundResult(
        snapshot=planned.snapshot,
        plan=planned.plan,
        actions=planned.actions,
        outcomes=outcomes,
        deferred=planned.deferred,
        took_s=took_s,
    )


def _apply(
    cluster: Cluster,
    snapshot: Snapshot,
    actions: Sequence[Action],
    deferred: Mapping[int, Reason],
) -> tuple[Outcome, ...]:
    statuses = status_of(snapshot)
    outcomes: list[Outcome] = []
    if _foresees(cluster):
        cluster.foresee(actions, statuses)
    for kind, several in groupby(actions, key=type):
        if kind is Start and _starts_together(cluster):
            outcomes += cluster.start_all(cast(list[Start], list(several)), statuses)
            continue
        if kind is Resize and _resizes_together(cluster):
            outcomes += _resize_all(cluster, tuple(several), statuses)
            continue
        for action in several:
            try:
                outcome = cluster.apply(action, statuses[action.job_id])
            except ClusterError as err:
                outcome = _failed(action, err)
            if isinstance(action, Hold) and outcome.reason is None:
                outcome = replace(outcome, reason=deferred.get(action.job_id))
            outcomes.append(outcome)
    return tuple(outcomes)


# Before Python 3.12, to ask isinstance() of a protocol takes as long as to start ten jobs.
def _foresees(cluster: Cluster) -> TypeGuard[Foresight]:
    return hasattr(cluster, "foresee")


def _starts_together(cluster: Cluster) -> TypeGuard[StartTogether]:
    return hasattr(cluster, "start_all")


def _resizes_together(cluster: Cluster) -> TypeGuard[Together]:
    return hasattr(cluster, "resize_all")


def _resize_all(
    cluster: Together, actions: Sequence[Action], statuses: Mapping[int, JobStatus]
) -> tuple[Outcome, ...]:
    resizes = [action for action in actions if isinstance(action, Resize)]
    try:
        return cluster.resize_all(resizes, statuses)
    except ClusterError as err:
        return tuple(_failed(action, err) for action in resizes)


def _failed(action: Action, err: ClusterError) -> Outcome:
    reason = Reason(code=ReasonCode.ACTION_FAILED, text=str(err))
    return Outcome(action=action, done=False, reason=reason)


def _renew_all(
    cluster: Cluster,
    records: Records,
    clock: Clock,
    observation: Observation,
    number: int,
    round_s: float,
) -> None:
    """Without a plan, let running jobs keep what they have."""
    snapshot = _snapshot(observation, records, clock, round_number=number, round_s=round_s)
    renewals = tuple(
        Renew(job_id=status.job.job_id)
        for status in snapshot.jobs
        if status.phase is JobPhase.RUNNING
    )
    records.intend(number, renewals)
    records.commit(number, _apply(cluster, snapshot, renewals, {}), snapshot)
