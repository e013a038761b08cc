"""The least of the throughput model's loss (algorithms C.2), by damped Newton steps.

The loss is the sum of two norms of residuals, which has kinks where a norm vanishes, and bounds on
all seven parameters. Its slopes are known, and the curvature of a norm of residuals that are
(nearly) linear needs no second derivatives, so that some twenty solutions of a system of at most
seven equations do.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ALPHA_C",
    "ALPHA_N",
    "ALPHA_R",
    "BETA_C",
    "BETA_N",
    "BETA_R",
    "GAMMA",
    "LEAST_S",
    "Loss",
    "descend",
]

Floats = NDArray[np.float64]

ALPHA_C, BETA_C, ALPHA_N, BETA_N, ALPHA_R, BETA_R, GAMMA = range(7)
"""The parameters in the order of the vector that is fitted."""

LEAST_S: Final = 1e-8
"""The least that any of them may be, and the time of a synchronisation that is none."""

_OVERLAP_WEIGHT: Final = 1e-3
_GROWTH_WEIGHT: Final = 1e-2
_SMALLEST: Final = 1e-9  # a norm below this is taken as that, and the fit as perfect
_MOST_STEPS: Final = 200
_FIRST_DAMPING: Final = 0.1
_DAMPING: Final = (1e-7, 1e6)
_FACTOR: Final = 6.0
_NEAR: Final = 1e-2
_ENOUGH: Final = 1e-4


@dataclass(slots=True)
class _Point:
    """The loss somewhere, and what its slopes are made from.

    ``times`` and ``logs`` ``(2, N)`` are seconds of passes and of synchronising.
    """

    loss: float
    times: Floats
    logs: Floats
    log_step: Floats
    off: tuple[Floats, Floats]
    norms: tuple[float, float]


class Loss:
    """Roots of the mean squares of the logarithms of predicted over measured times.

    Of passes and of steps, and small terms that keep the overlap and the growth of the
    synchronisation modest. All arrays ``(N,)``, times in seconds.
    """

    def __init__(
        self,
        nodes: NDArray[np.int64],
        replicas: NDArray[np.int64],
        local_batch: NDArray[np.int64],
        gradient_s: Floats,
        step_s: Floats,
    ) -> None:
        count, shared = len(step_s), replicas > 1
        beyond = np.maximum(replicas - 2, 0).astype(float)
        across, inside = shared & (nodes > 1), shared & (nodes == 1)
        self._compute = np.stack([np.ones(count), local_batch.astype(float)], axis=1)
        self._sync = np.stack([across, across * beyond, inside, inside * beyond], axis=1)
        self._alone = np.where(shared, 0.0, LEAST_S)
        self._measured = np.log(gradient_s), np.log(step_s)
        self._count = count

    def at(self, values: Floats) -> _Point:
        """The loss there."""
        plain = values.tolist()
        gamma, count = plain[GAMMA], self._count
        times = np.empty((2, count))
        np.matmul(self._compute, values[:ALPHA_N], out=times[0])
        np.matmul(self._sync, values[ALPHA_N:GAMMA], out=times[1])
        times[1] += self._alone
        logs = np.log(times)
        log_step = np.logaddexp(*(gamma * logs)) / gamma
        off = logs[0] - self._measured[0], log_step - self._measured[1]
        norms = sqrt(off[0].dot(off[0]) / count), sqrt(off[1].dot(off[1]) / count)
        growth = sum([(plain[beta] / plain[alpha]) ** 2 for alpha, beta in _SYNCS])
        small = _OVERLAP_WEIGHT * (gamma - 1) ** 2 + _GROWTH_WEIGHT * growth
        return _Point(sum(norms) + small, times, logs, log_step, off, norms)

    def slopes(self, values: Floats, point: _Point, is_near: bool) -> tuple[Floats, Floats]:
        """Gradient ``(7,)`` and curvature ``(7, 7)``, which is never negative.

        Far off the curvature is that of the squares below the norms, which leads straight to a
        perfect fit where there is one; ``is_near`` takes the one of the norms themselves.
        """
        gamma, count = values[GAMMA], self._count
        log_compute, log_sync = point.logs
        part = np.exp(gamma * (log_sync - point.log_step))
        own = 1 - part
        passes = self._compute / point.times[0][:, None]
        steps = np.empty((count, 7))
        np.multiply(passes, own[:, None], out=steps[:, :ALPHA_N])
        np.multiply(self._sync, (part / point.times[1])[:, None], out=steps[:, ALPHA_N:GAMMA])
        steps[:, GAMMA] = (log_compute * own + log_sync * part - point.log_step) / gamma
        gradient, curvature = _modesty(values)
        for off, norm, by in zip(point.off, point.norms, (passes, steps), strict=True):
            norm, known = max(norm, _SMALLEST), by.shape[1]
            slope = off @ by / (count * norm)
            bend = by.T @ by / (count * norm)
            if is_near:
                bend -= slope[:, None] * (slope / norm)
            gradient[:known] += slope
            curvature[:known, :known] += bend
        return gradient, curvature


_SYNCS: Final = ((ALPHA_N, BETA_N), (ALPHA_R, BETA_R))


def _modesty(values: Floats) -> tuple[Floats, Floats]:
    """Gradient and curvature of the small terms."""
    gradient, curvature = np.zeros(7), np.zeros((7, 7))
    plain = values.tolist()
    gradient[GAMMA] = 2 * _OVERLAP_WEIGHT * (plain[GAMMA] - 1)
    curvature[GAMMA, GAMMA] = 2 * _OVERLAP_WEIGHT
    for alpha, beta in _SYNCS:
        size = plain[alpha]
        growth = plain[beta] / size
        by_alpha, by_beta = -growth / size, 1 / size
        gradient[alpha] = 2 * _GROWTH_WEIGHT * growth * by_alpha
        gradient[beta] = 2 * _GROWTH_WEIGHT * growth * by_beta
        curvature[alpha, alpha] = 2 * _GROWTH_WEIGHT * by_alpha**2
        curvature[beta, beta] = 2 * _GROWTH_WEIGHT * by_beta**2
        curvature[alpha, beta] = curvature[beta, alpha] = 2 * _GROWTH_WEIGHT * by_alpha * by_beta
    return gradient, curvature


def descend(loss: Loss, lower: Floats, upper: Floats, start: Floats) -> Floats:
    """The parameters within the bounds where the loss is least, as near as matters.

    From ``start``, which must lie within the bounds; equal bounds fix a parameter.
    """
    values, point, movable = start, loss.at(start), lower < upper
    damping, is_near, still = _FIRST_DAMPING, False, 0
    for _ in range(_MOST_STEPS):
        gradient, curvature = loss.slopes(values, point, is_near)
        held = ((values <= lower) & (gradient >= 0)) | ((values >= upper) & (gradient <= 0))
        free = (movable & ~held).nonzero()[0]
        if not len(free):
            break
        system = curvature[free][:, free]
        scale, slope = system.diagonal() + _SMALLEST, gradient[free]
        while damping <= _DAMPING[1]:
            there, damped = values.copy(), system.copy()
            damped.reshape(-1)[:: len(free) + 1] += damping * scale
            there[free] -= np.linalg.solve(damped, slope)
            there = np.minimum(np.maximum(there, lower), upper)
            found = loss.at(there)
            if found.loss < point.loss:
                break
            damping *= _FACTOR
        else:
            if is_near:
                break
            damping, is_near = _FIRST_DAMPING, True
            continue
        better = point.loss - found.loss
        values, point, damping = there, found, max(damping / _FACTOR, _DAMPING[0])
        is_near = is_near or better < _NEAR * point.loss
        still = still + 1 if better < _ENOUGH * point.loss else 0
        if still == 2 or point.loss < _SMALLEST:
            break
    return values
