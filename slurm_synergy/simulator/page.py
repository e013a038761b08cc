"""A self-contained HTML page: its style is in it, and nothing is fetched from anywhere."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_synergy.simulator.charts import BarChart, Chart, written
from slurm_synergy.simulator.markup import Markup, join, tag
from slurm_synergy.simulator.svg import CHART_STYLE, draw, legend

__all__ = ["NOTES", "Section", "data_table", "figure", "page", "paragraph"]

NOTES = "what it is"
"""The head of a column of words."""

_MOST_ROWS = 25

_STYLE = """
body { color: var(--ink); background: var(--paper); font: 16px/1.55 system-ui, sans-serif;
  margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 60rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .4rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .4rem; padding-top: 1rem; border-top: 1px solid var(--grid); }
h3 { font-size: 1.05rem; margin: 1.6rem 0 .2rem; }
p { margin: .4rem 0 .8rem; max-width: 46rem; }
a { color: var(--c0); }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; list-style: none; padding: 0; }
.lead { font-size: 1.1rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .8rem;
  padding: 0; list-style: none; margin: 1.2rem 0; }
.cards li { border: 1px solid var(--grid); border-radius: .5rem; padding: .7rem .9rem; }
.cards b { display: block; font-size: 1.5rem; line-height: 1.3; }
.cards span { color: var(--dim); font-size: .9rem; }
figure { margin: 1.2rem 0 2rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(24rem, 1fr)); gap: 0 1.5rem; }
.pair svg.chart { font-size: 18px; }
@media (max-width: 26rem) { .pair { grid-template-columns: 1fr; } }
figcaption { margin-bottom: .5rem; max-width: 46rem; }
figcaption strong { display: block; }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; list-style: none; padding: 0 0 0 4rem;
  margin: .2rem 0; font-size: .9rem; }
svg.key { width: 28px !important; height: 12px !important; vertical-align: middle; }
details { font-size: .9rem; }
summary { color: var(--dim); cursor: pointer; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .93rem; }
th, td { text-align: right; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid var(--grid); }
th { font-weight: 600; } th:first-child { text-align: left; }
tbody th { font-weight: 400; overflow-wrap: break-word; }
thead th { color: var(--dim); vertical-align: bottom; }
table.published th:first-child { min-width: 15rem; }
table.published td:nth-child(2) { min-width: 11rem; }
table.side td, table.side th { vertical-align: top; }
.paper { display: block; color: var(--dim); font-size: .85em; white-space: nowrap; }
.missed { color: var(--c1); }
td.note, th.note { text-align: left; color: var(--dim); min-width: 11rem; }
code { font: .9em ui-monospace, monospace; overflow-wrap: anywhere; }
dt { font-weight: 600; margin-top: .6rem; } dd { margin: 0 0 0 1rem; max-width: 44rem; }
@media print { details { display: none; } }
"""  # noqa: E501


class Section:
    """A part of the page: a heading that can be linked to, and what is under it."""

    def __init__(self, ident: str, title: str, *content: Markup) -> None:
        self.ident, self.title, self.content = ident, title, content

    def drawn(self) -> Markup:
        """The section as markup."""
        heading = tag("h2", self.title, id=f"{self.ident}-heading")
        return tag(
            "section",
            heading,
            *self.content,
            id=self.ident,
            aria_labelledby=f"{self.ident}-heading",
        )


def page(title: str, lead: Sequence[Markup], sections: Sequence[Section]) -> str:
    """The whole document; ``lead`` follows the title, then links to the sections, then these."""
    links = [tag("li", tag("a", one.title, href=f"#{one.ident}")) for one in sections]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(CHART_STYLE + _STYLE)),
    )
    body = tag(
        "body",
        tag("header", tag("h1", title), *lead),
        tag("nav", tag("ul", *links), aria_label="Sections"),
        tag("main", *(one.drawn() for one in sections)),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def paragraph(*content: object, **attributes: str) -> Markup:
    """A paragraph; text in it is escaped."""
    return tag("p", *content, **attributes)


def figure(chart: Chart, *, ident: str) -> Markup:
    """Title and words, the drawing, its legend, and the numbers as a table behind a click."""
    return tag(
        "figure",
        tag("figcaption", tag("strong", chart.title), chart.description),
        draw(chart, ident=ident),
        legend(chart),
        tag("details", tag("summary", "The numbers of this figure"), _numbers(chart)),
        id=ident,
    )


def data_table(heads: Sequence[str], rows: Sequence[Sequence[object]], **attributes: str) -> Markup:
    """A table with a header row; the first cell of each row is its header."""
    head = tag("tr", *(_head(one) for one in heads))
    body = [
        tag("tr", tag("th", row[0], scope="row"), *(_cell(cell) for cell in row[1:]))
        for row in rows
    ]
    table = tag("table", tag("thead", head), tag("tbody", join(body)), **attributes)
    return tag("div", table, class_="wide")


def _head(name: str) -> Markup:
    return tag("th", name, scope="col", class_="note" if name == NOTES else None)


def _cell(cell: object) -> Markup:
    return cell if isinstance(cell, Markup) else tag("td", cell)


def _numbers(chart: Chart) -> Markup:
    if isinstance(chart, BarChart):
        heads = [chart.x_label or "group", *(part.name for part in chart.parts)]
        rows = [
            [name, *(written(part.values[index], chart.y_unit) for part in chart.parts)]
            for index, name in enumerate(chart.categories)
        ]
        return data_table(heads, rows)
    rows = [
        [one.name, written(x), written(y, chart.y_unit)]
        for one in chart.series
        for x, y in _thinned(one.points)
    ]
    return data_table(["line", chart.x_label, chart.y_label], rows)


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    if len(points) <= _MOST_ROWS:
        return points
    last = len(points) - 1
    return [points[round(index * last / (_MOST_ROWS - 1))] for index in range(_MOST_ROWS)]
