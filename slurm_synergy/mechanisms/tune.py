"""Synergy-TUNE: give each job the cores and memory that it can use (OSDI '22; algorithms B.8).

Running jobs keep their GPUs unless the packing needs them elsewhere. New jobs, largest demand
first, go to the tightest node that has their whole demand; else to one that has their floor; else
to one where jobs above their floor can make room for it. So jobs that need much end up beside jobs
that need little. Where that leads into a corner, the packing of the policy is taken as it is: a
granted job is never left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_synergy.core.model import Decision, JobStatus, Layout, Node, Snapshot
from slurm_synergy.core.packing import GpuLayout, Need, Room, find_layout, pack_gpus
from slurm_synergy.core.pipeline import demand
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.snapshot import status_of
from slurm_synergy.mechanisms.placing import Party, build_layout, make_parties, share_out

__all__ = ["TUNE", "Tune"]


def _demand_of(status: JobStatus) -> Need:
    def wish(node: Node, gpus: int) -> Resources:
        found = demand(status, node, gpus)
        return Resources(gpus=gpus, cpus=found.cpus, mem_mib=found.mem_mib)

    return wish


class Tune:
    """The mechanism of the paper, with sticky GPUs."""

    name = "tune"

    def place(self, snapshot: Snapshot, decision: Decision) -> Layout:
        """A placement for each grant."""
        statuses = status_of(snapshot)
        wants = {grant.job_id: _demand_of(statuses[grant.job_id]) for grant in decision.grants}
        parties = make_parties(snapshot, decision, wants)
        by_rank = sorted(parties, key=lambda party: party.rank)
        packed = pack_gpus(snapshot.nodes, [party.request for party in by_rank])
        base = {job_id: layout for job_id, layout in packed.items() if layout is not None}
        placed = [party for party in parties if party.job_id in base]
        layouts = _choose_nodes(snapshot, placed, base) or base
        return build_layout(placed, share_out(snapshot, placed, layouts), decision)


def _choose_nodes(
    snapshot: Snapshot, parties: Sequence[Party], base: Mapping[int, GpuLayout]
) -> Mapping[int, GpuLayout] | None:
    """GPUs for all parties, new ones placed by demand; None when that leads into a corner."""
    layouts: dict[int, GpuLayout] = {}
    floors = Room(snapshot.nodes)
    settled = [party for party in parties if party.request.held == base[party.job_id]]
    for party in settled:
        layouts[party.job_id] = base[party.job_id]
        floors.take(_floor_shares(snapshot, party, layouts[party.job_id]))
    room = Room(snapshot.nodes)
    for placement in share_out(snapshot, settled, layouts).values():
        room.take(placement.shares)
    for party in parties:
        if party.job_id in layouts:
            continue
        wish = find_layout(party.request, snapshot.nodes, room, party.want)
        layout = (
            wish
            or find_layout(party.request, snapshot.nodes, room)
            or find_layout(party.request, snapshot.nodes, floors)
        )
        if layout is None:
            return None
        layouts[party.job_id] = layout
        floor = _floor_shares(snapshot, party, layout)
        floors.take(floor)
        _book(room, _wish_shares(snapshot, party, layout) if wish else floor)
    return layouts


def _book(room: Room, shares: Sequence[tuple[str, Resources]]) -> None:
    """Take ``shares``; what is not free is given up by others, so nothing is left then."""
    for name, share in shares:
        gpus, cpus, mem_mib = room.free(name)
        taken = Resources(
            gpus=min(share.gpus, max(gpus, 0)),
            cpus=min(share.cpus, max(cpus, 0)),
            mem_mib=min(share.mem_mib, max(mem_mib, 0)),
        )
        room.take([(name, taken)])


def _floor_shares(
    snapshot: Snapshot, party: Party, layout: GpuLayout
) -> list[tuple[str, Resources]]:
    if party.request.shares:
        return list(party.request.shares)
    return [(name, party.request.need(snapshot.node(name), gpus)) for name, gpus in layout[1]]


def _wish_shares(
    snapshot: Snapshot, party: Party, layout: GpuLayout
) -> list[tuple[str, Resources]]:
    return [(name, party.want(snapshot.node(name), gpus)) for name, gpus in layout[1]]


TUNE = Tune()
"""The mechanism called ``tune``."""
