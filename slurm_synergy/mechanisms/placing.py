"""Sharing the cores and memory of nodes among jobs whose GPUs are placed (algorithms B.8).

The outcome is a function of the GPU layout and the order alone, not of how the layout came about:
a second round with the same jobs gives the same shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_synergy.core.model import (
    Decision,
    Enforcement,
    JobStatus,
    Layout,
    Node,
    Placement,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.packing import GpuLayout, Need, Request, make_request, memoised
from slurm_synergy.core.pipeline import cpu_step
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.snapshot import held, is_frozen, is_pinned, status_of

__all__ = ["Party", "build_layout", "make_parties", "settles", "share_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """A granted job that takes part in the sharing.

    ``want`` is what it can use on a node, ``floor`` what it must get; ``size`` its demand on a
    reference node of the pool, by which jobs are ordered, so that the order does not depend on
    where a job is. ``rank`` is its place in the policy's order, 0 first.
    """

    status: JobStatus
    request: Request
    rank: int
    want: Need
    size: tuple[int, int]
    frozen: Placement | None = None
    restarts_to_change: bool = False

    @property
    def job_id(self) -> int:
        """The job's id."""
        return self.request.job_id

    @property
    def order(self) -> tuple[bool, int, int, int, int, int]:
        """Sort key: jobs that only a restart can resize, then the largest demand first."""
        cpus, mem_mib = self.size
        return (
            not self.restarts_to_change,
            -self.request.gpus,
            -cpus,
            -mem_mib,
            self.rank,
            self.job_id,
        )


def make_parties(
    snapshot: Snapshot, decision: Decision, want_of: Mapping[int, Need]
) -> list[Party]:
    """The granted jobs in the order of serving; ``want_of`` says what each can use."""
    statuses = status_of(snapshot)
    parties = []
    for rank, grant in enumerate(decision.grants):
        status = statuses[grant.job_id]
        want = memoised(want_of[grant.job_id])
        request = make_request(status, snapshot, grant.configuration)
        now = held(status)
        fixed = now is not None and is_frozen(status, snapshot)
        restarts = now is not None and not snapshot.enforcement.in_place
        parties.append(
            Party(
                status=status,
                request=request,
                rank=rank,
                want=want,
                size=_size(request, snapshot.nodes, want),
                frozen=now if fixed else None,
                restarts_to_change=restarts,
            )
        )
    return sorted(parties, key=lambda party: party.order)


def _size(request: Request, nodes: Sequence[Node], want: Need) -> tuple[int, int]:
    """Largest demand (cores, MiB) of the whole job over the kinds of node it may use."""
    best = (0, 0)
    for node in nodes:
        if request.gpu_types and node.gpu_type not in request.gpu_types:
            continue
        each = request.gpus // request.nodes if request.nodes else request.gpus
        gpus = min(each, node.total.gpus)
        share = want(node, gpus)
        best = max(best, (share.cpus * request.gpus // gpus, share.mem_mib * request.gpus // gpus))
    return best


@dataclass(slots=True)
class _Slice:
    """One resource of one job on one node while it is shared out."""

    floor: int
    want: int
    step: int
    gpus: int
    amount: int = 0

    @property
    def surplus(self) -> int:
        return self.amount - self.floor


_Slices = dict[int, dict[str, _Slice]]


def share_out(
    snapshot: Snapshot, parties: Sequence[Party], layouts: Mapping[int, GpuLayout]
) -> dict[int, Placement]:
    """Cores and memory for all parties on their given GPUs.

    Each job in turn gets what it wants; if that is not left, its floor, for which jobs above
    theirs give up as much as is needed. At last, what is left goes to those that want more, in
    the same order; nobody gets more than it wants. Cores and memory are shared independently.
    """
    nodes = {node.name: node for node in snapshot.nodes}
    amounts: dict[str, dict[int, dict[str, int]]] = {}
    for resource in ("cpus", "mem_mib"):
        free = {name: getattr(node.capacity, resource) for name, node in nodes.items()}
        slices: _Slices = {}
        movers = []
        for party in parties:
            if party.frozen is not None:
                for name, share in party.frozen.shares:
                    free[name] = free.get(name, 0) - getattr(share, resource)
            else:
                slices[party.job_id] = _slices(
                    snapshot, party, layouts[party.job_id], nodes, resource
                )
                movers.append(party)
        amounts[resource] = _divide(movers, slices, free)
    placements = {}
    for party in parties:
        if party.frozen is not None:
            placements[party.job_id] = party.frozen
            continue
        gpu_type, parts = layouts[party.job_id]
        shares = tuple(
            (
                name,
                Resources(
                    gpus=gpus,
                    cpus=amounts["cpus"][party.job_id][name],
                    mem_mib=amounts["mem_mib"][party.job_id][name],
                ),
            )
            for name, gpus in parts
        )
        placements[party.job_id] = Placement(job_id=party.job_id, gpu_type=gpu_type, shares=shares)
    return placements


def _slices(
    snapshot: Snapshot,
    party: Party,
    layout: GpuLayout,
    nodes: Mapping[str, Node],
    resource: str,
) -> dict[str, _Slice]:
    """Floor and wish of one job for one resource on each of its nodes."""
    now = held(party.status)
    stays = now is not None and settles(now, layout)
    found = {}
    for name, gpus in layout[1]:
        floor = getattr(party.request.need(nodes[name], gpus), resource)
        want = max(getattr(party.want(nodes[name], gpus), resource), floor)
        if stays and now is not None:
            own = getattr(now.on(name), resource)
            if is_pinned(party.status, snapshot):
                floor = min(floor, own)
            if snapshot.enforcement is Enforcement.REQUEUE:
                want = max(own, floor)
            elif resource == "mem_mib":
                want = min(want, max(_granted_mib(party.status, name), floor))
        step = cpu_step(party.status.job, gpus) if resource == "cpus" else 1
        found[name] = _Slice(floor=floor, want=want, step=step, gpus=gpus)
    return found


def _granted_mib(status: JobStatus, node: str) -> int:
    """Memory that a running job can have in place: what the cluster granted at its start."""
    if status.lease is None:
        return 0
    granted = status.lease.granted.get(node)
    return granted.mem_mib if granted else status.lease.placement.on(node).mem_mib


def settles(now: Placement, layout: GpuLayout) -> bool:
    """Whether ``layout`` leaves a job where it is."""
    return now.gpu_layout == tuple(sorted(layout[1]))


def _divide(
    parties: Sequence[Party], slices: _Slices, free: dict[str, int]
) -> dict[int, dict[str, int]]:
    """One resource for all parties, in their order; ``free`` is used up."""
    served: list[Party] = []
    for party in parties:
        own = slices[party.job_id]
        enough = all(free[name] >= one.want for name, one in own.items())
        for name, one in own.items():
            if not enough and free[name] < one.floor:
                _reclaim(one.floor - free[name], name, served, slices, free)
            one.amount = one.want if enough else one.floor
            free[name] -= one.amount
        served.append(party)
    for party in parties:
        _fill(slices[party.job_id], free)
    return {
        job_id: {name: one.amount for name, one in own.items()} for job_id, own in slices.items()
    }


def _reclaim(
    lack: int, node: str, served: Sequence[Party], slices: _Slices, free: dict[str, int]
) -> None:
    """Take ``lack`` on ``node`` from served jobs above their floor, on all nodes of each victim.

    First those on the fewest nodes, then those with the largest surplus per GPU, then those that
    the policy ranks last; jobs that only a restart can shrink come after all others.
    """
    victims = [party for party in served if node in slices[party.job_id]]
    victims.sort(
        key=lambda party: (
            party.restarts_to_change,
            len(slices[party.job_id]),
            -slices[party.job_id][node].surplus / slices[party.job_id][node].gpus,
            -party.rank,
        )
    )
    for victim in victims:
        own = slices[victim.job_id]
        here = own[node]
        if lack <= 0:
            return
        taken = min(here.surplus, -(-lack // here.step) * here.step)
        if taken <= 0:
            continue
        lack -= taken
        for name, one in own.items():
            # Ranks advance in step, so what one node gives up is of no use on the others.
            part = taken if name == node else -(-taken * one.gpus // (here.gpus * one.step))
            part = part if name == node else min(one.surplus, part * one.step)
            one.amount -= part
            free[name] += part


def _fill(own: dict[str, _Slice], free: dict[str, int]) -> None:
    """Raise a job towards its wish, by the same fraction on all its nodes."""
    short = {name: one.want - one.amount for name, one in own.items() if one.want > one.amount}
    if not short or any(free[name] <= 0 for name in short):
        return
    tightest = min(short, key=lambda name: (free[name] / short[name], name))
    numerator, denominator = min(free[tightest], short[tightest]), short[tightest]
    for name, missing in short.items():
        one = own[name]
        raised = missing * numerator // denominator
        if one.amount + raised < one.want:
            raised = raised // one.step * one.step
        one.amount += raised
        free[name] -= raised


def build_layout(
    parties: Sequence[Party], placements: Mapping[int, Placement], decision: Decision
) -> Layout:
    """The mechanism's answer, grants without a placement included."""
    unplaced = {
        grant.job_id: Reason(
            code=ReasonCode.FRAGMENTED,
            text="the granted jobs cannot be packed together onto the nodes",
        )
        for grant in decision.grants
        if grant.job_id not in placements
    }
    ordered = [placements[party.job_id] for party in parties if party.job_id in placements]
    return Layout(placements=tuple(ordered), unplaced=unplaced)
