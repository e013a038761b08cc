"""Least attained service first: GPUs times the time they were held (algorithms B.5)."""

from __future__ import annotations

from collections.abc import Iterable

from slurm_synergy.core.model import JobPhase, JobStatus, Snapshot
from slurm_synergy.policies.queue import QueuePolicy, Rank

__all__ = ["LAS"]

# Until Python 3.12, looking up a member of an enumeration takes longer than comparing it.
_RUNNING = JobPhase.RUNNING


class _Service:
    """Attained service (GPU-seconds); for a running job less what its restart would cost.

    So two jobs of equal service do not change places before the gain is worth a restart.
    """

    def __call__(self, status: JobStatus) -> float:
        return self.of_all((status,))[0]

    def of_all(self, statuses: Iterable[JobStatus]) -> list[float]:
        found = []
        for status in statuses:
            service_gpu_s = status.attained_service_gpu_s
            if status.phase is _RUNNING:
                service_gpu_s -= status.profile.restart_s * status.job.gpus
                if service_gpu_s < 0.0:
                    service_gpu_s = 0.0
            found.append(service_gpu_s)
        return found


_SERVICE = _Service()


def _key(snapshot: Snapshot) -> Rank:
    return _SERVICE


LAS = QueuePolicy(name="las", key=_key)
"""Jobs in the order of the service that they have had; needs no profile and no known work."""
