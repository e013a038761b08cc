"""Why a job waits, or why it got what it has: a plan and its snapshot put into words. Pure.

Everything is said from our own side (a round's snapshot, its plan and what became of its actions);
nothing is asked of Slurm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from slurm_synergy.core.advice import for_placed, for_waiting
from slurm_synergy.core.elastic import as_placed
from slurm_synergy.core.market import Market, amount, market_in_words
from slurm_synergy.core.model import (
    Elasticity,
    JobPhase,
    JobStatus,
    Placement,
    Plan,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.pipeline import THETA, job_rate, proportional_share
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.snapshot import status_of
from slurm_synergy.core.wording import share_in_words
from slurm_synergy.errors import ModelError

__all__ = ["Explanation", "Limit", "explain", "find_job", "in_words", "public"]

_SHOWN = 4


class Limit(Enum):
    """What binds a job: for a waiting one what it lacks, for a running one what sets its pace."""

    GPUS = "gpus"  # not enough free ones, or (running) their own speed
    SHAPE = "shape"  # enough GPUs are free, but not together
    MEMORY = "memory"
    CPUS = "cpus"
    OUTSIDE = "outside"  # dependency, begin time, an operator, Slurm
    UNKNOWN = "unknown"  # its speed is not known


_LIMITS: Mapping[ReasonCode, Limit] = {
    ReasonCode.NO_GPUS: Limit.GPUS,
    ReasonCode.PREEMPTED: Limit.GPUS,
    ReasonCode.GPUS_BUSY: Limit.GPUS,
    ReasonCode.FRAGMENTED: Limit.SHAPE,
    ReasonCode.NO_MEMORY: Limit.MEMORY,
    ReasonCode.DEMAND_TAKEN: Limit.CPUS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All about one job in one round.

    ``rank`` counts from 1 in the policy's order over the ``of`` jobs that hold something or may
    start (None for a job that may not), ``waiting_ahead`` those before it that wait. ``shares`` is
    what the plan gives it per node, ``proportional`` its GPU-proportional share there. Rates are
    samples/s, None when its profile is unknown; ``speedup`` is their ratio. ``changes`` are
    sentences on what would change the outcome. ``elastic`` says what GPUs and batch an elastic job
    may have and has, empty for others. ``fixed_on`` are its nodes where jobs cannot be given other
    cores, as no helper is heard there. ``market`` is what a policy that chooses GPU type and number
    offered it, None under other policies.
    """

    job_id: int
    array: str
    user: str
    phase: JobPhase
    summary: str
    reason: Reason | None
    binding: Limit | None
    rank: int | None
    of: int
    waiting_ahead: int | None
    policy: str
    mechanism: str
    gpus: int
    gpu_type: str
    shares: Mapping[str, Resources]
    proportional: Mapping[str, Resources]
    rate_samples_per_s: float | None
    proportional_samples_per_s: float | None
    speedup: float | None
    changes: tuple[str, ...]
    market: Market | None = None
    elastic: str = ""
    fixed_on: tuple[str, ...] = ()


def public(explanation: Explanation) -> Explanation:
    """The part that everybody may see: without what follows from the owner's hints."""
    waits = not explanation.shares
    return replace(
        explanation,
        binding=explanation.binding if waits else None,
        rate_samples_per_s=None,
        proportional_samples_per_s=None,
        speedup=None,
        changes=(),
        market=None,
        elastic="",
    )


def find_job(snapshot: Snapshot, text: str) -> int:
    """The id of the job that ``text`` names: ``12``, or ``12_3`` for a member of an array.

    Raises ModelError when the snapshot has no such job, or several members of that array.
    """
    members = {status.job.array: status.job.job_id for status in snapshot.jobs if status.job.array}
    if text in members:
        return members[text]
    if not text.isascii() or not text.replace("_", "", 1).isdigit():
        raise ModelError(f"{text!r} is no job id; write it as in 12, or 12_3 for an array's member")
    of_array = sorted(name for name in members if name.startswith(f"{text}_"))
    if len(of_array) > 1:
        shown = ", ".join(of_array[:_SHOWN]) + (", …" if len(of_array) > _SHOWN else "")
        raise ModelError(f"job {text} is an array; name one of its members: {shown}")
    if of_array:
        return members[of_array[0]]
    known = {status.job.job_id for status in snapshot.jobs}
    if text.isdigit() and int(text) in known:
        return int(text)
    raise ModelError(
        f"job {text} is not among the {len(known)} jobs of round {snapshot.round}: it is not in "
        "the managed partition, has ended, or was submitted after that round"
    )


def explain(
    snapshot: Snapshot,
    plan: Plan,
    job_id: int,
    *,
    order: Sequence[int] = (),
    outcomes: Mapping[int, Reason] | None = None,
    grants: Callable[[Snapshot, int], bool] = lambda snapshot, job_id: True,
    market: Market | None = None,
) -> Explanation:
    """Explain the plan's word on ``job_id``, which the snapshot has.

    ``order`` are the ids of the competing jobs as the policy serves them, ``outcomes`` the reasons
    of actions that were deferred, refused, or stops. ``grants`` tells whether the policy would
    grant a job in a changed snapshot: what is said to help has been put to it. ``market`` is what
    the policy offered the job.
    """
    status = status_of(snapshot)[job_id]
    placement = plan.placement(job_id)
    elastic = _elastic(status, placement, is_sized=market is not None)
    if placement is not None:
        status = as_placed(snapshot, status, placement)
    reason = plan.waiting.get(job_id) or (outcomes or {}).get(job_id)
    rank, ahead = _rank(plan, order, job_id)
    shares = dict(placement.shares) if placement else {}
    proportional = _proportional(snapshot, status, placement)
    rate = _rate(status, placement, shares)
    least = _rate(status, placement, proportional)
    made = Explanation(
        job_id=job_id,
        array=status.job.array,
        user=status.job.user,
        phase=status.phase,
        summary=_summary(status, placement, reason),
        reason=reason,
        binding=_binding(snapshot, status, placement, reason),
        rank=rank,
        of=len(order),
        waiting_ahead=None if rank is None else len(ahead),
        policy=plan.policy,
        mechanism=plan.mechanism,
        gpus=status.job.gpus,
        gpu_type=placement.gpu_type if placement else "/".join(status.job.gpu_types),
        shares=shares,
        proportional=proportional,
        rate_samples_per_s=rate,
        proportional_samples_per_s=least,
        speedup=rate / least if rate and least else None,
        changes=(),
        market=market,
        elastic=elastic,
        fixed_on=tuple(
            node.name for node in snapshot.nodes if node.fixed_shares and node.name in shares
        ),
    )
    if placement is None:
        code = reason.code if reason else None
        changes = for_waiting(
            snapshot,
            plan,
            status,
            code,
            ahead=ahead,
            grants=lambda changed: grants(changed, job_id),
        )
        return replace(made, changes=changes)
    changes = for_placed(
        snapshot,
        status,
        placement,
        deferred=reason.code if reason else None,
        rate=rate,
        bound_by_gpus=made.binding is Limit.GPUS,
    )
    return replace(made, changes=changes)


def _rank(plan: Plan, order: Sequence[int], job_id: int) -> tuple[int | None, tuple[int, ...]]:
    """The place in the order from 1, and the jobs before it that wait."""
    if job_id not in order:
        return None, ()
    at = list(order).index(job_id)
    return at + 1, tuple(other for other in order[:at] if other in plan.waiting)


def _proportional(
    snapshot: Snapshot, status: JobStatus, placement: Placement | None
) -> Mapping[str, Resources]:
    nodes = {node.name: node for node in snapshot.nodes}
    return {
        name: proportional_share(status, nodes[name], share.gpus)
        for name, share in (placement.shares if placement else ())
        if name in nodes
    }


def _rate(
    status: JobStatus, placement: Placement | None, shares: Mapping[str, Resources]
) -> float | None:
    if placement is None or len(shares) < len(placement.shares) or not status.job.wrapped:
        return None
    return job_rate(status.profile, placement.gpu_type, list(shares.values()))


# summaries -----------------------------------------------------------------------------------


def _summary(status: JobStatus, placement: Placement | None, reason: Reason | None) -> str:
    phase = status.phase
    if placement is None:
        why = f": {reason.text}" if reason else ""
        if phase is JobPhase.PENDING:
            return f"waits{why}"
        leaves = "is being stopped" if phase is JobPhase.RUNNING else _PHASES[phase]
        return f"{leaves}{why}"
    where = _where(placement)
    if phase is JobPhase.PENDING:
        return f"is to start on {where}" + (f", not yet: {reason.text}" if reason else "")
    if phase is JobPhase.RUNNING:
        return f"runs on {where}" + (f"; {reason.text}" if reason else "")
    return f"{_PHASES[phase]}; its place: {where}" + (f" ({reason.text})" if reason else "")


_PHASES: Mapping[JobPhase, str] = {
    JobPhase.STARTING: "starts",
    JobPhase.STOPPING: "was told to checkpoint and leave",
    JobPhase.ENDING: "ends; Slurm is freeing its GPUs",
}


def _where(placement: Placement) -> str:
    return ", ".join(
        f"{name} with {share_in_words(share, placement.gpu_type)}"
        for name, share in placement.shares
    )


def _elastic(status: JobStatus, placement: Placement | None, *, is_sized: bool) -> str:
    """What an elastic job may have and has; ``is_sized``: the policy chooses the number of GPUs."""
    job = status.job
    if job.elasticity is Elasticity.RIGID:
        return ""
    kinds = f" of type {' or '.join(job.gpu_types)}" if job.gpu_types else ""
    text = f"may have {job.least_gpus} to {job.most_gpus} GPUs{kinds}"
    for one in job.ceilings:
        than = "more" if one.too_few else "fewer"
        text += f", {than} than {one.refused} of type {one.gpu_type} ({one.text})"
    if job.batch is not None and job.elasticity is Elasticity.ADAPTIVE:
        text += f" and {job.batch[0]} to {job.batch[1]} samples a step"
    if is_sized and not (status.profile.scaling and status.profile.scaling.explored_gpus):
        text += (
            "; it has not reported its steps yet, and gets no more than it holds or may have at "
            "least until it does"
        )
    if placement is None:
        return text
    text += f"; is given {amount(placement.gpus, placement.gpu_type, len(placement.shares))}"
    return f"{text}, {placement.batch.total} samples a step" if placement.batch else text


# what binds ----------------------------------------------------------------------------------


def _binding(
    snapshot: Snapshot, status: JobStatus, placement: Placement | None, reason: Reason | None
) -> Limit | None:
    if placement is None:
        if reason is None:
            return None
        if reason.code is ReasonCode.NEVER_FITS:
            return Limit.SHAPE
        return _LIMITS.get(reason.code, Limit.OUTSIDE)
    if status.phase is JobPhase.PENDING and reason is not None:
        return _LIMITS.get(reason.code, Limit.OUTSIDE)
    return _pace(snapshot, status, placement)


def _pace(snapshot: Snapshot, status: JobStatus, placement: Placement) -> Limit:
    """What sets the pace of a placed job: which resource would have to grow for it to run faster.

    Found by asking for its rate with all cores, or all memory, of its nodes.
    """
    nodes = {node.name: node for node in snapshot.nodes}
    shares = [(nodes.get(name), share) for name, share in placement.shares]
    now = _rate(status, placement, dict(placement.shares))
    if now is None or any(node is None for node, _ in shares):
        return Limit.UNKNOWN

    def rate(*, cpus: bool, mem: bool) -> float:
        grown = [
            replace(
                share,
                cpus=max(share.cpus, node.total.cpus) if cpus else share.cpus,
                mem_mib=max(share.mem_mib, node.total.mem_mib) if mem else share.mem_mib,
            )
            for node, share in shares
            if node is not None
        ]
        return job_rate(status.profile, placement.gpu_type, grown) or now

    if now >= THETA * rate(cpus=True, mem=True):
        return Limit.GPUS
    with_cpus, with_mem = rate(cpus=True, mem=False), rate(cpus=False, mem=True)
    return Limit.MEMORY if with_mem > with_cpus else Limit.CPUS


# words ---------------------------------------------------------------------------------------


def in_words(explanation: Explanation) -> tuple[str, ...]:
    """The explanation for people, one line each."""
    name = explanation.array or str(explanation.job_id)
    lines = [f"job {name} of {explanation.user} {explanation.summary}"]
    if explanation.rank is not None:
        ahead = explanation.waiting_ahead or 0
        lines.append(
            f"rank: {explanation.rank} of {explanation.of} by policy {explanation.policy}"
            + (f"; {ahead} waiting ahead of it" if not explanation.shares else "")
        )
    if explanation.binding is not None:
        lines.append(f"bound by: {_BOUND[explanation.binding]}")
    for node, share in explanation.proportional.items():
        given = share_in_words(explanation.shares[node])
        lines.append(f"share on {node}: {given}; proportional: {share_in_words(share)}")
    if explanation.fixed_on:
        lines.append(
            f"cores do not move on {', '.join(explanation.fixed_on)}: no slurm-synergyd --node is "
            "heard there"
        )
    if explanation.speedup is not None:
        lines.append(
            f"speed: {explanation.rate_samples_per_s:.0f} samples/s expected, "
            f"{explanation.proportional_samples_per_s:.0f} with the proportional share: "
            f"{explanation.speedup:.2f} times as fast"
        )
    if explanation.elastic:
        lines.append(f"elastic: {explanation.elastic}")
    if explanation.market is not None:
        lines += market_in_words(explanation.market)
    lines += [f"what would change it: {text}" for text in explanation.changes]
    return tuple(lines)


_BOUND: Mapping[Limit, str] = {
    Limit.GPUS: "GPUs",
    Limit.SHAPE: "GPUs in the shape that it asks for",
    Limit.MEMORY: "memory",
    Limit.CPUS: "cores",
    Limit.OUTSIDE: "something outside the plan",
    Limit.UNKNOWN: "not known (no profile)",
}
