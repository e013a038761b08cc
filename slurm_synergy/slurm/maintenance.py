"""No job is started that would not end before somebody's reservation of its nodes begins. Pure.

Slurm does not start such a job either, it leaves it waiting. So nodes ahead of a reservation are
for jobs that end in time, by their time limits. A decision knows one set of nodes for all jobs;
where jobs that wait differ in what they may use, the nodes are therefore planned in turns: those
without a reservation ahead, and those with one, each with the jobs that may go there. In a turn the
other nodes are closed to new starts, and their running jobs stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_synergy.cluster import ObservedJob
from slurm_synergy.core.model import JobPhase, Node, Reason, ReasonCode
from slurm_synergy.core.resources import Resources
from slurm_synergy.slurm.facts import ReservationFacts

__all__ = ["Ahead", "MaintenanceGate", "ahead_of", "end_s", "why_not_before"]

_MINUTE_S = 60.0
# A start takes a moment, and Slurm compares when it starts the job.
_MARGIN_S = 60.0
_DWELL_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """The first reservation of others that takes a node away: when it begins, and its name."""

    start_s: float
    name: str


def ahead_of(others: Iterable[ReservationFacts], now_s: float) -> Mapping[str, Ahead]:
    """By node; a reservation that has begun takes its nodes at once, one that is over does not."""
    found: dict[str, Ahead] = {}
    for one in sorted(others, key=lambda other: (other.start_s or 0.0, other.name)):
        if one.end_s is None or one.end_s > now_s:
            for node in one.nodes:
                found.setdefault(node, Ahead(start_s=one.start_s or 0.0, name=one.name))
    return found


def end_s(now_s: float, limit_s: float | None, ran_s: float) -> float:
    """When a job started now has ended at the latest, with a margin; infinite without a limit.

    ``ran_s`` are the seconds that earlier runs have used up of the limit. Slurm knows whole
    minutes, one at least.
    """
    if limit_s is None:
        return math.inf
    return now_s + max(1, math.ceil((limit_s - ran_s) / _MINUTE_S)) * _MINUTE_S + _MARGIN_S


def why_not_before(ahead: Ahead, now_s: float) -> Reason:
    """The reason to wait of a job that would not end before ``ahead`` begins."""
    left_s = max(0.0, ahead.start_s - now_s)
    begins = f"begins in {left_s / _MINUTE_S:.0f} min" if left_s else "has begun"
    limit_min = int(max(0.0, left_s - _MARGIN_S) // _MINUTE_S)
    hint = f"; with --time={limit_min} or less it could start before" if limit_min else ""
    return Reason(
        code=ReasonCode.LIMITED,
        text=f"would not end before reservation {ahead.name!r} of its nodes, which {begins}{hint}",
    )


class MaintenanceGate:
    """Which nodes are open in this turn, and which waiting jobs are not planned in it.

    Remembers only whose turn it is.
    """

    def __init__(self) -> None:
        self._turn, self._since_s = math.inf, -math.inf

    def pass_through(
        self,
        jobs: Sequence[ObservedJob],
        nodes: Sequence[Node],
        ahead: Mapping[str, Ahead],
        free_gpus: Mapping[str, int],
        ends_s: Callable[[ObservedJob], float],
        now_s: float,
    ) -> tuple[tuple[ObservedJob, ...], tuple[Node, ...]]:
        """``jobs`` and ``nodes`` as they are to be planned now.

        ``free_gpus`` are the GPUs free on each node, ``ends_s`` says when a waiting job would end.
        """
        if not any(node.name in ahead for node in nodes):
            return tuple(jobs), tuple(nodes)
        waiting = {
            seen.job.job_id: (seen, ends_s(seen))
            for seen in jobs
            if seen.phase is JobPhase.PENDING and seen.blocked is None
        }
        zones = _zones(nodes, ahead, waiting.values())
        if set(zones) <= {math.inf}:
            return tuple(jobs), tuple(nodes)
        allowed = {
            before_s: {
                job_id
                for job_id, (seen, ends) in waiting.items()
                if ends <= before_s and any(_may_use(seen, node) for node in zone)
            }
            for before_s, zone in zones.items()
        }
        turn = self._choose(zones, allowed, waiting, free_gpus, now_s)
        open_nodes = {node.name for node in zones.get(turn, ())}
        planned = []
        for seen in jobs:
            job_id = seen.job.job_id
            if job_id in waiting and job_id not in allowed.get(turn, ()):
                others = any(job_id in some for some in allowed.values())
                reason = _in_turn() if others else _never(seen, nodes, ahead, now_s)
                planned.append(replace(seen, blocked=reason))
            else:
                planned.append(seen)
        closed = tuple(
            node if node.name in open_nodes else replace(node, capacity=Resources())
            for node in nodes
        )
        return tuple(planned), closed

    def _choose(
        self,
        zones: Mapping[float, Sequence[Node]],
        allowed: Mapping[float, set[int]],
        waiting: Mapping[int, tuple[ObservedJob, float]],
        free_gpus: Mapping[str, int],
        now_s: float,
    ) -> float:
        """The zone to plan now: this one still, unless a job may start at once in another."""
        order = sorted((zone for zone in zones if allowed[zone]), reverse=True)
        if not order:
            return math.inf
        if self._turn not in order:
            self._turn, self._since_s = order[0], now_s
        elif now_s - self._since_s >= _DWELL_S:
            at = order.index(self._turn)
            for zone in (*order[at + 1 :], *order[:at]):
                free = {node: free_gpus.get(node.name, 0) for node in zones[zone]}
                if any(_fits(waiting[job_id][0], free) for job_id in allowed[zone]):
                    self._turn, self._since_s = zone, now_s
                    break
        return self._turn


def _may_use(seen: ObservedJob, node: Node) -> bool:
    return not seen.job.gpu_types or node.gpu_type in seen.job.gpu_types


def _zones(
    nodes: Sequence[Node],
    ahead: Mapping[str, Ahead],
    waiting: Iterable[tuple[ObservedJob, float]],
) -> dict[float, list[Node]]:
    """Usable nodes by when their jobs must have ended; infinite where that hinders no job."""
    latest_s: dict[tuple[str, ...], float] = {}
    for seen, ends in waiting:
        types = seen.job.gpu_types
        latest_s[types] = max(ends, latest_s.get(types, 0.0))
    zones: dict[float, list[Node]] = {}
    for node in nodes:
        if node.capacity == Resources():
            continue
        before_s = ahead[node.name].start_s if node.name in ahead else math.inf
        hinders = any(
            ends > before_s and (not types or node.gpu_type in types)
            for types, ends in latest_s.items()
        )
        zones.setdefault(before_s if hinders else math.inf, []).append(node)
    return zones


def _fits(seen: ObservedJob, free: Mapping[Node, int]) -> bool:
    """Whether the job's GPUs are free on nodes that it may use, counted by GPUs alone."""
    job = seen.job
    usable = [gpus for node, gpus in free.items() if _may_use(seen, node)]
    if job.nodes is None:
        return sum(usable) >= job.gpus
    return sum(gpus >= job.gpus // job.nodes for gpus in usable) >= job.nodes


def _in_turn() -> Reason:
    return Reason(
        code=ReasonCode.LIMITED,
        text="would not end before a reservation of some nodes; the others are planned next",
    )


def _never(
    seen: ObservedJob, nodes: Sequence[Node], ahead: Mapping[str, Ahead], now_s: float
) -> Reason:
    """Why the job fits nowhere: the latest of the reservations ahead of nodes that it may use."""
    found = [
        ahead[node.name]
        for node in nodes
        if node.name in ahead and node.capacity != Resources() and _may_use(seen, node)
    ]
    if not found:
        return _in_turn()
    return why_not_before(max(found, key=lambda one: (one.start_s, one.name)), now_s)
