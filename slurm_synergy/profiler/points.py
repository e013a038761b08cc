"""From a training process's progress to one measured point of a sweep: pure.

A job is read again and again while it trains with some number of cores; the meter says when it
knows the rate. What comes first is discarded: batches that were loaded with more cores than there
are now would be counted as if the present cores had done it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from slurm_synergy.profiler.sweep import Measurement

__all__ = ["Meter", "MeterState", "Reading"]

_WARMUP = 5
_ITERATIONS = 50
_MOST_WARMUP = 1 / 3
_FEWEST = 4
# A training process tells its progress ten times a second: a shorter window would count halves.
_SHORTEST_S = 1.0
# Halves of a window that differ by more mean that it has not settled: a queue of batches that
# other cores had loaded is running dry.
_STEADY = 0.08
# What changes once when the cores do (workers that end, others that start) is in the first steps.
# It hides in the halves, but not in a quarter.
_BEGINNING = 0.25
_LIKE_THE_REST = 0.03
# A program that never settles is taken as it is.
_MOST_SLIDES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Progress as a board tells it, read at ``now_s`` (monotonic).

    ``step`` and ``samples`` are totals; so are ``stepped_s`` and ``waited_s``, the seconds in the
    program's own steps and waiting for data, both 0 where the program does not tell.
    """

    now_s: float
    step: int
    samples: int
    stepped_s: float = 0.0
    waited_s: float = 0.0


class MeterState(Enum):
    """What a meter knows."""

    WARMING = "warming up"
    COUNTING = "counting"
    KNOWN = "known"
    STUCK = "too few steps in the time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meter:
    """Measures one point; ``seen`` returns the meter after one more reading.

    ``warmup`` steps are discarded (fewer where they take a third of the time) and ``iterations``
    counted, in at most ``most_s`` seconds; where these end first, fewer steps count, but at least
    four. Steps at the beginning that are unlike the rest are discarded too.
    """

    cpus: int
    warmup: int = _WARMUP
    iterations: int = _ITERATIONS
    most_s: float = 75.0
    state: MeterState = MeterState.WARMING
    began: Reading | None = None
    window: tuple[Reading, ...] = ()
    slides: int = 0

    @property
    def measurement(self) -> Measurement | None:
        """The point, once it is known."""
        if self.state is not MeterState.KNOWN:
            return None
        first, last = self.window[0], self.window[-1]
        took_s = _took_s(first, last)
        stepped_s = last.stepped_s - first.stepped_s
        waited_s = last.waited_s - first.waited_s
        samples = last.samples - first.samples
        tells = _tells(first, last)
        return Measurement(
            cpus=self.cpus,
            samples_per_s=samples / took_s,
            iterations=last.step - first.step,
            wait_share=min(waited_s / took_s, 1.0) if tells else None,
            busy_samples_per_s=samples / stepped_s if tells and stepped_s > 0 else None,
        )

    def seen(self, reading: Reading) -> Meter:
        """The meter after ``reading``; one that brings no new step only moves time on."""
        if self.state in (MeterState.KNOWN, MeterState.STUCK):
            return self
        if self.began is None or self._began_anew(reading):
            return replace(self, began=reading, window=(), slides=0, state=MeterState.WARMING)
        out_of_time = reading.now_s - self.began.now_s >= self.most_s
        if self.state is MeterState.WARMING:
            return self._warming(reading, out_of_time)
        if reading.step > self.window[-1].step:
            return self._counting(reading, out_of_time)
        return self._ended() if out_of_time else self

    def _began_anew(self, reading: Reading) -> bool:
        """Whether another process than before tells its progress."""
        assert self.began is not None
        last = self.window[-1] if self.window else self.began
        return reading.step < last.step or reading.stepped_s < last.stepped_s

    def _warming(self, reading: Reading, out_of_time: bool) -> Meter:
        assert self.began is not None
        done = reading.step - self.began.step
        # Many workers' queues take long to run dry where the GPUs set the pace, and do not matter.
        waited_enough = reading.now_s - self.began.now_s >= _MOST_WARMUP * self.most_s
        if done >= max(self.warmup, 1) or (waited_enough and done >= _WARMUP):
            return replace(self, window=(reading,), state=MeterState.COUNTING)
        return replace(self, state=MeterState.STUCK) if out_of_time else self

    def _counting(self, reading: Reading, out_of_time: bool) -> Meter:
        now = replace(self, window=(*self.window, reading))
        first = now.window[0]
        enough = reading.step - first.step >= self.iterations
        long_enough = reading.now_s - first.now_s >= _SHORTEST_S
        if out_of_time:
            return now._ended()
        if not enough or not long_enough:
            return now
        unsettled = 0 if now.slides >= _MOST_SLIDES else now._unsettled()
        if not unsettled:
            return replace(now, state=MeterState.KNOWN)
        # The rest counts, and as much again as is left out.
        return replace(now, window=now.window[unsettled:], slides=now.slides + 1)

    def _ended(self) -> Meter:
        """The time is over: what was counted has to do."""
        counted = self.window[-1].step - self.window[0].step
        progress = self.window[-1].samples - self.window[0].samples
        took_s = _took_s(self.window[0], self.window[-1])
        known = counted >= _FEWEST and progress > 0 and took_s > 0
        return replace(self, state=MeterState.KNOWN if known else MeterState.STUCK)

    def _unsettled(self) -> int:
        """How many readings at the beginning are unlike those that follow; 0 for none."""
        for part, tolerance in ((0.5, _STEADY), (_BEGINNING, _LIKE_THE_REST)):
            at = self._at(part)
            if at == 0:
                continue
            first, divide, last = self.window[0], self.window[at], self.window[-1]
            before, after = _rate(first, divide), _rate(divide, last)
            if abs(after - before) > tolerance * max(after, before):
                return at
        return 0

    def _at(self, part: float) -> int:
        """The reading at which ``part`` of the steps were done; 0 where none lies between."""
        first, last = self.window[0], self.window[-1]
        wanted = first.step + part * (last.step - first.step)
        return min(
            range(1, len(self.window) - 1),
            key=lambda at: abs(self.window[at].step - wanted),
            default=0,
        )


def _tells(first: Reading, last: Reading) -> bool:
    return last.stepped_s + last.waited_s > first.stepped_s + first.waited_s


def _took_s(first: Reading, last: Reading) -> float:
    """Seconds between two readings by the program's own clock, else by ours."""
    if _tells(first, last):
        return last.stepped_s - first.stepped_s + last.waited_s - first.waited_s
    return last.now_s - first.now_s


def _rate(first: Reading, last: Reading) -> float:
    took_s = _took_s(first, last)
    return (last.samples - first.samples) / took_s if took_s > 0 else 0.0
