"""Synergy-OPT: the best cores and memory for all jobs by integer programming (algorithms B.10).

An upper bound to compare with, not for production. The program chooses one cell (cores, memory) of
each job's grid so that the sum of rates is largest, each relative to the job's proportional rate
and weighted with its GPUs; cells below the proportional rate are not on the grid, so fairness is a
constraint. Cores and memory are limited in total per kind of node, as if the nodes of a kind were
one machine; only a job that takes whole nodes has them to itself, for nobody without a GPU there
could use what it leaves. Then the jobs are placed with what they were given, on as few nodes as
their shape allows; where the nodes' borders do not permit it, they get less, but never below their
floor.

Jobs that have the same grid share variables (how many of them take each cell), which is the same
program with the symmetry taken out. Without an answer in time all get their proportional share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_synergy.core.model import Decision, JobStatus, Layout, Node, Snapshot
from slurm_synergy.core.packing import Requests
from slurm_synergy.core.pipeline import (
    MEM_STEP_MIB,
    cpu_step,
    demand,
    floor_share,
    job_rate,
    min_mem_mib,
    proportional_share,
)
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.room import GpuLayout, Pool
from slurm_synergy.mechanisms.placing import (
    Party,
    build_layout,
    by_size,
    make_parties,
    make_placements,
    pack,
)
from slurm_synergy.mechanisms.tune import choose_nodes, full_demand, settled
from slurm_synergy.milp import Constraint, Problem, Solution, Variable, solve

__all__ = ["OPT", "Opt"]

_LIMIT_S = 60.0
_GAP = 1e-4
_MEM_UNITS = 16
_EPS = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    """Cores and MiB on each node of a job, and its rate relative to the proportional one."""

    cpus: int
    mem_mib: int
    rate: float


@dataclass(slots=True, kw_only=True)
class _Sort:
    """Jobs with the same grid on the same kind of node: their ids in order, largest first."""

    kind: int
    each: int
    parts: float
    gpus: int
    cells: tuple[_Cell, ...]
    members: list[Party]

    def alone(self, node: Node) -> bool:
        """Whether such a job takes all GPUs of each of its nodes, which are like ``node``."""
        return self.each == node.total.gpus and self.gpus % self.each == 0


class Opt:
    """The mechanism; ``limit_s`` is how many seconds the solver may take."""

    name = "opt"

    def __init__(self, limit_s: float = _LIMIT_S) -> None:
        self._limit_s = limit_s

    def place(self, snapshot: Snapshot, decision: Decision) -> Layout:
        """A placement for each grant, and the solver's report."""
        requests = Requests.of_snapshot(snapshot)
        pool = requests.pool
        parties = make_parties(snapshot, decision, requests, full_demand)
        packed = pack(requests, decision, [party.request for party in parties])
        base = {job_id: layout for job_id, layout in packed.items() if layout is not None}
        placed = [party for party in parties if party.job_id in base]
        sorts = _sorts(pool, placed, base)
        solution = Solution(status="trivial")
        chosen: dict[int, _Cell] = {}
        if any(len(sort.cells) > 1 for sort in sorts):
            solution = solve(
                _problem(pool, sorts, _frozen(pool, placed)), limit_s=self._limit_s, gap=_GAP
            )
            chosen = _chosen(sorts, solution)
        rule = _Allotment(chosen)
        given = make_parties(snapshot, decision, requests, rule, alike=False)
        given = by_size(party for party in given if party.job_id in base)
        layouts, shared = choose_nodes(snapshot, pool, given, settled(given, base), lambda: base)
        layout = build_layout(make_placements(given, layouts, shared), decision)
        return replace(layout, solver=_report(solution))


def _report(solution: Solution) -> dict[str, object]:
    return {
        "status": solution.status,
        "objective": solution.objective,
        "bound": solution.bound,
        "gap": solution.gap,
        "ms": round(solution.took_s * 1e3, 1),
        "weight": "gpus * rate / proportional rate",
    }


class _Allotment:
    """The rule by which a job wants what the program gave it, else its proportional share."""

    def __init__(self, chosen: Mapping[int, _Cell]) -> None:
        self._chosen = chosen

    def __call__(self, status: JobStatus, node: Node, gpus: int) -> Resources:
        share = proportional_share(status, node, gpus)
        cell = self._chosen.get(status.job.job_id)
        if cell is None:
            return share
        return Resources(
            gpus=gpus,
            cpus=share.cpus if node.fixed_shares else min(cell.cpus, node.total.cpus),
            mem_mib=min(cell.mem_mib, node.total.mem_mib),
        )


def _sorts(pool: Pool, parties: Sequence[Party], base: Mapping[int, GpuLayout]) -> list[_Sort]:
    """The jobs that take part, grouped by grid; frozen ones do not."""
    found: dict[tuple[object, ...], _Sort] = {}
    for party in parties:
        if party.frozen:
            continue
        _, parts = base[party.job_id]
        name, each = max(parts, key=lambda part: part[1])
        kind = pool.kind_of[pool.number[name]]
        key = (party.want, kind, each, party.request.gpus)
        if key not in found:
            found[key] = _Sort(
                kind=kind,
                each=each,
                parts=party.request.gpus / each,
                gpus=party.request.gpus,
                cells=_grid(party.status, pool.kinds[kind], each),
                members=[],
            )
        found[key].members.append(party)
    return list(found.values())


def _grid(status: JobStatus, node: Node, gpus: int) -> tuple[_Cell, ...]:
    """The cells that no other cell beats, none of them below the proportional rate."""
    share = proportional_share(status, node, gpus)
    base = job_rate(status.profile, node.gpu_type, (share,))
    proportional = _Cell(cpus=share.cpus, mem_mib=share.mem_mib, rate=1.0)
    if not base or not status.job.wrapped:
        return (proportional,)
    step = cpu_step(status.job, gpus)
    wish, floor = demand(status, node, gpus), floor_share(status, node, gpus)
    unit = max(node.total.mem_mib // _MEM_UNITS // MEM_STEP_MIB * MEM_STEP_MIB, 1)
    memories = {*range(unit, node.total.mem_mib + 1, unit), node.total.mem_mib}
    memories |= {share.mem_mib, floor.mem_mib, wish.mem_mib}
    cores = {*range(step, node.total.cpus + 1, step), share.cpus, floor.cpus, wish.cpus}
    cells = [proportional, _Cell(cpus=floor.cpus, mem_mib=floor.mem_mib, rate=1.0)]
    if node.fixed_shares:
        cores, cells = {share.cpus}, [proportional]
    for cpus in cores:
        for mem_mib in memories:
            if mem_mib < min_mem_mib(status):
                continue
            there = (Resources(gpus=gpus, cpus=cpus, mem_mib=mem_mib),)
            rate = (job_rate(status.profile, node.gpu_type, there) or 0.0) / base
            if rate >= 1.0 - _EPS:
                cells.append(_Cell(cpus=cpus, mem_mib=mem_mib, rate=rate))
    return _undominated(cells)


def _undominated(cells: Sequence[_Cell]) -> tuple[_Cell, ...]:
    kept: list[_Cell] = []
    for cell in sorted(cells, key=lambda one: (one.cpus, one.mem_mib, -one.rate)):
        # Those before it have at most its cores.
        if not any(one.mem_mib <= cell.mem_mib and one.rate >= cell.rate - _EPS for one in kept):
            kept.append(cell)
    return tuple(kept)


def _frozen(pool: Pool, parties: Sequence[Party]) -> dict[int, tuple[int, int]]:
    """Cores and MiB per kind that jobs hold that nothing can change."""
    used: dict[int, tuple[int, int]] = {}
    for party in parties:
        if party.frozen and party.now is not None:
            for name, share in party.now.shares:
                if name in pool.number:
                    kind = pool.kind_of[pool.number[name]]
                    cpus, mem_mib = used.get(kind, (0, 0))
                    used[kind] = (cpus + share.cpus, mem_mib + share.mem_mib)
    return used


def _problem(pool: Pool, sorts: Sequence[_Sort], frozen: Mapping[int, tuple[int, int]]) -> Problem:
    """Equations 1 to 5: one variable per sort and cell, the number of jobs that take it."""
    variables: list[Variable] = []
    constraints: list[Constraint] = []
    totals: dict[tuple[int, int], list[tuple[int, float]]] = {}
    alone: dict[int, int] = {}
    for sort in sorts:
        count = len(sort.members)
        numbers = range(len(variables), len(variables) + len(sort.cells))
        shares = not sort.alone(pool.kinds[sort.kind])
        if not shares:
            alone[sort.kind] = alone.get(sort.kind, 0) + count * sort.gpus // sort.each
        for number, cell in zip(numbers, sort.cells, strict=True):
            variables.append(Variable(gain=cell.rate * sort.gpus, most=count))
            if shares:
                totals.setdefault((sort.kind, 0), []).append((number, cell.cpus * sort.parts))
                totals.setdefault((sort.kind, 1), []).append((number, cell.mem_mib * sort.parts))
        terms = tuple((number, 1.0) for number in numbers)
        constraints.append(Constraint(terms=terms, limit=count, equal=True))
    for (kind, resource), coefficients in totals.items():
        capacities = [
            (node.capacity.cpus, node.capacity.mem_mib)[resource]
            for node, its in zip(pool.nodes, pool.kind_of, strict=True)
            if its == kind
        ]
        whole = (pool.kinds[kind].total.cpus, pool.kinds[kind].total.mem_mib)[resource]
        limit = sum(capacities) - frozen.get(kind, (0, 0))[resource] - alone.get(kind, 0) * whole
        constraints.append(Constraint(terms=tuple(coefficients), limit=limit))
    return Problem(variables=tuple(variables), constraints=tuple(constraints))


def _chosen(sorts: Sequence[_Sort], solution: Solution) -> dict[int, _Cell]:
    """Each job's cell; of jobs of one sort, the policy's first get the better ones."""
    if solution.values is None:
        return {}
    chosen: dict[int, _Cell] = {}
    at = 0
    for sort in sorts:
        counts = solution.values[at : at + len(sort.cells)]
        at += len(sort.cells)
        taken = sorted(zip(sort.cells, counts, strict=True), key=lambda pair: -pair[0].rate)
        cells = [cell for cell, count in taken for _ in range(count)]
        for party, cell in zip(sort.members, cells, strict=True):
            chosen[party.job_id] = cell
    return chosen


OPT = Opt()
"""The mechanism called ``opt``."""
