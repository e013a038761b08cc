"""What ``synergyctl top`` shows, as rows of text: from the answers of status and jobs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_synergy.cli.holdings import holdings
from slurm_synergy.core.wording import clipped, duration, gib, percent

__all__ = ["NODE_COLUMNS", "QUEUE_COLUMNS", "RUN_COLUMNS", "Screen", "screen_of"]

NODE_COLUMNS = ("NODE", "TYPE", "GPUS BY JOB", "CORES BY JOB", "CORES FREE", "GIB FREE")
RUN_COLUMNS = (
    *("JOBID", "USER", "NAME", "PHASE", "GPUS", "CORES", "SHARE", "GIB", "SAMPLES/S"),
    *("STALL", "NOTE"),
)
QUEUE_COLUMNS = ("JOBID", "USER", "NAME", "GPUS", "RESTARTS", "WAITS BECAUSE")

_WAITS = "pending"


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """One picture of the cluster: a headline and three tables' rows."""

    headline: str
    nodes: tuple[tuple[str, ...], ...]
    running: tuple[tuple[str, ...], ...]
    queue: tuple[tuple[str, ...], ...]


def screen_of(status: Mapping[str, Any], jobs: Sequence[Mapping[str, Any]]) -> Screen:
    """The picture of these answers."""
    nodes = {node["node"]: node for node in status["nodes"]}
    unplanned = _without_reason(status)
    placed = [{**job, "lease": held} for job in jobs if (held := holdings(job)) is not None]
    return Screen(
        headline=_headline(status),
        nodes=tuple(_node(node, placed) for node in nodes.values()),
        running=tuple(_running(job, nodes) for job in placed),
        queue=tuple(
            _waiting(job, unplanned)
            for job in jobs
            if holdings(job) is None and job["phase"] == _WAITS
        ),
    )


def _headline(status: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{count} {phase}" for phase, count in status["jobs"].items() if count)
    when = "no round yet"
    if status["round"] is not None:
        when = f"round {status['round']} {duration(status['round_age_s'])} ago"
    parts = [
        f"{status['controller']}: {status['policy']}, {status['mechanism']}",
        when,
        counts or "no jobs",
    ]
    if status["draining"]:
        parts.append("DRAINING")
    if status["trouble"]:
        parts.append(f"TROUBLE: {status['trouble']}")
    return "; ".join(parts)


def _shares(job: Mapping[str, Any], node: str) -> Mapping[str, Any] | None:
    return next((one for one in job["lease"]["nodes"] if one["node"] == node), None)


def _node(node: Mapping[str, Any], placed: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    gpus: list[str] = []
    cores: list[str] = []
    for job in placed:
        share = _shares(job, node["node"])
        if share is not None:
            gpus += [str(job["job_id"])] * share["gpus"]
            cores.append(f"{job['job_id']}:{share['cpus']}")
    gpus += ["."] * (node["gpus"] - len(gpus))
    name = node["node"] if node["usable"] else f"{node['node']} (not usable)"
    return (
        name,
        node["gpu_type"],
        " ".join(gpus),
        " ".join(cores) or "-",
        f"{node['cpus'] - node['cpus_used']}/{node['cpus']}",
        f"{gib(node['mem_mib'] - node['mem_mib_used'])}/{gib(node['mem_mib'])}",
    )


def _running(job: Mapping[str, Any], nodes: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    lease = job["lease"]
    parts, progress = lease["nodes"], lease["progress"]
    fair = sum(
        nodes[part["node"]]["cpus"] * part["gpus"] // nodes[part["node"]]["gpus"]
        for part in parts
        if part["node"] in nodes
    )
    rate = progress["samples_per_s"]
    notes = [lease["stop"]["text"] if lease["stop"] else "", job.get("note") or ""]
    return (
        job.get("array") or str(job["job_id"]),
        job["user"],
        clipped(job["name"] or "-"),
        job["phase"],
        str(job["gpus"]),
        str(sum(part["cpus"] for part in parts)),
        str(fair),
        gib(sum(part["mem_mib"] for part in parts)),
        f"{rate:.0f}" if rate else "-",
        percent(progress.get("data_stall")),
        "; ".join(note for note in notes if note) or "-",
    )


def _without_reason(status: Mapping[str, Any]) -> str:
    """What is said of a job that waits and for which nothing is in the way."""
    if status["dry_run"] or status.get("mode", "act") != "act":
        word = "dry run" if status["dry_run"] else f"mode {status['mode']}"
        return f"{word}: Slurm alone starts it"
    return "the next round plans it"


def _waiting(job: Mapping[str, Any], unplanned: str) -> tuple[str, ...]:
    reason = job["reason"]
    return (
        job.get("array") or str(job["job_id"]),
        job["user"],
        clipped(job["name"] or "-"),
        str(job["gpus"]),
        str(job["restarts"]),
        reason["text"] if reason else unplanned,
    )
