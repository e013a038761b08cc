"""When a training process saves by itself."""

from __future__ import annotations

__all__ = ["SaveSchedule"]

_NEVER_S = float("inf")


class SaveSchedule:
    """Every so many ``steps``, every so many ``seconds``; 0 for never.

    ``at_step`` is the next step at whose end to save, -1 for none: the loop over batches looks at
    it for each of them.
    """

    __slots__ = ("_due_s", "at_step", "seconds", "steps")

    def __init__(self) -> None:
        self.steps, self.seconds = 0, 0.0
        self.at_step, self._due_s = -1, _NEVER_S

    def begin(self, *, step: int, now_s: float) -> None:
        """Count from here: after ``step`` steps of the job."""
        self.at_step = step + self.steps - step % self.steps if self.steps else -1
        self._due_s = now_s + self.seconds if self.seconds else _NEVER_S

    def is_due(self, *, step: int, now_s: float) -> bool:
        """Whether to save now."""
        return step == self.at_step or now_s >= self._due_s
