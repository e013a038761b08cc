"""A genetic search for the GPUs of all jobs at once (Pollux, OSDI '21, section 4.2; NSGA-II).

A member of the population is a matrix of J jobs and N nodes: how many GPUs of each node each job
has. Members with more fitness, or with more use of the cluster, live on; their children mix rows of
both parents, are changed at random, and are repaired until they can be run. The random numbers come
from the caller.

All P members of a population are one array ``(J, N, P)``: with the members last, sums over jobs or
nodes add whole rows of the array, which is several times as fast. Nodes may be parts of nodes;
parts of one host stand beside each other.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Found", "Problem", "fitness", "mutate", "realloc_factor", "repair", "search"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
States = NDArray[np.int16]
Bools = NDArray[np.bool_]

NOTHING_GAINED: Final = 1e-3
"""Added to every speedup, so that a job without GPUs can be counted with a power below 0."""

_RESET = _CLEAR_ROW = _CLEAR = 0.1
_TIMIDITY = 2
_DRAWS = 65535


class _Hosts:
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

    def sums(self, states: States) -> States:
        """GPUs by host ``(J, H, P)`` of the columns; they may be ``states`` itself."""
        there = states[:, self.columns]
        if not self._later:
            return there
        # Many times as fast as numpy's reduceat.
        found = there[:, self.starts]
        for those, columns in self._later:
            found[:, those] += there[:, columns]
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
    _hosts: _Hosts = field(init=False, repr=False, compare=False)
    _by_kind: tuple[_Hosts, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        edges = [0, *(np.nonzero(np.diff(self.kinds))[0] + 1).tolist(), len(self.kinds)]
        kinds = [slice(low, high) for low, high in pairwise(edges)]
        object.__setattr__(self, "_hosts", _Hosts(slice(None), self.hosts))
        by_kind = tuple(_Hosts(one, self.hosts[one]) for one in kinds)
        object.__setattr__(self, "_by_kind", by_kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search has found: the ``best`` member ``(J, N)``, and the last ``population``.

    ``fitness`` is that of the best one, ``before`` that of the current allocation.
    """

    best: Ints
    population: States
    fitness: float
    before: float
    generations: int


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
    jobs, _, members = states.shape
    if not jobs:
        return np.ones(members), np.zeros(members)
    sizes = problem.speedups.shape[2]
    spread = np.add.reduce(states > 0, axis=1, dtype=np.int16) > 1
    cell = np.minimum(_total(states), sizes - 1) + spread * sizes
    cell += (np.arange(jobs) * 2 * sizes)[:, None]
    there, now = (problem._hosts.sums(one) for one in (states, _current(problem)))
    changed = (there != now).any(axis=1)
    speedups = problem.speedups.ravel()[cell]
    speedups *= np.where(changed, problem.discounts[:, None], 1.0)
    speedups += NOTHING_GAINED
    powered = 1.0 / speedups if problem.power == -1.0 else speedups**problem.power
    fit = powered.mean(axis=0) ** (1.0 / problem.power)
    use = problem.outputs.ravel()[cell].sum(axis=0) / max(int(problem.capacity.sum()), 1)
    return fit, use


def _total(states: States) -> NDArray[np.int64]:
    """GPUs of each job ``(J, P)``."""
    found: NDArray[np.int64] = np.add.reduce(states, axis=1, dtype=np.int16).astype(np.int64)
    return found


def _current(problem: Problem) -> States:
    return problem.current.astype(np.int16)[:, :, None]


# repair ----------------------------------------------------------------------------------------


def repair(problem: Problem, states: States, rng: np.random.Generator) -> States:
    """Members that can be run, by taking GPUs away; the order of the rules matters.

    Nodes that are not for a job; other kinds; interference; the job's most GPUs; its most nodes;
    each node's GPUs; equal numbers on hosts; the job's least GPUs.
    """
    states = states.copy() if problem.allowed.all() else states * problem.allowed[:, :, None]
    if problem.one_kind and len(problem._by_kind) > 1:
        _keep_one_kind(problem, states)
    if problem.avoid_interference:
        _part_the_spread(states)
    _cut_to_most(problem, states, rng)
    if states.shape[1] > problem.most_nodes:
        states *= np.cumsum(states > 0, axis=1, dtype=np.int16) <= problem.most_nodes
    states = _clipped(states, problem.capacity[None, :, None].astype(np.int32))
    for hosts in problem._by_kind:
        _make_even(problem.even, hosts, states)
    states *= (_total(states) >= problem.least[:, None])[:, None, :]
    return states


def _keep_one_kind(problem: Problem, states: States) -> None:
    """Only the kind of which a job has most GPUs, of equally many the one that it prefers."""
    kinds = len(problem._by_kind)
    scores = [
        np.add.reduce(states[:, hosts.columns], axis=1, dtype=np.int32) * kinds
        - problem.ranks[:, kind, None]
        for kind, hosts in enumerate(problem._by_kind)
    ]
    best = np.argmax(scores, axis=0)
    for kind, hosts in enumerate(problem._by_kind):
        states[:, hosts.columns] *= (best == kind)[:, None, :]


def _part_the_spread(states: States) -> None:
    """Only the first of several jobs that are on several nodes keeps its part of a node."""
    taken = states > 0
    spread = np.add.reduce(taken, axis=1, dtype=np.int16) > 1
    taken &= spread[:, None, :]
    later = taken & (np.cumsum(taken, axis=0, dtype=np.int16) > 1)
    states *= ~later


def _cut_to_most(problem: Problem, states: States, rng: np.random.Generator) -> None:
    """At most so many GPUs of each job, nodes visited in random order."""
    jobs, members = np.nonzero(_total(states) > problem.most[:, None])
    if not len(members):
        return
    order = np.argsort(rng.random((len(members), states.shape[1]), dtype=np.float32), axis=1)
    rows = np.take_along_axis(states[jobs, :, members], order, axis=1)
    cut = _clipped(rows.T, problem.most[jobs].astype(np.int32)).T
    back = np.empty_like(cut)
    np.put_along_axis(back, order, cut, axis=1)
    states[jobs, :, members] = back


def _clipped(states: States, most: NDArray[np.int32]) -> States:
    """``states`` with sums along the first axis of at most ``most``; the first keep theirs."""
    upto = np.minimum(np.cumsum(states, axis=0, dtype=np.int32), most)
    upto[1:] -= upto[:-1].copy()
    return upto.astype(np.int16)


def _make_even(even: Bools, hosts: _Hosts, states: States) -> None:
    """Equally many GPUs on each of those hosts of a job: the most there can be, on the fewest."""
    there = hosts.sums(states)
    if there.shape[1] < 2:
        return
    most = there.max(axis=1, keepdims=True)
    unlike = ((there > 0) & (there < most)).any(axis=1) & even[:, None]
    jobs, members = np.nonzero(unlike)
    if not len(members):
        return
    rows = there[jobs, :, members].astype(np.int64)  # (R, H)
    ranked = -np.sort(-rows, axis=1)
    best = np.argmax(ranked * np.arange(1, rows.shape[1] + 1), axis=1)
    level = ranked[np.arange(len(rows)), best][:, None]
    keep = np.where(rows >= level, level, 0)[:, hosts.host]
    parts = states[jobs, hosts.columns, members].astype(np.int64)
    upto = np.cumsum(parts, axis=1)
    before = (upto - parts)[:, hosts.starts][:, hosts.host]
    ends, begins = np.minimum(upto - before, keep), np.minimum(upto - parts - before, keep)
    states[jobs, hosts.columns, members] = ends - begins


# variation -------------------------------------------------------------------------------------


def mutate(problem: Problem, states: States, rng: np.random.Generator) -> States:
    """Members with rows that are as now, emptier, or with more GPUs here and there."""
    jobs, nodes, members = states.shape
    states = states.copy()
    row, member = np.nonzero(rng.random((jobs, members), dtype=np.float32) < _RESET)
    states[row, :, member] = problem.current[row]
    row, member = np.nonzero(rng.random((jobs, members), dtype=np.float32) < _CLEAR_ROW)
    kept = rng.random((len(member), nodes), dtype=np.float32) >= _CLEAR
    states[row, :, member] *= kept
    used = np.add.reduce(states, axis=0, dtype=np.int16)
    free = (problem.capacity[:, None] > used)[None]
    if not problem.allowed.all():
        free = free & problem.allowed[:, :, None]
    own = free & (states > 0)
    for where in (free, own):
        _grow(problem, states, where, rng)
    return states


def _grow(problem: Problem, states: States, where: Bools, rng: np.random.Generator) -> None:
    """At most about one node of each job, of those ``where`` it may, gets more of the job.

    In some members it is one of every job, in others of a few: where there are many jobs, what all
    of them grow by is taken from the last ones.
    """
    _, nodes, members = states.shape
    chance = np.maximum(np.add.reduce(where, axis=1, dtype=np.int16), 1)
    boldness = rng.random(members) ** _TIMIDITY
    below = (boldness * _DRAWS / chance).astype(np.uint16)[:, None, :]
    draws = rng.integers(0, _DRAWS, states.shape, dtype=np.uint16, endpoint=True)
    grows = draws < below
    grows &= where
    cells = np.flatnonzero(grows)
    flat = states.reshape(-1)
    old = flat[cells]
    more = np.maximum(problem.capacity[cells // members % nodes] - old + 1, 1)
    flat[cells] = old + (rng.random(len(cells)) * more).astype(np.int16)


def _children(states: States, rng: np.random.Generator) -> States:
    """As many as there are parents, who stand best first; each has the first rows of one of them.

    Of two that are drawn the better one becomes a parent.
    """
    jobs, _, members = states.shape
    chosen = rng.integers(0, members, (2, members)).min(axis=0)
    first = np.arange(jobs)[:, None] < rng.integers(0, jobs, members)
    mixed: States = np.where(
        first[:, None, :],
        np.take(states, chosen, axis=2),
        np.take(states, np.roll(chosen, 1), axis=2),
    )
    return mixed


# survival --------------------------------------------------------------------------------------


def _best_first(fit: Floats, use: Floats) -> Ints:
    """Members in the order of NSGA-II: by front, in each front those apart from others first."""
    order = np.lexsort((-use, -fit))
    fronts = np.array(_fronts(use[order].tolist()), dtype=np.int64)
    by_front = np.argsort(fronts, kind="stable")
    order, fronts = order[by_front], fronts[by_front]
    apart = np.zeros(len(order))
    for one in (fit, use):
        values = one[order]
        span = max(float(values.max() - values.min()), 1e-12)
        apart[1:-1] += np.abs(values[2:] - values[:-2]) / span
    edges = fronts[1:] != fronts[:-1]
    apart[:-1][edges] = apart[1:][edges] = apart[0] = apart[-1] = np.inf
    found: Ints = order[np.lexsort((-apart, fronts))]
    return found


def _fronts(uses: list[float]) -> list[int]:
    """The number of the front of each member; they come with the most fitness first.

    A member is beaten by a front whose last member, the one with the most use, has as much use.
    """
    ends: list[float] = []  # of each front the most use, negative, ascending
    found = []
    for use in uses:
        front = bisect_right(ends, -use)
        if front == len(ends):
            ends.append(-use)
        else:
            ends[front] = -use
        found.append(front)
    return found


# the search ------------------------------------------------------------------------------------


def search(
    problem: Problem,
    rng: np.random.Generator,
    *,
    population: int = 100,
    generations: int = 100,
    patience: int = 100,
    start: States | None = None,
) -> Found:
    """The fittest allocation that was found within ``generations``; the current one on a tie.

    It ends before when ``patience`` generations in a row have found nothing fitter. ``start`` are
    members ``(J, N, S)`` to begin with, beside the current allocation and changes of it.
    """
    marks = rng.integers(1, 1 << 36, problem.current.shape)
    states = _first(problem, rng, population, start)
    fit, use = fitness(problem, states)
    before = float(fit[0])  # the current allocation comes first
    best, most, idle, done = states[:, :, 0], before, 0, 0
    keys = _keys(states, marks)
    while problem.current.size:
        at = int(np.argmax(fit))
        if fit[at] > most:
            best, most, idle = states[:, :, at], float(fit[at]), 0
        if done >= generations or idle >= patience:
            break
        order = _best_first(fit, use)[:population]
        states = np.take(states, order, axis=2)
        fit, use, keys = fit[order], use[order], keys[order]
        done, idle = done + 1, idle + 1
        made = repair(problem, mutate(problem, _children(states, rng), rng), rng)
        fresh = _keys(made, marks)
        new = _new(fresh, keys)
        made, keys = np.take(made, new, axis=2), np.concatenate((keys, fresh[new]))
        more, used = fitness(problem, made)
        states = np.concatenate((states, made), axis=2)
        fit, use = np.concatenate((fit, more)), np.concatenate((use, used))
    last = _best_first(fit, use)[:population]
    return Found(
        best=best.astype(np.int64),
        population=states[:, :, last],
        fitness=most,
        before=before,
        generations=done,
    )


def _first(
    problem: Problem, rng: np.random.Generator, population: int, start: States | None
) -> States:
    """The current allocation, what there is to begin with, and changes of it all.

    There always are members in which as many jobs as can be have their least, beside what others
    have now or with nothing beside: the search finds these late, and a job without GPUs costs most.
    """
    current = _current(problem)
    seeds = [_with_least(problem, one) for one in (problem.current, 0 * problem.current)]
    known = np.concatenate((current, repair(problem, np.stack(seeds, axis=2), rng)), axis=2)
    if start is not None and start.shape[2]:
        begun = repair(problem, start[:, :, : population - known.shape[2]], rng)
        known = np.concatenate((known, begun), axis=2)
    many = max(population - known.shape[2], 1)
    copies = known[:, :, np.arange(many) % known.shape[2]]
    changed = repair(problem, mutate(problem, copies, rng), rng)
    return np.concatenate((known, changed), axis=2)


def _with_least(problem: Problem, states: Ints) -> States:
    """A member in which jobs without GPUs have the least that they may, as far as some are free.

    Those that find it hardest to be placed come first, of equal ones in their order.
    """
    found = states.astype(np.int16)
    free = problem.capacity - found.sum(axis=0)
    without = np.nonzero(found.sum(axis=1) < problem.least)[0]
    reach = problem.allowed[without] @ problem.capacity
    for row in without[np.lexsort((-problem.least[without], reach))].tolist():
        left, there = int(problem.least[row]), np.where(problem.allowed[row], free, 0)
        if there.sum() < left:
            continue
        # The fullest node that takes it all, else the emptiest ones.
        for node in np.lexsort((np.abs(there - left), there < left)).tolist():
            given = min(left, int(there[node]))
            found[row, node] += given
            free[node] -= given
            left -= given
    return found


def _keys(states: States, marks: Ints) -> Floats:
    """A number for each member ``(P,)``: the same for equal ones, most likely not for others.

    With marks below 2^36 the sums are exact.
    """
    rows = states.reshape(-1, states.shape[2]).astype(np.float64)
    found: Floats = marks.ravel().astype(np.float64) @ rows
    return found


def _new(made: Floats, there: Floats) -> Ints:
    """Which of ``made`` are unlike ``there`` and unlike those before them; by their keys."""
    _, first = np.unique(np.concatenate((there, made)), return_index=True)
    found: Ints = np.sort(first[first >= len(there)]) - len(there)
    return found
