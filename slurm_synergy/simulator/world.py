"""The simulated world: what there is, and the changes that it can undergo.

Like Slurm under the sharing of cores, it sets memory aside as granted at a job's start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_synergy.cluster import Action, News, ObservedJob, Record, Resize, Start, Stop
from slurm_synergy.core.model import Elasticity, JobPhase, Lease, Node, Placement
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.totals import sums
from slurm_synergy.errors import ClusterError
from slurm_synergy.simulator.floors import Floors
from slurm_synergy.simulator.running import Costs, Running
from slurm_synergy.simulator.truth import SimulatedJob, true_rate

__all__ = ["Usage", "World"]

# The actions that make a lease; a union would be made anew at each question.
_LEASED = (Start, Resize)
# Until Python 3.12, looking up a member of an enumeration takes longer than comparing it.
_RIGID = Elasticity.RIGID


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

    ``jobs`` are all that have arrived and not ended, ``held`` those of them that hold resources;
    ``floors`` judges every share that is given.
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
    # True rates that are known, with what ``floors`` makes of them.
    _judged: dict[object, tuple[float, float | None]] = field(default_factory=dict)
    # How the scheduler sees and remembers each job; those in ``_stale`` have changed since, those
    # in ``_begun`` have only been started.
    _seen: dict[int, ObservedJob] = field(default_factory=dict)
    _records: dict[int, Record] = field(default_factory=dict)
    _stale: dict[int, Running] = field(default_factory=dict)
    _begun: dict[int, Running] = field(default_factory=dict)
    # What the next observation has to tell.
    _told: int = 0
    _changed: dict[int, ObservedJob] = field(default_factory=dict)
    _gone: list[int] = field(default_factory=list)
    floors: Floors = field(init=False)

    def __post_init__(self) -> None:
        self.floors = Floors(self.nodes)
        self._free = {node.name: [node.capacity.gpus, node.capacity.mem_mib] for node in self.nodes}

    def free(self) -> dict[str, Resources]:
        """GPUs and memory (as granted) that are free per node, and all its cores."""
        found = {}
        for node in self.nodes:
            most, (gpus, mem_mib) = node.capacity, self._free[node.name]
            if gpus == most.gpus and mem_mib == most.mem_mib:
                found[node.name] = most
            else:
                found[node.name] = Resources(gpus=gpus, cpus=most.cpus, mem_mib=mem_mib)
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
            if placement is not last and (last is None or not _same_gpus(placement, last)):
                one.restarts += 1
        one.granted, one.last, one.held_since_s = shares, placement, now_s
        self._set(one, placement)
        self.held[one.job_id] = one

    def start_all(self, starts: Sequence[Start]) -> bool:
        """``start`` of all, if all are pending and there is room for all; else nothing."""
        jobs, free, usage, now_s = self.jobs, self._free, self.usage, self.now_s
        placements = [action.placement for action in starts]
        batch = {action.job_id: jobs[action.job_id] for action in starts}
        if len(batch) < len(starts) or not self.held.keys().isdisjoint(batch):
            return False
        rows = sums(placements)
        for name, (gpus, _, mem_mib) in rows.items():
            if gpus > free[name][0] or mem_mib > free[name][1]:
                return False
        for name, (gpus, cpus, mem_mib) in rows.items():
            free[name][0] -= gpus
            free[name][1] -= mem_mib
            usage.gpus += gpus
            usage.cpus += cpus
            usage.mem_mib += mem_mib
        restart_s = self.costs.restart_s
        for one, placement in zip(batch.values(), placements, strict=True):
            last, rated = one.last, one.rated
            if one.started_s is None:
                one.started_s, one.since_s = now_s, now_s + one.spec.start_s
            else:
                cost_s = one.spec.restart_s
                one.since_s = now_s + (restart_s if cost_s is None else cost_s)
                if placement is not last and (last is None or not _same_gpus(placement, last)):
                    one.restarts += 1
            one.placement = one.last = placement
            one.granted, one.held_since_s = placement.shares, now_s
            one.rate = rated[1] if rated[0] is placement else self._rate_there(one, placement)
            one.version += 1
        self.changed += batch.values()
        self._begun.update(batch)
        self.held.update(batch)
        return True

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

    def grant(self, actions: Iterable[Action]) -> None:
        """Remember leases granted and changed by ``actions``, and those about to end."""
        for action in actions:
            if isinstance(action, _LEASED):
                one = self.jobs[action.job_id]
                one.generation += 1
                one.granted_s, one.stopping = self.now_s, None
            elif isinstance(action, Stop):
                self.jobs[action.job_id].stopping = action.reason

    def settle(self) -> None:
        """A round of the controller is over."""

    def complete(self, one: Running) -> None:
        """The job has done all its work."""
        one.done, one.completed_s = one.spec.samples, self.now_s
        if one.placement is not None:
            self._give(one)
        job_id = one.job_id
        del self.jobs[job_id]
        for known in (self._seen, self._records, self._stale, self._begun, self._changed):
            known.pop(job_id, None)
        self._gone.append(job_id)
        self.usage.active -= 1
        one.queue_area = self.usage.active_s - one.queue_area
        self.finished.append(one)

    def seen(self) -> Mapping[int, ObservedJob]:
        """How the scheduler sees each job now; the object of a job that is as before stays."""
        for several in (self._begun, self._stale):
            for job_id, one in several.items():
                self._seen[job_id] = self._changed[job_id] = self._view(one)
                if one.placement is None:
                    self._records[job_id] = self._record(one)
            several.clear()
        return self._seen

    def news(self) -> News:
        """What the scheduler does not know from the last call."""
        seen = self.seen()
        for job_id in self.held:
            self._changed[job_id] = seen[job_id]
        self._told += 1
        found = News(number=self._told, changed=self._changed, gone=self._gone)
        self._changed, self._gone = {}, []
        return found

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
            held_s=one.held_until(self.now_s),
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
        return self._waiting(one)

    def _waiting(self, one: Running) -> ObservedJob:
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
            rate = self._rate_there(one, placement)
        one.placement, one.rate = placement, rate
        one.version += 1
        self.changed.append(one)
        self._stale[one.job_id] = one

    def _rate_there(self, one: Running, placement: Placement) -> float:
        """Its true rate with ``placement``, which is kept with it."""
        if one.spec.training is not None:
            one.pace = one.spec.training.pace(placement, one.spec.truth)
            rate = one.pace.mean_rate
            self.floors.judge(one.spec, placement)
        else:
            rate, ratio = self._judge(one.spec, placement)
            self.floors.count(ratio)
        one.rated = (placement, rate)
        return rate

    def _judge(self, spec: SimulatedJob, placement: Placement) -> tuple[float, float | None]:
        """The true rate, and its ratio to that with a proportional share of the same nodes.

        Jobs of the same model share their truth, so most are known already.
        """
        job, kind_of = spec.job, self.floors.kind_of
        who: tuple[object, ...] = (
            id(spec.truth),
            job.min_mem_mib_per_node,
            job.tasks_per_node,
            placement.batch,
        )
        if job.elasticity is not _RIGID:
            who = (*who, job.job_id)
        parts = [
            (kind_of[name], share.gpus, share.cpus, share.mem_mib)
            for name, share in placement.shares
        ]
        key = (who, *parts)
        found = self._judged.get(key)
        if found is None:
            rate = true_rate(spec, placement)
            found = self._judged[key] = rate, self.floors.ratio(spec, placement, rate)
        return found

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


def _same_gpus(one: Placement, other: Placement) -> bool:
    """Whether both have the same layout of GPUs."""
    if len(one.shares) == len(other.shares) == 1:  # most jobs; to sort both takes longer
        (here, share), (there, its) = one.shares[0], other.shares[0]
        return here == there and share.gpus == its.gpus
    return one.gpu_layout == other.gpu_layout
