"""When a round is due: periodically, and soon after something happened that may change the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_synergy.cluster import Observation
from slurm_synergy.core.model import JobPhase
from slurm_synergy.core.resources import Resources

__all__ = ["RoundTimer", "news"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    pending: Mapping[int, bool]
    blocked: frozenset[int]
    nodes: Mapping[str, tuple[Resources, bool]]
    free: Mapping[str, Resources]
    draining: bool


def _see(observation: Observation, draining: bool) -> _Seen:
    return _Seen(
        pending={one.job.job_id: one.phase is JobPhase.PENDING for one in observation.jobs},
        blocked=frozenset(one.job.job_id for one in observation.jobs if one.blocked),
        nodes={node.name: (node.capacity, node.fixed_shares) for node in observation.nodes},
        free=dict(observation.free),
        draining=draining,
    )


def news(before: _Seen, now: _Seen) -> tuple[str, ...]:
    """What happened between two readings that may change the plan, in words."""
    found = []
    for job_id, pending in sorted(now.pending.items()):
        if job_id not in before.pending:
            found.append(f"job {job_id} arrived")
        elif pending and not before.pending[job_id]:
            found.append(f"job {job_id} is back in the queue")
        elif job_id in before.blocked and job_id not in now.blocked:
            found.append(f"job {job_id} may be planned")
    found.extend(f"job {job_id} ended" for job_id in sorted(before.pending.keys() - now.pending))
    for name in sorted(before.nodes.keys() | now.nodes):
        if before.nodes.get(name) != now.nodes.get(name):
            found.append(f"node {name} changed")
    if before.draining and not now.draining:
        found.append("starts are allowed again")
    return tuple(found)


class RoundTimer:
    """Decides when rounds are due. The first one is due at once.

    One is due at each multiple of ``quantum_s`` (epoch seconds), when a policy's grants end.
    """

    def __init__(self, *, round_s: float, debounce_s: float, quantum_s: float = math.inf) -> None:
        self._round_s, self._debounce_s, self._quantum_s = round_s, debounce_s, quantum_s
        self._seen: _Seen | None = None
        self._due_s = 0.0
        self._waits_for_free = False
        self.why: tuple[str, ...] = ()

    def note(self, observation: Observation, *, draining: bool, now_s: float) -> None:
        """Take in a reading."""
        now = _see(observation, draining)
        if self._seen is not None:
            happened = news(self._seen, now)
            if self._waits_for_free and now.free != self._seen.free:
                happened = (*happened, "resources were freed")
            if happened:
                self.why += happened
                self._due_s = min(self._due_s, now_s + self._debounce_s)
        self._seen = now

    def due(self, now_s: float) -> bool:
        """Whether a round is due."""
        return now_s >= self._due_s

    def left_s(self, now_s: float) -> float:
        """Seconds until a round is due, as far as known now."""
        return max(0.0, self._due_s - now_s)

    def done(self, now_s: float, *, waits_for_free: bool) -> None:
        """A round was run. ``waits_for_free``: a planned job could not be started yet."""
        quantum_s = self._quantum_s
        ends_s = (now_s // quantum_s + 1) * quantum_s
        self._due_s = min(now_s + self._round_s, ends_s)
        self._waits_for_free = waits_for_free
        self.why = ()

    def failed(self, now_s: float, retry_s: float) -> None:
        """A round failed: try again soon."""
        self._due_s = now_s + retry_s
