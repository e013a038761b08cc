"""Sharing the cores and memory of nodes among jobs whose GPUs are placed (algorithms B.8).

The outcome is a function of the GPU layout and the order alone, not of how the layout came about:
a second round with the same jobs gives the same shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import gt, sub

from slurm_synergy.core.model import Snapshot
from slurm_synergy.core.room import Amounts, GpuLayout, Pool
from slurm_synergy.mechanisms.claims import Claimed, Claims, Row
from slurm_synergy.mechanisms.placing import Party, Shared

__all__ = ["Left", "Sums", "around", "crowded", "neighbours", "share_out"]

Sums = Sequence[Sequence[int]]
"""GPUs, wishes of cores and MiB, and floors of both, by node: of many jobs together."""

_Asked = tuple[Party, int, Claimed | None, Sequence[Row]]
"""A job that shares: its node and what it claims there, or else its rows."""


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
    nodes = around(parties, layouts, moving)
    # Either all nodes of a job are among them or none.
    return [party for party in parties if layouts[party.job_id][1][0][0] in nodes]


def around(
    parties: Iterable[Party], layouts: Mapping[int, GpuLayout], movers: Iterable[int]
) -> set[str]:
    """The nodes of those ``movers``, and those that jobs of ``parties`` on several tie to them."""
    nodes = {name for job_id in movers for name, _ in layouts[job_id][1]}
    parts_of = [layouts[party.job_id][1] for party in parties]
    wide = [parts for parts in parts_of if len(parts) > 1]
    grown = -1
    while grown < len(nodes):
        grown = len(nodes)
        for parts in wide:
            if any(name in nodes for name, _ in parts):
                nodes.update(name for name, _ in parts)
    return nodes


def share_out(
    snapshot: Snapshot,
    pool: Pool,
    parties: Sequence[Party],
    layouts: Mapping[int, GpuLayout],
    *,
    even: bool = True,
    beside: Sums | None = None,
) -> tuple[Shared, Left]:
    """Cores and memory for all parties on their given GPUs, in the order of ``parties``.

    Also what is left on each node then.

    Each job in turn gets what it wants; if that is not left, its floor, for which jobs above
    theirs give up as much as is needed. At last, what is left goes to those that want more, in
    the same order; nobody gets more than it wants. Cores and memory are shared independently.
    ``even`` leaves out the cores that unlike parts of a split job have no use for. ``beside`` is
    for jobs that are no parties, on nodes that are not ``crowded``.
    """
    books = _Books(pool, beside)
    asked, cpus, mem_mib = _note(Claims(snapshot, pool, even=even), books, parties, layouts)
    floors = books.beyond_floors()
    _divide(asked, 0, books.cpus, books.cpus_wanted, cpus)
    _divide(asked, 1, books.mem_mib, books.mem_wanted, mem_mib)
    spent = list(zip(books.gpus, books.cpus, books.mem_mib, strict=True))
    return Shared(cpus=cpus, mem_mib=mem_mib), Left(shared=spent, floors=floors)


def crowded(
    snapshot: Snapshot,
    pool: Pool,
    parties: Iterable[Party],
    layouts: Mapping[int, GpuLayout],
    beside: Sums,
) -> list[int]:
    """Nodes that have not all the cores or memory that ``parties`` and those ``beside`` want."""
    books = _Books(pool, beside)
    _note(Claims(snapshot, pool), books, parties, layouts)
    columns = zip(books.cpus_wanted, books.cpus, books.mem_wanted, books.mem_mib, strict=True)
    return [number for number, row in enumerate(columns) if row[0] > row[1] or row[2] > row[3]]


def _note(
    claims: Claims, books: _Books, parties: Iterable[Party], layouts: Mapping[int, GpuLayout]
) -> tuple[list[_Asked], dict[int, Sequence[int]], dict[int, Sequence[int]]]:
    """Enter all parties into the books; who of them shares, and what cores and MiB each wants."""
    asked: list[_Asked] = []
    cpus: dict[int, Sequence[int]] = {}
    mem_mib: dict[int, Sequence[int]] = {}
    for party in parties:
        job_id = party.job_id
        layout = layouts[job_id]
        new = claims.on_one(party, layout)
        if new is not None:  # most jobs
            number, claim = new
            books.note_one(number, claim.row)
            cpus[job_id], mem_mib[job_id] = claim.cpus, claim.mem_mib
            asked.append((party, number, claim.row, ()))
            continue
        rows = claims.rows(party, layout)
        if party.frozen and party.now is not None:
            books.spend(rows)
        else:
            books.note(rows)
            cpus[job_id] = [row[4][0] for row in rows]
            mem_mib[job_id] = [row[4][1] for row in rows]
            asked.append((party, -1, None, rows))
    return asked, cpus, mem_mib


class _Books:
    """What is free on each node, by number, and what is asked of it."""

    def __init__(self, pool: Pool, beside: Sums | None = None) -> None:
        count = len(pool.nodes)
        self.gpus, self.cpus = pool.usable_gpus[:], pool.usable_cpus[:]
        self.mem_mib = pool.usable_mem_mib[:]
        self.cpus_wanted, self.mem_wanted = [0] * count, [0] * count
        self._cpus_floor, self._mem_floor = [0] * count, [0] * count
        if beside is not None:
            gpus, *others = map(list, beside)
            self.gpus = list(map(sub, self.gpus, gpus))
            self.cpus_wanted, self.mem_wanted, self._cpus_floor, self._mem_floor = others

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

    def note_one(self, number: int, row: Claimed) -> None:
        """The same for a job on a single node."""
        gpus, _, (cpus, mem_mib), (want_cpus, want_mem_mib) = row
        self.gpus[number] -= gpus
        self.cpus_wanted[number] += want_cpus
        self.mem_wanted[number] += want_mem_mib
        self._cpus_floor[number] += cpus
        self._mem_floor[number] += mem_mib

    def beyond_floors(self) -> list[Amounts]:
        """What is free if all get no more than their floors."""
        cpus = map(sub, self.cpus, self._cpus_floor)
        mem_mib = map(sub, self.mem_mib, self._mem_floor)
        return list(zip(self.gpus, cpus, mem_mib, strict=True))


def _divide(
    asked: Sequence[_Asked],
    resource: int,
    free: list[int],
    wanted: Sequence[int],
    amounts: dict[int, Sequence[int]],
) -> None:
    """Cores (resource 0) or MiB (1) for all parties, in their order; ``free`` is used up.

    ``wanted`` is what all of them together want on each node; ``amounts`` is what each wants, and
    becomes what it gets.
    """
    scarce = list(map(gt, wanted, free))
    free[:] = map(sub, free, wanted)
    if True not in scarce:  # where all get what they want there is nothing to divide
        return
    stakes: list[_Stake] = []
    for party, number, one, rows in asked:
        if one is not None:
            if scarce[number]:
                stakes.append(_Stake(party, _slices([(number, *one)], resource)))
        elif any([scarce[row[0]] for row in rows]):  # noqa: C419 - quicker
            stakes.append(_Stake(party, _slices(rows, resource)))
    for stake in stakes:
        for part in stake.slices:
            free[part.number] += part.want
    _serve(stakes, free)
    for stake in stakes:
        amounts[stake.party.job_id] = [part.amount for part in stake.slices]


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
