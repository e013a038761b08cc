"""Jobs as pyslurm shows them to facts. Pure; knows pyslurm's attributes, and imports nothing of it.

What pyslurm 25.11 does not tell (seen in its answers beside those of the commands):

* GPUs of ``--gpus`` and ``--gpus-per-socket``: the job looks like one without GPUs. So the GPUs of
  a job that shows none are taken from the command line's word.
* GPUs that are allocated on nodes: ``allocated_gres`` is empty. Nodes are read by command.
* the threads of a node's cores: the "CPU ids" of a job are its cores. ``with_threads`` makes CPU
  ids of them.
* a set of CPU ids longer than its buffer: such a job raises ``CutOff`` and is read by command.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from slurm_synergy.errors import SlurmParseError
from slurm_synergy.slurm import hostlist
from slurm_synergy.slurm.facts import GpuForm, JobFacts, JobState, NodeAllocation
from slurm_synergy.slurm.fields import parse_gpus, parse_id_set
from slurm_synergy.slurm.pyslurm_worker import SHOWN
from slurm_synergy.slurm.states import hold_of, state_of

__all__ = ["CutOff", "Gpus", "job_facts", "with_gpus", "with_threads"]

_MINUTE_S = 60.0
_BUFFER = 127

Gpus = tuple[GpuForm, Mapping[str, int]]
"""A GPU request: the form it was asked in, and the counts by type."""


class CutOff(Exception):
    """The set of a job's CPU ids does not fit into pyslurm's buffer."""


def with_gpus(job: JobFacts, given: Gpus) -> JobFacts:
    """The job with the GPU request that the command line tells."""
    return dataclasses.replace(job, gpu_form=given[0], gpus_asked=given[1])


def with_threads(job: JobFacts, threads: Mapping[str, int]) -> JobFacts:
    """The job with CPU ids, as Slurm numbers them; ``threads`` are those of each core, by node."""
    if all(threads.get(part.node, 1) == 1 for part in job.allocation):
        return job
    return dataclasses.replace(
        job,
        allocation=tuple(
            dataclasses.replace(
                part,
                cpu_ids=tuple(
                    core * count + thread for core in part.cpu_ids for thread in range(count)
                ),
            )
            for part in job.allocation
            for count in (threads.get(part.node, 1),)
        ),
    )


def _gpus(job: Any) -> Gpus:
    """The GPU request of a job as far as pyslurm shows it; ``GpuForm.NONE`` may be wrong."""
    per_node = _counted(job.gres_per_node or {})
    if per_node:
        return GpuForm.PER_NODE, per_node
    per_task = _counted(job.gres_per_task or {})
    return (GpuForm.PER_TASK, per_task) if per_task else (GpuForm.NONE, {})


def _counted(gres: Mapping[str, Any]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for name, count in gres.items():
        for kind, number in parse_gpus(f"{name}:{count}", "gres").items():
            totals[kind] = totals.get(kind, 0) + number
    return totals


def job_facts(shown: list[Any]) -> JobFacts:
    """Facts of what ``pyslurm_worker`` tells of a job.

    Raises ``CutOff`` (read that job by command), and ``SlurmParseError`` for what it does not
    understand.
    """
    job = SimpleNamespace(**dict(zip(SHOWN, shown, strict=True)))
    try:
        return _facts(job, _gpus(job))
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        raise SlurmParseError(f"pyslurm: {err!r}", str(shown)) from err


def _facts(job: Any, gpus: Gpus) -> JobFacts:
    state, flags = state_of(job.state.split("+"))
    reason = "" if job.state_reason in (None, "None") else job.state_reason.replace(" ", "_")
    priority, least = int(job.priority or 0), int(job.num_nodes or 1)
    array_id, het_id = job.array_id, job.heterogeneous_id
    mem_cpu, unlimited = job.memory_per_cpu, job.time_limit is None
    return JobFacts(
        job_id=int(job.id),
        user=job.user_name,
        uid=int(job.user_id),
        name=job.name or "",
        state=state,
        flags=flags,
        partition=job.partition,
        submit_s=float(job.submit_time or 0),
        reason=reason,
        array_job_id=array_id,
        array_task_id=_array_task(job) if array_id else None,
        array_limit=job.array_tasks_parallel or None if array_id else None,
        het_job_id=het_id,
        het_offset=int(job.heterogeneous_offset or 0) if het_id else None,
        eligible_s=_time_s(job.eligible_time),
        start_s=_time_s(job.start_time),
        # Of a job without a limit Slurm keeps an end a year or more ahead, which it does not show.
        end_s=None if unlimited and state is JobState.RUNNING else _time_s(job.end_time),
        time_limit_s=job.time_limit * _MINUTE_S if isinstance(job.time_limit, int) else None,
        deadline_s=_time_s(job.deadline),
        restarts=int(job.requeue_count or 0),
        reservation=job.reservation or None,
        comment=job.comment or "",
        admin_comment=job.admin_comment or "",
        gpu_form=gpus[0],
        gpus_asked=gpus[1],
        num_nodes=(least, int(job.max_nodes or least)),
        num_tasks=int(job.ntasks or least),
        ntasks_per_node=job.ntasks_per_node or None,
        cpus_per_task=int(job.cpus_per_task or 1),
        num_cpus=int(job.cpus or 1),
        min_cpus_node=int(job.min_cpus_per_node or 1),
        min_mem_node_mib=None if mem_cpu else int(job.memory_per_node or 0),
        min_mem_cpu_mib=mem_cpu or None,
        held=hold_of(priority, reason),
        priority=priority,
        requeueable=bool(job.is_requeueable),
        dependency=_dependency(job.dependencies),
        req_nodes=hostlist.expand(job.required_nodes or ""),
        node_list=hostlist.expand(job.allocated_nodes or ""),
        features=",".join(job.constraints or ()) or None,
        batch_host=job.batch_host or None,
        batch=bool(job.is_batch_job),
        account=job.account or None,
        qos=job.qos or None,
        work_dir=job.working_directory or "",
        command=job.command or "",
        std_out=job.standard_output or "",
        exit_code=(int(job.exit_code or 0), int(job.exit_code_signal or 0)),
        allocation=_allocation(job),
    )


def _time_s(value: Any) -> float | None:
    return float(value) if value else None


def _array_task(job: Any) -> str:
    if job.array_tasks_waiting:
        limit = f"%{job.array_tasks_parallel}" if job.array_tasks_parallel else ""
        return f"{job.array_tasks_waiting}{limit}"
    # pyslurm has no zero: the task of that number reads as None.
    return str(job.array_task_id or 0)


def _dependency(told: Any) -> str | None:
    """pyslurm's dictionary as Slurm writes it: ``afterok:7(unfulfilled)``."""
    if not told:
        return None
    parts = [
        f"{kind}:{':'.join(str(job) for job in jobs)}"
        for kind, jobs in told.items()
        if isinstance(jobs, (list, tuple)) and jobs
    ]
    if told.get("singleton"):
        parts.append("singleton")
    if not parts:
        # pyslurm knows the word alone; Slurm writes singleton(unfulfilled).
        parts.append("singleton(unfulfilled)")
    return ("," if told.get("satisfy") == "all" else "?").join(parts)


def _allocation(job: Any) -> tuple[NodeAllocation, ...]:
    parts = []
    for node, holds in (job.layout or {}).items():
        if len(holds["cpu_ids"]) >= _BUFFER:
            raise CutOff(f"job {job.id}")
        gpus = [
            (name.partition(":")[2], str(detail["indexes"]))
            for name, detail in (holds["gres"] or {}).items()
            if name.partition(":")[0] == "gpu" and isinstance(detail, Mapping)
        ]
        types = [kind for kind, _ in gpus if kind]
        ids = [index for _, text in gpus for index in parse_id_set(text, "gres indexes")]
        parts.append(
            NodeAllocation(
                node=node,
                cpu_ids=parse_id_set(holds["cpu_ids"], "cpu_ids"),
                gpu_ids=tuple(sorted(ids)),
                gpu_type=types[0] if types else None,
                mem_mib=int(holds["memory"] or 0),
            )
        )
    return tuple(parts)
