"""What a search for the GPUs of all jobs at once deals out, and what a division of them is worth.

A member is a division: how many GPUs of each node each job has. All P members of a population are
one array ``(N, J, P)`` of N nodes and J jobs: sums over nodes then add whole blocks of memory, and
what holds for a job in a member, whatever the node, is laid over blocks as a whole. Nodes may be
parts of nodes; parts of one host stand beside each other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "NOTHING_GAINED",
    "Bools",
    "Floats",
    "Hosts",
    "Ints",
    "Problem",
    "States",
    "fitness",
    "members_of",
    "realloc_factor",
    "totals",
    "true_at",
    "true_in",
    "used",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
States = NDArray[np.int16]
Bools = NDArray[np.bool_]

NOTHING_GAINED: Final = 1e-3
"""Added to every speedup, so that a job without GPUs can be counted with a power below 0."""

_MOST_IN_A_BYTE: Final = 127
_SURELY_IN_TWO_BYTES: Final = 8191


class Hosts:
    """Which of some columns beside each other belong to one host."""

    __slots__ = ("_later", "columns", "host", "starts")

    def __init__(self, columns: slice, hosts: Ints) -> None:
        """``hosts`` are those of ``columns``, ascending."""
        first = np.diff(hosts, prepend=-1) != 0
        self.columns = columns
        self.starts = np.nonzero(first)[0]
        self.host = np.cumsum(first) - 1
        sizes = np.bincount(self.host, minlength=len(self.starts))
        more = [np.nonzero(sizes > part)[0] for part in range(1, int(sizes.max(initial=1)))]
        # Parts of each host beside its first one: of which hosts, in which columns.
        self._later = [(those, self.starts[those] + at) for at, those in enumerate(more, start=1)]

    @property
    def whole(self) -> bool:
        """Whether each column is a host of its own."""
        return not self._later

    def sums(self, states: States) -> States:
        """GPUs by host ``(H, J, P)`` of the columns; they may be ``states`` itself."""
        there = states[self.columns]
        if not self._later:
            return there
        # Many times as fast as numpy's reduceat.
        found = there[self.starts]
        for those, columns in self._later:
            found[those] += there[columns]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """J jobs in the order in which they keep GPUs that two of them were given, and N nodes.

    ``speedups`` ``(J, 2, K + 1)`` is how fast each job is with k GPUs of one node, or of several,
    relative to its fair share; ``outputs`` the same relative to a single GPU. ``discounts``
    ``(J,)`` is what any allocation but the ``current`` one ``(J, N)`` counts. ``least`` and
    ``most`` ``(J,)`` bound a job's GPUs, ``allowed`` ``(J, N)`` tells on which nodes it may be.
    Jobs that are ``even`` ``(J,)`` have equally many GPUs on each host of a kind. ``capacity``
    ``(N,)`` are the GPUs of each node, ``hosts`` ``(N,)`` the host that it is a part of, from 0 and
    ascending, ``kinds`` ``(N,)`` what kind of host that is, from 0 and ascending too. A job has
    GPUs of one kind, that of which it was given most; of equally many that of the least of its
    ``ranks`` ``(J, K)``. Without ``one_kind`` it may have several.

    A job is on ``most_nodes`` nodes at most; with ``avoid_interference`` no two jobs that are on
    several nodes share one of them.

    Derived: the hosts of all columns and of those of each kind, all GPUs, and whether every job may
    be everywhere.
    """

    speedups: Floats
    outputs: Floats
    discounts: Floats
    current: Ints
    least: Ints
    most: Ints
    allowed: Bools
    even: Bools
    capacity: Ints
    hosts: Ints
    kinds: Ints
    ranks: Ints
    power: float = -1.0
    most_nodes: int = 16
    avoid_interference: bool = True
    one_kind: bool = True
    by_host: Hosts = field(init=False, repr=False, compare=False)
    by_kind: tuple[Hosts, ...] = field(init=False, repr=False, compare=False)
    gpus: int = field(init=False, repr=False, compare=False)
    everywhere: bool = field(init=False, repr=False, compare=False)
    _now: States = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        edges = [0, *(np.nonzero(np.diff(self.kinds))[0] + 1).tolist(), len(self.kinds)]
        kinds = [slice(low, high) for low, high in pairwise(edges)]
        by_host = Hosts(slice(None), self.hosts)
        object.__setattr__(self, "by_host", by_host)
        object.__setattr__(self, "by_kind", tuple(Hosts(one, self.hosts[one]) for one in kinds))
        object.__setattr__(self, "gpus", int(self.capacity.sum()))
        object.__setattr__(self, "everywhere", bool(self.allowed.all()))
        object.__setattr__(self, "_now", by_host.sums(members_of(self.current)))

    def changed(self, states: States) -> Bools:
        """Which jobs of each member ``(J, P)`` do not have the GPUs of their hosts as now."""
        found: Bools = np.logical_or.reduce(self.by_host.sums(states) != self._now, axis=0)
        return found


def members_of(*divisions: Ints | States) -> States:
    """Divisions ``(J, N)`` as a population."""
    return np.stack([one.T.astype(np.int16) for one in divisions], axis=2)


def totals(states: States) -> States:
    """GPUs of each job in each member ``(J, P)``."""
    found: States = np.add.reduce(states, axis=0, dtype=np.int16)
    return found


def used(problem: Problem, states: States) -> NDArray[np.integer]:
    """GPUs of each node in each member ``(N, P)`` that all jobs have together."""
    most = len(problem.most) * int(problem.capacity.max(initial=0))
    found: NDArray[np.integer] = np.add.reduce(
        states, axis=1, dtype=np.int16 if most < _SURELY_IN_TWO_BYTES else np.int32
    )
    return found


def true_in(marks: Bools, axis: int = 0) -> NDArray[np.integer]:
    """How many are true along an axis."""
    small = marks.shape[axis] <= _MOST_IN_A_BYTE  # adds as they lie in memory, much faster
    found: NDArray[np.integer] = np.add.reduce(
        marks.view(np.int8), axis=axis, dtype=np.int8 if small else np.int16
    )
    return found


def true_at(marks: Bools) -> tuple[Ints, Ints]:
    """Rows and columns of what is true in a matrix, row by row; much faster than numpy's."""
    flat = marks.ravel().nonzero()[0]
    rows = flat // max(marks.shape[1], 1)
    return rows, flat - rows * marks.shape[1]


def realloc_factor(age_s: Floats, restarts: Floats, restart_s: float) -> Floats:
    """What a change of allocation counts, within 0..1 (algorithms D.1).

    ``(T - R delta) / (T + delta)`` with age T, restarts so far R and ``restart_s`` delta: what
    would have been left of a job's time with one restart more. A new job's is 0.
    """
    total_s = np.maximum(age_s + restart_s, 1e-9)
    return np.clip((age_s - restarts * restart_s) / total_s, 0.0, 1.0)


def fitness(problem: Problem, states: States) -> tuple[Floats, Floats]:
    """Fitness and use of each of P members, more is better, both ``(P,)``.

    Fitness is the power mean over jobs of speedups, each discounted where the job's allocation is
    not the current one; use is the part of the cluster's GPUs that would do the same without loss.
    """
    _, jobs, members = states.shape
    if not jobs:
        return np.ones(members), np.zeros(members)
    sizes = problem.speedups.shape[2]
    cell = np.minimum(totals(states), sizes - 1).astype(np.int64)
    cell += (true_in(states > 0) > 1) * sizes
    cell += (np.arange(jobs) * 2 * sizes)[:, None]
    speedups = problem.speedups.take(cell)
    speedups *= np.where(problem.changed(states), problem.discounts[:, None], 1.0)
    speedups += NOTHING_GAINED
    powered = 1.0 / speedups if problem.power == -1.0 else speedups**problem.power
    fit = powered.mean(axis=0) ** (1.0 / problem.power)
    use = problem.outputs.take(cell).sum(axis=0) / max(problem.gpus, 1)
    return fit, use
