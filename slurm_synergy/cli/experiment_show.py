"""What an experiment leaves: tables as text, CSV and JSON, figures, and a page with all of it."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import slurm_synergy
from slurm_synergy.cli.tables import print_table
from slurm_synergy.errors import ConfigError
from slurm_synergy.simulator.charts import Chart
from slurm_synergy.simulator.experiment_overview import charts_of
from slurm_synergy.simulator.experiment_report import render_experiment
from slurm_synergy.simulator.outcome import METRICS, Results, Verdict
from slurm_synergy.simulator.svg import svg_file

__all__ = ["show", "write_outputs"]

_SCALED = "a short cut with {scale:g} of the jobs: not comparable with the published numbers"


def write_outputs(results: Results, directory: Path, report: Path, scale: float) -> dict[str, Any]:
    """Write every table and figure into ``directory``, the page with all of it to ``report``.

    The content is returned as one JSON object.
    """
    verdicts = results.verdicts(comparable=scale == 1)
    rows = results.rows()
    note = _SCALED.format(scale=scale) if scale < 1 else ""
    content = {
        "title": results.definition.title,
        "source": results.definition.source,
        "note": note,
        "version": slurm_synergy.__version__,
        "rows": rows,
        "expected": [_verdict(one) for one in verdicts],
    }
    charts = charts_of(results, verdicts)
    try:
        _write_csv(directory / "table.csv", rows)
        _write_csv(directory / "expected.csv", [_verdict(one) for one in verdicts])
        (directory / "table.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        for index, chart in enumerate(charts, start=1):
            _write_figure(chart, directory / f"figure-{index}")
    except OSError as err:
        raise ConfigError(
            f"cannot be written: {err}",
            key="--out",
            value=str(directory),
            remedy="name a directory that you may write; results are kept in its cells",
        ) from err
    page = render_experiment(results, verdicts, charts, note, slurm_synergy.__version__)
    try:
        report.write_text(page, encoding="utf-8")
    except OSError as err:
        raise ConfigError(
            f"cannot be written: {err}",
            key="--report",
            value=str(report),
            remedy="name a file in a writable directory",
        ) from err
    return content


def _write_figure(chart: Chart, stem: Path) -> None:
    """SVG always, PNG where the extra ``report`` is installed."""
    from slurm_synergy.simulator.raster import can_write_png, write_png

    stem.with_suffix(".svg").write_text(svg_file(chart), encoding="utf-8")
    if can_write_png():
        write_png(chart, stem.with_suffix(".png"))


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    if not rows:
        path.unlink(missing_ok=True)
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _verdict(one: Verdict) -> dict[str, Any]:
    expected = one.expected
    return {
        "where": one.place,
        "metric": expected.metric,
        "ours": one.ours,
        "relation": expected.relation,
        "published": expected.value,
        "ratio": one.ratio,
        "tolerance": expected.tolerance,
        "met": one.met,
        "source": expected.source,
        "note": expected.note,
    }


# text ------------------------------------------------------------------------------------------


def show(results: Results, content: dict[str, Any], directory: Path, report: Path) -> None:
    """The tables for people."""
    click.echo(f"{results.definition.title} ({results.definition.source})")
    if content["note"]:
        click.echo(f"Note: {content['note']}")
    rows = content["rows"]
    if rows:
        click.echo("")
        print_table(tuple(rows[0]), [[_text(value) for value in row.values()] for row in rows])
    if content["expected"]:
        click.echo("")
        _show_expected(content["expected"])
    missing = [one for one in content["expected"] if one["ours"] is None]
    if missing:
        click.echo(f"{len(missing)} published numbers have no result here (not simulated)")
    click.echo(f"\nTables and figures are in {directory}, all of it on one page in {report}")


def _show_expected(expected: Sequence[dict[str, Any]]) -> None:
    words = {"about": "", "at_least": "≥ ", "at_most": "≤ "}
    lines = [
        [
            one["where"],
            METRICS[one["metric"]][1],
            _text(one["ours"]),
            f"{words[one['relation']]}{one['published']:g}",
            "-" if one["ratio"] is None else f"{one['ratio']:.3f}",
            {True: "yes", False: "NO", None: "-"}[one["met"]],
        ]
        for one in expected
    ]
    print_table(("where", "what", "ours", "published", "ratio", "as expected"), lines)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
