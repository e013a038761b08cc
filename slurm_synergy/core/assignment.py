"""At most one configuration for each job, within what the pool holds, with the largest total gain.

This is Sia's integer program (SOSP '23, section 3.4) as a multiple-choice knapsack with a few rows:
one or two for each GPU type. Lagrangian prices on the rows split it into one choice per job and
give an upper bound for any choice, so every answer comes with a certificate:

1. Prices that minimise the bound: exact ones, unless jobs are many.
2. An incumbent: each job takes its best configuration at these prices; overfull rows are relieved
   where it costs least, what is left is given where it brings most.
3. Whatever a job would lose by another configuration beyond the gap between bound and incumbent is
   out of the question. What remains is often small enough for dynamic programming, which is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import le
from typing import Final

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.relaxation import relaxed_prices
from slurm_synergy.core.row_usage import rows_of
from slurm_synergy.core.smoothing import smoothed_prices
from slurm_synergy.core.sweep import Case, swept
from slurm_synergy.errors import ModelError

__all__ = ["IDLE", "Assignment", "Choices", "assign"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

IDLE: Final = -1
"""The configuration of a job that gets none."""

_FEW_JOBS: Final = 200  # up to here, and with as few rows, exact prices take less time
_FEW_ROWS: Final = 12
_SAME: Final = 1e-9  # relative: two choices that differ by less are equally good
_LEAST_GAIN: Final = 1e-12  # of the largest: a move that brings less is none
_DP_WORK: Final = 30_000_000  # additions of the exact step: about 30 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The program as numbers.

    ``gains`` has shape ``(J, K)``: what configuration k brings to job j over being idle, ``-inf``
    where it is not allowed. ``takes`` ``(R, K)`` and ``limits`` ``(R,)`` are the rows, whole
    numbers. ``forced`` ``(J,)`` marks jobs that must get some configuration.
    """

    gains: Floats
    takes: Floats
    limits: Floats
    forced: Bools

    def __post_init__(self) -> None:
        jobs, columns = self.gains.shape
        rows = self.limits.shape[0]
        if self.takes.shape != (rows, columns) or self.forced.shape != (jobs,):
            raise ModelError(
                f"choices of {jobs} jobs, {columns} configurations and {rows} rows do not agree "
                f"with takes {self.takes.shape} and forced {self.forced.shape}"
            )
        if np.isnan(self.gains).any() or (self.gains == np.inf).any():
            raise ModelError("gains must be numbers, or -inf where a configuration is not allowed")
        if (self.takes < 0).any() or (self.limits < 0).any():
            raise ModelError("rows must not be negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What was chosen: ``chosen`` ``(J,)`` configuration indices, or IDLE.

    No choice has an objective above ``bound``; ``gap`` is the relative distance to it. ``prices``
    ``(R,)`` is what a unit of each row is worth at the margin. ``feasible`` is False only when
    forced jobs cannot all be served; then the forced jobs that do not fit are idle.
    """

    chosen: Ints
    objective: float
    bound: float
    prices: Floats
    exact: bool
    feasible: bool = True

    @property
    def gap(self) -> float:
        """Relative distance between bound and objective, 0 when proven best."""
        return max(self.bound - self.objective, 0.0) / max(abs(self.objective), 1e-9)


def assign(choices: Choices, *, gap: float = 1e-4, start: Ints | None = None) -> Assignment:
    """Choose a configuration for every job; within ``gap`` of the best where that is cheap to do.

    The answer is always feasible, and its bound is certified whatever the gap. Deterministic: among
    equal choices the job with the smaller index comes first. ``start`` is a choice that is kept,
    completed where there is room, unless a better one is found; one that is not feasible is no
    help and is ignored.
    """
    search = _Search(choices)
    if start is not None and not search.is_feasible(start):
        start = None
    prices = search.prices(start)
    bound, best = search.at(prices)
    chosen = search.incumbent(best, prices, bound, start)
    value = search.value(chosen)
    exact = bound - value <= gap * max(abs(value), 1e-9)
    if not exact:
        found = search.core(prices, bound, chosen, value)
        if found is not None:
            chosen, exact = found, True
            bound = value = search.value(chosen)
    feasible = bool(((chosen != IDLE) | ~choices.forced).all())
    return Assignment(
        chosen=chosen, objective=value, bound=bound, prices=prices, exact=exact, feasible=feasible
    )


class _Search:
    """The steps of ``assign`` on one program; idleness is an extra last column."""

    def __init__(self, choices: Choices) -> None:
        jobs, columns = choices.gains.shape
        self.idle = columns
        self.limits = choices.limits
        takes, limits = choices.takes.astype(np.float64), self.limits.astype(np.float64)
        self.rows = rows_of(takes.shape, takes.tobytes(), limits.tobytes())
        self.takes, self.change = self.rows.takes, self.rows.change
        self.gains = np.zeros((jobs, columns + 1))
        self.gains[:, :columns] = choices.gains
        if self.rows.alone is not None:
            self.gains[:, :columns][:, self.rows.alone] = -np.inf
        finite = np.isfinite(self.gains)
        largest = float(np.abs(self.gains[finite]).max(initial=0.0))
        self.scale = largest or 1.0
        # Serving a forced job is worth more than all that the others could lose by it.
        self.penalty = (jobs + 1) * 2 * self.scale
        if choices.forced.any():
            served = finite[:, :columns].any(axis=1)
            self.gains[choices.forced & served, self.idle] = -self.penalty
        self.jobs = jobs
        self.each = np.arange(jobs)

    def value(self, chosen: Ints) -> float:
        """The objective, without the penalty of forced jobs that stay idle."""
        taken = chosen != IDLE
        return float(self.gains[np.nonzero(taken)[0], chosen[taken]].sum())

    def is_feasible(self, chosen: Ints) -> bool:
        """Whether a choice fits, allows every configuration, and serves the forced jobs."""
        columns = self.columns(chosen)
        gains = self.gains[self.each, columns]
        served = (gains > -self.penalty).all()
        return bool(served and (self.used(columns) <= self.limits).all())

    def columns(self, chosen: Ints) -> Ints:
        """Configuration indices with IDLE as the extra column."""
        return np.where(chosen == IDLE, self.idle, chosen)

    def used(self, columns: Ints) -> Floats:
        """What a choice takes of each row."""
        counts = np.bincount(columns, minlength=self.idle + 1)
        return self.takes @ counts.astype(np.float64)

    def at(self, prices: Floats) -> tuple[float, Ints]:
        """The bound at ``prices``, and every job's best configuration there."""
        reduced = self.gains - prices @ self.takes
        best = np.argmax(reduced, axis=1)
        total = reduced[self.each, best].sum() + prices @ self.limits
        return float(total), np.where(best == self.idle, IDLE, best).astype(np.int64)

    def prices(self, start: Ints | None) -> Floats:
        """Prices at (nearly) the least bound; ``start`` is a choice that fits."""
        if not self.jobs or not len(self.limits):
            return np.zeros(len(self.limits))
        if (self.used(np.argmax(self.gains, axis=1)) <= self.limits).all():
            return np.zeros(len(self.limits))  # nothing is scarce
        if self.jobs > _FEW_JOBS or len(self.limits) > _FEW_ROWS:
            return smoothed_prices(self.gains, self.takes, self.limits)
        keys = np.full(self.jobs, self.idle) if start is None else self.columns(start)
        return relaxed_prices(self.gains, self.takes, self.limits, keys)

    def incumbent(self, best: Ints, prices: Floats, bound: float, start: Ints | None) -> Ints:
        """A good choice that fits: ``start`` completed, unless ``best`` relieved is better."""
        if start is None:
            return self.improve(self.relieve(best, prices), prices)
        if bound - self.value(start) <= _LEAST_GAIN * self.scale:
            return start  # no move brings anything
        kept = self.improve(start, prices)
        if not _is_better(bound, self.value(kept)):
            return kept  # nothing is
        found = self.improve(self.relieve(best, prices), prices)
        values = [float(self.gains[self.each, self.columns(one)].sum()) for one in (found, kept)]
        return found if _is_better(*values) else kept

    def relieve(self, chosen: Ints, prices: Floats) -> Ints:
        """Take back from jobs until every row fits, where it costs least per unit of relief."""
        columns = self.columns(chosen)
        over = self.used(columns) - self.limits
        worth = prices @ self.takes
        while (over > 0).any():
            full = over > 0
            frees = -self.change
            # By the columns from which and to which a job moves.
            most = over[full][:, None, None]
            relief = (np.clip(frees[full], 0.0, most) / most).sum(axis=0)
            spills = (frees[~full] < over[~full][:, None, None]).any(axis=0)
            helps = (relief > 0) & ~spills
            loss = self.gains[self.each, columns][:, None] - self.gains
            # Beside the plain loss counts what the move takes or frees of the other rows.
            loss += (worth[None, :] - worth[:, None])[columns]
            cost = np.where(helps[columns], loss / np.maximum(relief, 1e-12)[columns], np.inf)
            if not self._apply_until_fits(columns, cost, over):
                # Only idleness is left: it always relieves and never overfills.
                loads = np.where(full[:, None], self.takes[:, columns], 0.0).sum(axis=0)
                columns[int(np.argmax(loads))] = self.idle
            over = self.used(columns) - self.limits
        return np.where(columns == self.idle, IDLE, columns)

    def _apply_until_fits(self, columns: Ints, cost: Floats, over: Floats) -> bool:
        """Make moves, cheapest first, that still help; whether there was any. Changes ``columns``.

        ``cost`` ``(J, K + 1)`` is infinite where a move does not help; ``over`` is updated.
        """
        at = np.argmin(cost, axis=1)
        least = cost[self.each, at]
        order = np.argsort(least, kind="stable")
        moved = False
        for job in order[np.isfinite(least[order])]:
            change = self.takes[:, columns[job]] - self.takes[:, at[job]]
            helps = bool((change[over > 0] > 0).any())
            spills = bool((change[over <= 0] < over[over <= 0]).any())
            if not helps or spills:
                continue
            columns[job] = at[job]
            over -= change
            moved = True
            if not (over > 0).any():
                break
        return moved

    def improve(self, chosen: Ints, prices: Floats) -> Ints:
        """Give what is left: moves of single jobs that fit, the largest gain first."""
        columns = self.columns(chosen)
        dear: Floats | None = None
        for _ in range(self.jobs + 1):
            more = self.gains - self.gains[self.each, columns][:, None]
            open_ = more > _LEAST_GAIN * self.scale
            if not open_.any():
                break
            left = self.limits - self.used(columns)
            # By the columns from which and to which a job moves.
            too_large: Bools = np.any(self.change > left[:, None, None], axis=0)
            open_ &= ~too_large[columns]
            if not open_.any():
                break
            if dear is None:
                worth = prices @ self.takes
                # Of equal gains the one that takes less of what is scarce.
                dear = 1e-3 * np.maximum(worth[None, :] - worth[:, None], 0.0)
            more -= dear[columns]
            more[~open_] = -np.inf
            at = np.argmax(more, axis=1)
            best = more[self.each, at]
            order = np.argsort(-best, kind="stable")
            self._move(columns, at, order[np.isfinite(best[order])], left)
        return np.where(columns == self.idle, IDLE, columns)

    def _move(self, columns: Ints, at: Ints, order: Ints, left: Floats) -> None:
        """Move jobs to the columns ``at`` as long as these fit into ``left``; changes ``columns``.

        A few plain numbers for each of many jobs: arrays would take five times as long.
        """
        change, room = self.rows.changes, left.tolist()
        pairs = zip(order.tolist(), at[order].tolist(), columns[order].tolist(), strict=True)
        for job, new, old in pairs:
            needs = change[old][new]
            if all(map(le, needs, room)):
                columns[job] = new
                room = [free - need for need, free in zip(needs, room, strict=True)]

    def core(self, prices: Floats, bound: float, chosen: Ints, value: float) -> Ints | None:
        """The best choice by dynamic programming over what is still open; None if too large.

        Any choice is worth ``bound`` less each job's regret at the prices and less the price of
        what is left over, so a regret beyond the gap rules a configuration out.
        """
        reduced = self.gains - prices @ self.takes
        best = reduced.max(axis=1)
        lost = (chosen == IDLE) & (self.gains[:, self.idle] < 0)
        if lost.any():
            return None  # forced jobs that do not fit: the bound says nothing about such a choice
        slack = 1e-9 * max(abs(bound), 1.0)
        open_ = (best[:, None] - reduced) <= bound - value + slack
        columns = np.argmax(open_, axis=1)  # the only one, of those that are decided
        counts = open_.sum(axis=1)
        undecided = np.nonzero(counts > 1)[0]
        left = (self.limits - self.used(columns[counts == 1])).astype(np.int64)
        if (left < 0).any():
            return None
        sizes = self._sizes(open_[undecided], left)
        states = prod([size + 1 for size in sizes])
        if states * int(counts[undecided].sum()) > _DP_WORK:
            return None
        options = {job: np.nonzero(open_[job])[0] for job in undecided.tolist()}
        unused = float(prices @ (left - sizes))
        cases = self._cases(options, best[:, None] - reduced)
        most = bound - value + slack - unused
        picked: Sequence[int] | Ints | None = swept(cases, sizes, most, prices.tolist())
        if picked is None:
            picked = self._program(options, sizes)
        if picked is None:
            return None
        columns[undecided] = picked
        better = np.where(columns == self.idle, IDLE, columns)
        return better if _is_better(self.value(better), value) else chosen

    def _sizes(self, open_: Bools, left: Ints) -> list[int]:
        """States per row: no more than all undecided jobs together could take."""
        most = [float((open_ * takes).max(axis=1, initial=0.0).sum()) for takes in self.takes]
        return [int(min(a, b)) for a, b in zip(left, most, strict=True)]

    def _cases(self, options: Mapping[int, Ints], losses: Floats) -> list[list[Case]]:
        """The ``options`` of each job with what it loses and gains by them, and what they take."""
        takes, found = self.rows.numbers, list[list[Case]]()
        for job, columns in options.items():
            worth = losses[job, columns].tolist(), self.gains[job, columns].tolist()
            found.append(
                [
                    (loss, column, gain, takes[column])
                    for column, loss, gain in zip(columns.tolist(), *worth, strict=True)
                ]
            )
        return found

    def _program(self, options: Mapping[int, Ints], sizes: list[int]) -> Ints | None:
        """Best of the ``options`` of each job, in their order, within ``sizes`` of the rows.

        Over all that could be left, in arrays: for many jobs that are nearly alike.
        """
        shape = tuple(size + 1 for size in sizes)
        best = np.zeros(shape)
        decisions: list[NDArray[np.int16]] = []
        for job, columns in options.items():
            new = np.full(shape, -np.inf)
            which = np.full(shape, -1, dtype=np.int16)
            for column in columns:
                need = self.takes[:, column].astype(np.int64)
                if any(one >= size for one, size in zip(need, shape, strict=True)):
                    continue
                target = tuple(slice(int(one), None) for one in need)
                source = tuple(
                    slice(0, size - int(one)) for one, size in zip(need, shape, strict=True)
                )
                trial = best[source] + self.gains[job, column]
                better = trial > new[target]
                new[target] = np.where(better, trial, new[target])
                which[target] = np.where(better, column, which[target])
            best = new
            decisions.append(which)
        at = tuple(size for size in sizes)
        if not np.isfinite(best[at]):
            return None
        picked = np.zeros(len(options), dtype=np.int64)
        for index in range(len(options) - 1, -1, -1):
            column = int(decisions[index][at])
            picked[index] = column
            need = self.takes[:, column].astype(np.int64)
            at = tuple(int(a - b) for a, b in zip(at, need, strict=True))
        return picked


def _is_better(value: float, other: float) -> bool:
    """Whether it is by more than rounding."""
    return value - other > _SAME * max(abs(value), 1e-9)
