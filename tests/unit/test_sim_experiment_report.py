"""The page of an experiment: schedulers side by side, beside papers, and distributions."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from test_sim_report import HOSTILE, Page

from slurm_synergy.cli.experiment_show import show, write_outputs
from slurm_synergy.simulator.cells import Outcome
from slurm_synergy.simulator.charts import BarChart, LineChart
from slurm_synergy.simulator.experiment import Definition, Settings
from slurm_synergy.simulator.experiment_groups import groups, names, published, telling
from slurm_synergy.simulator.experiment_overview import charts_of, verdict_in_words
from slurm_synergy.simulator.experiment_report import render_experiment
from slurm_synergy.simulator.outcome import Results, label

HOUR_S = 3600.0


def outcome(*jct_h: float, policy: str = "") -> Outcome:
    times = [one * HOUR_S for one in jct_h]
    return Outcome(
        summary={
            "avg_jct_s": sum(times) / len(times),
            "p99_jct_s": max(times),
            "makespan_s": max(times),
            "restarts_per_job": 1.0,
            "round_ms": {"median": 3.0},
        },
        jobs={
            "id": list(range(len(times))),
            "jct_s": times,
            "run_s": times,
            "speedup": [1.0] * len(times),
        },
        cpu_used=0.5,
        assumptions=(f"assumed of {policy}",) if policy else (),
    )


def definition(**more: Any) -> Definition:
    return Definition(
        **{
            "title": HOSTILE,
            "grids": [{"policy": "fifo"}],
            "columns": ["avg_jct_h", "p99_jct_h"],
            "figures": [{"title": "By policy", "x": "policy", "y": "avg_jct_h", "series": "fills"}],
            "expected": [
                expected("sia", "avg_jct_h", 2.0, note="as they say"),
                expected("gavel", "avg_jct_h", 4.0),
                expected("gavel", "p99_jct_h", 9.0),
                expected("pollux", "avg_jct_h", 3.0),
            ],
            **more,
        }
    )


def expected(policy: str, metric: str, value: float, **more: Any) -> dict[str, Any]:
    where = {"policy": policy, "pipelines": "none"}
    return {"where": where, "metric": metric, "value": value, "source": "a paper", **more}


def cell(policy: str, seed: int = 1, **more: Any) -> Settings:
    return Settings(policy=policy, mechanism="proportional", seed=seed, **more)


OUTCOMES = {
    cell("sia", 1, elastic=True): outcome(1.0, 2.0, policy="sia"),
    cell("sia", 2, elastic=True): outcome(1.0, 4.0),
    cell("gavel", 1, elastic=True): outcome(2.0, 8.0),
    cell("gavel", 2, elastic=True): outcome(4.0, 10.0),
    cell("sia", 1, pipelines="synergy", elastic=True): outcome(5.0, 6.0),
    cell("gavel", 1, pipelines="synergy", elastic=True): outcome(7.0, 9.0),
}


@pytest.fixture
def results() -> Results:
    return Results(definition(), OUTCOMES)


_FILLED = (("sia", True), ("gavel", True), ("gavel", False))


@pytest.fixture
def page(results: Results) -> Page:
    verdicts = results.verdicts()
    charts = charts_of(results, verdicts)
    return Page(render_experiment(results, verdicts, charts, "", "1.2.3"))


def test_settings_are_called_by_words_that_tell_them_apart() -> None:
    assert [label(*pair) for pair in (("policy", "sia"), ("trace", "sia:/a/b/w-1.csv,x=2"))] == [
        "sia",
        "w-1.csv",
    ]
    assert label("fills", False) == "fills no"
    assert label("quantum_s", 360.0) == "quantum 360 s"
    assert label("power", None) == "power by default"
    assert label("pipelines", "none") == "pipelines none"
    assert label("policy", ["sia", "gavel"]) == "sia or gavel"


def test_cells_are_grouped_by_all_but_their_seed() -> None:
    found = groups(OUTCOMES)
    assert [len(cells) for cells in found.values()] == [2, 2, 1, 1]
    cells = list(OUTCOMES)
    assert list(names(cells, keys=["policy", "elastic"]).values())[-1] == "gavel, elastic yes"


def test_what_follows_from_other_settings_does_not_tell_cells_apart() -> None:
    assert telling(list(OUTCOMES)) == ["policy", "pipelines"]
    assert list(names(list(OUTCOMES)).values())[-1] == "gavel, pipelines synergy"
    several = [cell("sia"), cell("gavel", round_s=360.0), cell("gavel", round_s=360.0, fills=False)]
    assert telling(several) == ["policy", "fills"]
    assert telling([cell("sia", 1), cell("sia", 2)]) == []


def test_settings_that_mean_nothing_to_a_cell_are_not_told_of_it(results: Results) -> None:
    given = {"trace": "jobs.csv", "cluster": "pool.yaml", "elastic": True}
    several = [cell(one, fills=fills, **given) for one, fills in _FILLED]
    assert list(names(several).values()) == ["sia", "gavel, fills yes", "gavel, fills no"]
    assert names(several, keys=["fills"], always=["fills"])[several[0]] == "fills yes"
    found = Results(results.definition, dict.fromkeys(several, outcome(1.0)))
    page = Page(render_experiment(found, [], [], "", "1.2.3"))
    assert [row[1] for row in page.tables[0][1:]] == ["–", "yes", "no"]
    made = {row[0] for row in page.tables[-1]}
    assert {"quantum_s", "trace", "round_s"} <= made
    assert made.isdisjoint({"generations", "window", "arrivals", "nodes", "load", "restart_s"})


def test_published_numbers_belong_to_their_group(results: Results) -> None:
    known = published(results.verdicts(), list(OUTCOMES))
    assert {(group.policy, metric): one.ours for (group, metric), one in known.items()} == {
        ("sia", "avg_jct_h"): 2.0,
        ("gavel", "avg_jct_h"): 6.0,
        ("gavel", "p99_jct_h"): 9.0,
    }


def test_schedulers_stand_side_by_side_with_the_published_numbers(page: Page) -> None:
    heads, *rows = page.tables[0]
    assert heads == ["policy", "pipelines", "workloads", "avg jct h", "p99 jct h"]
    assert rows[2][:2] == ["sia", "synergy"]
    assert [row[0] for row in rows] == ["sia", "gavel", "sia", "gavel"]
    assert rows[0][2:] == ["2", "2 published 2, ×1.00", "3"]
    assert rows[1][2:] == ["2", "6 published 4, ×1.50", "9 published 9, ×1.00"]
    assert rows[2][2:] == ["1", "5.5", "6"], "numbers of other jobs are not the paper's"
    classes = [attributes.get("class") for _, attributes in page.tags]
    assert classes.count("paper missed") == 1


def test_the_page_says_how_much_is_as_published(page: Page, results: Results) -> None:
    text = "Of 4 published numbers 3 could be compared: 2 are as expected, 1 are not."
    assert text in page.text
    assert verdict_in_words([]) == ""
    assert "as expected" not in verdict_in_words(results.verdicts(comparable=False))
    table = next(one for one in page.tables if one[0][0] == "where")
    assert [row[5] for row in table[1:]] == ["yes", "no", "yes", ""]
    assert table[4][2] == "not simulated"
    assert table[1][6] == "a paper. as they say"


def test_figures_keep_apart_what_differs_in_more_than_its_seed(results: Results) -> None:
    bars, drawn, *spreads = charts_of(results, results.verdicts())
    assert isinstance(bars, BarChart)
    assert (bars.categories, [part.name for part in bars.parts]) == (
        ("sia", "gavel"),
        ["ours", "published"],
    )
    assert [part.values for part in bars.parts] == [(2.0, 6.0), (2.0, 4.0)]
    assert isinstance(drawn, BarChart)
    assert {part.name: part.values for part in drawn.parts} == {
        "fills yes, pipelines none": (2.0, 6.0),
        "fills yes, pipelines synergy": (5.5, 8.0),
    }
    assert [chart.title.rpartition(", ")[2] for chart in spreads] == [
        "pipelines none",
        "pipelines synergy",
    ]
    first = spreads[0]
    assert isinstance(first, LineChart)
    # Both workloads of a scheduler are one line.
    assert [(one.name, len(one.points), one.points[-1]) for one in first.series] == [
        ("sia", 4, (4.0, 1.0)),
        ("gavel", 4, (10.0, 1.0)),
    ]


def test_a_definition_with_its_own_distribution_gets_no_other(results: Results) -> None:
    own = {"title": "T", "x": "distribution", "y": "jct_h", "series": "policy"}
    made = Results(definition(figures=[own], expected=[]), OUTCOMES)
    (chart,) = charts_of(made, [])
    assert isinstance(chart, LineChart)
    assert [one.name for one in chart.series] == [
        *("sia, pipelines none", "gavel, pipelines none"),
        *("sia, pipelines synergy", "gavel, pipelines synergy"),
    ]


def test_many_workloads_and_single_schedulers_get_no_distribution() -> None:
    loads = {cell("sia", load=float(at)): outcome(1.0) for at in range(1, 9)}
    assert charts_of(Results(definition(figures=[], expected=[]), loads), []) == []
    alone = {cell("sia", at): outcome(1.0) for at in range(1, 9)}
    assert charts_of(Results(definition(figures=[], expected=[]), alone), []) == []


def test_the_page_is_safe_and_complete_in_itself(page: Page, results: Results) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("script", "img", "link", "iframe", "object", "embed", "base", "form")
        assert not any(name.startswith("on") for name in attributes)
    assert HOSTILE in page.text
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [(a["href"] or "") for t, a in page.tags if t == "a"]
    assert {link.removeprefix("#") for link in links} <= set(ids)
    assert "assumed of sia" in page.text
    assert "slurm-synergy 1.2.3" in page.text


def test_a_short_cut_is_not_judged(results: Results, tmp_path: Path) -> None:
    text = render_experiment(results, results.verdicts(comparable=False), [], "a short cut", "1")
    assert "This is a short cut." in Page(text).text
    assert "as expected, " not in text


def test_a_setting_that_means_nothing_to_a_policy_is_empty_in_its_row() -> None:
    several = {cell(one, fills=fills, elastic=True): outcome(1.0) for one, fills in _FILLED}
    rows = Results(definition(figures=[], expected=[]), several).rows()
    assert [(row["policy"], row["fills"]) for row in rows] == [
        ("sia", None),
        ("gavel", True),
        ("gavel", False),
    ]


def test_such_a_setting_is_an_empty_field_and_a_dash_in_the_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    several = {cell(one, fills=fills, elastic=True): outcome(1.0) for one, fills in _FILLED}
    results = Results(definition(figures=[], expected=[]), several)
    content = write_outputs(results, tmp_path, tmp_path / "report.html", 1.0)
    written = list(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    assert [row["fills"] for row in written] == ["", "True", "False"]
    show(results, content, tmp_path, tmp_path / "report.html")
    head, *lines = [line.split() for line in capsys.readouterr().out.splitlines()[2:6]]
    assert [line[head.index("fills")] for line in lines] == ["-", "True", "False"]
