"""Finish-time fairness by a linear program (algorithms D.3).

This is Themis (NSDI '20) as simulations of the papers have it: not the auction, but the shares of
time under which the largest ratio is least of a job's whole time in the system to that with an
equal part of the cluster to itself. ``ftf`` serves jobs in the order of such a ratio; this policy
solves for all of them together. Rounds are those of Gavel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.linear import Answer, maximise
from slurm_synergy.policies.fair_times import Work, equal_rates
from slurm_synergy.policies.time_shares import Demand, SharedTime, Shares

__all__ = ["THEMIS", "Themis"]

Floats = NDArray[np.float64]

_DIGITS = 5
# The largest ratio is found to this part of it.
_PRECISION = 1e-3
_MOST_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Themis(SharedTime):
    """The policy. ``quantum_s`` and ``fills`` are those of every policy that shares time."""

    name: str = "themis"

    def shares(self, demand: Demand) -> Shares:
        """The shares of time with the least worst ratio, and of these the fastest."""
        work = Work(demand, self.quantum_s)
        program = _Program(demand)
        # An equal cut of the cluster is one solution.
        high = float(np.max(work.ratios(program.equal), initial=0.0))
        low = float(np.max(work.age_s / work.alone_s, initial=0.0))
        best = program.solve(work.least_rates(high) * (1 - _PRECISION))
        for _ in range(_MOST_STEPS):
            if high - low <= _PRECISION * high:
                break
            middle = (low + high) / 2
            found = program.solve(work.least_rates(middle))
            if found.values is None:
                low = middle
            else:
                high, best = middle, found
        return Shares(
            parts=program.parts(best),
            report={
                "status": best.status,
                "objective": high,
                "jobs": len(demand.jobs),
            },
        )


class _Program:
    """Shares of time that give each job at least certain samples/s.

    Among these, those with the most in total, each job's speed relative to its best one.
    """

    def __init__(self, demand: Demand) -> None:
        self._rates = demand.rates.rates
        jobs, kinds = self._rates.shape
        best = self._rates.max(axis=1, initial=0.0)
        self._scale = np.where(best > 0, best, 1.0)
        self.equal = equal_rates(demand)
        self._speeds = self._rates / self._scale[:, None]
        once = np.kron(np.eye(jobs), np.ones(kinds))
        there = np.kron(demand.gpus, np.eye(kinds))
        each = np.zeros((jobs, jobs * kinds))
        for row in range(jobs):
            each[row, row * kinds : (row + 1) * kinds] = self._speeds[row]
        self._rows = np.concatenate([once, there, each])
        self._limits = np.concatenate([np.ones(jobs), demand.capacity, np.full(jobs, np.inf)])

    def solve(self, least_rates: Floats) -> Answer:
        """An answer without values where that is impossible."""
        runs = self._rates.max(axis=1, initial=0.0) > 0
        least = np.where(runs, least_rates / self._scale, 0.0)
        if np.any(least > 1.0 + 1e-9):
            return Answer(status="infeasible")
        free = np.full(len(self._rows) - len(least), -np.inf)
        return maximise(
            self._speeds.ravel(),
            self._rows,
            self._limits,
            most=(self._rates > 0).astype(float).ravel(),
            row_least=np.concatenate([free, least]),
        )

    def parts(self, answer: Answer) -> Floats:
        """The shares ``(J, T)``; none where there is no answer."""
        if answer.values is None:
            return np.zeros_like(self._rates)
        return np.clip(np.round(answer.values.reshape(self._rates.shape), _DIGITS), 0.0, 1.0)


THEMIS = Themis()
"""The policy called ``themis``."""
