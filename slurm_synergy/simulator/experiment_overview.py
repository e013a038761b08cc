"""What every experiment's page shows of itself: schedulers side by side, and beside papers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slurm_synergy.simulator.charts import BarChart, Chart, Part, written
from slurm_synergy.simulator.experiment import Settings
from slurm_synergy.simulator.experiment_charts import draw_distribution, draw_figure, unit_of
from slurm_synergy.simulator.experiment_groups import (
    WORKLOAD,
    average,
    groups,
    names,
    published,
    telling,
)
from slurm_synergy.simulator.experiment_policies import means_something
from slurm_synergy.simulator.markup import Markup, tag
from slurm_synergy.simulator.outcome import METRICS, Results, Verdict, label, plain, varying
from slurm_synergy.simulator.page import data_table

__all__ = ["charts_of", "side_by_side", "verdict_in_words"]

_MOST_BARS = 12
_MOST_LINES = 8
_MOST_SPREADS = 4


def charts_of(results: Results, verdicts: Sequence[Verdict]) -> list[Chart]:
    """All figures: ours beside published numbers, those of the definition, and distributions."""
    drawn = [draw_figure(one, results) for one in results.definition.figures]
    found: list[Chart] = [*_beside_published(verdicts), *(one for one in drawn if one is not None)]
    if not any(one.x == "distribution" for one in results.definition.figures):
        found += _spreads(results)
    return found


def verdict_in_words(verdicts: Sequence[Verdict]) -> str:
    """How many published numbers ours agree with; empty when there are none."""
    if not verdicts:
        return ""
    judged = [one for one in verdicts if one.met is not None]
    met = sum(bool(one.met) for one in judged)
    text = f"Of {len(verdicts)} published numbers {len(judged)} could be compared"
    if judged:
        text += f": {met} are as expected, {len(judged) - met} are not"
    return f"{text}. The table says which, with the ratio and what is known of the reason."


# beside papers ---------------------------------------------------------------------------------


def _beside_published(verdicts: Sequence[Verdict]) -> Iterator[BarChart]:
    """A chart for each metric with several published numbers."""
    by_metric: dict[str, list[Verdict]] = {}
    for one in verdicts:
        if one.ours is not None:
            by_metric.setdefault(one.expected.metric, []).append(one)
    for metric, found in by_metric.items():
        if 2 <= len(found) <= _MOST_BARS:
            yield _bars(metric, found)


def _bars(metric: str, found: Sequence[Verdict]) -> BarChart:
    places = _places(found)
    unit = unit_of(metric)
    told = [
        f"{place}: {written(one.ours, unit)} for {written(one.expected.value, unit)}"
        for place, one in zip(places, found, strict=True)
        if one.ours is not None
    ]
    name = METRICS[metric][1]
    return BarChart(
        title=f"{name[:1].upper()}{name[1:]}: ours and published",
        description=f"{'; '.join(told)}.",
        y_label=name,
        categories=tuple(places),
        parts=(
            Part(name="ours", values=tuple(one.ours or 0.0 for one in found)),
            Part(name="published", values=tuple(one.expected.value for one in found)),
        ),
        y_unit=unit,
    )


def _places(found: Sequence[Verdict]) -> list[str]:
    """What tells them apart: where they are of, without what all have in common."""
    wheres: list[Mapping[str, Any]] = [one.expected.where for one in found]
    common = {
        key for key, value in wheres[0].items() if all(where.get(key) == value for where in wheres)
    }
    places = []
    for one, where in zip(found, wheres, strict=True):
        words = [label(key, value) for key, value in where.items() if key not in common]
        other = ", ".join(label(*pair) for pair in (one.expected.against or {}).items())
        words += [f"against {other}"] if other else []
        places.append(", ".join(words) or one.place)
    return [
        place if places.count(place) == 1 else f"{place} ({one.expected.source})"
        for place, one in zip(places, found, strict=True)
    ]


# distributions ---------------------------------------------------------------------------------


def _spreads(results: Results) -> Iterator[Chart]:
    """Completion times under each scheduler, a chart for each workload, where there are few."""
    cells = list(results.outcomes)
    differ = [key for key in varying(cells) if key != "seed"]
    of_workload = [key for key in differ if key in WORKLOAD]
    by_workload: dict[str, list[Settings]] = {}
    for cell, name in names(cells, keys=of_workload).items():
        by_workload.setdefault(name if of_workload else "", []).append(cell)
    if len(by_workload) > _MOST_SPREADS:
        return
    for workload, several in by_workload.items():
        if not 2 <= len(groups(several)) <= _MOST_LINES:
            continue
        title = "Completion times of the jobs" + (f", {workload}" if workload else "")
        chart = draw_distribution(results, names(several), "jct_h", title)
        if chart is not None:
            yield chart


# tables ----------------------------------------------------------------------------------------


def side_by_side(results: Results, verdicts: Sequence[Verdict]) -> Markup:
    """A row for each combination of settings but for the seed, published numbers in its cells."""
    cells = list(results.outcomes)
    several = groups(cells)
    keys = telling(cells) or ["policy", "mechanism"]
    known = published(verdicts, cells)
    columns = results.definition.columns
    rows: list[list[object]] = []
    for group, members in several.items():
        shown = [plain(getattr(group, key)) if means_something(group, key) else "–" for key in keys]
        if any(len(one) > 1 for one in several.values()):
            shown.append(str(len(members)))
        rows.append(
            [
                *shown,
                *(
                    _cell(average(results, members, name), known.get((group, name)))
                    for name in columns
                ),
            ]
        )
    heads = list(keys)
    if rows and len(rows[0]) > len(heads) + len(columns):
        heads.append("workloads")
    written_heads = [head.replace("_", " ") for head in (*heads, *columns)]
    return data_table(written_heads, rows, class_="side")


def _cell(value: float | None, beside: Verdict | None) -> Markup:
    ours = "" if value is None else f"{value:.4g}"
    if beside is None or beside.ratio is None:
        return tag("td", ours)
    paper = f"published {beside.expected.value:g}, ×{beside.ratio:.2f}"
    missed = "paper missed" if beside.met is False else "paper"
    return tag("td", ours, " ", tag("span", paper, class_=missed))
