"""First in, first out."""

from __future__ import annotations

from slurm_synergy.core.model import JobStatus, Snapshot
from slurm_synergy.policies.queue import QueuePolicy

__all__ = ["FIFO"]


def _arrival_s(status: JobStatus, snapshot: Snapshot) -> float:
    return status.job.submitted_s


FIFO = QueuePolicy(name="fifo", key=_arrival_s)
"""Jobs in the order of their submission."""
