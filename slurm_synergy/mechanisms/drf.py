"""Dominant resource fairness with Synergy's demands (algorithms B.9). A baseline.

Every job is its own user, and its demand is static, so serving the smallest dominant share again
and again is serving jobs in the order of their own dominant share.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_synergy.core.model import Decision, Layout, Snapshot
from slurm_synergy.core.room import Pool
from slurm_synergy.mechanisms.greedy import give_whole_demands
from slurm_synergy.mechanisms.placing import Party

__all__ = ["DRF", "Drf", "fractions"]


def fractions(pool: Pool, parties: Sequence[Party]) -> dict[int, tuple[float, float, float]]:
    """Each job's demand for GPUs, cores and memory as fractions of the pool's hardware."""
    gpus = sum(node.total.gpus for node in pool.nodes)
    cpus = max(sum(node.total.cpus for node in pool.nodes), 1)
    mem_mib = max(sum(node.total.mem_mib for node in pool.nodes), 1)
    return {
        party.job_id: (
            party.size[0] / gpus,
            party.size[1] / cpus,
            party.size[2] / mem_mib,
        )
        for party in parties
    }


def _smallest_dominant_share_first(
    snapshot: Snapshot, pool: Pool, parties: Sequence[Party]
) -> list[Party]:
    shares = fractions(pool, parties)
    return sorted(parties, key=lambda party: (max(shares[party.job_id]), party.rank))


class Drf:
    """Whole demands, the smallest dominant share first."""

    name = "drf"
    may_skip = True
    reads_progress = False

    def place(self, snapshot: Snapshot, decision: Decision) -> Layout:
        """A placement for each grant whose demand is free when its turn comes."""
        return give_whole_demands(snapshot, decision, _smallest_dominant_share_first)


DRF = Drf()
"""The mechanism called ``drf``."""
