"""Prices of a large assignment at which its bound is near the least, by Newton's method.

The bound is the sum of what each job gains at best at the prices, and of the prices of all there
is: a convex function with kinks. A smooth one in its place, ever less smooth, leads to its least.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["smoothed_prices"]

Floats = NDArray[np.float64]

_SMOOTHING: Final = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)  # relative to the typical gain
_NEWTON_STEPS: Final = 8
_HALVINGS: Final = 12
_ENOUGH: Final = 2e-6  # a bound that one step of smoothing brings down by less is near its least
_NEGLIGIBLE: Final = 60.0
_SAMPLE: Final = 250  # jobs that suffice for the coarse prices
_FINE: Final = 2  # last steps of smoothing, which look at every job


def smoothed_prices(gains: Floats, takes: Floats, limits: Floats) -> Floats:
    """What a little more of each row would bring, nearly, ``(R,)``.

    ``gains`` has shape ``(J, K)``, with ``-inf`` where a column is not allowed, ``takes``
    ``(R, K)``, ``limits`` ``(R,)``. The last column is idleness.
    """
    prices = np.zeros(len(limits))
    typical, count = _typical_gain(gains[:, :-1]), len(gains)
    # Sums and maxima over the few columns of each job take a third of the time by columns.
    gains = np.ascontiguousarray(gains.T)
    part = np.ascontiguousarray(gains[:, :: max(count // _SAMPLE, 1)])
    best, best_bound = prices, _bound(gains, takes, limits, prices)
    for step, smoothing in enumerate(_SMOOTHING):
        coarse = step < len(_SMOOTHING) - _FINE
        some = part if coarse else gains
        smooth = _Smooth(some, takes, limits * (some.shape[1] / count), smoothing * typical)
        prices = smooth.descend(prices)
        bound = _bound(gains, takes, limits, prices)
        closer = best_bound - bound
        if bound < best_bound:
            best, best_bound = prices, bound
        if not coarse and 0 <= closer < _ENOUGH * abs(best_bound):
            break
    return best


def _bound(gains: Floats, takes: Floats, limits: Floats, prices: Floats) -> float:
    """The bound; ``gains`` here and below are by columns, ``(K, J)``."""
    return float((gains - (prices @ takes)[:, None]).max(axis=0).sum() + prices @ limits)


def _typical_gain(gains: Floats) -> float:
    top = gains.max(axis=1, initial=-np.inf)
    top = np.abs(top[np.isfinite(top)])
    if not top.size:
        return 1.0
    return float(np.median(top)) or float(top.max()) or 1.0


class _Smooth:
    """The bound with the maximum of each job smoothed by ``smooth``, in units of gain."""

    def __init__(self, gains: Floats, takes: Floats, limits: Floats, smooth: float) -> None:
        self._gains, self._takes, self._limits = gains, takes, limits
        self._smooth = smooth

    def descend(self, prices: Floats) -> Floats:
        """Prices at its least, by Newton's steps from ``prices``."""
        value, gradient, curvature = self._at(prices)
        for _ in range(_NEWTON_STEPS):
            free = (prices > 0) | (gradient < 0)
            if not free.any() or np.abs(gradient[free]).max() < 1e-3:
                break
            step = np.zeros_like(prices)
            part = curvature[np.ix_(free, free)] + 1e-9 * np.eye(int(free.sum()))
            ridge = max(float(np.trace(part)), 1e-12) * 1e-8
            step[free] = np.linalg.solve(part + ridge * np.eye(len(part)), -gradient[free])
            length = 1.0
            for _ in range(_HALVINGS):
                trial = np.maximum(prices + length * step, 0.0)
                found = self._at(trial)
                if found[0] < value - 1e-12 * abs(value):
                    break
                length /= 2
            else:
                break
            prices = trial
            value, gradient, curvature = found
        return prices

    def _at(self, prices: Floats) -> tuple[float, Floats, Floats]:
        """The value with its gradient ``(R,)`` and second derivatives ``(R, R)``."""
        takes, smooth = self._takes, self._smooth
        reduced = self._gains - (prices @ takes)[:, None]
        reduced *= 1.0 / smooth
        top = reduced.max(axis=0)
        reduced -= top
        # Below that nothing is added to the sums, but denormal numbers are slow.
        weights = np.exp(np.maximum(reduced, -_NEGLIGIBLE, out=reduced), out=reduced)
        total = weights.sum(axis=0)
        weights /= total
        value = smooth * float((top + np.log(total)).sum()) + float(prices @ self._limits)
        expected = takes @ weights  # (R, J): what each job is likely to take
        gradient = self._limits - expected.sum(axis=1)
        column = weights.sum(axis=1)
        second = (takes * column) @ takes.T - expected @ expected.T
        return value, gradient, second / smooth
