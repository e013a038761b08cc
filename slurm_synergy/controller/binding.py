"""Which cores of a node belong to which job: pure, deterministic, disjoint.

Every job on a node has a *floor*: cores of its GPU-proportional share that it falls back to when
the controller is silent (promises P1, P5). Floors of different jobs never overlap and stay where
they are. The cores that a job has *now* are its floor first, then what it had before, then free
ones, so that a change moves as few cores as possible.

Whole physical cores are dealt, all threads of one to the same job. Floors of jobs whose GPUs are
known are on the sockets of these, as far as there is room.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_synergy.errors import ModelError

__all__ = ["CoreBinding", "CoreRequest", "assign_cores"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRequest:
    """What a job wants on one node, and what it has there.

    ``cores`` is how many cores its share has now, ``floor`` how many its proportional share has;
    ``held`` and ``held_floor`` are the core indices from before (empty for a new job), ``near`` the
    sockets of its GPUs (empty: not known).
    """

    job_id: int
    cores: int
    floor: int
    held: tuple[int, ...] = ()
    held_floor: tuple[int, ...] = ()
    near: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.cores < 0 or self.floor < 0:
            raise ModelError(f"job {self.job_id}: core counts must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreBinding:
    """Core indices of one job on one node, ascending: those it has now, and its floor."""

    cores: tuple[int, ...]
    floor: tuple[int, ...]


def assign_cores(
    *,
    node_cores: int,
    sockets: int,
    requests: Sequence[CoreRequest],
    reserved: Iterable[int] = (),
    threads_per_core: int = 1,
) -> Mapping[int, CoreBinding]:
    """Cores per job id on a node with cores 0..node_cores-1 split evenly over ``sockets``.

    Where a physical core has several threads its indices follow each other; numbers of cores are
    rounded down to whole ones, but not to none.
    ``reserved`` cores are nobody's (jobs without the wrapper run there). When there are fewer
    cores than wanted, floors are served first and the rest in job order; the caller asks again
    when another job gives cores back. Raises ModelError for a job that appears twice.
    """
    ordered = sorted(requests, key=lambda request: request.job_id)
    if len({request.job_id for request in ordered}) != len(ordered):
        raise ModelError("a job appears twice among the core requests of a node")
    if threads_per_core > 1 and node_cores % threads_per_core == 0:
        return _by_physical_core(node_cores, sockets, ordered, reserved, threads_per_core)
    usable = set(range(node_cores)) - set(reserved)
    node = _Cores(node_cores=node_cores, sockets=max(1, sockets), usable=frozenset(usable))
    floors = _floors(node, ordered)
    cores = _current(node, ordered, floors)
    return {
        job_id: CoreBinding(cores=tuple(sorted(cores[job_id])), floor=tuple(sorted(floor)))
        for job_id, floor in floors.items()
    }


def _by_physical_core(
    node_cores: int,
    sockets: int,
    requests: Sequence[CoreRequest],
    reserved: Iterable[int],
    threads: int,
) -> Mapping[int, CoreBinding]:
    def physical(ids: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({one // threads for one in ids}))

    def all_threads(ids: Iterable[int]) -> tuple[int, ...]:
        return tuple(one * threads + thread for one in ids for thread in range(threads))

    bound = assign_cores(
        node_cores=node_cores // threads,
        sockets=sockets,
        requests=[
            replace(
                request,
                cores=max(request.cores // threads, min(request.cores, 1)),
                floor=request.floor // threads,
                held=physical(request.held),
                held_floor=physical(request.held_floor),
            )
            for request in requests
        ],
        reserved=physical(reserved),
    )
    return {
        job_id: CoreBinding(cores=all_threads(one.cores), floor=all_threads(one.floor))
        for job_id, one in bound.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cores:
    node_cores: int
    sockets: int
    usable: frozenset[int]

    def socket(self, core: int) -> int:
        return core * self.sockets // self.node_cores


def _floors(node: _Cores, requests: Sequence[CoreRequest]) -> dict[int, set[int]]:
    floors: dict[int, set[int]] = {}
    taken: set[int] = set()
    for request in requests:
        kept = set(request.held_floor)
        if len(kept) == request.floor and kept <= node.usable - taken:
            floors[request.job_id] = kept
            taken |= kept
    held = {request.job_id: set(request.held) for request in requests}
    # Those to whom it matters where they are choose first.
    for request in sorted(requests, key=lambda one: (not one.near, one.job_id)):
        if request.job_id in floors:
            continue
        others = set().union(*(held[job] for job in held if job != request.job_id))
        free = node.usable - taken
        own = held[request.job_id]
        chosen = _choose(node, free, request.floor, own=own, avoid=others, near=request.near)
        floors[request.job_id] = chosen
        taken |= chosen
    return floors


def _current(
    node: _Cores, requests: Sequence[CoreRequest], floors: Mapping[int, set[int]]
) -> dict[int, set[int]]:
    cores: dict[int, set[int]] = {}
    for request in requests:
        by_use = sorted(floors[request.job_id], key=lambda c: (c not in request.held, c))
        cores[request.job_id] = set(by_use[: request.cores])
    free = node.usable - set().union(*cores.values())
    for request in requests:
        mine = cores[request.job_id]
        kept = sorted(free & set(request.held))[: request.cores - len(mine)]
        mine.update(kept)
        free -= set(kept)
    all_floors = set().union(*floors.values())
    for request in requests:
        mine = cores[request.job_id]
        near = mine | floors[request.job_id]
        more = _choose(node, free, request.cores - len(mine), own=near, avoid=all_floors)
        mine |= more
        free -= more
    return cores


def _choose(
    node: _Cores,
    free: set[int] | frozenset[int],
    count: int,
    *,
    own: set[int],
    avoid: set[int],
    near: Sequence[int] = (),
) -> set[int]:
    """``count`` of the ``free`` cores: own ones, then unused ones, near the own ones, low ids.

    Before all that those on the sockets ``near``, if any are named.
    """
    home = [0] * node.sockets
    room = [0] * node.sockets
    for core in own:
        if core < node.node_cores:
            home[node.socket(core)] += 1
    for core in free - avoid:
        room[node.socket(core)] += 1

    def rank(core: int) -> tuple[bool, bool, bool, int, int, int]:
        at = node.socket(core)
        far = bool(near) and at not in near
        return (far, core not in own, core in avoid, -home[at], -room[at], core)

    return set(sorted(free, key=rank)[: max(0, count)])
