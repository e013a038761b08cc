"""Charts as PNG, by matplotlib (the extra ``report``): for slides and papers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from slurm_synergy.errors import ConfigError
from slurm_synergy.simulator.charts import Chart, Form, LineChart, Unit, written

__all__ = ["can_write_png", "write_png"]

_STROKES = ("-", "--", ":", "-.", (0, (4, 1)), (0, (1, 2)), (0, (8, 2)), (0, (6, 2, 1, 2, 1, 2)))
_COLOURS = (
    *("#0f62ac", "#c2540a", "#1a7f4b", "#8a3ffc"),
    *("#a2191f", "#6b5900", "#00707c", "#9f1853"),
)


def write_png(chart: Chart, path: Path) -> None:
    """Draw ``chart`` into ``path``. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as err:
        raise ConfigError(
            "PNG needs the package matplotlib, which is not installed",
            file=str(path),
            remedy="pip install 'slurm-synergy[report]', or use the SVG files",
        ) from err
    figure = Figure(figsize=(6.8, 4.0), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if isinstance(chart, LineChart):
        _lines(chart, axes)
    else:
        _bars(chart, axes)
    axes.set_title(chart.title)
    axes.set_ylabel(chart.y_label)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(frameon=False)
    if chart.y_unit is not Unit.PLAIN:
        axes.yaxis.set_major_formatter(lambda value, _: written(value, chart.y_unit))
    figure.savefig(path)


def _lines(chart: LineChart, axes: Any) -> None:
    for index, one in enumerate(chart.series):
        axes.plot(
            [x for x, _ in one.points],
            [y for _, y in one.points],
            label=one.name,
            color=_COLOURS[index % len(_COLOURS)],
            linestyle=_STROKES[index % len(_STROKES)],
            drawstyle="steps-post" if one.form is Form.STEP else "default",
            marker="o" if one.form is Form.MARKED else None,
        )
    axes.set_xlabel(chart.x_label)
    axes.set_xscale("log" if chart.log_x else "linear")
    axes.set_ylim(bottom=0, top=chart.y_most)
    if chart.guide is not None:
        axes.axhline(chart.guide, color="#888888", linewidth=1, linestyle=":")


def _bars(chart: Any, axes: Any) -> None:
    count = 1 if chart.stacked else max(len(chart.parts), 1)
    places = range(len(chart.categories))
    base = [0.0] * len(chart.categories)
    for index, part in enumerate(chart.parts):
        offset = 0.0 if chart.stacked else (index - (count - 1) / 2) * 0.8 / count
        axes.bar(
            [place + offset for place in places],
            part.values,
            0.8 / count,
            bottom=base if chart.stacked else None,
            label=part.name,
            color=_COLOURS[index % len(_COLOURS)],
        )
        base = [low + value for low, value in zip(base, part.values, strict=True)]
    axes.set_xticks(list(places), chart.categories)
    axes.set_xlabel(chart.x_label)


def can_write_png() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None
