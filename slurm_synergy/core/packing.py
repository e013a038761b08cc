"""Packing of GPU requests onto nodes: can these jobs run together, and where.

Only GPUs are distributed here. Cores and memory count with what promises P1 and P7 make
indispensable, so that a set of jobs that packs can also be given its proportional rates, whatever
the mechanism does with the rest. Policies ask whether a set packs, mechanisms where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import le

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
_MOST_REACHES = 100_000
# How often jobs are packed anew, in another order, before a job is refused.
_TRIES = 6

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
    the word of a policy that grants just this, once there is one. ``reach`` counts the GPUs that
    such jobs could take in the empty pool: the fewer, the harder it is to place.
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
    reach: int = 0

    @property
    def gpus(self) -> int:
        """GPUs in total."""
        return self.shape[0]


def layout_of(placement: Placement) -> GpuLayout:
    """The GPU part of a placement, in rank order."""
    if len(placement.shares) == 1:  # most jobs; a list takes twice as long
        ((name, share),) = placement.shares
        return placement.gpu_type, ((name, share.gpus),)
    return placement.gpu_type, tuple([(name, share.gpus) for name, share in placement.shares])


def parts_of(pool: Pool, layout: GpuLayout, need: Need) -> Parts:
    """What ``need`` takes on ``layout``; nodes that left the pool are nobody's concern."""
    numbers, kinds = pool.number, pool.kind_of
    if len(layout[1]) == 1:
        ((name, gpus),) = layout[1]
        number = numbers.get(name)
        return [] if number is None else [(number, need.at(kinds[number], gpus))]
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
        self._usable = [0] * len(self.pool.kinds)
        for node, kind in zip(self.pool.nodes, self.pool.kind_of, strict=True):
            self._usable[kind] += node.capacity.gpus > 0
        # Of jobs that hold nothing, with what they were made from.
        self.requests: dict[int, tuple[Job, Profile, Request]] = {}
        self._reaches: dict[tuple[Shape, Need], int] = {}
        # How the last packing into empty nodes began, in the order of the policy and by size.
        self.trail: Trail = []
        self.largest_first: Trail = []

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> _Lasting:
        """What there is for the nodes of ``snapshot``."""
        found = snapshot.of_nodes.get(cls)
        if not isinstance(found, cls):
            found = snapshot.of_nodes[cls] = cls(snapshot)
        if len(found.requests) > 2 * len(snapshot.jobs) + _FORGOTTEN_AT_LEAST:
            found.requests.clear()
        return found

    def needs(self, rule: Rule) -> Needs:
        """What jobs need by ``rule``."""
        if rule not in self._needs:
            self._needs[rule] = Needs(self.pool, rule)
        return self._needs[rule]

    def reach(self, shape: Shape, need: Need) -> int:
        """GPUs that such jobs could take in the empty pool, regardless of how many nodes each."""
        found = self._reaches.get((shape, need))
        if found is None:
            if len(self._reaches) > _MOST_REACHES:
                self._reaches.clear()
            found = self._reaches[shape, need] = _reach(self.pool, self._usable, shape, need)
        return found


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
        shape: Shape = (job.gpus, job.nodes, job.gpu_types)
        if configuration is not None:
            only = configuration.gpu_type
            types = (only,) if only else job.gpu_types
            shape = (configuration.gpus, configuration.nodes, types)
        if made is None or made.shape != shape:
            if status.lease is None:
                kept = self._lasting.requests.get(job.job_id)
                made = None
                if kept is not None and kept[0] is job and kept[1] is status.profile:
                    made = kept[2]
            if made is None or made.shape != shape:
                made = self._make(status, shape)
                if status.lease is None:
                    self._lasting.requests[job.job_id] = (job, status.profile, made)
            self._made[job.job_id] = made
        return made

    def of_grant(self, grant: Grant) -> Request | None:
        """The request of which ``grant`` is the word; None if it is that of none."""
        made = self._made.get(grant.job_id)
        return made if made is not None and made.grant is grant else None

    def retrace(self, packer: Packer, walk: Iterable[JobStatus]) -> list[Request]:
        """``Packer.retrace`` of the requests of ``walk``, all of jobs that hold nothing.

        As ``of`` of each, but only of those that were there when the earlier packer began.
        """
        begun, made, kept = [], self._made, self._lasting.requests.get
        for status, step in zip(walk, self._lasting.trail, strict=False):
            job, request = status.job, step[0]
            known = kept(job.job_id)
            if (
                known is None
                or known[2] is not request
                or known[0] is not job
                or known[1] is not status.profile
                or request.shape != (job.gpus, job.nodes, job.gpu_types)
            ):
                break
            made[job.job_id] = request
            begun.append(request)
        return packer.retrace(begun)

    def _make(self, status: JobStatus, shape: Shape) -> Request:
        need = self._floors.of(status)
        job = status.job
        reach = self._lasting.reach(shape, need)
        now = held(status)
        if now is None:
            return Request(job_id=job.job_id, shape=shape, need=need, held_parts=[], reach=reach)
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
            reach=reach,
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


def _reach(pool: Pool, usable: Sequence[int], shape: Shape, need: Need) -> int:
    """``_Lasting.reach``; ``usable`` counts the usable nodes of each kind."""
    gpus, nodes, types = shape
    each, found = gpus // nodes if nodes else 1, 0
    for kind, node in enumerate(pool.kinds):
        if usable[kind] and (not types or node.gpu_type in types):
            most = node.total
            pairs = zip((most.gpus, most.cpus, most.mem_mib), need.at(kind, each), strict=True)
            found += usable[kind] * each * min([has // needs for has, needs in pairs if needs])
    return found


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
        self._is_mixed = len(pool.types) > 1
        # Added jobs that may use another GPU type as well, and their GPUs, by the type they have.
        self._movable: dict[str, dict[int, Request]] = {}
        self._movable_gpus: dict[str, int] = {}
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
        self._count_movable()
        return added

    def layout(self, job_id: int) -> GpuLayout | None:
        """Where ``job_id`` was put, or None."""
        return self._layouts.get(job_id)

    def free_gpus(self, gpu_types: tuple[str, ...]) -> int:
        """Free GPUs of the allowed type (any when empty) that has most of them free."""
        return self._room.free_gpus(gpu_types)

    def reachable_gpus(self, gpu_types: tuple[str, ...]) -> int:
        """At most so many were free of one allowed type if added jobs left it for another type."""
        free, most = self._room.free_gpus, self._room.free_gpus(gpu_types)
        if self._movable_gpus:
            types = [name for name, _ in self._pool.types]
            everywhere = sum([free((name,)) for name in types])
            for name, gpus in self._movable_gpus.items():
                if not gpu_types or name in gpu_types:
                    most = max(most, min(free((name,)) + gpus, everywhere))
        return most

    def _count_movable(self) -> None:
        self._movable, self._movable_gpus = {}, {}
        if self._is_mixed:
            for job_id, request in self._added.items():
                self._note_movable(request, self._layouts[job_id])

    def _note_movable(self, request: Request, layout: GpuLayout) -> None:
        kind = layout[0]
        if layout != request.held and self._pool.breadth(request.shape[2]) > 1:
            self._movable.setdefault(kind, {})[request.job_id] = request
            self._movable_gpus[kind] = self._movable_gpus.get(kind, 0) + request.gpus

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
        layout = self._elsewhere(request)
        if layout is None:
            self._refused = True
            if self.reachable_gpus(request.shape[2]) < request.shape[0]:
                return False
            return self._repack(request)
        parts = self._put(request, layout)
        if self.is_plain and not self._refused:
            self.trail.append((request, layout, parts))
        return True

    def _put(self, request: Request, layout: GpuLayout) -> Parts:
        """Add the request there; what it takes."""
        parts = parts_of(self._pool, layout, request.need)
        self._room.take(parts)
        if self._unclaimed is not None:
            self._unclaimed.take(parts)
        self._added[request.job_id] = request
        self._layouts[request.job_id] = layout
        if self._is_mixed:
            self._note_movable(request, layout)
        return parts

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
        layout = self._make_way(request)
        if layout is not None:
            self._put(request, layout)
            self.is_plain = False
            return True
        if self._anchored is None:
            self._anchored = Room(self._pool)
            for other in self._added.values():
                if self._stays(other):
                    self._anchored.take(other.held_parts)
        packed = None
        if self._anchored.find(*sort) is not None:
            everyone = [*self._added.values(), request]
            packed = _pack_at_last(self._anchored, everyone, self._stays)
        if packed is None:
            self._hopeless.add(sort)
            return False
        self._added[request.job_id] = request
        self._layouts = packed
        self.is_plain = False
        self._recount()
        return True

    def _make_way(self, request: Request) -> GpuLayout | None:
        """Room for the request where added jobs, as few as needed, go to another GPU type."""
        for gpu_type in sorted(self._movable):
            if request.shape[2] and gpu_type not in request.shape[2]:
                continue
            moved: list[tuple[Request, GpuLayout]] = []
            for other in self._movable_on(gpu_type, request):
                before = self._layouts[other.job_id]
                if not self._move_off(other, gpu_type):
                    continue
                moved.append((other, before))
                layout = self._elsewhere(request)
                if layout is not None:
                    return layout
            for other, before in reversed(moved):
                self._move(other, before)
        return None

    def _movable_on(self, gpu_type: str, request: Request) -> list[Request]:
        """Those that may leave the type: first the smallest ones whose place is large enough."""
        found = list(self._movable[gpu_type].values())
        wanted = request.shape[0]
        found.sort(key=lambda one: (one.shape[0] < wanted, one.shape[0]))
        return found

    def _move_off(self, request: Request, gpu_type: str) -> bool:
        gpus, nodes, allowed = request.shape
        names = [name for name, _ in self._pool.types if name != gpu_type]
        types = tuple([name for name in names if not allowed or name in allowed])
        layout = (self._unclaimed or self._room).find((gpus, nodes, types), request.need)
        if layout is not None:
            self._move(request, layout)
        return layout is not None

    def _move(self, request: Request, layout: GpuLayout) -> None:
        before = self._layouts[request.job_id]
        parts = parts_of(self._pool, before, request.need)
        self._room.give(parts)
        if self._unclaimed is not None:
            self._unclaimed.give(parts)
        if self._movable.get(before[0], {}).pop(request.job_id, None) is not None:
            self._movable_gpus[before[0]] -= request.gpus
        self._put(request, layout)
        # It may be back where it runs, which counts as staying.
        self._anchored = None

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
        self._count_movable()


def _largest_first(requests: Sequence[Request]) -> bool:
    """Whether ``_pack_around`` would take them in this very order."""
    alike = [(one.shape, one.reach) for one in requests]
    if alike and alike.count(alike[0]) == len(alike):
        return True
    sizes = list(map(_size, requests))
    return all(map(le, sizes, sizes[1:]))


def _size(request: Request) -> tuple[int, int, int]:
    """Sorts the largest first, and of one size those first that are the hardest to place."""
    gpus, nodes, _ = request.shape
    return -(gpus // (nodes or 1)), -gpus, request.reach


def _pack_around(
    room: Room,
    requests: Sequence[Request],
    stays: Callable[[Request], bool],
    trail: Trail | None = None,
) -> dict[int, GpuLayout] | None:
    """All requests, those that stay (booked in ``room``) and the others largest first, or None.

    ``trail`` is that of the last packing into the same empty room, and is replaced by this one's.
    """
    return _try_around(room, requests, stays, (), trail)[0]


def _try_around(
    room: Room,
    requests: Sequence[Request],
    stays: Callable[[Request], bool],
    first: Sequence[Request],
    trail: Trail | None = None,
) -> tuple[dict[int, GpuLayout] | None, Request | None]:
    """As ``_pack_around``, with ``first`` before the others; and the one that found no place."""
    packed: dict[int, GpuLayout] = {}
    moving: list[tuple[tuple[int, int, int], int]] = []
    for rank, request in enumerate(requests):
        if request.held is not None and stays(request):
            packed[request.job_id] = request.held
        elif request not in first:
            moving.append((_size(request), rank))
    order = [*first, *[requests[rank] for _, rank in sorted(moving)]]
    known = _retraced(room, order, trail or ())
    if trail is not None:
        trail[len(known) :] = []
    for request, layout, _ in known:
        packed[request.job_id] = layout
    for request in order[len(known) :]:
        found = room.find(request.shape, request.need)
        if found is None:
            return None, request
        parts = parts_of(room.pool, found, request.need)
        room.take(parts)
        packed[request.job_id] = found
        if trail is not None:
            trail.append((request, found, parts))
    return packed, None


def _pack_at_last(
    room: Room, requests: Sequence[Request], stays: Callable[[Request], bool]
) -> dict[int, GpuLayout] | None:
    """``_pack_around``, a few times: whoever found no place comes first the next time."""
    first: list[Request] = []
    for _ in range(_TRIES):
        packed, failed = _try_around(room.copy(), requests, stays, first)
        if failed is None or failed in first:
            return packed
        first.insert(0, failed)
    return None


def _retraced(room: Room, walk: Iterable[Request], trail: Sequence[Step]) -> Sequence[Step]:
    """Book the steps of ``trail`` as long as ``walk`` begins with the same requests.

    From empty nodes the same jobs in the same order find the same places, so these need not be
    looked for.
    """
    count = 0
    for request, step in zip(walk, trail, strict=False):
        if request is not step[0]:
            break
        count += 1
    same = trail[:count]
    room.take_all([step[2] for step in same])
    return same


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
        anew = _pack_at_last(fixed, requests, lambda one: one.pinned)
        if anew is not None:
            return anew
    return {request.job_id: packer.layout(request.job_id) for request in requests}
