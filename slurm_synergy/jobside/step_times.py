"""How long a program's steps take and how long it waits for their data: means and exact sums."""

from __future__ import annotations

__all__ = ["StepTimes"]

_MEAN_WEIGHT = 0.1


class StepTimes:
    """Counts intervals: from :meth:`begin` to :meth:`count`, with the steps that they held.

    ``waited_s`` is the waiting of the interval so far, which the loop over batches adds to.
    ``step_s`` and ``wait_s`` are means over recent steps, ``stepped_total_s`` and
    ``waited_total_s`` sums over all, in seconds. Time outside intervals belongs to neither.
    """

    # Slots, as the loop adds to one of them for every batch.
    __slots__ = (
        "_began_at_s",
        "_began_step",
        "step_s",
        "stepped_total_s",
        "wait_s",
        "waited_s",
        "waited_total_s",
    )

    def __init__(self) -> None:
        self.waited_s = self.step_s = self.wait_s = 0.0
        self.stepped_total_s = self.waited_total_s = 0.0
        self._began_at_s, self._began_step = 0.0, -1

    @property
    def period_s(self) -> float:
        """The recent mean time of a step, waiting included."""
        return self.step_s + self.wait_s

    def begin(self, now_s: float, step: int) -> None:
        """An interval begins, after ``step`` steps of the job."""
        self._began_at_s, self._began_step, self.waited_s = now_s, step, 0.0

    def forget(self) -> None:
        """What has passed since the last count belongs to no interval."""
        self._began_step = -1

    def count(self, now_s: float, step: int) -> None:
        """The interval ends, after ``step`` steps of the job."""
        steps = step - self._began_step
        if self._began_step < 0 or steps == 0:
            return
        wait_s = self.waited_s / steps
        step_s = max((now_s - self._began_at_s) / steps - wait_s, 0.0)
        self.stepped_total_s += step_s * steps
        self.waited_total_s += self.waited_s
        if self.step_s == self.wait_s == 0.0:
            self.step_s, self.wait_s = step_s, wait_s
            return
        weight = 1.0 - (1.0 - _MEAN_WEIGHT) ** steps
        self.step_s += (step_s - self.step_s) * weight
        self.wait_s += (wait_s - self.wait_s) * weight
