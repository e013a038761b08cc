"""The simulated world behind the seam of :mod:`slurm_synergy.cluster`.

A :class:`World` holds what is: time, nodes, jobs and their progress. A round sees it through
:class:`SimulatedCluster`, :class:`SimulatedRecords` and :class:`VirtualClock`, as it sees Slurm and
the ledger. Like Slurm under the sharing of cores, it sets memory aside as granted at a job's start.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurm_synergy.cluster import (
    Action,
    Observation,
    ObservedJob,
    Outcome,
    Record,
    Resize,
    Start,
    Stop,
)
from slurm_synergy.core.model import (
    Job,
    JobPhase,
    JobStatus,
    Lease,
    Node,
    Placement,
    Plan,
    Profile,
    Reason,
    Snapshot,
)
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import ClusterError
from slurm_synergy.simulator.truth import SimulatedJob, true_rate

__all__ = ["Costs", "Running", "SimulatedCluster", "SimulatedRecords", "VirtualClock", "World"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What scheduling costs a job, in seconds; all zero is the ideal world of the papers.

    ``restart_s`` passes without progress after every start but the first, ``checkpoint_s`` at
    every stop, ``profiling_s`` between arrival and the first chance to run.
    """

    restart_s: float = 0.0
    checkpoint_s: float = 0.0
    profiling_s: float = 0.0


@dataclass(slots=True)
class Running:
    """A job in the world. ``done`` samples are as of ``since_s``; before it nothing advances."""

    spec: SimulatedJob
    arrived_s: float
    seen: ObservedJob
    record: Record
    done: float = 0.0
    rate: float = 0.0
    since_s: float = 0.0
    placement: Placement | None = None
    granted: tuple[tuple[str, Resources], ...] = ()
    held_since_s: float = 0.0
    gpu_s: float = 0.0
    started_s: float | None = None
    completed_s: float | None = None
    restarts: int = 0
    stopping_until_s: float | None = None
    version: int = 0
    last_layout: tuple[tuple[str, int], ...] = ()
    queue_area: float = 0.0

    @property
    def job_id(self) -> int:
        """The job's id."""
        return self.spec.job.job_id

    def finish_s(self) -> float:
        """When it ends if nothing changes; infinite while it does not advance."""
        if self.rate <= 0 or self.stopping_until_s is not None:
            return float("inf")
        return self.since_s + max(self.spec.samples - self.done, 0.0) / self.rate

    def progress(self, now_s: float) -> None:
        """Bring ``done`` up to ``now_s``."""
        if now_s > self.since_s:
            self.done = min(self.done + self.rate * (now_s - self.since_s), self.spec.samples)
            self.since_s = now_s


@dataclass(slots=True)
class Usage:
    """What is held now, and its integral over time (per second)."""

    gpus: int = 0
    cpus: int = 0
    mem_mib: int = 0
    active: int = 0
    gpu_s: float = 0.0
    cpu_s: float = 0.0
    mem_mib_s: float = 0.0
    active_s: float = 0.0
    most_active: int = 0


@dataclass(slots=True)
class World:
    """Everything that exists in a simulation, and the changes that it can undergo."""

    nodes: tuple[Node, ...]
    costs: Costs
    now_s: float = 0.0
    jobs: dict[int, Running] = field(default_factory=dict)
    finished: list[Running] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    changed: list[Running] = field(default_factory=list)
    _free: dict[str, list[int]] = field(default_factory=dict)
    _rates: dict[object, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.nodes:
            self._free[node.name] = [node.capacity.gpus, node.capacity.mem_mib]

    def free(self) -> dict[str, Resources]:
        """GPUs and memory (as granted) that are free per node, and all its cores."""
        found = {}
        for node in self.nodes:
            gpus, mem_mib = self._free[node.name]
            found[node.name] = Resources(gpus=gpus, cpus=node.capacity.cpus, mem_mib=mem_mib)
        return found

    @property
    def free_gpus(self) -> int:
        """GPUs that no job holds."""
        return sum(gpus for gpus, _ in self._free.values())

    def advance(self, to_s: float) -> None:
        """Let time pass; jobs are brought up to date when somebody looks at them."""
        usage, span_s = self.usage, to_s - self.now_s
        usage.gpu_s += usage.gpus * span_s
        usage.cpu_s += usage.cpus * span_s
        usage.mem_mib_s += usage.mem_mib * span_s
        usage.active_s += usage.active * span_s
        self.now_s = to_s

    def arrive(self, spec: SimulatedJob) -> None:
        """A job enters the queue."""
        job = spec.job
        self.jobs[job.job_id] = Running(
            spec=spec,
            arrived_s=job.submitted_s,
            seen=_waiting(job, 0),
            record=Record(job_id=job.job_id, profile=spec.belief),
            queue_area=self.usage.active_s,
        )
        self.usage.active += 1
        self.usage.most_active = max(self.usage.most_active, self.usage.active)

    def start(self, one: Running, placement: Placement) -> None:
        """Give a pending job its resources."""
        if one.placement is not None:
            raise ClusterError(f"job {one.job_id} is not pending")
        for name, share in placement.shares:
            gpus, mem_mib = self._free[name]
            if share.gpus > gpus or share.mem_mib > mem_mib:
                raise ClusterError(
                    f"job {one.job_id}: {share} is not free on {name}, but {gpus} GPUs and "
                    f"{mem_mib} MiB"
                )
        again = one.started_s is not None
        if again and placement.gpu_layout != one.last_layout:
            one.restarts += 1
        one.started_s = self.now_s if one.started_s is None else one.started_s
        one.granted = placement.shares
        one.held_since_s = self.now_s
        one.last_layout = placement.gpu_layout
        self._take(placement.shares, -1)
        self._set(one, placement)
        one.since_s = self.now_s + (self.costs.restart_s if again else 0.0)
        self._show(one)

    def resize(self, one: Running, placement: Placement) -> None:
        """Change cores and memory in place, within what was granted."""
        if one.placement is None or one.placement.gpu_layout != placement.gpu_layout:
            raise ClusterError(f"job {one.job_id} cannot be moved in place")
        if any(placement.on(name).mem_mib > share.mem_mib for name, share in one.granted):
            raise ClusterError(f"job {one.job_id} was not granted that much memory")
        one.progress(self.now_s)
        self._set(one, placement)

    def stop(self, one: Running) -> None:
        """Let a job checkpoint; ``release`` ends it."""
        one.progress(self.now_s)
        one.rate = 0.0
        one.stopping_until_s = self.now_s + self.costs.checkpoint_s
        one.version += 1
        self.changed.append(one)

    def release(self, one: Running) -> None:
        """The job gives back what it holds and waits again."""
        one.progress(self.now_s)
        self._give(one)
        one.last_layout = ()
        one.seen = _waiting(one.spec.job, one.restarts)
        one.record = self._record(one, None)

    def end_lease(self, one: Running) -> None:
        """Like ``release``, but to come back to the same GPUs is not a restart."""
        layout = one.last_layout
        self.release(one)
        one.last_layout = layout

    def complete(self, one: Running) -> None:
        """The job has done all its work."""
        one.done, one.completed_s = one.spec.samples, self.now_s
        if one.placement is not None:
            self._give(one)
        del self.jobs[one.job_id]
        self.usage.active -= 1
        one.queue_area = self.usage.active_s - one.queue_area
        self.finished.append(one)

    def record(self, one: Running) -> Record:
        """What the scheduler remembers of the job, its progress up to date."""
        if one.placement is not None:
            one.progress(self.now_s)
            one.record = self._record(one, one.record.lease)
        return one.record

    def _record(self, one: Running, lease: Lease | None) -> Record:
        held_s = self.now_s - one.held_since_s if one.placement is not None else 0.0
        return Record(
            job_id=one.job_id,
            lease=lease,
            stopping=one.record.stopping if lease is not None else None,
            done_samples=one.done,
            attained_service_gpu_s=one.gpu_s + held_s * one.spec.job.gpus,
            profile=one.spec.belief,
        )

    def _set(self, one: Running, placement: Placement) -> None:
        self._count(one, -1)
        one.placement, one.rate = placement, self._rate(one.spec, placement)
        self._count(one, 1)
        one.version += 1
        self.changed.append(one)

    def _rate(self, spec: SimulatedJob, placement: Placement) -> float:
        """The true rate; jobs of the same model share their truth, so most are known already."""
        shares = tuple(share for _, share in placement.shares)
        key = (id(spec.truth), placement.gpu_type, shares)
        rate = self._rates.get(key)
        if rate is None:
            rate = self._rates[key] = true_rate(spec, placement)
        return rate

    def _give(self, one: Running) -> None:
        self._count(one, -1)
        self._take(one.granted, 1)
        one.gpu_s += (self.now_s - one.held_since_s) * one.spec.job.gpus
        one.placement, one.granted, one.rate = None, (), 0.0
        one.stopping_until_s = None
        one.version += 1

    def _count(self, one: Running, sign: int) -> None:
        if one.placement is None:
            return
        for _, share in one.placement.shares:
            self.usage.gpus += sign * share.gpus
            self.usage.cpus += sign * share.cpus
            self.usage.mem_mib += sign * share.mem_mib

    def _take(self, shares: Sequence[tuple[str, Resources]], sign: int) -> None:
        for name, share in shares:
            free = self._free[name]
            free[0] += sign * share.gpus
            free[1] += sign * share.mem_mib

    def _show(self, one: Running) -> None:
        assert one.placement is not None
        one.seen = ObservedJob(
            job=one.spec.job,
            phase=JobPhase.RUNNING,
            restarts=one.restarts,
            started_s=self.now_s,
            gpu_type=one.placement.gpu_type,
            allocated=one.granted,
        )


def _waiting(job: Job, restarts: int) -> ObservedJob:
    return ObservedJob(job=job, phase=JobPhase.PENDING, restarts=restarts, held_by_us=True)


class VirtualClock:
    """The world's time."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now_s(self) -> float:
        """Seconds since the simulation's epoch."""
        return self._world.now_s


class SimulatedCluster:
    """The world as a :class:`~slurm_synergy.cluster.Cluster`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def observe(self) -> Observation:
        """All that has arrived and has not ended."""
        return Observation(
            nodes=self._world.nodes,
            jobs=tuple(one.seen for one in self._world.jobs.values()),
            free=self._world.free(),
        )

    def apply(self, action: Action, status: JobStatus) -> Outcome:
        """Carry out one action. Raises ClusterError for what Slurm would refuse."""
        one = self._world.jobs[action.job_id]
        if isinstance(action, Start):
            self._world.start(one, action.placement)
        elif isinstance(action, Resize):
            self._world.resize(one, action.placement)
        elif isinstance(action, Stop):
            self._world.stop(one)
        return Outcome(action=action, done=True)


class SimulatedRecords:
    """Records in memory: leases and stops; progress is the world's."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._round = 0

    def read(self) -> Mapping[int, Record]:
        """Records by job id."""
        return {job_id: self._world.record(one) for job_id, one in self._world.jobs.items()}

    def draining(self) -> bool:
        """Nobody drains a simulation."""
        return False

    def next_round(self) -> int:
        """One more than the last."""
        self._round += 1
        return self._round

    def intend(self, round_number: int, actions: Sequence[Action]) -> None:
        """Nothing can be lost here."""

    def commit(self, round_number: int, outcomes: Sequence[Outcome], snapshot: Snapshot) -> None:
        """Keep leases granted, changed and about to end."""
        for outcome in outcomes:
            action = outcome.action
            if not outcome.done or not isinstance(action, Start | Resize | Stop):
                continue
            one = self._world.jobs[action.job_id]
            if isinstance(action, Stop):
                self._remember(one, one.record.lease, action.reason)
            else:
                self._remember(one, _lease(one, action.placement, snapshot.now_s), None)

    def journal(
        self,
        snapshot: Snapshot,
        plan: Plan,
        actions: Sequence[Action],
        outcomes: Sequence[Outcome],
        took_s: Mapping[str, float],
    ) -> None:
        """The simulation's own results take the journal's place."""

    def profile(self, key: str) -> Profile | None:
        """Beliefs come with each job's record."""
        return None

    def _remember(self, one: Running, lease: Lease | None, stopping: Reason | None) -> None:
        old = one.record
        one.record = Record(
            job_id=one.job_id,
            lease=lease,
            stopping=stopping,
            done_samples=old.done_samples,
            attained_service_gpu_s=old.attained_service_gpu_s,
            profile=old.profile,
        )


def _lease(one: Running, placement: Placement, now_s: float) -> Lease:
    before = one.record.lease
    return Lease(
        job_id=one.job_id,
        generation=before.generation + 1 if before else 1,
        placement=placement,
        expires_s=now_s,
        granted=dict(one.granted),
    )
