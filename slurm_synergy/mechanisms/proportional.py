"""GPU-proportional sharing: the baseline, and what every cluster does today (algorithms B.6)."""

from __future__ import annotations

from slurm_synergy.core.elastic import as_granted
from slurm_synergy.core.model import Decision, JobStatus, Layout, Placement, Snapshot
from slurm_synergy.core.packing import Request, Requests
from slurm_synergy.core.pipeline import proportional_share
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.room import GpuLayout
from slurm_synergy.core.scaling import BatchSize
from slurm_synergy.core.snapshot import status_of
from slurm_synergy.core.totals import Totals
from slurm_synergy.mechanisms.placing import (
    build_layout,
    make_parties,
    make_placements,
    pack,
)
from slurm_synergy.mechanisms.sharing import share_out

__all__ = ["PROPORTIONAL", "Proportional"]

_FORGOTTEN_AT_LEAST = 1000
_NOTHING = (0, 0, 0)


class Proportional:
    """Each job gets its proportional share of every node it is on.

    It gets less of a resource only where the minimum memory of a neighbour takes it, and then
    never below what keeps its proportional rate.
    """

    name = "proportional"

    def place(self, snapshot: Snapshot, decision: Decision) -> Layout:
        """A placement for each grant."""
        requests = Requests.of_snapshot(snapshot)
        placements = _whole_shares(snapshot, decision, requests)
        if placements is not None:
            return Layout(placements=tuple(placements))
        pool = requests.pool
        parties = make_parties(snapshot, decision, requests, proportional_share)
        packed = pack(requests, decision, [party.request for party in parties])
        layouts = {job_id: layout for job_id, layout in packed.items() if layout is not None}
        placed = [party for party in parties if party.job_id in layouts]
        placed.sort(key=lambda party: party.order)
        shared, _ = share_out(snapshot, pool, placed, layouts, even=False)
        return build_layout(make_placements(placed, layouts, shared), decision)


class _Shares(dict[Request, tuple[GpuLayout, Placement]]):
    """Whole shares that were given before; kept with the nodes, as they depend on no other job."""


def _whole_shares(
    snapshot: Snapshot, decision: Decision, requests: Requests
) -> list[Placement] | None:
    """Placements where nobody holds anything yet and each gets its whole share; None elsewhere.

    Nothing has to be shared out then, so a share that was given before is given again.
    """
    statuses = status_of(snapshot)
    grants = decision.grants
    granted = requests.of_grants(grants)
    if not granted:
        pairs = [(statuses[grant.job_id], grant.configuration) for grant in grants]
        granted = [requests.of(as_granted(snapshot, *pair), pair[1]) for pair in pairs]
    if any([request.held for request in granted]):  # noqa: C419 - quicker
        return None
    packed = pack(requests, decision, granted)
    known = snapshot.of_nodes.get(_Shares)
    if not isinstance(known, _Shares) or len(known) > 2 * len(statuses) + _FORGOTTEN_AT_LEAST:
        known = snapshot.of_nodes[_Shares] = _Shares()
    layouts = [packed[request.job_id] for request in granted]
    placements = []
    rows = zip(granted, layouts, map(known.get, granted), grants, strict=True)
    for request, layout, before, grant in rows:
        if layout is None:
            return None
        batch = grant.configuration.batch
        if before is None or before[0] is not layout or before[1].batch != batch:
            status = as_granted(snapshot, statuses[request.job_id], grant.configuration)
            placement = _whole_share(status, request, requests, layout, batch)
            before = known[request] = (layout, placement)
        placements.append(before[1])
    used = Totals.of_snapshot(snapshot).by_node(placements)
    for node in snapshot.nodes:
        gpus, cpus, mem_mib = used.get(node.name, _NOTHING)
        most = node.capacity
        if gpus > most.gpus or cpus > most.cpus or mem_mib > most.mem_mib:
            return None
    return placements


def _whole_share(
    status: JobStatus,
    request: Request,
    requests: Requests,
    layout: GpuLayout,
    batch: BatchSize | None,
) -> Placement:
    want, pool = requests.needs(proportional_share).of(status), requests.pool
    shares = []
    for name, gpus in layout[1]:
        kind = pool.kind_of[pool.number[name]]
        _, cpus, mem_mib = map(max, want.at(kind, gpus), request.need.at(kind, gpus))
        shares.append((name, Resources(gpus=gpus, cpus=cpus, mem_mib=mem_mib)))
    return Placement(job_id=request.job_id, gpu_type=layout[0], shares=tuple(shares), batch=batch)


PROPORTIONAL = Proportional()
"""The mechanism called ``proportional``."""
