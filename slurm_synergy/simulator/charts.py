"""Charts as values: what is drawn, not how. ``svg`` and ``raster`` draw them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = [
    "BarChart",
    "Chart",
    "Form",
    "LineChart",
    "Part",
    "Series",
    "Unit",
    "bar_extent",
    "line_extent",
    "linear_ticks",
    "log_ticks",
    "written",
]


class Form(Enum):
    """How the points of a series are connected."""

    LINE = "line"
    STEP = "step"
    MARKED = "marked"  # a line with a mark at each point


class Unit(Enum):
    """How numbers along an axis are written."""

    PLAIN = ""
    PERCENT = "%"
    TIMES = "×"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart."""

    name: str
    points: tuple[tuple[float, float], ...]
    form: Form = Form.LINE


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Series over a common axis. ``description`` says in words what there is to see.

    ``guide`` is a value of y that is marked by a thin line, such as "no change".
    """

    title: str
    description: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_x: bool = False
    y_unit: Unit = Unit.PLAIN
    y_most: float | None = None
    guide: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of every bar, or one bar of every group."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    """Bars by category: the parts on top of each other, or side by side."""

    title: str
    description: str
    y_label: str
    categories: tuple[str, ...]
    parts: tuple[Part, ...]
    stacked: bool = False
    y_unit: Unit = Unit.PLAIN
    y_most: float | None = None
    x_label: str = ""


Chart = LineChart | BarChart


def linear_ticks(low: float, high: float, most: int = 6) -> tuple[float, ...]:
    """Round numbers from at most ``low`` to at least ``high``, about ``most`` of them."""
    span = high - low if high > low else abs(high) or 1.0
    raw = span / max(most - 1, 1)
    scale = 10.0 ** math.floor(math.log10(raw))
    step = scale * next(one for one in (1.0, 2.0, 2.5, 5.0, 10.0) if one * scale >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil((low + span) / step - 1e-9)
    return tuple(round(index * step, 12) for index in range(first, last + 1))


def log_ticks(low: float, high: float) -> tuple[float, ...]:
    """1, 2 and 5 of every decade between the positive ``low`` and ``high``; powers if many."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1.0, 2.0, 5.0) if last - first <= 3 else (1.0,)
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    return tuple(tick for tick in ticks if low * 0.999 <= tick <= high * 1.001)


def written(value: float, unit: Unit = Unit.PLAIN) -> str:
    """A number as people read it: three digits, thousands separated, its unit behind it."""
    if math.isnan(value):
        return "–"
    if unit is Unit.PERCENT:
        return f"{value * 100:.3g} %"
    if value != 0 and (abs(value) < 0.001 or abs(value) >= 1e9):
        text = f"{value:.2g}"
    elif abs(value) >= 100:
        text = f"{value:,.0f}".replace(",", "\u202f")
    else:
        text = f"{value:.3g}"
    return f"{text}{unit.value}"


def extent(values: Iterable[float]) -> tuple[float, float]:
    """The least and the largest; (0, 1) of nothing."""
    found = [value for value in values if math.isfinite(value)]
    return (min(found), max(found)) if found else (0.0, 1.0)


def line_extent(chart: LineChart) -> tuple[tuple[float, float], tuple[float, float]]:
    """What the axes of a line chart have to cover: (x from, x to), (y from, y to)."""
    xs = extent(x for one in chart.series for x, _ in one.points if x > 0 or not chart.log_x)
    tops = [chart.guide] if chart.guide is not None else []
    low, high = extent([*(y for one in chart.series for _, y in one.points), *tops])
    return xs, (min(low, 0.0), chart.y_most if chart.y_most is not None else high)


def bar_extent(chart: BarChart) -> tuple[float, float]:
    """What the y axis of a bar chart has to cover."""
    columns: Sequence[tuple[float, ...]] = [part.values for part in chart.parts]
    heights = (
        [sum(values) for values in zip(*columns, strict=True)]
        if chart.stacked
        else [value for values in columns for value in values]
    )
    low, high = extent(heights)
    return min(low, 0.0), max(high, 0.0) if chart.y_most is None else chart.y_most
