"""The loop: one reading of Slurm per turn, and a round on it when one is due.

Whatever fails, running jobs keep their leases and the next turn tries again, also while the ledger
cannot be written: then nothing is started, as it could not be recorded. Only a ledger that is
damaged ends the loop.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from slurm_synergy.cluster import (
    Clock,
    Cluster,
    Observation,
    Outcome,
    Records,
    Renew,
    Resize,
    Start,
    Stop,
)
from slurm_synergy.config import SchedulingSettings
from slurm_synergy.controller.triggers import RoundTimer
from slurm_synergy.core.decide import Mechanism, Policy
from slurm_synergy.core.model import JobPhase, Plan, ReasonCode, Snapshot
from slurm_synergy.core.rounds_of_time import quantum_of
from slurm_synergy.core.wording import counted
from slurm_synergy.errors import LedgerError, LedgerUnavailable, SynergyError
from slurm_synergy.round import Known, RoundResult, run_round

__all__ = ["Audience", "LiveCluster", "Loop", "Pace", "Parts"]

_LOG = logging.getLogger(__name__)

# While a job starts or ends, look more often than poll_s: each step of it waits for a reading.
_BUSY_POLL_S = 0.5
# Several tasks report within moments of each other: one reading for all of them.
_LEAST_PAUSE_S = 0.1
_RETRY_S = 5.0
_EVENTS_SHOWN = 3
# What rounds take over from each other grows with the jobs and profiles that they have seen.
_KNOWN_FOR_ROUNDS = 64
_BUSY = (JobPhase.STARTING, JobPhase.ENDING)


class LiveCluster(Cluster, Protocol):
    """A cluster on which things take time."""

    def tick(self) -> Observation:
        """Read it and follow what was begun; the next ``observe`` gives the same reading."""
        ...

    def prepare(self) -> None:
        """Whatever must be in order before a round."""
        ...


class Pace(Protocol):
    """How often the cluster may be read."""

    def stretch(self, pause_s: float) -> float:
        """The pause before the next reading, in place of ``pause_s`` (seconds)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a loop runs; made from settings, and anew when they change.

    ``shown`` names the mode in which actions are only shown (dry run, observe, advise), empty when
    they are done. ``watchers`` are told of each round, after it; what they raise is logged.
    ``pace`` makes pauses longer while slurmctld is busy.
    """

    cluster: LiveCluster
    policy: Policy
    mechanism: Mechanism
    scheduling: SchedulingSettings
    shown: str = ""
    watchers: tuple[Callable[[RoundResult], object], ...] = ()
    pace: Pace | None = None


class Audience(Protocol):
    """Whoever wants to know how it goes; called from the loop's thread."""

    def observed(self, observation: Observation) -> None:
        """The cluster has been read."""
        ...

    def publish(self, snapshot: Snapshot, plan: Plan, took_s: Mapping[str, float]) -> None:
        """A round has been run."""
        ...

    def failed(self, text: str) -> None:
        """What keeps the loop from working; empty when it works again."""
        ...


class Loop:
    """Rounds on a live cluster.

    ``wake`` interrupts the pause between two turns, from any thread. ``previous_s`` is when the
    last round of an earlier process was (epoch seconds), None if that is not known. ``error`` says
    what keeps it from working now, else None; ``last`` is the last round.
    """

    def __init__(
        self,
        parts: Parts,
        records: Records,
        clock: Clock,
        audience: Audience,
        wake: threading.Event,
        previous_s: float | None = None,
    ) -> None:
        self._records, self._clock, self._audience = records, clock, audience
        self._known = Known(previous_s)
        self.wake = wake
        self.error: str | None = None
        self.last: RoundResult | None = None
        self.replace(parts)

    def replace(self, parts: Parts) -> None:
        """Go on with other parts; a round is due at once."""
        self._parts = parts
        scheduling = parts.scheduling
        self._timer = RoundTimer(
            round_s=scheduling.round_s,
            debounce_s=scheduling.debounce_s,
            quantum_s=quantum_of(parts.policy, scheduling.round_s),
        )
        self._prepared = False
        self._paused_s = (0.0, 0.0)
        self._known = Known(self._known.previous_s)

    def turn(self) -> float:
        """One turn; how long to pause before the next, in seconds. Raises LedgerError only."""
        scheduling, cluster = self._parts.scheduling, self._parts.cluster
        since_s, paused_s = self._paused_s
        early_s = since_s + paused_s - self._clock.now_s()
        if 0 < early_s <= paused_s:  # a clock that was set back ends no pause late
            # Woken by a job's report; but slurmctld is busy, so that it has to wait.
            return early_s
        try:
            if not self._prepared:
                cluster.prepare()
                self._prepared = True
            observation = cluster.tick()
            self._audience.observed(observation)
            now_s = self._clock.now_s()
            self._timer.note(observation, draining=self._records.draining(), now_s=now_s)
            if self._timer.due(now_s):
                self.round()
        except SynergyError as err:
            if isinstance(err, LedgerError) and not isinstance(err, LedgerUnavailable):
                raise
            self._complain(err)
            self._timer.failed(self._clock.now_s(), min(_RETRY_S, scheduling.poll_s))
            return scheduling.poll_s
        if self.error is not None:
            _LOG.info("working again")
            self.error = None
            self._audience.failed("")
        busy = any(job.phase in _BUSY for job in observation.jobs)
        pause_s = min(scheduling.poll_s, _BUSY_POLL_S) if busy else scheduling.poll_s
        left_s = max(_LEAST_PAUSE_S, self._timer.left_s(self._clock.now_s()))
        return self._paced(min(pause_s, left_s))

    def _paced(self, pause_s: float) -> float:
        pace = self._parts.pace
        longer_s = pause_s if pace is None else pace.stretch(pause_s)
        self._paused_s = (self._clock.now_s(), longer_s if longer_s > pause_s else 0.0)
        return longer_s

    def round(self) -> RoundResult:
        """One round on the latest reading. Raises SynergyError when it cannot be run."""
        parts, why = self._parts, _in_short(self._timer.why)
        parts.cluster.prepare()
        result = run_round(
            parts.cluster,
            self._records,
            self._clock,
            parts.policy,
            parts.mechanism,
            parts.scheduling.round_s,
            known=self._known,
        )
        if result.plan.round % _KNOWN_FOR_ROUNDS == 0:
            self._known = Known(self._known.previous_s)
        now_s = self._clock.now_s()
        self._timer.done(now_s, waits_for_free=bool(result.deferred))
        if any(_failed(outcome) for outcome in result.outcomes):
            self._timer.failed(now_s, _RETRY_S)
        self.last = result
        self._audience.publish(result.snapshot, result.plan, result.took_s)
        _log_round(result, why, shown=parts.shown or "dry run" * parts.scheduling.dry_run)
        for watcher in parts.watchers:
            _tell(watcher, result)
        return result

    def run(
        self,
        stopped: Callable[[], bool],
        between: Callable[[], None],
        longest_pause_s: float = math.inf,
    ) -> None:
        """Turn until ``stopped``; ``between`` is called after each turn."""
        while not stopped():
            pause_s = min(self.turn(), longest_pause_s)
            between()
            if not stopped() and self.wake.wait(pause_s):
                time.sleep(_LEAST_PAUSE_S)
                self.wake.clear()

    def _complain(self, err: SynergyError) -> None:
        text = f"{err.in_short}; will be tried again"
        if text != self.error:
            _LOG.error("%s; running jobs keep what they have", text)
            _LOG.debug("in full: %s", err)
            self.error = text
            self._audience.failed(text)


def _in_short(events: Sequence[str]) -> str:
    """The first few events in words."""
    if not events:
        return "periodic"
    more = len(events) - _EVENTS_SHOWN
    return "; ".join(events[:_EVENTS_SHOWN]) + (f"; {more} more" if more > 0 else "")


def _failed(outcome: Outcome) -> bool:
    """Whether it went wrong; a refused start has a waiting time of its own."""
    return outcome.reason is not None and outcome.reason.code is ReasonCode.ACTION_FAILED


def _tell(watcher: Callable[[RoundResult], object], result: RoundResult) -> None:
    """Figures and advice follow from rounds; no round may fail for them."""
    try:
        watcher(result)
    except SynergyError as err:
        _LOG.warning("after round %d: %s", result.plan.round, err.in_short)
    except Exception:  # noqa: BLE001 - see above
        _LOG.exception("after round %d: a mistake of the program", result.plan.round)


def _log_round(result: RoundResult, why: str, *, shown: str) -> None:
    # What is only shown is not done, and that is no failure.
    failed = [outcome for outcome in result.outcomes if not outcome.done and not shown]
    done = [outcome.action for outcome in result.outcomes if outcome not in failed]
    words = f"{shown}: would start %d, stop %d, resize %d, keep %d"
    _LOG.info(
        "round %d (%s): %s, %d placed, %d wait; "
        f"{words if shown else 'started %d, stopped %d, resized %d, kept %d'}%s; %.0f ms",
        result.plan.round,
        why,
        counted(len(result.snapshot.jobs), "job"),
        len(result.plan.placements),
        len(result.plan.waiting),
        *(sum(isinstance(one, kind) for one in done) for kind in (Start, Stop, Resize, Renew)),
        f", not done {len(failed)}" if failed else "",
        1000 * result.took_s["total"],
    )
    for outcome in failed:
        _LOG.warning(
            "round %d: job %d: %s not done: %s",
            result.plan.round,
            outcome.action.job_id,
            type(outcome.action).__name__.lower(),
            outcome.reason.text if outcome.reason else "no reason given",
        )
