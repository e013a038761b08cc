"""Measuring a job's speed while its lease has other cores than planned (a profiling lease).

The controller changes the cores and says how many steps to leave out and how many to measure; the
launcher reads them from the board and answers. How fast a step was comes from the program's own
sums of stepping and waiting, so it does not matter how often, or how late, the board is looked at.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_synergy.jobside.board import Report
from slurm_synergy.jobside.data_reading import DataFound, DataReading
from slurm_synergy.profiler.points import Meter, MeterState, Reading
from slurm_synergy.profiler.sweep import Measurement

__all__ = ["Answer", "Order", "OrderKeeper", "own_memory_mib", "program_name"]

_SCRIPT_BYTES = 1 << 20
_SHOWN = 24
_KIB_PER_MIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to measure: ``steps`` after ``warmup_steps``, for at most ``longest_s`` seconds.

    With ``read_s`` it is the storage instead, for so many seconds by so many ``readers``.
    """

    number: int
    warmup_steps: int
    steps: int
    longest_s: float
    read_s: float = 0.0
    readers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of the order of that number; neither of both: it could not be measured."""

    number: int
    found: Measurement | None = None
    data: DataFound | None = None


class OrderKeeper:
    """Carries out one order at a time; a newer one, or none, ends the one before.

    ``read`` begins an order that asks for the storage; where it is None, or yields none, such an
    order is answered without it.
    """

    def __init__(self, read: Callable[[Order], DataReading | None] | None = None) -> None:
        self._order: Order | None = None
        self._meter: Meter | None = None
        self._read = read
        self._reading: DataReading | None = None

    @property
    def busy(self) -> bool:
        """Something is being measured: look at the board more often."""
        return self._meter is not None or self._reading is not None

    def follow(self, order: Order | None, *, cpus: int, possible: bool) -> Answer | None:
        """Take over what the controller wants now, with ``cpus`` cores for this task.

        What is not ``possible``, since the cores could not be had, is answered at once.
        """
        if order == self._order:
            return None
        self._order, self._meter, self._reading = order, None, None
        if order is None:
            return None
        if order.read_s > 0:
            self._reading = self._read(order) if self._read is not None else None
            return Answer(number=order.number) if self._reading is None else None
        if not possible or cpus < 1:
            return Answer(number=order.number)
        self._meter = Meter(
            cpus=cpus,
            warmup=order.warmup_steps,
            iterations=max(1, order.steps),
            most_s=order.longest_s,
        )
        return None

    def look(self, report: Report, now_s: float) -> Answer | None:
        """Take in what the board says at ``now_s`` (monotonic); the answer, once there is one."""
        if self._order is not None and self._reading is not None:
            return self._look_at_reading(self._order.number, self._reading)
        if self._meter is None or self._order is None:
            return None
        meter = self._meter.seen(
            Reading(
                now_s=now_s,
                step=report.step,
                samples=report.samples,
                stepped_s=report.stepped_s,
                waited_s=report.waited_s,
            )
        )
        if meter.state in (MeterState.WARMING, MeterState.COUNTING):
            self._meter = meter
            return None
        self._meter = None
        return Answer(number=self._order.number, found=meter.measurement)

    def _look_at_reading(self, number: int, reading: DataReading) -> Answer | None:
        if reading.found is None:
            return None
        self._reading = None
        return Answer(number=number, data=reading.found)


def own_memory_mib(pids: Iterable[int]) -> int:
    """MiB that these processes have for themselves: what is neither file nor shared cache.

    Pages that a fork shares with its parent count twice: rather too much than too little.
    """
    kib = 0
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):  # it ended meanwhile
            text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
            for line in text.splitlines():
                if line.startswith("RssAnon:"):
                    kib += int(line.split()[1])
    return -(-kib // _KIB_PER_MIB)


def program_name(command: Sequence[str], cwd: str) -> str:
    """A name for what is run: the same command on the same script in the same place has the same.

    The content of a script counts, so that a changed one is measured anew. ``run-train-1f3a...``
    begins with the name of the script, for those who read it.
    """
    digest = hashlib.sha256()
    for word in (cwd, *command):
        digest.update(word.encode("utf-8", "surrogateescape") + b"\0")
    for word in command:
        path = Path(cwd, word)
        with contextlib.suppress(OSError, ValueError):
            if path.is_file() and path.stat().st_size <= _SCRIPT_BYTES:
                digest.update(path.read_bytes())
    return f"run-{_shown_name(command)}-{digest.hexdigest()[:20]}"


def _shown_name(command: Sequence[str]) -> str:
    """The script or module in ``command``, else its program: letters, digits and '-'."""
    words = list(command)
    named = next((word for word in words if word.endswith((".py", ".sh"))), "")
    if not named and "-m" in words[:-1]:
        named = words[words.index("-m") + 1]
    stem = Path(named or (words[0] if words else "")).name.removesuffix(".py").removesuffix(".sh")
    return re.sub(r"[^A-Za-z0-9]+", "-", stem).strip("-")[:_SHOWN].strip("-") or "program"
