"""``synergyctl experiment`` as people use it: tables, resuming, damage, processes."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

import slurm_synergy.cli.experiment_run as experiment_run
from slurm_synergy.cli.commands import cli
from slurm_synergy.cli.experiment_slurm import parse_options
from slurm_synergy.errors import ConfigError, SynergyError
from slurm_synergy.simulator.experiment import Settings, expand, read_definition

DEFINITION = """
title: Two loads
source: nobody
settings: {nodes: 1, jobs: 12}
grids:
  - load: [2, 4]
    mechanism: [proportional, tune]
columns: [avg_jct_h, avg_jct_gain]
figures:
  - {title: Over load, x: load, y: avg_jct_h, series: mechanism}
expected:
  - where: {load: 4, mechanism: tune}
    metric: avg_jct_gain
    value: 1
    relation: at_least
    source: us
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    (tmp_path / "try.yaml").write_text(DEFINITION)
    monkeypatch.chdir(tmp_path)

    def call(*options: str) -> Result:
        return CliRunner().invoke(cli, ["experiment", "try.yaml", *options])

    return call


def cells(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "try" / "cells").glob("*.json"))


def test_one_command_gives_tables_figures_and_a_page(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    result = run()
    assert result.exit_code == 0, result.output
    assert "[4/4]" in result.stderr
    assert "as expected" in result.stdout
    out = tmp_path / "try"
    rows = list(csv.DictReader((out / "table.csv").read_text().splitlines()))
    assert [(row["mechanism"], row["load"]) for row in rows] == [
        ("proportional", "2.0"),
        ("tune", "2.0"),
        ("proportional", "4.0"),
        ("tune", "4.0"),
    ]
    assert all(float(row["avg_jct_gain"]) >= 1 for row in rows)
    found = json.loads((out / "table.json").read_text())
    assert found["expected"][0]["met"] is True
    assert (out / "figure-1.svg").read_text().startswith("<?xml")
    page = (out / "report.html").read_text()
    assert "Published numbers beside ours" in page
    # The definition's, and the distribution under each of the two loads.
    assert page.count("<figure") == 3
    elsewhere = tmp_path / "page.html"
    told = run("--show", "--report", str(elsewhere))
    assert elsewhere.read_text() == page
    assert f"all of it on one page in {elsewhere}" in told.stdout
    wrong = run("--show", "--report", str(tmp_path / "nowhere" / "page.html"))
    assert "nowhere/page.html: is in a directory that does not exist" in str(wrong.exception)
    again = json.loads(run("--json").stdout)
    assert again["rows"] == found["rows"]


def test_what_is_done_is_not_done_again(tmp_path: Path, run, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    done: list[Settings] = []
    simulate = experiment_run.simulate_cell

    def interrupted(settings: Settings):  # type: ignore[no-untyped-def]
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(settings)
        return simulate(settings)

    monkeypatch.setattr(experiment_run, "simulate_cell", interrupted)
    assert run().exit_code != 0
    assert len(cells(tmp_path)) == 2
    done.clear()
    monkeypatch.setattr(
        experiment_run, "simulate_cell", lambda one: (done.append(one), simulate(one))[1]
    )
    result = run()
    assert result.exit_code == 0, result.output
    assert "2 of 4 simulations have a result already" in result.stderr
    assert len(done) == 2
    run("--fresh", "--only", "load=2")
    assert len(done) == 4
    assert run("--show", "--only", "load=4").exit_code == 0
    refused = run("--show", "--fresh")
    assert "--fresh: --show simulates nothing" in str(refused.exception)
    assert (len(done), len(cells(tmp_path))) == (4, 4)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_a_stopped_experiment_goes_on(tmp_path: Path, run, ending: signal.Signals) -> None:  # type: ignore[no-untyped-def]
    longer = DEFINITION.replace("jobs: 12", "jobs: 150")
    (tmp_path / "try.yaml").write_text(longer)
    argv = [sys.executable, "-m", "slurm_synergy.cli.main", "experiment", "try.yaml", "--jobs", "2"]
    process = subprocess.Popen(
        argv, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    workers: list[psutil.Process] = []
    try:
        deadline_s = time.monotonic() + 120
        while not cells(tmp_path) and process.poll() is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(ending)
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    if ending is signal.SIGINT and process.returncode == 1:  # 0: it was done already
        assert "results so far are kept in try: the same command goes on" in said
        assert "Traceback" not in said
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive, "nothing goes on by itself"
    before = {path: path.read_bytes() for path in cells(tmp_path)}
    assert before
    result = run()
    assert result.exit_code == 0, result.output
    told = f"{len(before)} of 4 simulations have a result already" in result.stderr
    assert told is (len(before) < 4), "with all of them there is nothing to go on with"
    assert len(cells(tmp_path)) == 4
    assert all(path.read_bytes() == content for path, content in before.items())


def test_a_damaged_result_is_named_and_made_again(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    run()
    victim = cells(tmp_path)[1]
    whole = json.loads(victim.read_text())
    victim.write_text("{")
    result = run()
    assert result.exit_code == 0, result.output
    assert str(Path("try") / "cells" / victim.name) in result.stderr
    assert "it is simulated again" in result.stderr
    assert json.loads(victim.read_text())["jobs"] == whole["jobs"]


def test_only_some_cells_and_short_cuts(tmp_path: Path, run) -> None:  # type: ignore[no-untyped-def]
    result = run("--only", "load=4", "--only", "mechanism=tune", "--json", "--scale", "0.9")
    found = json.loads(result.stdout)
    assert len(found["rows"]) == 1
    assert found["expected"][0]["ours"] is None, "its baseline was not asked for"
    short = json.loads(run("--json", "--scale", "0.9").stdout)
    assert [row["load"] for row in short["rows"]] == [2.0, 2.0, 4.0, 4.0], "as defined"
    assert short["expected"][0]["ours"] is not None
    assert "not comparable" in found["note"]
    assert found["expected"][0]["met"] is None
    for yes in ("fills=true", "fills=True", "load=4.0", "power=null"):
        assert run("--only", yes, "--only", "load=4", "--show", "--scale", "0.9").exit_code == 0
    wrongs = [("lode=4", "--only"), ("load", "--only"), ("load=5", "the values are load: 2.0, 4.0")]
    for wrong, place in (*wrongs, ("fills=1", "leaves no cell")):
        result = run("--only", wrong)
        assert isinstance(result.exception, ConfigError)
        assert place in str(result.exception)


def test_a_cell_that_cannot_be_simulated_is_told_and_the_others_are_there(
    tmp_path: Path,
    run,  # type: ignore[no-untyped-def]
) -> None:
    text = DEFINITION.replace("[proportional, tune]", "[proportional, magic]")
    text = text.replace("mechanism: tune", "mechanism: magic")
    (tmp_path / "try.yaml").write_text(text)
    result = run("--only", "load=2")
    assert isinstance(result.exception, SynergyError)
    assert "1 of 2 simulations failed" in str(result.exception)
    assert "failed: mechanism=magic: mechanism = 'magic'" in result.stderr
    assert len(cells(tmp_path)) == 1
    assert "proportional" in result.stdout
    result = run("--only", "mechanism=magic")
    assert "2 of 2 simulations failed" in str(result.exception)


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        ("{policy: sia, quantum_s: 60}", "quantum_s = 60.0: means nothing to policy sia"),
        (
            "{policy: gavel, power: -1}",
            "power = -1.0: means nothing to policy gavel; it is a setti",
        ),
        ("{policy: [shockwave, pollux], window: 3}", "window = 3: means nothing to policy pollux"),
        ("{policy: fifo, fills: false}", "a setting of gavel and themis and shockwave: give it in"),
    ],
)
def test_a_setting_of_another_policy_is_named_before_anything_runs(
    tmp_path: Path,
    run,  # type: ignore[no-untyped-def]
    grid: str,
    told: str,
) -> None:
    (tmp_path / "try.yaml").write_text(f"title: T\nsettings: {{jobs: 10}}\ngrids: [{grid}]\n")
    result = run()
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith("try.yaml: ")
    assert told in str(result.exception)
    assert not (tmp_path / "try").exists()


def test_no_shipped_definition_has_a_setting_that_does_nothing() -> None:
    folder = Path(experiment_run.__file__).parents[1] / "experiments"
    data = dict.fromkeys(("SIA_DATA", "SYNERGY_DATA", "PHILLY_DATA"), "/data")
    for path in sorted(folder.glob("*.yaml")):
        for cell in expand(read_definition(path), path, data):
            experiment_run.check_policy_settings(cell, path.name)


def test_shipped_definitions_are_listed_and_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    listed = json.loads(CliRunner().invoke(cli, ["experiment", "list", "--json"]).stdout)
    assert "synergy-motivating" in {one["name"] for one in listed}
    result = CliRunner().invoke(cli, ["experiment", "synergy-motivating", "--json"])
    found = json.loads(result.stdout)
    gains = {
        one["trace"]: one["avg_jct_gain"] for one in found["rows"] if one["mechanism"] == "tune"
    }
    # By hand: 23 cores for 12 (24 when a language job has ended), the language jobs as before.
    assert gains["motivating-equal.csv"] == pytest.approx(4 / (2 / 1.917 + 2), rel=0.01)
    assert gains["motivating-hungry.csv"] == pytest.approx(24 / (20 / 1.95 + 4), rel=0.02)
    assert (tmp_path / "synergy-motivating" / "report.html").is_file()


def test_an_unknown_name_is_told() -> None:
    result = CliRunner().invoke(cli, ["experiment", "nothing"])
    assert isinstance(result.exception, ConfigError)
    assert "experiment list" in str(result.exception)
    near = CliRunner().invoke(cli, ["experiment", "synergy-motivatin"])
    assert isinstance(near.exception, ConfigError)
    assert near.exception.remedy == "did you mean 'synergy-motivating'?"


def test_options_for_slurm_are_checked() -> None:
    found = parse_options(["partition=cpu", "timeout_min=5", "slurm_qos=low"])
    assert found["slurm_partition"] == "cpu"
    assert found["slurm_qos"] == "low"
    assert found["timeout_min"] == 5
    for wrong in ("partition", "=x", "mem_gb=much", "timeout_min=0"):
        with pytest.raises(ConfigError, match="--slurm-option"):
            parse_options([wrong])


def test_a_place_that_cannot_be_written_is_told_before_anything_is_simulated(
    tmp_path: Path,
    run,  # type: ignore[no-untyped-def]
) -> None:
    (tmp_path / "file").touch()
    result = run("--out", "file/below")
    assert isinstance(result.exception, ConfigError)
    assert "--out = 'file/below': cannot be written" in str(result.exception)
    assert "[1/4]" not in result.stderr
    result = run("--out", "nothing", "--show")
    assert "without --show" in str(result.exception)
    assert not (tmp_path / "nothing").exists()
