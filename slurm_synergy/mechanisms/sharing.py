"""Sharing the cores and memory of nodes among jobs whose GPUs are placed (algorithms B.8).

The outcome is a function of the GPU layout and the order alone, not of how the layout came about:
a second round with the same jobs gives the same shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import sub
from typing import Any

from slurm_synergy.core.model import JobStatus, Snapshot
from slurm_synergy.core.packing import Request
from slurm_synergy.core.pipeline import cpu_step, proportional_share
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.room import Amounts, GpuLayout, Need, Pool
from slurm_synergy.mechanisms.placing import Party, Shared

__all__ = ["Claim", "Claims", "Left", "Row", "neighbours", "settles", "share_out"]

Row = tuple[int, int, int, tuple[int, int], tuple[int, int]]
"""Node, GPUs, core step, then floor and wish, each of cores and MiB."""

_Terms = tuple[int, int, int, int, int]
"""Core step, floor of cores and MiB, wish of cores and MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What is left on each node after sharing, and if all got no more than their floors."""

    shared: Sequence[Amounts]
    floors: Sequence[Amounts]


@dataclass(slots=True, eq=False)
class _Slice:
    """One resource of one job on one node while it is shared out."""

    number: int
    gpus: int
    floor: int
    want: int
    step: int
    amount: int = 0


@dataclass(slots=True, eq=False)
class _Stake:
    """One resource of one job on all its nodes."""

    party: Party
    slices: list[_Slice]


class Claim:
    """A row without its node; ``sort`` is for the exchange, which computes it when first needed."""

    __slots__ = ("row", "sort")

    def __init__(self, row: tuple[int, int, tuple[int, int], tuple[int, int]]) -> None:
        self.row = row
        self.sort: Any = None


class Claims:
    """Floor and wish of jobs on the nodes where they are; computed once for jobs that agree."""

    __slots__ = ("_even", "_fixed", "_in_place", "_pool", "_terms")

    def __init__(self, snapshot: Snapshot, pool: Pool, *, even: bool = True) -> None:
        self._pool, self._even = pool, even
        self._in_place = snapshot.enforcement.in_place
        self._fixed = {node.name: node for node in pool.nodes if node.fixed_shares}
        self._terms: dict[tuple[Need, Need, int, int], _Terms] = {}

    def unbound(self, party: Party, layout: GpuLayout) -> tuple[int, Claim] | None:
        """Node and claim of a new job on a single node, as in ``rows``; None for any other.

        The same claim, as an object, for all jobs that agree.
        """
        if party.now is not None or len(layout[1]) != 1 or self._fixed:
            return None
        ((name, gpus),) = layout[1]
        number = self._pool.number[name]
        kind = self._pool.kind_of[number]
        key = (party.request.need, kind, gpus)
        found: Claim | None = party.want.kept.get(key)
        if found is None:
            step, cpu_floor, mem_floor, cpu_want, mem_want = _terms(party, kind, gpus)
            found = Claim((gpus, step, (cpu_floor, mem_floor), (cpu_want, mem_want)))
            party.want.kept[key] = found
        return number, found

    def rows(self, party: Party, layout: GpuLayout) -> list[Row]:
        """What a job can claim on each node of ``layout``; what a frozen one holds is both."""
        new = self.unbound(party, layout)
        if new is not None:
            return [(new[0], *new[1].row)]
        numbers, kind_of, known = self._pool.number, self._pool.kind_of, self._terms
        need, want, now = party.request.need, party.want, party.now
        if now is not None and party.frozen:
            return [
                (numbers[name], share.gpus, 1, *((share.cpus, share.mem_mib),) * 2)
                for name, share in now.shares
                if name in numbers
            ]
        stays = now is not None and settles(party.request, layout)
        rows: list[Row] = []
        for name, gpus in layout[1]:
            number = numbers[name]
            key = (need, want, kind_of[number], gpus)
            terms = known.get(key)
            if terms is None:
                terms = known[key] = _terms(party, kind_of[number], gpus)
            if stays:
                terms = self._bounded(party, name, terms)
            if name in self._fixed:
                own = proportional_share(party.status, self._fixed[name], gpus)
                terms = _with_cores(terms, own.cpus)
            step, cpu_floor, mem_floor, cpu_want, mem_want = terms
            rows.append((number, gpus, step, (cpu_floor, mem_floor), (cpu_want, mem_want)))
        even = self._even and len(rows) > 1 and not self._fixed
        if even and (self._in_place or not stays):
            return _evened(rows)
        return rows

    def _bounded(self, party: Party, name: str, terms: _Terms) -> _Terms:
        """What a job that stays where it is can claim: its grant, and what it holds, bind it."""
        step, cpu_floor, mem_floor, cpu_want, mem_want = terms
        pinned = party.request.pinned
        if not pinned and self._in_place and mem_want <= mem_floor:
            return terms
        assert party.now is not None
        own = party.now.on(name)
        if pinned:
            cpu_floor, mem_floor = min(cpu_floor, own.cpus), min(mem_floor, own.mem_mib)
        if not self._in_place:
            cpu_want, mem_want = max(own.cpus, cpu_floor), max(own.mem_mib, mem_floor)
        elif mem_want > mem_floor:
            mem_want = min(mem_want, max(_granted_mib(party.status, name, own), mem_floor))
        return step, cpu_floor, mem_floor, cpu_want, mem_want


def _evened(rows: list[Row]) -> list[Row]:
    """The same without the cores that are of no use to a job with unlike parts.

    Ranks advance in step. A part that fills its node can have no more than all cores of that node;
    more cores for each GPU elsewhere would make the job no faster.
    """
    _, gpus, _, _, (cpus, _) = min(rows, key=lambda row: row[4][0] / row[1])
    found = []
    for number, own, step, floor, (cpu_want, mem_want) in rows:
        enough = -(-cpus * own // (gpus * step)) * step
        want = min(cpu_want, max(enough, floor[0])), mem_want
        found.append((number, own, step, floor, want))
    return found


def _terms(party: Party, kind: int, gpus: int) -> _Terms:
    _, cpu_floor, mem_floor = party.request.need.at(kind, gpus)
    _, cpu_want, mem_want = party.want.at(kind, gpus)
    step = cpu_step(party.status.job, gpus)
    return step, cpu_floor, mem_floor, max(cpu_want, cpu_floor), max(mem_want, mem_floor)


def _with_cores(terms: _Terms, cpus: int) -> _Terms:
    """The same with a wish for ``cpus`` cores, and a floor that is not above it."""
    step, cpu_floor, mem_floor, _, mem_want = terms
    return step, min(cpu_floor, cpus), mem_floor, cpus, mem_want


def _granted_mib(status: JobStatus, node: str, own: Resources) -> int:
    """Memory that a running job can have in place: what the cluster granted at its start."""
    granted = status.lease.granted.get(node) if status.lease else None
    return granted.mem_mib if granted else own.mem_mib


def settles(request: Request, layout: GpuLayout) -> bool:
    """Whether ``layout`` leaves a job where it is."""
    own = request.held
    return own is layout or (own is not None and sorted(own[1]) == sorted(layout[1]))


def neighbours(
    parties: Sequence[Party], layouts: Mapping[int, GpuLayout], movers: Iterable[int]
) -> list[Party]:
    """Those of ``parties``, in their order, whose share may depend on where ``movers`` are.

    What one job gets depends on those beside it, and through jobs on several nodes on those
    beside them.
    """
    moving = set(movers)
    if len(moving) == len(parties):
        return list(parties)
    nodes = {name for job_id in moving for name, _ in layouts[job_id][1]}
    parts_of = [layouts[party.job_id][1] for party in parties]
    wide = [parts for parts in parts_of if len(parts) > 1]
    grown = -1
    while grown < len(nodes):
        grown = len(nodes)
        for parts in wide:
            if any(name in nodes for name, _ in parts):
                nodes.update(name for name, _ in parts)
    # Either all nodes of a job are among them or none.
    return [party for party, parts in zip(parties, parts_of, strict=True) if parts[0][0] in nodes]


def share_out(
    snapshot: Snapshot,
    pool: Pool,
    parties: Sequence[Party],
    layouts: Mapping[int, GpuLayout],
    *,
    even: bool = True,
) -> tuple[Shared, Left]:
    """Cores and memory for all parties on their given GPUs, in the order of ``parties``.

    Also what is left on each node then.

    Each job in turn gets what it wants; if that is not left, its floor, for which jobs above
    theirs give up as much as is needed. At last, what is left goes to those that want more, in
    the same order; nobody gets more than it wants. Cores and memory are shared independently.
    ``even`` leaves out the cores that unlike parts of a split job have no use for.
    """
    claims = Claims(snapshot, pool, even=even)
    books = _Books(pool)
    asked: list[tuple[Party, list[Row]]] = []
    for party in parties:
        rows = claims.rows(party, layouts[party.job_id])
        if party.frozen and party.now is not None:
            books.spend(rows)
        else:
            books.note(rows)
            asked.append((party, rows))
    floors = books.beyond_floors()
    shared = Shared(
        cpus=_divide(asked, 0, books.cpus, books.cpus_wanted),
        mem_mib=_divide(asked, 1, books.mem_mib, books.mem_wanted),
    )
    spent = list(zip(books.gpus, books.cpus, books.mem_mib, strict=True))
    return shared, Left(shared=spent, floors=floors)


class _Books:
    """What is free on each node, by number, and what is asked of it."""

    def __init__(self, pool: Pool) -> None:
        capacities = [node.capacity for node in pool.nodes]
        self.gpus = [one.gpus for one in capacities]
        self.cpus = [one.cpus for one in capacities]
        self.mem_mib = [one.mem_mib for one in capacities]
        self.cpus_wanted, self.mem_wanted = [0] * len(capacities), [0] * len(capacities)
        self._cpus_floor, self._mem_floor = [0] * len(capacities), [0] * len(capacities)

    def spend(self, rows: Sequence[Row]) -> None:
        """Take what a job keeps whatever the others want."""
        for number, gpus, _, floor, _ in rows:
            self.gpus[number] -= gpus
            self.cpus[number] -= floor[0]
            self.mem_mib[number] -= floor[1]

    def note(self, rows: Sequence[Row]) -> None:
        """Take the GPUs of a job, and note its floor and wish."""
        for number, gpus, _, floor, want in rows:
            self.gpus[number] -= gpus
            self.cpus_wanted[number] += want[0]
            self.mem_wanted[number] += want[1]
            self._cpus_floor[number] += floor[0]
            self._mem_floor[number] += floor[1]

    def beyond_floors(self) -> list[Amounts]:
        """What is free if all get no more than their floors."""
        cpus = map(sub, self.cpus, self._cpus_floor)
        mem_mib = map(sub, self.mem_mib, self._mem_floor)
        return list(zip(self.gpus, cpus, mem_mib, strict=True))


def _divide(
    claims: Sequence[tuple[Party, list[Row]]], resource: int, free: list[int], wanted: Sequence[int]
) -> dict[int, list[int]]:
    """Cores (resource 0) or MiB (1) for all parties, in their order; ``free`` is used up.

    ``wanted`` is what all of them together want on each node.
    """
    # Where all get what they want there is nothing to divide.
    scarce = [want > left for want, left in zip(wanted, free, strict=True)]
    amounts: dict[int, list[int]] = {}
    stakes: list[_Stake] = []
    for party, rows in claims:
        if len(rows) == 1 and not scarce[rows[0][0]]:  # most jobs; as below, in half of the time
            number, want = rows[0][0], rows[0][4][resource]
            amounts[party.job_id] = [want]
            free[number] -= want
            continue
        for row in rows:
            if scarce[row[0]]:
                stakes.append(_Stake(party, _slices(rows, resource)))
                break
        else:
            amounts[party.job_id] = [row[4][resource] for row in rows]
            for row in rows:
                free[row[0]] -= row[4][resource]
    _serve(stakes, free)
    for stake in stakes:
        amounts[stake.party.job_id] = [one.amount for one in stake.slices]
    return amounts


def _slices(rows: Sequence[Row], resource: int) -> list[_Slice]:
    return [
        _Slice(number, gpus, floor[resource], want[resource], 1 if resource else step)
        for number, gpus, step, floor, want in rows
    ]


def _serve(stakes: Sequence[_Stake], free: list[int]) -> None:
    """Give each of ``stakes`` its amount where there is not enough for all."""
    served: dict[int, list[tuple[_Stake, _Slice]]] = {}
    for stake in stakes:
        enough = True
        for one in stake.slices:
            if free[one.number] < one.want:
                enough = False
        for one in stake.slices:
            number = one.number
            if not enough and free[number] < one.floor:
                _reclaim(one.floor - free[number], served.get(number, ()), free)
            one.amount = one.want if enough else one.floor
            free[number] -= one.amount
        for one in stake.slices:
            served.setdefault(one.number, []).append((stake, one))
    for stake in stakes:
        _fill(stake.slices, free)


def _reclaim(lack: int, served: Sequence[tuple[_Stake, _Slice]], free: list[int]) -> None:
    """Take ``lack`` on one node from jobs served there, on all nodes of each victim.

    First those on the fewest nodes, then those with the largest surplus per GPU, then those that
    the policy ranks last; jobs that only a restart can shrink come after all others.
    """
    victims = sorted(
        served,
        key=lambda pair: (
            pair[0].party.restarts_to_change,
            len(pair[0].slices),
            -(pair[1].amount - pair[1].floor) / pair[1].gpus,
            -pair[0].party.rank,
        ),
    )
    for victim, here in victims:
        if lack <= 0:
            return
        taken = min(here.amount - here.floor, -(-lack // here.step) * here.step)
        if taken <= 0:
            continue
        lack -= taken
        for one in victim.slices:
            # Ranks advance in step, so what one node gives up is of no use on the others.
            part = taken
            if one is not here:
                part = -(-taken * one.gpus // (here.gpus * one.step)) * one.step
                part = min(one.amount - one.floor, part)
            one.amount -= part
            free[one.number] += part


def _fill(slices: Sequence[_Slice], free: list[int]) -> None:
    """Raise a job towards its wish, by the same fraction on all its nodes."""
    short = [one for one in slices if one.want > one.amount]
    if not short or any(free[one.number] <= 0 for one in short):
        return
    # Nodes are numbered by name, which breaks ties.
    tightest = min(short, key=lambda one: (free[one.number] / (one.want - one.amount), one.number))
    denominator = tightest.want - tightest.amount
    numerator = min(free[tightest.number], denominator)
    for one in short:
        raised = (one.want - one.amount) * numerator // denominator
        if one.amount + raised < one.want:
            raised = raised // one.step * one.step
        one.amount += raised
        free[one.number] -= raised
