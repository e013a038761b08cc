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
    JobPhase,
    JobStatus,
    Lease,
    Node,
    Placement,
    Plan,
    Profile,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.values import maker
from slurm_synergy.errors import ClusterError
from slurm_synergy.simulator.learning import Learning
from slurm_synergy.simulator.pace import Pace
from slurm_synergy.simulator.truth import SimulatedJob, true_rate

__all__ = ["Costs", "Running", "SimulatedCluster", "SimulatedRecords", "VirtualClock", "World"]

_OUTCOME, _RECORD = maker(Outcome), maker(Record)
# The actions that make a lease; a union would be made anew at each question.
_LEASED = (Start, Resize)


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
    """A job in the world. ``done`` samples are as of ``since_s``; before it nothing advances.

    ``generation``, ``granted_s`` and ``stopping`` are what the scheduler remembers of its lease;
    ``last`` is where it ran last, None when coming back there is a restart all the same.
    """

    spec: SimulatedJob
    arrived_s: float
    job_id: int
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
    generation: int = 0
    granted_s: float = 0.0
    lease: Lease | None = None
    stopping: Reason | None = None
    last: Placement | None = None
    queue_area: float = 0.0
    waiting: ObservedJob | None = None
    rated: tuple[Placement | None, float] = (None, 0.0)
    pace: Pace | None = None
    learning: Learning | None = None
    held_s: float = 0.0

    def finish_s(self) -> float:
        """When it ends if nothing changes; infinite while it does not advance."""
        if self.rate <= 0 or self.stopping_until_s is not None:
            return float("inf")
        if self.pace is not None:
            return self.since_s + self.pace.left_s(self.done)
        return self.since_s + max(self.spec.samples - self.done, 0.0) / self.rate

    def progress(self, now_s: float) -> None:
        """Bring ``done`` up to ``now_s``."""
        if now_s > self.since_s:
            if self.pace is None or not self.rate:
                self.done = min(self.done + self.rate * (now_s - self.since_s), self.spec.samples)
            else:
                self.done = self.pace.after(self.done, now_s - self.since_s)
            self.since_s = now_s

    def let_go(self, now_s: float) -> None:
        """Count what it has held, at the moment at which it gives that back."""
        if self.placement is not None:
            span_s = now_s - self.held_since_s
            self.gpu_s += span_s * self.placement.gpus
            self.held_s += span_s

    @property
    def belief(self) -> Profile:
        """What the scheduler believes of it now."""
        return self.spec.belief if self.learning is None else self.learning.belief

    def learn(self) -> None:
        """Let the scheduler know what it shows where it runs; progress is up to date."""
        if self.learning is not None and self.placement is not None and self.rate > 0:
            self.learning.watch(self.placement, self.done)


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
    """Everything that exists in a simulation, and the changes that it can undergo.

    ``jobs`` are all that have arrived and not ended, ``held`` those of them that hold resources.
    """

    nodes: tuple[Node, ...]
    costs: Costs
    now_s: float = 0.0
    jobs: dict[int, Running] = field(default_factory=dict)
    held: dict[int, Running] = field(default_factory=dict)
    finished: list[Running] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    changed: list[Running] = field(default_factory=list)
    _free: dict[str, list[int]] = field(default_factory=dict)
    _rates: dict[object, float] = field(default_factory=dict)
    # How the scheduler sees and remembers each job; those in ``_stale`` have changed since.
    _seen: dict[int, ObservedJob] = field(default_factory=dict)
    _records: dict[int, Record] = field(default_factory=dict)
    _stale: dict[int, Running] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free = {node.name: [node.capacity.gpus, node.capacity.mem_mib] for node in self.nodes}

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
        one = Running(
            spec=spec,
            arrived_s=job.submitted_s,
            job_id=job.job_id,
            queue_area=self.usage.active_s,
            learning=spec.learn() if spec.learn is not None else None,
        )
        self.jobs[job.job_id] = self._stale[job.job_id] = one
        self.usage.active += 1
        self.usage.most_active = max(self.usage.most_active, self.usage.active)

    def start(self, one: Running, placement: Placement) -> None:
        """Give a pending job its resources."""
        if one.placement is not None:
            raise ClusterError(f"job {one.job_id} is not pending")
        shares, free, usage, now_s = placement.shares, self._free, self.usage, self.now_s
        for name, share in shares:
            gpus, mem_mib = free[name]
            if share.gpus > gpus or share.mem_mib > mem_mib:
                raise ClusterError(
                    f"job {one.job_id}: {share} is not free on {name}, but {gpus} GPUs and "
                    f"{mem_mib} MiB"
                )
        for name, share in shares:
            row, gpus, mem_mib = free[name], share.gpus, share.mem_mib
            usage.gpus += gpus
            usage.cpus += share.cpus
            usage.mem_mib += mem_mib
            row[0] -= gpus
            row[1] -= mem_mib
        last = one.last
        if one.started_s is None:
            one.started_s, one.since_s = now_s, now_s + one.spec.start_s
        else:
            cost_s = one.spec.restart_s
            one.since_s = now_s + (self.costs.restart_s if cost_s is None else cost_s)
            if placement is not last and (last is None or placement.gpu_layout != last.gpu_layout):
                one.restarts += 1
        one.granted, one.last, one.held_since_s = shares, placement, now_s
        self._set(one, placement)
        self.held[one.job_id] = one

    def resize(self, one: Running, placement: Placement) -> None:
        """Change cores and memory in place, within what was granted."""
        if one.placement is None or one.placement.gpu_layout != placement.gpu_layout:
            raise ClusterError(f"job {one.job_id} cannot be moved in place")
        if any(placement.on(name).mem_mib > share.mem_mib for name, share in one.granted):
            raise ClusterError(f"job {one.job_id} was not granted that much memory")
        one.progress(self.now_s)
        self._use(one.placement.shares, -1)
        self._use(placement.shares, 1)
        self._set(one, placement)

    def stop(self, one: Running) -> None:
        """Let a job checkpoint; ``release`` ends it."""
        one.progress(self.now_s)
        one.rate = 0.0
        one.stopping_until_s = self.now_s + self.costs.checkpoint_s
        one.version += 1
        self.changed.append(one)

    def release(self, one: Running) -> None:
        """The job gives back what it holds and waits again; coming back is a restart."""
        self.end_lease(one)
        one.last = None

    def end_lease(self, one: Running) -> None:
        """Like ``release``, but to come back to the same GPUs is not a restart."""
        if self.now_s > one.since_s:
            one.progress(self.now_s)
        self._give(one)
        one.lease = one.stopping = None
        one.generation = 0
        self._stale[one.job_id] = one

    def end_leases(self) -> None:
        """``end_lease`` of all jobs, which leaves the pool empty."""
        now_s, usage = self.now_s, self.usage
        for one in self.held.values():
            if now_s > one.since_s:
                one.progress(now_s)
            if one.placement is not None:  # as let_go
                span_s = now_s - one.held_since_s
                one.gpu_s += span_s * one.placement.gpus
                one.held_s += span_s
            one.placement, one.granted, one.rate = None, (), 0.0
            one.lease = one.stopping = one.stopping_until_s = None
            one.generation = 0
            one.version += 1
        self._stale.update(self.held)
        self.held.clear()
        usage.gpus = usage.cpus = usage.mem_mib = 0
        for node in self.nodes:
            self._free[node.name] = [node.capacity.gpus, node.capacity.mem_mib]

    def complete(self, one: Running) -> None:
        """The job has done all its work."""
        one.done, one.completed_s = one.spec.samples, self.now_s
        if one.placement is not None:
            self._give(one)
        job_id = one.job_id
        del self.jobs[job_id]
        for known in (self._seen, self._records, self._stale):
            known.pop(job_id, None)
        self.usage.active -= 1
        one.queue_area = self.usage.active_s - one.queue_area
        self.finished.append(one)

    def seen(self) -> Mapping[int, ObservedJob]:
        """How the scheduler sees each job now; the object of a job that is as before stays."""
        if not self._stale:
            return self._seen
        seen, records = self._seen, self._records
        for job_id, one in self._stale.items():
            if one.placement is not None or one.generation:
                seen[job_id] = self._view(one)
                if one.placement is None:
                    records[job_id] = self._record(one)
                continue
            # Most jobs of most rounds; the same as above.
            view = one.waiting
            if view is None or view.restarts != one.restarts:
                view = self._view(one)
            seen[job_id] = view
            records[job_id] = _RECORD(
                job_id=job_id,
                stopping=one.stopping,
                done_samples=one.done,
                attained_service_gpu_s=one.gpu_s,
                profile=one.spec.belief if one.learning is None else one.belief,
            )
        self._stale.clear()
        return seen

    def records(self) -> Mapping[int, Record]:
        """What the scheduler remembers of each job, progress up to date."""
        self.seen()
        for job_id, one in self.held.items():
            if self.now_s > one.since_s:
                one.progress(self.now_s)
                one.learn()
            self._records[job_id] = self._record(one)
        return self._records

    def _record(self, one: Running) -> Record:
        now_gpu_s = 0.0
        if one.placement is not None:
            now_gpu_s = (self.now_s - one.held_since_s) * one.placement.gpus
        return Record(
            job_id=one.job_id,
            lease=self._lease(one) if one.generation else None,
            stopping=one.stopping,
            done_samples=one.done,
            attained_service_gpu_s=one.gpu_s + now_gpu_s,
            profile=one.belief,
        )

    def _lease(self, one: Running) -> Lease:
        if one.lease is None or one.lease.generation != one.generation:
            assert one.placement is not None
            one.lease = Lease(
                job_id=one.job_id,
                generation=one.generation,
                placement=one.placement,
                expires_s=one.granted_s,
                granted=dict(one.granted),
            )
        return one.lease

    def _view(self, one: Running) -> ObservedJob:
        if one.placement is not None:
            return ObservedJob(
                job=one.spec.job,
                phase=JobPhase.RUNNING,
                restarts=one.restarts,
                started_s=one.held_since_s,
                gpu_type=one.placement.gpu_type,
                allocated=one.granted,
            )
        view = one.waiting
        if view is None or view.restarts != one.restarts:
            view = one.waiting = ObservedJob(
                job=one.spec.job,
                phase=JobPhase.PENDING,
                restarts=one.restarts,
                held_by_us=True,
            )
        return view

    def _set(self, one: Running, placement: Placement) -> None:
        rated, rate = one.rated
        if rated is not placement:
            if one.spec.training is not None:
                one.pace = one.spec.training.pace(placement, one.spec.truth)
                rate = one.pace.mean_rate
            else:
                rate = self._rate(one.spec, placement)
            one.rated = (placement, rate)
        one.placement, one.rate = placement, rate
        one.version += 1
        self.changed.append(one)
        self._stale[one.job_id] = one

    def _rate(self, spec: SimulatedJob, placement: Placement) -> float:
        """The true rate; jobs of the same model share their truth, so most are known already."""
        shares = tuple([(share.gpus, share.cpus, share.mem_mib) for _, share in placement.shares])
        key = (id(spec.truth), placement.gpu_type, shares)
        rate = self._rates.get(key)
        if rate is None:
            rate = self._rates[key] = true_rate(spec, placement)
        return rate

    def _give(self, one: Running) -> None:
        assert one.placement is not None
        self._use(one.placement.shares, -1)
        for name, share in one.granted:  # memory stays granted as it was at the start
            free = self._free[name]
            free[0] += share.gpus
            free[1] += share.mem_mib
        one.let_go(self.now_s)
        one.placement, one.granted, one.rate = None, (), 0.0
        one.stopping_until_s = None
        one.version += 1
        del self.held[one.job_id]

    def _use(self, shares: Sequence[tuple[str, Resources]], sign: int) -> None:
        usage = self.usage
        for _, share in shares:
            usage.gpus += sign * share.gpus
            usage.cpus += sign * share.cpus
            usage.mem_mib += sign * share.mem_mib


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
            jobs=tuple(self._world.seen().values()),
            free=self._world.free(),
        )

    def apply(self, action: Action, status: JobStatus) -> Outcome:
        """Carry out one action. Raises ClusterError for what Slurm would refuse."""
        if isinstance(action, Start):
            self._world.start(self._world.jobs[action.job_id], action.placement)
        elif isinstance(action, Resize):
            self._world.resize(self._world.jobs[action.job_id], action.placement)
        elif isinstance(action, Stop):
            self._world.stop(self._world.jobs[action.job_id])
        return Outcome(action=action, done=True)

    def start_all(
        self, starts: Sequence[Start], statuses: Mapping[int, JobStatus]
    ) -> tuple[Outcome, ...]:
        """As ``apply`` of each."""
        jobs, start, outcomes = self._world.jobs, self._world.start, []
        for action in starts:
            try:
                start(jobs[action.job_id], action.placement)
                outcomes.append(_OUTCOME(action=action, done=True))
            except ClusterError as err:
                reason = Reason(code=ReasonCode.ACTION_FAILED, text=str(err))
                outcomes.append(Outcome(action=action, done=False, reason=reason))
        return tuple(outcomes)


class SimulatedRecords:
    """Records in memory: leases and stops; progress is the world's."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._round = 0

    def read(self) -> Mapping[int, Record]:
        """Records by job id."""
        return self._world.records()

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
        jobs, now_s = self._world.jobs, snapshot.now_s
        for outcome in outcomes:
            action = outcome.action
            if not outcome.done:
                continue
            if isinstance(action, _LEASED):
                one = jobs[action.job_id]
                one.generation += 1
                one.granted_s, one.stopping = now_s, None
            elif isinstance(action, Stop):
                jobs[action.job_id].stopping = action.reason

    def journal(
        self,
        snapshot: Snapshot,
        plan: Plan,
        actions: Sequence[Action],
        outcomes: Sequence[Outcome],
        took_s: Mapping[str, float],
        free: Mapping[str, Resources] | None = None,
    ) -> None:
        """The simulation's own results take the journal's place."""

    def profile(self, key: str) -> Profile | None:
        """Beliefs come with each job's record."""
        return None
