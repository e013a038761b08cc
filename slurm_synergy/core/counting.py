"""Whether jobs can be packed, as far as counting GPUs tells: quicker than to look for places."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter

from slurm_synergy.core.request import Request
from slurm_synergy.core.room import Amounts, Need, Pool, Room

__all__ = ["staying_if_all_fit"]

_SHAPE, _NEED = attrgetter("shape"), attrgetter("need")

_Counts = Mapping[tuple[int, Need], int]
"""How many jobs there are of each number of GPUs and floor."""


def staying_if_all_fit(pool: Pool, requests: Sequence[Request]) -> frozenset[int] | None:
    """Ids of the jobs that keep their GPUs when all of ``requests`` are packed around them.

    A set tells that all of them are found a place, and that all that hold something keep it.
    None tells that this is not so, or that counting does not say: where nodes are unlike, where a
    job wants several nodes, where GPU counts do not divide each other, where cores or memory could
    run out before the GPUs, or where most jobs hold something, so that it would be no quicker.
    """
    if len(pool.kinds) > 1:
        return None
    holding = [request for request in requests if request.held is not None]
    new = [request for request in requests if request.held is None]
    if len(new) < len(holding):  # to look for their places takes no longer
        return None
    room = Room(pool)
    for request in holding:
        if request.pinned:
            room.take(request.held_parts)
    for request in holding:
        if not request.pinned:
            if not request.may_stay or not room.fits(request.held_parts):
                return None
            room.take(request.held_parts)
    sorts = Counter(zip(map(_SHAPE, new), map(_NEED, new), strict=True))
    most = pool.kinds[0].total.gpus if pool.kinds else 0
    counts: dict[tuple[int, Need], int] = {}
    for ((gpus, nodes, types), need), count in sorts.items():
        if nodes not in (None, 1) or pool.only_kind(types) is None:
            return None
        if gpus <= most:
            counts[gpus, need] = counts.get((gpus, need), 0) + count
    wide = [request for request in new if request.shape[0] > most]
    # They come first, and where they go decides what is left of nodes.
    for request in sorted(wide, key=lambda one: one.size):
        if room.book(request.shape, request.need) is None:
            return None
    free = [room.free(number) for number in range(len(pool.nodes))]
    if not _all_fit(free, counts):
        return None
    return frozenset([request.job_id for request in holding])


def _all_fit(free: Iterable[Amounts], counts: _Counts) -> bool:
    """Whether jobs of a single node each certainly find one, the largest first.

    Every size divides the next larger one. So a job that goes to any node with enough GPUs takes
    no place of a larger one, and as many places of each smaller size as it has times its GPUs.
    """
    sizes = sorted({gpus for gpus, _ in counts}, reverse=True)
    if any(large % small for large, small in pairwise(sizes)):
        return False
    # By free GPUs: how many nodes, and the least cores and MiB of any of them.
    nodes: dict[int, tuple[int, int, int]] = {}
    for gpus, cpus, mem_mib in free:
        if gpus > 0:
            count, least_cpus, least_mib = nodes.get(gpus, (0, cpus, mem_mib))
            nodes[gpus] = count + 1, min(cpus, least_cpus), min(mem_mib, least_mib)
    for gpus, need in counts:
        _, cpus, mem_mib = need.at(0, gpus)
        # No job takes more per GPU than every node has per free GPU: then GPUs alone decide.
        for there, (_, most_cpus, most_mib) in nodes.items():
            if cpus * there > most_cpus * gpus or mem_mib * there > most_mib * gpus:
                return False
    asked = 0
    for size in sizes:
        asked += size * sum([count for (gpus, _), count in counts.items() if gpus == size])
        if asked > sum([there // size * size * nodes[there][0] for there in nodes]):
            return False
    return True
