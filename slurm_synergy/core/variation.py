"""New members of a population: children of two parents, and what chance makes of them."""

from __future__ import annotations

import numpy as np

from slurm_synergy.core.members import Bools, Floats, Ints, Problem, States, true_in, used

__all__ = ["children", "mutate"]

_CHANCE = 0.1  # of a row to be reset, of another to be emptied, and of a node of it then
_TIMIDITY = 2
_TRIES = 6  # to find a node for a job that may not be everywhere


def children(states: States, rng: np.random.Generator) -> States:
    """As many as there are parents, who stand best first; each has the first rows of one of them.

    Of two that are drawn the better one becomes a parent.
    """
    nodes, jobs, members = states.shape
    chosen = rng.integers(0, members, (2, members)).min(axis=0)
    rows = np.arange(jobs)[:, None]
    other = np.concatenate((chosen[-1:], chosen[:-1]))
    parent = np.where(rows < rng.integers(0, jobs, members), chosen, other)
    parent += rows * members
    return states.reshape(nodes, jobs * members).take(parent, axis=1)


def mutate(problem: Problem, states: States, rng: np.random.Generator) -> States:
    """Members with rows that are as now, emptier, or with more GPUs here and there."""
    nodes, jobs, members = states.shape
    states = states.copy()
    rows = states.reshape(nodes, jobs * members)
    drawn = _some_of(jobs * members, rng)
    rows[:, drawn] = problem.current.T.take(drawn // members, axis=1)
    drawn = _some_of(jobs * members, rng)
    kept = rng.random((nodes, len(drawn)), dtype=np.float32) >= _CHANCE
    rows[:, drawn] = rows.take(drawn, axis=1) * kept
    free = problem.capacity[:, None] > used(problem, states)
    own = states > 0
    own &= free[:, None, :]
    # Of a place that is in both the later one counts.
    _grow(problem, states, [_anywhere(problem, free, jobs, rng), _where_they_are(own, rng)], rng)
    return states


def _some_of(many: int, rng: np.random.Generator) -> Ints:
    """Which of ``many`` rows were drawn; few of them twice."""
    return rng.integers(0, many, rng.binomial(many, _CHANCE))


def _grow(problem: Problem, states: States, where: list[Ints], rng: np.random.Generator) -> None:
    """More of the job on the node, at most all that it has."""
    cells, flat = np.concatenate(where), states.reshape(-1)
    old = flat.take(cells)
    more = problem.capacity.take(cells // (states.shape[1] * states.shape[2])) - old + 1
    grown = rng.random(len(cells), dtype=np.float32) * np.maximum(more, 1)
    flat[cells] = old + grown.astype(np.int16)


def _boldness(members: int, rng: np.random.Generator) -> Floats:
    """How many of the jobs grow in each member: of some all of them do, of others a few.

    Where there are many jobs, what all of them grow by is taken from the last ones.
    """
    return rng.random(members) ** _TIMIDITY


def _anywhere(problem: Problem, free: Bools, jobs: int, rng: np.random.Generator) -> Ints:
    """About one of the ``free`` nodes for each job that grows."""
    nodes, members = free.shape
    there = free.T.ravel().nonzero()[0]  # member by member
    chance = np.bincount(there // nodes, minlength=members)
    many = rng.poisson(_boldness(members, rng) * jobs)
    many[chance == 0] = 0
    member = np.repeat(np.arange(members), many)
    job = rng.integers(0, jobs, len(member))
    tries = 1 if problem.everywhere else _TRIES
    rank = (rng.random((tries, len(member))) * chance.take(member)).astype(np.int64)
    rank += (np.cumsum(chance) - chance).take(member)
    node = there.take(rank) % nodes
    cells: Ints = (node * jobs + job) * members + member
    first: Ints = cells[0]
    if problem.everywhere:
        return first
    may = problem.allowed[job, node]
    found: Ints = cells[np.argmax(may, axis=0), np.arange(len(member))][may.any(axis=0)]
    return found


def _where_they_are(own: Bools, rng: np.random.Generator) -> Ints:
    """About one of its ``own`` nodes for each job that grows."""
    _, jobs, members = own.shape
    cells: Ints = own.ravel().nonzero()[0]
    rows = cells % (jobs * members)
    below = (_boldness(members, rng) / np.maximum(true_in(own), 1)).astype(np.float32)
    grows = rng.random(len(cells), dtype=np.float32) < below.ravel().take(rows)
    found: Ints = cells[grows]
    return found
