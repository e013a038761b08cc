"""The seam: what a round needs from the world, and what it asks of it.

Two implementations of :class:`Cluster` exist: live Slurm and the simulator. The round
(:mod:`slurm_synergy.round`) does not know which one it drives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable

from slurm_synergy.core.model import (
    Enforcement,
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
from slurm_synergy.core.values import quick
from slurm_synergy.errors import LeaseError

__all__ = [
    "Action",
    "Clock",
    "Cluster",
    "Foresight",
    "Hold",
    "LeasePort",
    "News",
    "ObservedJob",
    "Observation",
    "Outcome",
    "Record",
    "Records",
    "Renew",
    "Resize",
    "Start",
    "StartTogether",
    "Stop",
    "StopState",
    "Together",
]


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing to do for one job."""

    job_id: int


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Hold(Action):
    """See to it that only we can start this pending job."""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Renew(Action):
    """Let a running job keep what it has for another round."""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Resize(Action):
    """Change CPU or memory of a running job in place; same nodes, same GPUs."""

    placement: Placement


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(Action):
    """End a lease: the job checkpoints and is requeued, held."""

    reason: Reason


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Start(Action):
    """Start a pending job exactly there with exactly that."""

    placement: Placement


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of an action. ``reason`` is set when it was not carried out."""

    action: Action
    done: bool
    reason: Reason | None = None


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedJob:
    """A managed job as the cluster shows it now.

    ``phase`` here is the cluster's view only (PENDING, STARTING, RUNNING, ENDING); that a job was
    told to stop is in our records. ``allocated`` is what it holds per node in rank order, empty
    while pending; ``cores`` the core indices that the cluster confines it to, per node (relevant
    for jobs without the wrapper).
    """

    job: Job
    phase: JobPhase
    restarts: int = 0
    started_s: float | None = None
    gpu_type: str = ""
    allocated: tuple[tuple[str, Resources], ...] = ()
    cores: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    held_by_us: bool = False
    blocked: Reason | None = None
    profile_key: str = ""


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What is not as it was in the observation before: of the jobs themselves and their records.

    ``number`` counts observations. ``changed`` are the jobs that are new, hold something, or differ
    in any way, as they are now; ``gone`` the ids of those that are no longer there.
    """

    number: int
    changed: Mapping[int, ObservedJob]
    gone: Collection[int]


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One consistent reading of the cluster: nodes by name and jobs by id, ascending.

    ``free`` is what the cluster itself would let a new job of the pool have per node now (GPUs and
    memory; CPUs are shared under ``shared`` enforcement). ``news`` is there where the cluster knows
    it; it saves work and changes no decision.
    """

    nodes: tuple[Node, ...]
    jobs: tuple[ObservedJob, ...]
    free: Mapping[str, Resources]
    enforcement: Enforcement = Enforcement.SHARED
    news: News | None = None


class Cluster(Protocol):
    """The world that a round reads and changes."""

    def observe(self) -> Observation:
        """Read nodes and jobs once. Raises ClusterError; then nothing may be changed."""
        ...

    def apply(self, action: Action, status: JobStatus) -> Outcome:
        """Carry out one action, idempotently. A refusal is an Outcome, a failure a ClusterError."""
        ...


@runtime_checkable
class Foresight(Protocol):
    """What a cluster may have besides: many changes at once cost it less than one by one."""

    def foresee(self, actions: Sequence[Action], statuses: Mapping[int, JobStatus]) -> None:
        """These actions come next, each by ``apply``, in this order. Never raises ClusterError."""
        ...


@runtime_checkable
class Together(Protocol):
    """What a cluster may have besides: leases that change together, in one durable step."""

    def resize_all(
        self, resizes: Sequence[Resize], statuses: Mapping[int, JobStatus]
    ) -> tuple[Outcome, ...]:
        """Carry them out, idempotently: an outcome each, in this order.

        What is not refused is written as one, all of it or nothing, before any job is told. Raises
        ClusterError when nothing was carried out.
        """
        ...


@runtime_checkable
class StartTogether(Protocol):
    """What a cluster may have besides: to start many jobs at once costs it less."""

    def start_all(
        self, starts: Sequence[Start], statuses: Mapping[int, JobStatus]
    ) -> tuple[Outcome, ...]:
        """Carry them out, idempotently: an outcome each, in this order.

        A failure of one is its outcome and does not stop the others. Never raises ClusterError.
        """
        ...


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What we remember of a job beyond what the cluster shows.

    ``stopping`` is the reason of a Stop in progress (the job still runs), ``lease`` the last lease,
    ``done_samples``, ``attained_service_gpu_s`` and ``held_s`` (seconds for which it held GPUs, by
    their type) survive restarts. ``profile_key`` is that of a
    job that names none itself, once its program is known.
    """

    job_id: int
    lease: Lease | None = None
    stopping: Reason | None = None
    done_samples: float = 0.0
    attained_service_gpu_s: float = 0.0
    profile: Profile | None = None
    profile_key: str = ""
    held_s: Mapping[str, float] = field(default_factory=dict)


class Records(Protocol):
    """Durable memory of the scheduler: intents before actions, leases, progress, profiles."""

    def read(self) -> Mapping[int, Record]:
        """Records by job id."""
        ...

    def draining(self) -> bool:
        """Whether an operator asked that nothing be started."""
        ...

    def next_round(self) -> int:
        """A round number greater than all earlier ones, also after a restart."""
        ...

    def intend(self, round_number: int, actions: Sequence[Action]) -> None:
        """Write what is about to be done, durably, before it is done."""
        ...

    def commit(self, round_number: int, outcomes: Sequence[Outcome], snapshot: Snapshot) -> None:
        """Write what was done: leases granted, changed, ended."""
        ...

    def journal(
        self,
        snapshot: Snapshot,
        plan: Plan,
        actions: Sequence[Action],
        outcomes: Sequence[Outcome],
        took_s: Mapping[str, float],
        free: Mapping[str, Resources] | None = None,
    ) -> None:
        """Append the round to the journal; ``free`` is the observation's, by node."""
        ...

    def profile(self, key: str) -> Profile | None:
        """The best known profile for a profile key."""
        ...


class StopState(Enum):
    """How far a Stop has come on the job side."""

    WAITING = "waiting"  # within its grace, not yet checkpointed
    CHECKPOINTED = "checkpointed"  # every rank reported a published checkpoint
    FAILED = "failed"  # every rank ended without one
    OVERDUE = "overdue"  # the grace is over


class LeasePort(Protocol):
    """What the adapter of a real cluster needs from the keeper of leases (thread-safe)."""

    def grant(
        self,
        *,
        status: JobStatus,
        owner_uid: int,
        incarnation: int,
        placement: Placement,
        granted: Mapping[str, Resources],
    ) -> Lease:
        """Make (or replace) the lease of a job about to start or adopted; durable on return."""
        ...

    def resize_all(self, placements: Sequence[Placement]) -> Mapping[int, LeaseError]:
        """Change cores and memory of running jobs in place, all in one durable step.

        Which jobs it is refused for, and why; it is done for the others.
        """
        ...

    def stop(self, *, job_id: int, reason: Reason, grace_s: float) -> None:
        """Ask the job to checkpoint and leave within ``grace_s`` seconds; idempotent."""
        ...

    def stop_state(self, job_id: int) -> StopState:
        """How far a stop has come."""
        ...

    def end(self, job_id: int) -> None:
        """The job holds nothing any more (requeued, finished, gone): forget its lease."""
        ...


class Clock(Protocol):
    """Time as a dependency, so that decisions can be replayed."""

    def now_s(self) -> float:
        """Seconds since the epoch."""
        ...
