"""How fast jobs are by number of GPUs when all GPU types are taken to be alike (Pollux)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.elastic import gpus_per_replica
from slurm_synergy.core.facts import learner_on
from slurm_synergy.core.goodput import Learner, best_batches
from slurm_synergy.core.model import Elasticity, JobStatus, Snapshot
from slurm_synergy.core.scaling import Scaling

__all__ = ["OneSpeed", "Reach", "one_learner", "relative"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What of a job's speeds is asked for: on up to ``most`` GPUs, and on the ``fair`` share.

    Nodes have up to ``size`` GPUs, the pool has ``total``.
    """

    most: int
    fair: int
    size: int
    total: int

    def points(self, status: JobStatus, unit: int) -> tuple[Ints, Ints]:
        """Numbers of GPUs of one node, and of several.

        Where the fair share is more than a job may have, its best below that counts instead, which
        may be anywhere; and what a split job does on a single GPU, too, is told by its best.
        """
        most = min(self.total, status.job.most_gpus)
        upto = most if unit > 1 or self.fair > most else min(self.most, most)
        points = np.arange(unit, upto + 1)
        if upto < self.fair <= most:
            points = np.append(points, self.fair)
        return points[points <= self.size], points[points >= max(unit, 2)]


class OneSpeed:
    """Rates of jobs by number of GPUs; they outlive a round."""

    def __init__(self) -> None:
        self._rates: dict[int, tuple[object, object, Reach, Floats]] = {}

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> OneSpeed:
        """What there is for the nodes of ``snapshot``."""
        found = snapshot.of_nodes.get(cls)
        if not isinstance(found, cls):
            found = snapshot.of_nodes[cls] = cls()
        if len(found._rates) > 2 * len(snapshot.jobs) + _FORGOTTEN_AT_LEAST:
            found._rates.clear()
        return found

    def rates(self, jobs: Sequence[tuple[JobStatus, Reach]]) -> list[Floats]:
        """Goodput on 0 to all GPUs of one node, and of several ``(2, K + 1)``, of each job.

        What is not within reach is 0.
        """
        new = [(status, reach) for status, reach in jobs if not self._knows(status, reach)]
        for (status, reach), found in zip(new, _rates(new), strict=True):
            job = status.job
            self._rates[job.job_id] = (job, status.profile.scaling, reach, found)
        return [self._rates[status.job.job_id][3] for status, _ in jobs]

    def _knows(self, status: JobStatus, reach: Reach) -> bool:
        kept = self._rates.get(status.job.job_id)
        if kept is None or kept[0] is not status.job or kept[1] is not status.profile.scaling:
            return False
        return kept[2] == reach


def _rates(jobs: Sequence[tuple[JobStatus, Reach]]) -> list[Floats]:
    """Those of all jobs are looked for at once."""
    found, learners, points = [], [], []
    for status, reach in jobs:
        rates = np.zeros((2, reach.total + 1))
        found.append(rates)
        learner = one_learner(status)
        if learner is None:  # scaling that is not known is perfect
            rates[:] = np.arange(reach.total + 1)
            continue
        unit = _gpus_per_replica(status)
        learners.append(learner)
        points.append((rates, unit, *reach.points(status, unit)))
    if not learners:
        return found
    gpus = [np.concatenate((one, many)) // unit for _, unit, one, many in points]
    nodes = [np.repeat((1, 2), (len(one), len(many))) for _, _, one, many in points]
    of = np.repeat(np.arange(len(learners)), [len(one) for one in gpus])
    best = best_batches(learners, of, np.concatenate(nodes), np.concatenate(gpus)).goodput
    at = 0
    for rates, _, one, many in points:
        for row, which in enumerate((one, many)):
            rates[row, which] = best[at : at + len(which)]
            at += len(which)
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
