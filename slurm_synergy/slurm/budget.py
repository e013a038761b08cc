"""How much is asked of slurmctld: counted per kind, and held against the budget of a turn.

A turn is what happens between two readings of the queue: one look at the queue, one at the nodes,
now and then ``sdiag`` and the reservations, and the changes of a round. Reading costs the same
whatever the number of jobs; a job whose text looks forged costs up to two commands more.

Counted are commands (or calls of pyslurm). One command is one to three RPCs: the table is in
``docs/adr/018-slurm-answers-and-load.md``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from slurm_synergy.slurm.commands import Beside, CommandResult, CommandRunner

__all__ = ["READING_LIMIT", "CallMeter", "MeteredRunner", "RpcBudget", "kind_of"]

_LOG = logging.getLogger(__name__)

READING_LIMIT = 8
"""Most reading calls of a turn without changes: queue 2, nodes 1, and room for single jobs."""

_READS = frozenset(
    {"queue", "jobs", "job", "nodes", "partition", "reservations", "config", "accounting"}
)
_SHOWN = {
    "job": "jobs",
    "node": "nodes",
    "partition": "partition",
    "reservation": "reservations",
    "config": "config",
    "assoc_mgr": "accounting",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RpcBudget:
    """Calls of Slurm by kind: since the start, and in the last whole turn.

    ``exceeded`` counts turns that read more than ``reading_limit`` calls and changed nothing.
    """

    calls: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, int] = field(default_factory=dict)
    last_turn: Mapping[str, int] = field(default_factory=dict)
    last_turn_s: float = 0.0
    turns: int = 0
    reading_limit: int = READING_LIMIT
    exceeded: int = 0


def kind_of(argv: Sequence[str]) -> str:
    """The kind of call that a command is."""
    words = [word for word in argv[1:] if not word.startswith("-")]
    if argv[0] == "squeue":
        return "queue" if "-j" not in argv else "job"
    if argv[0] == "sdiag":
        return "diag"
    if argv[0] == "scancel":
        return "cancel"
    if argv[0] != "scontrol":
        return argv[0]
    if not words:
        return "session"
    if words[0] == "show" and len(words) > 1:
        kind = _SHOWN.get(words[1], words[1])
        return "job" if kind == "jobs" and len(words) > 2 else kind
    if words[0] in ("create", "delete") or words[-1].startswith("ReservationName="):
        return "reservation"
    return words[0]


class CallMeter:
    """Counts calls. Thread-safe. ``call(kind)`` surrounds each; a call ``queue`` begins a turn."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._calls: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._failed: dict[str, int] = {}
        self._turn: dict[str, int] = {}
        self._turn_s = 0.0
        self._last: tuple[Mapping[str, int], float] = ({}, 0.0)
        self._turns = self._exceeded = 0
        self._warned = False

    def begin_turn(self) -> None:
        """The calls so far were a turn; what follows is the next one."""
        with self._lock:
            if not self._turn:
                return
            self._last = (self._turn, self._turn_s)
            self._turn, self._turn_s = {}, 0.0
            self._turns += 1
            over = self._over(self._last[0])
            self._exceeded += over
            warn, self._warned = over and not self._warned, over
            turn = self._last[0]
        if warn:
            _LOG.warning(
                "%d calls of Slurm to read it once, more than the budget of %d: %s",
                sum(turn.values()),
                READING_LIMIT,
                ", ".join(f"{kind} {count}" for kind, count in sorted(turn.items())),
            )

    @staticmethod
    def _over(turn: Mapping[str, int]) -> bool:
        # Each change reads its job before and after; that belongs to the change.
        changes = turn.keys() - _READS - {"ping", "diag"}
        return not changes and sum(turn.values()) > READING_LIMIT

    @contextmanager
    def call(self, kind: str) -> Iterator[None]:
        """Count and time what happens inside as one call; one that raises has failed."""
        began_s, ok = self._clock(), False
        try:
            yield
            ok = True
        finally:
            self.count(kind, self._clock() - began_s, ok=ok)

    def count(self, kind: str, took_s: float, *, ok: bool) -> None:
        """Count one call that took ``took_s`` seconds."""
        with self._lock:
            self._calls[kind] = self._calls.get(kind, 0) + 1
            self._seconds[kind] = self._seconds.get(kind, 0.0) + took_s
            self._turn[kind] = self._turn.get(kind, 0) + 1
            self._turn_s += took_s
            if not ok:
                self._failed[kind] = self._failed.get(kind, 0) + 1

    def budget(self) -> RpcBudget:
        """What was counted until now."""
        with self._lock:
            return RpcBudget(
                calls=dict(self._calls),
                seconds=dict(self._seconds),
                failed=dict(self._failed),
                last_turn=dict(self._last[0]),
                last_turn_s=self._last[1],
                turns=self._turns,
                exceeded=self._exceeded,
            )


class MeteredRunner:
    """``CommandRunner`` that counts each command in ``meter``."""

    def __init__(self, runner: CommandRunner, meter: CallMeter) -> None:
        self._runner, self.meter = runner, meter

    def run(self, argv: Sequence[str], *, timeout_s: float, stdin: str = "") -> CommandResult:
        """See ``CommandRunner``. A command that exits with an error counts as failed."""
        began_s, ok = time.monotonic(), False
        try:
            result = self._runner.run(argv, timeout_s=timeout_s, stdin=stdin)
            ok = result.rc == 0
            return result
        finally:
            self.meter.count(kind_of(argv), time.monotonic() - began_s, ok=ok)

    def begin(self, argv: Sequence[str], *, timeout_s: float) -> Callable[[], CommandResult]:
        """See ``Beside``; where the runner is none, the command is run when it is waited for."""
        runner = self._runner
        if not isinstance(runner, Beside):
            return lambda: self.run(argv, timeout_s=timeout_s)
        began_s, result_of = time.monotonic(), runner.begin(argv, timeout_s=timeout_s)

        def result() -> CommandResult:
            ok = False
            try:
                found = result_of()
                ok = found.rc == 0
                return found
            finally:
                self.meter.count(kind_of(argv), time.monotonic() - began_s, ok=ok)

        return result
