"""How long jobs still need, for policies and mechanisms that rank by it."""

from __future__ import annotations

import math
from collections.abc import Callable

from slurm_synergy.core.model import JobStatus, Profile, Snapshot
from slurm_synergy.core.pipeline import reference_rate

__all__ = ["RateOf", "rates", "remaining_s", "whole_s"]

RateOf = Callable[[JobStatus], float | None]
"""Samples/s of a job at its GPU-proportional share; None when its profile is unknown."""


def rates(snapshot: Snapshot) -> RateOf:
    """The rates of one round's jobs, each computed once for all jobs that are alike.

    Taken on the best kind of node that the job may use, so a rate does not change by starting or
    moving the job.
    """
    # The profile is kept beside the rate, so that its id stays its own.
    known: dict[tuple[object, ...], tuple[Profile, float | None]] = {}
    kinds = list({(node.gpu_type, node.total): node for node in snapshot.nodes}.values())

    def rate(status: JobStatus) -> float | None:
        job = status.job
        alike = (
            id(status.profile),
            job.gpus,
            job.nodes,
            job.gpu_types,
            job.min_mem_mib_per_node,
            job.tasks_per_node,
        )
        found = known.get(alike)
        if found is None:
            found = known[alike] = (status.profile, reference_rate(status, kinds))
        return found[1]

    return rate


def remaining_s(status: JobStatus, rate_of: RateOf) -> float:
    """Seconds that the job still needs at its GPU-proportional share.

    From its work and its profile when both are known; otherwise what is left of its time limit;
    infinite when it has none.
    """
    job = status.job
    rate = rate_of(status)
    if job.total_samples is not None and rate:
        return max(job.total_samples - status.done_samples, 0.0) / rate
    if job.time_limit_s is not None:
        return max(job.time_limit_s - status.attained_service_gpu_s / job.gpus, 0.0)
    return math.inf


def whole_s(status: JobStatus, rate_of: RateOf) -> float:
    """Seconds that the whole job needs at its GPU-proportional share; as ``remaining_s``."""
    job = status.job
    rate = rate_of(status)
    if job.total_samples is not None and rate:
        return job.total_samples / rate
    return math.inf if job.time_limit_s is None else job.time_limit_s
