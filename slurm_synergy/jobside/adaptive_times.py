"""How long the steps of an adaptive training take, by batch, as the controller learns from it.

A pass lasts from the program's getting its batch to its asking for the next, so waiting for data
and saving are not in it. Of a step with several ranks the part that only synchronises is known:
from the last gradient of this rank to the end of the backward pass. What is left is the gradient.

Nothing here imports torch: all of it runs in programs that did so themselves.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slurm_synergy.core.scaling import BatchSize
from slurm_synergy.jobside.training import MOST_TIMES, StepMeans

__all__ = ["StepMeter", "SyncTimer"]

# The first steps of a process and of a batch size also make room and choose algorithms.
_SKIPPED = 2
_FEWEST_STEPS = 5
_FIRST_S, _LONGEST_S = 3.0, 30.0
_LEAST_S = 1e-6
_MS_PER_S = 1000.0


class SyncTimer:
    """How long a step was held up by synchronising, on the device whose work that holds up."""

    def __init__(self, device: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._device, self._cuda, self._clock = device, device.type == "cuda", clock
        self._ready: Any = None
        self._done: Any = None
        self._took_s = 0.0

    def ready(self) -> None:
        """This rank's gradients are computed; what follows of the backward pass is others'."""
        self.drop()
        self._ready = self._now()

    def done(self) -> None:
        """The backward pass is over."""
        if self._ready is not None:
            self._done = self._now()

    def over(self, took_s: float) -> None:
        """The whole step is over, and took that long."""
        self._took_s = self._took_s or took_s

    def take(self) -> float | None:
        """Seconds of that step without those between both, once; None before they are known."""
        if self._done is None or (self._cuda and not self._done.query()):
            return None
        ready, done, took_s = self._ready, self._done, self._took_s
        self.drop()
        held_s = ready.elapsed_time(done) / _MS_PER_S if self._cuda else done - ready
        return took_s - float(held_s)

    def drop(self) -> None:
        """What was not taken yet is of no use any more."""
        self._ready = self._done = None
        self._took_s = 0.0

    def _now(self) -> Any:
        if not self._cuda:
            return self._clock()
        cuda = sys.modules["torch"].cuda
        event = cuda.Event(enable_timing=True)
        event.record(cuda.current_stream(self._device))  # the program may look at another device
        return event


@dataclass(slots=True)
class _Sums:
    steps: int = 0
    took_s: float = 0.0
    measured: int = 0
    alone_s: float = 0.0


class StepMeter:
    """Means of step times by batch, since the last report."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sums: dict[BatchSize, _Sums] = {}
        self._batch: BatchSize | None = None
        self._last: BatchSize | None = None
        self._skip = _SKIPPED
        self._began_s = self._took_s = 0.0
        self._every_s = _FIRST_S
        self._due_s: float | None = None

    def begin_step(self, batch: BatchSize | None) -> None:
        """A step begins; None: one of another size, such as the rest of an epoch."""
        self._batch, self._took_s = batch, 0.0
        if batch is not None and batch != self._last:
            self._last, self._skip = batch, _SKIPPED

    def begin_pass(self) -> None:
        """The program is about to get its batch."""
        self._began_s = self._clock()

    def end_pass(self) -> None:
        """It asks for the next."""
        self._took_s += self._clock() - self._began_s

    def end_step(self, sync: SyncTimer) -> None:
        """All passes are over; of some steps ``sync`` knows what only synchronised."""
        batch = self._batch
        full = batch not in self._sums and len(self._sums) >= MOST_TIMES
        if batch is None or self._skip or full:
            self._skip -= batch is not None and self._skip > 0
            sync.drop()
            return
        sync.over(self._took_s)
        sums = self._sums.setdefault(batch, _Sums())
        sums.steps += 1
        sums.took_s += self._took_s
        alone_s = sync.take()
        if alone_s is not None:
            sums.measured += 1
            sums.alone_s += alone_s

    def due(self) -> tuple[StepMeans, ...]:
        """The means to report now, from then on anew; none before it is time.

        Soon at first, as a job cannot grow before it has told something, then every half minute.
        """
        now_s = self._clock()
        if self._due_s is None:
            self._due_s = now_s + self._every_s
        if now_s < self._due_s:
            return ()
        told = {batch: sums for batch, sums in self._sums.items() if _is_known(batch, sums)}
        if not told:
            return ()
        self._sums = {batch: sums for batch, sums in self._sums.items() if batch not in told}
        self._every_s = min(2 * self._every_s, _LONGEST_S)
        self._due_s = now_s + self._every_s
        return tuple(_means(batch, sums) for batch, sums in told.items())


def _is_known(batch: BatchSize, sums: _Sums) -> bool:
    return sums.steps >= _FEWEST_STEPS and (batch.replicas == 1 or sums.measured > 0)


def _means(batch: BatchSize, sums: _Sums) -> StepMeans:
    passes, took_s = batch.accumulation + 1, sums.took_s / sums.steps
    # Computing is steady and waiting for others is not, so the few measured steps tell the former
    # and all together the latter.
    alone_s = sums.alone_s / sums.measured if sums.measured else took_s
    gradient_s = max(alone_s / passes, _LEAST_S)
    return StepMeans(
        local_batch=batch.local,
        accumulation=batch.accumulation,
        replicas=batch.replicas,
        steps=sums.steps,
        gradient_s=gradient_s,
        step_s=gradient_s + max(took_s - alone_s, 0.0),
    )
