"""Better neighbours for new jobs: an exchange between nodes after TUNE's choice (record 024).

Best fit serves the largest jobs first and cannot foresee who comes later, so frugal jobs of several
GPUs end up together on a node whose cores nobody uses, while hungry ones crowd another. Here two
nodes of one kind exchange new jobs with equally many GPUs as long as that meets more of their
demands. Running jobs take no part: a restart costs more than a better neighbour gains.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from slurm_synergy.core.model import Node, Snapshot
from slurm_synergy.core.pipeline import job_rate, proportional_share
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.room import Amounts, GpuLayout, Pool
from slurm_synergy.mechanisms.claims import Claims, Row
from slurm_synergy.mechanisms.placing import Party

__all__ = ["exchange"]

# Less than a tenth of a GPU is not worth an exchange: cores are whole, rates here are not.
_LEAST_GAIN = 0.1
# Partners that a crowded node looks at, those with most left over first.
_PARTNERS = 6
# Exchanges per new job at the most, so that the work stays in proportion to the jobs.
_EXCHANGES_PER_JOB = 2
# More than sums of gains can differ by the order in which they are summed up.
_ROUNDING = 1e-6


class _Sort(NamedTuple):
    """What a job is to a node: its floor, and by how much its demand exceeds that.

    ``gain`` is what meeting the demand adds to GPUs times rate over proportional rate; ``order``
    the negative of the gain per part of the node, so the best sorts first. ``weight`` is the demand
    in parts of the node.
    """

    order: float
    gain: float
    more_cpus: int
    more_mem_mib: int
    gpus: int
    cpus: int
    mem_mib: int
    weight: float


_Guest = tuple[int, _Sort]
"""Id and sort of a new job that has all its GPUs on one node."""

_Look = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]
"""All of a node that matters to exchanges; nodes that look the same have the same answers."""

_Deal = tuple[list[int], list[int]]
"""What is given and what is taken for it, by the places of guests on their nodes."""


@dataclass(slots=True, eq=False)
class _Host:
    """A node: what is left beyond all floors, the jobs that stay, and those that may change.

    ``met`` and ``lack`` are the parts of the demands' gains that can and cannot be met; ``spare``
    what is left then of cores and memory, in parts of the node. ``look`` stands for all of this.
    """

    number: int
    gpus: int
    cpus: int
    mem_mib: int
    staying: list[_Sort]
    guests: list[_Guest]
    met: float = 0.0
    lack: float = 0.0
    spare: tuple[float, float] = (0.0, 0.0)
    look: _Look = (0, 0, 0, (), ())

    def book(self, sort: _Sort, sign: int) -> None:
        """Take (1) or give back (-1) the floor of a job."""
        self.gpus -= sign * sort.gpus
        self.cpus -= sign * sort.cpus
        self.mem_mib -= sign * sort.mem_mib


def exchange(
    snapshot: Snapshot,
    pool: Pool,
    parties: Iterable[Party],
    layouts: Mapping[int, GpuLayout],
    movers: Sequence[Party],
    left: Sequence[Amounts],
) -> dict[int, GpuLayout]:
    """New places of those ``movers`` for which ``layouts`` is not the best.

    ``parties`` are all that share a node with a mover, ``left`` is what the others leave on every
    node, of which only the GPUs matter: nodes on which nobody is take part as well.
    """
    moving = {party.job_id for party in movers if len(layouts[party.job_id][1]) == 1}
    hosts = _hosts(snapshot, pool, parties, layouts, moving, left)
    places: dict[int, GpuLayout] = {}
    for kind, node in enumerate(pool.kinds):
        fair = [
            host
            for number, host in hosts.items()
            # Who has a node alone is nobody's neighbour, wherever it is.
            if pool.kind_of[number] == kind
            and (len(host.guests) + len(host.staying) > 1 or host.gpus > 0)
        ]
        if len(fair) > 1:
            market = _Market(node, fair)
            for job_id, number in market.trade(_EXCHANGES_PER_JOB * len(moving)).items():
                place = pool.nodes[number]
                gpus = layouts[job_id][1][0][1]
                places[job_id] = (place.gpu_type, ((place.name, gpus),))
    return places


def _hosts(
    snapshot: Snapshot,
    pool: Pool,
    parties: Iterable[Party],
    layouts: Mapping[int, GpuLayout],
    moving: set[int],
    left: Sequence[Amounts],
) -> dict[int, _Host]:
    """The nodes with new jobs on them, and those without any job."""
    numbers = {pool.number[layouts[job_id][1][0][0]] for job_id in moving}
    for number, node in enumerate(pool.nodes):
        if node.capacity.gpus and left[number][0] == node.capacity.gpus:
            numbers.add(number)
    hosts = {}
    for number in sorted(numbers):
        free = pool.nodes[number].capacity
        hosts[number] = _Host(number, free.gpus, free.cpus, free.mem_mib, [], [])
    sorts: dict[tuple[object, ...], _Sort] = {}
    alike: dict[_Sort, _Sort] = {}
    own: dict[int, _Sort] = {}  # by the id of the claim, which the needs keep
    claims = Claims(snapshot, pool)
    for party in parties:
        layout = layouts[party.job_id]
        new = claims.on_one(party, layout)
        if new is not None:
            number, claim = new
            its = hosts.get(number)
            if its is None:
                continue
            sort = own.get(id(claim))
            if sort is None:
                if claim.sort is None:
                    claim.sort = _sort(pool.nodes[number], party, (number, *claim.row))
                sort = own[id(claim)] = alike.setdefault(claim.sort, claim.sort)
            its.book(sort, 1)
            if party.job_id in moving:
                its.guests.append((party.job_id, sort))
            else:
                its.staying.append(sort)
            continue
        for row in claims.rows(party, layout):
            host = hosts.get(row[0])
            if host is None:
                continue
            key = (party.request.need, party.want, pool.kind_of[row[0]], *row[1:])
            if key not in sorts:
                sort = _sort(pool.nodes[row[0]], party, row)
                sorts[key] = alike.setdefault(sort, sort)
            host.book(sorts[key], 1)
            if party.job_id in moving:
                host.guests.append((party.job_id, sorts[key]))
            else:
                host.staying.append(sorts[key])
    return hosts


def _sort(node: Node, party: Party, row: Row) -> _Sort:
    """The sort of a job for which ``row`` is its floor and wish on ``node``."""
    _, gpus, _, (cpus, mem_mib), (want_cpus, want_mem_mib) = row
    status, profile = party.status, party.status.profile
    share = proportional_share(status, node, gpus)
    want = Resources(gpus=gpus, cpus=want_cpus, mem_mib=want_mem_mib)
    base = job_rate(profile, node.gpu_type, (share,))
    rate = job_rate(profile, node.gpu_type, (want,))
    gain = max(gpus * (rate / base - 1.0), 0.0) if base and rate else 0.0
    whole_cpus, whole_mem_mib = max(node.total.cpus, 1), max(node.total.mem_mib, 1)
    more = (want_cpus - cpus) / whole_cpus + (want_mem_mib - mem_mib) / whole_mem_mib
    return _Sort(
        order=-gain / more if more > 0 else 0.0,
        gain=gain,
        more_cpus=want_cpus - cpus,
        more_mem_mib=want_mem_mib - mem_mib,
        gpus=gpus,
        cpus=cpus,
        mem_mib=mem_mib,
        weight=want_cpus / whole_cpus + want_mem_mib / whole_mem_mib,
    )


def _worth(sorts: Iterable[_Sort], cpus: float, mem_mib: float) -> tuple[float, float, float]:
    """Gain of the demands that can be met with that much beyond the floors, and what is left.

    As if rates were linear between floor and demand, and parts of a core could be given.
    """
    total = 0.0
    hungry = sorted([one for one in sorts if one.gain > 0.0])
    for _, gain, more_cpus, more_mem_mib, _, _, _, _ in hungry:
        part = 1.0
        # Less than nothing is left where jobs hold more than the node has; who wants no more of
        # that is not concerned.
        if 0 < more_cpus > cpus:
            part = cpus / more_cpus
        if 0 < more_mem_mib > mem_mib and mem_mib < part * more_mem_mib:
            part = mem_mib / more_mem_mib
        if part > 0.0:
            total += part * gain
            cpus -= part * more_cpus
            mem_mib -= part * more_mem_mib
    return total, cpus, mem_mib


class _Market:
    """Nodes of one kind that exchange jobs."""

    def __init__(self, node: Node, hosts: Iterable[_Host]) -> None:
        self._whole = (max(node.total.cpus, 1), max(node.total.mem_mib, 1))
        self._hosts = {host.number: host for host in hosts}
        self._places: dict[int, int] = {}
        # What was found for nodes that look like that.
        self._values: dict[_Look, tuple[float, float, tuple[float, float]]] = {}
        self._deals: dict[tuple[_Look, _Look], _Deal | None] = {}
        # The most crowded first; a node is looked at again when it has changed.
        self._crowded: list[tuple[float, int]] = []
        # By cores and by memory: those with most to spare first.
        self._spare: tuple[list[tuple[float, int]], ...] = ([], [])
        for host in self._hosts.values():
            self._value(host)
            for spare, its in zip(host.spare, self._spare, strict=True):
                its.append((-spare, host.number))
        for its in self._spare:
            its.sort()

    def _enter(self, host: _Host) -> None:
        self._value(host)
        for spare, its in zip(host.spare, self._spare, strict=True):
            insort(its, (-spare, host.number))

    def _value(self, host: _Host) -> None:
        # Equal sorts of one decision are the same object.
        staying, guests = tuple(map(id, host.staying)), tuple([id(sort) for _, sort in host.guests])
        look = host.look = (host.gpus, host.cpus, host.mem_mib, staying, guests)
        known = self._values.get(look)
        if known is None:
            sorts = _sorts(host)
            met, cpus, mem_mib = _worth(sorts, host.cpus, host.mem_mib)
            lack = sum([sort.gain for sort in sorts]) - met
            known = (met, lack, (cpus / self._whole[0], mem_mib / self._whole[1]))
            self._values[look] = known
        host.met, host.lack, host.spare = known
        if host.lack > _LEAST_GAIN and host.guests:
            heapq.heappush(self._crowded, (-host.lack, host.number))

    def _leave(self, host: _Host) -> None:
        for spare, its in zip(host.spare, self._spare, strict=True):
            del its[bisect_left(its, (-spare, host.number))]

    def trade(self, most: int) -> dict[int, int]:
        """The new node of each job that changes, after at most ``most`` exchanges."""
        while self._crowded and most > 0:
            lack, number = heapq.heappop(self._crowded)
            host = self._hosts[number]
            if -lack == host.lack and self._improve(host):
                most -= 1
        return self._places

    def _improve(self, host: _Host) -> bool:
        """Exchange with the first of the best partners that makes it worth while."""
        scarce = 0 if host.spare[0] <= host.spare[1] else 1
        for _, number in self._spare[scarce][:_PARTNERS]:
            other = self._hosts[number]
            if other is host:
                continue
            key = host.look, other.look
            if key not in self._deals:
                self._deals[key] = _deal(host, other)
            deal = self._deals[key]
            if deal is not None:
                self._leave(host)
                self._leave(other)
                given = [host.guests[at] for at in deal[0]]
                taken = [other.guests[at] for at in deal[1]]
                self._move(host, other, given)
                self._move(other, host, taken)
                self._enter(host)
                self._enter(other)
                return True
        return False

    def _move(self, giver: _Host, taker: _Host, guests: Sequence[_Guest]) -> None:
        for guest in guests:
            giver.guests.remove(guest)
            taker.guests.append(guest)
            giver.book(guest[1], -1)
            taker.book(guest[1], 1)
            self._places[guest[0]] = taker.number


def _sorts(host: _Host) -> list[_Sort]:
    return [*host.staying, *[guest[1] for guest in host.guests]]


def _deal(one: _Host, other: _Host) -> _Deal | None:
    """The best exchange of two nodes, if any is worth while."""
    found = _best(one, other) if _may_gain(one, other) else None
    if found is None:
        return None
    given, taken = found
    return list(map(one.guests.index, given)), list(map(other.guests.index, taken))


def _may_gain(one: _Host, other: _Host) -> bool:
    """Whether the two would gain if they were a single node, which no exchange can exceed."""
    together = [*_sorts(one), *_sorts(other)]
    worth, _, _ = _worth(together, one.cpus + other.cpus, one.mem_mib + other.mem_mib)
    return worth > one.met + other.met + _LEAST_GAIN


def _best(one: _Host, other: _Host) -> tuple[Sequence[_Guest], Sequence[_Guest]] | None:
    """What ``one`` gives and what it takes for it; None when no exchange gains enough."""
    found = None
    most = one.met + other.met + _LEAST_GAIN
    gains = sum([sort.gain for sort in _sorts(other)])
    for its, theirs in _offers(one, other):
        cpus, mem_mib = its.cpus - theirs.cpus, its.mem_mib - theirs.mem_mib
        here_cpus, here_mem_mib = one.cpus + cpus, one.mem_mib + mem_mib
        there_cpus, there_mem_mib = other.cpus - cpus, other.mem_mib - mem_mib
        if here_cpus < 0 or here_mem_mib < 0 or there_cpus < 0 or there_mem_mib < 0:
            continue
        worth = _worth(its.kept + theirs.sorts, here_cpus, here_mem_mib)[0]
        # What the other has then is worth all its gains at the most.
        if worth + gains + its.gain - theirs.gain + _ROUNDING <= most:
            continue
        worth += _worth(theirs.kept + its.sorts, there_cpus, there_mem_mib)[0]
        if worth > most:
            most, found = worth, (its.guests, theirs.guests)
    return found


@dataclass(slots=True, eq=False)
class _Offer:
    """Some guests of a host: what they are together, and who stays behind without them."""

    guests: list[_Guest]
    sorts: list[_Sort]
    kept: list[_Sort]
    weight: float
    gain: float
    cpus: int
    mem_mib: int


def _offer(host: _Host, guests: list[_Guest]) -> _Offer:
    kept = [*host.staying, *[guest[1] for guest in host.guests if guest not in guests]]
    sorts = [sort for _, sort in guests]
    weight = gain = 0.0
    cpus = mem_mib = 0
    for sort in sorts:
        weight += sort.weight
        gain += sort.gain
        cpus += sort.cpus
        mem_mib += sort.mem_mib
    return _Offer(guests, sorts, kept, weight, gain, cpus, mem_mib)


def _offers(one: _Host, other: _Host) -> Iterator[tuple[_Offer, _Offer]]:
    """Guests of ``one`` for lighter ones of ``other`` on as many GPUs, or for GPUs that are free.

    For each number of GPUs: any single job, and the group of smaller jobs that differs most.
    """
    sizes = {guest[1].gpus for host in (one, other) for guest in host.guests}
    for size in sorted(sizes):
        heavy = [_offer(one, guests) for guests in _bundles(one.guests, size, -1)]
        if not heavy:
            continue
        light = [_offer(other, guests) for guests in _bundles(other.guests, size, 1)]
        if other.gpus >= size:
            light.append(_offer(other, []))
        for its in heavy:
            for theirs in light:
                if its.weight > theirs.weight:
                    yield its, theirs


def _bundles(guests: Sequence[_Guest], size: int, sign: int) -> list[list[_Guest]]:
    """One job of each sort with ``size`` GPUs, and the lightest (sign 1) or heaviest group."""
    singles = {guest[1]: guest for guest in reversed(guests) if guest[1].gpus == size}
    found = [[guest] for guest in singles.values()]
    group: list[_Guest] = []
    rest = size
    smaller = [guest for guest in guests if guest[1].gpus < size]
    for guest in sorted(smaller, key=lambda one: sign * one[1].weight / one[1].gpus):
        if guest[1].gpus <= rest:
            group.append(guest)
            rest -= guest[1].gpus
    if group and not rest:
        found.append(group)
    return found
