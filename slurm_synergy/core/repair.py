"""Members that cannot be run are repaired by taking GPUs away (Pollux, OSDI '21, section 4.2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.members import Bools, Hosts, Problem, States, totals, true_at, true_in, used

__all__ = ["repair"]

_ORDERS = 64
"""Orders of nodes of which each row that is cut is visited in one."""


def repair(problem: Problem, states: States, rng: np.random.Generator) -> States:
    """Members that can be run; the order of the rules matters.

    Nodes that are not for a job; other kinds; interference; the job's most GPUs; its most nodes;
    each node's GPUs; equal numbers on hosts; the job's least GPUs.
    """
    states = states.copy()
    if not problem.everywhere:
        states *= problem.allowed.T[:, :, None]
    if problem.one_kind and len(problem.by_kind) > 1:
        _keep_one_kind(problem, states)
    if problem.avoid_interference:
        _part_the_spread(states)
    _cut_to_most(problem, states, rng)
    if len(states) > problem.most_nodes:
        states *= np.cumsum(states > 0, axis=0, dtype=np.int16) <= problem.most_nodes
    _cut_to_capacity(problem, states)
    # A job that has GPUs of one kind only is even on all hosts if it is so on those of its kind.
    for hosts in (problem.by_host,) if problem.one_kind else problem.by_kind:
        _make_even(problem.even, hosts, states)
    states *= (totals(states) >= problem.least[:, None]).astype(np.int16)
    return states


def _keep_one_kind(problem: Problem, states: States) -> None:
    """Only the kind of which a job has most GPUs, of equally many the one that it prefers."""
    there = np.stack([totals(states[hosts.columns]) for hosts in problem.by_kind])
    jobs, members = true_at(true_in(there > 0) > 1)
    if not len(members):
        return
    found = there[:, jobs, members].astype(np.int64) * len(there) - problem.ranks.T[:, jobs]
    best = np.argmax(found, axis=0)
    keep = np.ones_like(there)
    keep[:, jobs, members] = np.arange(len(there))[:, None] == best
    for hosts, there in zip(problem.by_kind, keep, strict=True):
        states[hosts.columns] *= there


def _part_the_spread(states: States) -> None:
    """Only the first of several jobs that are on several nodes keeps its part of a node."""
    taken = states > 0
    taken &= true_in(taken) > 1
    nodes, members = true_at(true_in(taken, axis=1) > 1)
    if not len(members):
        return
    those = taken[nodes, :, members]  # (R, J)
    those[np.arange(len(those)), np.argmax(those, axis=1)] = False
    row, job = true_at(those)
    states[nodes[row], job, members[row]] = 0


def _cut_to_most(problem: Problem, states: States, rng: np.random.Generator) -> None:
    """At most so many GPUs of each job, nodes visited in random order."""
    jobs, members = true_at(totals(states) > problem.most[:, None])
    if not len(members):
        return
    orders = rng.permuted(np.tile(np.arange(len(states)), (_ORDERS, 1)), axis=1).T
    order = orders.take(rng.integers(0, _ORDERS, len(members)), axis=1)  # (N, R)
    cells = order * (states.shape[1] * states.shape[2])
    cells += jobs * states.shape[2] + members
    flat = states.reshape(-1)
    flat[cells] = _clipped(flat.take(cells), problem.most[jobs])


def _cut_to_capacity(problem: Problem, states: States) -> None:
    """No more GPUs of a node than it has; the first jobs keep theirs."""
    nodes, members = true_at(used(problem, states) > problem.capacity[:, None])
    there = states.transpose(1, 0, 2)[:, nodes, members]  # (J, R)
    states.transpose(1, 0, 2)[:, nodes, members] = _clipped(there, problem.capacity[nodes])


def _clipped(rows: NDArray[np.integer], most: NDArray[np.int64]) -> NDArray[np.int32]:
    """``rows`` with sums along the first axis of at most ``most``; the first keep theirs."""
    upto = np.minimum(np.cumsum(rows, axis=0, dtype=np.int32), most.astype(np.int32))
    upto[1:] -= upto[:-1].copy()
    return upto


def _make_even(even: Bools, hosts: Hosts, states: States) -> None:
    """Equally many GPUs on each of those hosts of a job: the most there can be, on the fewest."""
    there = hosts.sums(states)
    if len(there) < 2:
        return
    unlike = (there > 0) & (there < np.maximum.reduce(there, axis=0))
    jobs, members = true_at(np.logical_or.reduce(unlike, axis=0) & even[:, None])
    if not len(members):
        return
    rows = there[:, jobs, members]  # (H, R)
    ranked = -np.sort(-rows, axis=0)
    many = np.arange(1, len(rows) + 1, dtype=np.int32)[:, None]
    best = np.argmax(ranked * many, axis=0)
    level = ranked[best, np.arange(len(best))]
    keep = np.where(rows >= level, level, 0)
    if not hosts.whole:
        keep = keep[hosts.host]
        parts = states[hosts.columns, jobs, members]
        upto = np.cumsum(parts, axis=0, dtype=np.int32)
        before = (upto - parts)[hosts.starts][hosts.host]
        keep = np.minimum(upto - before, keep) - np.minimum(upto - parts - before, keep)
    states[hosts.columns, jobs, members] = keep
