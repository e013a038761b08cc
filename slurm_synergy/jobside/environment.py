"""Environment variables of Slurm and of the job: what is stale, what is missing, who a task is.

Pure functions over mappings. Slurm does not rewrite the variables that sbatch captured when a held
job is changed before its start, and srun obeys them; the fresh ones are used instead.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from slurm_synergy.errors import LeaseError

__all__ = [
    "ENDPOINT_FILE",
    "LEASE_STOP_EXIT",
    "StepShape",
    "Task",
    "checkpoint_dir",
    "endpoint_from",
    "expand_counts",
    "first_host",
    "is_elastic",
    "prepend_path",
    "stale_variables",
    "step_shape",
    "switched_on",
    "task_from",
    "training_defaults",
]

ENDPOINT_FILE = "/etc/slurm-synergy/endpoint"
LEASE_STOP_EXIT = 85
"""Exit status of a command that the scheduler has stopped and that is to be continued."""

_FIRST_PORT = 16_384
_PORTS = 16_384  # all below 32768, where Linux begins to hand out ports by itself
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_MAX_NODES = 100_000
_ON, _OFF = ("1", "yes", "on", "true"), ("0", "no", "off", "false")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The step that fills the allocation; 0 means "leave it to srun"."""

    nodes: int
    tasks: int
    cpus_per_task: int
    max_tasks_per_node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task of one incarnation of a job, as Slurm's variables describe it.

    ``job_id`` is 0 outside a Slurm job. ``granted_cpus`` and ``granted_mem_mib`` (of the node) are
    what Slurm gave, 0 when it does not say.
    """

    job_id: int
    restart_count: int
    step_id: int
    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    node: str
    nodes: int
    granted_cpus: int
    granted_mem_mib: int


def expand_counts(text: str) -> tuple[int, ...]:
    """``24(x2),12`` as (24, 24, 12); empty for anything else."""
    counts: list[int] = []
    for part in text.split(","):
        found = _REPEATED.fullmatch(part.strip())
        if found is None:
            return ()
        repeats = int(found[2] or 1)
        if len(counts) + repeats > _MAX_NODES:
            return ()
        counts.extend([int(found[1])] * repeats)
    return tuple(counts)


def first_host(hostlist: str) -> str:
    """The first name of a Slurm host list: ``gpu[03-04,9]-[1-2],x`` gives ``gpu03-1``."""
    name, depth = "", 0
    for char in hostlist:
        if char == "," and depth == 0:
            break
        depth += (char == "[") - (char == "]")
        name += char
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", name)


def switched_on(env: Mapping[str, str], name: str, *, unset: bool) -> bool:
    """What the switch ``name`` says, ``unset`` where it says nothing. Raises LeaseError."""
    word = env.get(name, "").strip().lower()
    if not word:
        return unset
    if word not in (*_ON, *_OFF):
        raise LeaseError(f"{name} = {env[name]!r}: expected {', '.join(_OFF)} or {', '.join(_ON)}")
    return word in _ON


def is_elastic(env: Mapping[str, str]) -> bool:
    """Whether the job's GPUs, and its tasks with them, differ from run to run."""
    return env.get("SYNERGY_ELASTIC") == "1"


def step_shape(env: Mapping[str, str], *, nodes: int | None = None) -> StepShape:
    """Nodes, tasks and CPUs per task of a step over the whole allocation.

    ``nodes`` is the user's own ``-N``. The number of tasks per node comes from
    SLURM_NTASKS_PER_NODE (cannot be changed after submission, so never stale), else from
    SLURM_TASKS_PER_NODE, which is fresh, where SLURM_NTASKS tells that tasks were asked for (in
    22.05 that number itself is stale), else it is one. Of an elastic job what was asked for says
    nothing: SLURM_TASKS_PER_NODE alone counts. A task gets all cores of its node divided by the
    tasks there.
    """
    total_nodes = _int(env, "SLURM_NNODES") or _int(env, "SLURM_JOB_NUM_NODES") or 1
    used = nodes or total_nodes
    per_node = expand_counts(env.get("SLURM_TASKS_PER_NODE", ""))
    fixed = 0 if is_elastic(env) else _int(env, "SLURM_NTASKS_PER_NODE")
    asked = 0 if is_elastic(env) else _int(env, "SLURM_NTASKS")
    if fixed:
        tasks, most = fixed * used, fixed
    elif (asked or is_elastic(env)) and per_node and min(per_node) > 0:
        most = max(per_node)
        tasks = sum(per_node) if nodes is None else most * used
    elif asked:
        tasks, most = asked, -(-asked // used)
    else:
        tasks, most = used, 1
    cpus = expand_counts(env.get("SLURM_JOB_CPUS_PER_NODE", ""))
    cpus = cpus or (_int(env, "SLURM_CPUS_ON_NODE"),)
    return StepShape(
        nodes=used, tasks=tasks, cpus_per_task=min(cpus) // most, max_tasks_per_node=most
    )


def stale_variables(env: Mapping[str, str], cpus_per_task: int) -> tuple[str, ...]:
    """Variables that must not reach srun; without them a step gets all GPUs of its job.

    ``cpus_per_task`` is the ``-c`` that srun will be given (0: none).
    """
    stale = ["SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK"]
    if is_elastic(env):
        # As many as were asked for, not as many as there are GPUs now.
        stale += ["SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE"]
    if "SLURM_MEM_PER_NODE" in env:
        stale.append("SLURM_MEM_PER_GPU")
    if cpus_per_task:
        stale.append("SLURM_CPUS_PER_GPU")
    per_task = env.get("SLURM_TRES_PER_TASK", "")
    cpu = re.search(r"\bcpu[=:](\d+)", per_task)
    if "gpu" in per_task or (cpu and cpus_per_task and int(cpu[1]) != cpus_per_task):
        stale.append("SLURM_TRES_PER_TASK")
    # A job that asked for GPUs per task has its steps bound to them (24.11, measured).
    if "gpu" in env.get("SLURM_TRES_BIND", "") and "per_task" in env["SLURM_TRES_BIND"]:
        stale.append("SLURM_TRES_BIND")
    return tuple(name for name in stale if name in env)


def task_from(env: Mapping[str, str]) -> Task:
    """Who this task is; one task of one outside Slurm."""
    if not env.get("SLURM_JOB_ID"):
        return Task(
            job_id=0, restart_count=0, step_id=0, rank=0, ranks=1, local_rank=0, local_ranks=1,
            node="", nodes=1, granted_cpus=0, granted_mem_mib=0,
        )  # fmt: skip
    ranks = _int(env, "SLURM_STEP_NUM_TASKS") or _int(env, "SLURM_NTASKS") or 1
    per_node = expand_counts(
        env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "")
    )
    node_index = _int(env, "SLURM_NODEID")
    in_step = "SLURM_PROCID" in env
    local = per_node[node_index] if in_step and node_index < len(per_node) else 1
    return Task(
        job_id=_int(env, "SLURM_JOB_ID"),
        restart_count=_int(env, "SLURM_RESTART_COUNT"),
        step_id=_int(env, "SLURM_STEP_ID"),
        rank=_int(env, "SLURM_PROCID"),
        ranks=ranks if in_step else 1,
        local_rank=_int(env, "SLURM_LOCALID"),
        local_ranks=max(1, local),
        node=env.get("SLURMD_NODENAME", ""),
        nodes=_int(env, "SLURM_STEP_NUM_NODES") or _int(env, "SLURM_NNODES") or 1,
        granted_cpus=_int(env, "SLURM_CPUS_PER_TASK"),
        granted_mem_mib=_int(env, "SLURM_MEM_PER_NODE"),
    )


def training_defaults(
    env: Mapping[str, str], task: Task, *, threads: int, resolves: Collection[str]
) -> dict[str, str]:
    """What frameworks expect and the user has not set; never overwrites.

    A meeting point is for steps of several tasks: one task alone has nobody to meet, unless it
    belongs to an elastic job, whose program meets whoever is there each time.
    ``threads`` is how many CPUs this task has, ``resolves`` the host names that this machine can
    resolve. The port depends on cluster, job, restart and step, so that two of them do not collide.
    """
    missing: dict[str, str] = {}
    meets = task.ranks > 1 or task.nodes > 1 or is_elastic(env)
    if meets and "MASTER_ADDR" not in env:
        head = first_host(env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", ""))
        if task.nodes == 1:
            missing["MASTER_ADDR"] = "127.0.0.1"
        elif head in resolves:
            missing["MASTER_ADDR"] = head
        else:
            missing["MASTER_ADDR"] = env.get("SLURM_LAUNCH_NODE_IPADDR") or head or "127.0.0.1"
    if meets and "MASTER_PORT" not in env:
        # One machine may serve several clusters, each with a job 1.
        cluster = zlib.crc32(env.get("SLURM_CLUSTER_NAME", "").encode())
        mixed = cluster + task.job_id * 101 + task.restart_count * 13 + task.step_id
        missing["MASTER_PORT"] = str(_FIRST_PORT + mixed % _PORTS)
    if "CUDA_DEVICE_ORDER" not in env:
        # Slurm and NVML count GPUs in bus order, CUDA by speed unless told otherwise.
        missing["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    if "OMP_NUM_THREADS" not in env:
        missing["OMP_NUM_THREADS"] = str(max(1, threads))
    return missing


def checkpoint_dir(env: Mapping[str, str], cwd: str, *, command: int = 1) -> str:
    """Where this job's checkpoints go: keyed by job and array task, the same after a requeue.

    ``command`` counts the different commands of a script from 1; they must not share one place.
    """
    given = env.get("SYNERGY_CHECKPOINT_DIR")
    if given:
        return given
    root = env.get("SYNERGY_CHECKPOINT_ROOT") or env.get("SLURM_SUBMIT_DIR") or cwd
    array, index = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    job = env.get("SLURM_JOB_ID") or "local"
    name = f"{array}_{index}" if array and index else job
    return f"{root}/synergy-checkpoints/{name}{f'.{command}' if command > 1 else ''}"


def endpoint_from(env: Mapping[str, str], file_text: str, file_name: str) -> str:
    """The controller's ``host:port`` from SYNERGY_ENDPOINT, else the file; empty when neither.

    Raises LeaseError, with the place and an example, for anything but host:port.
    """
    place, text = "SYNERGY_ENDPOINT", env.get("SYNERGY_ENDPOINT", "").strip()
    if not text:
        lines = (line.partition("#")[0].strip() for line in file_text.splitlines())
        place, text = file_name, next((line for line in lines if line), "")
    if not text:
        return ""
    host, colon, port = text.rpartition(":")
    if not host or not colon or not port.isdigit() or not 0 < int(port) < 65_536 or " " in text:
        raise LeaseError(f"{place} = {text!r} is not host:port; for example head-node:7737")
    return text


def prepend_path(entry: str, path: str | None) -> str:
    """``entry`` in front of a colon-separated path."""
    return f"{entry}:{path}" if path else entry


def _int(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    return int(text) if text.isdigit() else 0
