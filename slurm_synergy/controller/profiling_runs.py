"""One sweep that is under way, and what has been tried with a job: the profiler's own notes."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_synergy.config import ProfilingSettings
from slurm_synergy.controller.probes import Measured, Probe
from slurm_synergy.controller.profiling_results import Target
from slurm_synergy.profiler.sweep import Measurement, Sweep

__all__ = ["FEWEST_POINTS", "LEAST_POINT_S", "Past", "Run"]

FEWEST_POINTS = 3
"""A cut sweep is worth keeping when it saw the top, the bottom and the proportional share."""
LEAST_POINT_S = 5.0
"""Shortest time that a point may have, in seconds."""

_WARMUP_STEPS = 5
# Batches that each worker of a loader has ready ahead, as PyTorch and DALI do unless told.
_AHEAD = 2
_ANSWER_MARGIN_S = 20.0


@dataclass(slots=True)
class Run:
    """A sweep; ``number`` is that of the probe that is asked for, to be answered by then.

    ``reading``: the search is over, and what is left is to read some of the data.
    """

    target: Target
    sweep: Sweep
    began_s: float
    deadline_s: float
    cpus: int
    number: int = 0
    answer_by_s: float = 0.0
    reading: bool = False

    def next_point(
        self, number: int, cpus: int, settings: ProfilingSettings, now_s: float
    ) -> Probe:
        """What to measure with ``cpus`` cores per node, in its part of the time that is left."""
        points_left = max(1, settings.points - len(self.sweep.points))
        longest_s = max(LEAST_POINT_S, (self.deadline_s - now_s) / points_left)
        per_task = [max(1, count // self.target.tasks_per_node) for count in (self.cpus, cpus)]
        self.number, self.cpus = number, cpus
        self.answer_by_s = now_s + longest_s + _ANSWER_MARGIN_S
        return Probe(
            number=number,
            # What the workers of before had fetched ahead, and the first batches of those of now.
            warmup_steps=_WARMUP_STEPS + _AHEAD * per_task[0] + per_task[1],
            steps=settings.steps,
            longest_s=longest_s,
        )

    def last_reading(self, number: int, read_s: float, now_s: float) -> Probe:
        """Some of the data, by as many readers as the knee has cores."""
        self.number, self.reading = number, True
        self.answer_by_s = now_s + read_s + _ANSWER_MARGIN_S
        return Probe(
            number=number,
            warmup_steps=0,
            steps=1,
            longest_s=LEAST_POINT_S,  # for launchers that know steps only
            read_s=read_s,
            readers=self.sweep.result().knee_cpus,
        )

    def take_in(self, answers: tuple[Measured, ...]) -> None:
        """A point that all tasks have measured: they advance in step, so the slowest one counts."""
        slowest = min(answers, key=lambda answer: answer.samples_per_s)
        stalled = max(answers, key=lambda answer: answer.wait_share or 0.0)
        nodes = len(self.target.nodes)
        busy = stalled.busy_samples_per_s
        self.sweep = self.sweep.fed(
            Measurement(
                cpus=self.cpus,
                samples_per_s=slowest.samples_per_s / nodes,
                iterations=min(answer.steps for answer in answers),
                wait_share=stalled.wait_share,
                busy_samples_per_s=busy / nodes if busy else None,
            )
        )

    def cut(self, why: str) -> bool:
        """End the sweep early; whether it saw enough to be kept."""
        self.sweep = self.sweep.cut(why)
        seen, span = {point.cpus for point in self.sweep.points}, self.sweep.span
        opening = {span.counts[0], span.counts[-1], span.proportional}
        return len(seen) >= FEWEST_POINTS and seen >= opening


@dataclass(slots=True)
class Past:
    """What has been tried with one incarnation of a job.

    ``cold_epoch`` is the epoch in which it was measured with data that no cache had yet.
    """

    incarnation: int
    tries: int = 0
    not_before_s: float = 0.0
    settled: bool = False
    stale: bool = False
    cold_epoch: int | None = None
