"""Shortest remaining time first (algorithms B.5)."""

from __future__ import annotations

from slurm_synergy.core.model import JobPhase, JobStatus, Snapshot
from slurm_synergy.core.remaining import rates, remaining_s
from slurm_synergy.policies.queue import QueuePolicy, Rank

__all__ = ["SRTF"]


def _key(snapshot: Snapshot) -> Rank:
    """Remaining time, with a bonus for running jobs of what their restart would cost.

    Without it two jobs of about equal remaining time would take turns: whoever runs becomes
    shorter, but the other was ahead when it was last compared.
    """
    rate_of = rates(snapshot)

    def rank(status: JobStatus) -> float:
        left_s = remaining_s(status, rate_of)
        if status.phase is JobPhase.RUNNING:
            return max(left_s - status.profile.restart_s, 0.0)
        return left_s

    return rank


SRTF = QueuePolicy(name="srtf", key=_key)
"""Jobs in the order of their remaining time."""
