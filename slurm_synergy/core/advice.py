"""What would change a plan's word on a job, in sentences: for its owner. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from slurm_synergy.core.model import (
    JobPhase,
    JobStatus,
    Node,
    Placement,
    Plan,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.openings import End, Grants, Openings
from slurm_synergy.core.pipeline import demand, job_rate, min_mem_mib
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.wording import duration, gib

__all__ = ["for_placed", "for_waiting"]

_MIB_PER_GIB = 1024
_SHOWN = 4


def for_waiting(
    snapshot: Snapshot,
    plan: Plan,
    status: JobStatus,
    code: ReasonCode | None,
    *,
    ahead: Collection[int] = (),
    grants: Grants = lambda _: True,
) -> tuple[str, ...]:
    """What would let the job start; ``code`` is why it waits, ``ahead`` who waits before it.

    ``grants`` is asked before anything is promised; see ``Openings``.
    """
    if status.phase is not JobPhase.PENDING:
        return ("it goes back into the queue, and keeps the place that the policy gives it",)
    if code is ReasonCode.DRAINED:
        return ("an operator's 'synergyctl resume'",)
    if code is ReasonCode.NOT_OURS:
        return ("it is planned as soon as that is over",)
    if code is ReasonCode.START_REFUSED:
        return ("it is planned again after a pause; if it goes on, ask your administrator",)
    if code is ReasonCode.LIMITED:
        return ("it is planned again when the limit, or the job, is changed",)
    openings = Openings(snapshot, plan, status, grants)
    if code is ReasonCode.NEVER_FITS:
        fits = openings.smaller_at_all()
        return (f"a request of {_request(fits)} could run here",) if fits else ()
    return (
        *_by_asking_for_less(status, openings, code),
        _by_waiting(snapshot, openings, ahead),
    )


def _by_asking_for_less(
    status: JobStatus, openings: Openings, code: ReasonCode | None
) -> list[str]:
    said = []
    if code is ReasonCode.NO_MEMORY:
        most = openings.most_mem_mib()
        if most is not None and most < min_mem_mib(status):
            said.append(
                f"it needs {gib(min_mem_mib(status))} GiB of memory on each node; a request of "
                f"{_gib_down(most)} GiB (--mem, or the hint min_mem) would fit now"
            )
    if kinds := openings.other_types():
        said.append(
            f"GPUs of type {' or '.join(kinds)} would fit now (ask for --gres=gpu:N and the hint "
            f"gpu_types={'+'.join((*status.job.gpu_types, *kinds))})"
        )
    if fits := openings.smaller():
        said.append(f"a request of {_request(fits)} would fit now")
    elif not openings.free_gpus():
        said.append("no GPU is free, so no smaller request would start now either")
    return said


def _gib_down(mem_mib: int) -> str:
    return str(mem_mib // _MIB_PER_GIB)


def _request(fits: tuple[int, int]) -> str:
    gpus, nodes = fits
    each = f"{gpus // nodes} GPU{'s' if gpus // nodes != 1 else ''}"
    return each if nodes == 1 else f"{each} on each of {nodes} nodes"


def _by_waiting(snapshot: Snapshot, openings: Openings, ahead: Collection[int]) -> str:
    gone, unless = openings.after_ends(), ""
    if len(ahead) == 1:
        unless = ", unless the job that waits ahead of it takes it"
    elif ahead:
        unless = f", unless one of the {len(ahead)} jobs that wait ahead of it takes it"
    if gone is None:
        return "it does not fit even after the jobs that run now: nodes are down or reserved"
    if not gone:
        return "there is room for it by now: the next round may start it"
    names = ", ".join(str(end.job_id) for end in gone[:_SHOWN])
    if len(gone) > _SHOWN:
        names += f" and {len(gone) - _SHOWN} more"
    jobs = f"jobs {names} have" if len(gone) > 1 else f"job {names} has"
    fits = "fits" if openings.is_granted_after(gone, ahead) else "may fit"
    return f"it {fits} when {jobs} ended, {_when(snapshot, gone)}{unless}"


def _when(snapshot: Snapshot, gone: Sequence[End]) -> str:
    soonest_s = max(end.soonest_s for end in gone)
    latest_s = max(end.latest_s for end in gone)
    if soonest_s == math.inf:
        return "which has no known end (no time limit, no amount of work told)"
    expected = soonest_s < latest_s
    text = f"in about {duration(soonest_s - snapshot.now_s)}"
    if not expected:
        return f"by its time limit {text}"
    if latest_s == math.inf:
        return f"expected {text}"
    return f"expected {text}, at the latest in {duration(latest_s - snapshot.now_s)} by time limit"


def for_placed(
    snapshot: Snapshot,
    status: JobStatus,
    placement: Placement,
    *,
    deferred: ReasonCode | None,
    rate: float | None,
    bound_by_gpus: bool,
) -> tuple[str, ...]:
    """What would make the job start or run faster.

    ``deferred`` is what its start waits for, if anything, ``rate`` are its samples/s by the plan
    (None: not known).
    """
    if deferred is ReasonCode.ONLY_SHOWN:
        does = "starts" if status.phase is JobPhase.PENDING else "decides about"
        return (f"the controller only shows what it would do; Slurm alone {does} the job",)
    if status.phase is JobPhase.PENDING and deferred is not None:
        return ("it starts as soon as that is over",)
    if not status.job.wrapped:
        return (
            "it keeps what Slurm gave it: start its tasks with synergy-srun, and its cores follow "
            "what it can use",
        )
    if rate is None:
        return (
            "its speed is not known, so it gets its proportional share; name a profile "
            "(--comment=synergy:profile=NAME, see 'synergyctl profile list')",
        )
    if bound_by_gpus:
        return ("more cores or memory would not make it faster: its GPUs set the pace",)
    return (_with_more(snapshot, status, placement, rate),)


def _with_more(snapshot: Snapshot, status: JobStatus, placement: Placement, rate: float) -> str:
    nodes = {node.name: node for node in snapshot.nodes}
    wished = [
        (name, _at_full_speed(status, nodes[name], share)) for name, share in placement.shares
    ]
    full = job_rate(status.profile, placement.gpu_type, [share for _, share in wished]) or rate
    gain = f" ({full / rate - 1:+.0%})" if rate else ""
    what = ", ".join(
        f"{share.cpus} cores and {gib(share.mem_mib)} GiB on {name}" for name, share in wished
    )
    return (
        f"with {what} it would run at full speed{gain}; the other jobs there "
        "keep at least their proportional speed, so it gets more when one of them needs less or "
        "ends"
    )


def _at_full_speed(status: JobStatus, node: Node, share: Resources) -> Resources:
    wish = demand(status, node, share.gpus)
    return replace(share, cpus=max(wish.cpus, share.cpus), mem_mib=max(wish.mem_mib, share.mem_mib))
