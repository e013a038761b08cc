"""First in, first out."""

from __future__ import annotations

from slurm_synergy.core.model import Snapshot
from slurm_synergy.policies.queue import ARRIVAL, QueuePolicy, Rank

__all__ = ["FIFO"]


def _key(snapshot: Snapshot) -> Rank:
    return ARRIVAL


FIFO = QueuePolicy(name="fifo", key=_key, reads_progress=False)
"""Jobs in the order of their submission."""
