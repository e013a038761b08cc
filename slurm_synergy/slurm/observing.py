"""From a reading of Slurm to the observation that a round decides on.

Most jobs of a long queue wait, and their records stay as they are. What was made of such a record
is kept for as long as its facts are the very object that they were at the last reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_synergy.cluster import Observation, ObservedJob, Record
from slurm_synergy.core.model import (
    Enforcement,
    Job,
    JobPhase,
    JobStatus,
    Placement,
    Reason,
    ReasonCode,
)
from slurm_synergy.core.resources import Resources
from slurm_synergy.slurm import facts as slurm_facts
from slurm_synergy.slurm.arrays import ArrayPlan, plan_arrays
from slurm_synergy.slurm.ceilings import Ceilings
from slurm_synergy.slurm.facts import JobFacts, JobState, NodeFacts, ReservationFacts
from slurm_synergy.slurm.follow import Described, holds_now
from slurm_synergy.slurm.maintenance import MaintenanceGate, ahead_of, end_s
from slurm_synergy.slurm.pool import UNTYPED, NodeMemory, allocated, free_on, gpu_type_of
from slurm_synergy.slurm.request import is_held, is_passed_through, waits_on
from slurm_synergy.slurm.views import JobView, JobViews

__all__ = ["Observer", "Reading"]

_REQUEUED = "job_requeued"

Holdings = tuple[tuple[str, Resources], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One look at queue and nodes, at ``now_s`` (epoch seconds). Jobs ascending by id."""

    jobs: Mapping[int, JobFacts]
    nodes: Mapping[str, NodeFacts]
    now_s: float

    def arrays(self) -> ArrayPlan:
        """Which members of job arrays to split off, and which must not start."""
        gpus = sum(sum(node.gpus.values()) for node in self.nodes.values())
        members = [
            facts
            for facts in self.jobs.values()
            if facts.array_job_id is not None and not is_passed_through(facts)
        ]
        return plan_arrays(members, pool_gpus=gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """A waiting job as it was made of its facts.

    ``is_free``: nothing in the facts keeps it from being planned, whatever the time.
    """

    facts: JobFacts
    view: JobView
    seen: ObservedJob
    is_free: bool


class Observer:
    """Makes observations. Not thread-safe.

    ``refusal`` tells why a job's last start keeps it from being planned, ``ceilings`` which sizes
    are not to be offered. ``default_limit_s`` is the time limit of jobs that have none of their own
    (None: none). ``fixed`` tells of a node by name whether jobs have fixed shares there.
    """

    def __init__(
        self,
        views: JobViews,
        refusal: Callable[[JobFacts, float], Reason | None],
        ceilings: Ceilings,
        *,
        enforcement: Enforcement,
        default_limit_s: float | None,
        fixed: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._views, self._refusal, self._ceilings = views, refusal, ceilings
        self._kinds = frozenset[str]()
        self._below: dict[int, tuple[Job, frozenset[str], Job]] = {}
        self._enforcement, self._default_limit_s = enforcement, default_limit_s
        self._gate, self._nodes = MaintenanceGate(), NodeMemory(fixed=fixed)
        self._held: dict[int, Holdings] = {}
        self._waiting: dict[int, _Waiting] = {}
        self.in_use: Mapping[str, Resources] = {}
        """What our jobs hold or are about to, by node, as of the last observation."""

    def observation(
        self,
        reading: Reading,
        records: Mapping[int, Record],
        *,
        reserved: Sequence[str] | frozenset[str] | None,
        others: Sequence[ReservationFacts],
    ) -> Observation:
        """``reserved`` are the nodes of our reservation, None when there is none to be.

        ``others`` are the reservations of others.
        """
        self._kinds = frozenset(gpu_type_of(node) or UNTYPED for node in reading.nodes.values())
        jobs, starting = self._jobs(reading, records)
        self._forget_all_but(reading.jobs)
        nodes = self._nodes.values(reading.nodes.values(), ours=self.in_use, reserved=reserved)
        free = {
            node.name: free_on(
                reading.nodes[node.name],
                node,
                starting.get(node.name, Resources()),
                self._enforcement,
            )
            for node in nodes
        }
        planned, nodes = self._gate.pass_through(
            jobs,
            nodes,
            ahead_of(others, reading.now_s),
            {name: left.gpus for name, left in free.items()},
            lambda seen: self.ends_s(
                seen.job, _service_gpu_s(records.get(seen.job.job_id)), reading.now_s
            ),
            reading.now_s,
        )
        return Observation(nodes=nodes, jobs=planned, free=free, enforcement=self._enforcement)

    def _jobs(
        self, reading: Reading, records: Mapping[int, Record]
    ) -> tuple[list[ObservedJob], dict[str, Resources]]:
        """The jobs to plan with, and what those that are starting will hold, by node."""
        jobs, starting, ours = [], dict[str, Resources](), dict[str, Resources]()
        arrays, waiting, view_of = reading.arrays().waiting, self._waiting, self._views.view
        for job_id, facts in reading.jobs.items():
            record = records.get(job_id)
            lease = record.lease if record is not None else None
            known = waiting.get(job_id)
            if (
                known is not None
                and known.facts is facts
                and lease is None
                and known.view is view_of(facts)  # which depends on more than the facts
            ):
                jobs.append(self._still_waiting(known, reading.now_s, arrays))
                continue
            waiting.pop(job_id, None)
            phase = _phase(facts, lease is not None)
            held = self._holdings(facts)
            _add(ours, held)
            if phase is JobPhase.STARTING and not held and lease is not None:
                _add(starting, tuple(lease.granted.items()) or lease.placement.shares)
            if _is_somebody_elses(facts, phase, held):
                continue
            if phase is not None and (lease is not None or phase is JobPhase.PENDING or held):
                seen = self._observed(facts, phase, held, reading.now_s)
                waits = None if seen.blocked else arrays.get(job_id)
                jobs.append(replace(seen, blocked=waits) if waits else seen)
        for node, coming in starting.items():
            ours[node] = ours.get(node, Resources()) + coming
        self.in_use = ours
        return jobs, starting

    def _still_waiting(
        self, known: _Waiting, now_s: float, arrays: Mapping[int, Reason]
    ) -> ObservedJob:
        """A waiting job whose record has not changed. Why it is blocked depends on more than it."""
        facts = known.facts
        job_id, is_bounded = facts.job_id, bool(self._ceilings.of(facts.job_id))
        job = self._below_ceilings(known.view.job) if is_bounded else known.view.job
        if known.is_free and not is_bounded:
            blocked = self._refusal(facts, now_s)
        else:
            blocked = self._blocked(facts, known.view, now_s)
        if arrays:
            blocked = blocked or arrays.get(job_id)
        if blocked == known.seen.blocked and job is known.seen.job:
            return known.seen
        seen = replace(known.seen, blocked=blocked, job=job)
        self._waiting[job_id] = replace(known, seen=seen)
        return seen

    def _blocked(self, facts: JobFacts, view: JobView, now_s: float) -> Reason | None:
        return (
            view.problem
            or waits_on(facts, now_s)
            or self._refusal(facts, now_s)
            or self._no_size_left(view.job)
        )

    def _no_size_left(self, job: Job) -> Reason | None:
        """Why a waiting job must not be planned: every size of it is refused."""
        if not self._ceilings.of(job.job_id) or self._kinds_left(self._below_ceilings(job)):
            return None
        return self._ceilings.why(job.job_id)

    def _below_ceilings(self, job: Job) -> Job:
        """The job with the sizes that it is not to be offered: the same object as long as it is."""
        ceilings = self._ceilings.of(job.job_id)
        if not ceilings:
            return job
        made_of, kinds_then, made = self._below.get(job.job_id, (None, self._kinds, job))
        if made_of is not job or made.ceilings is not ceilings or kinds_then != self._kinds:
            made = replace(job, ceilings=ceilings)
            kinds = self._kinds_left(made)
            if kinds and len(kinds) < len(self._kinds_of(job)):
                made = replace(made, gpu_types=kinds)
            least = max((_least_on(made, kind) for kind in kinds), default=0)
            if least > job.least_gpus:
                made = replace(made, min_gpus=least)
            self._below[job.job_id] = job, self._kinds, made
        return made

    def _kinds_of(self, job: Job) -> tuple[str, ...]:
        return job.gpu_types or tuple(sorted(self._kinds))

    def _kinds_left(self, job: Job) -> tuple[str, ...]:
        """The GPU types of which some number is left to the job."""
        return tuple(one for one in self._kinds_of(job) if job.most_on(one) >= _least_on(job, one))

    def _observed(
        self, facts: JobFacts, phase: JobPhase, held: Holdings, now_s: float
    ) -> ObservedJob:
        view = self._views.view(facts)
        blocked = None
        if phase is JobPhase.PENDING:
            blocked = self._blocked(facts, view, now_s)
        elif phase is JobPhase.ENDING and not facts.reason.startswith(_REQUEUED):
            # Slurm's text does not tell whether it comes back: do not plan for it yet.
            strange = ", ".join(sorted(facts.flags)) if facts.state is JobState.UNKNOWN else ""
            text = f"is in a state unknown here ({strange})" if strange else "is ending"
            blocked = Reason(code=ReasonCode.NOT_OURS, text=text)
        types = [part.gpu_type for part in facts.allocation if part.gpu_type]
        seen = ObservedJob(
            job=self._below_ceilings(view.job),
            phase=phase,
            restarts=facts.restarts,
            started_s=facts.start_s if facts.running else None,
            gpu_type=types[0] if types else (UNTYPED if held else ""),
            allocated=held,
            cores={part.node: part.cpu_ids for part in facts.allocation},
            held_by_us=facts.held is slurm_facts.Hold.ADMIN,
            blocked=blocked,
            profile_key=view.hints.profile or "",
        )
        if phase is JobPhase.PENDING and not held:
            self._waiting[facts.job_id] = _Waiting(
                facts=facts,
                view=view,
                seen=seen,
                # Begin times, which pass, are all that lies ahead.
                is_free=view.problem is None and waits_on(facts, -math.inf) is None,
            )
        return seen

    def _holdings(self, facts: JobFacts) -> Holdings:
        """What the job holds; while it ends, what it held (Slurm drops the GPU indices early)."""
        if not holds_now(facts):
            return ()
        if facts.running:
            self._held[facts.job_id] = allocated(facts)
        return self._held.get(facts.job_id) or tuple(
            (node, share) for node, share in allocated(facts) if share.gpus
        )

    def _forget_all_but(self, jobs: Mapping[int, JobFacts]) -> None:
        self._views.forget_all_but(jobs.keys())
        for memory in (self._held, self._below, self._waiting):
            for job_id in memory.keys() - jobs.keys():
                del memory[job_id]

    def ends_s(self, job: Job, service_gpu_s: float, now_s: float) -> float:
        """When a job that starts now has ended at the latest, by its time limit."""
        limit_s = self._default_limit_s if job.time_limit_s is None else job.time_limit_s
        return end_s(now_s, limit_s, self._views.ran_s(job, service_gpu_s))

    def fixed_cores(self, reading: Reading) -> dict[str, tuple[int, ...]]:
        """Cores to which Slurm confines jobs without the wrapper, by node; all nodes are named."""
        cores: dict[str, set[int]] = {name: set() for name in reading.nodes}
        for facts in reading.jobs.values():
            if facts.allocation and facts.running and not self._views.view(facts).job.wrapped:
                for part in facts.allocation:
                    cores.setdefault(part.node, set()).update(part.cpu_ids)
        return {node: tuple(sorted(taken)) for node, taken in sorted(cores.items())}

    def described(self, facts: JobFacts, nodes: Mapping[str, NodeFacts]) -> Described:
        """For the adoption of a running job: its proportional share of what it holds."""
        job, shares, kind = self._views.view(facts).job, [], UNTYPED
        for part, (name, held) in zip(facts.allocation, allocated(facts), strict=True):
            node = nodes.get(name)
            kind = part.gpu_type or kind
            cpus = held.cpus
            if node is not None and self._enforcement.in_place and job.wrapped:
                cpus = min(cpus, node.cpus_total * held.gpus // sum(node.gpus.values()))
            shares.append((name, Resources(gpus=held.gpus, cpus=cpus, mem_mib=held.mem_mib)))
        placement = Placement(job_id=facts.job_id, gpu_type=kind, shares=tuple(shares))
        return Described(status=JobStatus(job=job), proportional=placement)


def _is_somebody_elses(facts: JobFacts, phase: JobPhase | None, held: Holdings) -> bool:
    """A job left to Slurm counts only while it holds GPUs; then it is in the way like any other."""
    holds_gpus = phase is JobPhase.RUNNING and any(share.gpus for _, share in held)
    return is_passed_through(facts) and not holds_gpus


def _phase(facts: JobFacts, has_lease: bool) -> JobPhase | None:
    """The cluster's view of a job; None for one that is over or about to be."""
    if facts.completing or facts.state is JobState.UNKNOWN:
        # A state of a newer Slurm may mean anything: keep what it holds, and touch nothing.
        return None if facts.state.finished else JobPhase.ENDING
    if facts.state.finished:
        return None
    if facts.pending:
        begun = has_lease and not is_held(facts)
        return JobPhase.STARTING if begun else JobPhase.PENDING
    return JobPhase.STARTING if "CONFIGURING" in facts.flags else JobPhase.RUNNING


def _least_on(job: Job, gpu_type: str) -> int:
    """The fewest GPUs of that type that may be offered to the job."""
    few = (one for one in job.ceilings if one.too_few and one.gpu_type == gpu_type)
    return max([job.least_gpus, *(one.refused + 1 for one in few)])


def _service_gpu_s(record: Record | None) -> float:
    return record.attained_service_gpu_s if record else 0.0


def _add(sums: dict[str, Resources], shares: Holdings) -> None:
    for node, share in shares:
        sums[node] = sums.get(node, Resources()) + share
