"""First in, first out."""

from __future__ import annotations

from slurm_synergy.core.model import JobStatus, Snapshot
from slurm_synergy.policies.queue import QueuePolicy, Rank

__all__ = ["FIFO"]


def _arrival_s(status: JobStatus) -> float:
    return status.job.submitted_s


def _key(snapshot: Snapshot) -> Rank:
    return _arrival_s


FIFO = QueuePolicy(name="fifo", key=_key)
"""Jobs in the order of their submission."""
