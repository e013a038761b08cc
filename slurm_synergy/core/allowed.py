"""On which configurations jobs may run now: the cells of Sia's matrix that are open. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.columns import Columns
from slurm_synergy.core.facts import Fact, FactsOf
from slurm_synergy.core.model import JobStatus

__all__ = ["NOTHING", "Where"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_MOST: Final = int(np.iinfo(np.int64).max)

NOTHING: Final = -1
"""The current column of a job that holds nothing that is a column."""


class Where:
    """Where J jobs may run, of K columns.

    ``current`` ``(J,)`` are the columns that they hold, or NOTHING, ``most_mib`` the most memory of
    a node of each GPU type.
    """

    def __init__(
        self,
        columns: Columns,
        facts: FactsOf,
        jobs: Sequence[JobStatus],
        current: Ints,
        most_mib: Floats,
    ) -> None:
        self._columns, self._facts, self._jobs = columns, facts, jobs
        self._current, self._most_mib = current, most_mib

    def cells(self, limits: Ints) -> tuple[Bools, Bools]:
        """Cells ``(J, K)`` that are open, and those of them that need no known speed.

        ``limits`` ``(J,)`` are the most GPUs that each may have next.
        """
        columns, facts = self._columns, self._facts
        units = facts.units[:, columns.kind]
        gpus = columns.gpus[None, :]
        ours = (units > 0) & (gpus % np.maximum(units, 1) == 0)
        ours &= (facts[Fact.IS_RIGID] == 0)[:, None]
        ours &= (gpus >= facts[Fact.LEAST][:, None]) & (gpus <= facts.most[:, columns.kind])
        ours[:, columns.offered :] = False
        smallest = np.zeros_like(ours)
        for number in range(facts.units.shape[1]):
            here = ours & (columns.kind == number)[None, :]
            least = np.where(here, gpus, _MOST).min(axis=1)
            smallest |= here & (gpus == least[:, None])
        open_ = (ours & (gpus <= limits[:, None])) | smallest
        self._open_own(open_, smallest)
        self._close_small(open_)
        return open_, open_ & smallest

    def _close_small(self, open_: Bools) -> None:
        """Close what has not the memory that the processes need, on any node."""
        columns, facts = self._columns, self._facts
        there = self._most_mib[columns.kind]
        asked = facts[Fact.ASKED][:, None]
        need = facts[Fact.NEED_MIB].astype(float)[:, None]
        each = columns.each.astype(float)[None, :]
        open_ &= need * np.maximum(each / asked, 1.0) <= there[None, :]

    def _open_own(self, open_: Bools, certain: Bools) -> None:
        """Open what rigid jobs ask for, and what elastic ones hold if they may."""
        columns, facts, current = self._columns, self._facts, self._current
        for row in np.nonzero(facts[Fact.IS_RIGID])[0].tolist():
            job = self._jobs[row].job
            for kind in job.gpu_types or columns.kinds:
                column = columns.at.get((kind, job.gpus, job.nodes))
                if column is not None:
                    open_[row, column] = certain[row, column] = True
        rows = np.nonzero((facts[Fact.IS_RIGID] == 0) & (current != NOTHING))[0]
        at = current[rows]
        units, gpus = facts.units[rows, columns.kind[at]], columns.gpus[at]
        stays = (units > 0) & (gpus % np.maximum(units, 1) == 0)
        stays &= (facts[Fact.LEAST][rows] <= gpus) & (gpus <= facts[Fact.MOST][rows])
        open_[rows[stays], at[stays]] = certain[rows[stays], at[stays]] = True
