"""The page of an experiment: its figures, and published numbers beside ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slurm_synergy.simulator.charts import Chart
from slurm_synergy.simulator.experiment_groups import groups
from slurm_synergy.simulator.experiment_overview import side_by_side, verdict_in_words
from slurm_synergy.simulator.experiment_policies import means_something
from slurm_synergy.simulator.markup import Markup, tag
from slurm_synergy.simulator.outcome import METRICS, Results, Verdict, shown
from slurm_synergy.simulator.page import Section, data_table, figure, page, paragraph

__all__ = ["render_experiment"]

_RELATIONS = {"about": "", "at_least": "at least ", "at_most": "at most "}


def render_experiment(
    results: Results, verdicts: Sequence[Verdict], charts: Sequence[Chart], note: str, version: str
) -> str:
    """The page as an HTML document; ``note`` is a warning, or empty."""
    definition = results.definition
    lead = [paragraph(definition.about or definition.title, class_="lead")]
    if definition.source:
        lead.append(paragraph("Source: ", definition.source))
    if note:
        lead.append(paragraph(tag("strong", f"This is {note}.")))
    if verdicts and not note:
        lead.append(paragraph(verdict_in_words(verdicts)))
    sections = [_side_by_side(results, verdicts)]
    if charts:
        drawn = [figure(one, ident=f"figure-{index}") for index, one in enumerate(charts, start=1)]
        sections.append(Section("figures", "Figures", *drawn))
    if verdicts:
        sections.append(_published(verdicts))
    if len(groups(results.outcomes)) < len(results.outcomes):
        sections.append(_table(results))
    sections.append(Section("made", "How this was made", *_made(results, version)))
    return page(definition.title, lead, sections)


def _published(verdicts: Sequence[Verdict]) -> Section:
    rows = [
        [
            one.place,
            METRICS[one.expected.metric][1],
            "not simulated" if one.ours is None else f"{one.ours:.4g}",
            f"{_RELATIONS[one.expected.relation]}{one.expected.value:g}",
            "" if one.ratio is None else f"{one.ratio:.3f}",
            {True: "yes", False: tag("td", tag("strong", "no")), None: ""}[one.met],
            tag("td", _told(one), class_="note"),
        ]
        for one in verdicts
    ]
    heads = ["where", "what", "ours", "published", "ratio", "as expected", "what it is"]
    return Section(
        "published", "Published numbers beside ours", data_table(heads, rows, class_="published")
    )


def _told(one: Verdict) -> str:
    return f"{one.expected.source}. {one.expected.note}".removesuffix(". ")


def _side_by_side(results: Results, verdicts: Sequence[Verdict]) -> Section:
    words = [
        part
        for name in results.definition.columns
        for part in (tag("dt", name.replace("_", " ")), tag("dd", METRICS[name][1]))
    ]
    content = [side_by_side(results, verdicts), tag("dl", *words)]
    if len(groups(results.outcomes)) < len(results.outcomes):
        content.insert(0, paragraph("Numbers are the mean over workloads that differ in the seed."))
    return Section("side", "Side by side", *content)


def _table(results: Results) -> Section:
    rows = results.rows()
    heads = list(rows[0]) if rows else []
    cells = [[_text(value) for value in row.values()] for row in rows]
    whole = tag("details", tag("summary", f"{len(rows)} simulations"), data_table(heads, cells))
    return Section("table", "All simulations", whole)


def _made(results: Results, version: str) -> list[Markup]:
    cells = list(results.outcomes)
    common = {
        key: value
        for key, value in cells[0].model_dump().items()
        if all(getattr(cell, key) == value for cell in cells)
        and any(means_something(cell, key) for cell in cells)
    }
    rows = [[key, _text(value)] for key, value in common.items() if value is not None]
    assumed = sorted({text for one in results.outcomes.values() for text in one.assumptions})
    content = [
        paragraph(
            "Every simulation plays the controller's own rounds on a virtual clock. These settings "
            "are common to all:"
        ),
        data_table(["setting", "value"], rows),
    ]
    if assumed:
        content += [paragraph("Assumed:"), tag("ul", *(tag("li", text) for text in assumed))]
    return [*content, paragraph(f"slurm-synergy {version}")]


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(shown(value))
