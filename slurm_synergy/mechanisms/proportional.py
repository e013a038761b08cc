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
from slurm_synergy.mechanisms.placing import (
    build_layout,
    make_parties,
    make_placements,
    pack,
)
from slurm_synergy.mechanisms.sharing import share_out

__all__ = ["PROPORTIONAL", "Proportional"]

_FORGOTTEN_AT_LEAST = 1000


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
        shared, _ = share_out(snapshot, pool, placed, layouts)
        return build_layout(make_placements(placed, layouts, shared), decision)


class _Shares(dict[int, tuple[Request, GpuLayout, Placement]]):
    """Whole shares that were given before; kept with the nodes, as they depend on no other job."""


def _whole_shares(
    snapshot: Snapshot, decision: Decision, requests: Requests
) -> list[Placement] | None:
    """Placements where nobody holds anything yet and each gets its whole share; None elsewhere.

    Nothing has to be shared out then, so a share that was given before is given again.
    """
    statuses = status_of(snapshot)
    granted = []
    for grant in decision.grants:
        request = requests.of_grant(grant)
        if request is None:
            status = as_granted(snapshot, statuses[grant.job_id], grant.configuration)
            request = requests.of(status, grant.configuration)
        if request.held is not None:
            return None
        granted.append(request)
    packed = pack(requests, decision, granted)
    known = snapshot.of_nodes.get(_Shares)
    if not isinstance(known, _Shares) or len(known) > 2 * len(statuses) + _FORGOTTEN_AT_LEAST:
        known = snapshot.of_nodes[_Shares] = _Shares()
    used = {node.name: [0, 0, 0] for node in snapshot.nodes}
    placements = []
    for request, grant in zip(granted, decision.grants, strict=True):
        job_id, batch = request.job_id, grant.configuration.batch
        layout = packed[job_id]
        if layout is None:
            return None
        before = known.get(job_id)
        if (
            before is None
            or before[0] is not request
            or before[1] is not layout
            or before[2].batch != batch
        ):
            status = as_granted(snapshot, statuses[job_id], grant.configuration)
            placement = _whole_share(status, request, requests, layout, batch)
            before = known[job_id] = (request, layout, placement)
        placement = before[2]
        placements.append(placement)
        for name, share in placement.shares:
            row = used[name]
            row[0] += share.gpus
            row[1] += share.cpus
            row[2] += share.mem_mib
    for node in snapshot.nodes:
        gpus, cpus, mem_mib = used[node.name]
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
