"""The words of the field as values: nodes, jobs, profiles, placements, leases.

All types are frozen; functions return new ones. Units are part of the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import lt

from slurm_synergy.core.resources import Resources
from slurm_synergy.core.scaling import BatchSize, Scaling
from slurm_synergy.core.values import quick
from slurm_synergy.errors import ModelError

__all__ = [
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


class Elasticity(Enum):
    """What may change about a job's GPUs during its life (Sia, SOSP '23, section 3)."""

    RIGID = "rigid"
    STRONG_SCALING = "scale"
    ADAPTIVE = "full"


# Until Python 3.12, looking up a member of an enumeration takes longer than comparing it.
_RIGID = Elasticity.RIGID


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


class ProfileOrigin(Enum):
    """Where our belief about a job's speed comes from."""

    MEASURED = "measured"
    CATALOGUE = "catalogue"
    DEFAULT = "default"


class ReasonCode(Enum):
    """Why a job waits or was moved; stable words for scripts."""

    NO_GPUS = "no_gpus"  # the policy gave the GPUs to jobs ahead in its order
    FRAGMENTED = "fragmented"  # enough GPUs, but not in the shape the job asked for
    NO_MEMORY = "no_memory"  # its minimum memory does not fit beside the others
    DEMAND_TAKEN = "demand_taken"  # a mechanism that gives whole demands or nothing: not free
    NEVER_FITS = "never_fits"  # no node of the pool can hold it even when empty
    GPUS_BUSY = "gpus_busy"  # placed, but the GPUs are still being freed
    START_REFUSED = "start_refused"  # Slurm did not start it; will be planned again
    LIMITED = "limited"  # a limit of Slurm's keeps it from starting; tried again on a change
    PREEMPTED = "preempted"  # the policy prefers other jobs now
    MOVED = "moved"  # same GPUs elsewhere
    RESHAPED = "reshaped"  # more or fewer GPUs, or GPUs of another type
    RESIZED = "resized"  # needs a restart to change its CPU or memory
    DRAINED = "drained"  # the controller is draining: nothing is started
    ACTION_FAILED = "action_failed"  # the cluster failed to do it; will be tried again
    NOT_OURS = "not_ours"  # waits on something that is not ours to decide (dependency, begin time)
    ONLY_SHOWN = "only_shown"  # dry run, observe or advise: it would be done, and is not


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """An expected outcome in words: a code for programs and a sentence for people."""

    code: ReasonCode
    text: str


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
class Configuration:
    """What a job runs on: ``nodes`` nodes with ``gpus`` GPUs in total (Sia, section 3.2).

    ``gpu_type`` None means any type that the job allows; the mechanism then chooses one type.
    ``nodes`` None means any number of nodes (jobs of recorded traces have no node count).
    ``batch`` is the batch size that goes with it, None for the job's own.
    """

    gpus: int
    nodes: int | None = None
    gpu_type: str | None = None
    batch: BatchSize | None = None

    def __post_init__(self) -> None:
        if self.gpus < 1 or (self.nodes is not None and not 1 <= self.nodes <= self.gpus):
            raise ModelError(f"configuration of {self.gpus} GPUs on {self.nodes} nodes")
        if self.nodes is not None and self.gpus % self.nodes:
            raise ModelError(f"{self.gpus} GPUs cannot be split evenly over {self.nodes} nodes")


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the user asked for. ``job_id`` is Slurm's; it breaks all ties.

    ``gpus`` is the total; ``nodes`` the exact node count (None: free to split), ``gpu_types`` the
    allowed types (empty: any), ``tasks_per_node`` the ranks on each node, ``min_mem_mib_per_node``
    what the processes need on each node besides any cache (promise P7). ``wrapped`` tells whether
    the job runs under synergy-srun: only such a job can be resized in place or preempted.
    ``total_samples`` is the work in samples, if the user or a trace told it. ``array`` is how users
    call a member of a job array (``12_3``), empty for other jobs.

    An elastic job may run on ``min_gpus`` (None: its scale unit) to ``max_gpus`` (None: what it
    asks for) GPUs, in multiples of ``scale_unit``. ``batch`` is the total batch size that it was
    tuned for, which is its least, and the largest allowed; None: it is not known, and never
    changed. ``guaranteed`` jobs are always given some configuration.
    """

    job_id: int
    user: str
    submitted_s: float
    gpus: int
    nodes: int | None = 1
    gpu_types: tuple[str, ...] = ()
    tasks_per_node: int = 1
    min_mem_mib_per_node: int = 0
    elasticity: Elasticity = Elasticity.RIGID
    min_gpus: int | None = None
    max_gpus: int | None = None
    scale_unit: int = 1
    batch: tuple[int, int] | None = None
    guaranteed: bool = False
    preemptible: bool = True
    wrapped: bool = True
    total_samples: float | None = None
    time_limit_s: float | None = None
    name: str = ""
    array: str = ""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ModelError(f"job {self.job_id}: asks for {self.gpus} GPUs")
        if self.nodes is not None and (self.nodes < 1 or self.gpus % self.nodes):
            raise ModelError(
                f"job {self.job_id}: {self.gpus} GPUs cannot be split evenly "
                f"over {self.nodes} nodes"
            )
        if self.tasks_per_node < 1 or self.min_mem_mib_per_node < 0:
            raise ModelError(f"job {self.job_id}: tasks or minimum memory out of range")
        if self.elasticity is not _RIGID:
            self._check_elastic()

    def _check_elastic(self) -> None:
        if self.scale_unit < 1 or self.least_gpus < 1 or self.least_gpus > self.most_gpus:
            raise ModelError(
                f"job {self.job_id}: cannot run on {self.least_gpus} to {self.most_gpus} GPUs in "
                f"multiples of {self.scale_unit}"
            )
        if self.batch is not None and not 1 <= self.batch[0] <= self.batch[1]:
            raise ModelError(f"job {self.job_id}: batch sizes {self.batch} are out of order")

    @property
    def least_gpus(self) -> int:
        """The fewest GPUs on which the job may run; those asked for when it is rigid."""
        if self.elasticity is _RIGID:
            return self.gpus
        return self.min_gpus if self.min_gpus is not None else min(self.scale_unit, self.gpus)

    @property
    def most_gpus(self) -> int:
        """The most GPUs on which the job may run; those asked for when it is rigid."""
        if self.elasticity is _RIGID:
            return self.gpus
        return self.max_gpus if self.max_gpus is not None else max(self.gpus, self.least_gpus)

    @property
    def configuration(self) -> Configuration:
        """The one configuration of a rigid job, as the user asked for it."""
        only = self.gpu_types[0] if len(self.gpu_types) == 1 else None
        return Configuration(gpus=self.gpus, nodes=self.nodes, gpu_type=only)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineModel:
    """Input pipeline of one node of a job (Synergy, OSDI '22, section 3.1).

    ``preprocess`` are measured points (cores on the node, samples/s), cores ascending; between
    points the rate is linear, below the first proportional, above the last flat.
    ``dataset_mib`` is the size of the raw data set, ``samples_per_epoch`` its items,
    ``storage_mib_s`` the bandwidth at which a miss is read, ``process_mem_mib`` what the processes
    need before any cache. ``dataset_mib`` 0 means that fetching never limits.
    """

    preprocess: tuple[tuple[int, float], ...]
    dataset_mib: float = 0.0
    samples_per_epoch: int = 1
    storage_mib_s: float = float("inf")
    process_mem_mib: int = 0

    def __post_init__(self) -> None:
        cores = [c for c, _ in self.preprocess]
        rates = [r for _, r in self.preprocess]
        if not cores or cores[0] < 1 or cores != sorted(set(cores)):
            raise ModelError(f"preprocess points need ascending core counts >= 1: {cores}")
        if any(r <= 0 for r in rates) or rates != sorted(rates):
            raise ModelError(f"preprocess rates must be positive and non-decreasing: {rates}")
        if self.dataset_mib < 0 or self.samples_per_epoch < 1 or self.storage_mib_s <= 0:
            raise ModelError("data set size, samples per epoch or storage bandwidth out of range")


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityTable:
    """Synergy's matrix W[c, m], for jobs of which only a published table is known (section 3.1).

    ``rates[c][m]`` are samples/s of one GPU with ``cpus_per_gpu[c]`` cores and
    ``mem_mib_per_gpu[m]`` MiB; both axes ascending, rates non-decreasing along both. Between
    core counts the rate is linear, below the first proportional; memory counts by whole columns,
    and below the first column nothing runs.
    """

    cpus_per_gpu: tuple[int, ...]
    mem_mib_per_gpu: tuple[int, ...]
    rates: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for axis in (self.cpus_per_gpu, self.mem_mib_per_gpu):
            if not axis or axis[0] < 1 or list(axis) != sorted(set(axis)):
                raise ModelError(f"the axes of a table must ascend from 1 or more: {axis}")
        rows, width = len(self.cpus_per_gpu), len(self.mem_mib_per_gpu)
        if len(self.rates) != rows or any(len(row) != width for row in self.rates):
            raise ModelError(f"a table needs {rows} rows of {width} rates")
        for line in (*self.rates, *zip(*self.rates, strict=True)):
            if line[0] <= 0 or list(line) != sorted(line):
                raise ModelError(f"rates must be positive and non-decreasing: {line}")


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What we believe about a job's speed.

    ``gpu_rate_per_gpu`` maps a GPU type to samples/s per GPU when data is always ready. How fast
    data gets ready says either ``pipeline`` or ``table``. With neither, or for a GPU type that is
    not in the map, the speed is unknown: such a job gets its proportional share.
    ``restart_s`` is what stopping and starting again costs. ``scaling`` is how the speed changes
    with the number and type of GPUs and the batch size, for elastic jobs.

    ``confident`` is False for measurements that were cut off or contradict each other, and for an
    elastic job where it has not run yet: such a job never gets less than its proportional share for
    them. ``measured_gpus`` is the GPUs on one node beyond which the pipeline was not seen, as these
    few kept it from showing more (0: no such limit), ``measured_cpus`` the most cores on one node
    that were tried. By ``rate_error``, a part, GPUs may be faster than ``gpu_rate_per_gpu`` says.
    """

    key: str = ""
    gpu_rate_per_gpu: Mapping[str, float] = field(default_factory=dict)
    pipeline: PipelineModel | None = None
    origin: ProfileOrigin = ProfileOrigin.DEFAULT
    sample_count: int = 0
    restart_s: float = 30.0
    table: SensitivityTable | None = None
    scaling: Scaling | None = None
    confident: bool = True
    measured_gpus: int = 0
    measured_cpus: int = 0
    rate_error: float = 0.0

    def __post_init__(self) -> None:
        if any(rate <= 0 for rate in self.gpu_rate_per_gpu.values()):
            raise ModelError(f"profile {self.key!r}: GPU rates must be positive")
        if self.pipeline is not None and self.table is not None:
            raise ModelError(f"profile {self.key!r}: has both a pipeline model and a table")


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Least CPU and memory *on one node* with which a job runs at full speed; derived only."""

    cpus: int
    mem_mib: int


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a job runs and with what, node by node, in rank order.

    ``batch`` is the batch size that it runs with, None for its own.
    """

    job_id: int
    gpu_type: str
    shares: tuple[tuple[str, Resources], ...]
    batch: BatchSize | None = None

    def __post_init__(self) -> None:
        names = [name for name, _ in self.shares]
        if not names or len(set(names)) != len(names):
            raise ModelError(f"job {self.job_id}: placement needs distinct nodes, got {names}")
        if any(share.gpus < 1 for _, share in self.shares):
            raise ModelError(f"job {self.job_id}: every node of a placement holds a GPU")

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node names in rank order."""
        return tuple(name for name, _ in self.shares)

    @property
    def gpus(self) -> int:
        """GPUs in total."""
        if len(self.shares) == 1:  # most jobs; a generator takes three times as long
            return self.shares[0][1].gpus
        return sum(share.gpus for _, share in self.shares)

    @property
    def gpu_layout(self) -> tuple[tuple[str, int], ...]:
        """(node, GPUs) pairs by node name: what cannot change without a restart."""
        return tuple(sorted((name, share.gpus) for name, share in self.shares))

    def on(self, node: str) -> Resources:
        """The share on ``node``; all zero where the job is not."""
        return dict(self.shares).get(node, Resources())


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right of a job to hold a placement until ``expires_s`` (epoch seconds).

    ``generation`` grows with every change. ``cores`` are the core indices per node that are the
    job's now, ``floor`` those that it falls back to when the controller is silent (promises P1,
    P5). ``granted`` is what Slurm allocated per node: memory can grow in place up to it.
    """

    job_id: int
    generation: int
    placement: Placement
    expires_s: float
    cores: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    floor: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    granted: Mapping[str, Resources] = field(default_factory=dict)


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
        try:
            by_name = self._by_name
        except AttributeError:
            by_name = {node.name: node for node in self.nodes}
            object.__setattr__(self, "_by_name", by_name)
        if name not in by_name:
            raise ModelError(f"node {name!r} is not in the snapshot")
        return by_name[name]


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The policy's word for one job."""

    job_id: int
    configuration: Configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The policy's word: grants in priority order, and why the others wait.

    ``packing`` tells for each granted job a GPU type and (node, GPUs) pairs where all of them fit
    together, if the policy has looked for that itself; mechanisms start from it. ``solver`` is as
    in ``Plan``.
    """

    grants: tuple[Grant, ...]
    waiting: Mapping[int, Reason] = field(default_factory=dict)
    packing: Mapping[int, tuple[str, tuple[tuple[str, int], ...]]] | None = None
    solver: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The mechanism's word: placements, and grants that could not be placed with the reason.

    ``solver`` is as in ``Plan``.
    """

    placements: tuple[Placement, ...]
    unplaced: Mapping[int, Reason] = field(default_factory=dict)
    solver: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What shall be true after this round. ``placements`` sorted by job id.

    ``solver`` is the report of an optimising policy or mechanism (status, gap, milliseconds),
    empty for the others. It tells how the plan came about and is no part of its value.
    """

    round: int
    policy: str
    mechanism: str
    placements: tuple[Placement, ...]
    waiting: Mapping[int, Reason] = field(default_factory=dict)
    solver: Mapping[str, object] = field(default_factory=dict, compare=False)

    def placement(self, job_id: int) -> Placement | None:
        """The placement of ``job_id``, or None when it waits."""
        for placement in self.placements:
            if placement.job_id == job_id:
                return placement
        return None
