"""Sharing the cores and memory of nodes among jobs whose GPUs are placed (algorithms B.8).

The outcome is a function of the GPU layout and the order alone, not of how the layout came about:
a second round with the same jobs gives the same shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from slurm_synergy.core.model import (
    Decision,
    JobStatus,
    Layout,
    Node,
    Placement,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.packing import Request, Requests
from slurm_synergy.core.pipeline import cpu_step
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.room import Amounts, GpuLayout, Need, Needs, Pool
from slurm_synergy.core.snapshot import held, status_of

__all__ = [
    "Party",
    "Rule",
    "Shared",
    "build_layout",
    "make_parties",
    "make_placements",
    "neighbours",
    "settles",
    "share_out",
]

Rule = Callable[[JobStatus, Node, int], Resources]
"""What a job can use on a node for a number of its GPUs, in a mechanism's opinion."""


@dataclass(slots=True, kw_only=True, eq=False)
class Party:
    """A granted job that takes part in the sharing. Treated as a value.

    ``want`` is what it can use on a node; ``rank`` its place in the policy's order, 0 first.
    ``now`` is what it holds, if anything, ``frozen`` that this stays as it is. ``size`` is its
    demand (GPUs, cores, MiB) on a reference node of the pool, which does not depend on where the
    job is. ``order`` sorts: first jobs that only a restart can resize, then the largest.
    """

    job_id: int
    status: JobStatus
    request: Request
    rank: int
    want: Need
    size: Amounts
    order: tuple[bool, int, int, int, int, int]
    now: Placement | None
    frozen: bool
    restarts_to_change: bool


def make_parties(
    snapshot: Snapshot,
    decision: Decision,
    requests: Requests,
    rule: Rule,
    *,
    alike: bool = True,
) -> list[Party]:
    """The granted jobs in the order of the policy; ``rule`` says what each can use.

    ``alike`` tells that the rule gives the same to jobs with equal profiles.
    """
    statuses = status_of(snapshot)
    wants = Needs(requests.pool, rule)
    in_place = snapshot.enforcement.in_place
    sizes: dict[object, tuple[int, int]] = {}
    parties = []
    for rank, grant in enumerate(decision.grants):
        status = statuses[grant.job_id]
        request = requests.of(status, grant.configuration)
        want = wants.of(status) if alike else wants.own(status)
        sort = (request.shape, want)
        if sort not in sizes:
            sizes[sort] = _size(request, requests.pool, want)
        cpus, mem_mib = sizes[sort]
        now = held(status)
        restarts = now is not None and not in_place
        parties.append(
            Party(
                job_id=grant.job_id,
                status=status,
                request=request,
                rank=rank,
                want=want,
                size=(request.gpus, cpus, mem_mib),
                order=(not restarts, -request.gpus, -cpus, -mem_mib, rank, grant.job_id),
                now=now,
                frozen=request.frozen,
                restarts_to_change=restarts,
            )
        )
    return parties


def _size(request: Request, pool: Pool, want: Need) -> tuple[int, int]:
    """Largest demand (cores, MiB) of the whole job over the kinds of node it may use."""
    total, nodes, types = request.shape
    best = (0, 0)
    for kind, node in enumerate(pool.kinds):
        if types and node.gpu_type not in types:
            continue
        gpus = min(total // nodes if nodes else total, node.total.gpus)
        _, cpus, mem_mib = want.at(kind, gpus)
        best = max(best, (cpus * total // gpus, mem_mib * total // gpus))
    return best


_Row = tuple[int, int, int, tuple[int, int], tuple[int, int]]
"""Node, GPUs, core step, then floor and wish, each of cores and MiB."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Cores and MiB of each job on each of its nodes, in the order of its layout."""

    cpus: Mapping[int, Sequence[int]]
    mem_mib: Mapping[int, Sequence[int]]


def neighbours(
    parties: Sequence[Party], layouts: Mapping[int, GpuLayout], movers: Iterable[int]
) -> list[Party]:
    """Those of ``parties``, in their order, whose share may depend on where ``movers`` are.

    What one job gets depends on those beside it, and through jobs on several nodes on those
    beside them.
    """
    nodes = {name for job_id in movers for name, _ in layouts[job_id][1]}
    wide = [layouts[party.job_id][1] for party in parties if len(layouts[party.job_id][1]) > 1]
    grown = -1
    while grown < len(nodes):
        grown = len(nodes)
        for parts in wide:
            if any(name in nodes for name, _ in parts):
                nodes.update(name for name, _ in parts)
    return [
        party
        for party in parties
        if any([name in nodes for name, _ in layouts[party.job_id][1]])  # noqa: C419 - quicker
    ]


def share_out(
    snapshot: Snapshot, pool: Pool, parties: Sequence[Party], layouts: Mapping[int, GpuLayout]
) -> tuple[Shared, list[Amounts]]:
    """Cores and memory for all parties on their given GPUs, in the order of ``parties``.

    Also what is left on each node.

    Each job in turn gets what it wants; if that is not left, its floor, for which jobs above
    theirs give up as much as is needed. At last, what is left goes to those that want more, in
    the same order; nobody gets more than it wants. Cores and memory are shared independently.
    """
    gpus_free = [node.capacity.gpus for node in pool.nodes]
    cpus_free = [node.capacity.cpus for node in pool.nodes]
    mem_free = [node.capacity.mem_mib for node in pool.nodes]
    claims: list[tuple[Party, list[_Row]]] = []
    for party in parties:
        if party.frozen and party.now is not None:
            for name, share in party.now.shares:
                number = pool.number.get(name)
                if number is not None:
                    gpus_free[number] -= share.gpus
                    cpus_free[number] -= share.cpus
                    mem_free[number] -= share.mem_mib
        else:
            rows = _rows(snapshot, pool, party, layouts[party.job_id])
            for row in rows:
                gpus_free[row[0]] -= row[1]
            claims.append((party, rows))
    cpus = _divide(claims, 0, cpus_free)
    mem_mib = _divide(claims, 1, mem_free)
    left = list(zip(gpus_free, cpus_free, mem_free, strict=True))
    return Shared(cpus=cpus, mem_mib=mem_mib), left


def _rows(snapshot: Snapshot, pool: Pool, party: Party, layout: GpuLayout) -> list[_Row]:
    """Floor and wish of one job on each of its nodes."""
    request, status = party.request, party.status
    own_shares: Mapping[str, Resources] = {}
    if party.now is not None and settles(request, layout):
        own_shares = dict(party.now.shares)
    rows: list[_Row] = []
    for name, gpus in layout[1]:
        number = pool.number[name]
        kind = pool.kind_of[number]
        _, cpu_floor, mem_floor = request.need.at(kind, gpus)
        _, cpu_want, mem_want = party.want.at(kind, gpus)
        cpu_want = cpu_want if cpu_want > cpu_floor else cpu_floor
        mem_want = mem_want if mem_want > mem_floor else mem_floor
        if own_shares:
            own = own_shares[name]
            if request.pinned:
                cpu_floor, mem_floor = min(cpu_floor, own.cpus), min(mem_floor, own.mem_mib)
            if not snapshot.enforcement.in_place:
                cpu_want, mem_want = max(own.cpus, cpu_floor), max(own.mem_mib, mem_floor)
            elif mem_want > mem_floor:
                mem_want = min(mem_want, max(_granted_mib(status, name, own), mem_floor))
        step = cpu_step(status.job, gpus)
        rows.append((number, gpus, step, (cpu_floor, mem_floor), (cpu_want, mem_want)))
    return rows


def _granted_mib(status: JobStatus, node: str, own: Resources) -> int:
    """Memory that a running job can have in place: what the cluster granted at its start."""
    granted = status.lease.granted.get(node) if status.lease else None
    return granted.mem_mib if granted else own.mem_mib


def settles(request: Request, layout: GpuLayout) -> bool:
    """Whether ``layout`` leaves a job where it is."""
    own = request.held
    return own is layout or (own is not None and sorted(own[1]) == sorted(layout[1]))


def _divide(
    claims: Sequence[tuple[Party, list[_Row]]], resource: int, free: list[int]
) -> dict[int, list[int]]:
    """Cores (resource 0) or MiB (1) for all parties, in their order; ``free`` is used up."""
    wanted = [0] * len(free)
    for _, rows in claims:
        for row in rows:
            wanted[row[0]] += row[4][resource]
    # Where all get what they want there is nothing to divide.
    scarce = [want > left for want, left in zip(wanted, free, strict=True)]
    amounts: dict[int, list[int]] = {}
    stakes: list[_Stake] = []
    for party, rows in claims:
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


def _slices(rows: Sequence[_Row], resource: int) -> list[_Slice]:
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


def make_placements(
    parties: Iterable[Party], layouts: Mapping[int, GpuLayout], shared: Shared
) -> tuple[Placement, ...]:
    """The placements of all parties; an unchanged one is the one that the job has now."""
    known: dict[tuple[int, int, int], Resources] = {}
    placements = []
    for party in parties:
        now, job_id = party.now, party.job_id
        if party.frozen and now is not None:
            placements.append(now)
            continue
        gpu_type, parts = layouts[job_id]
        shares = []
        amounts = zip(parts, shared.cpus[job_id], shared.mem_mib[job_id], strict=True)
        for (name, gpus), cpus, mem_mib in amounts:
            key = (gpus, cpus, mem_mib)
            if key not in known:
                known[key] = Resources(gpus=gpus, cpus=cpus, mem_mib=mem_mib)
            shares.append((name, known[key]))
        if now is not None and now.shares == tuple(shares) and now.gpu_type == gpu_type:
            placements.append(now)
        else:
            made = Placement(job_id=job_id, gpu_type=gpu_type, shares=tuple(shares))
            placements.append(made)
    return tuple(placements)


def build_layout(placements: Sequence[Placement], decision: Decision) -> Layout:
    """The mechanism's answer, grants without a placement included."""
    placed = {placement.job_id for placement in placements}
    unplaced = {
        grant.job_id: Reason(
            code=ReasonCode.FRAGMENTED,
            text="the granted jobs cannot be packed together onto the nodes",
        )
        for grant in decision.grants
        if grant.job_id not in placed
    }
    return Layout(placements=tuple(placements), unplaced=unplaced)
