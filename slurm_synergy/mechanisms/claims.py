"""What jobs can claim of the nodes where their GPUs are: a floor, and what they can use."""

from __future__ import annotations

from typing import Any

from slurm_synergy.core.model import JobStatus, Placement, Snapshot
from slurm_synergy.core.packing import Request
from slurm_synergy.core.pipeline import cpu_step, proportional_share
from slurm_synergy.core.room import GpuLayout, Need, Pool
from slurm_synergy.mechanisms.placing import Party

__all__ = ["Claim", "Claimed", "Claims", "Row", "granted_mib", "settles"]

Row = tuple[int, int, int, tuple[int, int], tuple[int, int]]
"""Node, GPUs, core step, then floor and wish, each of cores and MiB."""

Claimed = tuple[int, int, tuple[int, int], tuple[int, int]]
"""A row without its node."""

_Terms = tuple[int, int, int, int, int]
"""Core step, floor of cores and MiB, wish of cores and MiB."""


class Claim:
    """A row without its node.

    ``cpus`` and ``mem_mib`` are what a job that is on this node alone gets if all its wishes are
    met; ``is_hungry`` tells that it wants more memory than its floor; ``sort`` is for the exchange,
    which computes it when first needed.
    """

    __slots__ = ("cpus", "is_hungry", "mem_mib", "row", "sort")

    def __init__(self, row: Claimed) -> None:
        self.row = row
        self.cpus, self.mem_mib = (row[3][0],), (row[3][1],)
        self.is_hungry = row[3][1] > row[2][1]
        self.sort: Any = None


class Claims:
    """Floor and wish of jobs on the nodes where they are; computed once for jobs that agree."""

    __slots__ = ("_bound", "_even", "_fixed", "_in_place", "_pool", "_terms")

    @property
    def binds_nodes(self) -> bool:
        """Whether shares of running jobs cannot change, on some nodes or on all."""
        return bool(self._fixed) or not self._in_place

    def __init__(self, snapshot: Snapshot, pool: Pool, *, even: bool = True) -> None:
        self._pool, self._even = pool, even
        self._in_place = snapshot.enforcement.in_place
        self._fixed = {node.name: node for node in pool.nodes if node.fixed_shares}
        self._terms: dict[tuple[Need, Need, int, int], _Terms] = {}
        # Claims of jobs that want more memory than they can have where they are.
        self._bound: dict[tuple[Claim, int], Claim] = {}

    def on_one(self, party: Party, layout: GpuLayout) -> tuple[int, Claim] | None:
        """Node and claim of a job on a single node, as in ``rows``.

        None for one that is on several, and where more than its memory is bound by what it holds.
        The same claim, as an object, for all jobs that agree.
        """
        parts, request, now = layout[1], party.request, party.now
        if len(parts) != 1 or self._fixed:
            return None
        if now is not None and (request.pinned or party.frozen or not self._in_place):
            return None
        name, gpus = parts[0]
        number = self._pool.number[name]
        kind = self._pool.kind_of[number]
        found = self.of_sort(party, kind, gpus)
        if now is not None and found.is_hungry and settles(request, layout):
            return number, self.held_to(found, granted_mib(party.status, name, now))
        return number, found

    def of_sort(self, party: Party, kind: int, gpus: int) -> Claim:
        """The claim of all jobs like ``party`` that have so many GPUs on one node of that kind."""
        key = (party.request.need, kind, gpus)
        found: Claim | None = party.want.kept.get(key)
        if found is None:
            step, cpu_floor, mem_floor, cpu_want, mem_want = _terms(party, kind, gpus)
            found = Claim((gpus, step, (cpu_floor, mem_floor), (cpu_want, mem_want)))
            party.want.kept[key] = found
        return found

    def held_to(self, claim: Claim, granted_mib: int) -> Claim:
        """The claim of a job that wants more memory than its floor, but can have no more than that.

        At the least it has its floor.
        """
        gpus, step, floor, (cpus, mem_mib) = claim.row
        most = max(granted_mib, floor[1])
        if most >= mem_mib:
            return claim
        found = self._bound.get((claim, most))
        if found is None:
            found = self._bound[claim, most] = Claim((gpus, step, floor, (cpus, most)))
        return found

    def rows(self, party: Party, layout: GpuLayout) -> list[Row]:
        """What a job can claim on each node of ``layout``; what a frozen one holds is both."""
        new = self.on_one(party, layout)
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
            mem_want = min(mem_want, max(granted_mib(party.status, name, party.now), mem_floor))
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


def granted_mib(status: JobStatus, node: str, now: Placement) -> int:
    """Memory that a running job can have in place: what the cluster granted at its start."""
    granted = status.lease.granted.get(node) if status.lease else None
    return granted.mem_mib if granted else now.on(node).mem_mib


def settles(request: Request, layout: GpuLayout) -> bool:
    """Whether ``layout`` leaves a job where it is."""
    own = request.held
    return own is layout or (own is not None and sorted(own[1]) == sorted(layout[1]))
