"""TunedJobs: what an expert would ask for who knows how a job scales (algorithms D.5).

For schedulers that choose neither GPUs nor batch size, the workloads of Sia's artifact are tuned in
advance: a job asks for an even number of GPUs on which, with the batch that is best there, it is
half to four fifths as fast as if it scaled perfectly, and needs less than twelve hours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slurm_synergy.core.model import Placement, Profile
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import ModelError
from slurm_synergy.simulator.measured import Application
from slurm_synergy.simulator.sia_models import SiaModel
from slurm_synergy.simulator.training import Training

__all__ = ["MOST_GPUS", "TunedShape", "tuned_shapes"]

_BAND = (0.5, 0.8)
_LONGEST_S = 12 * 3600.0
MOST_GPUS = 16
"""The most GPUs of a tuned job on a pool of several types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedShape:
    """GPUs and total batch, how long the job then runs alone, and its part of perfect scaling."""

    gpus: int
    batch: int
    alone_s: float
    efficiency: float

    @property
    def off_band(self) -> float:
        """How far outside the band of good efficiencies it is; 0 within."""
        low, high = _BAND
        return max(low - self.efficiency, self.efficiency - high, 0.0)


def tuned_shapes(
    application: Application, model: SiaModel, kind: str, per_node: int, most_gpus: int
) -> tuple[TunedShape, ...]:
    """All good requests on GPUs of that type, ``per_node`` to a node, by their GPUs.

    Where none is within the band, the one that is nearest to it. Raises ModelError where the
    application was not measured on such GPUs.
    """
    single_s = min((one.alone_s for one in _runs(application, model, kind, 1, per_node)), default=0)
    if not single_s:
        raise ModelError(f"{application.name} was not measured on one GPU of type {kind}")
    found = []
    for gpus in range(2, most_gpus + 1, 2):
        runs = list(_runs(application, model, kind, gpus, per_node))
        if runs:
            best = min(runs, key=lambda one: one.alone_s)
            efficiency = single_s / best.alone_s / gpus
            found.append(
                TunedShape(gpus=gpus, batch=best.batch, alone_s=best.alone_s, efficiency=efficiency)
            )
    if not found:
        raise ModelError(f"{application.name} was not measured on several GPUs of type {kind}")
    # The rule is about times as measured, without what makes jobs of the simulation longer.
    short = [one for one in found if one.alone_s / model.slowdown < _LONGEST_S] or found
    nearest = min(one.off_band for one in short)
    return tuple(one for one in short if one.off_band <= nearest)


def _runs(
    application: Application, model: SiaModel, kind: str, gpus: int, per_node: int
) -> Iterator[TunedShape]:
    """With each batch that was measured; efficiencies are left open."""
    whole, rest = divmod(gpus, per_node)
    counts = [per_node] * whole + ([rest] if rest else [])
    where = Placement(
        job_id=0,
        gpu_type=kind,
        shares=tuple((f"node-{at}", Resources(gpus=count)) for at, count in enumerate(counts)),
    )
    for batch in application.batches:
        if not max(model.batch[0], gpus) <= batch <= model.batch[1]:
            continue
        training = Training(application, model, batch)
        try:
            alone_s = training.pace(where, Profile()).left_s(0.0)
        except ModelError:
            continue
        yield TunedShape(gpus=gpus, batch=batch, alone_s=alone_s, efficiency=1.0)
