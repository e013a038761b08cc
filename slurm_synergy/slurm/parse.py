"""Slurm's text to facts of nodes, partitions, reservations, configuration and ping.

Pure functions, tolerant of the releases from 22.05 on: keys that are new are passed over, states
and flags that are new are kept as they are. An answer that is neither records nor Slurm's own "No
... in the system", and one that ends within a line, is an error. Jobs: ``parse_jobs``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from slurm_synergy.errors import SlurmParseError
from slurm_synergy.slurm import hostlist
from slurm_synergy.slurm.facts import (
    ConfigFacts,
    NodeFacts,
    PartitionFacts,
    PingFacts,
    ReservationFacts,
)
from slurm_synergy.slurm.fields import (
    as_null,
    int_or,
    parse_duration_s,
    parse_gpus,
    parse_int,
    parse_time_s,
    parse_words,
    required,
    scan_keys,
)

__all__ = [
    "NodeTexts",
    "parse_config",
    "parse_nodes",
    "parse_partitions",
    "parse_ping",
    "parse_reservations",
    "whole",
]

# What changes all the time, and is no part of the facts.
_MEASURED = re.compile(r" (?:CPULoad|FreeMem|LastBusyTime|CurrentWatts|AveWatts|ExtSensors\w+)=\S*")
_NODE_MARKS = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "!": "POWERING_DOWN",
    "-": "PLANNED",
}


def whole(text: str, what: str) -> str:
    """``text`` if it ends with a line break, as every answer of Slurm does that was not cut off."""
    if text and not text.endswith("\n"):
        raise SlurmParseError(f"{what}: the answer ends within a line, it was cut off", text[-200:])
    return text


def _lines(text: str, first_key: str, empty: str) -> list[str]:
    """One text per record; a line that does not begin one belongs to the record before it."""
    if whole(text, f"scontrol ({first_key})").startswith(empty):
        return []
    records: list[str] = []
    for line in text.splitlines():
        if line.startswith(f"{first_key}="):
            records.append(line)
        elif records:
            records[-1] += f"\n{line}"
        elif line.strip():
            raise SlurmParseError(f"scontrol: expected {first_key}=", line)
    if not records:
        raise SlurmParseError(f"scontrol: neither {first_key}= records nor {empty!r}", text)
    return records


class NodeTexts:
    """The node records of the last reading: most are the same in the next one.

    Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._known: dict[str, NodeFacts] = {}

    def facts(self, lines: Iterable[str]) -> tuple[NodeFacts, ...]:
        """The facts of each record."""
        before, known, found = self._known, dict[str, NodeFacts](), []
        for line in lines:
            told, reason_key, reason = line.partition(" Reason=")
            still = f"{_MEASURED.sub('', told)}{reason_key}{reason}"
            known[still] = before.get(still) or _node(line)
            found.append(known[still])
        self._known = known
        return tuple(found)


def parse_nodes(text: str, memory: NodeTexts | None = None) -> tuple[NodeFacts, ...]:
    """``scontrol -a -d show node -o`` to facts; those in ``memory`` are not made anew."""
    return (memory or NodeTexts()).facts(_lines(text, "NodeName", "No nodes in the system"))


def _node(line: str) -> NodeFacts:
    before, _, reason = line.partition(" Reason=")
    keys = scan_keys(before)
    name = keys.get("NodeName", "?")
    record = f"node {name}"

    def number(key: str) -> int:
        return parse_int(required(keys, key, record), f"{record} {key}")

    state, flags = _node_state(required(keys, "State", record))
    port = keys.get("Port", "")
    told = re.match(
        r"(.*?)(?: \[[^\]\n]*@[^\]\n]*\])?(?: ReservationName=(\S+))?\s*\Z",
        reason,
        re.DOTALL,
    )
    reservation = keys.get("ReservationName") or (told[2] if told else None)
    return NodeFacts(
        name=name,
        state=state,
        flags=flags,
        real_memory_mib=number("RealMemory"),
        alloc_mem_mib=number("AllocMem"),
        cpus_total=number("CPUTot"),
        cpus_alloc=number("CPUAlloc"),
        sockets=number("Sockets"),
        cores_per_socket=number("CoresPerSocket"),
        threads_per_core=number("ThreadsPerCore"),
        gpus=parse_gpus(keys.get("Gres", ""), f"{record} Gres"),
        gpus_used=parse_gpus(keys.get("GresUsed", ""), f"{record} GresUsed"),
        partitions=parse_words(keys.get("Partitions", "")),
        features=parse_words(keys.get("ActiveFeatures", "")),
        reason=told[1].strip() if told else "",
        reservation=as_null(reservation or ""),
        address=keys.get("NodeAddr", ""),
        hostname=keys.get("NodeHostName", ""),
        port=int(port) if port.isdigit() else None,
        boot_s=parse_time_s(keys.get("BootTime", ""), f"{record} BootTime"),
        slurmd_start_s=parse_time_s(keys.get("SlurmdStartTime", ""), f"{record} SlurmdStartTime"),
        registered=keys.get("SlurmdStartTime") not in ("None", "Unknown", "N/A"),
    )


def _node_state(text: str) -> tuple[str, frozenset[str]]:
    base, *flags = text.split("+")
    found = set(flags)
    while base and base[-1] in _NODE_MARKS:
        found.add(_NODE_MARKS[base[-1]])
        base = base[:-1]
    return base, frozenset(found)


def parse_partitions(text: str) -> tuple[PartitionFacts, ...]:
    """``scontrol -a show partition -o`` to facts."""
    lines = _lines(text, "PartitionName", "No partitions in the system")
    return tuple(_partition(line) for line in lines)


def _partition(line: str) -> PartitionFacts:
    keys = scan_keys(line)
    name = keys.get("PartitionName", "?")
    record = f"partition {name}"
    over, _, times = required(keys, "OverSubscribe", record).partition(":")
    return PartitionFacts(
        name=name,
        nodes=hostlist.expand(required(keys, "Nodes", record)),
        state=required(keys, "State", record),
        oversubscribe=(over, int(times) if times.isdigit() else 1),
        default=keys.get("Default") == "YES",
        hidden=keys.get("Hidden") == "YES",
        max_time_s=parse_duration_s(keys.get("MaxTime", ""), f"{record} MaxTime"),
        default_time_s=parse_duration_s(keys.get("DefaultTime", ""), f"{record} DefaultTime"),
        max_nodes=int_or(keys.get("MaxNodes", ""), 0) or None,
        total_cpus=int_or(keys.get("TotalCPUs", ""), 0),
        def_mem_per_node_mib=int_or(keys.get("DefMemPerNode", ""), 0) or None,
        def_mem_per_cpu_mib=int_or(keys.get("DefMemPerCPU", ""), 0) or None,
        allow_accounts=_unless_all(keys.get("AllowAccounts", "ALL").lower()),
        deny_accounts=parse_words(keys.get("DenyAccounts", "").lower()),
        allow_groups=_unless_all(keys.get("AllowGroups", "ALL")),
    )


def _unless_all(text: str) -> tuple[str, ...] | None:
    return None if text.upper() == "ALL" else parse_words(text)


def parse_reservations(text: str) -> tuple[ReservationFacts, ...]:
    """``scontrol show reservation -o`` to facts."""
    lines = _lines(text, "ReservationName", "No reservations in the system")
    return tuple(_reservation(line) for line in lines)


def _reservation(line: str) -> ReservationFacts:
    keys = scan_keys(line)
    name = keys.get("ReservationName", "?")
    record = f"reservation {name}"
    return ReservationFacts(
        name=name,
        nodes=hostlist.expand(required(keys, "Nodes", record)),
        start_s=parse_time_s(required(keys, "StartTime", record), f"{record} StartTime"),
        end_s=parse_time_s(required(keys, "EndTime", record), f"{record} EndTime"),
        users=parse_words(keys.get("Users", "")),
        accounts=parse_words(keys.get("Accounts", "")),
        flags=frozenset(parse_words(keys.get("Flags", ""))),
        state=required(keys, "State", record),
    )


def parse_config(text: str) -> ConfigFacts:
    """``scontrol show config`` to facts."""
    raw: dict[str, str] = {}
    for line in text.splitlines():
        key, found, value = line.partition("=")
        if found and re.fullmatch(r"\w+\s*", key):
            raw.setdefault(key.strip(), value.strip())
    record = "scontrol show config"
    version = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", required(raw, "SLURM_VERSION", record))
    if version is None:
        raise SlurmParseError("SLURM_VERSION: not a version", raw["SLURM_VERSION"])
    kill_wait = required(raw, "KillWait", record)
    # 22.05 prints task/none where later releases print (null).
    plugins = parse_words(required(raw, "TaskPlugin", record))
    return ConfigFacts(
        version=tuple(int(part) for part in version.groups() if part),
        cluster_name=required(raw, "ClusterName", record),
        select_type=required(raw, "SelectType", record),
        select_parameters=parse_words(raw.get("SelectTypeParameters", "")),
        task_plugins=tuple(word for word in plugins if word != "task/none"),
        proctrack=raw.get("ProctrackType", ""),
        kill_wait_s=parse_duration_s(kill_wait, "KillWait") or 0.0,
        slurm_user=required(raw, "SlurmUser", record).partition("(")[0],
        job_requeue=raw.get("JobRequeue", "1") != "0",
        raw=raw,
    )


def parse_ping(text: str) -> PingFacts:
    """``scontrol ping`` to the names of controllers that are up and down."""
    found = re.findall(r"^Slurmctld\((?:[^)]*)\) at (\S+) (?:is|are) (UP|DOWN)", text, re.MULTILINE)
    if not found:
        raise SlurmParseError("scontrol ping: no controller named", text)
    return PingFacts(
        up=tuple(host for host, state in found if state == "UP"),
        down=tuple(host for host, state in found if state == "DOWN"),
    )
