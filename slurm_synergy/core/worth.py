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

__all__ = ["Worth", "learner_on", "worth_of"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NOTHING = -1
"""The current column of a job that holds nothing that is a column."""

# A data loader changes its batch only for a clear gain (algorithms C.4).
_BATCH_GAIN = 1.05


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
    limits = scale_limits(
        facts[Fact.LEAST], facts[Fact.MOST], facts[Fact.HELD], facts[Fact.EXPLORED]
    )
    elastic = facts[Fact.IS_RIGID] == 0
    # The smallest that the pool offers may be twice the smallest that a job allows.
    reach = np.maximum(limits, 2 * facts[Fact.LEAST])[elastic]
    most = int(reach.max()) if len(reach) else None
    columns = known.offers.of(jobs, facts.held, most, taken or {})
    cells = _Cells(jobs, columns, limits, known, facts)
    cells.fill()
    least = np.where(cells.goodput > 0, columns.gpus[None, :], np.inf).min(axis=1, initial=np.inf)
    return Worth(
        jobs=tuple(jobs),
        configurations=columns.all,
        usage=columns.usage,
        goodput=cells.goodput,
        local_batch=cells.local,
        accumulation=cells.passes,
        replicas=cells.replicas,
        known=known,
        least_gpus=np.where(np.isfinite(least), least, 1.0),
        current=cells.current,
    )


class _Cells:
    """The cells of the matrix while they are being filled."""

    def __init__(
        self,
        jobs: Sequence[JobStatus],
        columns: Columns,
        limits: Ints,
        known: Facts,
        facts: FactsOf,
    ) -> None:
        self._jobs, self._columns, self._limits = jobs, columns, limits
        self._known, self._facts = known, facts
        self._units, self._numbers = facts.units, facts.numbers
        self._modelled = np.isfinite(facts.numbers[:, :, Row.COMPUTE])
        self.replicas = columns.gpus[None, :] // np.maximum(facts.units[:, columns.kind], 1)
        there = [columns.at.get(key, NOTHING) for key in facts.held]
        self.current = np.array(there, dtype=np.int64)
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
        rates = self._facts.rates[:, columns.kind]
        fed = self._known.fed(self._facts, self._jobs, columns)
        # Where a share delivers nothing its speed is as good as not known.
        alive = open_ & (fed > 0)
        modelled = alive & self._modelled[:, columns.kind]
        linear = alive & ~modelled & np.isfinite(rates)
        whole = rates * columns.gpus[None, :]
        self.goodput[linear] = np.minimum(whole, fed)[linear]
        adaptive = self._facts[Fact.IS_ADAPTIVE].astype(bool)
        self._evaluate(modelled & adaptive[:, None], fed, chooses=True)
        self._evaluate(modelled & ~adaptive[:, None], fed, chooses=False)
        self._keep_batches(modelled & adaptive[:, None], fed)
        own = self._facts[Fact.OWNS_BATCH].astype(bool)
        self.local[own] = 0  # its batch is its own
        self.passes[own] = 0
        self._fill_unknown(certain & ~modelled & ~linear)

    def _open(self) -> tuple[Bools, Bools]:
        """Cells on which a job may run now, and those of them that need no known speed."""
        columns, facts = self._columns, self._facts
        units = self._units[:, columns.kind]
        gpus = columns.gpus[None, :]
        ours = (units > 0) & (gpus % np.maximum(units, 1) == 0)
        ours &= (facts[Fact.IS_RIGID] == 0)[:, None]
        ours &= (gpus >= facts[Fact.LEAST][:, None]) & (gpus <= facts[Fact.MOST][:, None])
        ours[:, columns.offered :] = False
        smallest = np.zeros_like(ours)
        for number in range(self._units.shape[1]):
            here = ours & (columns.kind == number)[None, :]
            least = np.where(here, gpus, np.iinfo(np.int64).max).min(axis=1)
            smallest |= here & (gpus == least[:, None])
        open_ = (ours & (gpus <= self._limits[:, None])) | smallest
        self._open_own(open_, smallest)
        self._close_small(open_)
        return open_, open_ & smallest

    def _close_small(self, open_: Bools) -> None:
        """Close what has not the memory that the processes need, on any node."""
        columns = self._columns
        there = self._known.most_mib[columns.kind]
        asked = self._facts[Fact.ASKED][:, None]
        need = self._facts[Fact.NEED_MIB].astype(float)[:, None]
        each = columns.each.astype(float)[None, :]
        open_ &= need * np.maximum(each / asked, 1.0) <= there[None, :]

    def _open_own(self, open_: Bools, certain: Bools) -> None:
        """Open what rigid jobs ask for, and what elastic ones hold if they may."""
        columns, facts = self._columns, self._facts
        for row in np.nonzero(facts[Fact.IS_RIGID])[0].tolist():
            job = self._jobs[row].job
            for kind in job.gpu_types or columns.kinds:
                column = columns.at.get((kind, job.gpus, job.nodes))
                if column is not None:
                    open_[row, column] = certain[row, column] = True
        rows = np.nonzero((facts[Fact.IS_RIGID] == 0) & (self.current != NOTHING))[0]
        at = self.current[rows]
        units, gpus = self._units[rows, columns.kind[at]], columns.gpus[at]
        stays = (units > 0) & (gpus % np.maximum(units, 1) == 0)
        stays &= (facts[Fact.LEAST][rows] <= gpus) & (gpus <= facts[Fact.MOST][rows])
        open_[rows[stays], at[stays]] = certain[rows[stays], at[stays]] = True

    def _evaluate(self, cells: Bools, fed: Floats, *, chooses: bool) -> None:
        """Fill ``cells`` by the throughput models, of jobs that choose their batch or do not."""
        rows, at = np.nonzero(cells)
        if not len(rows):
            return
        columns = self._columns
        kinds, nodes = columns.kind[at], columns.nodes[at]
        numbers = self._numbers[rows, kinds]
        replicas = self.replicas[rows, at]
        if chooses:
            slots, curves = self._facts.slots[rows], self._known.curves
            found = curves.best(slots, columns.all, at, numbers, nodes, replicas, fed[rows, at])
        else:
            found = best_of(numbers, nodes, replicas, fed[rows, at], 1)
        self.goodput[rows, at], self.local[rows, at], self.passes[rows, at] = found

    def _keep_batches(self, cells: Bools, fed: Floats) -> None:
        """Let jobs keep their batch where they are, unless another is clearly better."""
        columns, facts = self._columns, self._facts
        rows = np.nonzero((self.current != NOTHING) & (facts[Fact.REPLICAS] > 0))[0]
        rows = rows[cells[rows, self.current[rows]]]
        rows = rows[self._allows(rows, self.current[rows])]
        at = self.current[rows]
        replicas, local, passes = facts.whole[rows, Fact.REPLICAS :].T
        numbers = self._numbers[rows, columns.kind[at]]
        now_ = goodput_of(numbers, columns.nodes[at], replicas, local, passes, fed[rows, at])
        stays = now_ * _BATCH_GAIN >= self.goodput[rows, at]
        rows, at = rows[stays], at[stays]
        self.goodput[rows, at] = now_[stays]
        self.local[rows, at], self.passes[rows, at] = local[stays], passes[stays]

    def _allows(self, rows: Ints, at: Ints) -> Bools:
        """Whether the batches that jobs have are such that they may still have."""
        kinds = self._columns.kind[at]
        limits = self._numbers[rows, kinds].T
        replicas, local, passes = self._facts.whole[rows, Fact.REPLICAS :].T
        total = local * replicas * (passes + 1)
        found: Bools = replicas == self.replicas[rows, at]
        found &= (limits[Row.LOCAL_LEAST] <= local) & (local <= limits[Row.LOCAL_MOST])
        found &= limits[Row.INITIAL] <= total
        found &= total < limits[Row.LARGEST] + replicas * (passes + 1)
        return found

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
