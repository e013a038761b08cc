"""What the matrix of jobs and configurations needs to know of each job, kept between rounds.

Most of a job stays what it is for many rounds, while the noise of its gradient is new in each. So
its facts stand in tables, one row for each job, in which only what is new is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.batch_curves import NUMBERS, Curves, Row
from slurm_synergy.core.columns import Columns, Key, Offers, held_key
from slurm_synergy.core.elastic import Shapes, gpus_per_replica
from slurm_synergy.core.goodput import CANDIDATES, BatchLimits, Learner, ThroughputModel
from slurm_synergy.core.model import (
    Configuration,
    Elasticity,
    Job,
    JobStatus,
    PipelineModel,
    Placement,
    SensitivityTable,
    Snapshot,
)
from slurm_synergy.core.pipeline import min_mem_mib
from slurm_synergy.core.scaling import BatchSize, Scaling
from slurm_synergy.core.snapshot import held
from slurm_synergy.core.supplies import Supplies

__all__ = ["Fact", "Facts", "FactsOf", "learner_on"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_FORGOTTEN_AT_LEAST = 1000
_MOST_CONFIGURATIONS = 100_000
_STATISTICS = [Row.SQUARE, Row.VARIANCE]
# Until Python 3.12, looking up a member of an enumeration takes longer than comparing it.
_RIGID, _ADAPTIVE = Elasticity.RIGID, Elasticity.ADAPTIVE
_SCALING = Elasticity.STRONG_SCALING


class Fact(IntEnum):
    """Whole numbers that are known of every job, by where they stand.

    The least and the most GPUs it may have; on how many it was measured; how many it asked for on
    a node, and MiB that its processes need there; whether it is rigid, whether it may choose its
    batch, whether the batch is its own affair. Of what it holds the GPUs and its batch: replicas,
    local size and accumulation, 0 for none.
    """

    LEAST = 0
    MOST = 1
    EXPLORED = 2
    ASKED = 3
    NEED_MIB = 4
    IS_RIGID = 5
    IS_ADAPTIVE = 6
    OWNS_BATCH = 7
    HELD = 8
    REPLICAS = 9
    LOCAL = 10
    PASSES = 11


def learner_on(status: JobStatus, kind: str, model: ThroughputModel) -> Learner | None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsOf:
    """Facts of J jobs by GPU type, of which there are T.

    ``slots`` ``(J,)`` are small numbers that stay the jobs' own. ``units`` ``(J, T)`` are GPUs per
    replica, 0 where the type is not allowed; ``most`` the most GPUs of it that may be offered;
    ``rates`` samples/s per GPU, NaN where not known;
    ``numbers`` ``(J, T, NUMBERS)`` the learners (``batch_curves.Row``), NaN where there is none;
    ``whole`` ``(J, len(Fact))``. ``held`` is what each holds. Facts of the same jobs that have the
    same ``version`` differ in their statistics alone, and in nothing if ``noise`` is the same too.
    """

    slots: Ints
    units: Ints
    most: Ints
    rates: Floats
    numbers: Floats
    whole: Ints
    held: Sequence[Key | None]
    version: int
    noise: int

    def __getitem__(self, fact: Fact) -> Ints:
        return self.whole[:, fact]

    @property
    def batches(self) -> Ints:
        """The batches that jobs have, ``(J, 3)``: replicas, local size and accumulation."""
        return self.whole[:, Fact.REPLICAS :]


@dataclass(slots=True)
class _Origin:
    """What the facts of a job follow from."""

    slot: int
    job: Job
    gpu_rates: Mapping[str, float]
    scaling: Scaling | None
    pipeline: PipelineModel | None
    table: SensitivityTable | None
    models: Mapping[str, ThroughputModel]
    placement: Placement | None = None
    held: Key | None = None

    def serves(self, status: JobStatus) -> bool:
        """Whether nothing is new of that very job, unless in its scaling."""
        profile = status.profile
        return (
            self.job is status.job
            and self.gpu_rates is profile.gpu_rate_per_gpu
            and self.pipeline is profile.pipeline
            and self.table is profile.table
        )


class Facts:
    """What outlives a round: facts of jobs, what pipelines deliver, and curves of goodput."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.kinds = tuple(sorted({node.gpu_type for node in snapshot.nodes}))
        self.curves = Curves(CANDIDATES)
        self.offers = Offers(snapshot.nodes, self.kinds)
        # The most memory of a usable node of each type, in MiB.
        self.most_mib = np.zeros(len(self.kinds))
        for node in snapshot.nodes:
            if node.capacity.gpus:
                at = self.kinds.index(node.gpu_type)
                self.most_mib[at] = max(self.most_mib[at], node.capacity.mem_mib)
        self._shares = _Delivered(Supplies(snapshot))
        self._lent = _Delivered(Supplies(snapshot, lent=True))
        self._origins: dict[int, _Origin] = {}
        self._version = self._noise = 0
        kinds = len(self.kinds)
        self._units = np.zeros((0, kinds), dtype=np.int64)
        self._most = np.zeros((0, kinds), dtype=np.int64)
        self._rates = np.zeros((0, kinds))
        self._numbers = np.zeros((0, kinds, NUMBERS))
        self._whole = np.zeros((0, len(Fact)), dtype=np.int64)
        self._configurations: dict[tuple[object, ...], Configuration] = {}

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> Facts:
        """What there is for the nodes of ``snapshot``."""
        found = snapshot.of_nodes.get(cls)
        if not isinstance(found, cls) or found._is_crowded(len(snapshot.jobs)):
            found = snapshot.of_nodes[cls] = cls(snapshot)
        return found

    def _is_crowded(self, jobs: int) -> bool:
        """Whether most of it is about jobs that are gone."""
        return max(len(self._origins), len(self._shares)) > 2 * jobs + _FORGOTTEN_AT_LEAST

    def of(self, snapshot: Snapshot, jobs: Sequence[JobStatus]) -> FactsOf:
        """The facts of ``jobs``, which are of ``snapshot``."""
        known, shapes = self._origins, Shapes.of_snapshot(snapshot)
        self._reach(len(known) + sum([status.job.job_id not in known for status in jobs]))
        origins: list[_Origin] = []
        noisy: list[tuple[int, float, float]] = []
        for status in jobs:
            job_id, scaling = status.job.job_id, status.profile.scaling
            origin = known.get(job_id)
            if origin is None or not origin.serves(status):
                origin = self._write(shapes, status, origin)
            elif origin.scaling is not scaling:
                if _differ(origin, scaling, shapes, job_id):
                    origin = self._write(shapes, status, origin)
                elif scaling is not None and status.job.elasticity is _ADAPTIVE:
                    noise = scaling.statistics
                    noisy.append((origin.slot, noise.square, noise.variance))
                origin.scaling = scaling
            now = held(status)
            if origin.placement is not now:
                self._hold(origin, status, now)
            origins.append(origin)
        self._note(noisy)
        at = np.array([origin.slot for origin in origins], dtype=np.int64)
        return FactsOf(
            slots=at,
            units=self._units[at],
            most=self._most[at],
            rates=self._rates[at],
            numbers=self._numbers[at],
            whole=self._whole[at],
            held=[origin.held for origin in origins],
            version=self._version,
            noise=self._noise,
        )

    def fed(self, facts: FactsOf, jobs: Sequence[JobStatus], columns: Columns) -> Floats:
        """What the input pipeline of each of ``jobs`` delivers in each column ``(J, K)``.

        In samples/s, infinite where not known. What was computed for the same columns before is
        not computed again.
        """
        return self._shares.of(facts.slots, jobs, columns)

    def lent(
        self, facts: FactsOf, jobs: Sequence[JobStatus], columns: Columns, rows: Ints
    ) -> Floats:
        """As ``fed``, of some of them, if others on the nodes lent all cores that they can."""
        return self._lent.of(facts.slots[rows], [jobs[row] for row in rows.tolist()], columns)

    def configuration(
        self, plain: Configuration, replicas: int, local: int, accumulation: int
    ) -> Configuration:
        """``plain`` with that batch, 0 for its own: the same object whenever asked."""
        if not local:
            return plain
        known = self._configurations
        key = (plain.gpu_type, plain.gpus, plain.nodes, replicas, local, accumulation)
        found = known.get(key)
        if found is None:
            if len(known) > _MOST_CONFIGURATIONS:
                known.clear()
            found = known[key] = Configuration(
                gpus=plain.gpus,
                nodes=plain.nodes,
                gpu_type=plain.gpu_type,
                batch=BatchSize(local=local, replicas=replicas, accumulation=accumulation),
            )
        return found

    def _write(self, shapes: Shapes, status: JobStatus, before: _Origin | None) -> _Origin:
        """Write all facts of a job anew."""
        self._version += 1
        job, profile, scaling = status.job, status.profile, status.profile.scaling
        models = shapes.models(job.job_id, scaling) if scaling else {}
        slot = before.slot if before else len(self._origins)
        for number, kind in enumerate(self.kinds):
            may = not job.gpu_types or kind in job.gpu_types
            learner = learner_on(status, kind, models[kind]) if may and kind in models else None
            self._units[slot, number] = gpus_per_replica(job, scaling, kind) if may else 0
            self._most[slot, number] = job.most_on(kind)
            self._rates[slot, number] = profile.gpu_rate_per_gpu.get(kind, np.nan)
            self._numbers[slot, number] = np.nan if learner is None else learner.numbers
        self._whole[slot] = (
            *(job.least_gpus, job.most_gpus, scaling.explored_gpus if scaling else 0),
            *(job.gpus // (job.nodes or 1), min_mem_mib(status)),
            *(job.elasticity is _RIGID, job.elasticity is _ADAPTIVE),
            job.elasticity is _RIGID or job.batch is None,
            *(0, 0, 0, 0),
        )
        self._shares.forget(slot)
        self._lent.forget(slot)
        origin = _Origin(
            slot=slot,
            job=job,
            gpu_rates=profile.gpu_rate_per_gpu,
            scaling=scaling,
            pipeline=profile.pipeline,
            table=profile.table,
            models=models,
        )
        self._origins[job.job_id] = origin
        return origin

    def _hold(self, origin: _Origin, status: JobStatus, now: Placement | None) -> None:
        """Write what a job holds."""
        self._version += 1
        origin.placement, origin.held = now, held_key(status)
        batch = now.batch if now else None
        self._whole[origin.slot, Fact.HELD :] = (
            now.gpus if now else 0,
            *((batch.replicas, batch.local, batch.accumulation) if batch else (0, 0, 0)),
        )

    def _note(self, noisy: Sequence[tuple[int, float, float]]) -> None:
        """Write new statistics, by slot, of jobs of which nothing else is new."""
        if noisy:
            self._noise += 1
            slots = [slot for slot, _, _ in noisy]
            part = self._numbers[slots]
            there = np.isfinite(part[:, :, :1])
            new = np.array([pair for _, *pair in noisy])[:, None, :]
            part[:, :, _STATISTICS] = np.where(there, new, np.nan)
            self._numbers[slots] = part

    def _reach(self, slots: int) -> None:
        """Make the tables large enough."""
        there = len(self._units)
        if slots > there:
            more = max(2 * there, slots) - there
            self._units, self._most, self._rates, self._numbers, self._whole = (
                np.concatenate((one, np.zeros((more, *one.shape[1:]), dtype=one.dtype)))
                for one in (self._units, self._most, self._rates, self._numbers, self._whole)
            )


class _Delivered:
    """What pipelines deliver in the columns of the last round, by slot; NaN if not yet known."""

    __slots__ = ("_rates", "_supplies")

    def __init__(self, supplies: Supplies) -> None:
        self._supplies = supplies
        self._rates = np.zeros((0, 0))

    def __len__(self) -> int:
        return len(self._supplies)

    def of(self, slots: Ints, jobs: Sequence[JobStatus], columns: Columns) -> Floats:
        """The rows of ``jobs``, which have these slots."""
        width, most = len(columns.all), int(slots.max(initial=-1)) + 1
        if self._supplies.turn_to(columns) or self._rates.shape[1] != width:
            self._rates = np.full((most, width), np.nan)
        elif len(self._rates) < most:
            more = np.full((max(2 * len(self._rates), most) - len(self._rates), width), np.nan)
            self._rates = np.vstack((self._rates, more))
        for row in np.nonzero(np.isnan(self._rates[slots, 0]))[0].tolist() if width else ():
            self._rates[slots[row]] = self._supplies.row(jobs[row], columns)
        return np.asarray(self._rates[slots])

    def forget(self, slot: int) -> None:
        """The job of that slot is not what it was."""
        if slot < len(self._rates):
            self._rates[slot] = np.nan


def _differ(origin: _Origin, new: Scaling | None, shapes: Shapes, job_id: int) -> bool:
    """Whether more is new of a job's scaling than the statistics of its gradient."""
    old = origin.scaling
    return (
        old is None
        or new is None
        or old.accumulate is not new.accumulate
        or old.own_batch != new.own_batch
        or origin.models is not shapes.models(job_id, new)
    )
