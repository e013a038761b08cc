"""The charts of a simulation's report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from slurm_synergy.core.model import Node
from slurm_synergy.simulator.charts import (
    BarChart,
    Form,
    LineChart,
    Part,
    Series,
    Unit,
    bar_extent,
)
from slurm_synergy.simulator.comparison import Pair, averaged, cumulative, mean, utilisation
from slurm_synergy.simulator.metrics import JobResult
from slurm_synergy.simulator.study import StudyResult

__all__ = [
    "Case",
    "Scale",
    "completion",
    "gains",
    "held",
    "jobs_waiting",
    "scale_of",
    "speeds",
    "times_by_group",
    "times_overall",
]

_MOST_GROUPS = 12
_EDGES = (0.25, 0.5, 0.8, 0.95, 1.05, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One simulation under the name that it has in the report."""

    name: str
    mechanism: str
    result: StudyResult


@dataclass(frozen=True, slots=True)
class Scale:
    """A unit of time that suits the numbers to be shown."""

    name: str
    short: str
    seconds: float

    def of(self, value_s: float) -> str:
        """Seconds, written in this unit."""
        value = value_s / self.seconds
        digits = 2 if value < 10 else 1 if value < 100 else 0
        return f"{value:,.{digits}f} {self.short}".replace(",", "\u202f")


def scale_of(most_s: float) -> Scale:
    """Seconds to days, whichever gives numbers that are easy to read up to ``most_s``."""
    if most_s < 300:
        return Scale("seconds", "s", 1.0)
    if most_s < 3 * 3600:
        return Scale("minutes", "min", 60.0)
    if most_s < 21 * 86_400:
        return Scale("hours", "h", 3600.0)
    return Scale("days", "d", 86_400.0)


def completion(cases: Sequence[Case], scale: Scale) -> LineChart:
    """The distribution of completion times."""
    series = []
    for case in cases:
        points = cumulative([one.jct_s / scale.seconds for one in case.result.jobs])
        series.append(Series(name=case.name, points=points, form=Form.STEP))
    lows = [one.points[0][0] for one in series if one.points]
    highs = [one.points[-1][0] for one in series if one.points]
    wide = min(lows, default=0.0) > 0 and max(highs) / min(lows) > 20
    halves = ", ".join(
        f"{scale.of(sorted(one.jct_s for one in case.result.jobs)[len(case.result.jobs) // 2])} "
        f"under {case.name}"
        for case in cases
    )
    return LineChart(
        title="Completion times",
        description=f"Part of the jobs that are done within a time. Half are done within {halves}.",
        x_label=f"{scale.name} from submission to completion",
        y_label="part of the jobs",
        series=tuple(series),
        log_x=wide,
        y_unit=Unit.PERCENT,
        y_most=1.0,
    )


def times_overall(cases: Sequence[Case], scale: Scale) -> BarChart:
    """Waiting and running of the average job, a bar for each case."""
    return _times("Waiting and running", [(case.name, case.result.jobs) for case in cases], scale)


def times_by_group(
    cases: Sequence[Case],
    scale: Scale,
    how: str,
    key: Callable[[JobResult], Any],
    shown: Callable[[Any], str],
) -> list[BarChart]:
    """Waiting and running per group, a chart of the same height for each case.

    Nothing when there is one group only; the groups with most jobs when there are many.
    """
    counts: dict[Any, int] = {}
    for one in cases[0].result.jobs:
        counts[key(one)] = counts.get(key(one), 0) + 1
    if len(counts) < 2:
        return []
    keys = sorted(sorted(counts), key=lambda one: -counts[one])[:_MOST_GROUPS]
    charts = []
    for case in cases:
        members: dict[Any, list[JobResult]] = {name: [] for name in sorted(keys)}
        for one in case.result.jobs:
            if key(one) in members:
                members[key(one)].append(one)
        named = [(shown(name), those) for name, those in members.items()]
        charts.append(_times(f"{how}, {case.name}", named, scale))
    most = max(bar_extent(chart)[1] for chart in charts)
    return [replace(chart, y_most=most) for chart in charts]


def _times(
    title: str, members: Sequence[tuple[str, Sequence[JobResult]]], scale: Scale
) -> BarChart:
    waits = [mean([one.queue_s for one in those]) for _, those in members]
    runs = [mean([one.run_s for one in those]) for _, those in members]
    told = "; ".join(
        f"{name}: {scale.of(wait)} waiting, {scale.of(run)} running"
        for (name, _), wait, run in zip(members, waits, runs, strict=True)
    )
    return BarChart(
        title=title,
        description=f"Average per job. {told}." if len(members) <= 4 else "Average per job.",
        y_label=scale.name,
        categories=tuple(name for name, _ in members),
        parts=(
            Part(name="running", values=tuple(one / scale.seconds for one in runs)),
            Part(name="waiting", values=tuple(one / scale.seconds for one in waits)),
        ),
        stacked=True,
    )


def held(cases: Sequence[Case], nodes: Sequence[Node], what: str, title: str) -> LineChart:
    """The part of a resource that leases hold over time."""
    scale = _span(cases)
    series, told = [], []
    for case in cases:
        played = case.result.played
        points = utilisation(played.moments, nodes, played.world.now_s, what)
        shown = tuple((time_s / scale.seconds, part) for time_s, part in points)
        series.append(Series(name=case.name, points=shown))
        told.append(f"{mean([part for _, part in points]):.0%} under {case.name}")
    return LineChart(
        title=title,
        description=f"Part of the pool, over time. On average {', '.join(told)}.",
        x_label=f"{scale.name} since the first submission",
        y_label="part of the pool",
        series=tuple(series),
        y_unit=Unit.PERCENT,
        y_most=1.0,
    )


def jobs_waiting(cases: Sequence[Case]) -> LineChart:
    """How many jobs wait, over time."""
    scale = _span(cases)
    series, told = [], []
    for case in cases:
        played = case.result.played
        times = [one.time_s for one in played.moments]
        levels = [float(one.waiting) for one in played.moments]
        points = averaged(times, levels, played.world.now_s)
        shown = tuple((time_s / scale.seconds, level) for time_s, level in points)
        series.append(Series(name=case.name, points=shown))
        told.append(f"{max(levels, default=0.0):.0f} under {case.name}")
    return LineChart(
        title="Jobs in the queue",
        description=f"Jobs that wait, over time. At most {', '.join(told)}.",
        x_label=f"{scale.name} since the first submission",
        y_label="waiting jobs",
        series=tuple(series),
    )


def _span(cases: Sequence[Case]) -> Scale:
    return scale_of(max(one.result.played.world.now_s - one.result.played.began_s for one in cases))


def gains(found: Sequence[Pair], baseline: str) -> BarChart:
    """How many jobs gain or lose how much."""
    counts = [0] * (len(_EDGES) + 1)
    for one in found:
        counts[sum(one.gain >= edge for edge in _EDGES)] += 1
    names = [
        f"<{_EDGES[0]:g}×",
        *(f"{low:g}–{high:g}" for low, high in pairwise(_EDGES)),
        f"≥{_EDGES[-1]:g}×",
    ]
    used = [index for index, count in enumerate(counts) if count]
    keep = range(min(used), max(used) + 1) if used else range(0)
    middle = found[len(found) // 2].gain if found else 1.0
    return BarChart(
        title="Gain of each job",
        description=(
            f"Jobs by their completion time under {baseline} divided by the one here: above 1 is "
            f"sooner. The median is {middle:.2f}."
        ),
        y_label="jobs",
        x_label="times sooner",
        categories=tuple(names[index] for index in keep),
        parts=(Part(name="jobs", values=tuple(float(counts[index]) for index in keep)),),
    )


def speeds(cases: Sequence[Case]) -> LineChart:
    """Speed while running, relative to the proportional share, jobs in order of it."""
    series, told = [], []
    for case in cases:
        ordered = sorted(one.speedup for one in case.result.jobs)
        points = tuple((part, value) for value, part in cumulative(ordered))
        series.append(Series(name=case.name, points=points))
        told.append(f"{mean(ordered):.2f}× on average under {case.name}")
    return LineChart(
        title="Speed of each job",
        description=f"Jobs from the slowest to the fastest: {', '.join(told)}.",
        x_label="part of the jobs, the slowest first",
        y_label="speed, proportional share = 1×",
        series=tuple(series),
        y_unit=Unit.TIMES,
        guide=1.0,
    )
