"""What is known of a job's speed on other numbers and types of GPUs, as values (Sia, section 3.3).

The job side reads profiles too, so nothing here needs numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_synergy.core.goodput import GradientStatistics, ThroughputModel
from slurm_synergy.core.values import quick
from slurm_synergy.errors import ModelError

__all__ = ["BatchSize", "Scaling", "TypeSpeed", "shared_out"]

_ROUNDING = 1e-8


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """The batch of one optimiser step.

    ``local`` samples go through each of ``replicas`` copies of the model in one pass (a copy is a
    GPU, or several when the model is split); ``accumulation`` counts the passes before the one
    after which the copies synchronise.
    """

    local: int
    replicas: int
    accumulation: int = 0

    def __post_init__(self) -> None:
        if self.local < 1 or self.replicas < 1 or self.accumulation < 0:
            raise ModelError(
                f"a batch of {self.local} samples on {self.replicas} replicas with "
                f"{self.accumulation} passes of accumulation"
            )

    @property
    def total(self) -> int:
        """Samples of one step of the whole job."""
        return self.local * self.replicas * (self.accumulation + 1)


def shared_out(total: int, *, initial: int, replicas: int, local_most: int) -> BatchSize:
    """How ``replicas`` copies take ``total`` samples a step (algorithms C.4).

    No accumulation where ``local_most``, a GPU's memory, does not ask for it, but a copy that
    trains alone beyond the ``initial`` batch takes two passes, as otherwise the gradient's noise
    could not be measured. Totals are rounded up to whole samples of each copy and pass.
    """
    share = total / replicas
    passes = max(math.ceil(share / local_most - _ROUNDING) - 1, 0)
    if replicas == 1 and total > initial:
        passes = max(passes, 1)
    local = max(math.ceil(share / (passes + 1) - _ROUNDING), 1)
    return BatchSize(local=local, replicas=replicas, accumulation=passes)


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeSpeed:
    """What was measured of a job on GPUs of one type.

    ``model`` is the fit to it. ``local_least`` and ``local_most`` bound the samples of one replica
    in one pass (the GPU's memory). ``explored_gpus`` is the most GPUs of this type on which the job
    ran so far, 0 when it was only profiled. ``gpus_per_replica`` is over how many GPUs one copy of
    the model is split on this type; None: the job's scale unit.
    """

    model: ThroughputModel
    local_least: int = 1
    local_most: int
    explored_gpus: int = 0
    gpus_per_replica: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.local_least <= self.local_most:
            raise ModelError(f"local batches {self.local_least}..{self.local_most} out of order")
        if self.explored_gpus < 0 or (self.gpus_per_replica or 1) < 1:
            raise ModelError(
                f"explored {self.explored_gpus} GPUs, {self.gpus_per_replica} GPUs per replica"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """What is believed of an elastic job's speed: by GPU type, and the noise of its gradient.

    ``accumulate`` tells whether one step may take several passes. ``own_batch`` is the total batch
    that was seen, for jobs that never change theirs and whose hints do not name it (0: not known).
    """

    speeds: Mapping[str, TypeSpeed] = field(default_factory=dict)
    statistics: GradientStatistics = field(default_factory=GradientStatistics)
    accumulate: bool = True
    own_batch: int = 0

    @property
    def explored_gpus(self) -> int:
        """The most GPUs of any type on which the job ran so far."""
        return max((one.explored_gpus for one in self.speeds.values()), default=0)
