"""Least attained service first: GPUs times the time they were held (algorithms B.5)."""

from __future__ import annotations

from slurm_synergy.core.model import JobPhase, JobStatus, Snapshot
from slurm_synergy.policies.queue import QueuePolicy, Rank

__all__ = ["LAS"]

# Until Python 3.12, looking up a member of an enumeration takes longer than comparing it.
_RUNNING = JobPhase.RUNNING


def _service_gpu_s(status: JobStatus) -> float:
    """Attained service (GPU-seconds); for a running job less what its restart would cost.

    So two jobs of equal service do not change places before the gain is worth a restart.
    """
    service_gpu_s = status.attained_service_gpu_s
    if status.phase is _RUNNING:
        less_gpu_s = service_gpu_s - status.profile.restart_s * status.job.gpus
        return less_gpu_s if less_gpu_s > 0.0 else 0.0
    return service_gpu_s


def _key(snapshot: Snapshot) -> Rank:
    return _service_gpu_s


LAS = QueuePolicy(name="las", key=_key)
"""Jobs in the order of the service that they have had; needs no profile and no known work."""
