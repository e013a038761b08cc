"""What ``sdiag`` says of slurmctld's load. Text of every release from 22.05 on; pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_synergy.errors import SlurmParseError
from slurm_synergy.slurm.parse import whole

__all__ = ["DiagFacts", "RpcLoad", "parse_diag", "rpc_mean_s"]

_COUNTS = re.compile(r"^([A-Z][A-Za-z ]+):\s+(\d+)$", re.MULTILINE)
_RPC = re.compile(
    r"^\t(\w+) +\( *\d+\) count:(\d+) +ave_time:(\d+) +total_time:(\d+)", re.MULTILINE
)
_BY_TYPE = "Remote Procedure Call statistics by message type"
_BY_USER = "Remote Procedure Call statistics by user"
_SINCE = re.compile(r"^Data since .*\((\d+)\)$", re.MULTILINE)
_CYCLE = re.compile(r"^\tLast cycle: +(\d+)$", re.MULTILINE)
_MICRO = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcLoad:
    """RPCs of one type since the counters began: how many, and their time in seconds."""

    count: int
    total_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagFacts:
    """Load of slurmctld. Counters begin anew at ``since_s`` (midnight UTC, a restart, a reset)."""

    since_s: float
    server_threads: int
    agent_queue: int
    agents: int
    agent_threads: int
    dbd_queue: int
    last_cycle_s: float = 0.0
    rpcs: Mapping[str, RpcLoad] = field(default_factory=dict)


def parse_diag(text: str) -> DiagFacts:
    """``sdiag`` to facts. Raises ``SlurmParseError`` for an answer without the common parts."""
    head, found, rest = whole(text, "sdiag").partition(_BY_TYPE)
    since = _SINCE.search(head)
    if not found or since is None:
        raise SlurmParseError("sdiag: no times or no statistics by message type", text)
    counts = {name: int(number) for name, number in _COUNTS.findall(head)}
    cycle = _CYCLE.search(head)

    def count(name: str) -> int:
        if name not in counts:
            raise SlurmParseError(f"sdiag: no {name!r}", head)
        return counts[name]

    return DiagFacts(
        since_s=float(since[1]),
        server_threads=count("Server thread count"),
        agent_queue=count("Agent queue size"),
        agents=count("Agent count"),
        agent_threads=count("Agent thread count"),
        dbd_queue=counts.get("DBD Agent queue size", 0),
        last_cycle_s=int(cycle[1]) * _MICRO if cycle else 0.0,
        rpcs={
            name: RpcLoad(count=int(number), total_s=int(total) * _MICRO)
            for name, number, _, total in _RPC.findall(rest.partition(_BY_USER)[0])
        },
    )


def rpc_mean_s(now: DiagFacts, before: DiagFacts | None) -> tuple[float, int]:
    """Mean time that slurmctld spent on one RPC since ``before``, in seconds, and their number.

    The mean of all that was counted when ``before`` is None or the counters began anew.
    """
    if before is not None and before.since_s != now.since_s:
        before = None
    earlier = before.rpcs if before else {}
    none = RpcLoad(count=0, total_s=0.0)
    count = sum(load.count - earlier.get(name, none).count for name, load in now.rpcs.items())
    total_s = sum(load.total_s - earlier.get(name, none).total_s for name, load in now.rpcs.items())
    return (max(0.0, total_s) / count, count) if count > 0 else (0.0, 0)
