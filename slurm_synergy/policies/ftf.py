"""Finish-time fairness (Themis, NSDI '20; algorithms B.5).

A job's rho is the time from its submission to its expected end, divided by the time it would need
alone at its GPU-proportional share. Themis also divides by the number of jobs that share the
cluster; that factor is the same for all jobs of a round, so it does not change the order.
"""

from __future__ import annotations

import math

from slurm_synergy.core.model import JobPhase, JobStatus, Snapshot
from slurm_synergy.core.remaining import RateOf, rates, remaining_s, whole_s
from slurm_synergy.policies.queue import QueuePolicy, Rank

__all__ = ["FTF", "FTF_ASCENDING", "rho"]


def rho(status: JobStatus, snapshot: Snapshot, rate_of: RateOf) -> float:
    """Finish-time fairness of the job if it ran from now on: 1 is ideal, larger is worse.

    Where the job's length is not known it is its slowdown so far: its age by the time that it ran,
    both with one round added, so that a new job begins at 1.
    """
    job = status.job
    age_s = max(snapshot.now_s - job.submitted_s, 0.0)
    alone_s = whole_s(status, rate_of)
    if 0 < alone_s < math.inf:
        return (age_s + remaining_s(status, rate_of)) / alone_s
    ran_s = status.attained_service_gpu_s / job.gpus
    return (age_s + snapshot.round_s) / (ran_s + snapshot.round_s)


def _worst_first(snapshot: Snapshot) -> Rank:
    """The largest rho first; ranks of running jobs count what a restart would add."""
    rate_of = rates(snapshot)
    return lambda status: -rho(status, snapshot, rate_of) - _restart(status, rate_of)


def _best_first(snapshot: Snapshot) -> Rank:
    rate_of = rates(snapshot)
    return lambda status: rho(status, snapshot, rate_of) - _restart(status, rate_of)


def _restart(status: JobStatus, rate_of: RateOf) -> float:
    """What stopping the job now would add to its rho; 0 for one that does not run."""
    alone_s = whole_s(status, rate_of)
    if status.phase is not JobPhase.RUNNING or not 0 < alone_s < math.inf:
        return 0.0
    return status.profile.restart_s / alone_s


FTF = QueuePolicy(name="ftf", key=_worst_first)
"""The job that is treated worst first, as Themis means it."""

FTF_ASCENDING = QueuePolicy(name="ftf_ascending", key=_best_first)
"""The smallest rho first: the order of Synergy's reference simulator, to reproduce its numbers."""
