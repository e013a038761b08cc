"""The batch sizes of elastic jobs on GPUs that were chosen without looking at them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slurm_synergy.core.elastic import gpus_per_replica, model_on
from slurm_synergy.core.facts import learner_on
from slurm_synergy.core.goodput import Learner, best_batches, goodput_at
from slurm_synergy.core.model import Configuration, Elasticity, JobStatus
from slurm_synergy.core.scaling import BatchSize
from slurm_synergy.core.snapshot import held

__all__ = ["with_batches"]

_RIGID = Elasticity.RIGID
# A data loader changes its batch only for a clear gain (algorithms C.4).
_BATCH_GAIN = 1.05


def with_batches(wanted: Sequence[tuple[JobStatus, Configuration]]) -> list[Configuration]:
    """The configurations of these jobs with the batch sizes with which they learn fastest there.

    Those of jobs that must not, or cannot, be told a batch are as they were. A job stays with the
    batch that it has unless another one is clearly better.
    """
    rows: list[tuple[int, Learner, int, int]] = []
    for at, (status, one) in enumerate(wanted):
        scaling, kind = status.profile.scaling, one.gpu_type
        if status.job.elasticity is _RIGID or status.job.batch is None or not scaling or not kind:
            continue
        model = model_on(scaling, kind)
        learner = learner_on(status, kind, model) if model else None
        if learner is not None:
            unit = gpus_per_replica(status.job, scaling, kind)
            rows.append((at, learner, one.nodes or 1, one.gpus // unit))
    found = [one for _, one in wanted]
    if not rows:
        return found
    best = best_batches(
        [row[1] for row in rows],
        np.arange(len(rows)),
        [row[2] for row in rows],
        [row[3] for row in rows],
    )
    for row, (at, learner, nodes, replicas) in enumerate(rows):
        local, passes = int(best.local_batch[row]), int(best.accumulation[row])
        if not local:
            continue
        batch = BatchSize(local=local, replicas=replicas, accumulation=passes)
        now = held(wanted[at][0])
        own = now.batch if now is not None else None
        if own is not None and _stays(learner, own, nodes, replicas, float(best.goodput[row])):
            batch = own
        found[at] = replace(found[at], batch=batch)
    return found


def _stays(learner: Learner, batch: BatchSize, nodes: int, replicas: int, best: float) -> bool:
    """Whether a job stays with its batch: it may, and another is not clearly better."""
    limits = learner.limits
    most = limits.largest + replicas * (batch.accumulation + 1)
    if batch.replicas != replicas or not limits.initial <= batch.total < most:
        return False
    if not limits.local_least <= batch.local <= limits.local_most:
        return False
    now = goodput_at([learner], [nodes], [replicas], [batch.local], [batch.accumulation])
    return bool(now[0] * _BATCH_GAIN >= best)
