"""The words of the field as values: nodes, jobs, profiles, placements, leases.

All types are frozen; functions return new ones. Units are part of the names. Everything is imported
from here, wherever it is defined.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import lt

from slurm_synergy.core.jobs import Ceiling, Configuration, Elasticity, Job
from slurm_synergy.core.leases import Lease, Placement
from slurm_synergy.core.plans import Decision, Grant, Layout, Plan, Reason, ReasonCode
from slurm_synergy.core.profiles import (
    Demand,
    PipelineModel,
    Profile,
    ProfileOrigin,
    SensitivityTable,
)
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.values import quick
from slurm_synergy.errors import ModelError

__all__ = [
    "Ceiling",
    "Configuration",
    "Decision",
    "Demand",
    "Elasticity",
    "Enforcement",
    "Grant",
    "Job",
    "JobPhase",
    "JobStatus",
    "Layout",
    "Lease",
    "Node",
    "PipelineModel",
    "Placement",
    "Plan",
    "Profile",
    "ProfileOrigin",
    "Reason",
    "ReasonCode",
    "SensitivityTable",
    "Snapshot",
]


class Enforcement(Enum):
    """How a job's CPU share is made real (architecture: "how a plan becomes real")."""

    SHARED = "shared"
    BORROW = "borrow"
    REQUEUE = "requeue"

    @property
    def in_place(self) -> bool:
        """Whether a running job's cores can change without a restart."""
        return self is not Enforcement.REQUEUE


class JobPhase(Enum):
    """Where a managed job is, as the scheduler sees it."""

    PENDING = "pending"  # held by us, holds nothing
    STARTING = "starting"  # released or launching: its placement is taken
    RUNNING = "running"
    STOPPING = "stopping"  # told to checkpoint; still holds its GPUs
    ENDING = "ending"  # completing; Slurm has not freed its GPUs yet


_PENDING = JobPhase.PENDING


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine of the pool.

    ``total`` is what the hardware has (the proportional share follows from it); ``capacity`` is
    what may be used this round, zero when the node is down or draining for new starts.
    ``core_ids`` are Slurm's core indices 0..n-1 on this node, ``sockets`` how many sockets they
    are split over evenly, ``threads_per_core`` how many of them in a row are one physical core.
    ``gpu_sockets`` is the socket near each GPU by index, -1 where not known; empty: for all.
    ``fixed_shares``: running jobs cannot be given other cores there than Slurm gave them, so that
    each has its proportional share.
    """

    name: str
    gpu_type: str
    total: Resources
    capacity: Resources
    sockets: int = 1
    threads_per_core: int = 1
    gpu_sockets: tuple[int, ...] = ()
    fixed_shares: bool = False

    def __post_init__(self) -> None:
        if not self.name or not self.gpu_type:
            raise ModelError(f"node needs a name and a GPU type: {self.name!r} {self.gpu_type!r}")
        if self.total.gpus < 1:
            raise ModelError(f"node {self.name}: a node of the pool has at least one GPU")
        if not self.capacity.fits_in(self.total):
            raise ModelError(f"node {self.name}: capacity {self.capacity} exceeds {self.total}")

    def proportional(self, gpus: int) -> Resources:
        """GPU-proportional share of this node for ``gpus`` GPUs, rounded down (promise P1)."""
        return Resources(
            gpus=gpus,
            cpus=self.total.cpus * gpus // self.total.gpus,
            mem_mib=self.total.mem_mib * gpus // self.total.gpus,
        )


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A job with what we believe and what it has done so far.

    ``lease`` is None exactly when the job holds nothing. ``blocked`` tells why a pending job must
    not be started whatever the policy says (dependency, begin time), else None. ``held_by_us``
    tells that the cluster shows a pending job as one that only we can start. ``held_s`` are the
    seconds for which the job has held GPUs, by their type.
    """

    job: Job
    profile: Profile = field(default_factory=Profile)
    phase: JobPhase = JobPhase.PENDING
    lease: Lease | None = None
    done_samples: float = 0.0
    attained_service_gpu_s: float = 0.0
    restarts: int = 0
    blocked: Reason | None = None
    held_by_us: bool = False
    held_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.lease is None) != (self.phase is _PENDING):
            raise ModelError(
                f"job {self.job.job_id}: phase {self.phase.value} and lease do not agree"
            )


class _Lookup:
    """What is derived from a snapshot when first asked for; no part of its value."""

    __slots__ = ("_by_name", "_derived", "_of_nodes", "_usable")
    _by_name: dict[str, Node]
    _derived: dict[type, object]
    _of_nodes: dict[type, object]
    _usable: frozenset[str]


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(_Lookup):
    """Everything that a decision may depend on. Nodes by name, jobs by id, both ascending.

    ``previous_s`` is when the round before this one was (epoch seconds), None where that is not
    known.
    """

    round: int
    now_s: float
    round_s: float
    nodes: tuple[Node, ...]
    jobs: tuple[JobStatus, ...]
    enforcement: Enforcement = Enforcement.SHARED
    draining: bool = False
    previous_s: float | None = None

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        ids = [status.job.job_id for status in self.jobs]
        if names != sorted(set(names)):
            raise ModelError(f"snapshot nodes must be distinct and sorted by name: {names}")
        if not all(map(lt, ids, ids[1:])):
            raise ModelError(f"snapshot jobs must be distinct and sorted by id: {ids}")

    @property
    def usable(self) -> frozenset[str]:
        """Names of the nodes on which something may be started this round."""
        try:
            return self._usable
        except AttributeError:
            found = frozenset(node.name for node in self.nodes if node.capacity.gpus > 0)
            object.__setattr__(self, "_usable", found)
            return found

    @property
    def derived(self) -> dict[type, object]:
        """What functions of this snapshot alone have computed, by the type of their result."""
        try:
            return self._derived
        except AttributeError:
            found: dict[type, object] = {}
            object.__setattr__(self, "_derived", found)
            return found

    @property
    def of_nodes(self) -> dict[type, object]:
        """What follows from the nodes alone; see :func:`slurm_synergy.core.snapshot.inherit`."""
        try:
            return self._of_nodes
        except AttributeError:
            found: dict[type, object] = {}
            object.__setattr__(self, "_of_nodes", found)
            return found

    def node(self, name: str) -> Node:
        """The node called ``name``; raises ModelError when it is not in the pool."""
        found = self.nodes_by_name.get(name)
        if found is None:
            raise ModelError(f"node {name!r} is not in the snapshot")
        return found

    @property
    def nodes_by_name(self) -> Mapping[str, Node]:
        """The nodes by their names."""
        try:
            return self._by_name
        except AttributeError:
            found = {node.name: node for node in self.nodes}
            object.__setattr__(self, "_by_name", found)
            return found
