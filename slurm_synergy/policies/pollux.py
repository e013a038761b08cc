"""Pollux: all GPUs dealt out anew by a genetic search (OSDI '21; algorithms D.1).

It is a rival to compare with, at its best as far as we know how. It knows one speed of a job
whatever the GPU type, as its authors had it. For pools of unlike nodes it is adapted as in Sia's
study: every node counts as nodes of four GPUs, and of a share on several types only the one with
most GPUs is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from slurm_synergy.core.columns import scale_limit
from slurm_synergy.core.contest import Contest, arrival
from slurm_synergy.core.elastic import (
    objection,
)
from slurm_synergy.core.genetic import Found, search
from slurm_synergy.core.members import Floats, Ints, Problem, realloc_factor
from slurm_synergy.core.model import (
    Configuration,
    Decision,
    Elasticity,
    Snapshot,
)
from slurm_synergy.core.node_parts import NodeParts
from slurm_synergy.core.one_speed import OneSpeed, Reach, relative
from slurm_synergy.core.populations import Memory, Past
from slurm_synergy.core.room import GpuLayout
from slurm_synergy.core.rounds_of_time import is_renewal
from slurm_synergy.core.snapshot import held
from slurm_synergy.policies.pollux_grants import Granting, kept, pace, wanted

__all__ = ["POLLUX", "Pollux"]

_PARAMETERS = (
    *("power", "restart_s", "population", "generations", "patience", "part_gpus", "most_nodes"),
    *("avoid_interference", "mixes", "seed"),
)
_RIGID = Elasticity.RIGID
# Generations without a fitter member, where there are few jobs and so little to search.
_LEAST_PATIENCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Pollux:
    """The policy. ``power`` is the fairness exponent p, ``restart_s`` delta, what a restart is
    taken to cost, whatever the job. A search has ``population`` members and at most
    ``generations``, and ends after ``patience`` of them without a fitter one, or as many as there
    are jobs if these are fewer (and at least 8). Unlike nodes are cut into parts of ``part_gpus``
    GPUs. With ``mixes`` the search believes that a job can use GPUs of several types at once, of
    which it then gets one, as in Sia's study. ``seed`` is that of its random numbers. What a run
    has decided holds until its next periodic round (``by_rounds``).
    """

    name: str = "pollux"
    power: float = -1.0
    restart_s: float = 30.0
    population: int = 100
    generations: int = 100
    patience: int = 12
    part_gpus: int = 4
    most_nodes: int = 16
    avoid_interference: bool = True
    mixes: bool = False
    seed: int = 0
    by_rounds: ClassVar[bool] = True
    memory: Memory | None = field(default=None, compare=False, repr=False)

    @property
    def parameters(self) -> Mapping[str, float]:
        """The settings of the policy, by name."""
        return {name: getattr(self, name) for name in _PARAMETERS}

    def as_reported(self, report: Mapping[str, object]) -> Pollux:
        """The policy with the settings that a plan's solver report names."""
        said = report.get("parameters")
        if not isinstance(said, Mapping):
            return self
        changes: dict[str, Any] = {
            name: type(getattr(self, name))(said[name]) for name in _PARAMETERS if name in said
        }
        return replace(self, **changes)

    def begun(self) -> Pollux:
        """The policy for one run, whose searches begin with what the last one ended with."""
        return replace(self, memory=Memory())

    def choose(self, snapshot: Snapshot) -> Decision:
        """GPUs for each job that gets some.

        A run searches once in each ``round_s``, as published. In between, jobs start where the last
        search wanted them, or new ones on free GPUs, and none is moved.
        """
        contest = Contest.of(snapshot)
        board = _Board(snapshot, contest, self)
        decided = self._decided(snapshot)
        if decided is not None:
            report: dict[str, object] = {"status": "kept"}
            chosen = kept(board.jobs, decided)
        else:
            found = self._search(snapshot, board)
            report = {
                "status": "feasible",
                "objective": found.fitness,
                "generations": found.generations,
            }
            chosen = wanted(board.jobs, board.parts, found.best)
        granting = Granting(
            snapshot, contest, board.jobs, board.parts, chosen, searched=decided is None
        )
        decision = granting.decision()
        if decided is None and self.memory is not None:
            there = decision.packing or {}
            self.memory.decided = {
                one.job_id: (one.configuration, there[one.job_id]) for one in decision.grants
            }
        report.update(jobs=len(board.jobs), parameters=self.parameters)
        return replace(decision, solver=report)

    def _decided(self, snapshot: Snapshot) -> Mapping[int, tuple[Configuration, GpuLayout]] | None:
        """What holds still of what the last search gave to jobs; None when a search is due."""
        if self.memory is None or is_renewal(snapshot.now_s, snapshot.previous_s, snapshot.round_s):
            return None
        return self.memory.decided

    def _search(self, snapshot: Snapshot, board: _Board) -> Found:
        ids = tuple(status.job.job_id for status in board.jobs)
        past = self.memory.before(snapshot.round) if self.memory else None
        found = search(
            board.problem(snapshot),
            np.random.default_rng((self.seed, snapshot.round)),
            population=self.population,
            generations=self.generations,
            patience=min(self.patience, max(len(ids), _LEAST_PATIENCE)),
            start=past.rows_of(ids, board.parts.names) if past else None,
        )
        if self.memory is not None:
            self.memory.ended = Past(
                job_ids=ids, columns=board.parts.names, population=found.population
            )
        return found


# what is searched ------------------------------------------------------------------------------


class _Board:
    """The jobs that compete, those with the least service first, and the parts of nodes."""

    def __init__(self, snapshot: Snapshot, contest: Contest, policy: Pollux) -> None:
        self._policy = policy
        self.jobs = sorted(
            contest.competing, key=lambda one: (one.attained_service_gpu_s, arrival(one))
        )
        self.parts = NodeParts(snapshot.nodes, contest.taken(), policy.part_gpus)
        self._speed = OneSpeed.of_snapshot(snapshot)

    def problem(self, snapshot: Snapshot) -> Problem:
        """The matrix that is searched for."""
        jobs, policy, parts = self.jobs, self._policy, self.parts
        total, size = parts.gpus, int(parts.capacity.max(initial=1))
        fair = max(total // max(len(jobs), 1), 1)
        shape = (len(jobs), 2, total + 1)
        now = [held(status) for status in jobs]
        most = [scale_limit(status) for status in jobs]
        upto = [max(own, one.gpus if one else 0) for own, one in zip(most, now, strict=True)]
        reach = [Reach(most=one, fair=fair, size=size, total=total) for one in upto]
        rates = self._speed.rates(list(zip(jobs, reach, strict=True)))
        mine = [
            one if one is not None and objection(status, one) is None else None
            for status, one in zip(jobs, now, strict=True)
        ]
        return Problem(
            speedups=np.array([relative(one, fair, size) for one in rates]).reshape(shape),
            outputs=np.array([relative(one, 1, size) for one in rates]).reshape(shape),
            discounts=self._discounts(snapshot.now_s),
            current=parts.shares(mine),
            least=np.array([status.job.least_gpus for status in jobs], dtype=np.int64),
            most=np.array(most, dtype=np.int64),
            allowed=parts.allowed(jobs),
            even=np.array(
                [one.job.elasticity is not _RIGID or one.job.nodes is not None for one in jobs],
                dtype=bool,
            ),
            capacity=parts.capacity,
            hosts=parts.host,
            kinds=parts.kind,
            ranks=self._ranks(),
            power=policy.power,
            most_nodes=policy.most_nodes,
            avoid_interference=policy.avoid_interference,
            one_kind=not policy.mixes,
        )

    def _ranks(self) -> Ints:
        """The GPU types of the pool for each job, by number, the fastest as 0."""
        kinds = self.parts.kinds
        found = np.zeros((len(self.jobs), len(kinds)), dtype=np.int64)
        for row, status in enumerate(self.jobs):
            order = sorted(range(len(kinds)), key=lambda at: pace(status, kinds[at]))
            found[row, order] = range(len(kinds))
        return found

    def _discounts(self, now_s: float) -> Floats:
        """Of a job that holds nothing it is 1: a new one would be left out at first."""
        ages_s = [max(now_s - status.job.submitted_s, 0.0) for status in self.jobs]
        factors = realloc_factor(
            np.array(ages_s, dtype=float),
            np.array([status.restarts for status in self.jobs], dtype=float),
            self._policy.restart_s,
        )
        holds = np.array([held(status) is not None for status in self.jobs], dtype=bool)
        return np.where(holds, factors, 1.0)


POLLUX = Pollux()
"""The policy called ``pollux``."""
