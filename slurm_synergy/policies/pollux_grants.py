"""What Pollux makes of a division of all GPUs: grants of whole shapes that fit together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.batching import with_batches
from slurm_synergy.core.columns import scale_limit, suits
from slurm_synergy.core.configurations import Capacities, tally
from slurm_synergy.core.contest import Contest, arrival
from slurm_synergy.core.elastic import as_granted, configuration_of, gpus_per_replica, objection
from slurm_synergy.core.model import (
    Configuration,
    Decision,
    Elasticity,
    Grant,
    JobPhase,
    JobStatus,
    Node,
    Placement,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.node_parts import NodeParts
from slurm_synergy.core.packing import Request, Requests, layout_of, parts_of
from slurm_synergy.core.room import GpuLayout, Room
from slurm_synergy.core.scaling import BatchSize
from slurm_synergy.core.snapshot import held

__all__ = ["Granting", "Wanted", "kept", "pace", "shaped", "wanted"]

Ints = NDArray[np.int64]

_RIGID = Elasticity.RIGID


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A job on a configuration, with the place that was found for it."""

    status: JobStatus
    configuration: Configuration
    layout: GpuLayout | None = None


def wanted(jobs: Sequence[JobStatus], parts: NodeParts, division: Ints) -> list[Wanted]:
    """What the rows of a ``division`` ``(J, N)`` mean: each job's GPUs of each of the ``parts``."""
    found = []
    for row, status in enumerate(jobs):
        there = parts.by_node(division[row])
        one = shaped(status, there) if there else None
        if one is not None:
            found.append(one)
    return _batched(found)


def kept(
    jobs: Sequence[JobStatus], decided: Mapping[int, tuple[Configuration, GpuLayout]]
) -> list[Wanted]:
    """What jobs hold, and for those that hold nothing what was ``decided`` for them before."""
    found = []
    for status in jobs:
        now, later = held(status), decided.get(status.job.job_id)
        if now is not None and objection(status, now) is None:
            one = _as_held(status, now)
            found.append(Wanted(status=status, configuration=one, layout=layout_of(now)))
        elif now is None and later is not None:
            found.append(Wanted(status=status, configuration=later[0], layout=later[1]))
    return _batched(found)


def _batched(found: Sequence[Wanted]) -> list[Wanted]:
    batched = _with_batches([(one.status, one.configuration) for one in found])
    pairs = zip(found, batched, strict=True)
    return [replace(one, configuration=configuration) for one, configuration in pairs]


def _with_batches(wanted: Sequence[tuple[JobStatus, Configuration]]) -> list[Configuration]:
    """As ``with_batches``; on a type of which nothing is known a job begins with a small one."""
    found = with_batches(wanted)
    return [
        replace(one, batch=_modest_batch(status, one)) if one.batch is None else one
        for (status, _), one in zip(wanted, found, strict=True)
    ]


def _modest_batch(status: JobStatus, one: Configuration) -> BatchSize | None:
    """The least per GPU that is known to be worth while elsewhere: its memory is not known."""
    job, scaling, kind, now = status.job, status.profile.scaling, one.gpu_type, held(status)
    if job.elasticity is not Elasticity.ADAPTIVE or job.batch is None or not kind:
        return None
    if scaling is None or not scaling.speeds or kind in scaling.speeds:
        return None
    replicas = max(one.gpus // gpus_per_replica(job, scaling, kind), 1)
    if now is not None and now.batch is not None and now.batch.replicas == replicas:
        return now.batch
    initial, largest = job.batch
    least = min(speed.local_least for speed in scaling.speeds.values())
    local = max(least, -(-initial // replicas))
    return BatchSize(local=local, replicas=replicas) if local * replicas <= largest else None


class Granting:
    """From what jobs are wanted to have to grants that certainly fit together.

    What does not fit where it was wanted is put elsewhere, and GPUs that are left are given to jobs
    that have none. ``searched`` tells whether it is a search that wants this.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        contest: Contest,
        jobs: Sequence[JobStatus],
        parts: NodeParts,
        chosen: Sequence[Wanted],
        *,
        searched: bool = True,
    ) -> None:
        self._snapshot, self._contest = snapshot, contest
        self._jobs, self._parts = jobs, parts
        self._requests = Requests.of_snapshot(snapshot)
        self._room = Room(self._requests.pool)
        self._granted: list[tuple[JobStatus, Grant]] = []
        self._layouts: dict[int, GpuLayout] = {}
        self._chosen = sorted(chosen, key=lambda one: (not _stays(one), arrival(one.status)))
        self._searched = searched

    def decision(self) -> Decision:
        """The policy's word."""
        for status in self._contest.kept:
            now = held(status)
            if now is not None:
                configuration = _as_held(status, now)
                self._put(status, configuration, self._request(status, configuration), now)
        later: list[Wanted] = []
        for one in self._chosen:
            request = self._request(one.status, one.configuration)
            layout = one.layout
            if layout is None or not self._take(request, layout):
                later.append(one)
                continue
            self._grant(one.status, one.configuration, layout)
        for one in later:
            self._find(one.status, one.configuration)
        self._fill()
        self._granted.sort(key=lambda pair: arrival(pair[0]))
        return Decision(
            grants=tuple(grant for _, grant in self._granted),
            waiting=self._waiting(),
            packing=self._layouts,
        )

    # placing ---------------------------------------------------------------------------------

    def _request(self, status: JobStatus, configuration: Configuration) -> Request:
        there = as_granted(self._snapshot, status, configuration)
        return self._requests.of(there, configuration)

    def _put(
        self, status: JobStatus, configuration: Configuration, request: Request, now: Placement
    ) -> None:
        """Grant a job what it holds, whether there is room or not."""
        self._room.take(request.held_parts)
        self._grant(status, configuration, layout_of(now))

    def _take(self, request: Request, layout: GpuLayout) -> bool:
        parts = parts_of(self._requests.pool, layout, request.need)
        fits = len(parts) == len(layout[1]) and self._room.fits(parts)
        if fits:
            self._room.take(parts)
        return fits

    def _find(self, status: JobStatus, configuration: Configuration) -> bool:
        """Put a job on the best place for a configuration; whether there is one."""
        request = self._request(status, configuration)
        now = held(status)
        layout = layout_of(now) if now is not None and request.may_stay else None
        if layout is None or not self._take(request, layout):
            layout = self._room.find(request.shape, request.need)
            if layout is None or not self._take(request, layout):
                return False
        self._grant(status, replace(configuration, gpu_type=layout[0]), layout)
        return True

    def _grant(self, status: JobStatus, configuration: Configuration, layout: GpuLayout) -> None:
        job_id = status.job.job_id
        self._layouts[job_id] = layout
        self._granted.append((status, Grant(job_id=job_id, configuration=configuration)))

    def _fill(self) -> None:
        """Give jobs without any GPUs the least that they may have of those that are left.

        They are left by shares on several types, by the chances of the search, or for want of
        memory. Those that hold some come first, then those that had the least service.
        """
        rest = [one for one in self._jobs if one.job.job_id not in self._layouts]
        rest.sort(key=lambda status: held(status) is None)
        for status in rest:
            if not self._room.free_gpus():
                return
            for configuration in self._modest(status):
                if self._find(status, configuration):
                    break

    def _modest(self, status: JobStatus) -> Iterator[Configuration]:
        """What the job holds, then the least that it may have on each type, the fastest first.

        Between searches it gets its fair part of the GPUs if there is that on one node, as far as a
        search might let it have so many: the next search need not move it then.
        """
        job, now = status.job, held(status)
        if job.elasticity is _RIGID:
            yield job.configuration
            return
        if now is not None and objection(status, now) is None:
            one = configuration_of(now)
            if one is not None:
                yield one
        kinds = sorted(self._parts.kinds, key=lambda kind: pace(status, kind))
        may = [one for one in kinds if not job.gpu_types or one in job.gpu_types]
        for least in self._sizes(status):
            for kind in may:
                unit = gpus_per_replica(job, status.profile.scaling, kind)
                gpus = -(-least // unit) * unit
                if gpus <= job.most_on(kind):
                    plain = Configuration(gpus=gpus, nodes=1, gpu_type=kind)
                    yield _with_batches([(status, plain)])[0]

    def _sizes(self, status: JobStatus) -> tuple[int, ...]:
        least = status.job.least_gpus
        if self._searched:
            return (least,)
        fair = self._parts.gpus // max(len(self._jobs), 1)
        more = min(scale_limit(status), fair, int(self._parts.capacity.max(initial=1)))
        return (more, least) if more > least else (least,)

    # words -----------------------------------------------------------------------------------

    def _waiting(self) -> dict[int, Reason]:
        waiting = dict(self._contest.waiting)
        whole: Capacities | None = None
        for status in self._contest.competing:
            job = status.job
            if job.job_id in self._layouts:
                continue
            if whole is None:
                whole = tally(replace(one, capacity=one.total) for one in self._snapshot.nodes)
            reason = _NO_SHARE if suits(whole, job) else _never(job.least_gpus)
            if status.phase is JobPhase.RUNNING:
                reason = Reason(code=ReasonCode.PREEMPTED, text=f"preempted: {reason.text}")
            waiting[job.job_id] = reason
        return waiting


_NO_SHARE = Reason(
    code=ReasonCode.NO_GPUS,
    text="in the best division of the GPUs that was found the other jobs have them all, or what is "
    "left has not the shape or the memory that it needs",
)


def _never(gpus: int) -> Reason:
    return Reason(
        code=ReasonCode.NEVER_FITS,
        text=f"{gpus} GPUs in the shape that it asks for do not fit into the pool even when it is "
        "empty",
    )


def pace(status: JobStatus, kind: str) -> tuple[float, str]:
    """Sorts the types on which a single GPU is faster for the job first."""
    scaling = status.profile.scaling
    speed = scaling.speeds.get(kind) if scaling else None
    rate = speed.model.rate(1, 1, speed.local_most) if speed else 0.0
    return -rate, kind


def shaped(status: JobStatus, parts: Sequence[tuple[Node, int]]) -> Wanted | None:
    """A share of hosts, reduced to the type with most GPUs and to a shape that the job may have."""
    job = status.job
    by_type: dict[str, list[tuple[str, int]]] = {}
    for node, gpus in parts:
        by_type.setdefault(node.gpu_type, []).append((node.name, gpus))
    kind = min(by_type, key=lambda one: (-sum(gpus for _, gpus in by_type[one]), pace(status, one)))
    layout = by_type[kind]
    if job.elasticity is _RIGID:
        if sum(gpus for _, gpus in layout) != job.gpus or job.nodes not in (None, len(layout)):
            return Wanted(status=status, configuration=job.configuration)
        on_type = replace(job.configuration, gpu_type=kind)
        return Wanted(status=status, configuration=on_type, layout=(kind, tuple(layout)))
    unit = gpus_per_replica(job, status.profile.scaling, kind)
    each = min(gpus for _, gpus in layout)
    while each and each * len(layout) % unit:
        each -= 1
    if each * len(layout) < job.least_gpus:
        return None
    return Wanted(
        status=status,
        configuration=Configuration(gpus=each * len(layout), nodes=len(layout), gpu_type=kind),
        layout=(kind, tuple((name, each) for name, _ in layout)),
    )


def _stays(one: Wanted) -> bool:
    """Whether the job has these very GPUs now."""
    now = held(one.status)
    if now is None or one.layout is None:
        return False
    return now.gpu_type == one.layout[0] and now.gpu_layout == tuple(sorted(one.layout[1]))


def _as_held(status: JobStatus, now: Placement) -> Configuration:
    if status.job.elasticity is _RIGID:
        return status.job.configuration
    return configuration_of(now) or status.job.configuration
