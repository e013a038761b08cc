"""The batch of an adaptive job: its limits, its parts on ranks, and the learning rate for it.

Nothing here imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from slurm_synergy.core.goodput import GradientStatistics
from slurm_synergy.core.scaling import BatchSize, shared_out
from slurm_synergy.errors import ConfigError

__all__ = ["SCALING_RULES", "BatchRange", "gain_at", "rate_factor"]

_WORTH_A_CHANGE: Final = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRange:
    """Total batch sizes that the user allows, in samples.

    ``initial`` is the one that the learning rate was tuned for, and the least; ``local_most`` is
    what one GPU takes in a pass (its memory). Raises ConfigError for a range out of order.
    """

    initial: int
    largest: int
    local_most: int

    def __post_init__(self) -> None:
        if not 1 <= self.initial <= self.largest:
            raise ConfigError(
                "not a range of batch sizes",
                key="batch",
                value=(self.initial, self.largest),
                remedy="give the total batch size you tuned for and the largest, as (128, 4096)",
            )
        if self.local_most < 1:
            raise ConfigError(
                "not a number of samples",
                key="local_batch",
                value=self.local_most,
                remedy="give what one GPU takes in a pass, at least 1",
            )

    def batch_of(self, wanted: int, ranks: int) -> BatchSize:
        """How ``ranks`` processes take ``wanted`` samples a step (0: the initial batch).

        By the rule by which the controller judges batches, see ``shared_out``.
        """
        total = min(max(wanted, self.initial), self.largest) if wanted else self.initial
        return shared_out(total, initial=self.initial, replicas=ranks, local_most=self.local_most)

    def worth_a_change(self, current: BatchSize, wanted: int) -> bool:
        """Whether a running epoch follows: a change below 5 % cannot gain 5 % of goodput."""
        after = self.batch_of(wanted, current.replicas)
        ratio = after.total / current.total
        return max(ratio, 1 / ratio) > _WORTH_A_CHANGE or (
            after.total != current.total and after.total in (self.initial, self.largest)
        )


def gain_at(statistics: GradientStatistics | None, scale: float) -> float:
    """Initial steps that one step of ``scale`` initial batches is worth, 1 to ``scale``.

    Below the initial batch (the rest of an epoch) it is ``scale``. Before anything was measured it
    is 1: the cautious answer.
    """
    if scale <= 1:
        return scale
    if statistics is None:
        return 1.0
    square, variance = statistics.square, statistics.variance
    return min(max((variance + square) / (variance / scale + square), 1.0), scale)


def _adascale(statistics: GradientStatistics | None, scale: float) -> float:
    return gain_at(statistics, scale)


def _square_root(_statistics: GradientStatistics | None, scale: float) -> float:
    return math.sqrt(scale)


def _linear(_statistics: GradientStatistics | None, scale: float) -> float:
    return scale


def _unscaled(_statistics: GradientStatistics | None, _scale: float) -> float:
    return 1.0


SCALING_RULES: Final[Mapping[str, Callable[[GradientStatistics | None, float], float]]] = {
    "adascale": _adascale,
    "sqrt": _square_root,
    "linear": _linear,
    "none": _unscaled,
}
"""Rules for the learning rate: AdaScale (Johnson et al. 2020) for SGD, the square root for Adam."""


def rate_factor(rule: str, statistics: GradientStatistics | None, scale: float) -> float:
    """By what to multiply the learning rate for a batch of ``scale`` initial ones.

    A smaller batch, the rest of an epoch, has the user's own rate. Raises ConfigError for a rule
    that is none.
    """
    if rule not in SCALING_RULES:
        raise ConfigError(
            "not a rule for the learning rate",
            key="scaling",
            value=rule,
            remedy=f"one of {', '.join(SCALING_RULES)}",
        )
    return SCALING_RULES[rule](statistics, scale) if scale > 1 else 1.0
