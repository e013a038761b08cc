"""The program of Shockwave (NSDI '23): how many of the next rounds each job gets. Pure.

A job's utility is the logarithm of the part that is done after the window, piecewise linear. As
that is concave, being below all of its pieces is what being on it means when more is better.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = ["Program", "Window", "ordering_program", "window_program"]

Floats = NDArray[np.float64]

_BREAKS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_LOG_OF_NOTHING = float(np.log(1e-6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """J jobs over ``rounds`` rounds of ``round_s`` seconds on ``gpus`` GPUs, all alike.

    ``takes`` are the GPUs of each job, ``done`` the part of it that is done (0 to 1), ``whole_s``
    how long all of it takes, ``least`` the part that it must do in the window to be treated fairly.
    """

    rounds: int
    round_s: float
    gpus: float
    takes: Floats
    done: Floats
    whole_s: Floats
    least: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The most ``gains @ v`` with ``rows @ v <= limits`` and ``least <= v <= most``."""

    gains: Floats
    rows: Floats
    limits: Floats
    least: Floats
    most: Floats
    whole: NDArray[np.bool_]


def window_program(window: Window, weights: Floats, makespan: float, *, fair: bool) -> Program:
    """Variables are rounds ``(J,)``, parts done ``(J,)``, utilities ``(J,)``, and the makespan.

    Rounds are counted, not laid out: capacity binds in sum here, and in each round in
    ``ordering_program``. ``makespan`` is what a second of it counts against the mean utility;
    gains are scaled so that the largest is 1.
    """
    count = len(window.takes)
    rest = np.maximum(1.0 - window.done, 0.0)
    size = 3 * count + 1
    unit = np.eye(count)
    rows, limits = [], []

    def add(block: Floats, limit: Floats) -> None:
        rows.append(block)
        limits.append(limit)

    def block(rounds: Floats, parts: Floats, utilities: Floats, last: float = 0.0) -> Floats:
        made = np.zeros((count, size))
        made[:, :count], made[:, count : 2 * count] = rounds, parts
        made[:, 2 * count : 3 * count], made[:, -1] = utilities, last
        return made

    none = np.zeros((count, count))
    capacity = np.zeros((1, size))
    capacity[0, :count] = window.takes
    add(capacity, np.array([window.gpus * window.rounds]))
    add(block(np.diag(-window.round_s / window.whole_s), unit, none), np.zeros(count))
    for low, high in pairwise(_BREAKS):
        base = _utility(low)
        slope = (_utility(high) - base) / (high - low)
        # utility <= base + slope (done + part - low)
        add(block(none, -slope * unit, unit), base + slope * (window.done - low))
    # The makespan is in rounds: seconds are large beside all other numbers here.
    whole = window.whole_s / window.round_s
    add(block(none, np.diag(-whole), none, -1.0), -rest * whole)
    gains = np.zeros(size)
    gains[2 * count : 3 * count] = weights / (max(count, 1) * window.rounds)
    gains[-1] = -makespan * window.round_s
    gains /= max(float(np.abs(gains).max()), 1e-300)
    least = np.zeros(size)
    least[2 * count : 3 * count] = _LOG_OF_NOTHING
    if fair:
        least[count : 2 * count] = np.maximum(window.least, 0.0)
    most = np.concatenate(
        [np.full(count, float(window.rounds)), rest, np.zeros(count), np.array([np.inf])]
    )
    integers = np.zeros(size, dtype=bool)
    integers[:count] = True
    return Program(
        gains=gains,
        rows=np.concatenate(rows),
        limits=np.concatenate(limits),
        least=least,
        most=most,
        whole=integers,
    )


def ordering_program(window: Window, rounds: Floats, priorities: Floats) -> Program:
    """Variables ``(J, T)``: whether a job runs in a round of the window.

    Each job gets as many as ``rounds`` says if they can be laid out at all, those with the larger
    ``priorities`` (above 0) earlier.
    """
    count, times = len(window.takes), window.rounds
    late = np.arange(times) / np.maximum(rounds, 1.0)[:, None]
    cost = priorities[:, None] * late
    worth = 1.0 + float(cost.max(initial=0.0)) * times
    size = count * times
    once = np.kron(np.eye(count), np.ones(times))
    there = np.kron(window.takes, np.eye(times))
    return Program(
        gains=(worth - cost).ravel(),
        rows=np.concatenate([once, there]),
        limits=np.concatenate([rounds, np.full(times, window.gpus)]),
        least=np.zeros(size),
        most=np.ones(size),
        whole=np.ones(size, dtype=bool),
    )


def _utility(part: float) -> float:
    return _LOG_OF_NOTHING if part == 0 else float(np.log(part))
