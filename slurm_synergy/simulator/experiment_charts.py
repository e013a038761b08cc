"""The figures of an experiment, from its definition and its results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from slurm_synergy.simulator.charts import (
    BarChart,
    Chart,
    Form,
    LineChart,
    Part,
    Series,
    Unit,
    written,
)
from slurm_synergy.simulator.comparison import cumulative, mean
from slurm_synergy.simulator.experiment import Figure, Settings, matches
from slurm_synergy.simulator.outcome import METRICS, Results, shown

__all__ = ["DISTRIBUTIONS", "draw_figure"]

DISTRIBUTIONS = {
    "jct_h": "completion time, hours",
    "gain": "times sooner than the baseline",
    "speedup": "speed, proportional share = 1",
}
_S_PER_H = 3600.0


def draw_figure(figure: Figure, results: Results) -> Chart | None:
    """The chart; None when there is no result for it yet."""
    cells = [cell for cell in results.outcomes if matches(cell, figure.where)]
    if figure.x == "distribution":
        return _distribution(figure, results, cells)
    values: dict[Any, dict[Any, list[float]]] = {}
    for cell in cells:
        value = results.value(cell, figure.y)
        if value is not None:
            name, at = getattr(cell, figure.series), getattr(cell, figure.x)
            values.setdefault(name, {}).setdefault(at, []).append(value)
    if not values:
        return None
    if all(isinstance(at, int | float) for one in values.values() for at in one):
        return _lines(figure, values)
    return _bars(figure, values)


def _unit(metric: str) -> Unit:
    if "gain" in metric or metric in ("speedup", "round_ms_ratio"):
        return Unit.TIMES
    return Unit.PERCENT if metric.endswith(("_util", "_used")) else Unit.PLAIN


def _told(values: dict[Any, dict[Any, list[float]]], metric: str) -> str:
    """The last value of each line, in words."""
    ends = []
    for name, points in values.items():
        at = list(points)[-1]
        ends.append(f"{name} {written(mean(points[at]), _unit(metric))} at {at}")
    return f"{'; '.join(ends)}."


def _lines(figure: Figure, values: dict[Any, dict[Any, list[float]]]) -> LineChart:
    series = tuple(
        Series(
            name=str(name),
            points=tuple((float(at), mean(found)) for at, found in sorted(points.items())),
            form=Form.MARKED,
        )
        for name, points in values.items()
    )
    return LineChart(
        title=figure.title,
        description=_told(values, figure.y),
        x_label=figure.x.replace("_", " "),
        y_label=METRICS[figure.y][1],
        series=series,
        y_unit=_unit(figure.y),
        guide=1.0 if _unit(figure.y) is Unit.TIMES else None,
    )


def _bars(figure: Figure, values: dict[Any, dict[Any, list[float]]]) -> BarChart:
    places = list(dict.fromkeys(at for one in values.values() for at in one))
    parts = tuple(
        Part(
            name=str(name),
            values=tuple(mean(points[at]) if at in points else math.nan for at in places),
        )
        for name, points in values.items()
    )
    return BarChart(
        title=figure.title,
        description=_told(values, figure.y),
        y_label=METRICS[figure.y][1],
        x_label=figure.x.replace("_", " "),
        categories=tuple(str(shown(at)) for at in places),
        parts=parts,
        y_unit=_unit(figure.y),
    )


def _distribution(figure: Figure, results: Results, cells: Sequence[Settings]) -> LineChart | None:
    series = []
    for cell in cells:
        outcome = results.outcomes[cell]
        if figure.y == "gain":
            values = results.gains(cell)
        elif figure.y == "speedup":
            values = list(outcome.jobs["speedup"])
        else:
            values = [one / _S_PER_H for one in outcome.jobs["jct_s"]]
        points = cumulative(values)
        if points:
            name = str(shown(getattr(cell, figure.series)))
            series.append(Series(name=name, points=points, form=Form.STEP))
    if not series:
        return None
    least = min(one.points[0][0] for one in series)
    most = max(one.points[-1][0] for one in series)
    return LineChart(
        title=figure.title,
        description="Part of the jobs with at most this value.",
        x_label=DISTRIBUTIONS[figure.y],
        y_label="part of the jobs",
        series=tuple(series),
        log_x=least > 0 and most > 20 * least,
        y_unit=Unit.PERCENT,
        y_most=1.0,
    )
