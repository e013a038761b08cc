"""Queue policies: serve jobs in the order of a key, as far as the pool reaches.

FIFO, SRTF and the like differ only in the key. The runnable set is chosen on GPUs (Synergy,
section 4; algorithms B.5): a job that does not fit is left out and the walk goes on, so that no GPU
is idle while any job could use it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from slurm_synergy.core.model import (
    Configuration,
    Decision,
    Grant,
    JobPhase,
    JobStatus,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.packing import (
    Packer,
    Request,
    Room,
    find_layout,
    make_request,
    pack_gpus,
)
from slurm_synergy.core.snapshot import held, is_pinned

__all__ = ["Key", "QueuePolicy", "choose"]

Key = Callable[[JobStatus, Snapshot], float]
"""Smaller is served first; ties go to the earlier submission, then to the smaller id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """A policy that is nothing but a name and a key."""

    name: str
    key: Key

    def choose(self, snapshot: Snapshot) -> Decision:
        """Grants in the order of the key."""
        return choose(snapshot, self.key)


def choose(snapshot: Snapshot, key: Key) -> Decision:
    """Grant jobs in the order of ``key``, each if the pool can hold it besides those before it.

    Jobs that cannot be stopped come first, whatever their key: they keep what they hold. While
    draining, running jobs keep their GPUs and nothing is started.
    """
    waiting: dict[int, Reason] = {}
    walk: list[JobStatus] = []
    for status in snapshot.jobs:
        reason = _barred(status, snapshot)
        if reason is None:
            walk.append(status)
        else:
            waiting[status.job.job_id] = reason
    walk.sort(key=lambda status: _order(status, snapshot, key))
    requests = [make_request(status, snapshot) for status in walk]
    packer = Packer(snapshot.nodes, requests)
    granted: list[Request] = []
    for status, request in zip(walk, requests, strict=True):
        if packer.add(request):
            granted.append(request)
        else:
            waiting[request.job_id] = _why(status, request, packer, snapshot)
    final = _confirm(snapshot, granted, waiting)
    return Decision(
        grants=tuple(_grant(request) for request in final),
        waiting={job_id: waiting[job_id] for job_id in sorted(waiting)},
    )


def _barred(status: JobStatus, snapshot: Snapshot) -> Reason | None:
    """Why a job that holds nothing must not be started now, whatever the order."""
    if held(status) is not None:
        return None
    if status.blocked is not None:
        return status.blocked
    if snapshot.draining:
        return Reason(code=ReasonCode.DRAINED, text="the controller drains: nothing is started")
    return None


def _order(status: JobStatus, snapshot: Snapshot, key: Key) -> tuple[bool, float, float, int]:
    job = status.job
    return (
        not is_pinned(status, snapshot),
        key(status, snapshot),
        job.submitted_s,
        job.job_id,
    )


def _grant(request: Request) -> Grant:
    only = request.gpu_types[0] if len(request.gpu_types) == 1 else None
    return Grant(
        job_id=request.job_id,
        configuration=Configuration(gpus=request.gpus, nodes=request.nodes, gpu_type=only),
    )


def _confirm(
    snapshot: Snapshot, granted: list[Request], waiting: dict[int, Reason]
) -> list[Request]:
    """The grants that the mechanism's own packing confirms: all but in contrived cases.

    The walk prefers GPUs that no running job claims, also of such as end up without a grant; the
    mechanism knows only the grants, and packs them by itself.
    """
    while True:
        packed = pack_gpus(snapshot.nodes, granted)
        lost = [one for one in granted if packed[one.job_id] is None]
        if not lost:
            return granted
        for request in lost:
            waiting[request.job_id] = Reason(
                code=ReasonCode.FRAGMENTED,
                text=f"{request.gpus} GPUs are free, but not together in the shape it asks for",
            )
        granted = [one for one in granted if packed[one.job_id] is not None]


def _why(status: JobStatus, request: Request, packer: Packer, snapshot: Snapshot) -> Reason:
    """Why the job is not granted, as precisely as the packing can tell."""
    job = status.job
    kind = " or ".join(request.gpu_types) if request.gpu_types else "any type"
    if not _fits_empty(request, snapshot):
        return Reason(
            code=ReasonCode.NEVER_FITS,
            text=f"{job.gpus} GPUs ({kind}) on {job.nodes or 'any number of'} nodes with "
            f"{job.min_mem_mib_per_node} MiB each do not fit into the pool even when it is empty",
        )
    free = packer.free_gpus(request.gpu_types)
    if free < request.gpus:
        reason = Reason(
            code=ReasonCode.NO_GPUS,
            text=f"needs {request.gpus} GPUs ({kind}); jobs ahead of it leave {free}",
        )
    elif packer.fits_gpus_only(request):
        reason = Reason(
            code=ReasonCode.NO_MEMORY,
            text=f"{request.gpus} GPUs are free, but not with the memory and cores that it needs "
            "at least beside the jobs there",
        )
    else:
        reason = Reason(
            code=ReasonCode.FRAGMENTED,
            text=f"{free} GPUs are free, but not {request.gpus} in the shape it asks for",
        )
    if status.phase is JobPhase.RUNNING:
        return replace(reason, code=ReasonCode.PREEMPTED, text=f"preempted: {reason.text}")
    return reason


def _fits_empty(request: Request, snapshot: Snapshot) -> bool:
    """Whether the job would fit if it were alone and every node of the pool were up."""
    whole = [replace(node, capacity=node.total) for node in snapshot.nodes]
    return find_layout(request, whole, Room(whole)) is not None
