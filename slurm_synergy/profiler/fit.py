"""Fitting the throughput model to measured step times (Pollux, section 4.1; algorithms C.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.goodput import ThroughputModel
from slurm_synergy.errors import ModelError
from slurm_synergy.profiler.descent import (
    ALPHA_C,
    ALPHA_N,
    ALPHA_R,
    BETA_C,
    BETA_N,
    BETA_R,
    GAMMA,
    LEAST_S,
    Loss,
    descend,
)

__all__ = ["StepTimes", "fit_throughput"]

Floats = NDArray[np.float64]

_MOST_OVERLAP: Final = 10.0
_START_OVERLAP: Final = 1 + 1e-3
_START_LEAST_S: Final = 1e-6
_START_GROWTH: Final = 0.1
_NETWORK_OVER_NODE: Final = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """N measured means on GPUs of one type, arrays of shape ``(N,)``.

    ``gradient_s`` is the time of a pass without synchronisation, ``step_s`` of one with it.
    """

    nodes: NDArray[np.int64]
    replicas: NDArray[np.int64]
    local_batch: NDArray[np.int64]
    gradient_s: Floats
    step_s: Floats

    def __post_init__(self) -> None:
        size = self.nodes.shape
        rest = (self.replicas, self.local_batch, self.gradient_s, self.step_s)
        if len(size) != 1 or not size[0] or any(one.shape != size for one in rest):
            raise ModelError("step times need one or more measurements, all columns equally long")
        if min(one.min() for one in (self.nodes, self.replicas, self.local_batch)) < 1:
            raise ModelError("nodes, replicas and local batches of step times are at least 1")
        if not (np.isfinite(self.step_s).all() and np.isfinite(self.gradient_s).all()):
            raise ModelError("step times must be finite")
        if self.step_s.min() <= 0 or self.gradient_s.min() <= 0:
            raise ModelError("step times must be positive")


def fit_throughput(times: StepTimes) -> ThroughputModel:
    """The model that fits best in the mean square of logarithms.

    What was not measured is taken at its least, so that scales not yet seen look (nearly) perfect
    and get tried: no synchronisation within nodes, over nodes, or with more than two replicas.
    Measurements of a single replica have no synchronisation.
    """
    loss = Loss(times.nodes, times.replicas, times.local_batch, times.gradient_s, times.step_s)
    lower, upper = _bounds(times)
    values = descend(loss, lower, upper, np.clip(_start(times), lower, upper))
    if not ((times.nodes > 1) & (times.replicas > 1)).any():
        # The network is not faster than a node's inside.
        values[ALPHA_N] = max(values[ALPHA_N], values[ALPHA_R] * _NETWORK_OVER_NODE)
        values[BETA_N] = max(values[BETA_N], values[BETA_R] * _NETWORK_OVER_NODE)
    return ThroughputModel(
        compute_s=float(values[ALPHA_C]),
        compute_s_per_sample=float(values[BETA_C]),
        network_sync_s=float(values[ALPHA_N]),
        network_sync_s_per_replica=float(values[BETA_N]),
        node_sync_s=float(values[ALPHA_R]),
        node_sync_s_per_replica=float(values[BETA_R]),
        overlap=float(values[GAMMA]),
    )


def _bounds(times: StepTimes) -> tuple[Floats, Floats]:
    """Lower and upper bounds; equal bounds fix what cannot be identified."""
    lower = np.full(7, LEAST_S)
    upper = np.full(7, np.inf)
    lower[GAMMA], upper[GAMMA] = 1.0, _MOST_OVERLAP
    if len(np.unique(times.local_batch)) == 1:
        lower[ALPHA_C] = upper[ALPHA_C] = float(np.mean(times.gradient_s)) / 2
    shared = times.replicas > 1
    unseen = []
    if not (shared & (times.nodes > 1)).any():
        unseen += [ALPHA_N, BETA_N]
    if not (shared & (times.nodes == 1)).any():
        unseen += [ALPHA_R, BETA_R]
    if not (times.replicas > 2).any():
        unseen += [BETA_N, BETA_R]
    if not shared.any():
        unseen += [GAMMA]
    upper[unseen] = lower[unseen]
    return lower, upper


def _start(times: StepTimes) -> Floats:
    """Parameters near the measurements: a line through the passes, the mean synchronisation."""
    start = np.full(7, _START_LEAST_S)
    start[GAMMA] = _START_OVERLAP
    line = np.stack([np.ones(len(times.step_s)), times.local_batch], axis=1)
    relative = line / times.gradient_s[:, None]
    found = np.linalg.lstsq(relative, np.ones(len(line)), rcond=None)[0]
    start[[ALPHA_C, BETA_C]] = np.maximum(found, _START_LEAST_S)
    shared, over_s = times.replicas > 1, times.step_s - times.gradient_s
    for alpha, beta, seen in (
        (ALPHA_N, BETA_N, shared & (times.nodes > 1)),
        (ALPHA_R, BETA_R, shared & (times.nodes == 1)),
    ):
        if seen.any():
            start[alpha] = max(float(over_s[seen].mean()), _START_LEAST_S)
            start[beta] = start[alpha] * _START_GROWTH
    return start
