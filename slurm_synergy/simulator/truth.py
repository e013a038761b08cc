"""How simulated jobs really advance, which is not what the scheduler believes.

Policies and mechanisms see a job's belief; the simulator moves it by its truth. The two are the
same unless beliefs are distorted on purpose.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from slurm_synergy.core.model import Job, PipelineModel, Placement, Profile, SensitivityTable
from slurm_synergy.core.pipeline import job_rate
from slurm_synergy.errors import ModelError
from slurm_synergy.simulator.learning import Learning
from slurm_synergy.simulator.training import Training

__all__ = ["SimulatedJob", "distort", "true_rate", "whole_iterations"]

# A quotient of floats that should be whole may fall short of it in its last digits.
_WHOLE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob:
    """A job of a simulation: what the user asked for, its truth, and what we believe.

    ``samples`` is its real work, ``iteration_samples`` what one iteration of all its GPUs takes
    in, ``share_s`` how long it runs alone at its GPU-proportional share, ``start_s`` what passes
    between its first start and its first sample, ``restart_s`` after each later one (None: what
    restarts cost all jobs). A job with a ``training`` advances by it, in useful samples, and
    ``learn`` makes the belief about it, which changes while it runs.
    """

    job: Job
    truth: Profile
    belief: Profile
    samples: float
    iteration_samples: float
    share_s: float
    model: str = ""
    start_s: float = 0.0
    restart_s: float | None = None
    training: Training | None = None
    learn: Callable[[], Learning] | None = None


def true_rate(one: SimulatedJob, placement: Placement) -> float:
    """Samples/s of the job there, useful or not.

    Raises ModelError when its truth does not know the GPUs.
    """
    if one.training is not None:
        return one.training.rate(placement, one.truth)
    rate = job_rate(one.truth, placement.gpu_type, [share for _, share in placement.shares])
    if rate is None:
        raise ModelError(
            f"job {one.job.job_id}: nothing is known of {one.model or 'its model'} on GPUs of type "
            f"{placement.gpu_type}; use a model that has such figures"
        )
    return rate


def whole_iterations(one: SimulatedJob, rate: float, span_s: float) -> float:
    """Samples of the iterations that fit into ``span_s`` at ``rate``, the last one not begun."""
    return math.floor(span_s * rate / one.iteration_samples + _WHOLE) * one.iteration_samples


def distort(profile: Profile, error: float, rng: random.Random) -> Profile:
    """``profile`` with its supply of samples wrong by a factor of up to ``1 + error`` either way.

    The GPU's own rate stays: it is what is measured best.
    """
    factor = (1.0 + error) ** rng.uniform(-1.0, 1.0)
    pipeline, table = profile.pipeline, profile.table
    if pipeline is not None:
        return replace(profile, pipeline=_scaled_pipeline(pipeline, factor))
    if table is not None:
        return replace(profile, table=_scaled_table(table, factor))
    return profile


def _scaled_pipeline(model: PipelineModel, factor: float) -> PipelineModel:
    points = tuple((cpus, rate * factor) for cpus, rate in model.preprocess)
    return replace(model, preprocess=points)


def _scaled_table(table: SensitivityTable, factor: float) -> SensitivityTable:
    rates = tuple(tuple(rate * factor for rate in row) for row in table.rates)
    return replace(table, rates=rates)
