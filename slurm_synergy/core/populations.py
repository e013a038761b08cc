"""What a run remembers of a search for shares: the population it left, and what was decided."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.model import Configuration
from slurm_synergy.core.room import GpuLayout

__all__ = ["Memory", "Past"]

States = NDArray[np.int16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """A population with the jobs of its rows and the nodes of its columns."""

    job_ids: tuple[int, ...]
    columns: tuple[str, ...]
    population: States

    def rows_of(self, job_ids: Sequence[int], columns: tuple[str, ...]) -> States | None:
        """The population for other jobs: new ones have nothing; None for other nodes."""
        if columns != self.columns:
            return None
        at = {job_id: row for row, job_id in enumerate(self.job_ids)}
        members = self.population.shape[2]
        found = np.zeros((len(columns), len(job_ids), members), dtype=np.int16)
        here = [row for row, job_id in enumerate(job_ids) if job_id in at]
        found[:, here] = self.population[:, [at[job_ids[row]] for row in here]]
        return found


@dataclass(slots=True)
class Memory:
    """The last population, of one run; the next search begins with it.

    A round that is decided twice begins where it began the first time. ``decided`` is what the last
    search gave to each job, and where.
    """

    number: int = -1
    begun: Past | None = None
    ended: Past | None = None
    decided: Mapping[int, tuple[Configuration, GpuLayout]] | None = None

    def before(self, number: int) -> Past | None:
        """What the search of the round with that number begins with."""
        if number != self.number:
            self.number, self.begun = number, self.ended
        return self.begun
