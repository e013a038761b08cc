"""What Slurm says, as typed values: jobs, nodes, partitions, reservations, configuration.

Times are epoch seconds (``None``: Slurm has no such time yet), memory is MiB, GPU counts are
mappings of GPU type to number, where the type ``""`` means "any type". Nothing here talks to
Slurm; ``parse`` builds these values from Slurm's text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from slurm_synergy.errors import ModelError

__all__ = [
    "ConfigFacts",
    "GpuForm",
    "Hold",
    "JobFacts",
    "JobShape",
    "JobState",
    "NodeAllocation",
    "NodeFacts",
    "PartitionFacts",
    "PingFacts",
    "ReservationFacts",
]


class JobState(Enum):
    """Base state of a job. A word of a newer release reads as ``UNKNOWN``, never as an error."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    SUSPENDED = "SUSPENDED"
    COMPLETING = "COMPLETING"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    TIMEOUT = "TIMEOUT"
    NODE_FAIL = "NODE_FAIL"
    PREEMPTED = "PREEMPTED"
    BOOT_FAIL = "BOOT_FAIL"
    DEADLINE = "DEADLINE"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    SPECIAL_EXIT = "SPECIAL_EXIT"
    UNKNOWN = "UNKNOWN"

    @property
    def finished(self) -> bool:
        """True when the job will not run again by itself."""
        return self in _FINISHED


_FINISHED = frozenset(
    {
        JobState.COMPLETED,
        JobState.CANCELLED,
        JobState.FAILED,
        JobState.TIMEOUT,
        JobState.NODE_FAIL,
        JobState.PREEMPTED,
        JobState.BOOT_FAIL,
        JobState.DEADLINE,
        JobState.OUT_OF_MEMORY,
    }
)


class Hold(Enum):
    """Who holds a job. A user hold can be released by its owner, an admin hold cannot."""

    NONE = "none"
    USER = "user"
    ADMIN = "admin"


class GpuForm(Enum):
    """The form in which the user asked for GPUs: what the counts of the request are counted per."""

    NONE = "none"
    PER_NODE = "node"
    PER_JOB = "job"
    PER_TASK = "task"
    PER_SOCKET = "socket"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAllocation:
    """What a started job really holds on one node, as Slurm numbers it.

    ``cpu_ids`` are Slurm's abstract CPU ids, ``gpu_ids`` the indices of the node's GPUs. The GPU
    part is empty once the job has ended.
    """

    node: str
    cpu_ids: tuple[int, ...]
    gpu_ids: tuple[int, ...]
    gpu_type: str | None
    mem_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """One job record.

    ``gpus_asked`` counts per ``gpu_form``. ``time_limit_s`` is ``None`` when unlimited or left to
    the partition. ``min_mem_node_mib`` is 0 when the whole node's memory is asked for and ``None``
    when the job asks per CPU (``min_mem_cpu_mib``). ``num_nodes`` is (least, most).
    ``ntasks_per_node`` is ``None`` when not given at submission. ``array_limit`` is how many
    members of its array may run at once (``None``: any number), ``deadline_s`` when it must have
    ended.
    """

    job_id: int
    user: str
    uid: int
    name: str
    state: JobState
    partition: str
    submit_s: float
    flags: frozenset[str] = frozenset()
    reason: str = ""
    array_job_id: int | None = None
    array_task_id: str | None = None
    array_limit: int | None = None
    het_job_id: int | None = None
    het_offset: int | None = None
    eligible_s: float | None = None
    start_s: float | None = None
    end_s: float | None = None
    time_limit_s: float | None = None
    deadline_s: float | None = None
    restarts: int = 0
    reservation: str | None = None
    comment: str = ""
    admin_comment: str = ""
    gpu_form: GpuForm = GpuForm.NONE
    gpus_asked: Mapping[str, int] = field(default_factory=dict)
    num_nodes: tuple[int, int] = (1, 1)
    num_tasks: int = 1
    ntasks_per_node: int | None = None
    cpus_per_task: int = 1
    num_cpus: int = 1
    min_cpus_node: int = 1
    min_mem_node_mib: int | None = 0
    min_mem_cpu_mib: int | None = None
    held: Hold = Hold.NONE
    priority: int = 0
    requeueable: bool = True
    dependency: str | None = None
    req_nodes: tuple[str, ...] = ()
    node_list: tuple[str, ...] = ()
    features: str | None = None
    batch_host: str | None = None
    batch: bool = True
    account: str | None = None
    qos: str | None = None
    work_dir: str = ""
    command: str = ""
    std_out: str = ""
    exit_code: tuple[int, int] = (0, 0)
    allocation: tuple[NodeAllocation, ...] = ()

    @property
    def completing(self) -> bool:
        """True while processes of a run are still being ended (its GPUs are not free yet)."""
        return self.state is JobState.COMPLETING or "COMPLETING" in self.flags

    @property
    def pending(self) -> bool:
        """True when the job waits and may be changed: no process of an earlier run is left."""
        return self.state in (JobState.PENDING, JobState.SPECIAL_EXIT) and not self.completing

    @property
    def running(self) -> bool:
        """True while the job runs, the configuring phase included."""
        return self.state is JobState.RUNNING and not self.completing

    @property
    def array_pending(self) -> bool:
        """True for the one record that stands for several tasks of an array not yet started."""
        task = self.array_task_id
        return task is not None and not task.isdigit()

    @property
    def gpus_held(self) -> int:
        """GPUs that it holds now."""
        return sum(len(part.gpu_ids) for part in self.allocation)

    @property
    def address(self) -> str:
        """What Slurm's commands call this one job.

        The last member of an array has the id of the whole array as its own: a command that is
        given this number acts on every member.
        """
        if self.array_job_id == self.job_id and not self.array_pending:
            return f"{self.array_job_id}_{self.array_task_id}"
        return str(self.job_id)

    @property
    def gpus_per_node(self) -> Mapping[str, int]:
        """GPUs on each node by type, derived from the form asked in (rounded up per node).

        A per-socket request is taken as one socket per node, since the number of sockets is only
        known once the job has nodes.
        """
        nodes = max(1, self.num_nodes[0])
        if self.gpu_form is GpuForm.PER_JOB:
            return {kind: -(-count // nodes) for kind, count in self.gpus_asked.items()}
        if self.gpu_form is GpuForm.PER_TASK:
            tasks = self.ntasks_per_node or -(-self.num_tasks // nodes)
            return {kind: count * tasks for kind, count in self.gpus_asked.items()}
        return dict(self.gpus_asked)

    @property
    def gpu_total(self) -> int:
        """All GPUs that the request stands for, over its least number of nodes."""
        asked = sum(self.gpus_asked.values())
        if self.gpu_form is GpuForm.PER_JOB:
            return asked
        if self.gpu_form is GpuForm.PER_TASK:
            return asked * max(1, self.num_tasks)
        return asked * max(1, self.num_nodes[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One node record. ``state`` is the base word, ``flags`` the words after it (``DRAIN``, ...).

    ``gpus_used`` is what Slurm has allocated now, by type. ``boot_s`` and ``slurmd_start_s`` tell
    a restarted node. ``registered`` is False from a start of slurmctld until the node's slurmd has
    reported: what Slurm starts there meanwhile gets no GPUs, and its steps fail (seen on 22.05).
    """

    name: str
    state: str
    flags: frozenset[str] = frozenset()
    real_memory_mib: int
    alloc_mem_mib: int
    cpus_total: int
    cpus_alloc: int
    sockets: int
    cores_per_socket: int
    threads_per_core: int
    gpus: Mapping[str, int] = field(default_factory=dict)
    gpus_used: Mapping[str, int] = field(default_factory=dict)
    partitions: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    reason: str = ""
    reservation: str | None = None
    address: str = ""
    hostname: str = ""
    port: int | None = None
    boot_s: float | None = None
    slurmd_start_s: float | None = None
    registered: bool = True

    @property
    def responding(self) -> bool:
        """False when slurmctld has lost touch with the node's slurmd."""
        return "NOT_RESPONDING" not in self.flags

    @property
    def drained(self) -> bool:
        """True when an admin (or Slurm itself) keeps new jobs away; running ones go on."""
        return bool(self.flags & {"DRAIN", "FAIL"})

    @property
    def down(self) -> bool:
        """True when jobs there are lost or about to be."""
        return self.state in ("DOWN", "ERROR", "UNKNOWN", "FUTURE") or bool(
            self.flags & {"POWERED_DOWN", "POWERING_DOWN", "INVALID_REG"}
        )

    @property
    def reserved(self) -> bool:
        """True when the node belongs to an active reservation."""
        return "RESERVED" in self.flags or self.state == "RESERVED" or bool(self.reservation)

    @property
    def in_maintenance(self) -> bool:
        """True when the node is in a maintenance reservation or reboots."""
        return bool(self.flags & {"MAINTENANCE", "MAINT", "REBOOT_REQUESTED", "REBOOT_ISSUED"})

    @property
    def usable(self) -> bool:
        """True when a job may be started there now, as far as the node's state tells."""
        kept = self.down or self.drained or self.in_maintenance
        return self.responding and self.registered and not kept


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionFacts:
    """One partition. ``oversubscribe`` is the word and its count, such as ``("FORCE", 8)``.

    Times are ``None`` when unlimited (maximum) or not set (default), ``max_nodes`` when unlimited.
    ``def_mem_*`` is what a job gets that asks for no memory; ``None``: the partition sets none.
    ``allow_*`` is ``None`` where all may use it; accounts are in lower case, as Slurm keeps them.
    """

    name: str
    nodes: tuple[str, ...]
    state: str
    oversubscribe: tuple[str, int]
    default: bool = False
    max_time_s: float | None = None
    default_time_s: float | None = None
    max_nodes: int | None = None
    hidden: bool = False
    total_cpus: int = 0
    def_mem_per_node_mib: int | None = None
    def_mem_per_cpu_mib: int | None = None
    allow_accounts: tuple[str, ...] | None = None
    deny_accounts: tuple[str, ...] = ()
    allow_groups: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationFacts:
    """One reservation. ``state`` is ``ACTIVE`` or ``INACTIVE``."""

    name: str
    nodes: tuple[str, ...]
    start_s: float | None = None
    end_s: float | None = None
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    flags: frozenset[str] = frozenset()
    state: str = "INACTIVE"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFacts:
    """The part of slurmctld's configuration that matters here.

    ``raw`` holds every key as printed, for messages and for ``synergyctl check``.
    """

    version: tuple[int, ...]
    cluster_name: str
    select_type: str
    select_parameters: tuple[str, ...]
    task_plugins: tuple[str, ...]
    proctrack: str
    kill_wait_s: float
    slurm_user: str
    job_requeue: bool
    raw: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PingFacts:
    """Answer of a ping: host names of the controllers that are up, and of those that are not."""

    up: tuple[str, ...]
    down: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobShape:
    """What a pending job is to be started with; all per-node numbers hold for each of ``nodes``.

    ``gpu_type`` ``None`` asks for any type. ``cpus_per_node`` is at least
    ``tasks_per_node * cpus_per_task``. Slurm cannot change ``--ntasks-per-node``: a job that was
    submitted with it keeps that number, and then ``cpus_per_node`` is exactly that product.
    ``reservation`` ``None`` clears the job's reservation.
    """

    nodes: tuple[str, ...]
    gpus_per_node: int
    gpu_type: str | None
    cpus_per_node: int
    mem_mib_per_node: int
    tasks_per_node: int = 1
    cpus_per_task: int
    reservation: str | None = None

    def __post_init__(self) -> None:
        """Raise ``ModelError`` for a shape that no job can have."""
        if not self.nodes or len(set(self.nodes)) != len(self.nodes):
            raise ModelError(f"shape: nodes {self.nodes!r}: give each of one or more nodes once")
        least = min(self.tasks_per_node, self.cpus_per_task, self.mem_mib_per_node)
        if least < 1 or self.gpus_per_node < 0:
            raise ModelError(f"shape: counts must be positive: {self!r}")
        if self.cpus_per_node < self.tasks_per_node * self.cpus_per_task:
            raise ModelError(
                f"shape: {self.tasks_per_node} tasks of {self.cpus_per_task} CPUs do not fit "
                f"into {self.cpus_per_node} CPUs per node"
            )
