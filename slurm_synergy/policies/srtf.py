"""Shortest remaining time first (algorithms B.5)."""

from __future__ import annotations

import math

from slurm_synergy.core.model import JobPhase, JobStatus, Snapshot
from slurm_synergy.core.pipeline import reference_rate
from slurm_synergy.policies.queue import QueuePolicy

__all__ = ["SRTF", "remaining_s"]


def remaining_s(status: JobStatus, snapshot: Snapshot) -> float:
    """Seconds that the job still needs at its GPU-proportional share.

    From its work and its profile when both are known; otherwise what is left of its time limit;
    infinite when it has none. The rate is taken on the best kind of node the job may use, so it
    does not change by starting or moving the job.
    """
    job = status.job
    rate = reference_rate(status, snapshot.nodes)
    if job.total_samples is not None and rate:
        return max(job.total_samples - status.done_samples, 0.0) / rate
    if job.time_limit_s is not None:
        return max(job.time_limit_s - status.attained_service_gpu_s / job.gpus, 0.0)
    return math.inf


def _remaining_s(status: JobStatus, snapshot: Snapshot) -> float:
    """Remaining time, with a bonus for running jobs of what their restart would cost.

    Without it two jobs of about equal remaining time would take turns: whoever runs becomes
    shorter, but the other was ahead when it was last compared.
    """
    left_s = remaining_s(status, snapshot)
    if status.phase is JobPhase.RUNNING:
        return max(left_s - status.profile.restart_s, 0.0)
    return left_s


SRTF = QueuePolicy(name="srtf", key=_remaining_s)
"""Jobs in the order of their remaining time."""
