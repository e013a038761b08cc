"""Finding places for GPU requests one after the other, in the order of a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import cast

from slurm_synergy.core.regrouping import pack_around, pack_at_last
from slurm_synergy.core.request import Request, Step, Trail
from slurm_synergy.core.room import GpuLayout, Need, Parts, Pool, Room, Shape, parts_of

__all__ = ["Mark", "Packer", "pack_gpus"]

Mark = tuple[int, Room]
"""A number of steps of a trail, and what is left after them; not to be changed."""

_STEPS_BETWEEN_MARKS = 16
_RUN = 64
"""At most so many jobs that stay are booked at once."""
_REQUEST: Callable[[Step], Request] = itemgetter(0)
_PARTS: Callable[[Step], Parts] = itemgetter(2)


class Packer:
    """Adds jobs one by one in priority order and keeps a feasible layout of all added.

    A job that is added may take the GPUs of running jobs that come after it, but it does not move
    those before it: migration costs a restart, and only a job of higher priority is worth it.
    ``requests`` are the jobs to come, of which those count that hold something now. ``before`` is
    the trail of an earlier packer for the same nodes, ``marks`` are its marks.
    """

    def __init__(
        self,
        pool: Pool,
        requests: Iterable[Request],
        before: Sequence[Step] = (),
        marks: Sequence[Mark] = (),
    ) -> None:
        self._pool = pool
        self._room = Room(pool)
        # Of what is in the trail, not all need be among these yet: see ``_fill``.
        self._added: dict[int, Request] = {}
        self._layouts: dict[int, GpuLayout] = {}
        self._filled = 0
        self._bare = Need(lambda _kind, gpus: (gpus, 0, 0))
        # Claims of running jobs whose turn has not come: avoided if there is another way.
        self._claims = {
            request.job_id: request.held_parts
            for request in requests
            if request.held is not None and not request.pinned
        }
        # Jobs that have come since claims were last looked up: theirs are void.
        self._come: list[int] = []
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
        # What was added before the first refusal, while that was so, and how many of the first of
        # these were put where an earlier packer put them.
        self.trail: Trail = []
        self.retraced = 0
        # What was left after some of the first steps of the trail.
        self.marks = list(marks)
        self._before = before
        self._refused = False
        # Added jobs that keep the GPUs that they hold; None once jobs were packed anew.
        self._staying: set[int] | None = set()

    @property
    def layouts(self) -> Mapping[int, GpuLayout]:
        """Where each added job was put."""
        self._fill()
        return self._layouts

    def _fill(self) -> None:
        """Take the steps of the trail up by the ids of their jobs."""
        for request, layout, _ in self.trail[self._filled :]:
            self._added[request.job_id], self._layouts[request.job_id] = request, layout
        self._filled = len(self.trail)

    def retrace(self, count: int) -> list[Request]:
        """Add the first ``count`` jobs of an earlier packer where it did.

        Only for a packer to which nothing was added.
        """
        if not self.is_plain:
            return []
        self.trail, self.retraced = list(self._before[:count]), count
        self.marks, begin = [mark for mark in self.marks if mark[0] <= count], 0
        if self.marks:
            begin, room = self.marks[-1]
            self._room = room.copy()
        self._room.take_all(map(_PARTS, self.trail[begin:]))
        if count - begin >= _STEPS_BETWEEN_MARKS:
            self.marks.append((count, self._room.copy()))
        self._count_movable()
        return list(map(_REQUEST, self.trail))

    def extend(self, requests: Iterable[Request]) -> list[Request]:
        """Add the first of ``requests``, as long as each finds a place at once: those added.

        As ``add`` of each, but quicker. The next one may find a place as well, by ``add``.
        """
        added: list[Request] = []
        if self._anchored is not None:
            return added
        book, trail = self._room.book, self.trail
        is_simple = self.is_plain and not self._refused and not self._is_mixed
        run: list[Request] = []
        for request in requests:
            if request.may_stay and not request.pinned:  # as _stay, since it has a claim
                run.append(request)
                if len(run) == _RUN:
                    if not self._stay_on(run, added):
                        return added
                    run.clear()
                continue
            if run:
                if not self._stay_on(run, added):
                    return added
                run.clear()
            if request.held is not None:
                is_simple = False
                if not self._stay(request):
                    break
            elif is_simple:  # as _put_new
                put = book(request.shape, request.need)
                if put is None:
                    break
                trail.append((request, put[0], put[1]))
            elif not self._put_new(request):
                break
            added.append(request)
        if run:
            self._stay_on(run, added)
        return added

    def _stay_on(self, run: list[Request], added: list[Request]) -> bool:
        """Add those of ``run``, which have claims, where they are; whether nobody is there.

        Of those that were added ``added`` is told, which are the first of them.
        """
        count = self._room.take_while_free([request.held_parts for request in run])
        stay = run if count == len(run) else run[:count]
        if stay:
            self._note_staying(stay)
            added += stay
        return stay is run

    def _note_staying(self, requests: Sequence[Request]) -> None:
        """These jobs, which had claims, were added where they are."""
        self._fill()
        self.is_plain = False
        ids = [request.job_id for request in requests]
        self._added.update(zip(ids, requests, strict=True))
        places = cast(list[GpuLayout], [request.held for request in requests])
        self._layouts.update(zip(ids, places, strict=True))
        if self._staying is not None:
            self._staying.update(ids)
        self._come += ids

    def _stay(self, request: Request) -> bool:
        """Add a job where it is, unless it may not stay, or somebody is there."""
        parts, held, job_id = request.held_parts, request.held, request.job_id
        assert held is not None
        if request.pinned:
            self._room.take(parts)
        elif not (request.may_stay and self._room.take_if_free(parts)):
            return False
        claim = self._claims.pop(job_id, None)
        # What was claimed is taken now: nothing changes for those that avoid claims.
        if claim is None and self._unclaimed is not None:
            self._unclaimed.take(parts)
        if self._anchored is not None:
            self._anchored.take(parts)
        if self._filled < len(self.trail):
            self._fill()
        self.is_plain = False
        self._added[job_id] = request
        self._layouts[job_id] = held
        if self._staying is not None:
            self._staying.add(job_id)
        return True

    def _put_new(self, request: Request) -> bool:
        """Add a job on free GPUs, preferably such as no running job behind this one claims."""
        avoiding = self._unclaimed
        if avoiding is None and self._claims:
            avoiding = self._avoiding()
        shape, need = request.shape, request.need
        if avoiding is None:
            put = self._room.book(shape, need)
        else:
            put = avoiding.book(shape, need)
            if put is not None:
                self._room.take(put[1])
            else:
                put = self._room.book(shape, need)
                if put is not None:
                    avoiding.take(put[1])
        if put is None:
            return False
        layout, parts = put
        if self._is_mixed:
            self._note_movable(request, layout)
        if self.is_plain and not self._refused:
            self.trail.append((request, layout, parts))
        else:
            self._added[request.job_id], self._layouts[request.job_id] = request, layout
        return True

    def packed_again(self) -> Mapping[int, GpuLayout] | None:
        """``pack_gpus`` of the added jobs, as far as it follows from how they were added.

        That is where some of them keep the GPUs that they hold, and all others that may can keep
        theirs as well, which somebody had taken for the time being: those that hold nothing are
        packed anew, largest first. None where there is more to say.
        """
        found = self.staying_again()
        return None if found is None else {**self._layouts, **found[1]}

    def staying_again(self) -> tuple[frozenset[int], Mapping[int, GpuLayout]] | None:
        """As ``packed_again``: who is there on the GPUs that it holds, and where all others are."""
        staying = self._staying
        if not staying:
            return None
        movers = [request for job_id, request in self._added.items() if job_id not in staying]
        room = self._room.copy()
        for request in movers:
            room.give(parts_of(self._pool, self._layouts[request.job_id], request.need))
        for request in movers:
            if request.may_stay and not room.take_if_free(request.held_parts):
                return None
        packed = pack_around(room, movers, lambda one: one.may_stay)
        if packed is None:
            return None
        back = [request.job_id for request in movers if request.may_stay]
        return frozenset(staying).union(back), packed

    def layout(self, job_id: int) -> GpuLayout | None:
        """Where ``job_id`` was put, or None."""
        return self.layouts.get(job_id)

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
            self._fill()
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
        if request.held is not None:
            if self._stay(request):
                return True
            self._fill()
            self.is_plain = False
            claim = self._claims.pop(request.job_id, None)
            if claim is not None and self._unclaimed is not None:
                self._unclaimed.give(claim)
        if self._put_new(request):
            return True
        self._fill()
        self._refused = True
        if self.reachable_gpus(request.shape[2]) < request.shape[0]:
            return False
        return self._repack(request)

    def _put(self, request: Request, layout: GpuLayout) -> None:
        """Add the request there."""
        parts = parts_of(self._pool, layout, request.need)
        self._room.take(parts)
        if self._unclaimed is not None:
            self._unclaimed.take(parts)
        self._added[request.job_id] = request
        self._layouts[request.job_id] = layout
        if self._is_mixed:
            self._note_movable(request, layout)

    def _avoiding(self) -> Room | None:
        """What neither an added job nor a claim takes; None where nobody claims anything."""
        if self._unclaimed is None and self._claims:
            for job_id in self._come:
                self._claims.pop(job_id, None)
            self._come.clear()
            if self._claims:
                self._unclaimed = self._room.copy()
                self._unclaimed.take_all(self._claims.values())
        return self._unclaimed

    def _elsewhere(self, request: Request) -> GpuLayout | None:
        """Free GPUs, preferably such as no running job behind this one claims."""
        avoiding, layout = self._avoiding(), None
        if avoiding is not None:
            layout = avoiding.find(request.shape, request.need)
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
            packed = pack_at_last(self._anchored, everyone, self._stays)
        if packed is None:
            self._hopeless.add(sort)
            return False
        self._added[request.job_id] = request
        self._layouts = packed
        self.is_plain, self._staying = False, None
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
    packed = pack_around(room, requests, lambda one: one.job_id in staying, empty)
    if packed is not None:
        return packed
    packer = Packer(pool, requests)
    added = sum([packer.add(request) for request in requests])
    if added < len(requests):
        anew = pack_at_last(fixed, requests, lambda one: one.pinned)
        if anew is not None:
            return anew
    return {request.job_id: packer.layout(request.job_id) for request in requests}
