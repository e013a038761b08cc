"""Drawing charts as SVG: no library, readable in light and dark, with words for who cannot see.

Inside an HTML page the page's style sheet colours them; a file of its own carries that style.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slurm_synergy.simulator.charts import (
    BarChart,
    Chart,
    Form,
    LineChart,
    Series,
    Unit,
    bar_extent,
    line_extent,
    linear_ticks,
    log_ticks,
    written,
)
from slurm_synergy.simulator.markup import Markup, tag

__all__ = ["CHART_STYLE", "draw", "legend", "svg_file"]

_WIDTH, _HEIGHT = 680, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 12, 56
_COLOURS = 8
_LETTER = 7.5  # about as wide as a letter is
_LONGEST = 16

CHART_STYLE = """
:root { --ink: #1c2733; --dim: #5b6875; --grid: #d9dfe5; --paper: #ffffff;
  --c0: #0f62ac; --c1: #c2540a; --c2: #1a7f4b; --c3: #8a3ffc; --c4: #a2191f; --c5: #6b5900;
  --c6: #00707c; --c7: #9f1853; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e9ee; --dim: #a3b0bd; --grid: #38434e;
  --paper: #14191f; --c0: #6cb2ff; --c1: #ffa45c; --c2: #58d08e; --c3: #c9a5ff; --c4: #ff8389;
  --c5: #e3cc4a; --c6: #3ddbd9; --c7: #ff7eb6; } }
svg.chart { width: 100%; height: auto; font: 13px system-ui, sans-serif; }
svg.chart text { fill: var(--dim); }
svg.chart .tight { font-size: .85em; }
svg.chart .grid { stroke: var(--grid); stroke-width: 1; }
svg.chart .guide { stroke: var(--dim); stroke-width: 1; stroke-dasharray: 2 3; }
svg.chart .line { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
svg.chart .mark { stroke: var(--paper); stroke-width: 1.2; }
.s0 { stroke: var(--c0); } .s1 { stroke: var(--c1); stroke-dasharray: 7 4; }
.s2 { stroke: var(--c2); stroke-dasharray: 2 4; } .s3 { stroke: var(--c3); stroke-dasharray: 9 3 2 3; }
.s4 { stroke: var(--c4); stroke-dasharray: 4 2; } .s5 { stroke: var(--c5); stroke-dasharray: 1 3; }
.s6 { stroke: var(--c6); stroke-dasharray: 12 3; } .s7 { stroke: var(--c7); stroke-dasharray: 7 3 2 3 2 3; }
.f0 { fill: var(--c0); } .f1 { fill: var(--c1); } .f2 { fill: var(--c2); }
.f3 { fill: var(--c3); } .f4 { fill: var(--c4); } .f5 { fill: var(--c5); }
.f6 { fill: var(--c6); } .f7 { fill: var(--c7); }
"""  # noqa: E501


_Scale = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class _Frame:
    """From values to places in the picture."""

    x: _Scale
    y: _Scale


def draw(chart: Chart, *, ident: str) -> Markup:
    """The chart as an ``svg`` element; ``ident`` must be unique in the page."""
    body = _lines(chart) if isinstance(chart, LineChart) else _bars(chart)
    return tag(
        "svg",
        tag("title", chart.title, id=f"{ident}-title"),
        tag("desc", chart.description, id=f"{ident}-desc"),
        *body,
        xmlns="http://www.w3.org/2000/svg",
        class_="chart",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
        aria_labelledby=f"{ident}-title {ident}-desc",
    )


def legend(chart: Chart) -> Markup:
    """The names of the series or parts, each with its colour and stroke."""
    items = []
    for index, name in enumerate(_names(chart)):
        if isinstance(chart, LineChart):
            sample = tag("line", x1=0, y1=6, x2=28, y2=6, class_=f"line s{index % _COLOURS}")
        else:
            sample = tag("rect", x=8, y=0, width=12, height=12, class_=f"f{index % _COLOURS}")
        picture = tag("svg", sample, class_="chart key", viewBox="0 0 28 12", aria_hidden="true")
        items.append(tag("li", picture, " ", name))
    return tag("ul", *items, class_="legend")


def _names(chart: Chart) -> list[str]:
    if isinstance(chart, LineChart):
        return [one.name for one in chart.series]
    return [one.name for one in chart.parts]


def svg_file(chart: Chart) -> str:
    """The chart as a file of its own, with its style, its title and its legend."""
    rows: list[Markup] = [tag("text", chart.title, x=_LEFT, y=18, style="font-weight: 600")]
    at = _LEFT
    for index, name in enumerate(_names(chart)):
        colour = index % _COLOURS
        sample = (
            tag("line", x1=at, y1=36, x2=at + 26, y2=36, class_=f"line s{colour}")
            if isinstance(chart, LineChart)
            else tag("rect", x=at + 7, y=30, width=12, height=12, class_=f"f{colour}")
        )
        rows += [sample, tag("text", name, x=at + 32, y=40)]
        at += 48 + 8 * len(name)
    body = _lines(chart) if isinstance(chart, LineChart) else _bars(chart)
    background = tag("rect", width=_WIDTH, height=_HEIGHT + 48, style="fill: var(--paper)")
    drawn = tag(
        "svg",
        tag("title", chart.title),
        tag("desc", chart.description),
        tag("style", Markup(CHART_STYLE)),
        background,
        *rows,
        tag("g", *body, transform="translate(0 48)"),
        xmlns="http://www.w3.org/2000/svg",
        class_="chart",
        viewBox=f"0 0 {_WIDTH} {_HEIGHT + 48}",
        width=_WIDTH,
        height=_HEIGHT + 48,
    )
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{drawn}\n'


# axes ------------------------------------------------------------------------------------------


def _scale(low: float, high: float, start: float, end: float) -> _Scale:
    span = high - low or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _log_scale(low: float, high: float, start: float, end: float) -> _Scale:
    linear = _scale(math.log10(low), math.log10(high), start, end)
    return lambda value: linear(math.log10(max(value, low)))


def _y_axis(ticks: Sequence[float], label: str, unit: Unit) -> tuple[_Scale, list[Markup]]:
    scale = _scale(ticks[0], ticks[-1], _HEIGHT - _BOTTOM, _TOP)
    drawn = []
    for tick in ticks:
        at = round(scale(tick), 1)
        drawn += [
            tag("line", x1=_LEFT, y1=at, x2=_WIDTH - _RIGHT, y2=at, class_="grid"),
            tag("text", written(tick, unit), x=_LEFT - 8, y=at + 4, text_anchor="end"),
        ]
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    turned = f"translate(14 {middle:g}) rotate(-90)"
    drawn.append(tag("text", label, transform=turned, text_anchor="middle"))
    return scale, drawn


def _x_label(label: str) -> Markup:
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return tag("text", label, x=middle, y=_HEIGHT - 6, text_anchor="middle")


def _x_axis(chart: LineChart, low: float, high: float) -> tuple[_Scale, list[Markup]]:
    if chart.log_x and high > low:
        ticks: Sequence[float] = log_ticks(low, high)
        scale = _log_scale(low, high, _LEFT, _WIDTH - _RIGHT)
    else:
        ticks = linear_ticks(low, high, 9)
        low, high = min(low, ticks[0]), max(high, ticks[-1])
        scale = _scale(low, high, _LEFT, _WIDTH - _RIGHT)
    drawn = [_x_label(chart.x_label)]
    for tick in ticks:
        at = round(scale(tick), 1)
        drawn += [
            tag("line", x1=at, y1=_TOP, x2=at, y2=_HEIGHT - _BOTTOM, class_="grid"),
            tag("text", written(tick), x=at, y=_HEIGHT - _BOTTOM + 18, text_anchor="middle"),
        ]
    return scale, drawn


# lines -----------------------------------------------------------------------------------------


def _lines(chart: LineChart) -> list[Markup]:
    (x_low, x_high), (y_low, y_high) = line_extent(chart)
    y, drawn = _y_axis(linear_ticks(y_low, y_high), chart.y_label, chart.y_unit)
    x, across = _x_axis(chart, x_low, x_high)
    drawn += across
    frame = _Frame(x, y)
    if chart.guide is not None:
        at = round(y(chart.guide), 1)
        drawn.append(tag("line", x1=_LEFT, y1=at, x2=_WIDTH - _RIGHT, y2=at, class_="guide"))
    for index, one in enumerate(chart.series):
        drawn += _series(one, index % _COLOURS, frame, chart)
    return drawn


def _series(one: Series, colour: int, frame: _Frame, chart: LineChart) -> list[Markup]:
    points = [(round(frame.x(x), 1), round(frame.y(y), 1)) for x, y in one.points]
    if not points:
        return []
    words = [f"M{points[0][0]:g} {points[0][1]:g}"]
    for x, y in points[1:]:
        words.append(f"H{x:g}V{y:g}" if one.form is Form.STEP else f"L{x:g} {y:g}")
    line = tag("path", tag("title", one.name), d="".join(words), class_=f"line s{colour}")
    if one.form is not Form.MARKED:
        return [line]
    marks = [
        tag(
            "circle",
            tag("title", f"{one.name}: {written(x)}, {written(y, chart.y_unit)}"),
            cx=at_x,
            cy=at_y,
            r=4,
            class_=f"mark f{colour}",
        )
        for (x, y), (at_x, at_y) in zip(one.points, points, strict=True)
    ]
    return [line, *marks]


# bars ------------------------------------------------------------------------------------------


def _bars(chart: BarChart) -> list[Markup]:
    low, high = bar_extent(chart)
    y, drawn = _y_axis(linear_ticks(low, high), chart.y_label, chart.y_unit)
    if chart.x_label:
        drawn.append(_x_label(chart.x_label))
    room = (_WIDTH - _LEFT - _RIGHT) / max(len(chart.categories), 1)
    crowded = max(map(len, chart.categories), default=0) * _LETTER > room
    for index, category in enumerate(chart.categories):
        left = _LEFT + index * room
        drawn.append(_category(category, left + room / 2, crowded))
        drawn += _stack(chart, index, left, room, y) if chart.stacked else []
        drawn += [] if chart.stacked else _group(chart, index, left, room, y)
    return drawn


def _category(name: str, at: float, crowded: bool) -> Markup:
    bottom = _HEIGHT - _BOTTOM + 18
    if not crowded:
        return tag("text", name, x=round(at, 1), y=bottom, text_anchor="middle")
    short = name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"
    turned = f"translate({at + 4:.1f} {bottom - 6:g}) rotate(-24)"
    return tag("text", short, transform=turned, text_anchor="end", class_="tight")


def _stack(chart: BarChart, index: int, left: float, room: float, y: _Scale) -> list[Markup]:
    drawn, base = [], 0.0
    width = min(room * 0.7, 90.0)
    for number, part in enumerate(chart.parts):
        value = part.values[index]
        name = f"{chart.categories[index]}, {part.name}: {written(value, chart.y_unit)}"
        drawn.append(_bar(name, number, left + (room - width) / 2, width, y(base), y(base + value)))
        base += value
    return drawn


def _group(chart: BarChart, index: int, left: float, room: float, y: _Scale) -> list[Markup]:
    width = min(room * 0.8 / max(len(chart.parts), 1), 60.0)
    start = left + (room - width * len(chart.parts)) / 2
    drawn = []
    for number, part in enumerate(chart.parts):
        value = part.values[index]
        if not math.isfinite(value):
            continue  # there is no such number
        name = f"{chart.categories[index]}, {part.name}: {written(value, chart.y_unit)}"
        drawn.append(_bar(name, number, start + number * width, width, y(0.0), y(value)))
    return drawn


def _bar(name: str, number: int, x: float, width: float, base: float, top: float) -> Markup:
    return tag(
        "rect",
        tag("title", name),
        x=round(x, 1),
        y=round(min(base, top), 1),
        width=round(max(width - 1, 1), 1),
        height=round(abs(base - top), 1),
        class_=f"f{number % _COLOURS}",
    )
