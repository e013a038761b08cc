"""The matrix of jobs and configurations: how fast each job would learn on each (Sia, section 3.3).

Rows are the jobs that compete, columns the configurations of the pool; of the other shapes that
users ask for or jobs hold, each is a column too, which counts as the smallest configuration that
covers it. Goodput counts the input pipeline: no GPU is faster than what its node's proportional
share of cores and memory delivers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.columns import Columns
from slurm_synergy.core.configurations import Usage, tally
from slurm_synergy.core.elastic import gpus_per_replica, models_on
from slurm_synergy.core.goodput import (
    CANDIDATES,
    BatchLimits,
    Learner,
    ThroughputModel,
    best_batches,
    goodput_at,
)
from slurm_synergy.core.model import Configuration, Elasticity, JobStatus, Snapshot
from slurm_synergy.core.pipeline import min_mem_mib
from slurm_synergy.core.scaling import BatchSize
from slurm_synergy.core.snapshot import held
from slurm_synergy.core.supplies import Supplies

__all__ = ["Worth", "worth_of"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NOTHING = -1
"""The current column of a job that holds nothing that is a column."""

# A data loader changes its batch only for a clear gain (algorithms C.4).
_BATCH_GAIN = 1.05
_FORGOTTEN_AT_LEAST = 1000
# Until Python 3.12, looking up a member of an enumeration takes longer than comparing it.
_RIGID, _ADAPTIVE = Elasticity.RIGID, Elasticity.ADAPTIVE
_SCALING = Elasticity.STRONG_SCALING


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """J jobs and K configurations.

    ``goodput`` ``(J, K)`` is in samples/s of the job, 0 where it cannot or must not run.
    ``local_batch`` and ``accumulation`` ``(J, K)`` are 0 where its batch is its own affair.
    ``least_gpus`` ``(J,)`` are the GPUs of its smallest configuration, ``current`` ``(J,)`` the
    column that it holds, or NOTHING. ``usage`` has the rows that bound a choice.
    """

    jobs: tuple[JobStatus, ...]
    configurations: tuple[Configuration, ...]
    usage: Usage
    goodput: Floats
    local_batch: Ints
    accumulation: Ints
    least_gpus: Floats
    current: Ints

    def configuration(self, row: int, column: int) -> Configuration:
        """The configuration of a cell, with its batch size."""
        plain = self.configurations[column]
        local = int(self.local_batch[row, column])
        if not local:
            return plain
        status = self.jobs[row]
        unit = gpus_per_replica(status.job, status.profile.scaling, plain.gpu_type or "")
        batch = BatchSize(
            local=local,
            replicas=plain.gpus // unit,
            accumulation=int(self.accumulation[row, column]),
        )
        return replace(plain, batch=batch)


def worth_of(
    snapshot: Snapshot, jobs: Sequence[JobStatus], taken: Mapping[str, int] | None = None
) -> Worth:
    """The matrix for ``jobs``, when ``taken`` GPUs of each node are out of their reach."""
    capacities = tally(snapshot.nodes, taken)
    kinds = tuple(sorted({node.gpu_type for node in snapshot.nodes}))
    columns = Columns(capacities, jobs, kinds)
    cells = _Cells(snapshot, jobs, columns)
    cells.fill()
    least = np.where(cells.goodput > 0, columns.gpus[None, :], np.inf).min(axis=1, initial=np.inf)
    current = [columns.at.get(key, NOTHING) for key in columns.held]
    return Worth(
        jobs=tuple(jobs),
        configurations=columns.all,
        usage=columns.usage,
        goodput=cells.goodput,
        local_batch=cells.local,
        accumulation=cells.passes,
        least_gpus=np.where(np.isfinite(least), least, 1.0),
        current=np.array(current, dtype=np.int64),
    )


class _Facts:
    """What the matrix needs to know of one job, by GPU type."""

    __slots__ = ("_gpu_rates", "_job", "_scaling", "learners", "rates", "units")

    def __init__(self, status: JobStatus, kinds: Sequence[str]) -> None:
        job, profile = status.job, status.profile
        self._job, self._scaling = job, profile.scaling
        self._gpu_rates = profile.gpu_rate_per_gpu
        models = models_on(profile.scaling) if profile.scaling else {}
        allowed = [not job.gpu_types or kind in job.gpu_types for kind in kinds]
        self.units = [
            gpus_per_replica(job, profile.scaling, kind) if may else 0
            for kind, may in zip(kinds, allowed, strict=True)
        ]
        self.learners = [
            _learner(status, kind, models[kind]) if may and kind in models else None
            for kind, may in zip(kinds, allowed, strict=True)
        ]
        self.rates = [profile.gpu_rate_per_gpu.get(kind, np.nan) for kind in kinds]

    def serves(self, status: JobStatus) -> bool:
        """Whether they are those of this very job, of which nothing new is believed."""
        profile = status.profile
        return (
            self._job is status.job
            and self._scaling is profile.scaling
            and self._gpu_rates is profile.gpu_rate_per_gpu
        )


class _Known:
    """What outlives a round: facts by job id, and what pipelines deliver."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.kinds = tuple(sorted({node.gpu_type for node in snapshot.nodes}))
        self._facts: dict[int, _Facts] = {}
        self.supplies = Supplies(snapshot)

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> _Known:
        """What there is for the nodes of ``snapshot``."""
        found = snapshot.of_nodes.get(cls)
        if not isinstance(found, cls) or found.is_crowded(len(snapshot.jobs)):
            found = snapshot.of_nodes[cls] = cls(snapshot)
        return found

    def is_crowded(self, jobs: int) -> bool:
        """Whether most of it is about jobs that are gone."""
        return max(len(self._facts), len(self.supplies)) > 2 * jobs + _FORGOTTEN_AT_LEAST

    def facts(self, status: JobStatus) -> _Facts:
        """The facts of a job."""
        found = self._facts.get(status.job.job_id)
        if found is None or not found.serves(status):
            found = self._facts[status.job.job_id] = _Facts(status, self.kinds)
        return found


def _learner(status: JobStatus, kind: str, model: ThroughputModel) -> Learner | None:
    """The job on GPUs of that type, if its batch is known."""
    job, scaling = status.job, status.profile.scaling
    if scaling is None:
        return None
    batch = job.batch
    if batch is None and job.elasticity is _SCALING and scaling.own_batch:
        batch = (scaling.own_batch, scaling.own_batch)
    if batch is None:
        return None
    speed = scaling.speeds[kind]
    limits = BatchLimits(
        initial=batch[0],
        largest=batch[1],
        local_least=speed.local_least,
        local_most=speed.local_most,
        accumulate=scaling.accumulate,
    )
    learner = Learner(model=model, statistics=scaling.statistics, limits=limits)
    return learner if job.elasticity is _ADAPTIVE else learner.with_fixed_batch()


def _allows(limits: BatchLimits, batch: BatchSize, replicas: int) -> bool:
    """Whether a batch that a job has is one that it may still have."""
    most = limits.largest + replicas * (batch.accumulation + 1)
    return (
        batch.replicas == replicas
        and limits.local_least <= batch.local <= limits.local_most
        and limits.initial <= batch.total < most
    )


class _Cells:
    """The cells of the matrix while they are being filled."""

    def __init__(self, snapshot: Snapshot, jobs: Sequence[JobStatus], columns: Columns) -> None:
        known = _Known.of_snapshot(snapshot)
        self._jobs, self._columns, self._nodes = jobs, columns, snapshot.nodes
        self._supplies = known.supplies
        self._facts = [known.facts(status) for status in jobs]
        shape = (len(jobs), len(known.kinds))
        self._units = np.array([one.units for one in self._facts], dtype=np.int64).reshape(shape)
        self._rates = np.array([one.rates for one in self._facts], dtype=float).reshape(shape)
        self._modelled = np.array(
            [[learner is not None for learner in one.learners] for one in self._facts], dtype=bool
        ).reshape(shape)
        cells = (len(jobs), len(columns.all))
        self.goodput = np.zeros(cells)
        self.local = np.zeros(cells, dtype=np.int64)
        self.passes = np.zeros(cells, dtype=np.int64)

    def fill(self) -> None:
        """Fill all cells that are possible."""
        if not self.goodput.size:
            return
        columns = self._columns
        open_, certain = self._open()
        rates = self._rates[:, columns.kind]
        fed = self._supplies.rows(self._jobs, columns)
        # Where a share delivers nothing its speed is as good as not known.
        alive = open_ & (fed > 0)
        modelled = alive & self._modelled[:, columns.kind]
        linear = alive & ~modelled & np.isfinite(rates)
        whole = rates * columns.gpus[None, :]
        self.goodput[linear] = np.minimum(whole, fed)[linear]
        adaptive = np.array([one.job.elasticity is _ADAPTIVE for one in self._jobs])
        self._evaluate(modelled & adaptive[:, None], fed, CANDIDATES)
        self._evaluate(modelled & ~adaptive[:, None], fed, 1)
        self._keep_batches(modelled & adaptive[:, None], fed)
        own = np.array(
            [one.job.elasticity is _RIGID or one.job.batch is None for one in self._jobs]
        )
        self.local[own] = 0  # its batch is its own
        self.passes[own] = 0
        self._fill_unknown(certain & ~modelled & ~linear)

    def _open(self) -> tuple[Bools, Bools]:
        """Cells on which a job may run now, and those of them that need no known speed."""
        columns, jobs = self._columns, self._jobs
        elastic = np.array([one.job.elasticity is not _RIGID for one in jobs])
        units = self._units[:, columns.kind]
        bounds = np.array([(one.job.least_gpus, one.job.most_gpus) for one in jobs])
        limits = np.array(columns.limits)
        gpus = columns.gpus[None, :]
        ours = (units > 0) & (gpus % np.maximum(units, 1) == 0) & elastic[:, None]
        ours &= (gpus >= bounds[:, :1]) & (gpus <= bounds[:, 1:])
        ours[:, columns.offered :] = False
        smallest = np.zeros_like(ours)
        for number in range(self._units.shape[1]):
            here = ours & (columns.kind == number)[None, :]
            least = np.where(here, gpus, np.iinfo(np.int64).max).min(axis=1)
            smallest |= here & (gpus == least[:, None])
        open_ = (ours & (gpus <= limits[:, None])) | smallest
        self._open_own(open_, smallest)
        self._close_small(open_)
        return open_, open_ & smallest

    def _close_small(self, open_: Bools) -> None:
        """Close what has not the memory that the processes need, on any node."""
        columns = self._columns
        most = dict.fromkeys(columns.kinds, 0)
        for node in self._nodes:
            if node.capacity.gpus:
                most[node.gpu_type] = max(most[node.gpu_type], node.capacity.mem_mib)
        there = np.array([most[kind] for kind in columns.kinds], dtype=float)[columns.kind]
        asked = np.array([one.job.gpus // (one.job.nodes or 1) for one in self._jobs])[:, None]
        need = np.array([min_mem_mib(one) for one in self._jobs], dtype=float)[:, None]
        each = np.array(columns.each, dtype=float)[None, :]
        open_ &= need * np.maximum(each / asked, 1.0) <= there[None, :]

    def _open_own(self, open_: Bools, certain: Bools) -> None:
        """Open what rigid jobs ask for, and what elastic ones hold if they may."""
        columns = self._columns
        for row, status in enumerate(self._jobs):
            job = status.job
            if job.elasticity is _RIGID:
                for kind in job.gpu_types or columns.kinds:
                    column = columns.at.get((kind, job.gpus, job.nodes))
                    if column is not None:
                        open_[row, column] = certain[row, column] = True
            elif status.lease is not None:
                column = columns.at.get(columns.held[row])
                if column is not None and self._may_stay(row, columns.all[column]):
                    open_[row, column] = certain[row, column] = True

    def _may_stay(self, row: int, now: Configuration) -> bool:
        job = self._jobs[row].job
        unit = int(self._units[row, self._columns.kinds.index(now.gpu_type or "")])
        within = job.least_gpus <= now.gpus <= job.most_gpus
        return unit > 0 and within and now.gpus % unit == 0

    def _evaluate(self, cells: Bools, fed: Floats, candidates: int) -> None:
        """Fill ``cells`` by the throughput models."""
        rows, at = np.nonzero(cells)
        if not len(rows):
            return
        columns = self._columns
        kinds = columns.kind[at]
        known = np.nonzero(self._modelled)
        number = np.zeros(self._modelled.shape, dtype=np.int64)
        number[known] = np.arange(len(known[0]))
        learners = [self._facts[row].learners[kind] for row, kind in zip(*known, strict=True)]
        found = best_batches(
            [one for one in learners if one is not None],
            number[rows, kinds],
            columns.nodes[at],
            columns.gpus[at] // np.maximum(self._units[rows, kinds], 1),
            most_rate=fed[rows, at],
            candidates=candidates,
        )
        self.goodput[rows, at] = found.goodput
        self.local[rows, at] = found.local_batch
        self.passes[rows, at] = found.accumulation

    def _keep_batches(self, cells: Bools, fed: Floats) -> None:
        """Let jobs keep their batch where they are, unless another is clearly better."""
        columns = self._columns
        kept: list[tuple[int, int, BatchSize, Learner]] = []
        for row, status in enumerate(self._jobs):
            now = held(status)
            column = columns.at.get(columns.held[row]) if now is not None else None
            if now is None or now.batch is None or column is None or not cells[row, column]:
                continue
            learner = self._facts[row].learners[columns.kind[column]]
            unit = int(self._units[row, columns.kind[column]])
            if learner is not None and _allows(learner.limits, now.batch, now.gpus // unit):
                kept.append((row, column, now.batch, learner))
        if not kept:
            return
        rows, at = np.array([(row, column) for row, column, _, _ in kept]).T
        local = np.array([batch.local for _, _, batch, _ in kept])
        passes = np.array([batch.accumulation for _, _, batch, _ in kept])
        replicas = [batch.replicas for _, _, batch, _ in kept]
        learners = [learner for _, _, _, learner in kept]
        now_ = goodput_at(
            learners, columns.nodes[at], replicas, local, passes, most_rate=fed[rows, at]
        )
        stays = now_ * _BATCH_GAIN >= self.goodput[rows, at]
        rows, at = rows[stays], at[stays]
        self.goodput[rows, at] = now_[stays]
        self.local[rows, at], self.passes[rows, at] = local[stays], passes[stays]

    def _fill_unknown(self, cells: Bools) -> None:
        """A speed that is not known is taken as the least that is, and to grow with the GPUs."""
        rows = np.nonzero(cells.any(axis=1))[0]
        if not len(rows):
            return
        part, gpus = self.goodput[rows], self._columns.gpus[None, :]
        least = np.where(part > 0, part, np.inf).min(axis=1)
        least = np.where(np.isfinite(least), least, 1.0)
        fewest = np.where(cells[rows], gpus, np.iinfo(np.int64).max).min(axis=1)
        guess = least[:, None] * gpus / fewest[:, None]
        self.goodput[rows] = np.where(cells[rows], guess, part)
