"""How fast an elastic job learns on a number of GPUs, and with which batch size it learns fastest.

Goodput is throughput times statistical efficiency (Pollux, OSDI '21, section 3; used per GPU type
by Sia, SOSP '23, section 3.3). The throughput model has a time for the gradient of one local batch
and a time for the synchronisation between replicas, which overlap more or less; the efficiency says
how much a sample of a large batch is worth beside one of the initial batch, by the gradient noise.

Everything here is vectorised: numbers of nodes, replicas and samples may be arrays that broadcast.
The values are part of a job's profile, which the job side knows without numpy: only their use
imports it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from slurm_synergy.core.values import quick
from slurm_synergy.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]
    Ints = NDArray[np.int64]

__all__ = [
    "CANDIDATES",
    "NOISELESS",
    "BatchChoice",
    "BatchLimits",
    "GradientStatistics",
    "Learner",
    "ThroughputModel",
    "best_batch",
    "best_batches",
    "fixed_batch",
    "gain",
    "goodput_at",
]

CANDIDATES: Final = 50
"""Total batch sizes that are tried, in geometric steps from the smallest to the largest."""

_LEAST_S = 1e-8  # the floor of every coefficient of a fit; a single replica synchronises in no time
_LARGEST_OVERLAP = 10.0


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputModel:
    """Seconds of an iteration of one job on GPUs of one type (algorithms C.2).

    ``compute_s`` + ``compute_s_per_sample`` times the local batch is the gradient of one local
    batch (alpha_c, beta_c). Synchronising takes ``node_sync_s`` + ``node_sync_s_per_replica`` for
    each replica beyond two when all replicas are on one node (alpha_r, beta_r), and
    ``network_sync_s`` + ``network_sync_s_per_replica`` over several nodes (alpha_n, beta_n).
    ``overlap`` (gamma) is 1 when computing and synchronising follow each other, up to 10 when they
    overlap almost wholly.
    """

    compute_s: float
    compute_s_per_sample: float
    node_sync_s: float = _LEAST_S
    node_sync_s_per_replica: float = _LEAST_S
    network_sync_s: float = _LEAST_S
    network_sync_s_per_replica: float = _LEAST_S
    overlap: float = 1.0

    def __post_init__(self) -> None:
        times = self._times
        if not all(0 <= one < math.inf for one in times) or self.compute_s + times[1] <= 0:
            raise ModelError(f"the times of a throughput model must be positive: {times}")
        if not 1 <= self.overlap <= _LARGEST_OVERLAP:
            raise ModelError(f"overlap exponent {self.overlap} is not within 1..10")

    @property
    def _times(self) -> tuple[float, ...]:
        return (
            *(self.compute_s, self.compute_s_per_sample),
            *(self.node_sync_s, self.node_sync_s_per_replica),
            *(self.network_sync_s, self.network_sync_s_per_replica),
        )

    def gradient_s(self, local_batch: ArrayLike) -> Floats:
        """Seconds of the gradient of ``local_batch`` samples on one GPU."""
        import numpy as np

        return self.compute_s + self.compute_s_per_sample * np.asarray(local_batch, dtype=float)

    def sync_s(self, nodes: ArrayLike, replicas: ArrayLike) -> Floats:
        """Seconds of synchronising ``replicas`` GPUs on ``nodes`` nodes."""
        import numpy as np

        from slurm_synergy.core.batch_curves import sync_s

        return sync_s(self._times, np.asarray(nodes), np.asarray(replicas))

    def iteration_s(
        self,
        nodes: ArrayLike,
        replicas: ArrayLike,
        local_batch: ArrayLike,
        accumulation: ArrayLike = 0,
    ) -> Floats:
        """Seconds of one optimiser step; ``accumulation`` counts the passes before the last.

        Arguments broadcast against each other.
        """
        import numpy as np

        from slurm_synergy.core.batch_curves import iteration_s

        sizes = (np.asarray(one) for one in (nodes, replicas, local_batch, accumulation))
        return iteration_s(self._times, self.overlap, *sizes)

    def rate(self, nodes: int, replicas: int, local_batch: int, accumulation: int = 0) -> float:
        """``throughput`` of one configuration as a plain number, quickly and without numpy."""
        sync_s, beyond = _LEAST_S, max(replicas - 2, 0)
        if replicas > 1 and nodes > 1:
            sync_s = self.network_sync_s + self.network_sync_s_per_replica * beyond
        elif replicas > 1:
            sync_s = self.node_sync_s + self.node_sync_s_per_replica * beyond
        gradient_s = self.compute_s + self.compute_s_per_sample * local_batch
        longer, shorter = max(gradient_s, sync_s), min(gradient_s, sync_s)
        last_s = longer * (1 + (shorter / longer) ** self.overlap) ** (1 / self.overlap)
        total = replicas * local_batch * (accumulation + 1)
        return float(total / (accumulation * gradient_s + last_s))

    def throughput(
        self,
        nodes: ArrayLike,
        replicas: ArrayLike,
        local_batch: ArrayLike,
        accumulation: ArrayLike = 0,
    ) -> Floats:
        """Samples/s of all replicas together."""
        import numpy as np

        passes = np.asarray(accumulation, dtype=float) + 1
        total = np.asarray(replicas, dtype=float) * np.asarray(local_batch, dtype=float) * passes
        rate: Floats = total / self.iteration_s(nodes, replicas, local_batch, accumulation)
        return rate


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class GradientStatistics:
    """Noise of the gradient at the initial batch size (Pollux, section 3.1).

    ``square`` is the squared norm of the true gradient, ``variance`` the trace of the covariance of
    a gradient over one initial batch; only their ratio matters.
    """

    square: float = 1.0
    variance: float = 0.0

    def __post_init__(self) -> None:
        if self.square < 0 or self.variance < 0 or self.square + self.variance <= 0:
            raise ModelError(
                f"gradient statistics out of range: square {self.square}, variance {self.variance}"
            )

    def efficiency(self, scale: ArrayLike) -> Floats:
        """Worth of a sample in a batch ``scale`` times the initial one: 1 there, falling with it.

        With noise scale phi this is (phi + M0) / (phi + M).
        """
        import numpy as np

        square, variance = self.square, self.variance
        worth: Floats = (variance + square) / (variance + square * np.asarray(scale, dtype=float))
        return worth


NOISELESS: Final = GradientStatistics(square=0.0, variance=1.0)
"""Statistics by which every sample counts in full, whatever the batch size."""


def gain(statistics: GradientStatistics, scale: ArrayLike) -> Floats:
    """Steps at the initial batch size that one step at ``scale`` times that size is worth."""
    import numpy as np

    steps: Floats = statistics.efficiency(scale) * np.asarray(scale, dtype=float)
    return steps


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Batch sizes that are allowed, in samples.

    ``initial`` is what the user tuned the job for and the least total; ``largest`` the most in
    total. ``local_least`` and ``local_most`` bound what one GPU of this type takes (its memory).
    ``accumulate`` tells whether a step may take several passes.
    """

    initial: int
    largest: int
    local_least: int
    local_most: int
    accumulate: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.initial <= self.largest:
            raise ModelError(f"batch sizes {self.initial}..{self.largest} are out of order")
        if not 1 <= self.local_least <= self.local_most:
            raise ModelError(f"local batches {self.local_least}..{self.local_most} out of order")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChoice:
    """The best batch of each of K configurations, arrays of shape ``(K,)``.

    ``goodput`` (useful samples/s) is 0 where the configuration cannot run at all;
    ``local_batch`` and ``accumulation`` are 0 there.
    """

    goodput: Floats
    local_batch: Ints
    accumulation: Ints


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """One job on GPUs of one type: all that its goodput depends on but the configuration."""

    model: ThroughputModel
    statistics: GradientStatistics
    limits: BatchLimits

    def with_fixed_batch(self) -> Learner:
        """The same where the total batch is always the initial one; goodput is throughput."""
        limits = replace(self.limits, largest=self.limits.initial)
        return replace(self, statistics=NOISELESS, limits=limits)

    @property
    def numbers(self) -> tuple[float, ...]:
        """All of it in the order of ``batch_curves.Row``."""
        model, statistics, limits = self.model, self.statistics, self.limits
        return (
            *model._times,
            *(model.overlap, statistics.square, statistics.variance),
            *(limits.initial, limits.largest, limits.local_least, limits.local_most),
            limits.accumulate,
        )


def best_batch(
    model: ThroughputModel,
    statistics: GradientStatistics,
    limits: BatchLimits,
    nodes: ArrayLike,
    replicas: ArrayLike,
    *,
    candidates: int = CANDIDATES,
) -> BatchChoice:
    """Batch sizes that maximise goodput on K configurations (algorithms C.4).

    ``nodes`` and ``replicas`` have shape ``(K,)``. Of every candidate total the batch that is
    really run (whole samples per GPU) is judged. Of equal ones the smallest wins.
    """
    import numpy as np

    on = np.atleast_1d(np.asarray(nodes, dtype=np.int64))
    learner = Learner(model=model, statistics=statistics, limits=limits)
    return best_batches(
        [learner], np.zeros(len(on), dtype=np.int64), on, replicas, candidates=candidates
    )


def fixed_batch(
    model: ThroughputModel, limits: BatchLimits, nodes: ArrayLike, replicas: ArrayLike
) -> BatchChoice:
    """The same for jobs whose total batch is always the initial one; goodput is throughput.

    A total that the replicas cannot share evenly is rounded up to the next that they can.
    """
    fixed = Learner(model=model, statistics=NOISELESS, limits=limits).with_fixed_batch()
    return best_batch(fixed.model, fixed.statistics, fixed.limits, nodes, replicas, candidates=1)


def best_batches(
    learners: Sequence[Learner],
    of: ArrayLike,
    nodes: ArrayLike,
    replicas: ArrayLike,
    *,
    most_rate: ArrayLike = math.inf,
    candidates: int = CANDIDATES,
) -> BatchChoice:
    """``best_batch`` of K pairs of a learner and a configuration, arrays of shape ``(K,)``.

    ``of`` are indices into ``learners``; ``most_rate`` is how many samples/s the input pipeline
    delivers there, which bounds the throughput whatever the GPUs could do.
    """
    import numpy as np

    from slurm_synergy.core.batch_curves import best_of

    index = np.atleast_1d(np.asarray(of, dtype=np.int64))
    on, many = (
        np.broadcast_to(np.asarray(one, dtype=np.int64), index.shape) for one in (nodes, replicas)
    )
    fed = np.broadcast_to(np.asarray(most_rate, dtype=np.float64), index.shape)
    goodput, local, passes = best_of(_table(learners)[index], on, many, fed, candidates)
    return BatchChoice(goodput=goodput, local_batch=local, accumulation=passes)


def goodput_at(
    learners: Sequence[Learner],
    nodes: ArrayLike,
    replicas: ArrayLike,
    local_batch: ArrayLike,
    accumulation: ArrayLike,
    *,
    most_rate: ArrayLike = math.inf,
) -> Floats:
    """Goodput of each of K ``learners`` with a given batch, whether that is allowed or not."""
    import numpy as np

    from slurm_synergy.core.batch_curves import goodput_of

    on, many, local, passes = (
        np.asarray(one, dtype=np.int64) for one in (nodes, replicas, local_batch, accumulation)
    )
    fed = np.asarray(most_rate, dtype=np.float64)
    return goodput_of(_table(learners), on, many, local, passes, fed)


def _table(learners: Sequence[Learner]) -> Floats:
    import numpy as np

    from slurm_synergy.core.batch_curves import NUMBERS

    table = np.array([one.numbers for one in learners], dtype=np.float64)
    return table.reshape(-1, NUMBERS)
