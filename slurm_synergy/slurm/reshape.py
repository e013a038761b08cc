"""What is sent to give a pending job another shape, and what must be read back afterwards.

Pure functions. The recipes were measured on 22.05 to 25.11: all counts in one update, GPUs in the
colon form, nodes as a range of one number.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurm_synergy.errors import SlurmCommandError
from slurm_synergy.slurm import hostlist
from slurm_synergy.slurm.facts import GpuForm, JobFacts, JobShape, JobState, NodeFacts

__all__ = [
    "CAN_RETYPE",
    "check_pending",
    "check_shape",
    "check_type",
    "clear_first",
    "differences",
    "gpus_to_write",
    "kinds_of",
    "needs_nodes",
    "restore_fields",
    "retypes",
    "same_request",
    "shape_fields",
]

CAN_RETYPE = (23, 2)
"""The first release that can change a job's GPU type."""

_REQUEST = (
    *("num_nodes", "num_tasks", "num_cpus", "cpus_per_task", "min_cpus_node", "min_mem_node_mib"),
    *("min_mem_cpu_mib", "req_nodes", "reservation", "gpu_form", "gpus_asked"),
)


def kinds_of(job: JobFacts) -> set[str]:
    """The GPU types that the job asks for now, in whatever form."""
    return set(job.gpus_asked)


def check_pending(job: JobFacts, wish: str) -> None:
    """Raise ``SlurmCommandError`` unless the job waits and no process of an earlier run is left."""
    if job.pending:
        return
    state = "COMPLETING" if job.completing else job.state.value
    if job.state is JobState.UNKNOWN:
        state = f"in a state unknown here ({', '.join(sorted(job.flags)) or 'no word'})"
    raise SlurmCommandError(
        ("scontrol", "show", "job", str(job.job_id)),
        0,
        f"cannot {wish}: job {job.job_id} is {state}, not PENDING; wait and try again",
        kind="finished" if job.state.finished and not job.completing else "not_pending",
    )


def check_shape(job: JobFacts, shape: JobShape) -> None:
    """Refuse what Slurm would accept and then never start, or start differently."""
    per_node, tasks = job.ntasks_per_node, shape.tasks_per_node
    problem = ""
    if per_node is not None and per_node != tasks:
        problem = (
            f"it was submitted with --ntasks-per-node={per_node}, which Slurm cannot change: "
            f"{tasks} tasks per node would never start"
        )
    elif per_node is not None and shape.cpus_per_node != tasks * shape.cpus_per_task:
        problem = (
            f"with --ntasks-per-node={tasks} it gets {tasks * shape.cpus_per_task} CPUs per "
            f"node, never {shape.cpus_per_node}"
        )
    elif job.gpu_form is GpuForm.PER_TASK and (
        len(job.gpus_asked) > 1
        or sum(job.gpus_asked.values()) * tasks != shape.gpus_per_node
        or (kinds_of(job) - {"", shape.gpu_type})
    ):
        problem = "it was submitted with --gpus-per-task, whose GPU count Slurm cannot change"
    if problem:
        argv = ("scontrol", "update", f"JobId={job.job_id}")
        raise SlurmCommandError(argv, 0, f"job {job.job_id}: {problem}", kind="invalid")


def needs_nodes(job: JobFacts, shape: JobShape) -> bool:
    """Whether the GPUs to ask for depend on what the nodes of the shape carry."""
    settled = shape.gpu_type is None or kinds_of(job) == {shape.gpu_type}
    return bool(shape.gpus_per_node) and not settled


def gpus_to_write(job: JobFacts, shape: JobShape, nodes: Mapping[str, NodeFacts]) -> dict[str, int]:
    """The GPU request to send: typed as the job asked, and untyped where the nodes decide.

    On 22.05 a type once asked for can never be taken back (the job waits with BadConstraints
    on nodes of another type), so an untyped request stays untyped as long as no node of the
    shape carries GPUs of two types: the node list gives it its type.
    """
    if not shape.gpus_per_node:
        return {}
    wanted = shape.gpu_type or ""
    if needs_nodes(job, shape):
        kinds = {kind for name in shape.nodes if name in nodes for kind in nodes[name].gpus}
        if kinds <= {wanted} and kinds_of(job) <= {""}:
            wanted = ""
    return {wanted: shape.gpus_per_node}


def retypes(job: JobFacts, gpus: Mapping[str, int]) -> bool:
    """Whether ``gpus`` takes back a GPU type that the job asks for."""
    return bool(gpus) and bool(kinds_of(job) - {"", *gpus})


def check_type(job: JobFacts, gpus: Mapping[str, int], version: tuple[int, ...]) -> None:
    """Refuse a change of the GPU type on a release that cannot do it."""
    if not retypes(job, gpus) or version >= CAN_RETYPE:
        return
    stuck = "+".join(sorted(kinds_of(job) - {"", *gpus}))
    raise SlurmCommandError(
        ("scontrol", "update", f"JobId={job.job_id}"),
        0,
        f"job {job.job_id} asked for gpu:{stuck}, and this Slurm cannot change a job's GPU type "
        f"to {'+'.join(gpus) or 'any'}; submit it with --gres=gpu:N",
        kind="invalid",
    )


def clear_first(job: JobFacts, gpus: Mapping[str, int]) -> bool:
    """Whether the job's GPU request has to be emptied by an update of its own before.

    22.05 refuses "with and without type" in one.
    """
    return bool(kinds_of(job) - gpus.keys())


def shape_fields(job: JobFacts, shape: JobShape, gpus: Mapping[str, int]) -> tuple[str, ...]:
    """The fields of the one update that asks for ``shape`` with ``gpus`` (by type)."""
    count = len(shape.nodes)
    fields = [
        f"NumNodes={count}-{count}",
        f"NumTasks={count * shape.tasks_per_node}",
        f"NumCPUs={count * shape.cpus_per_node}",
        f"CPUsPerTask={shape.cpus_per_task}",
        f"MinCPUsNode={shape.cpus_per_node}",
        f"MinMemoryNode={shape.mem_mib_per_node}",
        f"ReqNodeList={hostlist.compress(shape.nodes)}",
        f"ReservationName={shape.reservation or ''}",
    ]
    if job.gpu_form is GpuForm.PER_JOB:
        fields.append("TresPerJob=")
    elif job.gpu_form is GpuForm.PER_SOCKET:
        fields.append("TresPerSocket=")
    if job.gpu_form is not GpuForm.PER_TASK:
        fields.append(f"TresPerNode={_gres(gpus)}")
    return tuple(fields)


def differences(job: JobFacts, shape: JobShape, gpus: Mapping[str, int]) -> list[str]:
    """What of ``shape`` the job does not ask for, in words; empty when it asks for exactly that.

    Of a job that has run Slurm goes on showing the number of nodes of its last start, whatever it
    was updated to, until it looks for nodes for it again (22.05.8, measured): there the list of
    nodes has to do, and what it really gets is compared once it runs.
    """
    count = len(shape.nodes)
    checks: list[tuple[str, object, object]] = [
        *([] if job.restarts else [("NumNodes", (count, count), job.num_nodes)]),
        ("NumTasks", count * shape.tasks_per_node, job.num_tasks),
        ("NumCPUs", count * shape.cpus_per_node, job.num_cpus),
        ("CPUs/Task", shape.cpus_per_task, job.cpus_per_task),
        ("MinCPUsNode", shape.cpus_per_node, job.min_cpus_node),
        ("MinMemoryNode (MiB)", shape.mem_mib_per_node, job.min_mem_node_mib),
        ("ReqNodeList", set(shape.nodes), set(job.req_nodes)),
        ("Reservation", shape.reservation, job.reservation),
        *_gpu_checks(job, gpus),
    ]
    return [f"{name} is {got}, wanted {want}" for name, want, got in checks if got != want]


def restore_fields(job: JobFacts) -> tuple[str, ...]:
    """The fields of the one update that gives a pending job the request of ``job`` again."""
    least, most = job.num_nodes
    if job.restarts and job.req_nodes:
        least = most = len(job.req_nodes)
    memory = (
        f"MinMemoryCPU={job.min_mem_cpu_mib}"
        if job.min_mem_cpu_mib is not None
        else f"MinMemoryNode={job.min_mem_node_mib or 0}"
    )
    fields = [
        f"NumNodes={least}-{most}",
        f"NumTasks={job.num_tasks}",
        f"NumCPUs={job.num_cpus}",
        f"CPUsPerTask={job.cpus_per_task}",
        f"MinCPUsNode={job.min_cpus_node}",
        memory,
        f"ReqNodeList={hostlist.compress(job.req_nodes)}",
        f"ReservationName={job.reservation or ''}",
    ]
    gpus = _gres(job.gpus_asked)
    if job.gpu_form in (GpuForm.PER_NODE, GpuForm.NONE):
        fields.append(f"TresPerNode={gpus}")
    elif job.gpu_form is not GpuForm.PER_TASK:
        name = "TresPerJob" if job.gpu_form is GpuForm.PER_JOB else "TresPerSocket"
        fields += ["TresPerNode=", f"{name}={gpus}"]
    return tuple(fields)


def same_request(one: JobFacts, other: JobFacts) -> bool:
    """Whether two records of a job ask for the same."""
    return all(getattr(one, name) == getattr(other, name) for name in _REQUEST)


def _gres(gpus: Mapping[str, int]) -> str:
    # The colon form: 22.05 takes gres/gpu:N, shows it, and ignores it.
    return ",".join(f"gres:gpu:{kind}:{n}" if kind else f"gres:gpu:{n}" for kind, n in gpus.items())


def _gpu_checks(job: JobFacts, gpus: Mapping[str, int]) -> list[tuple[str, object, object]]:
    if job.gpu_form is GpuForm.PER_TASK:
        return [("GPUs per node", sum(gpus.values()), sum(job.gpus_per_node.values()))]
    form = GpuForm.PER_NODE if gpus else GpuForm.NONE
    return [("GPUs", (form, dict(gpus)), (job.gpu_form, dict(job.gpus_asked)))]
