"""Queue policies: serve jobs in the order of a key, as far as the pool reaches.

FIFO, SRTF and the like differ only in the key. The runnable set is chosen on GPUs (Synergy,
section 4; algorithms B.5): a job that does not fit is left out and the walk goes on, so that no GPU
is idle while any job could use it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter

import numpy as np

from slurm_synergy.core.model import (
    Decision,
    JobPhase,
    JobStatus,
    Profile,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.packing import Packer, Request, Requests
from slurm_synergy.core.request import needs_by
from slurm_synergy.core.room import Need, Pool, Room, Shape
from slurm_synergy.core.snapshot import Ascending, held, keeps_all, standing
from slurm_synergy.policies.line import Line

__all__ = ["ARRIVAL", "Key", "QueuePolicy", "Rank", "choose", "queue_order"]

Rank = Callable[[JobStatus], float]
"""Smaller is served first; ties go to the earlier submission, then to the smaller id.

One that is an object may have ``of_all``, which ranks many jobs in less time.
"""

Key = Callable[[Snapshot], Rank]
"""What a policy ranks by in one round; computes once what all jobs share."""

ARRIVAL: Rank = attrgetter("job.submitted_s")
"""The rank of first in, first out; the only one that need not be compared with it again."""

_ID = attrgetter("job.job_id")
# Until Python 3.12, looking up a member of an enumeration takes longer than comparing it.
_RUNNING = JobPhase.RUNNING
_FORGOTTEN_AT_LEAST = 1000
_AT_A_TIME = 512
"""So many jobs fit into the cache of a core, with all that a round asks of them."""
_MOST_REFUSALS = 100_000

_DRAINED = Reason(code=ReasonCode.DRAINED, text="the controller drains: nothing is started")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """A policy that is nothing but a name and a key.

    ``reads_progress`` tells whether the key depends on what jobs have done and had so far.
    """

    name: str
    key: Key
    reads_progress: bool = True

    def choose(self, snapshot: Snapshot) -> Decision:
        """Grants in the order of the key."""
        return choose(snapshot, self.key)


def queue_order(policy: QueuePolicy, snapshot: Snapshot) -> tuple[int, ...]:
    """Ids of the jobs that hold something or may start, in the order in which they are served."""
    rank, usable = policy.key(snapshot), snapshot.usable
    walk = []
    for status in snapshot.jobs:
        job, holding = status.job, held(status)
        if holding is None and status.blocked is not None:
            continue
        stays = holding is not None and (not job.preemptible or keeps_all(status, holding, usable))
        walk.append((not stays, rank(status), job.submitted_s, job.job_id))
    return tuple(one[3] for one in sorted(walk))


def choose(snapshot: Snapshot, key: Key) -> Decision:
    """Grant jobs in the order of ``key``, each if the pool can hold it besides those before it.

    Jobs that cannot be stopped come first, whatever their key: they keep what they hold. While
    draining, running jobs keep their GPUs and nothing is started.
    """
    requests = Requests.of_snapshot(snapshot)
    rank = key(snapshot)
    line = Line.of_snapshot(snapshot) if rank is ARRIVAL else None
    if line is not None:
        queue, waiting = _Queue(line.walk, [None] * len(line.walk)), line.blocked.copy()
    else:
        queue, waiting = _in_line(snapshot, requests, rank)
    while True:
        refused: dict[int, Reason] = {}
        granted, full = _walk(snapshot, requests, queue, refused, line)
        lost = _unconfirmed(requests, granted)
        if not lost:
            if full is not None and not waiting:
                snapshot.derived[Ascending] = full
                return Decision(grants=requests.grant(granted), waiting=full.reasons)
            if full is not None:
                refused.update(full.reasons)
            waiting = {**waiting, **refused} if waiting else refused
            return Decision(grants=requests.grant(granted), waiting=waiting)
        # What they leave is for the others, also for those that were refused because of them.
        waiting.update(lost)
        queue, line = queue.without(lost), None


@dataclass(slots=True, eq=False)
class _Queue:
    """Jobs in the order in which they are served.

    ``known`` are the requests of those that hold something, None for the others; ``holding`` those
    of all that did so when the round began. ``by_id`` are the jobs in the order of their ids,
    ``places`` where each of the walk is in these, if that is known.
    """

    walk: Sequence[JobStatus]
    known: Sequence[Request | None]
    holding: Sequence[Request] = ()
    by_id: Sequence[JobStatus] = ()
    places: Sequence[int] = ()

    def rest(self, begin: int) -> Sequence[JobStatus]:
        """Those from ``begin`` on, by id if that is quick: so they lie in memory as well."""
        if not self.places:
            return self.walk[begin:]
        return [self.by_id[place] for place in sorted(self.places[begin:])]

    def without(self, lost: Collection[int]) -> _Queue:
        """The same without jobs of these ids."""
        stays = [status.job.job_id not in lost for status in self.walk]
        walk, known = compress(self.walk, stays), compress(self.known, stays)
        return _Queue(list(walk), list(known), self.holding)


def _in_line(
    snapshot: Snapshot, requests: Requests, rank: Rank
) -> tuple[_Queue, dict[int, Reason]]:
    """Who may have GPUs, in order, and why all others wait.

    Pinned jobs, then by rank, submission and id. Jobs lie far apart in memory: all that is to be
    known of them is asked of a few at a time, as long as these are at hand.
    """
    jobs, waiting = standing(snapshot).jobs, dict[int, Reason]()
    line: list[JobStatus] = []
    known: list[Request | None] = []
    ranks: list[float] = []
    arrivals_s: list[float] = []
    for begin in range(0, len(jobs), _AT_A_TIME):
        part: Sequence[JobStatus] = jobs[begin : begin + _AT_A_TIME]
        holding = requests.of_holding([status for status in part if status.lease is not None])
        if snapshot.draining or any([status.blocked is not None for status in part]):  # noqa: C419
            part = _allowed(part, holding, snapshot, waiting)
        line += part
        known += [holding.get(status.job.job_id) for status in part]
        ranks += _ranks(rank, part)
        arrivals_s += [status.job.submitted_s for status in part]
    places = np.lexsort((arrivals_s, ranks)).tolist()
    holding_now = [request for request in known if request is not None]
    if any([request.pinned for request in holding_now]):  # noqa: C419
        pinned = [place for place in places if _is_pinned(known[place])]
        places = pinned + [place for place in places if not _is_pinned(known[place])]
    walk, asked = [line[place] for place in places], [known[place] for place in places]
    return _Queue(walk, asked, holding_now, line, places), waiting


def _is_pinned(request: Request | None) -> bool:
    return request is not None and request.pinned


def _ranks(rank: Rank, statuses: Sequence[JobStatus]) -> list[float]:
    of_all: Callable[[Sequence[JobStatus]], list[float]] | None = getattr(rank, "of_all", None)
    return [rank(status) for status in statuses] if of_all is None else of_all(statuses)


def _allowed(
    statuses: Sequence[JobStatus],
    holding: Mapping[int, Request],
    snapshot: Snapshot,
    waiting: dict[int, Reason],
) -> list[JobStatus]:
    """Those of ``statuses`` that hold something or may start; the reasons of others are noted."""
    found = []
    for status in statuses:
        if status.job.job_id in holding:
            found.append(status)
        else:
            found += _candidates((status,), snapshot, waiting)
    return found


def _candidates(
    statuses: Sequence[JobStatus], snapshot: Snapshot, waiting: dict[int, Reason]
) -> list[JobStatus]:
    """Those of ``statuses`` that may start; the reason of every other goes to ``waiting``."""
    free = [status for status in statuses if status.blocked is None]
    if len(free) < len(statuses):
        for status in statuses:
            if status.blocked is not None:
                waiting[status.job.job_id] = status.blocked
    if not snapshot.draining:
        return free
    waiting.update({status.job.job_id: _DRAINED for status in free})
    return []


def _walk(
    snapshot: Snapshot,
    requests: Requests,
    queue: _Queue,
    waiting: dict[int, Reason],
    line: Line | None = None,
) -> tuple[list[Request], Ascending | None]:
    """The requests that are granted; the reason of every other goes to ``waiting``.

    Where all of them wait because no GPU is free, ``line`` may have the reasons: these are returned
    instead.
    """
    full: Ascending | None = None
    walk, known, holding = queue.walk, queue.known, queue.holding
    packer = requests.packer(holding)
    reasons = _Reasons(snapshot, requests, packer)
    alike = 0 if line is None else line.packed_alike(requests.trail)
    granted = [] if holding else requests.retrace(packer, walk, alike)
    free: dict[tuple[str, ...], int] = {}
    reachable: dict[tuple[str, ...], int] = {}
    # They come first, and keep their place even where nothing is free: their node may be down.
    stay = sum([request.pinned for request in holding])
    at, in_order, may_go_on = len(granted), -1, True
    while at < len(walk):
        if may_go_on:
            if line is None:
                more = requests.extend(packer, walk, known, at)
            else:
                more = packer.extend(line.requests(at, requests.of))
            granted += more
            at += len(more)
            in_order = at if in_order < 0 else in_order
            may_go_on = False
            continue
        status = walk[at]
        job = status.job
        types = job.gpu_types
        if types not in free:
            most = packer.free_gpus(())
            if at >= stay and not most:
                if line is not None and at == len(granted):
                    full = line.refuse(at, reasons.when_full)
                else:
                    reasons.of_all(queue.rest(at), waiting)
                break
            free[types] = packer.free_gpus(types) if types else most
        request = known[at]
        at += 1
        # Most jobs of a long queue end here: no request is made for them.
        if request is None and free[types] < job.gpus:
            if types not in reachable:
                reachable[types] = packer.reachable_gpus(types)
            if reachable[types] < job.gpus:
                waiting[job.job_id] = reasons.of(status, free[types])
                continue
        request = request or requests.of(status)
        if packer.add(request):
            granted.append(request)
            free.clear()
            reachable.clear()
            may_go_on = True
        else:
            waiting[job.job_id] = reasons.of(status, free[types])
    requests.adopt(granted, packer)
    if line is not None:
        trail = packer.trail if packer.is_plain else None
        line.keep(trail, len(granted) if in_order < 0 else in_order)
    return granted, full


def _unconfirmed(requests: Requests, granted: list[Request]) -> dict[int, Reason]:
    """The grants that the mechanism's own packing does not confirm: none but in contrived cases.

    The walk prefers GPUs that no running job claims, also of such as end up without a grant; the
    mechanism knows only the grants, and packs them by itself.
    """
    if requests.staying(granted) is not None:
        return {}
    layouts = requests.layouts(granted)
    if None not in layouts:
        return {}
    return {
        request.job_id: Reason(
            code=ReasonCode.FRAGMENTED,
            text=f"{request.gpus} GPUs are free, but not together in the shape it asks for",
        )
        for request, layout in zip(granted, layouts, strict=True)
        if layout is None
    }


class _Refusals:
    """Why jobs wait when no GPU is free at all: kept with the nodes, as it depends on no others."""

    __slots__ = ("reasons", "sorts", "statuses")

    def __init__(self) -> None:
        # Of jobs that are alike; the profile is kept so that its id stays its own.
        self.sorts: dict[tuple[object, ...], tuple[Profile, Reason]] = {}
        # With the job's id, by the id of the status, which is kept so that its id stays its own.
        self.reasons: dict[int, tuple[int, Reason]] = {}
        self.statuses: list[JobStatus] = []

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot, most: int) -> _Refusals:
        """What there is for the nodes of ``snapshot``; forgotten when there is too much."""
        found = snapshot.of_nodes.get(cls)
        if (
            not isinstance(found, cls)
            or len(found.statuses) > most
            or len(found.sorts) > _MOST_REFUSALS
        ):
            found = snapshot.of_nodes[cls] = cls()
        return found


class _Reasons:
    """Why jobs are not granted, as precisely as the packing can tell; one value per case.

    A case is all that a reason depends on, so ten thousand waiting jobs share a few reasons.
    """

    def __init__(self, snapshot: Snapshot, requests: Requests, packer: Packer) -> None:
        self._snapshot = snapshot
        self._requests = requests
        self._packer = packer
        self._known: dict[tuple[object, ...], Reason] = {}
        # Of jobs for which so many GPUs, too few, are free, by what tells them apart.
        self._sorts: dict[int, dict[tuple[object, ...], Reason]] = {}
        self._whole: Room | None = None

    def of_all(self, refused: Sequence[JobStatus], waiting: dict[int, Reason]) -> None:
        """Add the reasons of jobs that were refused because no GPU is free."""
        kept = _Refusals.of_snapshot(self._snapshot, 2 * len(refused) + _FORGOTTEN_AT_LEAST)
        keys = list(map(id, refused))
        found = list(map(kept.reasons.get, keys))
        if not all(found):
            new = [status for status, one in zip(refused, found, strict=True) if one is None]
            sorts = [(one.phase is _RUNNING, *needs_by(one.job, one.profile)) for one in new]
            reasons = map(self._sorts.setdefault(0, {}).get, sorts)
            pairs = [
                (status.job.job_id, reason or self.of(status, 0))
                for status, reason in zip(new, reasons, strict=True)
            ]
            kept.reasons.update(zip(map(id, new), pairs, strict=True))
            kept.statuses += new
            waiting.update(pairs)
            if len(new) == len(found):
                return
        waiting.update([one for one in found if one is not None])

    def when_full(self, status: JobStatus) -> Reason:
        """The reason of a job that was refused because no GPU is free."""
        sorts, sort = _Refusals.of_snapshot(self._snapshot, _MOST_REFUSALS).sorts, _sort(status)
        found = sorts.get(sort)
        if found is None:
            found = sorts[sort] = status.profile, self._of_case(status, 0)
        return found[1]

    def of(self, status: JobStatus, free: int) -> Reason:
        """The reason of a job that was just refused when ``free`` GPUs of its types were free."""
        if free >= status.job.gpus:
            return self._of_case(status, free)
        # Most jobs of a long queue end here, and most of them are like one before.
        sort, known = _sort(status), self._sorts.setdefault(free, {})
        reason = known.get(sort)
        if reason is None:
            reason = known[sort] = self._of_case(status, free)
        return reason

    def _of_case(self, status: JobStatus, free: int) -> Reason:
        job = status.job
        shape = (job.gpus, job.nodes, job.gpu_types)
        preempted = status.phase is _RUNNING
        bare = free >= job.gpus and self._packer.fits_gpus_only(shape)
        case = (shape, self._requests.floor(status), free, bare, preempted)
        if case not in self._known:
            code, text = self._make(status, shape, free, bare)
            if preempted:
                code, text = ReasonCode.PREEMPTED, f"preempted: {text}"
            self._known[case] = Reason(code=code, text=text)
        return self._known[case]

    def _make(
        self, status: JobStatus, shape: Shape, free: int, bare: bool
    ) -> tuple[ReasonCode, str]:
        job = status.job
        kind = " or ".join(job.gpu_types) if job.gpu_types else "any type"
        if not self._fits_when_empty(status, shape):
            return (
                ReasonCode.NEVER_FITS,
                f"{job.gpus} GPUs ({kind}) on {job.nodes or 'any number of'} nodes with "
                f"{job.min_mem_mib_per_node} MiB each do not fit into the pool even when it is "
                "empty",
            )
        if free < job.gpus:
            return (
                ReasonCode.NO_GPUS,
                f"needs {job.gpus} GPUs ({kind}); jobs ahead of it leave {free}",
            )
        if bare:
            return (
                ReasonCode.NO_MEMORY,
                f"{job.gpus} GPUs are free, but not with the memory and cores that it needs "
                "at least beside the jobs there",
            )
        return (
            ReasonCode.FRAGMENTED,
            f"{free} GPUs are free, but not {job.gpus} in the shape it asks for",
        )

    def _fits_when_empty(self, status: JobStatus, shape: Shape) -> bool:
        """Whether the job would fit if it were alone and every node of the pool were up."""
        floor, pool = self._requests.floor(status), self._requests.pool
        if shape[1] in (None, 1) and _fits_on_one(pool, shape, floor):
            return True
        if self._whole is None:
            total = [node.total for node in pool.nodes]
            self._whole = Room(pool, [(one.gpus, one.cpus, one.mem_mib) for one in total])
        return self._whole.find(shape, floor) is not None


def _sort(status: JobStatus) -> tuple[object, ...]:
    """What tells apart jobs for which too few GPUs are free."""
    return status.phase is _RUNNING, *needs_by(status.job, status.profile)


def _fits_on_one(pool: Pool, shape: Shape, floor: Need) -> bool:
    """Whether an empty node would have all of it."""
    gpus, _, types = shape
    for kind, node in enumerate(pool.kinds):
        total = node.total
        if total.gpus >= gpus and (not types or node.gpu_type in types):
            _, cpus, mem_mib = floor.at(kind, gpus)
            if total.cpus >= cpus and total.mem_mib >= mem_mib:
                return True
    return False
