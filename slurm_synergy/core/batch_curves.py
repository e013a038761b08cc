"""Goodput of many pairs of a learner and a configuration at once, in plain arrays. Pure.

A learner is a row of ``NUMBERS`` numbers, in the order of ``Row``. The curve of a pair is its
throughput at each candidate batch size, and how many times the initial batch that is. It does not
depend on the gradient's statistics, which are new with every report: so the curves of one round
serve the next (``Curves``), and only the best point on each of them is looked for again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from enum import IntEnum
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "LEAST_S",
    "NUMBERS",
    "Curves",
    "Paced",
    "Row",
    "batches_at",
    "best_by_noise",
    "best_of",
    "goodput_of",
    "iteration_s",
    "pace_of",
    "sync_s",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Found = tuple[Floats, Ints, Ints]
"""Goodput, local batch and accumulation."""

LEAST_S: Final = 1e-8
"""Seconds in which a single replica synchronises; the floor of every coefficient of a fit."""

_TINY = 1e-300
_AT_ONCE = 256  # pairs whose candidates are judged together: their arrays fit into a cache
_MOST_KEPT = 200_000  # pairs whose curves outlive a round: with 50 candidates 160 MB


class Row(IntEnum):
    """Where the numbers of a learner stand; the first six are the times of its model."""

    COMPUTE = 0
    COMPUTE_PER_SAMPLE = 1
    NODE_SYNC = 2
    NODE_SYNC_PER_REPLICA = 3
    NETWORK_SYNC = 4
    NETWORK_SYNC_PER_REPLICA = 5
    OVERLAP = 6
    SQUARE = 7
    VARIANCE = 8
    INITIAL = 9
    LARGEST = 10
    LOCAL_LEAST = 11
    LOCAL_MOST = 12
    ACCUMULATE = 13


NUMBERS: Final = len(Row)
_TIMES = slice(Row.COMPUTE, Row.OVERLAP)
_LIMITS = slice(Row.INITIAL, NUMBERS)
_STATISTICS = [Row.SQUARE, Row.VARIANCE]
_OF_CURVE = [row for row in Row if row not in _STATISTICS]


def best_of(
    numbers: Floats, nodes: Ints, replicas: Ints, most_rate: Floats, candidates: int
) -> Found:
    """Goodput, local batch and accumulation ``(K,)`` of the best candidate of each pair.

    ``numbers`` ``(K, NUMBERS)`` are the learners of the pairs, ``most_rate`` what bounds their
    throughput.
    """
    best, which = _tops_of(numbers, nodes, replicas, most_rate, candidates)
    local, passes = batches_at(numbers, replicas, which, candidates)
    return best, local * (best > 0), passes * (best > 0)


def batches_at(numbers: Floats, replicas: Ints, which: Ints, candidates: int) -> tuple[Ints, Ints]:
    """Local batch and accumulation ``(K,)`` of one candidate of each pair, may it run or not."""
    rows = np.ascontiguousarray(np.asarray(numbers).T)
    steps = _steps(candidates)[which]
    local, passes = _batch(rows, replicas, _totals(rows, replicas, steps))
    return local.astype(np.int64), passes.astype(np.int64)


def _tops_of(
    numbers: Floats, nodes: Ints, replicas: Ints, most_rate: Floats, candidates: int
) -> tuple[Floats, Ints]:
    best, which = np.zeros(len(numbers)), np.zeros(len(numbers), dtype=np.int64)
    for start in range(0, len(numbers), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        rate, scale = _curve(numbers[part], nodes[part], replicas[part], candidates)
        best[part], which[part] = _top(numbers[part], rate, scale, most_rate[part])
    return best, which


def best_by_noise(
    numbers: Floats, nodes: int, replicas: int, noise: Floats, candidates: int
) -> Floats:
    """Goodput ``(E,)`` of one pair's best candidate under each of several statistics.

    ``numbers`` ``(NUMBERS,)`` are its learner, ``noise`` ``(E, 2)`` square and variance.
    """
    several = np.repeat(numbers[None, :], len(noise), axis=0)
    several[:, _STATISTICS] = noise
    rate, scale = _curve(several[:1], np.array([nodes]), np.array([replicas]), candidates)
    return _top(several, rate, scale, np.full(len(noise), np.inf))[0]


def goodput_of(
    numbers: Floats,
    nodes: Ints,
    replicas: Ints,
    local: Ints,
    passes: Ints,
    most_rate: Floats,
) -> Floats:
    """Goodput ``(K,)`` with given batches, whether they are allowed or not."""
    return pace_of(numbers, nodes, replicas, local, passes, most_rate).goodput(numbers)


class Paced:
    """Pairs with given batches: what their goodput follows from, but for the statistics."""

    __slots__ = ("_rate", "_scale")

    def __init__(self, rate: Floats, scale: Floats) -> None:
        self._rate, self._scale = rate, scale

    def goodput(self, numbers: Floats) -> Floats:
        """Goodput ``(K,)`` with the statistics that the learners have."""
        return np.asarray(self._rate * _worth(np.asarray(numbers).T, self._scale))


def pace_of(
    numbers: Floats,
    nodes: Ints,
    replicas: Ints,
    local: Ints,
    passes: Ints,
    most_rate: Floats,
) -> Paced:
    """For ``goodput_of`` with the same batches and one statistics after another."""
    rows = np.asarray(numbers).T
    total = replicas * local * (passes + 1)
    step_s = iteration_s(rows[_TIMES], rows[Row.OVERLAP], nodes, replicas, local, passes)
    return Paced(np.minimum(total / step_s, most_rate), np.maximum(total / rows[Row.INITIAL], 1.0))


class Curves:
    """Curves by job and configuration, for as long as their model and limits are the same.

    Jobs are known by small numbers that stay theirs, configurations by their values.
    """

    def __init__(self, candidates: int, most: int = _MOST_KEPT) -> None:
        self._candidates, self._most = candidates, most
        self._columns: dict[Hashable, int] = {}
        self._numbering: tuple[Sequence[Hashable], Ints] = ((), np.empty(0, dtype=np.int64))
        self._at = np.full((0, 0), -1, dtype=np.int64)  # by job and configuration
        self._used = 0
        self._of = np.empty((0, len(_OF_CURVE) + 2))  # what each was made from
        self._rate = np.empty((0, candidates))
        self._scale = np.empty((0, candidates))
        # Of each the last question of either kind (statistics and bound), and its answer (goodput
        # and candidate).
        self._asked = np.empty((0, 2, len(_STATISTICS) + 1))
        self._found = np.empty((0, 2))
        self._which = np.empty((0, 2), dtype=np.int64)
        # By curve and candidate, of those that were asked for.
        self._batches: dict[int, dict[int, tuple[int, int]]] = {}

    def find(
        self,
        jobs: Ints,
        configurations: Sequence[Hashable],
        columns: Ints,
        numbers: Floats,
        nodes: Ints,
        replicas: Ints,
    ) -> Ints:
        """Where the curves of K pairs of a job and one of ``configurations`` are kept.

        -1 where there is no more room for one. The answer holds as long as nothing but the
        statistics among ``numbers`` changes.
        """
        columns = self._numbered(configurations)[columns]
        self._reach(int(jobs.max(initial=-1)) + 1, len(self._columns))
        made_from: Floats = np.column_stack(
            (numbers[:, _OF_CURVE], nodes.astype(np.float64), replicas.astype(np.float64))
        )
        at = self._at[jobs, columns]
        known = at >= 0
        known[known] = (self._of[at[known]] == made_from[known]).all(axis=1)
        if not known.all():
            at = self._learn(jobs, columns, at, ~known, numbers, nodes, replicas, made_from)
        return at

    def tops(
        self,
        at: Ints,
        numbers: Floats,
        nodes: Ints,
        replicas: Ints,
        most_rate: Floats,
        question: int = 0,
    ) -> tuple[Floats, Ints]:
        """The best goodput of the pairs whose curves are ``at``, and which candidate that is.

        ``batches_at`` tells its batch. Who asks with two sorts of bounds in turn numbers them
        (``question``, 0 or 1).
        """
        kept = at >= 0
        if kept.all():
            return self._tops_kept(at, numbers, most_rate, question)
        best, which = np.zeros(len(at)), np.zeros(len(at), dtype=np.int64)
        with_, without = np.nonzero(kept)[0], np.nonzero(~kept)[0]
        best[with_], which[with_] = self._tops_kept(
            at[with_], numbers[with_], most_rate[with_], question
        )
        best[without], which[without] = _tops_of(
            numbers[without],
            nodes[without],
            replicas[without],
            most_rate[without],
            self._candidates,
        )
        return best, which

    def batches(self, at: Ints, numbers: Floats, replicas: Ints, which: Ints) -> tuple[Ints, Ints]:
        """``batches_at`` with as many candidates as the curves have, for pairs as in ``tops``."""
        known, missing = self._batches, False
        found: list[tuple[int, int]] = []
        for curve, candidate in zip(at.tolist(), which.tolist(), strict=True):
            batch = known[curve].get(candidate) if curve in known else None
            missing = missing or batch is None
            found.append(batch or (0, 0))
        if missing:
            local, passes = batches_at(numbers, replicas, which, self._candidates)
            found = list(zip(local.tolist(), passes.tolist(), strict=True))
            for curve, candidate, batch in zip(at.tolist(), which.tolist(), found, strict=True):
                if curve >= 0:
                    known.setdefault(curve, {})[candidate] = batch
            return local, passes
        both = np.array(found, dtype=np.int64).reshape(-1, 2)
        return both[:, 0], both[:, 1]

    def _numbered(self, configurations: Sequence[Hashable]) -> Ints:
        before, found = self._numbering
        if configurations is not before:
            known = self._columns
            numbers = [known.setdefault(one, len(known)) for one in configurations]
            found = np.array(numbers, dtype=np.int64)
            self._numbering = configurations, found
        return found

    def _reach(self, jobs: int, columns: int) -> None:
        """Make the table large enough.

        Each of its sides alone: both together would make it four times as large for every doubling
        of the jobs.
        """
        rows, width = self._at.shape
        if jobs > rows or columns > width:
            more = max(2 * rows, jobs) if jobs > rows else rows
            wider = max(2 * width, columns) if columns > width else width
            table = np.full((more, wider), -1, dtype=np.int64)
            table[:rows, :width] = self._at
            self._at = table

    def _learn(
        self,
        jobs: Ints,
        columns: Ints,
        at: Ints,
        new: NDArray[np.bool_],
        numbers: Floats,
        nodes: Ints,
        replicas: Ints,
        made_from: Floats,
    ) -> Ints:
        """Make the curves of the ``new`` pairs; where each is kept, -1 if there is no more room."""
        at = at.copy()
        fresh = np.nonzero(new & (at < 0))[0]
        room = min(self._most - self._used, len(fresh))
        at[fresh[:room]] = np.arange(self._used, self._used + room)
        self._used += room
        self._grow()
        self._at[jobs, columns] = at
        for part in _parts(np.nonzero(new & (at >= 0))[0]):
            there = at[part]
            curve = _curve(numbers[part], nodes[part], replicas[part], self._candidates)
            self._rate[there], self._scale[there] = curve
            self._of[there] = made_from[part]
            self._asked[there] = np.nan
            for curve in there.tolist():
                self._batches.pop(curve, None)
        return at

    def _grow(self) -> None:
        there = len(self._of)
        if self._used > there:
            more = min(max(2 * there, self._used), self._most) - there
            several = self._of, self._asked, self._found, self._which, self._rate, self._scale
            self._of, self._asked, self._found, self._which, self._rate, self._scale = (
                np.concatenate((one, np.empty((more, *one.shape[1:]), dtype=one.dtype)))
                for one in several
            )

    def _tops_kept(
        self, at: Ints, numbers: Floats, most_rate: Floats, question: int
    ) -> tuple[Floats, Ints]:
        asked = np.column_stack((numbers[:, _STATISTICS], most_rate))
        before = self._asked[:, question]
        found, which = self._found[:, question], self._which[:, question]
        for part in _parts(np.nonzero((before[at] != asked).any(axis=1))[0]):
            there = at[part]
            rate, scale = self._rate[there], self._scale[there]
            before[there] = asked[part]
            found[there], which[there] = _top(numbers[part], rate, scale, most_rate[part])
        return found[at], which[at]


def _parts(numbers: Ints) -> Iterable[Ints]:
    return (numbers[start : start + _AT_ONCE] for start in range(0, len(numbers), _AT_ONCE))


def _curve(numbers: Floats, nodes: Ints, replicas: Ints, candidates: int) -> tuple[Floats, Floats]:
    """Throughput and scale of the batch ``(K, candidates)``; no throughput where not allowed."""
    rows = np.ascontiguousarray(numbers.T)[:, :, None]
    nodes, replicas = nodes[:, None], replicas[:, None]
    initial, largest, least, most, _ = rows[_LIMITS]
    low = np.maximum(initial, replicas * least)
    local, passes = _batch(rows, replicas, _totals(rows, replicas, _steps(candidates)))
    total = replicas * local * (passes + 1)
    step_s = iteration_s(rows[_TIMES], rows[Row.OVERLAP], nodes, replicas, local, passes)
    # Whole samples per replica may round a total up by less than one sample for each pass.
    valid = (local >= least) & (local <= most) & (low <= largest)
    valid &= total < largest + replicas * (passes + 1)
    return total / step_s * valid, np.maximum(total / initial, 1.0)


@cache
def _steps(candidates: int) -> Floats:
    return np.linspace(0.0, 1.0, candidates)


def _totals(rows: Floats, replicas: Ints, steps: Floats) -> Floats:
    """Samples of the candidates at ``steps`` from the smallest (0) to the largest (1)."""
    initial, largest, least = rows[Row.INITIAL], rows[Row.LARGEST], rows[Row.LOCAL_LEAST]
    low = np.maximum(initial, replicas * least)
    return np.asarray(low * np.exp(steps * np.log(np.maximum(largest, low) / low)))


def _batch(rows: Floats, replicas: Ints, totals: Floats) -> tuple[Floats, Floats]:
    """Local batch and accumulation that run at least ``totals`` samples a step."""
    initial, _, _, most, accumulate = rows[_LIMITS]
    share = totals / replicas
    passes = np.maximum(np.ceil(share / most - 1e-8) - 1, 0.0)
    # One replica without accumulation has no second gradient to measure the noise with.
    alone = (replicas == 1) & (share > initial * (1 + 1e-9))
    passes = np.maximum(passes, alone) * accumulate
    return np.maximum(np.ceil(share / (passes + 1) - 1e-8), 1.0), passes


def _top(numbers: Floats, rate: Floats, scale: Floats, most_rate: Floats) -> tuple[Floats, Ints]:
    """The best goodput of each curve, and which candidate that is: of equal ones the smallest."""
    goodput = np.minimum(rate, most_rate[:, None])
    goodput *= _worth(numbers.T[:, :, None], scale)
    at = np.argmax(goodput, axis=1)
    return goodput[np.arange(len(at)), at], at


def _worth(rows: Floats, scale: Floats) -> Floats:
    """What a sample is worth in a batch that is ``scale`` times the initial one."""
    square, variance = rows[Row.SQUARE], rows[Row.VARIANCE]
    less = square * scale
    less += variance
    return np.asarray(np.divide(variance + square, less, out=less))


def iteration_s(
    times: Sequence[float] | Floats,
    overlap: float | Floats,
    nodes: Ints,
    replicas: Ints,
    local: NDArray[Any],
    passes: NDArray[Any],
) -> Floats:
    """Seconds of one optimiser step of one model or many.

    The power mean of computing and synchronising is taken relative to the longer of both, so that
    it cannot overflow.
    """
    gradient_s = times[0] + times[1] * local
    syncing_s = sync_s(times, nodes, replicas)
    longer, shorter = np.maximum(gradient_s, syncing_s), np.minimum(gradient_s, syncing_s)
    # Powers by logarithms, which take a third of the time.
    ratio = np.exp(overlap * np.log(np.maximum(shorter / longer, _TINY)))
    last_s = longer * np.exp(np.log1p(ratio) / overlap)
    return np.asarray(passes * gradient_s + last_s, dtype=np.float64)


def sync_s(times: Sequence[float] | Floats, nodes: Ints, replicas: Ints) -> Floats:
    """Seconds of synchronising, of one model or many."""
    beyond = np.maximum(replicas - 2, 0)
    inside = times[2] + times[3] * beyond
    across = times[4] + times[5] * beyond
    shared = np.where(nodes > 1, across, inside)
    return np.asarray(np.where(replicas > 1, shared, LEAST_S))
