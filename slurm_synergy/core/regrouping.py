"""Packing jobs largest first: around those that stay, again and again, or as it went before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, le

from slurm_synergy.core.request import Request, Step, Trail
from slurm_synergy.core.room import GpuLayout, Room

__all__ = ["largest_first", "pack_around", "pack_at_last", "retraced"]

# How often jobs are packed anew, in another order, before a job is refused.
_TRIES = 6
_SIZE = attrgetter("size")


def largest_first(requests: Sequence[Request], known: int = 0) -> int:
    """How many of the first ones ``pack_around`` would take in this very order.

    Of ``known`` it is known already.
    """
    begin = max(known - 1, 0)
    sizes = list(map(_SIZE, requests[begin:]))
    ascends = list(map(le, sizes, sizes[1:]))
    return len(requests) if all(ascends) else begin + ascends.index(False) + 1


def pack_around(
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
    """As ``pack_around``, with ``first`` before the others; and the one that found no place."""
    packed: dict[int, GpuLayout] = {}
    moving: dict[tuple[int, int, int], list[Request]] = {}
    for request in requests:
        if request.held is not None and stays(request):
            packed[request.job_id] = request.held
        elif request not in first:
            moving.setdefault(request.size, []).append(request)
    order = [*first, *[request for size in sorted(moving) for request in moving[size]]]
    known = retraced(room, order, trail or ())
    if trail is not None:
        trail[len(known) :] = []
    for request, layout, _ in known:
        packed[request.job_id] = layout
    for request in order[len(known) :]:
        put = room.book(request.shape, request.need)
        if put is None:
            return None, request
        packed[request.job_id] = put[0]
        if trail is not None:
            trail.append((request, *put))
    return packed, None


def pack_at_last(
    room: Room, requests: Sequence[Request], stays: Callable[[Request], bool]
) -> dict[int, GpuLayout] | None:
    """``pack_around``, a few times: whoever found no place comes first the next time."""
    first: list[Request] = []
    for _ in range(_TRIES):
        packed, failed = _try_around(room.copy(), requests, stays, first)
        if failed is None or failed in first:
            return packed
        first.insert(0, failed)
    return None


def retraced(room: Room, walk: Iterable[Request], trail: Sequence[Step]) -> Sequence[Step]:
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
