"""How elastic jobs really advance: measured step times, and the worth of their samples by epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurm_synergy.core.goodput import NOISELESS, GradientStatistics, ThroughputModel, gain
from slurm_synergy.core.model import Placement, Profile
from slurm_synergy.core.pipeline import supply_rate
from slurm_synergy.core.scaling import BatchSize
from slurm_synergy.errors import ModelError
from slurm_synergy.profiler.fit import StepTimes, fit_throughput
from slurm_synergy.simulator.measured import Application, canonical
from slurm_synergy.simulator.pace import Pace
from slurm_synergy.simulator.sia_models import MICRO_BATCHES, SiaModel

__all__ = ["Observed", "Training"]

Observed = tuple[tuple[int, ...], int]
"""GPUs per node (replicas, where a replica has several) and samples of one replica in a pass."""

_MOST_PASSES = 256
_PASSES = 3  # forward once and backward twice as long
_BATCHES = 10
"""How many batch sizes a profile of a single GPU has."""


class Training:
    """One application under one way of running it; jobs alike share it.

    ``own_batch`` is the total batch of jobs that do not let it be chosen. Progress is counted in
    useful samples: those at the initial batch size that would have brought as much; ``ends`` is how
    many at the end of each epoch.
    """

    def __init__(
        self, application: Application, model: SiaModel, own_batch: int | None = None
    ) -> None:
        self.application, self.model = application, model
        self.own_batch = own_batch
        self.samples = application.total_progress * model.batch[0]
        self.ends = [float(end) * model.batch[0] for end in application.epochs]
        self._paces: dict[object, Pace] = {}
        self._fits: dict[tuple[str, frozenset[Observed]], ThroughputModel] = {}

    # the truth -------------------------------------------------------------------------------

    def pace(self, placement: Placement, profile: Profile) -> Pace:
        """How the job advances there. Raises ModelError where nothing like it was measured."""
        pattern = self.pattern(placement)
        batch = placement.batch or self.batch_on(placement.gpu_type, pattern, wider=True)
        fed = _fed(profile, placement)
        key = (placement.gpu_type, canonical(pattern), batch, fed)
        if key not in self._paces:
            rate = self.rate(placement, profile)
            worth = [
                rate * self.epoch_gain(epoch, batch.total) * self.model.batch[0] / batch.total
                for epoch in range(len(self.ends))
            ]
            self._paces[key] = Pace(self.ends, worth)
        return self._paces[key]

    def rate(self, placement: Placement, profile: Profile) -> float:
        """Samples/s there, useful or not. Raises ModelError as ``pace``."""
        kind, pattern = placement.gpu_type, self.pattern(placement)
        batch = placement.batch or self.batch_on(kind, pattern, wider=True)
        return min(self.gpu_rate(kind, pattern, batch), _fed(profile, placement))

    def gpu_rate(
        self, kind: str, pattern: tuple[int, ...], batch: BatchSize | None = None
    ) -> float:
        """Samples/s of so many GPUs per node when data is ready, by default with its own batch."""
        chosen = batch or self.batch_on(kind, pattern)
        return chosen.total / self._step_s(kind, pattern, chosen)

    def alone_s(self, kinds: Sequence[str]) -> float:
        """Seconds that it takes on a single GPU of the fastest type, at the largest batch there."""
        times_s = []
        for kind in kinds:
            rates = []
            for pattern, local in sorted(self.alone(kind)):
                batch = BatchSize(local=local, replicas=1)
                worth = self.epoch_gain(0, local) * self.model.batch[0] / local
                rates.append(local / self._step_s(kind, pattern, batch) * worth)
            if rates:
                times_s.append(self.samples / max(rates))
        return min(times_s)

    def pattern(self, placement: Placement) -> tuple[int, ...]:
        """GPUs per node."""
        return tuple([share.gpus for _, share in placement.shares])

    def epoch_gain(self, epoch: int, total: float) -> float:
        """What one step with that batch is worth in steps at the initial one."""
        if self.model.stages:
            return total / self.model.batch[0]
        statistics = self.application.statistics(epoch, total)
        return float(gain(statistics, max(total / self.model.batch[0], 1.0)))

    def batch_on(self, kind: str, pattern: Sequence[int], *, wider: bool = False) -> BatchSize:
        """How the job's own batch is spread there, with as few passes as the GPUs' memory lets.

        Raises ModelError where that was not measured, but with ``wider`` only if it might have
        been: not for a job that runs on more nodes than there were.
        """
        total = self.own_batch or self.model.batch[0]
        replicas = self.model.replicas(kind, sum(pattern))
        most = self.model.local_most[kind]
        beyond = wider and self._is_wider(kind, pattern)
        for passes in range(1, _MOST_PASSES):
            local = max(round(total / (replicas * passes)), 1)
            if local <= most and (beyond or self.times(kind, pattern, local) is not None):
                return BatchSize(local=local, replicas=replicas, accumulation=passes - 1)
        raise ModelError(
            f"{self.application.name} was not measured near a batch of {total} on {replicas} GPUs "
            f"of type {kind}"
        )

    def times(self, kind: str, pattern: Sequence[int], local: int) -> tuple[float, float] | None:
        """Seconds of a pass without and with synchronisation; None where not measured."""
        if self.model.stages:
            return self._pipelined(kind, pattern)
        found = self.application.steps[kind].step(pattern, local)
        if found is None:
            return None
        step_s, sync_s = (one * self.model.slowdown for one in found)
        return max(step_s - sync_s, 1e-6), step_s

    def _is_wider(self, kind: str, pattern: Sequence[int]) -> bool:
        """Whether these are more nodes than anything was measured on, as on larger pools."""
        table = self.application.steps[kind]
        measured = [len(one) for one in table.placements] + table.scale[:, 0].tolist()
        return not self.model.stages and len(pattern) > max(measured, default=0)

    def _pipelined(self, kind: str, pattern: Sequence[int]) -> tuple[float, float] | None:
        """The same of copies that are split over stages (algorithms C.9)."""
        stages, gpus = self.model.stages[kind], sum(pattern)
        for nodes, many, batch, pass_s, sync_s in self.application.steps[kind].scale:
            if (nodes, many, batch) == (len(pattern), gpus, 1):
                gradient_s = _PASSES * (stages - 1 + MICRO_BATCHES) * pass_s
                return gradient_s, gradient_s + (sync_s if gpus > stages else 0.0)
        return None

    def statistics(self, epoch: int, total: float) -> GradientStatistics:
        """What the scheduler can measure of the gradient."""
        if self.model.stages:
            return NOISELESS
        return self.application.statistics(epoch, total)

    def _step_s(self, kind: str, pattern: Sequence[int], batch: BatchSize) -> float:
        """Seconds of one optimiser step; off the measured range as a fit to all of it says."""
        found = self.times(kind, pattern, batch.local)
        if found is None:
            model = self.fit(kind, self.everything(kind))
            sizes = (len(pattern), batch.replicas, batch.local, batch.accumulation)
            return float(model.iteration_s(*sizes))
        gradient_s, step_s = found
        return step_s + batch.accumulation * gradient_s

    # what can be measured of it --------------------------------------------------------------

    def fit(self, kind: str, observed: frozenset[Observed]) -> ThroughputModel:
        """The throughput model of what was observed on GPUs of one type."""
        key = (kind, observed)
        if key not in self._fits:
            rows = sorted(observed)
            times = [self.times(kind, pattern, local) for pattern, local in rows]
            known = [(row, one) for row, one in zip(rows, times, strict=True) if one is not None]
            self._fits[key] = fit_throughput(
                StepTimes(
                    nodes=np.array([len(pattern) for (pattern, _), _ in known]),
                    replicas=np.array(
                        [self.model.replicas(kind, sum(pattern)) for (pattern, _), _ in known]
                    ),
                    local_batch=np.array([local for (_, local), _ in known]),
                    gradient_s=np.array([gradient_s for _, (gradient_s, _) in known]),
                    step_s=np.array([step_s for _, (_, step_s) in known]),
                )
            )
        return self._fits[key]

    def alone(self, kind: str) -> frozenset[Observed]:
        """A profile of a single GPU: some ten batch sizes that fit into its memory."""
        least, most = self.model.local_least, self.model.local_most[kind]
        single = (self.model.stages.get(kind, 1),)
        sizes = {round(one) for one in np.geomspace(least, most, _BATCHES).tolist()}
        return frozenset(
            (single, size) for size in sizes if self.times(kind, single, size) is not None
        )

    def everything(self, kind: str) -> frozenset[Observed]:
        """All that was measured on GPUs of that type."""
        table = self.application.steps[kind]
        if self.model.stages:
            shapes = {(int(gpus // nodes),) * int(nodes) for nodes, gpus, *_ in table.scale}
            return frozenset((shape, MICRO_BATCHES) for shape in shapes)
        rows = {
            (pattern, int(batch))
            for pattern, measured in table.placements.items()
            for batch in measured[:, 0]
        }
        return frozenset(rows)


def _fed(profile: Profile, placement: Placement) -> float:
    """Samples/s that the input pipeline delivers; infinite where there is none."""
    if profile.pipeline is None and profile.table is None:
        return float("inf")
    gpus = placement.gpus
    return min(
        supply_rate(profile, share.gpus, share.cpus, share.mem_mib) * gpus / share.gpus
        for _, share in placement.shares
    )
