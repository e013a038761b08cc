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
from slurm_synergy.core.packing import Packer, Request, Requests
from slurm_synergy.core.room import Room, Shape
from slurm_synergy.core.snapshot import held

__all__ = ["Key", "QueuePolicy", "Rank", "choose"]

Rank = Callable[[JobStatus], float]
"""Smaller is served first; ties go to the earlier submission, then to the smaller id."""

Key = Callable[[Snapshot], Rank]
"""What a policy ranks by in one round; computes once what all jobs share."""

_DRAINED = Reason(code=ReasonCode.DRAINED, text="the controller drains: nothing is started")


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
    rank = key(snapshot)
    requests = Requests.of_snapshot(snapshot)
    waiting: dict[int, Reason] = {}
    walk: list[tuple[bool, float, float, int, JobStatus, Request | None]] = []
    for status in snapshot.jobs:
        job = status.job
        request = None
        if held(status) is not None:
            request = requests.of(status)
        elif status.blocked is not None:
            waiting[job.job_id] = status.blocked
            continue
        elif snapshot.draining:
            waiting[job.job_id] = _DRAINED
            continue
        later = request is None or not request.pinned
        walk.append((later, rank(status), job.submitted_s, job.job_id, status, request))
    walk.sort()  # ids differ, so statuses are never compared
    granted = _walk(requests, [(one[4], one[5]) for one in walk], waiting)
    return Decision(
        grants=_grants(granted),
        waiting={job_id: waiting[job_id] for job_id in sorted(waiting)},
    )


def _walk(
    requests: Requests, walk: list[tuple[JobStatus, Request | None]], waiting: dict[int, Reason]
) -> list[Request]:
    """The requests that are granted; the reason of every other goes to ``waiting``.

    The walk has the requests of those jobs only that hold something.
    """
    packer = Packer(requests.pool, [holding for _, holding in walk if holding is not None])
    reasons = _Reasons(requests, packer)
    granted: list[Request] = []
    free: dict[tuple[str, ...], int] = {}
    for status, holding in walk:
        job = status.job
        if job.gpu_types not in free:
            free[job.gpu_types] = packer.free_gpus(job.gpu_types)
        # Most jobs of a long queue end here: no request is made for them.
        if holding is None and free[job.gpu_types] < job.gpus:
            waiting[job.job_id] = reasons.of(status, free[job.gpu_types])
            continue
        request = holding or requests.of(status)
        if packer.add(request):
            granted.append(request)
            free.clear()
        else:
            waiting[job.job_id] = reasons.of(status, free[job.gpu_types])
    return _confirm(requests, granted, waiting)


def _confirm(
    requests: Requests, granted: list[Request], waiting: dict[int, Reason]
) -> list[Request]:
    """The grants that the mechanism's own packing confirms: all but in contrived cases.

    The walk prefers GPUs that no running job claims, also of such as end up without a grant; the
    mechanism knows only the grants, and packs them by itself.
    """
    while True:
        packed = requests.pack(granted)
        lost = [one for one in granted if packed[one.job_id] is None]
        if not lost:
            return granted
        for request in lost:
            waiting[request.job_id] = Reason(
                code=ReasonCode.FRAGMENTED,
                text=f"{request.gpus} GPUs are free, but not together in the shape it asks for",
            )
        granted = [one for one in granted if packed[one.job_id] is not None]


def _grants(granted: list[Request]) -> tuple[Grant, ...]:
    made: dict[Shape, Configuration] = {}
    grants = []
    for request in granted:
        gpus, nodes, types = request.shape
        if request.shape not in made:
            only = types[0] if len(types) == 1 else None
            made[request.shape] = Configuration(gpus=gpus, nodes=nodes, gpu_type=only)
        grants.append(Grant(job_id=request.job_id, configuration=made[request.shape]))
    return tuple(grants)


class _Reasons:
    """Why jobs are not granted, as precisely as the packing can tell; one value per case.

    A case is all that a reason depends on, so ten thousand waiting jobs share a few reasons.
    """

    def __init__(self, requests: Requests, packer: Packer) -> None:
        self._requests = requests
        self._packer = packer
        self._known: dict[tuple[object, ...], Reason] = {}
        total = [node.total for node in requests.pool.nodes]
        self._whole = Room(requests.pool, [(one.gpus, one.cpus, one.mem_mib) for one in total])

    def of(self, status: JobStatus, free: int) -> Reason:
        """The reason of a job that was just refused when ``free`` GPUs of its types were free."""
        job = status.job
        shape = (job.gpus, job.nodes, job.gpu_types)
        preempted = status.phase is JobPhase.RUNNING
        bare = free >= job.gpus and self._packer.fits_gpus_only(shape)
        case = (shape, self._requests.floor(status), free, bare, preempted)
        if case not in self._known:
            reason = self._make(status, shape, free, bare)
            if preempted:
                reason = replace(
                    reason, code=ReasonCode.PREEMPTED, text=f"preempted: {reason.text}"
                )
            self._known[case] = reason
        return self._known[case]

    def _make(self, status: JobStatus, shape: Shape, free: int, bare: bool) -> Reason:
        job = status.job
        kind = " or ".join(job.gpu_types) if job.gpu_types else "any type"
        if not self._fits_when_empty(status, shape):
            return Reason(
                code=ReasonCode.NEVER_FITS,
                text=f"{job.gpus} GPUs ({kind}) on {job.nodes or 'any number of'} nodes with "
                f"{job.min_mem_mib_per_node} MiB each do not fit into the pool even when it is "
                "empty",
            )
        if free < job.gpus:
            return Reason(
                code=ReasonCode.NO_GPUS,
                text=f"needs {job.gpus} GPUs ({kind}); jobs ahead of it leave {free}",
            )
        if bare:
            return Reason(
                code=ReasonCode.NO_MEMORY,
                text=f"{job.gpus} GPUs are free, but not with the memory and cores that it needs "
                "at least beside the jobs there",
            )
        return Reason(
            code=ReasonCode.FRAGMENTED,
            text=f"{free} GPUs are free, but not {job.gpus} in the shape it asks for",
        )

    def _fits_when_empty(self, status: JobStatus, shape: Shape) -> bool:
        """Whether the job would fit if it were alone and every node of the pool were up."""
        floor = self._requests.floor(status)
        return self._whole.find(shape, floor) is not None
