"""How noisy the gradient is: two running averages, from squared norms of gradients.

A gradient over M samples has the squared norm ``square + M0 / M * variance`` in the mean, where
``square`` is that of the true gradient and ``variance`` the trace of the covariance of a gradient
over the initial batch of M0 samples. So the squared norms of ``count`` parts of a batch, and of
their mean, give both (McCandlish et al. 2018, appendix A; Pollux, OSDI '21, section 3.1).

A process that trains alone and takes one pass a step has no parts: two gradients of consecutive
steps stand for them. The step between them makes that estimate biased, so it is averaged apart and
used only while there are no fresh true parts.

Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from slurm_synergy.core.goodput import GradientStatistics

__all__ = ["NoiseMeter", "Norms"]

_DECAY: Final = 0.999  # per step and unit of scale
_LEAST_VARIANCE: Final = 1e-6
_STALE_AFTER: Final = 1 / (1 - _DECAY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """Squared norms of one measured step.

    ``local`` is the mean over ``count`` parts of the squared norm of a part's gradient, ``total``
    the squared norm of the mean of all parts. ``scale`` is the batch of all parts together, in
    initial batches, ``steps`` how many steps passed since the measurement before. ``differenced``:
    the parts are consecutive steps.
    """

    local: float
    total: float
    count: int
    scale: float
    steps: int = 1
    differenced: bool = False

    @property
    def usable(self) -> bool:
        """Finite, and of several parts: an overflow of half precision tells nothing."""
        return self.count > 1 and math.isfinite(self.local) and math.isfinite(self.total)

    @property
    def square(self) -> float:
        """An unbiased estimate of the true gradient's squared norm; may be negative."""
        return (self.count * self.total - self.local) / (self.count - 1)

    @property
    def variance(self) -> float:
        """An unbiased estimate of the variance over one initial batch; may be negative."""
        return (self.local - self.total) * self.scale / (self.count - 1)


class _Averages:
    """Exponential averages of both estimates, corrected for their start at zero."""

    __slots__ = ("square", "variance", "weight")

    def __init__(self, square: float = 0.0, variance: float = 0.0, weight: float = 0.0) -> None:
        self.square, self.variance, self.weight = square, variance, weight

    def add(self, norms: Norms) -> None:
        kept = _DECAY ** (norms.scale * norms.steps)
        self.square = kept * self.square + (1 - kept) * norms.square
        self.variance = kept * self.variance + (1 - kept) * norms.variance
        self.weight = kept * self.weight + (1 - kept)

    def corrected(self) -> GradientStatistics:
        return GradientStatistics(
            square=max(self.square / self.weight, 0.0),
            variance=max(self.variance / self.weight, _LEAST_VARIANCE),
        )

    def numbers(self) -> list[float]:
        return [self.square, self.variance, self.weight]


class NoiseMeter:
    """The running statistics of one job; the same on all ranks that are given the same norms.

    ``initial`` is the initial batch size M0, to which all is normalised.
    """

    def __init__(self, initial: int) -> None:
        self.initial = initial
        self._forget()

    def _forget(self) -> None:
        self._parted, self._differenced = _Averages(), _Averages()
        self._since_parted = 0.0

    def add(self, norms: Norms) -> None:
        """Take in one measured step."""
        if not norms.usable:
            return
        if norms.differenced:
            self._since_parted += norms.scale * norms.steps
            self._differenced.add(norms)
            return
        if self._parted.weight and self._since_parted > _STALE_AFTER:
            self._parted = _Averages()
        self._since_parted = 0.0
        self._differenced = _Averages()
        self._parted.add(norms)

    @property
    def statistics(self) -> GradientStatistics | None:
        """What is known of the gradient's noise; None before the first measurement."""
        fresh = self._since_parted <= _STALE_AFTER or not self._differenced.weight
        if self._parted.weight and fresh:
            return self._parted.corrected()
        return self._differenced.corrected() if self._differenced.weight else None

    @property
    def differenced(self) -> bool:
        """What is known comes from consecutive steps, and is biased."""
        fresh = self._parted.weight and self._since_parted <= _STALE_AFTER
        return bool(self._differenced.weight and not fresh)

    def state_dict(self) -> dict[str, Any]:
        return {
            "initial": self.initial,
            "parted": self._parted.numbers(),
            "differenced": self._differenced.numbers(),
            "since_parted": self._since_parted,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there; statistics of another initial batch size are void."""
        if state["initial"] != self.initial:
            self._forget()
            return
        self._parted = _Averages(*state["parted"])
        self._differenced = _Averages(*state["differenced"])
        self._since_parted = state["since_parted"]
