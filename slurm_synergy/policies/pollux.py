"""Pollux: all GPUs dealt out anew by a genetic search (OSDI '21; algorithms D.1).

It is a rival to compare with, at its best as far as we know how. It knows one speed of a job
whatever the GPU type, as its authors had it. For pools of unlike nodes it is adapted as in Sia's
study: every node counts as nodes of four GPUs, and of a share on several types only the one with
most GPUs is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from slurm_synergy.core.batching import with_batches
from slurm_synergy.core.columns import scale_limit, suits
from slurm_synergy.core.configurations import Capacities, tally
from slurm_synergy.core.contest import Contest, arrival
from slurm_synergy.core.elastic import (
    as_granted,
    configuration_of,
    gpus_per_replica,
    objection,
)
from slurm_synergy.core.genetic import Floats, Found, Ints, Problem, realloc_factor, search
from slurm_synergy.core.model import (
    Configuration,
    Decision,
    Elasticity,
    Grant,
    JobPhase,
    JobStatus,
    Node,
    Placement,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.node_parts import NodeParts
from slurm_synergy.core.one_speed import OneSpeed, relative
from slurm_synergy.core.packing import Request, Requests, layout_of, parts_of
from slurm_synergy.core.populations import Memory, Past
from slurm_synergy.core.room import GpuLayout, Room
from slurm_synergy.core.snapshot import held

__all__ = ["POLLUX", "Pollux", "Wanted", "shaped"]

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
    which it then gets one, as in Sia's study. ``seed`` is that of its random numbers.
    """

    name: str = "pollux"
    power: float = -1.0
    restart_s: float = 30.0
    population: int = 100
    generations: int = 100
    patience: int = 25
    part_gpus: int = 4
    most_nodes: int = 16
    avoid_interference: bool = True
    mixes: bool = False
    seed: int = 0
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
        """GPUs for each job that gets some."""
        contest = Contest.of(snapshot)
        board = _Board(snapshot, contest, self)
        found = self._search(snapshot, board)
        decided = _Round(snapshot, contest, board, found).decision()
        report = {
            "status": "feasible",
            "objective": found.fitness,
            "generations": found.generations,
            "jobs": len(board.jobs),
            "parameters": self.parameters,
        }
        return replace(decided, solver=report)

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
        rates = [self._speed.rates(status, size, total) for status in jobs]
        shape = (len(jobs), 2, total + 1)
        now = [held(status) for status in jobs]
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
            most=np.array([scale_limit(status) for status in jobs], dtype=np.int64),
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
            order = sorted(range(len(kinds)), key=lambda at: _pace(status, kinds[at]))
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


# what is made of it ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A job on a configuration, with the place that was found for it."""

    status: JobStatus
    configuration: Configuration
    layout: GpuLayout | None = None


class _Round:
    """From the best member to grants that certainly fit together."""

    def __init__(self, snapshot: Snapshot, contest: Contest, board: _Board, found: Found) -> None:
        self._snapshot, self._contest, self._board = snapshot, contest, board
        self._requests = Requests.of_snapshot(snapshot)
        self._room = Room(self._requests.pool)
        self._granted: list[tuple[JobStatus, Grant]] = []
        self._layouts: dict[int, GpuLayout] = {}
        self._chosen = self._wanted(found.best)

    def decision(self) -> Decision:
        """The policy's word."""
        for status in self._contest.kept:
            now = held(status)
            if now is not None:
                configuration = _as_held(status, now)
                self._put(status, configuration, self._request(status, configuration), now)
        later: list[Wanted] = []
        self._chosen.sort(key=lambda one: (not _stays(one), arrival(one.status)))
        for one in self._chosen:
            request = self._request(one.status, one.configuration)
            layout = one.layout
            if layout is None or not self._take(request, layout):
                later.append(one)
                continue
            self._grant(one.status, one.configuration, layout)
        for one in later:
            self._find(one.status, one.configuration)
        self._fill()
        self._granted.sort(key=lambda pair: arrival(pair[0]))
        return Decision(
            grants=tuple(grant for _, grant in self._granted),
            waiting=self._waiting(),
            packing=self._layouts,
        )

    def _wanted(self, best: Ints) -> list[Wanted]:
        """What the rows of the best member mean."""
        found = []
        for row, status in enumerate(self._board.jobs):
            parts = self._board.parts.by_node(best[row])
            one = shaped(status, parts) if parts else None
            if one is not None:
                found.append(one)
        batched = with_batches([(one.status, one.configuration) for one in found])
        pairs = zip(found, batched, strict=True)
        return [replace(one, configuration=configuration) for one, configuration in pairs]

    # placing ---------------------------------------------------------------------------------

    def _request(self, status: JobStatus, configuration: Configuration) -> Request:
        there = as_granted(self._snapshot, status, configuration)
        return self._requests.of(there, configuration)

    def _put(
        self, status: JobStatus, configuration: Configuration, request: Request, now: Placement
    ) -> None:
        """Grant a job what it holds, whether there is room or not."""
        self._room.take(request.held_parts)
        self._grant(status, configuration, layout_of(now))

    def _take(self, request: Request, layout: GpuLayout) -> bool:
        parts = parts_of(self._requests.pool, layout, request.need)
        fits = len(parts) == len(layout[1]) and self._room.fits(parts)
        if fits:
            self._room.take(parts)
        return fits

    def _find(self, status: JobStatus, configuration: Configuration) -> bool:
        """Put a job on the best place for a configuration; whether there is one."""
        request = self._request(status, configuration)
        now = held(status)
        layout = layout_of(now) if now is not None and request.may_stay else None
        if layout is None or not self._take(request, layout):
            layout = self._room.find(request.shape, request.need)
            if layout is None or not self._take(request, layout):
                return False
        self._grant(status, replace(configuration, gpu_type=layout[0]), layout)
        return True

    def _grant(self, status: JobStatus, configuration: Configuration, layout: GpuLayout) -> None:
        job_id = status.job.job_id
        self._layouts[job_id] = layout
        self._granted.append((status, Grant(job_id=job_id, configuration=configuration)))

    def _fill(self) -> None:
        """Give jobs without any GPUs the least that they may have of those that are left.

        They are left by shares on several types, by the chances of the search, or for want of
        memory. Those that hold some come first, then those that had the least service.
        """
        rest = [one for one in self._board.jobs if one.job.job_id not in self._layouts]
        rest.sort(key=lambda status: held(status) is None)
        for status in rest:
            if not self._room.free_gpus():
                return
            for configuration in self._modest(status):
                if self._find(status, configuration):
                    break

    def _modest(self, status: JobStatus) -> Iterator[Configuration]:
        """What the job holds, then the least that it may have on each type, the fastest first."""
        job, now = status.job, held(status)
        if job.elasticity is _RIGID:
            yield job.configuration
            return
        if now is not None and objection(status, now) is None:
            one = configuration_of(now)
            if one is not None:
                yield one
        kinds = sorted(self._board.parts.kinds, key=lambda kind: _pace(status, kind))
        for kind in kinds:
            if job.gpu_types and kind not in job.gpu_types:
                continue
            unit = gpus_per_replica(job, status.profile.scaling, kind)
            gpus = -(-job.least_gpus // unit) * unit
            if gpus <= job.most_gpus:
                plain = Configuration(gpus=gpus, nodes=1, gpu_type=kind)
                yield with_batches([(status, plain)])[0]

    # words -----------------------------------------------------------------------------------

    def _waiting(self) -> dict[int, Reason]:
        waiting = dict(self._contest.waiting)
        whole: Capacities | None = None
        for status in self._contest.competing:
            job = status.job
            if job.job_id in self._layouts:
                continue
            if whole is None:
                whole = tally(replace(one, capacity=one.total) for one in self._snapshot.nodes)
            reason = _NO_SHARE if suits(whole, job) else _never(job.least_gpus)
            if status.phase is JobPhase.RUNNING:
                reason = Reason(code=ReasonCode.PREEMPTED, text=f"preempted: {reason.text}")
            waiting[job.job_id] = reason
        return waiting


_NO_SHARE = Reason(
    code=ReasonCode.NO_GPUS,
    text="in the best division of the GPUs that was found the other jobs have them all, or what is "
    "left has not the shape or the memory that it needs",
)


def _never(gpus: int) -> Reason:
    return Reason(
        code=ReasonCode.NEVER_FITS,
        text=f"{gpus} GPUs in the shape that it asks for do not fit into the pool even when it is "
        "empty",
    )


def _pace(status: JobStatus, kind: str) -> tuple[float, str]:
    """Sorts the types on which a single GPU is faster for the job first."""
    scaling = status.profile.scaling
    speed = scaling.speeds.get(kind) if scaling else None
    rate = speed.model.rate(1, 1, speed.local_most) if speed else 0.0
    return -rate, kind


def shaped(status: JobStatus, parts: Sequence[tuple[Node, int]]) -> Wanted | None:
    """A share of hosts, reduced to the type with most GPUs and to a shape that the job may have."""
    job = status.job
    by_type: dict[str, list[tuple[str, int]]] = {}
    for node, gpus in parts:
        by_type.setdefault(node.gpu_type, []).append((node.name, gpus))
    kind = min(
        by_type, key=lambda one: (-sum(gpus for _, gpus in by_type[one]), _pace(status, one))
    )
    layout = by_type[kind]
    if job.elasticity is _RIGID:
        if sum(gpus for _, gpus in layout) != job.gpus or job.nodes not in (None, len(layout)):
            return Wanted(status=status, configuration=job.configuration)
        on_type = replace(job.configuration, gpu_type=kind)
        return Wanted(status=status, configuration=on_type, layout=(kind, tuple(layout)))
    unit = gpus_per_replica(job, status.profile.scaling, kind)
    each = min(gpus for _, gpus in layout)
    while each and each * len(layout) % unit:
        each -= 1
    if each * len(layout) < job.least_gpus:
        return None
    return Wanted(
        status=status,
        configuration=Configuration(gpus=each * len(layout), nodes=len(layout), gpu_type=kind),
        layout=(kind, tuple((name, each) for name, _ in layout)),
    )


def _stays(one: Wanted) -> bool:
    """Whether the job has these very GPUs now."""
    now = held(one.status)
    if now is None or one.layout is None:
        return False
    return now.gpu_type == one.layout[0] and now.gpu_layout == tuple(sorted(one.layout[1]))


def _as_held(status: JobStatus, now: Placement) -> Configuration:
    if status.job.elasticity is _RIGID:
        return status.job.configuration
    return configuration_of(now) or status.job.configuration


POLLUX = Pollux()
"""The policy called ``pollux``."""
