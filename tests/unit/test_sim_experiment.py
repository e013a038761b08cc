"""Definitions of experiments, their results on disk, and the numbers that are made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import slurm_synergy
from slurm_synergy.cli.experiment_run import simulate_cell, study_of
from slurm_synergy.errors import ConfigError
from slurm_synergy.simulator.cells import Cell, Damaged, Outcome, code_version, load, store
from slurm_synergy.simulator.experiment import (
    Definition,
    Settings,
    expand,
    matches,
    read_definition,
    shorten,
)
from slurm_synergy.simulator.experiment_charts import DISTRIBUTIONS, draw_figure
from slurm_synergy.simulator.outcome import (
    METRICS,
    Results,
    check_expected,
    check_names,
    interpolated,
    shown,
    varying,
)

SHIPPED = sorted((Path(slurm_synergy.__file__).parent / "experiments").glob("*.yaml"))
DEFINITION = """
title: Two loads
settings: {nodes: 1, jobs: 12}
grids:
  - load: [2, 4]
    mechanism: [proportional, tune]
  - {load: 4, mechanism: [tune, greedy]}
columns: [avg_jct_h, avg_jct_gain]
figures:
  - {title: Over load, x: load, y: avg_jct_h, series: mechanism}
  - {title: By mechanism, x: mechanism, y: avg_jct_gain, series: load}
  - {title: Spread, x: distribution, y: gain, series: mechanism, where: {load: 4}}
expected:
  - {where: {load: 4, mechanism: tune}, metric: avg_jct_gain, value: 2, source: a paper}
"""


def write(tmp_path: Path, text: str = DEFINITION) -> Path:
    path = tmp_path / "try.yaml"
    path.write_text(text)
    return path


# definitions -----------------------------------------------------------------------------------


def test_the_grids_are_expanded_and_each_cell_is_there_once(tmp_path: Path) -> None:
    path = write(tmp_path)
    cells = expand(read_definition(path), path, {})
    assert [(cell.load, cell.mechanism) for cell in cells] == [
        (2.0, "proportional"),
        (2.0, "tune"),
        (4.0, "proportional"),
        (4.0, "tune"),
        (4.0, "greedy"),
    ]
    assert {cell.nodes for cell in cells} == {1}
    assert varying(cells) == ["mechanism", "load"]


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("title: Two loads", "titel: Two loads", "titel"),
        ("title: Two loads\n", "", "title"),
        ("grids:", "grids: []\nmore:", "more"),
        ("load: [2, 4]", "load: [2, 0]", "grids[0].load = 0"),
        ("load: [2, 4]", "load: [2, fast]", "grids[0].load = 'fast'"),
        ("load: [2, 4]", "laod: [2, 4]", "grids[0].laod"),
        ("load: [2, 4]", "load: []", "grids[0].load: has no value"),
        ("jobs: 12", "jobs: 0", "settings.jobs = 0"),
        ("jobs: 12", "split: 1/2", "settings.split = '1/2'"),
        ("jobs: 12", "measure: 5", "settings.measure = 5"),
        ("jobs: 12", 'measure: "5"', "settings.measure = '5'"),
        ("jobs: 12", "measure: 10:20", "in quotes"),
        ("jobs: 12", "jobs: 1.0e+30", "settings.jobs = 1e+30"),
        ("jobs: 12", "mem_gib: .inf", "settings.mem_gib = inf"),
        ("jobs: 12", "semantics: exactly", "settings.semantics = 'exactly'"),
        ("jobs: 12", "trace: '${NOWHERE}/a.csv'", "trace = '${NOWHERE}/a.csv'"),
        ("jobs: 12", "rigid: 0.5", "grids[0].rigid = 0.5"),
        ("jobs: 12", "rigid: 0.5", "cell {load: 2, mechanism: proportional}"),
        ("jobs: 12", "profiling: oracle", "add elastic: true"),
        ("jobs: 12", "pipelines: synergy, trace: 'sia:a.csv'", "grids[0].pipelines = 'synergy'"),
        ("jobs: 12", "elastic: true", "a trace of the form sia:FILE"),
        ("where: {load: 4}", "where: {lode: 4}", "figures[2].where: lode"),
        ("metric: avg_jct_gain", "metrik: avg_jct_gain", "known are where, metric, value"),
        ("value: 2", "value: -2", "expected[0].value"),
        ("{nodes: 1, jobs: 12}", "[1]", "settings"),
        (DEFINITION, "[]", "is no mapping"),
        (DEFINITION, "a: [", "cannot be read"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, place: str) -> None:
    assert old in DEFINITION
    path = write(tmp_path, DEFINITION.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        expand(read_definition(path), path, {})
    assert place in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "place"),
    [
        ("columns: [avg_jct_h", "columns: [avg", "columns[0] = 'avg'"),
        ("y: avg_jct_gain", "y: gain", "figures[1].y = 'gain'"),
        ("y: gain", "y: avg_jct_h", "figures[2].y = 'avg_jct_h'"),
        ("series: load", "series: lode", "figures[1].series = 'lode'"),
        ("x: mechanism", "x: mech", "figures[1].x = 'mech'"),
        ("metric: avg_jct_gain", "metric: luck", "expected[0].metric = 'luck'"),
    ],
)
def test_names_that_do_not_exist_are_named(tmp_path: Path, old: str, new: str, place: str) -> None:
    definition = read_definition(write(tmp_path, DEFINITION.replace(old, new)))
    with pytest.raises(ConfigError) as caught:
        check_names(definition, tuple(DISTRIBUTIONS), "F")
    assert f"F: {place}" in str(caught.value)


def test_files_are_relative_to_the_definition_and_to_the_environment(tmp_path: Path) -> None:
    text = DEFINITION.replace("jobs: 12", "trace: 'philly:${DATA}/p.csv,jobs=5', cluster: c.yaml")
    path = write(tmp_path, text)
    cell = expand(read_definition(path), path, {"DATA": "sub"})[0]
    assert cell.trace == f"philly:{tmp_path}/sub/p.csv,jobs=5"
    assert cell.cluster == f"{tmp_path}/c.yaml"
    assert matches(cell, {"cluster": "c.yaml", "mechanism": ["proportional", "tune"]})
    assert not matches(cell, {"mechanism": "tune"})


def test_a_short_cut_keeps_the_pool_as_busy() -> None:
    cell = Settings(jobs=7000, measure="4000:5000", load=9, nodes=16)
    short = shorten(cell, 0.25)
    assert (short.jobs, short.measure, short.load, short.nodes) == (1750, "1000:1250", 2.25, 4)
    large = shorten(Settings(jobs=1000, nodes=16, sizes="philly", load=8), 0.01)
    assert (large.nodes, large.load) == (2, 1.0), "the largest job still fits"
    assert shorten(Settings(trace="/x"), 0.25).part == 0.25
    assert shorten(Settings(trace="/x"), 0.25).nodes == 16


# shipped ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_definition_is_whole(path: Path) -> None:
    definition = read_definition(path)
    check_names(definition, tuple(DISTRIBUTIONS), str(path))
    data = dict.fromkeys(("SYNERGY_DATA", "PHILLY_DATA", "SIA_DATA"), "/data")
    cells = expand(definition, path, data)
    assert definition.about
    assert definition.source
    assert definition.figures
    for one in definition.expected:
        chosen = [cell for cell in cells if matches(cell, one.where)]
        alike = {cell.model_copy(update={"seed": 0}) for cell in chosen}
        assert len(alike) == 1, f"{one.where} selects {len(alike)} cells"
        base = chosen[0].model_copy(update=one.against or definition.baseline)
        assert "gain" not in one.metric or base in cells
    used = {cell.policy for cell in cells} | {cell.mechanism for cell in cells}
    from slurm_synergy.mechanisms import MECHANISMS
    from slurm_synergy.policies import POLICIES

    assert used <= {*MECHANISMS, *POLICIES}


def test_there_are_definitions_for_every_published_experiment() -> None:
    assert len(SHIPPED) >= 12


# results on disk -------------------------------------------------------------------------------


def outcome(jcts_h: list[float], **summary: Any) -> Outcome:
    jcts_s = [one * 3600 for one in jcts_h]
    return Outcome(
        summary={
            "avg_jct_s": sum(jcts_s) / len(jcts_s),
            "p99_jct_s": max(jcts_s),
            "makespan_s": max(jcts_s),
            "round_ms": {"median": 2.0},
            "floor": {"judged": 8, "below": 1, "worst": 0.75},
            "gpu_util": 0.5,
            **summary,
        },
        jobs={
            "id": [float(one) for one in range(len(jcts_h))],
            "jct_s": jcts_s,
            "run_s": jcts_s,
            "speedup": [1.0] * len(jcts_h),
        },
        cpu_used=0.5,
        assumptions=("something",),
    )


def test_a_result_comes_back_as_it_was(tmp_path: Path) -> None:
    cell = Cell.of(Settings(), "code")
    assert load(cell, tmp_path) is None
    made = outcome([1.0, 2.0])
    store(cell, made, tmp_path)
    assert load(cell, tmp_path) == made
    assert [one.name for one in (tmp_path / "cells").iterdir()] == [f"{cell.key}.json"]


@pytest.mark.parametrize("damage", ["", "{}", "[1]", "\x00", "cut", "changed", "other"])
def test_a_damaged_result_is_never_taken(tmp_path: Path, damage: str) -> None:
    cell = Cell.of(Settings(), "code")
    store(cell, outcome([1.0]), tmp_path)
    path = cell.path(tmp_path)
    text = path.read_text()
    if damage == "cut":
        path.write_text(text[: len(text) // 2])
    elif damage == "changed":
        path.write_text(text.replace('"cpu_used": 0.5', '"cpu_used": 0.6'))
    elif damage == "other":
        other = Cell.of(Settings(seed=9), "code")
        store(other, outcome([1.0]), tmp_path)
        path.write_text(other.path(tmp_path).read_text())
    else:
        path.write_text(damage)
    with pytest.raises(Damaged, match=cell.key):
        load(cell, tmp_path)


def test_a_result_is_of_its_settings_its_files_and_its_code(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("a")
    settings = Settings(trace=str(trace))
    keys = {Cell.of(settings, "one").key, Cell.of(settings, "two").key}
    keys.add(Cell.of(settings.model_copy(update={"seed": 2}), "one").key)
    trace.write_text("b")
    keys.add(Cell.of(settings, "one").key)
    assert len(keys) == 4
    moved = tmp_path / "moved.csv"
    moved.write_text("b")
    assert Cell.of(Settings(trace=str(moved)), "one").key == Cell.of(settings, "one").key
    trace.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        Cell.of(settings, "one")


def test_the_code_version_follows_what_decides_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    source = Path(slurm_synergy.__file__).parent
    copied = tmp_path / "slurm_synergy"
    shutil.copytree(source, copied, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    monkeypatch.setattr(slurm_synergy, "__file__", str(copied / "__init__.py"))
    before = code_version()
    for file in ("report.py", "svg.py", "experiment.py", "outcome.py"):
        (copied / "simulator" / file).write_text("changed")
    assert code_version() == before
    (copied / "simulator" / "engine.py").write_text("changed")
    assert code_version() != before


# numbers ---------------------------------------------------------------------------------------


def results(expected: list[dict[str, Any]] | None = None) -> Results:
    definition = Definition(
        title="t", grids=[{"seed": 1}], expected=expected or [], columns=["avg_jct_h"]
    )
    base = Settings(mechanism="proportional")
    ours = Settings(mechanism="tune")
    return Results(
        definition, {base: outcome([1.0, 3.0, 8.0, 20.0]), ours: outcome([1.0, 2.0, 2.0, 10.0])}
    )


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("avg_jct_h", 15 / 4),
        ("max_jct_h", 10.0),
        ("avg_jct_gain", 32 / 15),
        ("makespan_gain", 2.0),
        ("best_job_gain", 4.0),
        ("worst_job_gain", 1.0),
        ("part_sooner", 3 / 4),
        ("part_later", 0.0),
        ("floor_below", 1.0),
        ("floor_worst", 0.75),
        ("short_avg_jct_gain", 4 / 3),  # the two that take less than four hours in the baseline
        ("short_p99_jct_gain", 3 / 2),
        ("long_avg_jct_gain", 28 / 12),
        ("long_p99_jct_h", 10.0),
        ("cpu_used_gain", 1.0),
        ("round_ms_ratio", 1.0),
    ],
)
def test_numbers_are_as_worked_out_by_hand(metric: str, value: float) -> None:
    assert results().value(Settings(mechanism="tune"), metric) == pytest.approx(value)


def test_every_metric_is_a_number_or_unknown() -> None:
    made = results()
    alone = Results(made.definition, {Settings(mechanism="tune"): outcome([1.0])})
    for name in METRICS:
        if name in (
            *("cpu_util", "mem_util", "restarts_per_job", "gpu_hours", "contention"),
            *("round_p95_ms", "worst_ftf", "unfair", "worst_ftf_pooled", "unfair_pooled"),
        ):
            continue  # not in these summaries
        assert made.value(Settings(mechanism="tune"), name) is not None
        if "gain" in name or name.startswith("part_"):
            assert alone.value(Settings(mechanism="tune"), name) is None
    assert made.value(Settings(mechanism="opt"), "avg_jct_h") is None


@pytest.mark.parametrize(
    ("relation", "value", "met"),
    [
        ("about", 2.0, True),
        ("about", 3.0, False),
        ("about", 1.0, False),
        ("at_least", 1.0, True),
        ("at_least", 3.0, False),
        ("at_most", 3.0, True),
        ("at_most", 1.0, False),
    ],
)
def test_published_numbers_are_judged(relation: str, value: float, met: bool) -> None:
    where = {"mechanism": "tune"}
    one = {"where": where, "metric": "avg_jct_gain", "value": value, "relation": relation}
    (verdict,) = results([{**one, "source": "s"}]).verdicts()
    assert verdict.ours == pytest.approx(32 / 15)
    assert verdict.ratio == pytest.approx(32 / 15 / value)
    assert verdict.met is met
    (unjudged,) = results([{**one, "source": "s"}]).verdicts(comparable=False)
    assert unjudged.met is None


def test_a_published_number_must_be_of_one_cell() -> None:
    one = {"where": {}, "metric": "avg_jct_h", "value": 1, "source": "s"}
    with pytest.raises(ConfigError, match=r"expected\[0\].where"):
        results([one]).verdicts()


def test_it_is_told_before_anything_is_simulated(tmp_path: Path) -> None:
    for where, what in (("{load: 4}", "selects 3 cells"), ("{load: 9}", "selects no cell")):
        path = write(
            tmp_path, DEFINITION.replace("where: {load: 4, mechanism: tune}", f"where: {where}")
        )
        definition = read_definition(path)
        with pytest.raises(ConfigError, match=rf"{path}: expected\[0\].where = .*{what}"):
            check_expected(definition, expand(definition, path, {}), str(path))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("sia:${SIA_DATA}/philly/workload-{seed}.csv,elastic=full", "philly/workload-{seed}.csv"),
        ("/data/static_100jobs.csv", "static_100jobs.csv"),
        ("clusters/sia-64gpu.yaml", "sia-64gpu.yaml"),
        ("20/70/10", "20/70/10"),
    ],
)
def test_a_file_is_shown_by_its_name_and_several_by_their_directory_too(
    value: str, text: str
) -> None:
    assert shown(value) == text


def test_seeds_are_averaged() -> None:
    one = {"where": {"mechanism": "tune"}, "metric": "avg_jct_h", "value": 1, "source": "s"}
    made = results([one])
    cells = {Settings(mechanism="tune", seed=seed): outcome([float(seed)]) for seed in (1, 3)}
    (verdict,) = Results(made.definition, cells).verdicts()
    assert verdict.ours == 2.0


def test_percentiles_between_elements() -> None:
    assert interpolated([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert interpolated([7.0], 0.99) == 7.0


def test_figures_are_drawn_from_what_is_there(tmp_path: Path) -> None:
    path = write(tmp_path)
    definition = read_definition(path)
    cells = expand(definition, path, {})
    made = Results(definition, {cell: outcome([cell.load]) for cell in cells})
    lines, bars, spread = (draw_figure(one, made) for one in definition.figures)
    assert lines is not None and bars is not None and spread is not None
    assert {one.name: one.points for one in lines.series} == {  # type: ignore[union-attr]
        "proportional": ((2.0, 2.0), (4.0, 4.0)),
        "tune": ((2.0, 2.0), (4.0, 4.0)),
        "greedy": ((4.0, 4.0),),
    }
    assert bars.categories == ("proportional", "tune", "greedy")  # type: ignore[union-attr]
    assert [one.name for one in spread.series] == ["proportional", "tune", "greedy"]  # type: ignore[union-attr]
    assert draw_figure(definition.figures[0], Results(definition, {})) is None


# simulating ------------------------------------------------------------------------------------


def test_a_cell_is_the_study_that_its_settings_say(tmp_path: Path) -> None:
    study = study_of(Settings(cpus_per_gpu=4.5, nodes=3, mem_gib=100, load=2, jobs=40, seed=5))
    assert [node.total.cpus for node in study.nodes] == [36, 36, 36]
    assert study.nodes[0].total.mem_mib == 102_400
    assert len(study.trace.jobs) == 40
    trace = tmp_path / "t.csv"
    rows = "".join(f"{one},gnmt,{one},1,60\n" for one in range(10))
    trace.write_text("job_id,model,arrival_s,gpus,duration_s\n" + rows)
    assert len(study_of(Settings(trace=str(trace), part=0.3)).trace.jobs) == 3
    cluster = tmp_path / "pool.yaml"
    cluster.write_text(
        "nodes:\n  - {name: a, gpu_type: a100, gpus: 8, cpus: 24, mem_gib: 10}\n"
        "  - {name: b, gpu_type: t4, gpus: 2, cpus: 6, mem_gib: 10}\n"
    )
    for ratio, cpus in ((None, [24, 6]), (1.5, [12, 3])):
        study = study_of(Settings(cluster=str(cluster), cpus_per_gpu=ratio, jobs=5))
        assert [node.total.cpus for node in study.nodes] == cpus
        assert [node.capacity.cpus for node in study.nodes] == cpus
    with pytest.raises(ConfigError, match="mechanism = 'magic'"):
        study_of(Settings(mechanism="magic"))


def test_cores_of_use_are_no_more_than_held_and_fewer_under_proportional() -> None:
    found = {
        name: simulate_cell(
            Settings(mechanism=name, nodes=1, jobs=20, load=4, split="20/70/10", seed=3)
        )
        for name in ("proportional", "tune")
    }
    for one in found.values():
        # What a round placed counts until the next, a second after a job's end.
        assert 0 < one.cpu_used <= one.summary["cpu_util"] * 1.001
        json.dumps(dict(one.summary))
    assert found["proportional"].cpu_used < 0.8 * found["proportional"].summary["cpu_util"]
