"""One record of ``scontrol -d show job -o``, already told apart from user text, to facts. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_synergy.slurm import hostlist
from slurm_synergy.slurm.facts import JobFacts, NodeAllocation
from slurm_synergy.slurm.fields import (
    as_null,
    int_or,
    parse_count_range,
    parse_duration_s,
    parse_gpus_with_ids,
    parse_id_set,
    parse_int,
    parse_mib,
    parse_time_s,
    required,
    scan_keys,
)
from slurm_synergy.slurm.job_identities import JobIdentity
from slurm_synergy.slurm.states import hold_of, state_of

__all__ = ["RecordText", "facts_of"]

_ALLOCATION = re.compile(r" Nodes=(\S+) CPU_IDs=(\S*) Mem=(\d+)(?: GRES=(\S*))?")
_TAIL_KEYS = re.compile(
    r"(?:\s+(?:Power|CpusPerTres|MemPerTres|NtasksPerTRES\S*|Tres\w+|KillO\w+|Mail\w+|SELinux\w*"
    r"|BurstBuffer\w*|OOM\w+|StepMgr\w*|CronJob|Switches|NodeList\w*|TimeMin)=\S*)*\s*\Z"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordText:
    """One record: the part before the name, who owns it, and the text behind the account.

    ``text`` is what all of it follows from; empty when another record may begin within it.
    """

    head: str
    owner: Mapping[str, str]
    rest: str
    text: str


def facts_of(body: RecordText, identity: JobIdentity) -> JobFacts:
    """The facts of a job from its record. Raises SlurmParseError."""
    rest = body.rest
    wckey = f" WCKey={identity.wckey} JobState="
    if wckey in rest:
        rest = rest.replace(wckey, " JobState=", 1)
    header, _, tail = rest.partition(" Command=")
    keys = scan_keys(header) | {f"{key}": value for key, value in scan_keys(body.head).items()}
    record = f"job {identity.job_id}"

    def word(key: str) -> str:
        return required(keys, key, record)

    state, flags = state_of(re.split(r"[+,]", word("JobState")))
    priority = int(body.owner["priority"])
    least, most = parse_count_range(word("NumNodes"), f"{record} NumNodes")
    num_tasks = keys.get("NumTasks", "")
    mem_node, mem_cpu = keys.get("MinMemoryNode"), keys.get("MinMemoryCPU")
    per_node = re.match(r"\d+", keys.get("NtasksPerN:B:S:C", ""))
    submit_s = parse_time_s(word("SubmitTime"), f"{record} SubmitTime")
    return JobFacts(
        job_id=identity.job_id,
        user=body.owner["user"],
        uid=identity.uid,
        name=identity.name,
        state=state,
        flags=flags,
        partition=word("Partition"),
        submit_s=submit_s or 0.0,
        reason=as_null(word("Reason")) or "",
        array_job_id=int(keys["ArrayJobId"]) if "ArrayJobId" in keys else None,
        array_task_id=keys.get("ArrayTaskId"),
        array_limit=int_or(keys.get("ArrayTaskThrottle", ""), 0) or None,
        het_job_id=int(keys["HetJobId"]) if "HetJobId" in keys else None,
        het_offset=int(keys["HetJobOffset"]) if "HetJobOffset" in keys else None,
        eligible_s=parse_time_s(word("EligibleTime"), f"{record} EligibleTime"),
        start_s=parse_time_s(word("StartTime"), f"{record} StartTime"),
        end_s=parse_time_s(word("EndTime"), f"{record} EndTime"),
        time_limit_s=parse_duration_s(word("TimeLimit"), f"{record} TimeLimit"),
        deadline_s=parse_time_s(keys.get("Deadline", ""), f"{record} Deadline"),
        restarts=parse_int(word("Restarts"), f"{record} Restarts"),
        reservation=as_null(keys.get("Reservation", "")),
        comment=identity.comment,
        admin_comment=identity.admin_comment,
        gpu_form=identity.gpu_form,
        gpus_asked=identity.gpus_asked,
        num_nodes=(least, most),
        num_tasks=int(num_tasks) if num_tasks.isdigit() else least,
        ntasks_per_node=int(per_node[0]) or None if per_node else None,
        cpus_per_task=int_or(keys.get("CPUs/Task", ""), 1),
        num_cpus=parse_count_range(word("NumCPUs"), f"{record} NumCPUs")[0],
        min_cpus_node=int_or(keys.get("MinCPUsNode", ""), 1),
        min_mem_node_mib=None if mem_node is None else parse_mib(mem_node, "MinMemoryNode"),
        min_mem_cpu_mib=None if mem_cpu is None else parse_mib(mem_cpu, "MinMemoryCPU"),
        held=hold_of(priority, word("Reason")),
        priority=priority,
        requeueable=word("Requeue") == "1",
        dependency=as_null(keys.get("Dependency", "")),
        req_nodes=hostlist.expand(keys.get("ReqNodeList", "")),
        node_list=hostlist.expand(keys.get("NodeList", "")),
        features=as_null(keys.get("Features", "")),
        batch_host=as_null(keys.get("BatchHost", "")),
        batch=keys.get("BatchFlag", "1") != "0",
        account=as_null(identity.account),
        qos=as_null(keys.get("QOS", "")),
        work_dir=identity.work_dir,
        command=identity.command,
        std_out=_std_out(tail),
        exit_code=_exit_code(word("ExitCode"), record),
        allocation=_allocation(header, record),
    )


def _exit_code(text: str, record: str) -> tuple[int, int]:
    status, _, signal = text.partition(":")
    return parse_int(status, f"{record} ExitCode"), parse_int(signal or "0", f"{record} ExitCode")


def _std_out(tail: str) -> str:
    _, found, text = tail.rpartition(" StdOut=")
    return _TAIL_KEYS.sub("", text) if found else ""


def _allocation(header: str, record: str) -> tuple[NodeAllocation, ...]:
    allocation = []
    for nodes, cpus, mem, gres in _ALLOCATION.findall(header):
        gpus = parse_gpus_with_ids(gres, f"{record} GRES")
        types = [kind for kind, _, _ in gpus if kind]
        for node in hostlist.expand(nodes):
            allocation.append(
                NodeAllocation(
                    node=node,
                    cpu_ids=parse_id_set(cpus, f"{record} CPU_IDs"),
                    gpu_ids=tuple(sorted(index for _, _, ids in gpus for index in ids)),
                    gpu_type=types[0] if types else None,
                    mem_mib=int(mem),
                )
            )
    return tuple(allocation)
