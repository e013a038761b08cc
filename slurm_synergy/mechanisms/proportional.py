"""GPU-proportional sharing: the baseline, and what every cluster does today (algorithms B.6)."""

from __future__ import annotations

from slurm_synergy.core.model import Decision, JobStatus, Layout, Node, Snapshot
from slurm_synergy.core.packing import Need, pack_gpus
from slurm_synergy.core.pipeline import proportional_share
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.snapshot import status_of
from slurm_synergy.mechanisms.placing import build_layout, make_parties, share_out

__all__ = ["PROPORTIONAL", "Proportional"]


def _share_of(status: JobStatus) -> Need:
    def share(node: Node, gpus: int) -> Resources:
        return proportional_share(status, node, gpus)

    return share


class Proportional:
    """Each job gets its proportional share of every node it is on.

    It gets less of a resource only where the minimum memory of a neighbour takes it, and then
    never below what keeps its proportional rate.
    """

    name = "proportional"

    def place(self, snapshot: Snapshot, decision: Decision) -> Layout:
        """A placement for each grant."""
        statuses = status_of(snapshot)
        wants = {grant.job_id: _share_of(statuses[grant.job_id]) for grant in decision.grants}
        parties = make_parties(snapshot, decision, wants)
        by_rank = sorted(parties, key=lambda party: party.rank)
        packed = pack_gpus(snapshot.nodes, [party.request for party in by_rank])
        layouts = {job_id: layout for job_id, layout in packed.items() if layout is not None}
        placed = [party for party in parties if party.job_id in layouts]
        return build_layout(placed, share_out(snapshot, placed, layouts), decision)


PROPORTIONAL = Proportional()
"""The mechanism called ``proportional``."""
