"""The simulated half of ``benchmarks/live_vs_simulated.py``, against numbers worked out by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from slurm_synergy.core.catalogue import CATALOGUE

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "live_vs_simulated.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("live_vs_simulated", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def submitted(bench: ModuleType) -> list[object]:
    return [bench.Ran(name=name, submitted_s=0.0, ended_s=0.0) for name in bench.MOTIVATING_JOBS]


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


def test_what_a_start_takes_is_added_once(bench: ModuleType) -> None:
    ideal = bench.run_simulated("proportional", 0.5, submitted(bench), {})
    starts = {one.name: 7.0 for one in ideal}
    late = bench.run_simulated("proportional", 0.5, submitted(bench), starts)
    for before, after in zip(ideal, late, strict=True):
        assert after.jct_s == pytest.approx(before.jct_s + 7.0)


def test_the_comparison_is_live_against_simulated(bench: ModuleType) -> None:
    live = [bench.Ran(name="a", submitted_s=0.0, ended_s=10.0)]
    played = [bench.Ran(name="a", submitted_s=0.0, ended_s=11.0)]
    found = bench.compare("tune", live, played, {"a": 1.0})
    assert found["avg_jct_s"] == {"live": 10.0, "simulated": 11.0, "difference": 0.1}
    assert found["jobs"][0]["start_and_end_s"] == 1.0
