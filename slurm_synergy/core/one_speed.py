"""How fast jobs are by number of GPUs when all GPU types are taken to be alike (Pollux)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.elastic import gpus_per_replica
from slurm_synergy.core.facts import learner_on
from slurm_synergy.core.goodput import Learner, best_batches
from slurm_synergy.core.model import Elasticity, JobStatus, Snapshot
from slurm_synergy.core.scaling import Scaling

__all__ = ["OneSpeed", "one_learner", "relative"]

Floats = NDArray[np.float64]

_RIGID = Elasticity.RIGID
_FORGOTTEN_AT_LEAST = 1000


def relative(rates: Floats, gpus: int, size: int) -> Floats:
    """``rates`` relative to those on ``gpus`` GPUs; to the best on fewer if it cannot run there."""
    upto = rates[int(gpus > size), 1 : gpus + 1]
    base = float(upto[-1]) if len(upto) and upto[-1] > 0 else float(rates[:, : gpus + 1].max())
    if base <= 0:
        base = max(float(rates.max()), 1e-12)
    relative: Floats = rates / base
    return relative


class OneSpeed:
    """Rates of jobs by number of GPUs; they outlive a round."""

    def __init__(self) -> None:
        self._rates: dict[int, tuple[object, object, int, int, Floats]] = {}

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> OneSpeed:
        """What there is for the nodes of ``snapshot``."""
        found = snapshot.of_nodes.get(cls)
        if not isinstance(found, cls):
            found = snapshot.of_nodes[cls] = cls()
        if len(found._rates) > 2 * len(snapshot.jobs) + _FORGOTTEN_AT_LEAST:
            found._rates.clear()
        return found

    def rates(self, status: JobStatus, size: int, total: int) -> Floats:
        """Goodput on 0 to ``total`` GPUs of one node of ``size``, and of several ``(2, K + 1)``."""
        job, scaling = status.job, status.profile.scaling
        kept = self._rates.get(job.job_id)
        if kept and kept[0] is job and kept[1] is scaling and kept[2:4] == (size, total):
            return kept[4]
        found = _rates(status, size, total)
        self._rates[job.job_id] = (job, scaling, size, total, found)
        return found


def _rates(status: JobStatus, size: int, total: int) -> Floats:
    found = np.zeros((2, total + 1))
    learner = one_learner(status)
    gpus = np.arange(total + 1)
    if learner is None:  # scaling that is not known is perfect
        found[:] = gpus
        return found
    most, unit = min(total, status.job.most_gpus), _gpus_per_replica(status)
    one, many = np.arange(unit, min(size, most) + 1), np.arange(max(unit, 2), most + 1)
    replicas = np.concatenate((one, many)) // unit
    nodes = np.concatenate((np.ones_like(one), np.full_like(many, 2)))
    best = best_batches([learner], np.zeros_like(nodes), nodes, replicas).goodput
    found[0, one], found[1, many] = best[: len(one)], best[len(one) :]
    return found


def one_learner(status: JobStatus) -> Learner | None:
    """The job with one speed for all types: as on the type where it ran on most GPUs."""
    scaling = status.profile.scaling
    if scaling is None or not scaling.speeds or status.job.elasticity is _RIGID:
        return None
    kind = _most_seen(scaling)
    return learner_on(status, kind, scaling.speeds[kind].model)


def _most_seen(scaling: Scaling) -> str:
    """The type on which the job ran on most GPUs."""
    return min(scaling.speeds, key=lambda one: (-scaling.speeds[one].explored_gpus, one))


def _gpus_per_replica(status: JobStatus) -> int:
    """Over how many GPUs a copy of the job is split on that type."""
    scaling = status.profile.scaling
    assert scaling is not None
    return gpus_per_replica(status.job, scaling, _most_seen(scaling))
