"""What is done with one running job so that the plan becomes true. Pure.

Which of these actions can be carried out at once depends on the other jobs: see
:mod:`slurm_synergy.reconcile`.
"""

from __future__ import annotations

from dataclasses import replace

from slurm_synergy.cluster import Renew, Resize, Stop
from slurm_synergy.core.elastic import as_placed
from slurm_synergy.core.model import (
    Elasticity,
    JobStatus,
    Placement,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.pipeline import job_rate
from slurm_synergy.core.snapshot import is_pinned

__all__ = ["granted_mib", "settle", "takes_cores"]

# A restart to grow must clearly pay, not just break even on uncertain numbers.
_RESTART_GAIN = 1.2


def settle(
    snapshot: Snapshot, status: JobStatus, planned: Placement | None, why: Reason | None
) -> Stop | Resize | Renew:
    """Stop, resize or renew a running job that shall have ``planned``.

    ``why`` tells why a job without a placement shall wait, if the plan does.
    """
    job_id = status.job.job_id
    assert status.lease is not None
    now = status.lease.placement
    if planned is now and _is_granted(status, now):  # most jobs of most rounds
        return Renew(job_id=job_id)
    if is_pinned(status, snapshot) and (
        planned is None or planned.gpu_layout != now.gpu_layout or not status.job.wrapped
    ):
        return Renew(job_id=job_id)
    if planned is None:
        return _stop(job_id, ReasonCode.PREEMPTED, why.text if why else "the policy prefers others")
    if planned.gpu_layout != now.gpu_layout:
        return _stop(job_id, *_why_moved(status, now, planned))
    if snapshot.enforcement.in_place:
        return _resize_in_place(status, now, planned)
    return _resize_by_restart(snapshot, status, now, planned)


def takes_cores(status: JobStatus, target: Placement) -> bool:
    """Whether a running job that gets ``target`` has more cores than now on some node."""
    assert status.lease is not None
    now = status.lease.placement
    return any(target.on(name).cpus > share.cpus for name, share in now.shares)


def granted_mib(status: JobStatus, node: str) -> int:
    """MiB that the cluster set aside for the job on ``node`` when it started."""
    if status.lease is None:
        return 0
    granted = status.lease.granted.get(node)
    return granted.mem_mib if granted else status.lease.placement.on(node).mem_mib


def _is_granted(status: JobStatus, placement: Placement) -> bool:
    """Whether all memory of ``placement`` was set aside for the job."""
    return all([share.mem_mib <= granted_mib(status, name) for name, share in placement.shares])  # noqa: C419 - quicker


def _stop(job_id: int, code: ReasonCode, text: str) -> Stop:
    return Stop(job_id=job_id, reason=Reason(code=code, text=text))


def _resize_in_place(status: JobStatus, now: Placement, planned: Placement) -> Resize | Renew:
    """Change cores and memory; memory at most to what the cluster granted at the start."""
    job_id = status.job.job_id
    shares = []
    for name in now.nodes:
        wish = planned.on(name)
        shares.append((name, replace(wish, mem_mib=min(wish.mem_mib, granted_mib(status, name)))))
    target = replace(now, shares=tuple(shares), batch=planned.batch)
    if target.shares == now.shares and target.batch == now.batch:
        return Renew(job_id=job_id)
    return Resize(job_id=job_id, placement=target)


def _resize_by_restart(
    snapshot: Snapshot, status: JobStatus, now: Placement, planned: Placement
) -> Stop | Resize | Renew:
    """Only a restart changes the job: to shrink if others need it, to grow if it pays."""
    job_id = status.job.job_id
    shrinks = any(
        planned.on(name).cpus < share.cpus or planned.on(name).mem_mib < share.mem_mib
        for name, share in now.shares
    )
    grows = any(not planned.on(name).fits_in(share) for name, share in now.shares)
    if not is_pinned(status, snapshot) and (
        shrinks or (grows and _restart_pays(snapshot, status, now, planned))
    ):
        what = "less" if shrinks else "more"
        return _stop(job_id, ReasonCode.RESIZED, f"restarts with {what} CPU or memory")
    if planned.batch != now.batch:
        # That needs no restart, whatever else does.
        return Resize(job_id=job_id, placement=replace(now, batch=planned.batch))
    return Renew(job_id=job_id)


def _restart_pays(
    snapshot: Snapshot, status: JobStatus, now: Placement, planned: Placement
) -> bool:
    """Whether the time saved until the end is clearly more than a restart costs."""
    total = status.job.total_samples
    old, new = (
        job_rate(
            as_placed(snapshot, status, one).profile,
            one.gpu_type,
            [share for _, share in one.shares],
        )
        for one in (now, planned)
    )
    if total is None or not old or not new or new <= old:
        return False
    left = max(total - status.done_samples, 0.0)
    return left / old - left / new > _RESTART_GAIN * status.profile.restart_s


def _why_moved(status: JobStatus, now: Placement, planned: Placement) -> tuple[ReasonCode, str]:
    """Why a job that shall have other GPUs is stopped."""
    same = now.gpu_type == planned.gpu_type and now.gpus == planned.gpus
    if same or status.job.elasticity is Elasticity.RIGID:
        return (
            ReasonCode.MOVED,
            f"moves from {','.join(now.nodes)} to {','.join(planned.nodes)}",
        )
    return (
        ReasonCode.RESHAPED,
        f"changes from {now.gpus} {now.gpu_type} GPUs on {','.join(now.nodes)} to "
        f"{planned.gpus} {planned.gpu_type} GPUs on {','.join(planned.nodes)}",
    )
