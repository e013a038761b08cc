"""Fitting the throughput model to measured step times (Pollux, section 4.1; algorithms C.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.goodput import ThroughputModel
from slurm_synergy.errors import ModelError

__all__ = ["StepTimes", "fit_throughput"]

Floats = NDArray[np.float64]

# The parameters in the order of the vector that is fitted.
_ALPHA_C, _BETA_C, _ALPHA_N, _BETA_N, _ALPHA_R, _BETA_R, _GAMMA = range(7)
_LEAST: Final = 1e-8
_START: Final = (1e-1, 1e-2, 1e-1, 1e-2, 1e-1, 1e-2, 1 + 1e-3)
_MOST_OVERLAP: Final = 10.0
_OVERLAP_WEIGHT: Final = 1e-3
_GROWTH_WEIGHT: Final = 1e-2
_NETWORK_OVER_NODE: Final = 1.1
_TOLERANCE: Final = 1e-5
_EVALUATIONS: Final = 50


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
    Needs scipy (extra ``controller``). Measurements of a single replica have no synchronisation.
    """
    from scipy.optimize import least_squares, minimize

    lower, upper, start = _bounds(times)
    free = lower < upper

    def whole(part: Floats) -> Floats:
        values = start.copy()
        values[free] = part
        return values

    # The loss has kinks where a kind of residuals vanishes, at which a descent stalls; least
    # squares has none and brings us near.
    near: Any = least_squares(
        lambda part: _residuals(whole(part), times),
        start[free],
        jac=lambda part: _slopes(whole(part), times)[:, free],
        bounds=(lower[free], upper[free]),
        x_scale="jac",
        max_nfev=_EVALUATIONS,
    )
    values = whole(near.x)
    found: Any = minimize(
        _loss,
        values,
        args=(times,),
        jac=True,
        method="L-BFGS-B",
        bounds=list(zip(lower, upper, strict=True)),
        tol=_TOLERANCE,
    )
    if found.fun < _loss(values, times)[0]:
        values = found.x
    values = np.clip(values, lower, upper)
    if not ((times.nodes > 1) & (times.replicas > 1)).any():
        # The network is not faster than a node's inside.
        values[_ALPHA_N] = max(values[_ALPHA_N], values[_ALPHA_R] * _NETWORK_OVER_NODE)
        values[_BETA_N] = max(values[_BETA_N], values[_BETA_R] * _NETWORK_OVER_NODE)
    return ThroughputModel(
        compute_s=float(values[_ALPHA_C]),
        compute_s_per_sample=float(values[_BETA_C]),
        network_sync_s=float(values[_ALPHA_N]),
        network_sync_s_per_replica=float(values[_BETA_N]),
        node_sync_s=float(values[_ALPHA_R]),
        node_sync_s_per_replica=float(values[_BETA_R]),
        overlap=float(values[_GAMMA]),
    )


def _bounds(times: StepTimes) -> tuple[Floats, Floats, Floats]:
    """Lower and upper bounds and the start; equal bounds fix what cannot be identified."""
    lower = np.full(7, _LEAST)
    upper = np.full(7, np.inf)
    start = np.array(_START)
    lower[_GAMMA], upper[_GAMMA] = 1.0, _MOST_OVERLAP
    if len(np.unique(times.local_batch)) == 1:
        half_s = float(np.mean(times.gradient_s)) / 2
        lower[_ALPHA_C] = upper[_ALPHA_C] = start[_ALPHA_C] = half_s
    shared = times.replicas > 1
    unseen = []
    if not (shared & (times.nodes > 1)).any():
        unseen += [_ALPHA_N, _BETA_N]
    if not (shared & (times.nodes == 1)).any():
        unseen += [_ALPHA_R, _BETA_R]
    if not (times.replicas > 2).any():
        unseen += [_BETA_N, _BETA_R]
    for index in unseen:
        upper[index] = start[index] = lower[index]
    return lower, upper, start


def _residuals(values: Floats, times: StepTimes) -> Floats:
    """Logarithms of predicted over measured times, of passes and then of steps: ``(2 N,)``."""
    compute, step, _, _ = _predict(values, times)
    return np.concatenate([np.log(compute / times.gradient_s), np.log(step / times.step_s)])


def _slopes(values: Floats, times: StepTimes) -> Floats:
    """Derivatives of the residuals by the parameters: ``(2 N, 7)``."""
    compute, step, by_compute, by_step = _predict(values, times)
    return np.hstack([by_compute / compute, by_step / step]).T


def _predict(values: Floats, times: StepTimes) -> tuple[Floats, Floats, Floats, Floats]:
    """Pass and step times ``(N,)``, and their derivatives by the parameters ``(7, N)``."""
    a_n, b_n, a_r, b_r, gamma = values[_ALPHA_N:]
    batch = times.local_batch.astype(float)
    compute = values[_ALPHA_C] + values[_BETA_C] * batch
    beyond = np.maximum(times.replicas - 2, 0).astype(float)
    across = (times.nodes > 1) & (times.replicas > 1)
    inside = (times.nodes == 1) & (times.replicas > 1)
    sync = np.where(across, a_n + b_n * beyond, np.where(inside, a_r + b_r * beyond, _LEAST))
    longer, shorter = np.maximum(compute, sync), np.minimum(compute, sync)
    ratio = (shorter / longer) ** gamma
    step = longer * (1 + ratio) ** (1 / gamma)

    by_compute = np.zeros((7, len(batch)))
    by_compute[_ALPHA_C], by_compute[_BETA_C] = 1.0, batch
    by_sync = np.zeros((7, len(batch)))
    by_sync[_ALPHA_N], by_sync[_BETA_N] = across, np.where(across, beyond, 0)
    by_sync[_ALPHA_R], by_sync[_BETA_R] = inside, np.where(inside, beyond, 0)
    by_step = by_compute * (compute / step) ** (gamma - 1) + by_sync * (sync / step) ** (gamma - 1)
    by_step[_GAMMA] = step * (
        ratio * np.log(shorter / longer) / (gamma * (1 + ratio)) - np.log1p(ratio) / gamma**2
    )
    return compute, step, by_compute, by_step


def _loss(values: Floats, times: StepTimes) -> tuple[float, Floats]:
    """What the model is fitted by, and its gradient by the seven parameters.

    Roots of the mean squares of both kinds of residuals, and small terms that keep the overlap and
    the growth of the synchronisation modest.
    """
    count = len(times.step_s)
    residuals, slopes = _residuals(values, times), _slopes(values, times)
    gamma = values[_GAMMA]
    loss = _OVERLAP_WEIGHT * (gamma - 1) ** 2
    gradient = np.zeros(7)
    gradient[_GAMMA] = 2 * _OVERLAP_WEIGHT * (gamma - 1)
    for part in (slice(0, count), slice(count, None)):
        size = float(np.sqrt(np.mean(residuals[part] ** 2)))
        loss += size
        if size > 0:
            gradient += residuals[part] @ slopes[part] / (count * size)
    for alpha, beta in ((_ALPHA_N, _BETA_N), (_ALPHA_R, _BETA_R)):
        growth = values[beta] / values[alpha]
        loss += _GROWTH_WEIGHT * growth**2
        gradient[beta] += 2 * _GROWTH_WEIGHT * growth / values[alpha]
        gradient[alpha] -= 2 * _GROWTH_WEIGHT * growth**2 / values[alpha]
    return float(loss), gradient
