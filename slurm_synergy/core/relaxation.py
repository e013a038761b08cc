"""The linear relaxation of a small assignment: prices at which its bound is the least there is.

There a job may be split between configurations, and the dual values of the rows are the prices. The
simplex method needs little for it: every job has a key, the configuration that takes what is left
of it, so the basis has besides only one entry for each row (generalised upper bounding; Dantzig and
Van Slyke, 1967). A step solves a system as small as the rows are few, and looks at all cells once;
from what the jobs hold a few steps lead to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["relaxed_prices"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ROW: Final = -1
"""In the place of a job: the entry is what is left of a row."""

_Entry = tuple[int, int]
"""A job and a column that is not its key, or ``_ROW`` and a row."""

_TOLERANCE: Final = 1e-9
_EXTRA: Final = 1e-7  # of a unit more in each row: of rows that are just full, steps go in circles
_STEPS_PER_JOB: Final = 20


def relaxed_prices(gains: Floats, takes: Floats, limits: Floats, keys: Ints) -> Floats:
    """What a little more of each row would bring, ``(R,)``.

    ``gains`` has shape ``(J, K)``, with ``-inf`` where a column is not allowed, ``takes``
    ``(R, K)``, ``limits`` ``(R,)``. ``keys`` ``(J,)`` is a choice to begin with that is allowed
    and within the limits. In the unlikely case that there is no end the prices are those of the
    last step, for which the bound is higher.
    """
    steps = _Steps(gains, takes, limits, keys)
    for _ in range(_STEPS_PER_JOB * (len(gains) + len(limits))):
        if not steps.step():
            break
    return np.array([max(price, 0.0) for price in steps.prices])


class _Steps:
    """The basis, and the steps from one to the next."""

    def __init__(self, gains: Floats, takes: Floats, limits: Floats, keys: Ints) -> None:
        self._gains, self._takes = gains, takes
        self._columns: list[list[float]] = takes.T.tolist()
        self._units: list[list[float]] = np.eye(len(limits)).tolist()
        self._jobs, self._keys = np.arange(len(gains)), keys.copy()
        # Unlike amounts, so that no two rows are full at once.
        extra = _EXTRA * (1.0 + np.sqrt(np.arange(len(limits))))
        left = limits + extra - takes[:, keys].sum(axis=1)
        self._left: list[float] = left.tolist()  # beside the keys
        self._entries: list[_Entry] = [(_ROW, row) for row in range(len(limits))]
        self._least = _TOLERANCE * float(np.abs(gains[np.isfinite(gains)]).max(initial=0.0))
        # What follows from the basis, which has nothing but rows to begin with.
        self.prices: list[float] = [0.0] * len(limits)
        self._inverse = self._units
        self._value(np.zeros(()))
        self._is_new = False

    def step(self) -> bool:
        """Let in what gains most at the prices of the basis; False if nothing does."""
        if self._is_new:
            self._price()
        enters = self._enters()
        if enters is None:
            return False
        column, left = self._column(enters), self._left
        rates = [_dot(row, column) for row in self._inverse]
        amounts = [_dot(row, left) for row in self._inverse]
        return self._exchange(enters, rates, amounts)

    def _price(self) -> None:
        """What follows from the basis: its inverse, prices, what every cell is worth at these."""
        self._is_new = False
        inverse = self._inverse = _inverted([self._column(entry) for entry in self._entries])
        worth = [self._worth(entry) for entry in self._entries]
        self.prices = [_dot(worth, column) for column in zip(*inverse, strict=True)]
        self._value(np.array(self.prices) @ self._takes)

    def _value(self, costs: Floats) -> None:
        self._reduced = self._gains - costs
        self._at = self._reduced.argmax(axis=1)
        self._top = self._reduced[self._jobs, self._at]

    def _column(self, entry: _Entry) -> list[float]:
        """What a unit of an entry takes of each row; of a job in the place of its key."""
        job, at = entry
        if job == _ROW:
            return self._units[at]
        key = self._columns[self._keys[job]]
        return [new - old for new, old in zip(self._columns[at], key, strict=True)]

    def _worth(self, entry: _Entry) -> float:
        job, at = entry
        if job == _ROW:
            return 0.0
        return float(self._gains[job, at] - self._gains[job, self._keys[job]])

    def _enters(self) -> _Entry | None:
        """What gains most over the basis."""
        over = self._top - self._reduced[self._jobs, self._keys]
        job = int(over.argmax())
        most, least = float(over[job]), min(self.prices)
        if -least > max(most, self._least):
            return _ROW, self.prices.index(least)
        return (job, int(self._at[job])) if most > self._least else None

    def _exchange(self, enters: _Entry, rates: Sequence[float], amounts: Sequence[float]) -> bool:
        """Put ``enters`` in the place of what is used up first by it.

        ``amounts`` are what there is of each entry, ``rates`` what a unit takes of them. False if
        nothing is, which only rounding can bring about.
        """
        most, leaves = np.inf, None
        # What there is of the keys of jobs that are split, and how fast that grows.
        keys = {enters[0]: (1.0, -1.0)}
        for at, (job, _) in enumerate(self._entries):
            amount, rate = amounts[at], rates[at]
            if rate > _TOLERANCE and amount / rate < most:
                most, leaves = amount / rate, at
            there, growth = keys.get(job, (1.0, 0.0))
            keys[job] = there - amount, growth + rate
        out = None
        for job, (amount, growth) in keys.items():
            if job != _ROW and growth < -_TOLERANCE and amount / -growth < most:
                most, out = amount / -growth, job
        if out is not None:
            self._change_key(out, enters)
        elif leaves is not None:
            self._entries[leaves] = enters
            self._is_new = True
        return leaves is not None or out is not None

    def _change_key(self, job: int, enters: _Entry) -> None:
        """Let another column be the key of ``job``: another of its entries, or the new one."""
        before = self._columns[self._keys[job]]
        own = [at for at, (other, _) in enumerate(self._entries) if other == job]
        if own:
            self._keys[job] = self._entries[own[0]][1]
            self._entries[own[0]] = enters
            self._is_new = True
        else:
            self._keys[job] = enters[1]
        after = self._columns[self._keys[job]]
        rows = zip(self._left, before, after, strict=True)
        self._left = [left + old - new for left, old, new in rows]


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return sum([a * b for a, b in zip(one, other, strict=True)])


def _inverted(columns: Sequence[Sequence[float]]) -> list[list[float]]:
    """The inverse, by rows, of the matrix with those columns; few numbers, so without numpy."""
    size = len(columns)
    numbers = range(size)
    rows: list[list[float]] = []
    for number, numbers_of in enumerate(zip(*columns, strict=True)):
        one = [*numbers_of, *([0.0] * size)]
        one[size + number] = 1.0
        rows.append(one)
    for at in numbers:
        pivot, most = at, abs(rows[at][at])
        for number in range(at + 1, size):
            if abs(rows[number][at]) > most:
                pivot, most = number, abs(rows[number][at])
        rows[at], rows[pivot] = rows[pivot], rows[at]
        head = rows[at][at]
        if head != 1.0:
            rows[at] = [one / head for one in rows[at]]
        top = rows[at]
        for number in numbers:
            factor = rows[number][at]
            if factor and number != at:
                row = rows[number]
                rows[number] = [one - factor * its for one, its in zip(row, top, strict=True)]
    return [row[size:] for row in rows]
