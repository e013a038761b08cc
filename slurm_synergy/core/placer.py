"""Where configurations go: as few jobs as possible change their GPUs (Sia, section 3.4).

A job whose configuration is unchanged keeps its GPUs. The others follow, the largest per node
first: each on the fullest node, or the nodes, that have room for it. Where none has, the smallest
jobs that make room are put elsewhere. With requests that are powers of two within a node, or whole
nodes, and no more of them than there are GPUs, all of them find a place (algorithms C.10).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from slurm_synergy.core.packing import Request, parts_of
from slurm_synergy.core.room import GpuLayout, Parts, Pool, Room

__all__ = ["Placed", "place_configurations"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Where each job goes, ``unplaced`` those that fit nowhere, and what is left then."""

    layouts: dict[int, GpuLayout]
    unplaced: tuple[int, ...]
    room: Room


def place_configurations(pool: Pool, requests: Sequence[Request]) -> Placed:
    """A place for each of ``requests``; of equal ones the first is served first.

    A job is stopped to make room for another only if both would also be placed once it has been
    stopped. Otherwise it would be started where it was, and stopped again, for ever.
    """
    asked, lost = list(requests), set[int]()
    placed = _place(pool, asked)
    while _moved(asked, placed):
        later = _place(pool, _once_stopped(asked, placed))
        gone = set(later.unplaced) - set(placed.unplaced)
        if not gone:
            break
        lost |= gone
        asked = [request for request in asked if request.job_id not in lost]
        placed = _place(pool, asked)
    return replace(placed, unplaced=(*placed.unplaced, *sorted(lost)))


def _moved(requests: Sequence[Request], placed: Placed) -> bool:
    return any(_is_moved(request, placed) for request in requests)


def _is_moved(request: Request, placed: Placed) -> bool:
    return request.held is not None and placed.layouts.get(request.job_id) != request.held


def _once_stopped(requests: Sequence[Request], placed: Placed) -> list[Request]:
    """The requests when those jobs hold nothing any more that ``placed`` puts elsewhere."""
    return [
        replace(request, held=None, held_parts=[], may_stay=False)
        if _is_moved(request, placed)
        else request
        for request in requests
    ]


def _place(pool: Pool, requests: Sequence[Request]) -> Placed:
    search = _Search(pool, requests)
    search.keep()
    found = search.run()
    if found.unplaced:
        # Only the largest first certainly fits, with nobody in the way.
        anew = _Search(pool, requests).run()
        if len(anew.unplaced) < len(found.unplaced):
            return anew
    return found


@dataclass(slots=True)
class _Kept:
    """A job on a single node that may be put elsewhere."""

    rank: int
    request: Request
    parts: Parts


@dataclass(slots=True)
class _Offer:
    """What it would take to make room on a node: the jobs to be put elsewhere."""

    number: int
    victims: list[_Kept] = field(default_factory=list)

    @property
    def cost(self) -> tuple[int, int, int]:
        """Restarts, then GPUs concerned, then the node's number."""
        return len(self.victims), sum(one.request.gpus for one in self.victims), self.number


class _Search:
    """One placing of all jobs. Those that are pinned have their places."""

    def __init__(self, pool: Pool, requests: Sequence[Request]) -> None:
        self._pool, self._requests = pool, requests
        self._room = Room(pool)
        self._layouts: dict[int, GpuLayout] = {}
        self._kept: dict[int, list[_Kept]] = {}
        for request in requests:
            if request.pinned and request.held is not None:
                self._room.take(request.held_parts)
                self._layouts[request.job_id] = request.held
        self._waiting: list[tuple[int, int, int]] = []
        for rank, request in enumerate(requests):
            if request.job_id not in self._layouts:
                self._queue(rank)

    def keep(self) -> None:
        """Let jobs stay where they are, as far as all that they need is there."""
        waiting, self._waiting = sorted(self._waiting, key=lambda entry: entry[2]), []
        for _, _, rank in waiting:
            request = self._requests[rank]
            parts = request.held_parts
            if request.held is None or not request.may_stay or not self._room.fits(parts):
                self._queue(rank)
                continue
            self._room.take(parts)
            self._layouts[request.job_id] = request.held
            if len(parts) == 1:
                kept = _Kept(rank=rank, request=request, parts=parts)
                self._kept.setdefault(parts[0][0], []).append(kept)

    def run(self) -> Placed:
        """Place all that can be placed."""
        unplaced = []
        while self._waiting:
            _, _, rank = heapq.heappop(self._waiting)
            request = self._requests[rank]
            layout = self._room.find(request.shape, request.need) or self._make_room(request)
            if layout is None:
                unplaced.append(request.job_id)
                continue
            self._layouts[request.job_id] = layout
            self._room.take(parts_of(self._pool, layout, request.need))
        return Placed(layouts=self._layouts, unplaced=tuple(unplaced), room=self._room)

    def _queue(self, rank: int) -> None:
        gpus, nodes, _ = self._requests[rank].shape
        heapq.heappush(self._waiting, (-(gpus // (nodes or 1)), -gpus, rank))

    def _make_room(self, request: Request) -> GpuLayout | None:
        """Nodes for ``request`` that are cleared of as few jobs as possible, or None.

        A job that was put elsewhere once stays there, so this comes to an end.
        """
        gpus, nodes, allowed = request.shape
        count = nodes or 1
        best: tuple[tuple[int, int], str, list[_Offer]] | None = None
        for gpu_type, kinds in self._pool.types:
            if allowed and gpu_type not in allowed:
                continue
            offers = self._offers(set(kinds), request, gpus // count)
            chosen = sorted(offers, key=lambda offer: offer.cost)[:count]
            if len(chosen) < count:
                continue
            restarts, moved = (sum(offer.cost[at] for offer in chosen) for at in (0, 1))
            if best is None or (restarts, moved) < best[0]:
                best = ((restarts, moved), gpu_type, chosen)
        if best is None:
            return None
        _, gpu_type, chosen = best
        for offer in chosen:
            for victim in offer.victims:
                self._evict(offer.number, victim)
        numbers = sorted(offer.number for offer in chosen)
        each = gpus // count
        if count == 1:
            return self._pool.on_one(numbers[0], each)
        return gpu_type, tuple((self._pool.nodes[number].name, each) for number in numbers)

    def _offers(self, kinds: set[int], request: Request, each: int) -> list[_Offer]:
        found = []
        for number, kind in enumerate(self._pool.kind_of):
            if kind in kinds:
                offer = self._offer(number, request, each)
                if offer is not None:
                    found.append(offer)
        return found

    def _offer(self, number: int, request: Request, each: int) -> _Offer | None:
        """The fewest of the smallest jobs on a node without which ``each`` GPUs fit there."""
        need = request.need.at(self._pool.kind_of[number], each)
        lack = [want - free for want, free in zip(need, self._room.free(number), strict=True)]
        # Nobody makes room for a smaller job.
        others = [one for one in self._kept.get(number, ()) if one.request.gpus <= request.gpus]
        others.sort(key=lambda one: (one.request.gpus, -one.rank))
        offer = _Offer(number)
        while max(lack) > 0:
            if not others:
                return None
            enough = [at for at, one in enumerate(others) if one.request.gpus >= lack[0]]
            victim = others.pop(enough[0] if enough else -1)
            offer.victims.append(victim)
            _, given = victim.parts[0]
            lack = [short - amount for short, amount in zip(lack, given, strict=True)]
        return offer

    def _evict(self, number: int, victim: _Kept) -> None:
        self._kept[number].remove(victim)
        del self._layouts[victim.request.job_id]
        self._room.give(victim.parts)
        self._queue(victim.rank)
