"""How long an elastic job would take alone, for finish-time fairness (Sia, equation 6)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.batch_curves import best_by_noise
from slurm_synergy.core.goodput import CANDIDATES, NOISELESS, BatchLimits, Learner
from slurm_synergy.core.model import Node
from slurm_synergy.simulator.training import Training

__all__ = ["AloneTimes", "Isolation"]

Floats = NDArray[np.float64]


class AloneTimes:
    """How long a job takes alone on its part of each GPU type: GPUs of the type, and seconds."""

    def __init__(self, by_type: tuple[tuple[int, float], ...]) -> None:
        self.by_type = by_type

    def ratio(self, jct_s: float) -> float:
        """``jct_s`` over the time alone, for each type, averaged over the GPUs (equation 6)."""
        weight = sum(gpus for gpus, _ in self.by_type)
        total = sum(gpus * jct_s / alone_s for gpus, alone_s in self.by_type)
        return total / weight if weight else 1.0

    def pooled(self, jct_s: float) -> float:
        """``jct_s`` over the time alone averaged over the GPUs, as Sia's artifact has it."""
        weight = sum(gpus for gpus, _ in self.by_type)
        total_s = sum(gpus * alone_s for gpus, alone_s in self.by_type)
        return jct_s * weight / total_s if weight else 1.0


class Isolation:
    """Times of jobs alone on some GPUs of the pool; jobs alike are judged once."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._gpus: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        for node in nodes:
            kind, gpus = node.gpu_type, node.total.gpus
            self._gpus[kind] = self._gpus.get(kind, 0) + gpus
            self._sizes[kind] = max(self._sizes.get(kind, 0), gpus)
        self._known: dict[tuple[int, str, int], float] = {}
        self._noise: dict[int, Floats] = {}

    def alone_s(
        self, training: Training, part: float, most_gpus: int, *, rigid: bool = False
    ) -> AloneTimes:
        """Times on ``part`` GPUs of each type, at most ``most_gpus``.

        A rigid job has all its ``most_gpus`` or none: where its part is less it has them in turns.
        """
        found = []
        for kind, gpus in self._gpus.items():
            if kind not in training.application.steps or kind not in training.model.local_most:
                continue
            if rigid:
                alone_s = self._whole_s(training, kind, most_gpus) * max(most_gpus / part, 1.0)
            else:
                alone_s = self._alone_s(training, kind, min(part, most_gpus))
            found.append((gpus, alone_s))
        return AloneTimes(tuple(found))

    def _alone_s(self, training: Training, kind: str, part: float) -> float:
        """Seconds on a number of GPUs that need not be whole; on less than enough, in turns."""
        least = training.model.stages.get(kind, 1)
        if part <= least:
            return self._whole_s(training, kind, least) * least / part
        low = math.floor(part)
        low_s, high_s = (self._whole_s(training, kind, low + more) for more in (0, 1))
        return low_s + (high_s - low_s) * (part - low)

    def _whole_s(self, training: Training, kind: str, gpus: int) -> float:
        key = (id(training), kind, gpus)
        if key not in self._known:
            if id(training) not in self._noise:
                self._noise[id(training)] = _noise(training)
            noise, nodes = self._noise[id(training)], -(-gpus // self._sizes[kind])
            rates = _rates(training, kind, gpus, nodes, noise)
            work = np.diff(training.ends, prepend=0.0)
            self._known[key] = training.model.restart_s + float((work / rates).sum())
        return self._known[key]


def _noise(training: Training) -> Floats:
    """Square and variance of the gradient in each epoch ``(E, 2)``, at the initial batch size."""
    initial, epochs = training.own_batch or training.model.batch[0], range(len(training.ends))
    told = [
        NOISELESS if training.own_batch else training.statistics(epoch, initial) for epoch in epochs
    ]
    return np.array([(one.square, one.variance) for one in told])


def _rates(training: Training, kind: str, gpus: int, nodes: int, noise: Floats) -> Floats:
    """Useful samples/s in each epoch with the best batch, by a fit to all that was measured."""
    model, own = training.model, training.own_batch
    initial, largest = (own, own) if own else model.batch
    limits = BatchLimits(
        initial=initial,
        largest=largest,
        local_least=1 if own else model.local_least,
        local_most=model.local_most[kind],
    )
    fit = training.fit(kind, training.everything(kind))
    numbers = np.array(Learner(model=fit, statistics=NOISELESS, limits=limits).numbers)
    found = best_by_noise(numbers, nodes, model.replicas(kind, gpus), noise, CANDIDATES)
    if own:
        worth = [training.epoch_gain(at, own) * model.batch[0] / own for at in range(len(noise))]
        found = found * np.array(worth)
    return np.where(found > 0, found, found[found > 0].min(initial=np.inf))
