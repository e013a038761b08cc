"""How long jobs need, and would need with an equal part of the cluster, for the fair policies."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.model import JobStatus
from slurm_synergy.policies.time_shares import Demand

__all__ = ["Work", "equal_rates"]

Floats = NDArray[np.float64]


class Work:
    """What each job has to do, arrays ``(J,)``: samples that are ``left`` and ``done``.

    ``age_s`` is the time since its submission. ``alone_s`` is how long the whole job takes with an
    equal part of the cluster to itself, from the first round after its submission on, in seconds.
    ``alone_rates`` are samples/s on its GPUs, the mean over the types on which it can run. Of a job
    whose length is not known as much is left as it has done, and at least one quantum of it.
    """

    def __init__(self, demand: Demand, quantum_s: float) -> None:
        now_s, rates = demand.snapshot.now_s, demand.rates.rates
        there = rates > 0
        self.alone_rates = rates.sum(axis=1) / np.maximum(there.sum(axis=1), 1)
        equal = equal_rates(demand)
        rows = [
            _of(status, rate, own, now_s, quantum_s)
            for status, rate, own in zip(
                demand.jobs, equal.tolist(), self.alone_rates.tolist(), strict=True
            )
        ]
        columns = np.array(rows, dtype=float).reshape(-1, 4).T
        self.age_s, self.left, self.done, self.alone_s = columns

    def ratios(self, rates: Floats) -> Floats:
        """Finish-time fairness of each job that goes on at these samples/s; 0 where it cannot."""
        left_s = np.divide(self.left, rates, out=np.zeros_like(rates), where=rates > 0)
        goes_on = (self.left <= 0) | (rates > 0)
        return np.asarray(np.where(goes_on, self.age_s + left_s, 0.0) / self.alone_s)

    def least_rates(self, ratio: float) -> Floats:
        """Samples/s with which each job keeps that ratio; infinite where it no longer can."""
        spare_s = ratio * self.alone_s - self.age_s
        needed = np.full_like(self.left, np.inf)
        np.divide(self.left, spare_s, out=needed, where=spare_s > 0)
        return np.where(self.left <= 0, 0.0, needed)


def _of(
    status: JobStatus, equal: float, own: float, now_s: float, quantum_s: float
) -> tuple[float, float, float, float]:
    job, done = status.job, status.done_samples
    age_s = max(now_s - job.submitted_s, 0.0)
    if job.total_samples is not None:
        left = max(job.total_samples - done, 0.0)
    elif job.time_limit_s is not None:
        ran_s = status.attained_service_gpu_s / job.gpus
        left = max(job.time_limit_s - ran_s, 0.0) * own
        done = ran_s * own
    else:
        left = max(done, quantum_s * own)
    waits_s = (job.submitted_s // quantum_s + 1) * quantum_s - job.submitted_s
    alone_s = waits_s + status.profile.restart_s
    if equal > 0:
        alone_s += (done + left) / equal
    return age_s, left, done, alone_s


def equal_rates(demand: Demand) -> Floats:
    """Samples/s ``(J,)`` of each job with an equal part of each type, as time allows."""
    count = max(len(demand.jobs), 1)
    parts = demand.capacity[None, :] / count / demand.gpus[:, None]
    parts /= np.maximum(parts.sum(axis=1, keepdims=True), 1.0)
    return np.asarray((demand.rates.rates * parts).sum(axis=1))
