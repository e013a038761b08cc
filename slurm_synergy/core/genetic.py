"""A genetic search for the GPUs of all jobs at once (Pollux, OSDI '21, section 4.2; NSGA-II).

Members of the population with more fitness, or with more use of the cluster, live on; their
children mix rows of both parents, are changed at random, and are repaired until they can be run.
The random numbers come from the caller.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from slurm_synergy.core.members import Floats, Ints, Problem, States, fitness, members_of
from slurm_synergy.core.repair import repair
from slurm_synergy.core.variation import children, mutate

__all__ = ["Found", "search"]


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
    members ``(N, J, S)`` to begin with, beside the current allocation and changes of it.
    """
    states = _first(problem, rng, population, start)
    fit, use = fitness(problem, states)
    before = float(fit[0])  # the current allocation comes first
    best, most, idle, done = states[:, :, 0], before, 0, 0
    while problem.current.size:
        at = int(np.argmax(fit))
        if fit[at] > most:
            best, most, idle = states[:, :, at], float(fit[at]), 0
        if done >= generations or idle >= patience:
            break
        order = _best_first(fit, use)[:population]
        states = states.take(order, axis=2)
        fit, use = fit[order], use[order]
        done, idle = done + 1, idle + 1
        made = repair(problem, mutate(problem, children(states, rng), rng), rng)
        more, used = fitness(problem, made)
        new = _new(more, used, fit, use)
        states = np.concatenate((states, made.take(new, axis=2)), axis=2)
        fit, use = np.concatenate((fit, more[new])), np.concatenate((use, used[new]))
    last = _best_first(fit, use)[:population]
    return Found(
        best=best.T.astype(np.int64),
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
    seeds = [_with_least(problem, one) for one in (problem.current, 0 * problem.current)]
    known = members_of(problem.current)
    known = np.concatenate((known, repair(problem, members_of(*seeds), rng)), axis=2)
    if start is not None and start.shape[2]:
        begun = repair(problem, start[:, :, : population - known.shape[2]], rng)
        known = np.concatenate((known, begun), axis=2)
    many = max(population - known.shape[2], 1)
    copies = known[:, :, np.arange(many) % known.shape[2]]
    changed = repair(problem, mutate(problem, copies, rng), rng)
    return np.concatenate((known, changed), axis=2)


def _with_least(problem: Problem, division: Ints) -> Ints:
    """A division in which jobs without GPUs have the least that they may, as far as some are free.

    Those that find it hardest to be placed come first, of equal ones in their order.
    """
    found = division.copy()
    free = (problem.capacity - found.sum(axis=0)).tolist()
    without = np.nonzero(found.sum(axis=1) < problem.least)[0]
    reach = problem.allowed[without] @ problem.capacity
    for row in without[np.lexsort((-problem.least[without], reach))].tolist():
        left, may = int(problem.least[row]), problem.allowed[row].tolist()
        there = [gpus if ours else 0 for gpus, ours in zip(free, may, strict=True)]
        if sum(there) < left:
            continue
        # The fullest node that takes it all, else the emptiest ones.
        order = [(gpus < left, abs(gpus - left), node) for node, gpus in enumerate(there)]
        for _, _, node in sorted(order):
            given = min(left, there[node])
            if not given:
                break
            found[row, node] += given
            free[node] -= given
            left -= given
    return found


def _new(fit: Floats, use: Floats, old_fit: Floats, old_use: Floats) -> list[int]:
    """Which members are unlike the old ones and unlike those before them.

    Equal members have the same fitness and use; few others do, but for like nodes exchanged.
    """
    seen = set(zip(old_fit.tolist(), old_use.tolist(), strict=True))
    found: list[int] = []
    for at, one in enumerate(zip(fit.tolist(), use.tolist(), strict=True)):
        if one not in seen:
            seen.add(one)
            found.append(at)
    return found
