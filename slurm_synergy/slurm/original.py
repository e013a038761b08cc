"""What makes a job of ours an ordinary one again: the fields of the update, and what differs. Pure.

The recipe is that of a start (see ``reshape``), with the owner's request in place of a plan, no
node named, and no reservation. Measured on 22.05: a running job may be taken out of a reservation
and released as well; the reservation can be deleted afterwards.
"""

from __future__ import annotations

import math

from slurm_synergy.slurm.facts import ConfigFacts, GpuForm, JobFacts, PartitionFacts
from slurm_synergy.slurm.fields import int_or
from slurm_synergy.slurm.request import Request
from slurm_synergy.slurm.runtime import MINUTE_S, limit_in_record

__all__ = ["WHOLE_MEMORY", "default_memory", "fields_to_give_back", "is_reshaped"]

WHOLE_MEMORY = "MinMemoryNode=0"
"""What a job asks for that names no memory, where the site has no default: all of its nodes."""


def default_memory(partition: PartitionFacts, config: ConfigFacts) -> str:
    """The field that gives a pending job the memory of one that names none."""
    raw = config.raw
    for name, mib in (
        ("MinMemoryCPU", partition.def_mem_per_cpu_mib),
        ("MinMemoryNode", partition.def_mem_per_node_mib),
        ("MinMemoryCPU", int_or(raw.get("DefMemPerCPU", ""), 0)),
        ("MinMemoryNode", int_or(raw.get("DefMemPerNode", ""), 0)),
    ):
        if mib:
            return f"{name}={mib}"
    return WHOLE_MEMORY


def is_reshaped(job: JobFacts, reservation: str) -> bool:
    """Whether a start of ours has changed the pending job's record (it names nodes then)."""
    return bool(job.req_nodes) or (bool(reservation) and job.reservation == reservation)


def fields_to_give_back(
    job: JobFacts, request: Request | None, reservation: str, memory: str = WHOLE_MEMORY
) -> list[str]:
    """The fields of the one update that gives the job back; none when there is nothing to change.

    ``request`` is what its owner asked for (None: not known, then only node list and reservation
    are taken back), ``reservation`` the name of ours, ``memory`` the field for a job that asked
    for no memory.
    """
    ours = bool(reservation) and job.reservation == reservation
    if not job.pending:
        return ["ReservationName="] if ours else []
    if not is_reshaped(job, reservation):
        return []
    fields = ["ReqNodeList=", *(["ReservationName="] if ours else [])]
    if request is None:
        return fields
    unsaid = request.gpus_per_node if request.elastic else 1
    tasks, cpus = request.tasks_per_node or unsaid, max(1, request.cpus_per_task)
    nodes = request.nodes
    fields += [
        f"NumNodes={nodes}-{nodes}",
        f"NumTasks={nodes * tasks}",
        f"NumCPUs={nodes * tasks * cpus}",
        f"CPUsPerTask={cpus}",
        f"MinCPUsNode={tasks * cpus}",
        f"MinMemoryNode={request.mem_mib_per_node}" if request.mem_mib_per_node else memory,
    ]
    if request.time_limit_s and request.time_limit_s != limit_in_record(job.time_limit_s):
        # A restart of ours had left it with what was left of its limit.
        fields.append(f"TimeLimit={math.ceil(request.time_limit_s / MINUTE_S)}")
    if job.gpu_form is GpuForm.PER_NODE and request.gpu_type in ("", *job.gpus_asked):
        # The type is left as it is where it was changed: 22.05 cannot take one back.
        kind = request.gpu_type or next(iter(job.gpus_asked), "")
        typed = f"{kind}:" if kind else ""
        fields.append(f"TresPerNode=gres:gpu:{typed}{request.gpus_per_node}")
    return fields
