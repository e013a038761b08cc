"""How often slurmctld is asked: less often while it is busy, up to a longest pause.

A busy slurmctld serves everybody's ``sbatch`` and ``squeue`` late, and each further reading makes
that worse. Three things tell: ``sdiag`` (threads that serve RPCs, messages that wait for nodes, the
mean time of an RPC since the last look), and the time that our own last reading took. Each look
at a busy slurmctld doubles the pause between readings, each look at a calm one halves it again, so
a load that comes and goes is neither chased nor forgotten.

Rounds follow readings: a longer pause spaces them out as well. Leases are renewed all the time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from slurm_synergy.errors import ClusterError
from slurm_synergy.slurm.budget import RpcBudget
from slurm_synergy.slurm.sdiag import DiagFacts, rpc_mean_s

__all__ = ["BusyLimits", "Diagnosed", "Pacer", "busy_with"]

_LOG = logging.getLogger(__name__)

# A mean over fewer RPCs says little; one slow one would make it.
_LEAST_RPCS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyLimits:
    """Beyond any of these slurmctld counts as busy. Slurm serves at most 256 threads at once."""

    server_threads: int = 128
    agent_queue: int = 500
    rpc_mean_s: float = 0.5
    reading_s: float = 5.0


class Diagnosed(Protocol):
    """A Slurm client that can tell slurmctld's load and what was asked of it."""

    def diagnose(self) -> DiagFacts:
        """Slurmctld's load now. Raises ClusterError."""
        ...

    def budget(self) -> RpcBudget:
        """What was asked of Slurm so far."""
        ...


def busy_with(
    now: DiagFacts, before: DiagFacts | None, reading_s: float, limits: BusyLimits
) -> str:
    """What keeps slurmctld busy, in words; empty when it is not. ``reading_s``: our last turn."""
    mean_s, count = rpc_mean_s(now, before)
    reasons = (
        (now.server_threads > limits.server_threads, f"{now.server_threads} threads serve RPCs"),
        (now.agent_queue > limits.agent_queue, f"{now.agent_queue} messages wait for nodes"),
        (
            count >= _LEAST_RPCS and mean_s > limits.rpc_mean_s,
            f"an RPC takes {mean_s:.2g} s on average",
        ),
        (reading_s > limits.reading_s, f"the last reading took {reading_s:.2g} s"),
    )
    return ", ".join(text for holds, text in reasons if holds)


class Pacer:
    """Stretches pauses while slurmctld is busy. Used by one thread.

    ``reason`` says why pauses are stretched, empty while they are not. ``look_every_s`` is the
    least time between two looks at ``sdiag``; ``longest_s`` the longest pause it ever makes.
    """

    def __init__(
        self,
        client: Diagnosed,
        *,
        limits: BusyLimits,
        look_every_s: float,
        longest_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._limits, self._clock = client, limits, clock
        self._look_every_s, self._longest_s = look_every_s, longest_s
        self._looked_s: float | None = None
        self._before: DiagFacts | None = None
        self._factor = 1
        self._blind = False
        self.reason = ""

    def stretch(self, pause_s: float) -> float:
        """The pause before the next reading, in place of ``pause_s`` (seconds)."""
        now_s = self._clock()
        if self._looked_s is None or now_s - self._looked_s >= self._look_every_s:
            self._looked_s = now_s
            self._look(pause_s)
        return max(pause_s, min(pause_s * self._factor, self._longest_s))

    def _look(self, pause_s: float) -> None:
        try:
            now = self._client.diagnose()
        except ClusterError as err:
            # Slurm's absence is the reading's to report; a forbidden sdiag must not stop us.
            if not self._blind:
                _LOG.info("slurmctld's load is not known: %s", err.in_short)
            self._blind = True
            return
        self._blind = False
        busy = busy_with(now, self._before, self._client.budget().last_turn_s, self._limits)
        self._before = now
        most = max(1.0, self._longest_s / pause_s)
        self._factor = min(2 * self._factor, _power_above(most)) if busy else self._factor // 2 or 1
        self._tell(busy, pause_s)

    def _tell(self, busy: str, pause_s: float) -> None:
        slow = self._factor > 1
        if slow:
            pause_s = min(pause_s * self._factor, self._longest_s)
            why = busy or "it was busy until just now"
            reason = f"slurmctld is busy ({why}): read every {pause_s:g} s at most"
            level = logging.WARNING if busy and not self.reason else logging.INFO
            if reason != self.reason:
                _LOG.log(level, "%s", reason)
            self.reason = reason
        elif self.reason:
            _LOG.info("slurmctld is calm again: read as often as before")
            self.reason = ""


def _power_above(most: float) -> int:
    power = 1
    while power < most:
        power *= 2
    return power
