"""New members of a population: children of two parents, and what chance makes of them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.members import Bools, Ints, Problem, States, true_at, true_in, used

__all__ = ["children", "mutate"]

_CHANCE = 0.1  # of a row to be reset, of another to be emptied, and of a node of it then
_TIMIDITY = 2
_DRAWS = 65535


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
    row, member = true_at(rng.random((2 * jobs, members), dtype=np.float32) < _CHANCE)
    resets = int(row.searchsorted(jobs))
    states[:, row[:resets], member[:resets]] = problem.current.T[:, row[:resets]]
    row, member = row[resets:] - jobs, member[resets:]
    kept = rng.random((len(member), nodes), dtype=np.float32) >= _CHANCE
    states[:, row, member] *= kept.T
    free = (problem.capacity[:, None] > used(problem, states))[:, None, :]
    if not problem.everywhere:
        free = free & problem.allowed.T[:, :, None]
    own = free & (states > 0)
    for where in (free, own):
        _grow(problem, states, where, rng)
    return states


def _grow(problem: Problem, states: States, where: Bools, rng: np.random.Generator) -> None:
    """At most about one node of each job, of those ``where`` it may, gets more of the job.

    In some members it is one of every job, in others of a few: where there are many jobs, what all
    of them grow by is taken from the last ones. ``where`` may be alike for all jobs.
    """
    nodes, jobs, members = states.shape
    chance = np.maximum(true_in(where), 1)
    boldness = rng.random(members) ** _TIMIDITY
    below = (boldness * _DRAWS / chance).astype(np.uint16)
    # Chance goes from job to job.
    grows = _draws(rng, (jobs, nodes, members)) < below[:, None, :]
    grows &= where.transpose(1, 0, 2)
    cells = _job_by_job(nodes, jobs, members)[grows.ravel().nonzero()[0]]
    flat = states.reshape(-1)
    old = flat[cells]
    more = np.maximum(problem.capacity[cells // (jobs * members)] - old + 1, 1)
    flat[cells] = old + (rng.random(len(cells)) * more).astype(np.int16)


@lru_cache(maxsize=16)
def _job_by_job(nodes: int, jobs: int, members: int) -> Ints:
    """Where in a population lies what comes first, second and so on, job by job."""
    places = np.arange(nodes * jobs * members).reshape(nodes, jobs, members)
    return places.transpose(1, 0, 2).ravel()


def _draws(rng: np.random.Generator, shape: tuple[int, int, int]) -> NDArray[np.uint16]:
    """Numbers from 0 to 65535, two of each that the generator makes."""
    many = shape[0] * shape[1] * shape[2]
    pairs = rng.integers(0, 1 << 32, (many + 1) // 2, dtype=np.uint32)
    return pairs.astype("<u4", copy=False).view("<u2")[:many].reshape(shape)
