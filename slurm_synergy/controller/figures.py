"""What the controller counts and measures of itself, for whoever shows it. No library needed.

Everything here is written by the loop's thread after a reading or a round, and read by others.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from slurm_synergy.cluster import Clock, Observation, Outcome
from slurm_synergy.config import Mode
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.core.elastic import as_placed
from slurm_synergy.core.model import JobPhase, JobStatus, Plan, ReasonCode, Snapshot
from slurm_synergy.core.pipeline import job_rate, proportional_rate
from slurm_synergy.core.snapshot import status_of
from slurm_synergy.errors import LeaseError
from slurm_synergy.round import RoundResult

__all__ = ["Figures", "FloorFigure", "Live", "RpcUse", "Totals"]

_REFUSED = (ReasonCode.START_REFUSED, ReasonCode.NOT_OURS)


@dataclass(slots=True)
class Totals:
    """What only grows: counts since the controller's start."""

    rounds: int = 0
    troubles: int = 0
    actions: Counter[tuple[str, str]] = field(default_factory=Counter)
    stops: Counter[str] = field(default_factory=Counter)
    advice: int = 0
    step_s: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorFigure:
    """How a running job fares against promise P1.

    ``ratio`` is the modelled rate of its lease over that of its proportional share, ``measured``
    the reported rate over the latter; None where nothing is known (no profile, no report).
    """

    job_id: int
    ratio: float | None
    measured: float | None


class RpcUse(Protocol):
    """What was asked of Slurm since the start, by kind, and turns that asked for too much."""

    @property
    def calls(self) -> Mapping[str, int]:
        """Calls that were made."""
        ...

    @property
    def seconds(self) -> Mapping[str, float]:
        """How long they took."""
        ...

    @property
    def failed(self) -> Mapping[str, int]:
        """Those of them that failed."""
        ...

    @property
    def exceeded(self) -> int:
        """Turns that read more than the budget."""
        ...


class Live(Protocol):
    """What is asked of the running controller at each scrape."""

    def mode(self) -> Mode:
        """The mode in force."""
        ...

    def draining(self) -> bool:
        """Whether nothing may be started."""
        ...

    def leases(self) -> Mapping[int, Mapping[str, object]]:
        """All leases as JSON values, by job id."""
        ...

    def ledger_errors(self) -> int:
        """How often the ledger or the journal could not be used."""
        ...

    def rpc_use(self) -> RpcUse | None:
        """What was asked of Slurm; None when the client does not count."""
        ...

    def unattended(self) -> int:
        """Pending jobs that are held although nobody is going to start them in this mode."""
        ...


class Figures:
    """Collects; thread-safe. ``observed``, ``publish`` and ``failed`` are those of an audience."""

    def __init__(self, leases: LeaseBook, clock: Clock) -> None:
        self._leases, self._clock = leases, clock
        self._lock = threading.Lock()
        self._totals = Totals()
        self._observation: Observation | None = None
        self._observed_s = 0.0
        self._round: tuple[Snapshot, Plan, Mapping[str, float]] | None = None
        self._trouble = False
        self._stops_seen: dict[int, str] = {}

    # Written by the loop's thread

    def observed(self, observation: Observation) -> None:
        """Slurm has been read: stops that came to their end since are counted."""
        stops = {}
        for job_id in self._leases.job_ids():
            if self._leases.stopping(job_id) is not None:
                with contextlib.suppress(LeaseError):  # it ended just now
                    stops[job_id] = self._leases.stop_state(job_id).value
        with self._lock:
            for job_id, state in self._stops_seen.items():
                if job_id not in stops:
                    self._totals.stops[state] += 1
            self._stops_seen = stops
            self._observation, self._observed_s = observation, self._clock.now_s()

    def publish(self, snapshot: Snapshot, plan: Plan, took_s: Mapping[str, float]) -> None:
        """A round has been run; earlier trouble is over."""
        with self._lock:
            self._round, self._trouble = (snapshot, plan, dict(took_s)), False
            self._totals.rounds += 1
            for step, seconds in took_s.items():
                self._totals.step_s[step] = self._totals.step_s.get(step, 0.0) + max(0.0, seconds)

    def failed(self, text: str) -> None:
        """The controller cannot do its work just now; empty when it can again."""
        with self._lock:
            self._trouble = bool(text)
            self._totals.troubles += bool(text)

    def round_done(self, result: RoundResult) -> None:
        """Count what became of a round's actions."""
        with self._lock:
            for outcome in result.outcomes:
                kind = type(outcome.action).__name__.lower()
                self._totals.actions[kind, _became(outcome)] += 1

    def advised(self, count: int) -> None:
        """So many jobs have got other advice."""
        with self._lock:
            self._totals.advice += count

    # Read by any thread

    def totals(self) -> Totals:
        """The counts as they are now."""
        with self._lock:
            totals = self._totals
            return replace(
                totals,
                actions=Counter(totals.actions),
                stops=Counter(totals.stops),
                step_s=dict(totals.step_s),
            )

    @property
    def trouble(self) -> bool:
        """Whether the controller cannot do its work just now."""
        with self._lock:
            return self._trouble

    @property
    def observation(self) -> tuple[Observation, float] | None:
        """The last reading of Slurm and when it was made (epoch seconds)."""
        with self._lock:
            return (self._observation, self._observed_s) if self._observation else None

    @property
    def last_round(self) -> tuple[Snapshot, Plan, Mapping[str, float]] | None:
        """The last round's snapshot, plan and seconds by step."""
        with self._lock:
            return self._round

    def floors(self) -> tuple[FloorFigure, ...]:
        """How the running jobs of the last round fare with the leases of this moment, by id."""
        last = self.last_round
        if last is None:
            return ()
        snapshot, found = last[0], []
        leases, statuses = self._leases.snapshot(), status_of(snapshot)
        for job_id, shown in leases.items():
            status, lease = statuses.get(job_id), self._leases.lease(job_id)
            if status is None or lease is None or status.phase is not JobPhase.RUNNING:
                continue
            current = replace(status, lease=lease)
            progress = shown["progress"]
            rate = progress.get("samples_per_s") if isinstance(progress, Mapping) else None
            found.append(_floor(current, snapshot, float(rate or 0.0)))
        return tuple(found)


def _became(outcome: Outcome) -> str:
    if outcome.done:
        return "done"
    code = outcome.reason.code if outcome.reason else None
    if code is ReasonCode.ONLY_SHOWN:
        return "only_shown"
    return "refused" if code in _REFUSED else "failed"


def _floor(status: JobStatus, snapshot: Snapshot, measured_rate: float) -> FloorFigure:
    job_id, lease = status.job.job_id, status.lease
    assert lease is not None
    nodes = {node.name: node for node in snapshot.nodes}
    placement = lease.placement
    status = as_placed(snapshot, status, placement)
    least: float | None = None
    if status.job.wrapped and all(name in nodes for name in placement.nodes):
        shares = [(nodes[name], share.gpus) for name, share in placement.shares]
        least = proportional_rate(status, shares)
    if not least:
        return FloorFigure(job_id=job_id, ratio=None, measured=None)
    rate = job_rate(status.profile, placement.gpu_type, [share for _, share in placement.shares])
    return FloorFigure(
        job_id=job_id,
        ratio=rate / least if rate is not None else None,
        measured=measured_rate / least if measured_rate else None,
    )
