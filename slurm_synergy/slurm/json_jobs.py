"""Slurm's JSON to facts of jobs: data_parser of 23.02 and newer, and the older shape of 22.05.

JSON cannot be forged by users' texts, but costs the client seconds for a few thousand jobs, so it
is not what a round reads: it is asked for one job that text does not tell apart.

**Trust.** Without a controller that answers, 22.05 exits 0 with no rows and an entry in
``errors``; later releases can exit 0 with no rows and no errors at all, and only ``last_update``
being 0 tells. ``trusted_rows`` raises for both, so that "no answer" never reads as "no jobs".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from slurm_synergy.errors import SlurmCommandError, SlurmParseError
from slurm_synergy.slurm import hostlist
from slurm_synergy.slurm.facts import GpuForm, JobFacts, NodeAllocation, NodeFacts
from slurm_synergy.slurm.fields import parse_gpus, parse_gpus_with_ids
from slurm_synergy.slurm.states import hold_of, state_of

__all__ = ["parse_json_jobs", "trusted_rows"]

_FORMS = (
    (GpuForm.PER_NODE, "tres_per_node"),
    (GpuForm.PER_TASK, "tres_per_task"),
    (GpuForm.PER_JOB, "tres_per_job"),
    (GpuForm.PER_SOCKET, "tres_per_socket"),
)
_MINUTE_S = 60.0


def trusted_rows(text: str, key: str) -> list[Mapping[str, Any]]:
    """The list under ``key`` of a JSON answer, if Slurm really gave it.

    Raises ``SlurmParseError`` for text that is not such an answer, and ``SlurmCommandError`` when
    the answer carries errors or was made without hearing from slurmctld (``kind`` is then
    ``controller_down``).
    """
    argv = ("(JSON)", key)
    try:
        answer = json.loads(text)
    except ValueError as err:
        raise SlurmParseError(f"JSON {key}: {err}", text[-200:]) from None
    rows = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise SlurmParseError(f"JSON: no list of objects under {key!r}", text[:200])
    problems = answer.get("errors")
    if problems:
        said = "; ".join(_problem(entry) for entry in problems)
        raise SlurmCommandError(argv, 0, said, kind="controller_down")
    # The answer to a question for one job has no time at all (24.11); its row is proof enough.
    if not rows and "last_update" in answer and not _number(answer["last_update"]):
        # An unknown job id is answered in the very same way.
        said = "an answer of no time: slurmctld did not answer, or does not know what was asked for"
        raise SlurmCommandError(argv, 0, said, kind="controller_down")
    return rows


def _problem(entry: object) -> str:
    if isinstance(entry, dict):
        words = (entry.get(key) for key in ("description", "error", "source"))
        return ": ".join(str(word) for word in words if word)
    return str(entry)


def parse_json_jobs(
    text: str, nodes: Mapping[str, NodeFacts], wanted: int | None = None
) -> tuple[JobFacts, ...]:
    """``squeue --json`` or ``scontrol show job --json`` to facts, in order of the ids.

    ``nodes`` number the cores of what running jobs hold. ``wanted`` picks one job: some releases
    answer with all. Raises as ``trusted_rows``, and ``SlurmParseError`` for a row without what
    every release tells.
    """
    rows = trusted_rows(text, "jobs")
    found = [_job(row, nodes) for row in rows if wanted is None or row.get("job_id") == wanted]
    return tuple(sorted(found, key=lambda job: job.job_id))


def _job(row: Mapping[str, Any], nodes: Mapping[str, NodeFacts]) -> JobFacts:
    try:
        return _read_job(row, nodes)
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        raise SlurmParseError(f"JSON job {row.get('job_id')}: {err!r}", str(row)[:200]) from err


def _read_job(row: Mapping[str, Any], nodes: Mapping[str, NodeFacts]) -> JobFacts:
    job_id, words = int(row["job_id"]), row["job_state"]
    state, flags = state_of([words] if isinstance(words, str) else words)
    reason = "" if row["state_reason"] == "None" else str(row["state_reason"])
    priority = _number(row["priority"]) or 0
    least = _number(row["node_count"]) or 1
    tasks, cpus = _number(row["tasks"]) or least, _number(row["cpus"]) or 1
    form, gpus = _gpus_asked(row)
    array_id, het_id = _number(row["array_job_id"]) or None, _number(row["het_job_id"]) or None
    mem_cpu = _number(row["memory_per_cpu"])
    return JobFacts(
        job_id=job_id,
        user=str(row["user_name"]),
        uid=int(row["user_id"]),
        name=str(row["name"]),
        state=state,
        flags=flags,
        partition=str(row["partition"]),
        submit_s=_time_s(row["submit_time"]) or 0.0,
        reason=reason,
        array_job_id=array_id,
        array_task_id=_array_task(row) if array_id else None,
        array_limit=_number(row.get("array_max_tasks")) or None,
        het_job_id=het_id,
        het_offset=_number(row["het_job_offset"]) if het_id else None,
        eligible_s=_time_s(row["eligible_time"]),
        start_s=_time_s(row["start_time"]),
        end_s=_time_s(row["end_time"]),
        time_limit_s=_limit_s(row["time_limit"]),
        deadline_s=_time_s(row.get("deadline")),
        restarts=_number(row["restart_cnt"]) or 0,
        reservation=row.get("resv_name") or None,
        comment=str(row["comment"]),
        admin_comment=str(row["admin_comment"]),
        gpu_form=form,
        gpus_asked=gpus,
        num_nodes=(least, _number(row["max_nodes"]) or least),
        num_tasks=tasks,
        ntasks_per_node=_number(row["tasks_per_node"]) or None,
        # 22.05 leaves it out although -c was given.
        cpus_per_task=_number(row["cpus_per_task"]) or max(1, cpus // tasks),
        num_cpus=cpus,
        min_cpus_node=_number(row["minimum_cpus_per_node"]) or 1,
        min_mem_node_mib=None if mem_cpu else _number(row["memory_per_node"]) or 0,
        min_mem_cpu_mib=mem_cpu or None,
        held=hold_of(priority, reason),
        priority=priority,
        requeueable=bool(row["requeue"]),
        dependency=row.get("dependency") or None,
        req_nodes=hostlist.expand(row.get("required_nodes") or ""),
        node_list=hostlist.expand(row.get("nodes") or ""),
        features=row.get("features") or None,
        batch_host=row.get("batch_host") or None,
        batch=bool(row["batch_flag"]),
        account=row.get("account") or None,
        qos=row.get("qos") or None,
        work_dir=str(row.get("current_working_directory") or ""),
        command=str(row.get("command") or ""),
        std_out=str(row.get("stdout_expanded") or row.get("standard_output") or ""),
        exit_code=_exit_code(row["exit_code"]),
        allocation=_allocation(row, nodes),
    )


def _number(value: object) -> int | None:
    """A number in any of the shapes; None for "not set" and "no limit"."""
    if isinstance(value, dict):
        if value.get("infinite") or not value["set"]:
            return None
        value = value["number"]
    if value is None or isinstance(value, bool):
        return None
    if not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is not a number")
    return int(value)


def _time_s(value: object) -> float | None:
    number = _number(value)
    return float(number) if number else None


def _limit_s(value: object) -> float | None:
    minutes = _number(value)
    return None if minutes is None else minutes * _MINUTE_S


def _array_task(row: Mapping[str, Any]) -> str:
    task = _number(row["array_task_id"])
    return str(row["array_task_string"]) if task is None else str(task)


def _gpus_asked(row: Mapping[str, Any]) -> tuple[GpuForm, dict[str, int]]:
    for form, key in _FORMS:
        gpus = parse_gpus(str(row.get(key) or ""), key)
        if gpus:
            return form, gpus
    return GpuForm.NONE, {}


def _exit_code(value: object) -> tuple[int, int]:
    """(exit status, signal): a wait status on 22.05, an object later."""
    if isinstance(value, dict):
        status = _number(value.get("return_code")) or 0
        return status, _number(value.get("signal", {}).get("id")) or 0
    wait_status = _number(value) or 0
    return wait_status >> 8 & 0xFF, wait_status & 0x7F


def _allocation(
    row: Mapping[str, Any], nodes: Mapping[str, NodeFacts]
) -> tuple[NodeAllocation, ...]:
    resources = row.get("job_resources") or {}
    inner = resources.get("nodes")
    if isinstance(inner, dict):
        parts = [
            (part["name"], _later_cores(part), part["memory"]["allocated"])
            for part in inner["allocation"]
        ]
    else:
        parts = [
            (part["nodename"], _early_cores(part), part["memory_allocated"])
            for part in resources.get("allocated_nodes") or ()
        ]
    details = row.get("gres_detail") or ()
    return tuple(
        _on_node(node, cores, int(memory), nodes[node], details[i] if i < len(details) else "")
        for i, (node, cores, memory) in enumerate(parts)
    )


def _later_cores(part: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [
        (socket["index"], core["index"])
        for socket in part["sockets"]
        for core in socket["cores"]
        if "ALLOCATED" in core["status"]
    ]


def _early_cores(part: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [
        (int(socket), int(core))
        for socket, holds in part["sockets"].items()
        for core, state in holds["cores"].items()
        if state.startswith("allocated")  # or allocated_and_in_use
    ]


def _on_node(
    name: str, cores: list[tuple[int, int]], mem_mib: int, node: NodeFacts, detail: str
) -> NodeAllocation:
    gpus = parse_gpus_with_ids(detail, "gres_detail")
    types = [kind for kind, _, _ in gpus if kind]
    threads = node.threads_per_core
    numbers = (socket * node.cores_per_socket + core for socket, core in cores)
    return NodeAllocation(
        node=name,
        cpu_ids=tuple(sorted(n * threads + thread for n in numbers for thread in range(threads))),
        gpu_ids=tuple(sorted(index for _, _, ids in gpus for index in ids)),
        gpu_type=types[0] if types else None,
        mem_mib=mem_mib,
    )
