"""What elastic jobs tell of their steps, checked, gathered, and turned into a belief: pure.

A report says how long passes and steps took with some batch; on which GPUs that was, our own lease
says. What cannot be true is refused whole, with the reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slurm_synergy.core.goodput import GradientStatistics, ThroughputModel
from slurm_synergy.core.model import Placement
from slurm_synergy.core.scaling import Scaling, TypeSpeed
from slurm_synergy.errors import ModelError
from slurm_synergy.profiler.fit import StepTimes

__all__ = [
    "MOST_TIMES",
    "Learned",
    "Point",
    "StepTime",
    "TrainingReport",
    "believed",
    "overlaid",
    "taken_in",
    "times_of",
]

MOST_TIMES = 16
"""Step times that one report may have."""

_MOST_POINTS = 200
_MOST_TYPES = 32
_LARGEST_BATCH = 2**31
_MOST_PASSES = 4096
_SHORTEST_S, _LONGEST_S = 1e-6, 3600.0
_MOST_RATE = 1e9  # samples/s of a whole job
_MOST_SQUARE = 1e30
_MOST_SAMPLES = 1e18
# A mean over so many steps is moved by new ones: a program changes while it runs.
_MOST_WEIGHT = 500
# Where the last pass is measured together with its synchronisation, noise may make it the shorter.
_LEAST_STEP = 0.5
# Statistics that differ less are the same: a new belief makes the round think anew.
_SAME_STATISTICS = 0.05
# A total that is shared out in whole samples is not quite the same on every number of GPUs.
_SAME_BATCH = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Means over ``steps`` optimiser steps, as a job tells them; nothing of it is checked yet.

    ``gradient_s`` is a pass without synchronisation, ``step_s`` the last pass with it, both without
    waiting for data. ``accumulation`` counts the passes before the last. ``whole``: how much of it
    was synchronisation is not known.
    """

    local_batch: int
    replicas: int
    steps: int
    gradient_s: float
    step_s: float
    accumulation: int = 0
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """What a job tells of its training; nothing of it is checked yet.

    ``square`` and ``variance`` are of the gradient at ``initial_batch`` samples, both 0 where not
    known. ``local_most`` is the most samples of one replica in a pass that its GPU has room for, 0
    where not told. ``progress`` is in samples at the initial batch.
    """

    times: tuple[StepTime, ...] = ()
    square: float = 0.0
    variance: float = 0.0
    initial_batch: int = 0
    local_most: int = 0
    progress: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What is known of one way of running: means over ``steps`` steps (times as in StepTime)."""

    gpu_type: str
    nodes: int
    gpus: int
    replicas: int
    local_batch: int
    accumulation: int
    steps: int
    gradient_s: float
    step_s: float
    whole: bool = False

    @property
    def place(self) -> tuple[str, int, int, int, int, int, bool]:
        """What makes it another point."""
        shape = (self.gpu_type, self.nodes, self.gpus)
        return (*shape, self.replicas, self.local_batch, self.accumulation, self.whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What was told of a job, or of all jobs with a profile key, so far.

    ``points`` are in the order in which they were told last. ``explored`` is by GPU type the most
    GPUs of it on which something was measured, ``local_most`` the most samples of one replica that
    were told to have room on it. ``statistics`` hold at ``initial_batch``.
    """

    points: tuple[Point, ...] = ()
    explored: Mapping[str, int] = field(default_factory=dict)
    local_most: Mapping[str, int] = field(default_factory=dict)
    statistics: GradientStatistics | None = None
    initial_batch: int = 0
    progress: float = 0.0


def taken_in(learned: Learned, report: TrainingReport, placement: Placement) -> Learned:
    """``learned`` with a report of a job that holds ``placement``.

    Raises ModelError, which says what cannot be true, for a report with anything of that kind.
    """
    if len(report.times) > MOST_TIMES:
        raise ModelError(f"{len(report.times)} step times in one report, more than {MOST_TIMES}")
    kind, gpus = placement.gpu_type, placement.gpus
    if kind not in learned.explored and len(learned.explored) >= _MOST_TYPES:
        raise ModelError(f"more than {_MOST_TYPES} GPU types")
    points = {point.place: point for point in learned.points}
    for told in report.times:
        point = _point(told, placement)
        points[point.place] = _mean(points.pop(point.place, None), point)
    _check_whole(report.local_most, "local_most", 0, _LARGEST_BATCH)
    _check_number(report.progress, "progress", 0.0, _MOST_SAMPLES)
    explored, local_most = dict(learned.explored), dict(learned.local_most)
    if report.times:
        explored[kind] = max(explored.get(kind, 0), gpus)
    if report.local_most:
        local_most[kind] = report.local_most
    return replace(
        _with_statistics(learned, report),
        points=_bounded(points.values()),
        explored=explored,
        local_most=local_most,
        progress=report.progress or learned.progress,
    )


def overlaid(own: Learned, others: Learned | None) -> Learned:
    """What a job's own word and that of all jobs with its key say together; its own goes first."""
    if others is None:
        return own
    points = {point.place: point for point in (*others.points, *own.points)}
    ours = own.statistics is not None
    return Learned(
        points=_bounded(points.values()),
        explored=_larger(own.explored, others.explored),
        local_most={**others.local_most, **own.local_most},
        statistics=own.statistics if ours else others.statistics,
        initial_batch=own.initial_batch if ours else others.initial_batch,
        progress=own.progress,
    )


def times_of(points: Sequence[Point]) -> StepTimes:
    """Points of one GPU type as the columns that a model is fitted to.

    Of whole steps the synchronisation is part of the pass, as if each copy were alone: where the
    total batch never changes, a number of copies goes with each number of samples anyway.
    """
    return StepTimes(
        nodes=np.array([1 if one.whole else one.nodes for one in points]),
        replicas=np.array([1 if one.whole else one.replicas for one in points]),
        local_batch=np.array([one.local_batch for one in points]),
        gradient_s=np.array([one.gradient_s for one in points]),
        step_s=np.array([one.step_s for one in points]),
    )


def believed(
    learned: Learned,
    fit: Callable[[tuple[Point, ...]], ThroughputModel],
    before: Scaling | None = None,
    *,
    initial_batch: int = 0,
    steady: bool = False,
) -> Scaling | None:
    """The belief that follows, with a model of each GPU type by ``fit``; None without any points.

    Its statistics are for ``initial_batch`` samples (0: for those that they were told for);
    ``steady``: the job's total batch never changes, so that it is known from any point. The belief
    equals ``before`` where that says the same, so that one can tell whether something is new.
    """
    by_type: dict[str, list[Point]] = {}
    for point in learned.points:
        by_type.setdefault(point.gpu_type, []).append(point)
    if not by_type:
        return None
    speeds = {}
    for kind, all_points in sorted(by_type.items()):
        points = [point for point in all_points if not point.whole] or all_points
        ran = max(point.local_batch for point in points)
        speeds[kind] = TypeSpeed(
            model=fit(tuple(sorted(points, key=lambda point: point.place))),
            # More was never seen to have room: a job must not die of its scheduler's hope.
            local_most=max(ran, learned.local_most.get(kind, 0)),
            explored_gpus=learned.explored.get(kind, 0),
        )
    statistics = _statistics_at(learned, initial_batch)
    if before is not None and _alike(before.statistics, statistics):
        statistics = before.statistics
    own = _own_batch(learned.points[-1], before) if steady else 0
    return Scaling(speeds=speeds, statistics=statistics, own_batch=own)


def _point(told: StepTime, placement: Placement) -> Point:
    """The step time as a point on that placement. Raises ModelError."""
    gpus = placement.gpus
    _check_whole(told.local_batch, "local batch", 1, _LARGEST_BATCH)
    _check_whole(told.accumulation, "accumulation", 0, _MOST_PASSES)
    _check_whole(told.replicas, "replicas", 1, gpus)
    _check_whole(told.steps, "steps", 1, 2**53)
    _check_number(told.gradient_s, "seconds of a pass", _SHORTEST_S, _LONGEST_S)
    _check_number(told.step_s, "seconds of the last pass", _SHORTEST_S, _LONGEST_S)
    if gpus % told.replicas:
        raise ModelError(f"{told.replicas} replicas on {gpus} GPUs")
    if told.step_s < _LEAST_STEP * told.gradient_s:
        raise ModelError(
            f"a last pass of {told.step_s:g} s with synchronisation, but {told.gradient_s:g} s "
            "without"
        )
    took_s = told.accumulation * told.gradient_s + told.step_s
    rate = told.replicas * told.local_batch * (told.accumulation + 1) / took_s
    if rate > _MOST_RATE:
        raise ModelError(f"{rate:.3g} samples/s, more than {_MOST_RATE:g}")
    return Point(
        gpu_type=placement.gpu_type,
        nodes=len(placement.shares),
        gpus=gpus,
        replicas=told.replicas,
        local_batch=told.local_batch,
        accumulation=told.accumulation,
        steps=min(told.steps, _MOST_WEIGHT),
        gradient_s=min(told.gradient_s, told.step_s),
        step_s=told.step_s,
        whole=told.whole,
    )


def _mean(before: Point | None, now: Point) -> Point:
    """Both together, each as often as it was seen."""
    if before is None:
        return now
    steps = before.steps + now.steps
    part = now.steps / steps
    return replace(
        now,
        steps=min(steps, _MOST_WEIGHT),
        gradient_s=before.gradient_s + part * (now.gradient_s - before.gradient_s),
        step_s=before.step_s + part * (now.step_s - before.step_s),
    )


def _bounded(points: Iterable[Point]) -> tuple[Point, ...]:
    """The newest points, but from where most of them are: another shape is worth more."""
    kept = list(points)
    while len(kept) > _MOST_POINTS:
        shapes: dict[tuple[str, int, int], list[Point]] = {}
        for point in kept:
            shapes.setdefault((point.gpu_type, point.nodes, point.gpus), []).append(point)
        crowd = max(shapes.values(), key=len)
        kept.remove(crowd[0])
    return tuple(kept)


def _with_statistics(learned: Learned, report: TrainingReport) -> Learned:
    """With the statistics of a report, if it has any. Raises ModelError."""
    square, variance = report.square, report.variance
    _check_number(square, "squared norm of the gradient", 0.0, _MOST_SQUARE)
    _check_number(variance, "variance of the gradient", 0.0, _MOST_SQUARE)
    _check_whole(report.initial_batch, "initial batch", 0, _LARGEST_BATCH)
    if square + variance <= 0:
        return learned
    if not report.initial_batch:
        raise ModelError("gradient statistics without the initial batch that they are for")
    return replace(
        learned,
        statistics=GradientStatistics(square=square, variance=variance),
        initial_batch=report.initial_batch,
    )


def _own_batch(newest: Point, before: Scaling | None) -> int:
    total = newest.replicas * newest.local_batch * (newest.accumulation + 1)
    if before is not None and abs(total - before.own_batch) <= _SAME_BATCH * total:
        return before.own_batch
    return total


def _statistics_at(learned: Learned, initial_batch: int) -> GradientStatistics:
    """Those that were told, for a batch of that many samples: its variance is inverse to its size.

    Without any, every sample of a larger batch than the initial one is taken to be worth nothing.
    """
    told = learned.statistics
    if told is None or not initial_batch:
        return told or GradientStatistics()
    return replace(told, variance=told.variance * learned.initial_batch / initial_batch)


def _alike(before: GradientStatistics, now: GradientStatistics) -> bool:
    """Whether they say nearly the same; only the ratio of both numbers matters."""
    first, second = before.variance * now.square, now.variance * before.square
    return abs(first - second) <= _SAME_STATISTICS * max(first, second)


def _larger(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {
        kind: max(first.get(kind, 0), second.get(kind, 0)) for kind in sorted({*first, *second})
    }


def _check_whole(value: int, what: str, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ModelError(f"{what} {value} is not within {least} to {most}")


def _check_number(value: float, what: str, least: float, most: float) -> None:
    if not (math.isfinite(value) and least <= value <= most):
        raise ModelError(f"{what}: {value:g} is not within {least:g} to {most:g}")
