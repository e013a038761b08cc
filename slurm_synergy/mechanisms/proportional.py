"""GPU-proportional sharing: the baseline, and what every cluster does today (algorithms B.6)."""

from __future__ import annotations

from slurm_synergy.core.model import Decision, Layout, Snapshot
from slurm_synergy.core.packing import Requests
from slurm_synergy.core.pipeline import proportional_share
from slurm_synergy.mechanisms.placing import (
    build_layout,
    make_parties,
    make_placements,
    share_out,
)

__all__ = ["PROPORTIONAL", "Proportional"]


class Proportional:
    """Each job gets its proportional share of every node it is on.

    It gets less of a resource only where the minimum memory of a neighbour takes it, and then
    never below what keeps its proportional rate.
    """

    name = "proportional"

    def place(self, snapshot: Snapshot, decision: Decision) -> Layout:
        """A placement for each grant."""
        requests = Requests.of_snapshot(snapshot)
        pool = requests.pool
        parties = make_parties(snapshot, decision, requests, proportional_share)
        packed = requests.pack([party.request for party in parties])
        layouts = {job_id: layout for job_id, layout in packed.items() if layout is not None}
        placed = [party for party in parties if party.job_id in layouts]
        placed.sort(key=lambda party: party.order)
        shared, _ = share_out(snapshot, pool, placed, layouts)
        return build_layout(make_placements(placed, layouts, shared), decision)


PROPORTIONAL = Proportional()
"""The mechanism called ``proportional``."""
