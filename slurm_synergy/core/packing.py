"""Packing of GPU requests onto nodes: can these jobs run together, and where.

Only GPUs are distributed here. Cores and memory count with what promises P1 and P7 make
indispensable, so that a set of jobs that packs can also be given its proportional rates, whatever
the mechanism does with the rest. Policies ask whether a set packs, mechanisms where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import ge

from slurm_synergy.core.model import (
    Configuration,
    Grant,
    Job,
    JobStatus,
    Node,
    Placement,
    Profile,
    Snapshot,
)
from slurm_synergy.core.pipeline import floor_share
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.room import GpuLayout, Need, Needs, Parts, Pool, Room, Shape
from slurm_synergy.core.snapshot import held, keeps_all

__all__ = [
    "Packer",
    "Request",
    "Requests",
    "Rule",
    "Step",
    "Trail",
    "layout_of",
    "pack_gpus",
    "parts_of",
]

Rule = Callable[[JobStatus, Node, int], Resources]
"""What a job needs on a node for a number of its GPUs, in somebody's opinion."""

_FORGOTTEN_AT_LEAST = 1000

Step = tuple["Request", GpuLayout, Parts]
"""A job that was added, where it was put, and what it takes there."""

Trail = list[Step]
"""How a packing of jobs that hold nothing began."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A job as the packer sees it. Made by ``Requests``; treated as a value.

    ``need`` is its floor. ``held`` is what the job holds and would like to keep, ``held_parts``
    what it takes there, ``may_stay`` whether that still is what it asks for; ``pinned`` that it
    keeps its GPUs in any case, ``frozen`` that it keeps its cores and memory as well. ``grant`` is
    the word of a policy that grants just this, once there is one.
    """

    job_id: int
    shape: Shape
    need: Need
    held: GpuLayout | None = None
    held_parts: Parts
    may_stay: bool = False
    pinned: bool = False
    frozen: bool = False
    grant: Grant | None = None

    @property
    def gpus(self) -> int:
        """GPUs in total."""
        return self.shape[0]


def layout_of(placement: Placement) -> GpuLayout:
    """The GPU part of a placement, in rank order."""
    return placement.gpu_type, tuple([(name, share.gpus) for name, share in placement.shares])


def parts_of(pool: Pool, layout: GpuLayout, need: Need) -> Parts:
    """What ``need`` takes on ``layout``; nodes that left the pool are nobody's concern."""
    numbers, kinds = pool.number, pool.kind_of
    return [
        (numbers[name], need.at(kinds[numbers[name]], gpus))
        for name, gpus in layout[1]
        if name in numbers
    ]


class _Lasting:
    """What requests have in common over all rounds with the same nodes."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.pool = Pool(snapshot.nodes)
        self._needs: dict[Rule, Needs] = {}
        # Of jobs that hold nothing, with what they were made from.
        self._requests: dict[int, tuple[Job, Profile, Request]] = {}
        # How the last packing into empty nodes began, in the order of the policy and by size.
        self.trail: Trail = []
        self.largest_first: Trail = []

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> _Lasting:
        """What there is for the nodes of ``snapshot``."""
        found = snapshot.of_nodes.get(cls)
        if not isinstance(found, cls):
            found = snapshot.of_nodes[cls] = cls(snapshot)
        if len(found._requests) > 2 * len(snapshot.jobs) + _FORGOTTEN_AT_LEAST:
            found._requests.clear()
        return found

    def needs(self, rule: Rule) -> Needs:
        """What jobs need by ``rule``."""
        if rule not in self._needs:
            self._needs[rule] = Needs(self.pool, rule)
        return self._needs[rule]

    def pending(self, status: JobStatus) -> Request | None:
        """The request that was made for this very job while it held nothing."""
        found = self._requests.get(status.job.job_id)
        if found is not None and found[0] is status.job and found[1] is status.profile:
            return found[2]
        return None

    def keep(self, status: JobStatus, request: Request) -> None:
        """Remember the request of a job that holds nothing."""
        self._requests[status.job.job_id] = (status.job, status.profile, request)


class Requests:
    """The requests of one round's jobs, and how they pack.

    All of it follows from the snapshot alone; policy and mechanism ask for the same, so it is kept
    with the snapshot. What depends on the nodes and on jobs that hold nothing is kept with the
    nodes.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._lasting = _Lasting.of_snapshot(snapshot)
        self.pool = self._lasting.pool
        self._usable = snapshot.usable
        self._floors = self._lasting.needs(floor_share)
        self._made: dict[int, Request] = {}
        self._packed: tuple[list[Request], Mapping[int, GpuLayout | None]] = ([], {})

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> Requests:
        """The requests of ``snapshot``: the same object whenever asked."""
        found = snapshot.derived.get(cls)
        if not isinstance(found, cls):
            found = snapshot.derived[cls] = cls(snapshot)
        return found

    def pack(self, requests: Sequence[Request]) -> Mapping[int, GpuLayout | None]:
        """``pack_gpus`` of these requests, remembered until others are asked for."""
        before, packed = self._packed
        asked = list(requests)
        if asked != before:
            packed = pack_gpus(self.pool, asked, self._lasting.largest_first)
            self._packed = (asked, packed)
        return packed

    def adopt(self, requests: Sequence[Request], packer: Packer) -> None:
        """Take over how ``packer`` put exactly these, where ``pack`` would do the very same."""
        if packer.is_plain:
            self._lasting.trail = packer.trail
            if _largest_first(requests):
                self._packed = (list(requests), packer.layouts)

    def packer(self, holding: Iterable[Request]) -> Packer:
        """A packer for jobs of which ``holding`` hold something."""
        return Packer(self.pool, holding, self._lasting.trail)

    def needs(self, rule: Rule) -> Needs:
        """What jobs need by ``rule``."""
        return self._lasting.needs(rule)

    def floor(self, status: JobStatus) -> Need:
        """What the job cannot do without (promises P1 and P7)."""
        return self._floors.of(status)

    def of(self, status: JobStatus, configuration: Configuration | None = None) -> Request:
        """The request of a job for ``configuration`` (as the user asked for it when None)."""
        job = status.job
        made = self._made.get(job.job_id)
        grant = made.grant if made is not None else None
        if made is not None and grant is not None and grant.configuration is configuration:
            return made
        shape = (job.gpus, job.nodes, job.gpu_types)
        if configuration is not None:
            only = configuration.gpu_type
            types = (only,) if only else job.gpu_types
            shape = (configuration.gpus, configuration.nodes, types)
        if made is None or made.shape != shape:
            if status.lease is None:
                made = self._lasting.pending(status)
            if made is None or made.shape != shape:
                made = self._make(status, shape)
                if status.lease is None:
                    self._lasting.keep(status, made)
            self._made[job.job_id] = made
        return made

    def _make(self, status: JobStatus, shape: Shape) -> Request:
        need = self._floors.of(status)
        job = status.job
        now = held(status)
        if now is None:
            return Request(job_id=job.job_id, shape=shape, need=need, held_parts=[])
        layout = layout_of(now)
        frozen = keeps_all(status, now, self._usable)
        pinned = frozen or not job.preemptible
        parts = (
            self._pinned_parts(need, now, frozen) if pinned else parts_of(self.pool, layout, need)
        )
        return Request(
            job_id=job.job_id,
            shape=shape,
            need=need,
            held=layout,
            held_parts=parts,
            may_stay=len(parts) == len(layout[1]) and _has_shape(shape, layout),
            pinned=pinned,
            frozen=frozen,
        )

    def _pinned_parts(self, need: Need, now: Placement, frozen: bool) -> Parts:
        """What a pinned job cannot do without: all it holds when frozen, else its floor.

        The floor is cut to what it holds: that fits where it is, and a floor that has grown since
        (a better profile) must not make the pool look overfull.
        """
        parts: Parts = []
        for name, share in now.shares:
            number = self.pool.number.get(name)
            if number is None:
                continue
            _, cpus, mem_mib = (
                (0, share.cpus, share.mem_mib)
                if frozen
                else need.at(self.pool.kind_of[number], share.gpus)
            )
            least = (share.gpus, min(cpus, share.cpus), min(mem_mib, share.mem_mib))
            parts.append((number, least))
        return parts


def _has_shape(shape: Shape, layout: GpuLayout) -> bool:
    gpus, nodes, allowed = shape
    gpu_type, parts = layout
    if allowed and gpu_type not in allowed:
        return False
    if nodes is not None and len(parts) != nodes:
        return False
    return sum([each for _, each in parts]) == gpus


class Packer:
    """Adds jobs one by one in priority order and keeps a feasible layout of all added.

    A job that is added may take the GPUs of running jobs that come after it, but it does not move
    those before it: migration costs a restart, and only a job of higher priority is worth it.
    ``requests`` are the jobs to come, of which those count that hold something now. ``before`` is
    the trail of an earlier packer for the same nodes.
    """

    def __init__(
        self, pool: Pool, requests: Iterable[Request], before: Sequence[Step] = ()
    ) -> None:
        self._pool = pool
        self._room = Room(pool)
        self._added: dict[int, Request] = {}
        self._layouts: dict[int, GpuLayout] = {}
        self._bare = Need(lambda _kind, gpus: (gpus, 0, 0))
        # Claims of running jobs whose turn has not come: avoided if there is another way.
        self._claims = {
            request.job_id: request.held_parts
            for request in requests
            if request.held is not None and not request.pinned
        }
        # What neither an added job nor a claim takes; made when a job first needs it.
        self._unclaimed: Room | None = None
        # What all added jobs leave that are where they run: the most that repacking could find.
        self._anchored: Room | None = None
        self._hopeless: set[tuple[Shape, Need]] = set()
        # Nobody has held or claimed anything so far, and nobody had to make room.
        self.is_plain = not self._claims
        # What was added before the first refusal, while that was so.
        self.trail: Trail = []
        self._before = before
        self._refused = False

    @property
    def layouts(self) -> Mapping[int, GpuLayout]:
        """Where each added job was put."""
        return self._layouts

    def retrace(self, walk: Iterable[Request]) -> list[Request]:
        """Add the first jobs of ``walk`` as long as an earlier packer began with the same.

        Only for a packer to which nothing was added.
        """
        if not self.is_plain:
            return []
        self.trail = list(_retraced(self._room, walk, self._before))
        added = [step[0] for step in self.trail]
        self._added = {request.job_id: request for request in added}
        self._layouts = {step[0].job_id: step[1] for step in self.trail}
        return added

    def layout(self, job_id: int) -> GpuLayout | None:
        """Where ``job_id`` was put, or None."""
        return self._layouts.get(job_id)

    def free_gpus(self, gpu_types: tuple[str, ...]) -> int:
        """Free GPUs of the allowed type (any when empty) that has most of them free."""
        return self._room.free_gpus(gpu_types)

    def fits_gpus_only(self, shape: Shape) -> bool:
        """Whether such a job would fit if cores and memory did not matter."""
        return self._room.find(shape, self._bare) is not None

    def add(self, request: Request) -> bool:
        """Add the request; False, and nothing changed, when it cannot be packed."""
        claim = self._claims.pop(request.job_id, None)
        if request.held is not None:
            self.is_plain = False
        if request.pinned or (request.may_stay and self._room.fits(request.held_parts)):
            # What was claimed is taken now: nothing changes for those that avoid claims.
            if claim is None and self._unclaimed is not None:
                self._unclaimed.take(request.held_parts)
            if self._anchored is not None:
                self._anchored.take(request.held_parts)
            self._room.take(request.held_parts)
            assert request.held is not None
            self._added[request.job_id] = request
            self._layouts[request.job_id] = request.held
            return True
        if claim is not None and self._unclaimed is not None:
            self._unclaimed.give(claim)
        if self.free_gpus(request.shape[2]) < request.shape[0]:
            self._refused = True
            return False
        layout = self._elsewhere(request)
        if layout is None:
            self._refused = True
            return self._repack(request)
        parts = parts_of(self._pool, layout, request.need)
        self._room.take(parts)
        if self._unclaimed is not None:
            self._unclaimed.take(parts)
        self._added[request.job_id] = request
        self._layouts[request.job_id] = layout
        if self.is_plain and not self._refused:
            self.trail.append((request, layout, parts))
        return True

    def _elsewhere(self, request: Request) -> GpuLayout | None:
        """Free GPUs, preferably such as no running job behind this one claims."""
        if self._unclaimed is None and self._claims:
            self._unclaimed = self._room.copy()
            for parts in self._claims.values():
                self._unclaimed.take(parts)
        layout = None
        if self._unclaimed is not None:
            layout = self._unclaimed.find(request.shape, request.need)
        return layout or self._room.find(request.shape, request.need)

    def _repack(self, request: Request) -> bool:
        """Find room by rearranging the added jobs that do not sit where they already run.

        A job for which that failed is not tried again after others were added.
        """
        sort = (request.shape, request.need)
        if sort in self._hopeless:
            return False
        if self._anchored is None:
            self._anchored = Room(self._pool)
            for other in self._added.values():
                if self._stays(other):
                    self._anchored.take(other.held_parts)
        packed = None
        if self._anchored.find(*sort) is not None:
            everyone = [*self._added.values(), request]
            packed = _pack_around(self._anchored.copy(), everyone, self._stays)
        if packed is None:
            self._hopeless.add(sort)
            return False
        self._added[request.job_id] = request
        self._layouts = packed
        self.is_plain = False
        self._recount()
        return True

    def _stays(self, request: Request) -> bool:
        return request.held is not None and self._layouts.get(request.job_id) == request.held

    def _recount(self) -> None:
        """Make the rooms anew from the layouts."""
        self._room, self._unclaimed, self._anchored = Room(self._pool), None, None
        for job_id, request in self._added.items():
            layout = self._layouts[job_id]
            if layout == request.held:
                self._room.take(request.held_parts)
            else:
                self._room.take(parts_of(self._pool, layout, request.need))


def _largest_first(requests: Sequence[Request]) -> bool:
    """Whether ``_pack_around`` would take them in this very order."""
    if requests and [one.shape for one in requests].count(requests[0].shape) == len(requests):
        return True
    sizes = [(request.gpus // (request.shape[1] or 1), request.gpus) for request in requests]
    return all(map(ge, sizes, sizes[1:]))


def _pack_around(
    room: Room,
    requests: Sequence[Request],
    stays: Callable[[Request], bool],
    trail: Trail | None = None,
) -> dict[int, GpuLayout] | None:
    """All requests, those that stay (booked in ``room``) and the others largest first, or None.

    ``trail`` is that of the last packing into the same empty room, and is replaced by this one's.
    """
    packed: dict[int, GpuLayout] = {}
    moving: list[tuple[int, int, int]] = []
    for rank, request in enumerate(requests):
        if request.held is not None and stays(request):
            packed[request.job_id] = request.held
        else:
            gpus, nodes, _ = request.shape
            moving.append((-(gpus // (nodes or 1)), -gpus, rank))
    order = [requests[rank] for _, _, rank in sorted(moving)]
    known = _retraced(room, order, trail or ())
    if trail is not None:
        trail[len(known) :] = []
    for request, layout, _ in known:
        packed[request.job_id] = layout
    for request in order[len(known) :]:
        found = room.find(request.shape, request.need)
        if found is None:
            return None
        parts = parts_of(room.pool, found, request.need)
        room.take(parts)
        packed[request.job_id] = found
        if trail is not None:
            trail.append((request, found, parts))
    return packed


def _retraced(room: Room, walk: Iterable[Request], trail: Sequence[Step]) -> Sequence[Step]:
    """Book the steps of ``trail`` as long as ``walk`` begins with the same requests.

    From empty nodes the same jobs in the same order find the same places, so these need not be
    looked for.
    """
    count = 0
    for request, step in zip(walk, trail, strict=False):
        if request is not step[0]:
            break
        room.take(step[2])
        count += 1
    return trail[:count]


def pack_gpus(
    pool: Pool, requests: Sequence[Request], trail: Trail | None = None
) -> Mapping[int, GpuLayout | None]:
    """Where each request goes, in priority order; None for those that cannot be packed.

    Jobs that hold GPUs stay where they are if all others can be packed around them; otherwise jobs
    are added in priority order, and running ones move for those before them. If even that leaves
    one out, all that can be moved are packed anew, largest first. ``trail`` is that of the last
    packing into these nodes when they were empty; it is replaced if they are so again.
    """
    room = Room(pool)
    staying: set[int] = set()
    for request in requests:
        if request.pinned:
            room.take(request.held_parts)
            staying.add(request.job_id)
    fixed = room.copy()
    for request in requests:
        if request.may_stay and not request.pinned and room.fits(request.held_parts):
            room.take(request.held_parts)
            staying.add(request.job_id)
    empty = None if staying else trail
    packed = _pack_around(room, requests, lambda one: one.job_id in staying, empty)
    if packed is not None:
        return packed
    packer = Packer(pool, requests)
    added = sum([packer.add(request) for request in requests])
    if added < len(requests):
        anew = _pack_around(fixed, requests, lambda one: one.pinned)
        if anew is not None:
            return anew
    return {request.job_id: packer.layout(request.job_id) for request in requests}
