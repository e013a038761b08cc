"""The figures of an experiment, from its definition and its results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
from slurm_synergy.simulator.experiment_groups import names, telling
from slurm_synergy.simulator.metrics import percentile
from slurm_synergy.simulator.outcome import METRICS, Results, plain, varying

__all__ = ["DISTRIBUTIONS", "draw_distribution", "draw_figure", "unit_of"]

DISTRIBUTIONS = {
    "jct_h": "completion time, hours",
    "gain": "times sooner than the baseline",
    "speedup": "speed, proportional share = 1",
}
_S_PER_H = 3600.0


def draw_figure(figure: Figure, results: Results) -> Chart | None:
    """The chart; None when there is no result for it yet."""
    cells = [cell for cell in results.outcomes if matches(cell, figure.where)]
    named = _names(figure, cells)
    if figure.x == "distribution":
        return draw_distribution(results, named, figure.y, figure.title)
    values: dict[Any, dict[Any, list[float]]] = {}
    for cell in cells:
        value = results.value(cell, figure.y)
        if value is not None:
            at = getattr(cell, figure.x)
            values.setdefault(named[cell], {}).setdefault(at, []).append(value)
    if not values:
        return None
    if all(isinstance(at, int | float) for one in values.values() for at in one):
        return _lines(figure, values)
    return _bars(figure, values)


def _names(figure: Figure, cells: Sequence[Settings]) -> dict[Settings, str]:
    """Which line or bar a cell belongs to.

    That of its ``series``; where cells of one series that stand at the same place differ in more
    than their seed, they are kept apart by that.
    """
    together: dict[Any, list[Settings]] = {}
    for cell in cells:
        at = None if figure.x == "distribution" else getattr(cell, figure.x)
        together.setdefault((getattr(cell, figure.series), at), []).append(cell)
    apart = {key for several in together.values() for key in varying(several)}
    keys = [key for key in Settings.model_fields if key in apart - {"seed", figure.series}]
    keep = [figure.series] if figure.x == "distribution" else [figure.series, figure.x]
    told = telling(cells, [*keep, *keys], keep)
    return names(cells, keys=[figure.series, *told[len(keep) :]], always=[figure.series])


def unit_of(metric: str) -> Unit:
    """How a metric is written."""
    if "gain" in metric or metric in ("speedup", "round_ms_ratio"):
        return Unit.TIMES
    return Unit.PERCENT if metric.endswith(("_util", "_used")) else Unit.PLAIN


def _told(values: dict[Any, dict[Any, list[float]]], metric: str) -> str:
    """The last value of each line, in words."""
    ends = []
    for name, points in values.items():
        at = list(points)[-1]
        ends.append(f"{name} {written(mean(points[at]), unit_of(metric))} at {at}")
    return f"{'; '.join(ends)}."


def _lines(figure: Figure, values: dict[Any, dict[Any, list[float]]]) -> LineChart:
    series = tuple(
        Series(
            name=name,
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
        y_unit=unit_of(figure.y),
        guide=1.0 if unit_of(figure.y) is Unit.TIMES else None,
    )


def _bars(figure: Figure, values: dict[Any, dict[Any, list[float]]]) -> BarChart:
    places = list(dict.fromkeys(at for one in values.values() for at in one))
    parts = tuple(
        Part(
            name=name,
            values=tuple(mean(points[at]) if at in points else math.nan for at in places),
        )
        for name, points in values.items()
    )
    return BarChart(
        title=figure.title,
        description=_told(values, figure.y),
        y_label=METRICS[figure.y][1],
        x_label=figure.x.replace("_", " "),
        categories=tuple(plain(at) for at in places),
        parts=parts,
        y_unit=unit_of(figure.y),
    )


def draw_distribution(
    results: Results, named: Mapping[Settings, str], what: str, title: str
) -> LineChart | None:
    """How ``what`` is distributed over the jobs, a line for each name; None without results.

    Jobs of cells with the same name (other seeds) are put together.
    """
    found: dict[str, list[float]] = {}
    for cell, name in named.items():
        outcome = results.outcomes[cell]
        if what == "gain":
            values = results.gains(cell)
        elif what == "speedup":
            values = list(outcome.jobs["speedup"])
        else:
            values = [one / _S_PER_H for one in outcome.jobs["jct_s"]]
        found.setdefault(name, []).extend(values)
    series = [
        Series(name=name, points=cumulative(values), form=Form.STEP)
        for name, values in found.items()
        if values
    ]
    if not series:
        return None
    least = min(one.points[0][0] for one in series)
    most = max(one.points[-1][0] for one in series)
    return LineChart(
        title=title,
        description=f"Part of the jobs with at most this value. {_middles(found, what)}",
        x_label=DISTRIBUTIONS[what],
        y_label="part of the jobs",
        series=tuple(series),
        log_x=least > 0 and most > 20 * least,
        y_unit=Unit.PERCENT,
        y_most=1.0,
    )


def _middles(found: Mapping[str, Sequence[float]], what: str) -> str:
    unit = Unit.PLAIN if what == "jct_h" else Unit.TIMES
    told = [
        f"{written(percentile(values, 0.5), unit)} ({name})"
        for name, values in found.items()
        if values
    ]
    return f"Half of the jobs have at most {', '.join(told)}."
