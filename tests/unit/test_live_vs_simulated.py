"""The simulated half of ``benchmarks/live_vs_simulated.py``, against numbers worked out by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.errors import DemoError

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "live_vs_simulated.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("live_vs_simulated", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def ran(bench: ModuleType, name: str, **parts: float) -> Any:
    nothing = dict.fromkeys(("submitted_s", "wait_s", "start_s", "train_s", "end_s"), 0.0)
    return bench.Ran(name=name, **{**nothing, **parts})


def submitted(bench: ModuleType) -> list[object]:
    return [ran(bench, name) for name in bench.MOTIVATING_JOBS]


def test_the_scripts_say_what_they_train(bench: ModuleType) -> None:
    for name in bench.MOTIVATING_JOBS:
        work = bench.read_work(name)
        assert work.model in CATALOGUE
        assert work.gpus == 4
        assert work.samples > 1000


def test_proportional_is_work_over_rate(bench: ModuleType) -> None:
    ran = {one.name: one for one in bench.run_simulated("proportional", 1.0, submitted(bench), {})}
    work = bench.read_work("image-resnet18")
    profile = CATALOGUE[work.model]
    assert profile.pipeline is not None
    per_core = profile.pipeline.preprocess[0][1]
    share_s = work.samples / (12 * per_core)
    assert ran["image-resnet18"].jct_s == pytest.approx(share_s, rel=1e-3)


def test_tune_is_faster_for_the_hungry_and_the_same_for_the_others(bench: ModuleType) -> None:
    by = {
        name: {one.name: one.jct_s for one in bench.run_simulated(name, 1.0, submitted(bench), {})}
        for name in bench.MECHANISM_NAMES
    }
    for job in bench.MOTIVATING_JOBS:
        gain = by["proportional"][job] / by["tune"][job]
        assert gain == pytest.approx(1.0 if job.startswith("language") else 1.95, abs=0.1)


def test_what_a_start_and_an_end_take_is_added_once(bench: ModuleType) -> None:
    ideal = bench.run_simulated("proportional", 0.5, submitted(bench), {})
    costs = {one.name: bench.Costs(start_s=5.0, end_s=2.0) for one in ideal}
    late = bench.run_simulated("proportional", 0.5, submitted(bench), costs)
    for before, after in zip(ideal, late, strict=True):
        assert after.jct_s == pytest.approx(before.jct_s + 7.0)
        assert after.train_s == pytest.approx(before.train_s)
        assert (after.start_s, after.end_s) == (5.0, 2.0)


def test_costs_are_the_mean_of_the_runs(bench: ModuleType) -> None:
    runs = [[ran(bench, "a", start_s=start_s, end_s=1.0)] for start_s in (2.0, 4.0)]
    assert bench.mean_costs(*runs) == {"a": bench.Costs(start_s=3.0, end_s=1.0)}


def test_the_parts_of_a_live_job_are_its_whole_time(bench: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.write_text(
        '{"samples": 9, "seconds": 20.0, "at_s": 1031.5, "workers_s": 0.5, "finished": true}\n'
    )
    job = bench.Submitted(name="a", job_id=7, submitted_s=1000.0, progress_in=output)
    facts = SimpleNamespace(start_s=1003.0, end_s=1034.0)
    watch = SimpleNamespace(shares=lambda job_id: ((23, 5), (24, 5)))
    found = bench.ran(job, facts, 1000.25, {7: 1001.5}, 1000.0, watch)
    parts = (found.submitted_s, found.wait_s, found.start_s, found.train_s, found.end_s)
    assert parts == (0.25, 1.25, 10.0, 20.0, 3.0)
    assert (found.slurm_s, found.workers_s) == (2.0, 0.5)
    assert found.shares == (23, 24)
    assert found.ended_s == 34.5, "Slurm's second at its middle"
    output.write_text('{"samples": 9, "seconds": 20.0, "at_s": 1031.5}\n')
    with pytest.raises(DemoError, match="does not tell when it trained"):
        bench.ran(job, facts, 1000.25, {7: 1001.5}, 1000.0, watch)


def test_the_comparison_is_live_against_simulated(bench: ModuleType) -> None:
    live = [ran(bench, "a", train_s=10.0)]
    played = [ran(bench, "a", train_s=9.0, wait_s=2.0)]
    found = bench.compare("tune", live, played)
    assert found["avg_jct_s"] == {"live": 10.0, "simulated": 11.0, "difference": 0.1}
    assert found["jobs"][0]["simulated"]["wait_s"] == 2.0
