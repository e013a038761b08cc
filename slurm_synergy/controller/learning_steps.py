"""Step times of elastic jobs that tell nothing but their ordinary progress: pure.

Such a job does not change its total batch, so its steps on more GPUs have fewer samples each. How
much of a step is synchronisation is not known; it counts as part of the pass, and the model of the
job then says how whole steps get shorter with their samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_synergy.controller.learning_points import StepTime, TrainingReport

__all__ = ["Progress", "StepWindow"]

_SHORTEST_S = 30.0
_FEWEST_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the first rank of an incarnation has told: totals of the job, and seconds in steps.

    ``stepped_s`` is without waiting for data, since its process began.
    """

    incarnation: int = 0
    step: int = 0
    samples: int = 0
    stepped_s: float = 0.0


class StepWindow:
    """Means over half a minute of a job's progress, one after the other; not thread-safe."""

    __slots__ = ("_mark",)

    def __init__(self) -> None:
        self._mark: tuple[Progress, float] | None = None

    def note(self, now: Progress, now_s: float, replicas: int) -> TrainingReport | None:
        """The report that follows from the progress so far; None until there is a new one.

        What was before the first step that is told of, and so the start of the program, is left
        out.
        """
        if self._mark is None or not _continues(self._mark[0], now):
            self._mark = (now, now_s) if now.step else None
            return None
        before, since_s = self._mark
        steps = now.step - before.step
        if now_s - since_s < _SHORTEST_S or steps < _FEWEST_STEPS:
            return None
        self._mark = (now, now_s)
        took_s, samples = now.stepped_s - before.stepped_s, now.samples - before.samples
        local = round(samples / steps / replicas)
        if took_s <= 0 or local < 1:
            return None
        one = StepTime(
            local_batch=local,
            replicas=replicas,
            steps=steps,
            gradient_s=took_s / steps,
            step_s=took_s / steps,
            whole=True,
        )
        return TrainingReport(times=(one,), local_most=local)


def _continues(before: Progress, now: Progress) -> bool:
    """Whether it is the same process, going on."""
    return (
        before.incarnation == now.incarnation
        and before.step <= now.step
        and before.samples <= now.samples
        and before.stepped_s <= now.stepped_s
    )
