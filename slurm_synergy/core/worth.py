"""The matrix of jobs and configurations: how fast each job would learn on each (Sia, section 3.3).

Rows are the jobs that compete, columns the configurations of the pool; of the other shapes that
users ask for or jobs hold, each is a column too, which counts as the smallest configuration that
covers it. Goodput counts the input pipeline: no GPU is faster than what its node's proportional
share of cores and memory delivers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.batch_curves import Row, best_of, goodput_of
from slurm_synergy.core.columns import Columns, scale_limits
from slurm_synergy.core.configurations import Usage
from slurm_synergy.core.facts import Fact, Facts, FactsOf, learner_on
from slurm_synergy.core.model import Configuration, JobStatus, Snapshot

__all__ = ["BATCH_GAIN", "Worth", "learner_on", "worth_of"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NOTHING = -1
"""The current column of a job that holds nothing that is a column."""

BATCH_GAIN = 1.05
"""A data loader changes its batch only for a clear gain (algorithms C.4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """J jobs and K configurations.

    ``goodput`` ``(J, K)`` is in samples/s of the job, 0 where it cannot or must not run.
    ``local_batch`` and ``accumulation`` ``(J, K)`` are 0 where its batch is its own affair.
    ``replicas`` ``(J, K)`` are the copies of its model there.
    ``least_gpus`` ``(J,)`` are the GPUs of its smallest configuration, ``current`` ``(J,)`` the
    column that it holds, or NOTHING. ``usage`` has the rows that bound a choice.
    """

    jobs: tuple[JobStatus, ...]
    configurations: tuple[Configuration, ...]
    usage: Usage
    goodput: Floats
    local_batch: Ints
    accumulation: Ints
    replicas: Ints
    known: Facts
    least_gpus: Floats
    current: Ints

    def configuration(self, row: int, column: int) -> Configuration:
        """The configuration of a cell, with its batch size."""
        return self.cells([row], [column])[0]

    def cells(self, rows: Sequence[int], columns: Sequence[int]) -> list[Configuration]:
        """The configurations of cells; equal ones are the same object in all rounds."""
        at = list(rows), list(columns)
        local, passes = self.local_batch[at].tolist(), self.accumulation[at].tolist()
        replicas = self.replicas[at].tolist()
        return [
            self.known.configuration(self.configurations[column], *batch)
            for column, *batch in zip(at[1], replicas, local, passes, strict=True)
        ]


def worth_of(
    snapshot: Snapshot, jobs: Sequence[JobStatus], taken: Mapping[str, int] | None = None
) -> Worth:
    """The matrix for ``jobs``, when ``taken`` GPUs of each node are out of their reach."""
    known = Facts.of_snapshot(snapshot)
    facts = known.of(snapshot, jobs)
    frame = _Frame.of(snapshot, jobs, taken or {}, known, facts)
    columns = frame.columns
    cells = frame.cells(known, facts)
    return Worth(
        jobs=tuple(jobs),
        configurations=columns.all,
        usage=columns.usage,
        goodput=cells.goodput,
        local_batch=cells.local,
        accumulation=cells.passes,
        replicas=frame.replicas,
        known=known,
        least_gpus=cells.least_gpus,
        current=frame.current,
    )


class _Some:
    """Some cells of the matrix, with what their goodput depends on beside their learners."""

    __slots__ = ("at", "fed", "kinds", "nodes", "replicas", "rows")

    def __init__(self, rows: Ints, at: Ints, columns: Columns, replicas: Ints, fed: Floats) -> None:
        self.rows, self.at = rows, at
        self.kinds, self.nodes = columns.kind[at], columns.nodes[at]
        self.replicas, self.fed = replicas[rows, at], fed[rows, at]

    def numbers(self, facts: FactsOf) -> Floats:
        """The learners of these cells."""
        return np.asarray(facts.numbers[self.rows, self.kinds])


class _Question:
    """Which batches are best in some cells; asked anew whenever there is other noise.

    ``keeping`` are those cells where a job holds a batch that it may keep, ``kept`` these batches.
    """

    __slots__ = ("cells", "curves", "keeping", "kept", "number")

    def __init__(self, number: int, cells: _Some, keeping: _Some, kept: Ints) -> None:
        self.number, self.cells = number, cells
        self.keeping, self.kept = keeping, kept
        self.curves: Ints | None = None


class _Frame:
    """All of the matrix but what follows from the noise of gradients, which is new all the time.

    It serves as long as the jobs, what they hold and how fast they are believed to be are the same.
    ``goodput`` has the cells that do not depend on that noise; ``choosing`` are those of jobs that
    may choose their batch, ``hoping`` those of them where more cores could be lent than their
    share. ``unknown`` are cells of which no speed is known.
    """

    def __init__(
        self,
        made_from: object,
        jobs: Sequence[JobStatus],
        taken: Mapping[str, int],
        known: Facts,
        facts: FactsOf,
    ) -> None:
        self.made_from = made_from
        self._cells: _Cells | None = None
        self._jobs, self._known, self._facts = jobs, known, facts
        self._limits = scale_limits(
            facts[Fact.LEAST], facts[Fact.MOST], facts[Fact.HELD], facts[Fact.EXPLORED]
        )
        elastic = facts[Fact.IS_RIGID] == 0
        # The smallest that the pool offers may be twice the smallest that a job allows.
        reach = np.maximum(self._limits, 2 * facts[Fact.LEAST])[elastic]
        most = int(reach.max()) if len(reach) else None
        self.columns = known.offers.of(jobs, facts.held, most, taken)
        columns = self.columns
        self.replicas = columns.gpus[None, :] // np.maximum(facts.units[:, columns.kind], 1)
        there = [columns.at.get(key, NOTHING) for key in facts.held]
        self.current = np.array(there, dtype=np.int64)
        cells = (len(jobs), len(columns.all))
        self.goodput = np.zeros(cells)
        self.local = np.zeros(cells, dtype=np.int64)
        self.passes = np.zeros(cells, dtype=np.int64)
        if self.goodput.size:
            self._fill()
        # What is kept between rounds must not keep their jobs.
        del self._jobs, self._known, self._facts

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        jobs: Sequence[JobStatus],
        taken: Mapping[str, int],
        known: Facts,
        facts: FactsOf,
    ) -> _Frame:
        """The frame for ``jobs``: the last one, if that serves."""
        key = known, facts.version, facts.slots.tobytes(), tuple(sorted(taken.items()))
        found = snapshot.of_nodes.get(cls)
        if not isinstance(found, cls) or found.made_from != key:
            found = snapshot.of_nodes[cls] = cls(key, jobs, taken, known, facts)
        return found

    def cells(self, known: Facts, facts: FactsOf) -> _Cells:
        """All cells, with the statistics of ``facts``."""
        if self._cells is None or self._cells.noise != facts.noise:
            self._cells = _Cells(self, known, facts)
        return self._cells

    def _fill(self) -> None:
        columns, facts = self.columns, self._facts
        open_, certain = self._open()
        rates = facts.rates[:, columns.kind]
        fed = self._known.fed(facts, self._jobs, columns)
        # Where a share delivers nothing its speed is as good as not known.
        alive = open_ & (fed > 0)
        modelled = alive & np.isfinite(facts.numbers[:, :, Row.COMPUTE])[:, columns.kind]
        linear = alive & ~modelled & np.isfinite(rates)
        whole = rates * columns.gpus[None, :]
        self.goodput[linear] = np.minimum(whole, fed)[linear]
        adaptive = facts[Fact.IS_ADAPTIVE].astype(bool)
        fixed = self._all_of(modelled & ~adaptive[:, None], fed)
        if len(fixed.rows):
            numbers = fixed.numbers(facts)
            found = best_of(numbers, fixed.nodes, fixed.replicas, fixed.fed, 1)
            self.goodput[fixed.rows, fixed.at], *batch = found
            self.local[fixed.rows, fixed.at], self.passes[fixed.rows, fixed.at] = batch
        choosing = modelled & adaptive[:, None]
        self.choosing = self._question(0, choosing, fed)
        self.hoping: _Question | None = None
        if (choosing & np.isfinite(fed)).any():
            lent = self._known.lent(self._jobs, columns)
            self.hoping = self._question(1, choosing & (lent > fed), lent)
        self.owns_batch = np.nonzero(facts[Fact.OWNS_BATCH])[0]
        unknown = certain & ~modelled & ~linear
        self.unknown_rows = np.nonzero(unknown.any(axis=1))[0]
        self.unknown = unknown[self.unknown_rows]

    def _question(self, number: int, cells: Bools, fed: Floats) -> _Question:
        return _Question(number, self._all_of(cells, fed), *self._keeping(cells, fed))

    def _all_of(self, cells: Bools, fed: Floats) -> _Some:
        rows, at = np.nonzero(cells)
        return self._some(rows, at, fed)

    def _some(self, rows: Ints, at: Ints, fed: Floats) -> _Some:
        return _Some(rows, at, self.columns, self.replicas, fed)

    def _open(self) -> tuple[Bools, Bools]:
        """Cells on which a job may run now, and those of them that need no known speed."""
        columns, facts = self.columns, self._facts
        units = facts.units[:, columns.kind]
        gpus = columns.gpus[None, :]
        ours = (units > 0) & (gpus % np.maximum(units, 1) == 0)
        ours &= (facts[Fact.IS_RIGID] == 0)[:, None]
        ours &= (gpus >= facts[Fact.LEAST][:, None]) & (gpus <= facts.most[:, columns.kind])
        ours[:, columns.offered :] = False
        smallest = np.zeros_like(ours)
        for number in range(facts.units.shape[1]):
            here = ours & (columns.kind == number)[None, :]
            least = np.where(here, gpus, np.iinfo(np.int64).max).min(axis=1)
            smallest |= here & (gpus == least[:, None])
        open_ = (ours & (gpus <= self._limits[:, None])) | smallest
        self._open_own(open_, smallest)
        self._close_small(open_)
        return open_, open_ & smallest

    def _close_small(self, open_: Bools) -> None:
        """Close what has not the memory that the processes need, on any node."""
        columns, facts = self.columns, self._facts
        there = self._known.most_mib[columns.kind]
        asked = facts[Fact.ASKED][:, None]
        need = facts[Fact.NEED_MIB].astype(float)[:, None]
        each = columns.each.astype(float)[None, :]
        open_ &= need * np.maximum(each / asked, 1.0) <= there[None, :]

    def _open_own(self, open_: Bools, certain: Bools) -> None:
        """Open what rigid jobs ask for, and what elastic ones hold if they may."""
        columns, facts = self.columns, self._facts
        for row in np.nonzero(facts[Fact.IS_RIGID])[0].tolist():
            job = self._jobs[row].job
            for kind in job.gpu_types or columns.kinds:
                column = columns.at.get((kind, job.gpus, job.nodes))
                if column is not None:
                    open_[row, column] = certain[row, column] = True
        rows = np.nonzero((facts[Fact.IS_RIGID] == 0) & (self.current != NOTHING))[0]
        at = self.current[rows]
        units, gpus = facts.units[rows, columns.kind[at]], columns.gpus[at]
        stays = (units > 0) & (gpus % np.maximum(units, 1) == 0)
        stays &= (facts[Fact.LEAST][rows] <= gpus) & (gpus <= facts[Fact.MOST][rows])
        open_[rows[stays], at[stays]] = certain[rows[stays], at[stays]] = True

    def _keeping(self, cells: Bools, fed: Floats) -> tuple[_Some, Ints]:
        """Cells of jobs whose batches are such that they may still have them, and those batches."""
        facts = self._facts
        rows = np.nonzero((self.current != NOTHING) & (facts[Fact.REPLICAS] > 0))[0]
        rows = rows[cells[rows, self.current[rows]]]
        rows = rows[self._allows(rows, self.current[rows])]
        some = self._some(rows, self.current[rows], fed)
        return some, facts.whole[rows, Fact.REPLICAS :].T

    def _allows(self, rows: Ints, at: Ints) -> Bools:
        """Whether the batches that jobs have are such that they may still have."""
        kinds = self.columns.kind[at]
        limits = self._facts.numbers[rows, kinds].T
        replicas, local, passes = self._facts.whole[rows, Fact.REPLICAS :].T
        total = local * replicas * (passes + 1)
        found: Bools = replicas == self.replicas[rows, at]
        found &= (limits[Row.LOCAL_LEAST] <= local) & (local <= limits[Row.LOCAL_MOST])
        found &= limits[Row.INITIAL] <= total
        found &= total < limits[Row.LARGEST] + replicas * (passes + 1)
        return found


class _Cells:
    """The cells of the matrix, filled."""

    def __init__(self, frame: _Frame, known: Facts, facts: FactsOf) -> None:
        self.noise = facts.noise
        self.goodput = frame.goodput.copy()
        self.local, self.passes = frame.local.copy(), frame.passes.copy()
        if self.goodput.size:
            self._choose_batches(frame, frame.choosing, known, facts)
            if frame.hoping is not None:
                # What a configuration is worth is what it is on the job's share.
                goodput = self.goodput.copy()
                self._choose_batches(frame, frame.hoping, known, facts)
                self.goodput = goodput
            self.local[frame.owns_batch] = 0  # its batch is its own
            self.passes[frame.owns_batch] = 0
            self._fill_unknown(frame)
        gpus = frame.columns.gpus[None, :]
        least = np.where(self.goodput > 0, gpus, np.inf).min(axis=1, initial=np.inf)
        self.least_gpus = np.where(np.isfinite(least), least, 1.0)

    def _choose_batches(
        self, frame: _Frame, asked: _Question, known: Facts, facts: FactsOf
    ) -> None:
        """Fill the cells of jobs that choose their batch by the throughput models."""
        some = asked.cells
        if not len(some.rows):
            return
        numbers, curves = some.numbers(facts), known.curves
        if asked.curves is None:
            slots, all_ = facts.slots[some.rows], frame.columns.all
            asked.curves = curves.find(slots, all_, some.at, numbers, some.nodes, some.replicas)
        shape = some.nodes, some.replicas, some.fed
        found = curves.best(asked.curves, numbers, *shape, question=asked.number)
        rows, at = some.rows, some.at
        self.goodput[rows, at], self.local[rows, at], self.passes[rows, at] = found
        self._keep_batches(asked, facts)

    def _keep_batches(self, asked: _Question, facts: FactsOf) -> None:
        """Let jobs keep their batch where they are, unless another is clearly better."""
        some = asked.keeping
        if not len(some.rows):
            return
        rows, at, (replicas, local, passes) = some.rows, some.at, asked.kept
        numbers = some.numbers(facts)
        now_ = goodput_of(numbers, some.nodes, replicas, local, passes, some.fed)
        stays = now_ * BATCH_GAIN >= self.goodput[rows, at]
        rows, at = rows[stays], at[stays]
        self.goodput[rows, at] = now_[stays]
        self.local[rows, at], self.passes[rows, at] = local[stays], passes[stays]

    def _fill_unknown(self, frame: _Frame) -> None:
        """A speed that is not known is taken as the least that is, and to grow with the GPUs."""
        rows, cells = frame.unknown_rows, frame.unknown
        if not len(rows):
            return
        part, gpus = self.goodput[rows], frame.columns.gpus[None, :]
        least = np.where(part > 0, part, np.inf).min(axis=1)
        least = np.where(np.isfinite(least), least, 1.0)
        fewest = np.where(cells, gpus, np.iinfo(np.int64).max).min(axis=1)
        guess = least[:, None] * gpus / fewest[:, None]
        self.goodput[rows] = np.where(cells, guess, part)
