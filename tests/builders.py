"""Builders for domain values, and a harness that plays rounds on a cluster in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slurm_synergy.cluster import (
    Action,
    Hold,
    Observation,
    ObservedJob,
    Outcome,
    Record,
    Renew,
    Resize,
    Start,
    Stop,
)
from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.decide import Mechanism, Policy, check_plan
from slurm_synergy.core.goodput import GradientStatistics, ThroughputModel
from slurm_synergy.core.model import (
    Elasticity,
    Enforcement,
    Job,
    JobPhase,
    JobStatus,
    Lease,
    Node,
    PipelineModel,
    Placement,
    Plan,
    Profile,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.pipeline import fit_to_job
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.scaling import Scaling, TypeSpeed
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.round import Known, RoundResult, run_round

GIB = 1024


def res(gpus: int = 0, cpus: int = 0, mem_mib: int = 0) -> Resources:
    """Resources by position."""
    return Resources(gpus=gpus, cpus=cpus, mem_mib=mem_mib)


def node(
    name: str = "v100-1",
    gpu_type: str = "v100",
    gpus: int = 8,
    cpus: int = 24,
    mem_mib: int = 500_000,
    *,
    usable: bool = True,
) -> Node:
    """A node of the paper's shape; ``usable=False`` is one that is down or drains."""
    total = res(gpus, cpus, mem_mib)
    return Node(
        name=name,
        gpu_type=gpu_type,
        total=total,
        capacity=total if usable else Resources(),
    )


def profile(
    per_core: float = 100.0,
    gpu_rate: float = 1000.0,
    *,
    dataset_mib: float = 0.0,
    samples: int = 1_000_000,
    storage_mib_s: float = 500.0,
    process_mem_mib: int = 0,
    restart_s: float = 30.0,
    types: Sequence[str] = ("v100", "a100"),
) -> Profile:
    """A profile whose preprocessing is linear in the cores (samples/s)."""
    return Profile(
        key="made",
        gpu_rate_per_gpu=dict.fromkeys(types, gpu_rate),
        pipeline=PipelineModel(
            preprocess=((1, per_core), (1024, per_core * 1024)),
            dataset_mib=dataset_mib,
            samples_per_epoch=samples,
            storage_mib_s=storage_mib_s,
            process_mem_mib=process_mem_mib,
        ),
        restart_s=restart_s,
    )


def scaling(
    kinds: Mapping[str, float] | None = None,
    *,
    explored: Mapping[str, int] | None = None,
    sync_s: float = 0.01,
    noise: float = 0.3,
    local: tuple[int, int] = (1, 256),
    **more: Any,
) -> Scaling:
    """What is known of an elastic job, by GPU type its speed relative to a V100.

    ``noise`` is gradient variance over squared norm: the larger, the better large batches are.
    """
    speeds = {}
    for kind, factor in (kinds or {"v100": 1.0, "a100": 2.0}).items():
        speeds[kind] = TypeSpeed(
            model=ThroughputModel(
                compute_s=0.01 / factor,
                compute_s_per_sample=0.002 / factor,
                node_sync_s=sync_s,
                node_sync_s_per_replica=sync_s / 20,
                network_sync_s=4 * sync_s,
                network_sync_s_per_replica=sync_s / 10,
                overlap=1.5,
            ),
            local_least=local[0],
            local_most=local[1],
            explored_gpus=(explored or {}).get(kind, 0),
        )
    return Scaling(speeds=speeds, statistics=GradientStatistics(square=1.0, variance=noise), **more)


def elastic(job_id: int = 1, gpus: int = 1, most: int = 16, **more: Any) -> Job:
    """A job that may have 1 to ``most`` GPUs, and a batch of 32 to 4096."""
    more.setdefault("elasticity", Elasticity.ADAPTIVE)
    more.setdefault("batch", (32, 4096))
    return job(job_id, gpus, max_gpus=most, **more)


def job(job_id: int = 1, gpus: int = 1, **more: Any) -> Job:
    """A job of user ``u``; submitted in the order of ids unless told otherwise."""
    more.setdefault("submitted_s", float(job_id))
    return Job(job_id=job_id, user="u", gpus=gpus, **more)


def pending(one: Job, belief: Profile | None = None, **more: Any) -> JobStatus:
    """A pending job."""
    return JobStatus(job=one, profile=fit_to_job(belief or Profile(), one), **more)


def placement(job_id: int, gpu_type: str = "v100", **shares: Resources) -> Placement:
    """A placement; node names with underscores for dashes: ``v100_1=res(4, 12, 250000)``."""
    return Placement(
        job_id=job_id,
        gpu_type=gpu_type,
        shares=tuple((name.replace("_", "-"), share) for name, share in shares.items()),
    )


def running(
    one: Job,
    where: Placement,
    belief: Profile | None = None,
    *,
    granted: Mapping[str, Resources] | None = None,
    phase: JobPhase = JobPhase.RUNNING,
    **more: Any,
) -> JobStatus:
    """A job that holds ``where``; Slurm granted the same unless ``granted`` says otherwise."""
    lease = Lease(
        job_id=one.job_id,
        generation=1,
        placement=where,
        expires_s=0.0,
        granted=granted if granted is not None else dict(where.shares),
    )
    return JobStatus(
        job=one, profile=fit_to_job(belief or Profile(), one), phase=phase, lease=lease, **more
    )


def snapshot(nodes: Sequence[Node], jobs: Sequence[JobStatus], **more: Any) -> Snapshot:
    """A snapshot at time 0; nodes and jobs in any order."""
    return Snapshot(
        round=1,
        now_s=0.0,
        round_s=300.0,
        nodes=tuple(sorted(nodes, key=lambda one: one.name)),
        jobs=tuple(sorted(jobs, key=lambda one: one.job.job_id)),
        **more,
    )


@dataclass
class Held:
    """A job in the cluster in memory."""

    job: Job
    profile_key: str = ""
    phase: JobPhase = JobPhase.PENDING
    restarts: int = 0
    allocated: tuple[tuple[str, Resources], ...] = ()
    blocked: Reason | None = None


@dataclass
class MemoryCluster:
    """A cluster in memory that, like Slurm, keeps a job's memory as granted at its start.

    It refuses what Slurm would refuse: more GPUs or memory than are free (and more CPUs, when
    CPUs are not shared). A stopped job holds its GPUs until ``settle``.
    """

    nodes: list[Node]
    enforcement: Enforcement = Enforcement.SHARED
    jobs: dict[int, Held] = field(default_factory=dict)
    stopping: set[int] = field(default_factory=set)

    def observe(self) -> Observation:
        """What is."""
        return Observation(
            nodes=tuple(self.nodes),
            jobs=tuple(
                ObservedJob(
                    job=one.job,
                    phase=one.phase,
                    restarts=one.restarts,
                    allocated=one.allocated,
                    blocked=one.blocked,
                    profile_key=one.profile_key,
                )
                for one in self.jobs.values()
            ),
            free=self.free(),
            enforcement=self.enforcement,
        )

    def free(self) -> dict[str, Resources]:
        """Capacity less allocations; zero on nodes that are not usable."""
        free = {}
        for one in self.nodes:
            left = [one.capacity.gpus, one.capacity.cpus, one.capacity.mem_mib]
            for held in self.jobs.values():
                for name, share in held.allocated:
                    if name == one.name:
                        left[0] -= share.gpus
                        left[1] -= share.cpus if self.enforcement is Enforcement.REQUEUE else 0
                        left[2] -= share.mem_mib
            free[one.name] = res(*(max(amount, 0) for amount in left))
        return free

    def apply(self, action: Action, status: JobStatus) -> Outcome:
        """Do it."""
        held = self.jobs[action.job_id]
        if isinstance(action, Start):
            assert held.phase is JobPhase.PENDING
            free = self.free()
            for name, share in action.placement.shares:
                asked = share
                if self.enforcement is Enforcement.SHARED:
                    asked = replace(share, cpus=0)
                assert asked.fits_in(free[name]), f"{action} does not fit {free[name]}"
            held.phase, held.allocated = JobPhase.RUNNING, action.placement.shares
        elif isinstance(action, Stop):
            assert held.phase is JobPhase.RUNNING and held.job.preemptible and held.job.wrapped
            self.stopping.add(action.job_id)
        elif isinstance(action, Resize):
            assert held.phase is JobPhase.RUNNING
            cores = {name: share.cpus for name, share in action.placement.shares}
            same = cores == {name: share.cpus for name, share in held.allocated}
            assert (self.enforcement.in_place or same) and held.job.wrapped
            for name, share in held.allocated:
                assert action.placement.on(name).mem_mib <= share.mem_mib
        return Outcome(action=action, done=True)

    def settle(self) -> None:
        """Stopped jobs are back in the queue."""
        for job_id in sorted(self.stopping):
            held = self.jobs[job_id]
            held.phase, held.allocated = JobPhase.PENDING, ()
            held.restarts += 1
        self.stopping.clear()


@dataclass
class MemoryRecords:
    """Records in memory, and the journal of all rounds."""

    records: dict[int, Record] = field(default_factory=dict)
    rounds: int = 0
    drain: bool = False
    profiles: dict[str, Profile] = field(default_factory=dict)
    intents: list[tuple[int, tuple[Action, ...]]] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)

    def read(self) -> Mapping[int, Record]:
        """Records by job id."""
        return dict(self.records)

    def draining(self) -> bool:
        """Whether nothing shall be started."""
        return self.drain

    def next_round(self) -> int:
        """One more."""
        self.rounds += 1
        return self.rounds

    def intend(self, round_number: int, actions: Sequence[Action]) -> None:
        """Note it."""
        self.intents.append((round_number, tuple(actions)))

    def commit(self, round_number: int, outcomes: Sequence[Outcome], snapshot: Snapshot) -> None:
        """Keep leases and stops."""
        for outcome in outcomes:
            action = outcome.action
            record = self.records.get(action.job_id) or Record(job_id=action.job_id)
            if not outcome.done or isinstance(action, Renew | Hold):
                continue
            if isinstance(action, Start):
                lease = Lease(
                    job_id=action.job_id,
                    generation=1,
                    placement=action.placement,
                    expires_s=snapshot.now_s,
                    granted=dict(action.placement.shares),
                )
                record = replace(record, lease=lease, stopping=None)
            elif isinstance(action, Resize):
                assert record.lease is not None
                lease = replace(
                    record.lease,
                    placement=action.placement,
                    generation=record.lease.generation + 1,
                )
                record = replace(record, lease=lease)
            elif isinstance(action, Stop):
                record = replace(record, stopping=action.reason)
            self.records[action.job_id] = record

    def journal(
        self,
        snapshot: Snapshot,
        plan: Plan,
        actions: Sequence[Action],
        outcomes: Sequence[Outcome],
        took_s: Mapping[str, float],
        free: Mapping[str, Resources] | None = None,
    ) -> None:
        """Keep the plan."""
        self.plans.append(plan)

    def profile(self, key: str) -> Profile | None:
        """A measured profile."""
        return self.profiles.get(key)


class VirtualClock:
    """A clock that stands still until it is told to move."""

    def __init__(self) -> None:
        self.time_s = 1000.0

    def now_s(self) -> float:
        """Virtual seconds."""
        return self.time_s


class Harness:
    """Plays rounds, checks every plan and every moment in between, and keeps the results."""

    def __init__(
        self,
        nodes: Sequence[Node],
        policy: str | Policy = "fifo",
        mechanism: str | Mechanism = "tune",
        enforcement: Enforcement = Enforcement.SHARED,
    ) -> None:
        self.policy = POLICIES[policy] if isinstance(policy, str) else policy
        self.mechanism = MECHANISMS[mechanism] if isinstance(mechanism, str) else mechanism
        self.cluster = MemoryCluster(nodes=list(nodes), enforcement=enforcement)
        self.records = MemoryRecords()
        self.clock = VirtualClock()
        self.results: list[RoundResult] = []
        self.known: Known | None = None
        """What rounds take over from each other; None: each is as the first one."""

    def submit(self, one: Job, profile_key: str = "", belief: Profile | None = None) -> None:
        """Queue a job; ``belief`` is stored as the measured profile of its key."""
        key = profile_key
        if belief is not None:
            key = key or f"job-{one.job_id}"
            self.records.profiles[key] = belief
        self.cluster.jobs[one.job_id] = Held(job=one, profile_key=key)

    def finish(self, job_id: int) -> None:
        """The job ends by itself."""
        del self.cluster.jobs[job_id]
        self.cluster.stopping.discard(job_id)

    def round(self) -> RoundResult:
        """One round at once after what was stopped before it is back in the queue."""
        self.cluster.settle()
        return self.round_while_stopping()

    def round_while_stopping(self) -> RoundResult:
        """One round while stopped jobs still hold their GPUs."""
        for job_id, record in list(self.records.records.items()):
            held = self.cluster.jobs.get(job_id)
            if held is not None and held.phase is JobPhase.PENDING:
                self.records.records[job_id] = replace(record, stopping=None)
        result = run_round(
            self.cluster,
            self.records,
            self.clock,
            self.policy,
            self.mechanism,
            300.0,
            known=self.known,
        )
        check_plan(result.snapshot, result.plan)
        self.check_leases()
        self.results.append(result)
        self.clock.time_s += 300.0
        return result

    def check_leases(self) -> None:
        """No core and no MiB is leased twice at this moment, on nodes that are in use."""
        for one in self.cluster.nodes:
            if not one.capacity.gpus:
                continue
            total = Resources()
            for job_id, held in self.cluster.jobs.items():
                record = self.records.records.get(job_id)
                if held.phase is JobPhase.RUNNING and record and record.lease:
                    total = total + record.lease.placement.on(one.name)
            assert total.fits_in(one.capacity), f"{one.name}: {total} leased of {one.capacity}"

    def running(self) -> list[int]:
        """Ids of running jobs that were not told to stop."""
        return [
            job_id
            for job_id, held in sorted(self.cluster.jobs.items())
            if held.phase is JobPhase.RUNNING and job_id not in self.cluster.stopping
        ]

    def lease(self, job_id: int) -> Placement:
        """What the job holds now."""
        lease = self.records.records[job_id].lease
        assert lease is not None
        return lease.placement


def quiet(result: RoundResult) -> bool:
    """Whether a round changed nothing."""
    return all(isinstance(action, Renew | Hold) for action in result.actions)


__all__ = [
    "CATALOGUE",
    "GIB",
    "Harness",
    "MemoryCluster",
    "MemoryRecords",
    "Reason",
    "ReasonCode",
    "VirtualClock",
    "elastic",
    "job",
    "node",
    "pending",
    "placement",
    "profile",
    "quiet",
    "res",
    "running",
    "scaling",
    "snapshot",
]
