"""Batch sizes for the cores that elastic jobs really got. Pure.

A policy that hopes for cores which others may lend chooses batches for them, so that a mechanism
knows what a job could use. Where it gave less, the batch is the best for what it gave: so a job
learns no slower than with the best batch for its share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from slurm_synergy.core.batch_curves import Row, best_of, goodput_of
from slurm_synergy.core.elastic import models_of
from slurm_synergy.core.facts import learner_on
from slurm_synergy.core.goodput import CANDIDATES, ThroughputModel
from slurm_synergy.core.model import Elasticity, JobStatus, Layout, Placement, Snapshot
from slurm_synergy.core.pipeline import supply_rate
from slurm_synergy.core.scaling import BatchSize
from slurm_synergy.core.snapshot import held, standing
from slurm_synergy.core.worth import BATCH_GAIN

__all__ = ["fitted"]

# Until Python 3.12, looking up a member of an enumeration takes longer than comparing it.
_ADAPTIVE = Elasticity.ADAPTIVE
_FORGOTTEN_AT_LEAST = 1000


def fitted(snapshot: Snapshot, layout: Layout) -> Layout:
    """``layout`` with batches for the cores in it; itself if none is another."""
    jobs = standing(snapshot).by_id
    found = tuple(_fit(snapshot, jobs[one.job_id], one) for one in layout.placements)
    if all(map(_is, found, layout.placements)):
        return layout
    return replace(layout, placements=found)


def _is(one: object, other: object) -> bool:
    return one is other


def _fit(snapshot: Snapshot, status: JobStatus, placement: Placement) -> Placement:
    job, profile, batch = status.job, status.profile, placement.batch
    if batch is None or job.elasticity is not _ADAPTIVE or profile.scaling is None:
        return placement
    if (profile.pipeline is None and profile.table is None) or not job.wrapped:
        return placement
    model = models_of(snapshot, job.job_id, profile.scaling).get(placement.gpu_type)
    nodes, gpus = len(placement.shares), placement.gpus
    if model is None:
        return placement
    fed = min(
        [
            supply_rate(profile, share.gpus, share.cpus, share.mem_mib) * gpus / share.gpus
            for _, share in placement.shares
        ]
    )
    if not 0 < fed < model.rate(nodes, batch.replicas, batch.local, batch.accumulation):
        return placement  # it can use its batch
    found = _best(snapshot, status, placement, model, fed)
    now = held(status)
    if now is not None and now.batch == found and now.gpu_type == placement.gpu_type:
        found = now.batch or found
        if now.shares == placement.shares:
            return now
    return placement if found == batch else replace(placement, batch=found)


@dataclass(slots=True)
class _Answer:
    """The last question about a job, and its best batch."""

    asked: tuple[object, ...]
    batch: BatchSize


def _best(
    snapshot: Snapshot,
    status: JobStatus,
    placement: Placement,
    model: ThroughputModel,
    fed: float,
) -> BatchSize:
    """The best batch when ``fed`` samples/s arrive: the one that the job has, if nearly as good."""
    batch, now = placement.batch, held(status)
    learner = learner_on(status, placement.gpu_type, model)
    assert batch is not None
    if learner is None:
        return batch
    stays = now is not None and now.gpu_layout == placement.gpu_layout
    own = now.batch if now is not None and stays else None
    known = _Answers.of_snapshot(snapshot).by_job
    numbers = learner.numbers
    asked = (numbers, len(placement.shares), batch.replicas, fed, own)
    answer = known.get(status.job.job_id)
    if answer is None or answer.asked != asked:
        found = _choose(numbers, len(placement.shares), batch, fed, own)
        answer = known[status.job.job_id] = _Answer(asked=asked, batch=found)
    return answer.batch


def _choose(
    numbers: tuple[float, ...],
    nodes: int,
    batch: BatchSize,
    fed: float,
    own: BatchSize | None,
) -> BatchSize:
    table = np.array([numbers], dtype=np.float64)
    shape = np.array([nodes]), np.array([batch.replicas])
    most = np.array([fed])
    goodput, local, passes = (float(one[0]) for one in best_of(table, *shape, most, CANDIDATES))
    if goodput <= 0:
        return batch
    if own is not None and own.replicas == batch.replicas and _allows(numbers, own):
        sizes = np.array([own.local]), np.array([own.accumulation])
        if float(goodput_of(table, *shape, *sizes, most)[0]) * BATCH_GAIN >= goodput:
            return own
    return BatchSize(local=int(local), replicas=batch.replicas, accumulation=int(passes))


def _allows(numbers: tuple[float, ...], own: BatchSize) -> bool:
    """Whether a batch that a job has is one that it may still have."""
    most = numbers[Row.LARGEST] + own.replicas * (own.accumulation + 1)
    return (
        numbers[Row.LOCAL_LEAST] <= own.local <= numbers[Row.LOCAL_MOST]
        and numbers[Row.INITIAL] <= own.total < most
    )


class _Answers:
    """Answers by job id; kept with the nodes."""

    __slots__ = ("by_job",)

    def __init__(self) -> None:
        self.by_job: dict[int, _Answer] = {}

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> _Answers:
        """What there is for the nodes of ``snapshot``."""
        found = snapshot.of_nodes.get(cls)
        most = 2 * len(snapshot.jobs) + _FORGOTTEN_AT_LEAST
        if not isinstance(found, cls) or len(found.by_job) > most:
            found = snapshot.of_nodes[cls] = cls()
        return found
