"""``min(gpu_rate, loader_rate(c, m))`` against runs of an emulated job, over cores and caches."""

from __future__ import annotations

import importlib.util
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest

from slurm_synergy.core.pipeline import job_rate
from slurm_synergy.core.resources import Resources
from slurm_synergy.profiler.filling import DataFacts, filled
from slurm_synergy.profiler.sweep import Measurement, Sweep, SweepSpan

SUPPORT = Path(__file__).resolve().parents[2] / "benchmarks" / "support"


@pytest.fixture(scope="module")
def emulated() -> ModuleType:
    spec = importlib.util.spec_from_file_location("emulated_job", SUPPORT / "emulated_job.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_cell_of_a_grid_runs_as_predicted(emulated: ModuleType) -> None:
    pace = emulated.Pace(gpu_rate=6400.0, core_rate=960.0, items=640, storage_mib_s=960.0)

    def rate(cpus: int, cache_mib: float) -> float:
        readings = emulated.EmulatedJob(pace, cpus=cpus, cache_mib=cache_mib).readings()
        seen = list(islice(readings, 30, 130))
        readings.close()
        took_s = seen[-1].now_s - seen[0].now_s
        return float((seen[-1].samples - seen[0].samples) / took_s)

    sweep = Sweep(span=SweepSpan(gpus=1, most_cpus=12, proportional_cpus=2))
    while (cpus := sweep.next_cpus) is not None:
        point = Measurement(cpus=cpus, samples_per_s=rate(cpus, pace.dataset_mib), iterations=100)
        sweep = sweep.fed(point)
    facts = DataFacts(
        dataset_mib=pace.dataset_mib,
        samples_per_epoch=pace.items,
        storage_mib_s=pace.storage_mib_s,
    )
    result = sweep.result()
    profile = filled(result, key="emulated", gpu_type="x", facts=facts)
    assert result.knee_cpus in (6, 7)  # 6400 / 960 is 6.67 cores, 97 % of it 6.47
    bound_by = set()
    for cpus in (2, 5, 12):
        for part in (0.0, 0.4, 0.9):
            cache_mib = int(part * pace.dataset_mib)
            share = Resources(gpus=1, cpus=cpus, mem_mib=cache_mib)
            predicted = job_rate(profile, "x", (share,))
            assert predicted == pytest.approx(rate(cpus, cache_mib), rel=0.1), (cpus, part)
            limits = {
                "cores": cpus * pace.core_rate,
                "gpus": pace.gpu_rate,
                "storage": pace.storage_mib_s / pace.item_mib / (1 - part),
            }
            bound_by.add(min(limits, key=lambda name: limits[name]))
    assert bound_by == {"cores", "gpus", "storage"}
