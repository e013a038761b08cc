"""Shockwave (NSDI '23; algorithms D.4): the next rounds are planned together.

An integer program gives each job some of the rounds of a window so that the sum of the logarithms
of what is done is large and the last job ends early, and no job ends much later than in an equal
part of the cluster. Where not all can, those that are treated worst weigh more. A second program
lays the rounds out. The first of them is played; the window then moves on. GPU types are taken to
be alike, as fast as their mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.rounds_of_time import Turn
from slurm_synergy.core.snapshot import held
from slurm_synergy.core.window import Program, Window, ordering_program, window_program
from slurm_synergy.linear import Answer, maximise
from slurm_synergy.policies.fair_times import Work
from slurm_synergy.policies.time_shares import Demand, SharedTime, Shares

__all__ = ["SHOCKWAVE", "Shockwave"]

Floats = NDArray[np.float64]

# The part of what is fair within which a job is to end.
_FAIR_PART = 0.9
# For jobs that one more round completes.
_LAST_POWER = 100.0
# Larger weights leave nothing of the others in the arithmetic of the solver.
_MOST_WEIGHT = 1e6
# Of equal jobs those that run go on.
_RUNNING = 1.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Shockwave(SharedTime):
    """The policy. ``quantum_s`` and ``fills`` are those of every policy that shares time.

    A window has ``rounds`` quanta. ``makespan`` is what a second of the last job's end counts,
    ``power`` (lambda) how much more a job weighs that is treated unfairly, ``most_ratio`` from
    which ratio to a fair finish on that is so. The solver stops at ``gap`` from the best, relative,
    or after ``limit_s`` seconds.
    """

    name: str = "shockwave"
    rounds: int = 5
    makespan: float = 1e-9
    power: float = 12.0
    most_ratio: float = 1.0
    gap: float = 1e-3
    limit_s: float = 15.0

    def shares(self, demand: Demand) -> Shares:
        """Who is served in this round, in order; parts of the time are left open."""
        work = Work(demand, self.quantum_s)
        runs = np.nonzero(work.alone_rates > 0)[0]
        counts, ratios, answer, fair = self._counts(demand, work, runs)
        first, ordered = self._first(demand, work, runs, counts, ratios)
        return Shares(
            parts=np.zeros_like(demand.rates.rates),
            order=_turns(demand, work, first),
            report={
                "status": answer.status,
                "objective": answer.objective,
                "gap": answer.gap,
                "jobs": len(demand.jobs),
                "fair": fair,
                "ordering": ordered,
            },
        )

    def _window(self, demand: Demand, work: Work, rows: NDArray[np.int64]) -> Window:
        whole = work.done + work.left
        done = work.done[rows] / np.maximum(whole[rows], 1e-12)
        whole_s = np.maximum(whole[rows], 1e-12) / work.alone_rates[rows]
        rest_s = work.left[rows] / work.alone_rates[rows]
        crowd = _crowd(demand)
        # age + window + what then is left, at its part of the cluster <= ratio x fair finish
        may_s = self.most_ratio * _FAIR_PART * work.alone_s[rows] - work.age_s[rows]
        later_s = (may_s - self.quantum_s * self.rounds) / crowd
        return Window(
            rounds=self.rounds,
            round_s=self.quantum_s,
            gpus=float(demand.capacity.sum()),
            takes=demand.gpus[rows],
            done=np.clip(done, 0.0, 1.0),
            whole_s=whole_s,
            least=(rest_s - later_s) / whole_s,
        )

    def _counts(
        self, demand: Demand, work: Work, rows: NDArray[np.int64]
    ) -> tuple[Floats, Floats, Answer, bool]:
        """Rounds of each job, its ratio to a fair finish, the answer, and whether all can be fair.

        The jobs are those of ``rows``.
        """
        window = self._window(demand, work, rows)
        rest = 1.0 - window.done
        equal = np.ones(len(rows))
        rest_s = rest * window.whole_s
        ratios = (work.age_s[rows] + rest_s * _crowd(demand)) / work.alone_s[rows]
        if not len(rows):
            return equal, ratios, Answer(status="optimal", objective=0.0), True
        answer, fair = Answer(status="infeasible"), True
        if np.all(window.least <= rest + 1e-9):
            answer = self._solve(window_program(window, equal, self.makespan, fair=True))
        if answer.values is None:
            fair = False
            unfair = ratios > self.most_ratio
            powers = np.where(rest_s <= self.quantum_s, _LAST_POWER, self.power)
            logs = np.where(unfair, powers * np.log(np.maximum(ratios, 1e-9)), 0.0)
            weights = np.exp(np.minimum(logs, np.log(_MOST_WEIGHT)))
            answer = self._solve(window_program(window, weights, self.makespan, fair=False))
        if answer.values is None:
            return np.zeros(len(rows)), ratios, answer, fair
        return np.round(answer.values[: len(rows)]), ratios, answer, fair

    def _first(
        self,
        demand: Demand,
        work: Work,
        rows: NDArray[np.int64],
        counts: Floats,
        ratios: Floats,
    ) -> tuple[list[int], str]:
        """The jobs of the first round, the most urgent first, and how the order was found."""
        some = np.nonzero(counts > 0)[0]
        if not len(some):
            return [], "none"
        here = rows[some]
        window = self._window(demand, work, here)
        going = [held(demand.jobs[row]) is not None for row in here.tolist()]
        urgency = np.maximum(ratios[some], 1e-3) * np.where(going, _RUNNING, 1.0)
        answer = self._solve(ordering_program(window, counts[some], urgency))
        if answer.values is None:
            return here[np.argsort(-urgency, kind="stable")].tolist(), answer.status
        begins = np.round(answer.values.reshape(len(here), self.rounds)[:, 0]) > 0
        order = sorted(np.nonzero(begins)[0].tolist(), key=lambda at: (-urgency[at], here[at]))
        return [int(here[at]) for at in order], answer.status

    def _solve(self, program: Program) -> Answer:
        return maximise(
            program.gains,
            program.rows,
            program.limits,
            least=program.least,
            most=program.most,
            whole=program.whole,
            gap=self.gap,
            limit_s=self.limit_s,
        )


def _crowd(demand: Demand) -> float:
    """By how much all that is asked for exceeds what is there; at least 1."""
    return max(float(demand.gpus.sum() / max(demand.capacity.sum(), 1.0)), 1.0)


def _turns(demand: Demand, work: Work, first: list[int]) -> tuple[Turn, ...]:
    """Pairs of a job and a GPU type: those of the round, then the longest of the others.

    Each first on the type that it holds, then on the fastest.
    """
    rates = demand.rates.rates
    number = {kind: at for at, kind in enumerate(demand.rates.gpu_types)}
    left_s = work.left / np.maximum(work.alone_rates, 1e-12)
    others = [row for row in np.argsort(-left_s, kind="stable").tolist() if row not in set(first)]
    found: list[Turn] = []
    for row in [*first, *others]:
        now = held(demand.jobs[row])
        here = number.get(now.gpu_type, -1) if now is not None else -1
        kinds = np.nonzero(rates[row] > 0)[0].tolist()
        kinds.sort(key=lambda at: (at != here, -rates[row, at], at))
        found += [(row, at) for at in kinds]
    return tuple(found)


SHOCKWAVE = Shockwave()
"""The policy called ``shockwave``."""
