"""Synergy-TUNE: give each job the cores and memory that it can use (OSDI '22; algorithms B.8).

Running jobs keep their GPUs unless the packing needs them elsewhere. New jobs, largest demand
first, go to the tightest node that has their whole demand beyond what its other free GPUs will
need; else to one that has most of it; else to one where jobs above their floor can make room. So
jobs that need much end up beside jobs that need little. Where that leads into a corner, the packing
of the policy is taken as it is: a granted job is never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import compress, groupby
from typing import TypeVar, cast

import numpy as np

from slurm_synergy.core.model import Decision, JobStatus, Layout, Node, Placement, Snapshot
from slurm_synergy.core.packing import Request, Requests, parts_of
from slurm_synergy.core.pipeline import demand, proportional_share
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.room import Amounts, GpuLayout, Need, Parts, Pool, Room, Shape
from slurm_synergy.mechanisms.claims import Claims
from slurm_synergy.mechanisms.exchange import exchange
from slurm_synergy.mechanisms.placing import (
    Party,
    Shared,
    build_layout,
    by_size,
    in_order,
    make_parties,
    make_placements,
    pack,
)
from slurm_synergy.mechanisms.sharing import Left, around, crowded, neighbours, share_out
from slurm_synergy.mechanisms.staying import Bools, Stayers

__all__ = ["TUNE", "Tune", "choose_nodes", "full_demand", "settled"]

# A place that has not all of a demand is looked for in steps of this part of it.
_LEVELS = 4
# Parts of a core and of a MiB in which the least needs per GPU are counted.
_GRAIN = 64

_T = TypeVar("_T")
_Sort = tuple[Shape, Need, Need]
"""What a job asks for: its shape, its floor and its demand."""


def full_demand(status: JobStatus, node: Node, gpus: int) -> Resources:
    """What the job needs on ``node`` to run at full speed on ``gpus`` of its GPUs.

    Where shares cannot change it wants its own, as it can have no other.
    """
    found = demand(status, node, gpus)
    cpus = proportional_share(status, node, gpus).cpus if node.fixed_shares else found.cpus
    return Resources(gpus=gpus, cpus=cpus, mem_mib=found.mem_mib)


class Tune:
    """The mechanism of the paper, with sticky GPUs."""

    name = "tune"
    reads_progress = False

    def place(self, snapshot: Snapshot, decision: Decision) -> Layout:
        """A placement for each grant."""
        requests = Requests.of_snapshot(snapshot)
        pool = requests.pool
        granted = requests.of_grants(decision.grants)
        staying = requests.staying(granted) if granted and decision.packing is None else None
        if staying and requests.plain and not Claims(snapshot, pool).binds_nodes:
            placements = _place_beside(snapshot, requests, granted, staying)
            if placements is not None:
                return build_layout(placements, decision)
        parties = make_parties(snapshot, decision, requests, full_demand)
        asked = [party.request for party in parties]
        if staying is None and not granted and decision.packing is None:
            staying = requests.staying(asked)
        if staying is None:
            packed = pack(requests, decision, asked)
            if None in packed.values():
                parties = [party for party in parties if packed[party.job_id] is not None]
            staying = settled(parties, packed)
        placed = by_size(parties)
        layouts, shared = choose_nodes(
            snapshot, pool, placed, staying, lambda: pack(requests, decision, asked)
        )
        return build_layout(make_placements(placed, layouts, shared), decision)


def _place_beside(
    snapshot: Snapshot, requests: Requests, granted: Sequence[Request], staying: frozenset[int]
) -> list[Placement] | None:
    """As ``choose_nodes``, quicker where most jobs are ``staying`` on their nodes.

    None in a corner.
    """
    pool = requests.pool
    most = Stayers(snapshot, requests, granted, staying, full_demand)
    others = most.others()
    layouts = {party.job_id: party.request.held for party in others}
    held = {job_id: layout for job_id, layout in layouts.items() if job_id in staying and layout}
    still = [party for party in others if party.job_id in held]
    everyone = np.ones(len(most.requests), dtype=bool)
    apart = most.on(crowded(snapshot, pool, still, held, most.sums(everyone)))
    still = in_order([*still, *_entered(most, apart, held)])
    shared, left = share_out(snapshot, pool, still, held, beside=most.sums(~apart))
    movers = by_size([party for party in others if party.job_id not in held])
    parties = still
    if movers:
        placed = _place_new(pool, held, movers, left)
        if placed is None:
            return None
        parties = [*still, *movers]
        names = around(parties, placed, [party.job_id for party in movers])
        near = most.on([pool.number[name] for name in names]) & ~apart
        apart |= near
        parties = in_order([*parties, *_entered(most, near, placed)])
        touched = [party for party in parties if placed[party.job_id][1][0][0] in names]
        placed.update(exchange(snapshot, pool, touched, placed, movers, left.shared))
        anew, _ = share_out(snapshot, pool, touched, placed)
        shared, held = shared.then(anew), placed
    stay = list(compress(most.placements, (~apart).tolist()))
    return [*stay, *make_placements(parties, held, shared)]


def _entered(most: Stayers, these: Bools, layouts: dict[int, GpuLayout]) -> list[Party]:
    """Some of those that stay as parties; where they are is entered into ``layouts``."""
    found = most.parties(these)
    layouts.update({party.job_id: cast(GpuLayout, party.request.held) for party in found})
    return found


def settled(parties: Iterable[Party], packed: Mapping[int, GpuLayout | None]) -> frozenset[int]:
    """Ids of the parties that ``packed`` leaves on the GPUs that they hold."""
    return frozenset(
        [party.job_id for party in parties if party.request.held == packed[party.job_id]]
    )


def choose_nodes(
    snapshot: Snapshot,
    pool: Pool,
    parties: Sequence[Party],
    staying: Collection[int],
    packed: Callable[[], Mapping[int, GpuLayout | None]],
) -> tuple[Mapping[int, GpuLayout], Shared]:
    """GPUs for all parties, new ones placed by demand, and what they get there.

    Those that are ``staying`` keep theirs. Where that leads into a corner all go where ``packed``
    says, which is only asked then.
    """
    layouts: dict[int, GpuLayout] = {}
    movers, stayers = [], []
    for party in parties:
        held = party.request.held
        if held is not None and party.job_id in staying:
            stayers.append(party)
            layouts[party.job_id] = held
        else:
            movers.append(party)
    shared, left = share_out(snapshot, pool, stayers, layouts)
    if not movers:
        return layouts, shared
    layouts = _place_new(pool, layouts, movers, left) or _all_of(parties, packed())
    touched = neighbours(parties, layouts, [party.job_id for party in movers])
    # Exchanges lead to nodes of other movers or to empty ones: nobody else is touched.
    layouts.update(exchange(snapshot, pool, touched, layouts, movers, left.shared))
    anew, _ = share_out(snapshot, pool, touched, layouts)
    return layouts, shared.then(anew)


def _all_of(
    parties: Iterable[Party], packed: Mapping[int, GpuLayout | None]
) -> dict[int, GpuLayout]:
    """The places of all parties, each of which has one."""
    return {party.job_id: cast(GpuLayout, packed[party.job_id]) for party in parties}


def _place_new(
    pool: Pool,
    settled: Mapping[int, GpuLayout],
    movers: Sequence[Party],
    left: Left,
) -> dict[int, GpuLayout] | None:
    """The layouts of ``settled``, and of ``movers`` one after the other; None in a corner."""
    layouts = dict(settled)
    runs = _runs(pool, movers)
    rest = _Rest(pool, left.shared, runs)
    floors: Room | None = None
    taken: Parts = []  # of the floors, but not booked there before the next job needs to look
    for sort, run in runs:
        asked, need, want = sort
        for shape in _shapes(asked):
            placed = rest.place_all(shape, need, want, len(run))
            if floors is not None:
                for layout, times in _counted(placed):
                    taken += _multiplied(parts_of(pool, layout, need), times)
            layouts.update(zip([party.job_id for party in run], placed, strict=False))
            run = run[len(placed) :]
            if not run:
                break
            if floors is None:
                floors = Room(pool, left.floors)
                floors.take(_new_parts(pool, movers, layouts))
            floors.take(taken)
            taken.clear()
            booked = floors.book_all(shape, need, len(run))
            for put, times in _counted(booked):
                rest.take(_multiplied(put[1], times))
            layouts.update(
                zip([party.job_id for party in run], [put[0] for put in booked], strict=False)
            )
            run = run[len(booked) :]
            if not run:
                break
        if run:
            return None
    return layouts


def _runs(pool: Pool, movers: Sequence[Party]) -> list[tuple[_Sort, list[Party]]]:
    """The movers in their order, those together that follow each other and are alike.

    Alike are those that ask for the same amounts, whatever they are worth to each.
    """
    first: dict[tuple[Shape, object, object], _Sort] = {}
    known: dict[_Sort, _Sort] = {}

    def sort_of(party: Party) -> _Sort:
        request = party.request
        sort = request.shape, request.need, party.want
        found = known.get(sort)
        if found is None:
            key = sort[0], _amounts(pool, sort[0], sort[1]), _amounts(pool, sort[0], sort[2])
            found = known[sort] = first.setdefault(key, sort)
        return found

    return [(sort, list(run)) for sort, run in groupby(movers, sort_of)]


def _amounts(pool: Pool, shape: Shape, need: Need) -> tuple[Amounts, ...]:
    """All that placing a job of ``shape`` may ask of ``need``; kept with it."""
    gpus, _, types = shape
    key = (_amounts, gpus, types)
    found: tuple[Amounts, ...] | None = need.kept.get(key)
    if found is None:
        found = need.kept[key] = tuple(
            need.at(kind, count)
            for kind, node in enumerate(pool.kinds)
            if not types or node.gpu_type in types
            for count in range(1, min(gpus, node.total.gpus) + 1)
        )
    return found


def _shapes(shape: Shape) -> tuple[Shape, ...]:
    """A job that may be split is split only if no single node has its GPUs."""
    gpus, nodes, types = shape
    return ((gpus, 1, types), shape) if nodes is None else (shape,)


def _counted(things: Iterable[_T]) -> Iterator[tuple[_T, int]]:
    """Each thing, and how often the same object follows itself."""
    for _, group in groupby(things, id):
        same = list(group)
        yield same[0], len(same)


def _multiplied(parts: Parts, times: int) -> Parts:
    """What so many jobs take together that are all in the same place."""
    if times == 1:
        return parts
    return [
        (number, (gpus * times, cpus * times, mem_mib * times))
        for number, (gpus, cpus, mem_mib) in parts
    ]


class _Rest:
    """What new jobs may be given on each node, beyond what its free GPUs will need in any case.

    Whoever takes a free GPU needs some cores and memory, at the least as much as the most frugal
    of the new jobs does per GPU. A demand that leaves less than that would be cut at once, so it
    is not served from it. Amounts are fine-grained, because the least per GPU is often a fraction
    of a core.
    """

    def __init__(
        self,
        pool: Pool,
        left: Sequence[Amounts],
        runs: Sequence[tuple[_Sort, Sequence[Party]]],
    ) -> None:
        self._pool = pool
        free = [0] * len(pool.kinds)
        for number, kind in enumerate(pool.kind_of):
            free[kind] += max(left[number][0], 0)
        sorts: dict[tuple[Shape, Need], int] = {}
        for (shape, need, _), run in runs:
            sorts[shape, need] = sorts.get((shape, need), 0) + len(run)
        self._least = [_least_per_gpu(pool, kind, gpus, sorts) for kind, gpus in enumerate(free)]
        self._needs: dict[tuple[Need, Need, int], Need] = {}
        self._room = Room(
            pool,
            [self._beyond(kind, left[number]) for number, kind in enumerate(pool.kind_of)],
        )

    def _beyond(self, kind: int, amounts: Amounts) -> Amounts:
        gpus, cpus, mem_mib = amounts
        least_cpus, least_mem = self._least[kind]
        return gpus, cpus * _GRAIN - gpus * least_cpus, mem_mib * _GRAIN - gpus * least_mem

    def take(self, parts: Parts) -> None:
        """Book ``parts``."""
        kind_of = self._pool.kind_of
        self._room.take([(number, self._beyond(kind_of[number], part)) for number, part in parts])

    def place_all(self, shape: Shape, floor: Need, want: Need, count: int) -> list[GpuLayout]:
        """Places of ``count`` jobs that are alike, one after the other, until one has none; booked.

        Each is the tightest that has the whole demand, or else most of it.
        """
        found: list[GpuLayout] = []
        gpus, nodes, types = shape
        kind = self._pool.only_kind(types) if nodes == 1 else None
        tried = None
        for level in range(_LEVELS, -1, -1):
            need = self._need(floor, want, level)
            if kind is not None:  # often a step makes no difference
                before, tried = tried, need.at(kind, gpus)
                if tried == before:
                    continue
            found += [put[0] for put in self._room.book_all(shape, need, count - len(found))]
            if len(found) == count:
                break
        return found

    def _need(self, floor: Need, want: Need, level: int) -> Need:
        """The floor and ``level`` parts of what the demand exceeds it by."""
        key = (floor, want, level)
        need = self._needs.get(key)
        if need is None:

            def compute(kind: int, gpus: int) -> Amounts:
                least, most = floor.at(kind, gpus), want.at(kind, gpus)
                cpus = least[1] + max(most[1] - least[1], 0) * level // _LEVELS
                mem_mib = least[2] + max(most[2] - least[2], 0) * level // _LEVELS
                return self._beyond(kind, (gpus, cpus, mem_mib))

            need = self._needs[key] = Need(compute)
        return need


def _least_per_gpu(
    pool: Pool, kind: int, free: int, sorts: Mapping[tuple[Shape, Need], int]
) -> tuple[int, int]:
    """The smallest floor per GPU among the jobs that may use this kind of node, in grains.

    Reduced to the part of the ``free`` GPUs that the others take once one of them has its place.
    ``sorts`` counts the jobs.
    """
    node = pool.kinds[kind]
    found: list[tuple[int, int]] = []
    wanted = 0
    for ((gpus, nodes, types), need), count in sorts.items():
        if not types or node.gpu_type in types:
            each = min(gpus // (nodes or 1), node.total.gpus)
            _, cpus, mem_mib = need.at(kind, each)
            found.append((cpus * _GRAIN // each, mem_mib * _GRAIN // each))
            wanted += gpus * count
    if wanted <= max((shape[0] for shape, _ in sorts), default=0) or not free:
        return 0, 0
    part = min(wanted - max(shape[0] for shape, _ in sorts), free)
    cpus = min(cpus for cpus, _ in found) * part // free
    mem_mib = min(mem_mib for _, mem_mib in found) * part // free
    return cpus, mem_mib


def _new_parts(pool: Pool, movers: Sequence[Party], layouts: Mapping[int, GpuLayout]) -> Parts:
    """The floors of those of ``movers`` that have a place already."""
    parts: Parts = []
    for party in movers:
        layout = layouts.get(party.job_id)
        if layout is not None:
            parts += parts_of(pool, layout, party.request.need)
    return parts


TUNE = Tune()
"""The mechanism called ``tune``."""
