"""How fast an elastic job learns on a number of GPUs, and with which batch size it learns fastest.

Goodput is throughput times statistical efficiency (Pollux, OSDI '21, section 3; used per GPU type
by Sia, SOSP '23, section 3.3). The throughput model has a time for the gradient of one local batch
and a time for the synchronisation between replicas, which overlap more or less; the efficiency says
how much a sample of a large batch is worth beside one of the initial batch, by the gradient noise.

Everything here is vectorised: numbers of nodes, replicas and samples may be arrays that broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slurm_synergy.errors import ModelError

__all__ = [
    "CANDIDATES",
    "BatchChoice",
    "BatchLimits",
    "GradientStatistics",
    "ThroughputModel",
    "best_batch",
    "fixed_batch",
    "gain",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CANDIDATES: Final = 50
"""Total batch sizes that are tried, in geometric steps from the smallest to the largest."""

_LEAST_S = 1e-8  # the floor of every coefficient of a fit; a single replica synchronises in no time
_LARGEST_OVERLAP = 10.0


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
        times = (
            self.compute_s,
            self.compute_s_per_sample,
            self.node_sync_s,
            self.node_sync_s_per_replica,
            self.network_sync_s,
            self.network_sync_s_per_replica,
        )
        if not all(0 <= one < np.inf for one in times) or self.compute_s + times[1] <= 0:
            raise ModelError(f"the times of a throughput model must be positive: {times}")
        if not 1 <= self.overlap <= _LARGEST_OVERLAP:
            raise ModelError(f"overlap exponent {self.overlap} is not within 1..10")

    def gradient_s(self, local_batch: ArrayLike) -> Floats:
        """Seconds of the gradient of ``local_batch`` samples on one GPU."""
        return self.compute_s + self.compute_s_per_sample * np.asarray(local_batch, dtype=float)

    def sync_s(self, nodes: ArrayLike, replicas: ArrayLike) -> Floats:
        """Seconds of synchronising ``replicas`` GPUs on ``nodes`` nodes."""
        many = np.asarray(replicas, dtype=float)
        beyond = np.maximum(many - 2, 0.0)
        inside = self.node_sync_s + self.node_sync_s_per_replica * beyond
        across = self.network_sync_s + self.network_sync_s_per_replica * beyond
        shared = np.where(np.asarray(nodes) > 1, across, inside)
        return np.where(many > 1, shared, _LEAST_S)

    def iteration_s(
        self,
        nodes: ArrayLike,
        replicas: ArrayLike,
        local_batch: ArrayLike,
        accumulation: ArrayLike = 0,
    ) -> Floats:
        """Seconds of one optimiser step; ``accumulation`` counts the passes before the last.

        Arguments broadcast against each other. The power mean of computing and synchronising is
        taken relative to the longer of both, so that it cannot overflow.
        """
        gradient_s = self.gradient_s(local_batch)
        sync_s = self.sync_s(nodes, replicas)
        longer = np.maximum(gradient_s, sync_s)
        shorter = np.minimum(gradient_s, sync_s)
        last_s = longer * (1 + (shorter / longer) ** self.overlap) ** (1 / self.overlap)
        return np.asarray(accumulation, dtype=float) * gradient_s + last_s

    def throughput(
        self,
        nodes: ArrayLike,
        replicas: ArrayLike,
        local_batch: ArrayLike,
        accumulation: ArrayLike = 0,
    ) -> Floats:
        """Samples/s of all replicas together."""
        passes = np.asarray(accumulation, dtype=float) + 1
        total = np.asarray(replicas, dtype=float) * np.asarray(local_batch, dtype=float) * passes
        rate: Floats = total / self.iteration_s(nodes, replicas, local_batch, accumulation)
        return rate


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
        times = np.asarray(scale, dtype=float)
        worth: Floats = (self.variance + self.square) / (self.variance + self.square * times)
        return worth


def gain(statistics: GradientStatistics, scale: ArrayLike) -> Floats:
    """Steps at the initial batch size that one step at ``scale`` times that size is worth."""
    steps: Floats = statistics.efficiency(scale) * np.asarray(scale, dtype=float)
    return steps


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
    on = np.atleast_1d(np.asarray(nodes, dtype=np.int64))[:, None]
    many = np.atleast_1d(np.asarray(replicas, dtype=np.int64))[:, None]
    low = np.maximum(limits.initial, many * limits.local_least).astype(float)
    steps = np.linspace(0.0, 1.0, candidates)[None, :]
    high = np.maximum(float(limits.largest), low)
    totals = low * (high / low) ** steps  # (K, candidates)
    local, passes, valid = _split(limits, totals, many)
    valid &= low <= limits.largest
    return _best(model, statistics, limits, on, many, local, passes, valid)


def fixed_batch(
    model: ThroughputModel, limits: BatchLimits, nodes: ArrayLike, replicas: ArrayLike
) -> BatchChoice:
    """The same for jobs whose total batch is always the initial one; goodput is throughput."""
    on = np.atleast_1d(np.asarray(nodes, dtype=np.int64))[:, None]
    many = np.atleast_1d(np.asarray(replicas, dtype=np.int64))[:, None]
    totals = np.broadcast_to(float(limits.initial), many.shape)
    local, passes, valid = _split(limits, totals, many)
    # A total that the replicas cannot share evenly is rounded up to the next that they can.
    valid &= local * many * (passes + 1) < limits.initial + many * (passes + 1)
    noiseless = GradientStatistics(square=0.0, variance=1.0)  # every sample counts in full
    return _best(model, noiseless, limits, on, many, local, passes, valid)


def _split(
    limits: BatchLimits, totals: Floats, replicas: Ints
) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """Local batch and accumulation passes for totals of shape ``(K, C)``; which are possible."""
    share = totals / replicas
    if limits.accumulate:
        passes = np.maximum(np.ceil(share / limits.local_most - 1e-8) - 1, 0)
        # One replica without accumulation has no second gradient to measure the noise with.
        alone = (replicas == 1) & (share > limits.initial * (1 + 1e-9))
        passes = np.where(alone, np.maximum(passes, 1), passes)
    else:
        passes = np.zeros_like(share)
    local = np.maximum(np.ceil(share / (passes + 1) - 1e-8), 1)
    valid = (local >= limits.local_least) & (local <= limits.local_most)
    return local.astype(np.int64), passes.astype(np.int64), valid


def _best(
    model: ThroughputModel,
    statistics: GradientStatistics,
    limits: BatchLimits,
    nodes: Ints,
    replicas: Ints,
    local: Ints,
    passes: Ints,
    valid: NDArray[np.bool_],
) -> BatchChoice:
    realised = replicas * local * (passes + 1)
    # Whole samples per replica may round a total up by less than one sample for each pass.
    valid = valid & (realised < limits.largest + replicas * (passes + 1))
    worth = statistics.efficiency(np.maximum(realised / limits.initial, 1.0))
    goodput = np.where(valid, model.throughput(nodes, replicas, local, passes) * worth, 0.0)
    at = np.argmax(goodput, axis=1)[:, None]
    best = np.take_along_axis(goodput, at, axis=1)[:, 0]
    runs = best > 0

    def chosen(values: Ints) -> Ints:
        return np.where(runs, np.take_along_axis(values, at, axis=1)[:, 0], 0)

    return BatchChoice(goodput=best, local_batch=chosen(local), accumulation=chosen(passes))
