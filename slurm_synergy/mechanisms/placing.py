"""Granted jobs as the mechanisms see them, and their answer as placements (algorithms B.8)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from slurm_synergy.core.elastic import as_granted
from slurm_synergy.core.model import (
    Decision,
    JobStatus,
    Layout,
    Placement,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.packing import Request, Requests, Rule
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.room import Amounts, GpuLayout, Need, Needs, Pool
from slurm_synergy.core.scaling import BatchSize
from slurm_synergy.core.snapshot import status_of
from slurm_synergy.core.values import maker, quick

__all__ = [
    "Party",
    "Shared",
    "build_layout",
    "by_size",
    "in_order",
    "make_parties",
    "make_placements",
    "pack",
    "party_maker",
]


_Order = tuple[bool, int, int, int]


@quick
@dataclass(slots=True, kw_only=True, eq=False)
class Party:
    """A granted job that takes part in the sharing. Treated as a value.

    ``want`` is what it can use on a node; ``rank`` its place in the policy's order, 0 first.
    ``now`` is what it holds, if anything, ``frozen`` that this stays as it is. ``size`` is its
    demand (GPUs, cores, MiB) on a reference node of the pool, which does not depend on where the
    job is. ``order`` sorts, before the rank: first jobs that only a restart can resize, then the
    largest.
    ``status`` shows an elastic job as it is granted, with ``batch``.
    """

    job_id: int
    status: JobStatus
    request: Request
    rank: int
    want: Need
    size: Amounts
    order: _Order
    now: Placement | None
    frozen: bool
    restarts_to_change: bool
    batch: BatchSize | None = None


_PARTY = maker(Party)
_PLACEMENT = maker(Placement)
_ON_ONE_NODE = maker(Placement, checked=False)


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
    as_asked, asking = _asking(snapshot, decision, requests)
    if as_asked and alike:
        make = party_maker(snapshot, requests, rule)
        return [make(status, request, rank) for rank, (status, request, _) in enumerate(asking)]
    wants = requests.needs(rule) if alike else Needs(requests.pool, rule)
    in_place = snapshot.enforcement.in_place
    parties = []
    for rank, (status, request, batch) in enumerate(asking):
        want = wants.of(status) if alike else wants.own(status)
        size, orders = _sized(request, requests.pool, want)
        parties.append(_party(status, request, rank, (want, size, orders), in_place, batch))
    return parties


def party_maker(
    snapshot: Snapshot, requests: Requests, rule: Rule
) -> Callable[[JobStatus, Request, int], Party]:
    """Makes the party of a job that is granted what it asked for, and of that rank.

    ``rule`` says what each can use, the same for jobs with equal profiles.
    """
    wants, in_place = requests.needs(rule), snapshot.enforcement.in_place

    def make(status: JobStatus, request: Request, rank: int) -> Party:
        kept = request.alike.kept
        terms = kept.get(rule)
        if terms is None:
            want = wants.of(status)
            terms = kept[rule] = want, *_sized(request, requests.pool, want)
        return _party(status, request, rank, terms, in_place)

    return make


def _party(
    status: JobStatus,
    request: Request,
    rank: int,
    terms: tuple[Need, Amounts, tuple[_Order, _Order]],
    in_place: bool,
    batch: BatchSize | None = None,
) -> Party:
    want, size, orders = terms
    now = request.now
    restarts = now is not None and not in_place
    return _PARTY(
        job_id=request.job_id,
        status=status,
        request=request,
        rank=rank,
        want=want,
        size=size,
        order=orders[restarts],
        now=now,
        frozen=request.frozen,
        restarts_to_change=restarts,
        batch=batch,
    )


def _asking(
    snapshot: Snapshot, decision: Decision, requests: Requests
) -> tuple[bool, Iterable[tuple[JobStatus, Request, BatchSize | None]]]:
    """Each granted job as it is granted, its request and its batch; whether all are as asked."""
    statuses, grants = status_of(snapshot), decision.grants
    known = requests.of_grants(grants)
    if known:
        return True, [(statuses[request.job_id], request, None) for request in known]
    found = []
    for grant in grants:
        configuration = grant.configuration
        status = as_granted(snapshot, statuses[grant.job_id], configuration)
        found.append((status, requests.of(status, configuration), configuration.batch))
    return False, found


def by_size(parties: Iterable[Party]) -> list[Party]:
    """Parties that come by rank, sorted by their order and rank."""
    found: dict[_Order, list[Party]] = {}
    for party in parties:
        found.setdefault(party.order, []).append(party)
    return [party for order in sorted(found) for party in found[order]]


def in_order(parties: Iterable[Party]) -> list[Party]:
    """Parties that come in any order, sorted by their order and rank."""
    return sorted(parties, key=lambda party: (party.order, party.rank))


def pack(
    requests: Requests, decision: Decision, asked: Sequence[Request]
) -> Mapping[int, GpuLayout | None]:
    """Where the granted jobs fit together: as the policy has found, else by ``Requests.pack``."""
    return requests.pack(asked) if decision.packing is None else decision.packing


def _sized(request: Request, pool: Pool, want: Need) -> tuple[Amounts, tuple[_Order, _Order]]:
    """The size of a job, and its order where it need not restart to change, and where it must."""
    found: tuple[Amounts, tuple[_Order, _Order]] | None = want.kept.get(request.shape)
    if found is None:
        size = _size(request, pool, want)
        less = -size[0], -size[1], -size[2]
        found = want.kept[request.shape] = size, ((True, *less), (False, *less))
    return found


def _size(request: Request, pool: Pool, want: Need) -> Amounts:
    """GPUs and largest demand of the whole job over the kinds of node it may use."""
    total, nodes, types = request.shape
    best = (0, 0)
    for kind, node in enumerate(pool.kinds):
        if types and node.gpu_type not in types:
            continue
        gpus = min(total // nodes if nodes else total, node.total.gpus)
        _, cpus, mem_mib = want.at(kind, gpus)
        best = max(best, (cpus * total // gpus, mem_mib * total // gpus))
    return total, *best


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Cores and MiB of each job on each of its nodes, in the order of its layout."""

    cpus: Mapping[int, Sequence[int]]
    mem_mib: Mapping[int, Sequence[int]]

    def then(self, later: Shared) -> Shared:
        """The same with what was shared out anew."""
        return Shared(cpus={**self.cpus, **later.cpus}, mem_mib={**self.mem_mib, **later.mem_mib})


def make_placements(
    parties: Iterable[Party], layouts: Mapping[int, GpuLayout], shared: Shared
) -> tuple[Placement, ...]:
    """The placements of all parties; an unchanged one is the one that the job has now."""
    known: dict[tuple[int, int, int], Resources] = {}

    def share_of(gpus: int, cpus: int, mem_mib: int) -> Resources:
        key = gpus, cpus, mem_mib
        if key not in known:
            known[key] = Resources(gpus=gpus, cpus=cpus, mem_mib=mem_mib)
        return known[key]

    placements = []
    for party in parties:
        now, job_id = party.now, party.job_id
        if party.frozen and now is not None:
            placements.append(now)
            continue
        gpu_type, parts = layouts[job_id]
        all_cpus, all_mem_mib = shared.cpus[job_id], shared.mem_mib[job_id]
        if (
            now is not None
            and now.gpu_type == gpu_type
            and (now.batch is party.batch or now.batch == party.batch)
            and _same(now, parts, all_cpus, all_mem_mib)
        ):
            placements.append(now)
            continue
        if len(parts) == 1:  # most jobs; as below, in two thirds of the time
            name, gpus = parts[0]
            key = gpus, all_cpus[0], all_mem_mib[0]
            shares: tuple[tuple[str, Resources], ...] = ((name, known.get(key) or share_of(*key)),)
            make = _ON_ONE_NODE
        else:
            rows = zip(parts, all_cpus, all_mem_mib, strict=True)
            shares = tuple([(part[0], share_of(part[1], *rest)) for part, *rest in rows])
            make = _PLACEMENT
        placements.append(make(job_id=job_id, gpu_type=gpu_type, shares=shares, batch=party.batch))
    return tuple(placements)


def _same(
    now: Placement,
    parts: Sequence[tuple[str, int]],
    all_cpus: Sequence[int],
    all_mem_mib: Sequence[int],
) -> bool:
    """Whether a job already holds just this, node by node."""
    if len(parts) == 1 == len(now.shares):  # most jobs; as below, in half of the time
        name, own = now.shares[0]
        its, gpus = parts[0]
        return (
            own.cpus == all_cpus[0]
            and own.mem_mib == all_mem_mib[0]
            and own.gpus == gpus
            and (name is its or name == its)
        )
    if len(now.shares) != len(parts):
        return False
    rows = zip(now.shares, parts, all_cpus, all_mem_mib, strict=True)
    for (name, own), (its, gpus), cpus, mem_mib in rows:
        if (
            own.cpus != cpus
            or own.mem_mib != mem_mib
            or own.gpus != gpus
            or (name is not its and name != its)
        ):
            return False
    return True


def build_layout(placements: Sequence[Placement], decision: Decision) -> Layout:
    """The mechanism's answer, grants without a placement included."""
    if len(placements) == len(decision.grants):  # each has one
        return Layout(placements=tuple(placements))
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
