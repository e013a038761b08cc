"""What Gavel and its relatives have in common: shares of time, made real round by round.

A policy says for each job which part of the time it should have on each GPU type. What is granted
is kept for a quantum of time; when it ends all jobs compete anew, the one first that is furthest
behind its share (algorithms D.2). GPUs and batch size of every job are as its user asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.contest import Contest, arrival
from slurm_synergy.core.elastic import as_granted, configuration_of
from slurm_synergy.core.model import (
    Configuration,
    Decision,
    Elasticity,
    Grant,
    JobPhase,
    JobStatus,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.packing import Packer, Request, Requests
from slurm_synergy.core.rounds_of_time import Turn, is_renewal, turns
from slurm_synergy.core.snapshot import held
from slurm_synergy.core.type_rates import TypeRates, type_rates

__all__ = ["Demand", "SharedTime", "Shares"]

Floats = NDArray[np.float64]

# Jobs that were stopped at the end of a quantum need a moment to give their GPUs to others.
_SETTLING_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Who competes for what: J jobs, T GPU types.

    ``gpus`` ``(J,)`` is what each job takes, ``capacity`` ``(T,)`` the GPUs that those have to
    share whom no other job can keep from them.
    """

    snapshot: Snapshot
    jobs: tuple[JobStatus, ...]
    rates: TypeRates
    gpus: Floats
    capacity: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Parts of the time ``(J, T)``, and the report of how they were found.

    ``order`` is that in which pairs of a job and a type are served, for a policy that says so
    itself; None: as their parts and what they have received say.
    """

    parts: Floats
    report: Mapping[str, object]
    order: tuple[Turn, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTime(ABC):
    """A policy whose ``shares`` of time are made real round by round.

    ``quantum_s`` is how long what was granted is kept at least, in seconds. ``fills`` tells whether
    GPUs that become free within a quantum are given to waiting jobs; otherwise those that are not
    taken in its first minute stay idle until it ends. All fields but ``name`` are settings, numbers
    or yes and no.
    """

    name: str = ""
    quantum_s: float = 360.0
    fills: bool = True

    @property
    def parameters(self) -> Mapping[str, float]:
        """The settings of the policy, by name."""
        names = (one.name for one in fields(self) if one.name != "name")
        return {name: float(getattr(self, name)) for name in names}

    def as_reported(self, report: Mapping[str, object]) -> Self:
        """The policy with the settings that a plan's solver report names."""
        said = report.get("parameters")
        if not isinstance(said, Mapping):
            return self
        changes: dict[str, Any] = {
            name: type(getattr(self, name))(said[name]) for name in self.parameters if name in said
        }
        return replace(self, **changes)

    def choose(self, snapshot: Snapshot) -> Decision:
        """A GPU type for each job that runs."""
        round_ = _Round(snapshot, self.quantum_s, fills=self.fills)
        found = round_.decision(self.shares)
        return replace(found, solver={**found.solver, "parameters": self.parameters})

    @abstractmethod
    def shares(self, demand: Demand) -> Shares:
        """What each job of ``demand`` should have: the policy's rule."""


class _Round:
    """One round: who keeps what, and who competes."""

    def __init__(self, snapshot: Snapshot, quantum_s: float, *, fills: bool) -> None:
        self._snapshot, self._quantum_s, self._fills = snapshot, quantum_s, fills
        self._requests = Requests.of_snapshot(snapshot)
        renews = is_renewal(snapshot.now_s, snapshot.previous_s, quantum_s)
        self._starts = renews or fills or snapshot.now_s % quantum_s < _SETTLING_S
        contest = Contest.of(snapshot)
        self._pinned, self._competing = contest.kept, contest.competing
        self._waiting: dict[int, Reason] = dict(contest.waiting)
        # Within a quantum everybody keeps what they hold.
        self._kept = (
            contest.kept if renews else [one for one in snapshot.jobs if held(one) is not None]
        )

    def decision(self, shares_of: Callable[[Demand], Shares]) -> Decision:
        """The policy's word."""
        kept = [self._request(status, _as_held(status)) for status in self._kept]
        keeps = {status.job.job_id for status in self._kept}
        open_ = [one for one in self._competing if one.job.job_id not in keeps]
        holding = [self._requests.of(one) for one in open_ if held(one) is not None]
        packer = self._requests.packer([*kept, *holding])
        granted = {
            request.job_id: (status, _as_held(status))
            for status, request in zip(self._kept, kept, strict=True)
            if packer.add(request)
        }
        report: Mapping[str, object] = {}
        if open_ and self._starts and any(_could_start(packer, one) for one in open_):
            demand = self._demand()
            shares = shares_of(demand)
            report = shares.report
            self._walk(packer, demand, shares, granted)
        self._explain(packer, granted)
        order = sorted(granted.values(), key=lambda pair: arrival(pair[0]))
        return Decision(
            grants=tuple(
                Grant(job_id=status.job.job_id, configuration=one) for status, one in order
            ),
            waiting=self._waiting,
            packing={job_id: packer.layouts[job_id] for job_id in granted},
            solver=report,
        )

    def _demand(self) -> Demand:
        snapshot, jobs = self._snapshot, tuple(self._competing)
        rates = type_rates(snapshot, jobs)
        number = {kind: at for at, kind in enumerate(rates.gpu_types)}
        capacity = np.zeros(len(number))
        for node in snapshot.nodes:
            capacity[number[node.gpu_type]] += node.capacity.gpus
        usable = snapshot.usable
        for status in self._pinned:
            now = held(status)
            for name, share in now.shares if now is not None else ():
                if name in usable:
                    capacity[number[snapshot.node(name).gpu_type]] -= share.gpus
        return Demand(
            snapshot=snapshot,
            jobs=jobs,
            rates=rates,
            gpus=np.array([status.job.gpus for status in jobs], dtype=float),
            capacity=np.maximum(capacity, 0.0),
        )

    def _walk(
        self,
        packer: Packer,
        demand: Demand,
        shares: Shares,
        granted: dict[int, tuple[JobStatus, Configuration]],
    ) -> None:
        """Serve the most urgent pairs first, each job once."""
        kinds, jobs = demand.rates.gpu_types, demand.jobs
        order = shares.order
        if order is None:
            order = turns(
                shares.parts,
                _received_s(jobs, kinds, self._quantum_s / 2),
                demand.rates.rates,
                [arrival(status) for status in jobs],
            )
        free = {kind: packer.free_gpus((kind,)) for kind in kinds}
        for row, at in order:
            status, kind = jobs[row], kinds[at]
            job_id, gpus = status.job.job_id, status.job.gpus
            if job_id in granted or free[kind] < gpus:
                continue
            configuration = Configuration(gpus=gpus, nodes=status.job.nodes, gpu_type=kind)
            if packer.add(self._request(status, configuration)):
                granted[job_id] = (status, configuration)
                free[kind] = packer.free_gpus((kind,))

    def _request(self, status: JobStatus, configuration: Configuration) -> Request:
        there = as_granted(self._snapshot, status, configuration)
        return self._requests.of(there, configuration)

    # words -----------------------------------------------------------------------------------

    def _explain(
        self, packer: Packer, granted: Mapping[int, tuple[JobStatus, Configuration]]
    ) -> None:
        words = _Words(self._snapshot, packer, self._quantum_s, starts=self._starts)
        for status in (*self._kept, *self._competing):
            job_id = status.job.job_id
            if job_id in granted or job_id in self._waiting:
                continue
            reason = words.of(status)
            if status.phase is JobPhase.RUNNING:
                reason = Reason(code=ReasonCode.PREEMPTED, text=f"preempted: {reason.text}")
            self._waiting[job_id] = reason


class _Words:
    """Why jobs wait, one value for each case."""

    def __init__(
        self, snapshot: Snapshot, packer: Packer, quantum_s: float, *, starts: bool
    ) -> None:
        self._packer, self._quantum_s, self._starts = packer, quantum_s, starts
        whole = Requests.of_snapshot(snapshot)
        self._requests = whole
        self._known: dict[object, Reason] = {}

    def of(self, status: JobStatus) -> Reason:
        """The reason of a job that got nothing."""
        job = status.job
        free = self._packer.free_gpus(job.gpu_types)
        reach = self._requests.of(status).alike.reach
        case = (job.gpus, job.nodes, job.gpu_types, free, reach < job.gpus)
        if case not in self._known:
            self._known[case] = self._made(status, free, reach)
        return self._known[case]

    def _made(self, status: JobStatus, free: int, reach: int) -> Reason:
        job = status.job
        kinds = " or ".join(job.gpu_types) if job.gpu_types else "any type"
        if reach < job.gpus:
            return Reason(
                code=ReasonCode.NEVER_FITS,
                text=f"{job.gpus} GPUs ({kinds}) on {job.nodes or 'any number of'} nodes do not "
                "fit into the nodes of the pool that are up, even when they are empty",
            )
        if free < job.gpus:
            return Reason(
                code=ReasonCode.NO_GPUS,
                text=f"needs {job.gpus} GPUs ({kinds}); jobs that are further behind their share "
                f"leave {free}",
            )
        if not self._starts:
            return Reason(
                code=ReasonCode.NO_GPUS,
                text=f"waits for the end of the quantum of {self._quantum_s:g} s",
            )
        return Reason(
            code=ReasonCode.FRAGMENTED,
            text=f"{free} GPUs are free, but not {job.gpus} in the shape it asks for, with the "
            "memory and cores that it needs at least",
        )


def _could_start(packer: Packer, status: JobStatus) -> bool:
    return packer.free_gpus(status.job.gpu_types) >= status.job.gpus


def _as_held(status: JobStatus) -> Configuration:
    """The configuration that a job keeps."""
    now, job = held(status), status.job
    if now is None:
        return job.configuration
    if job.elasticity is Elasticity.RIGID:
        return Configuration(gpus=job.gpus, nodes=job.nodes, gpu_type=now.gpu_type)
    return configuration_of(now) or job.configuration


def _received_s(jobs: Sequence[JobStatus], kinds: Sequence[str], first_s: float) -> Floats:
    """Seconds that each job has had on each type, ``first_s`` more than it really had.

    Without that a job that is new on a type would come before all others, whatever its share.
    """
    found = np.full((len(jobs), len(kinds)), first_s)
    for row, status in enumerate(jobs):
        # Where only the sum is known it counts for every type.
        sum_s = 0.0 if status.held_s else status.attained_service_gpu_s / status.job.gpus
        for at, kind in enumerate(kinds):
            found[row, at] += status.held_s.get(kind, 0.0) + sum_s
    return found
