"""The Sia artifact's measured tables, against what its own code reads from them.

The tables are public but not ours to ship: SIA_DATA names the directory that has ``profiles/`` and
``workloads/``. Where it is not set these tests are skipped and say so. The expected numbers are of
runs of the published code (algorithms C.12 and F.4).
"""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
import pytest

from slurm_synergy.core.goodput import ThroughputModel
from slurm_synergy.errors import ConfigError
from slurm_synergy.profiler.fit import StepTimes, fit_throughput
from slurm_synergy.simulator.measured import read_application

_DATA = os.environ.get("SIA_DATA", "")
_TYPES = ("aws", "rtx", "dgx-ext", "quad")

needs_data = pytest.mark.skipif(
    not (Path(_DATA) / "profiles" / "bert").is_dir() if _DATA else True,
    reason="set SIA_DATA to the directory with the Sia artifact's profiles and workloads",
)


@needs_data
@pytest.mark.parametrize(
    ("name", "kind", "placement", "batch", "step_s", "sync_s"),
    [
        ("cifar10", "rtx", (1,), 256, 0.105714, 0.000292),
        ("cifar10", "rtx", (8,), 100, 0.100662, 0.044837),
        ("cifar10", "rtx", (8, 8), 128, 0.128953, 0.063157),
        ("bert", "aws", (4, 4), 12, 2.538951, 1.662843),
        ("imagenet", "dgx-ext", (8, 8), 300, 0.469552, 0.133017),
        ("imagenet", "aws", (4,) * 6, 100, 0.636825, 0.101515),
        ("bert", "rtx", (8,) * 3, 12, 1.070941, 0.623518),
    ],
)
def test_step_times_are_those_of_the_published_code(
    name: str, kind: str, placement: tuple[int, ...], batch: int, step_s: float, sync_s: float
) -> None:
    application = read_application(Path(_DATA) / "profiles" / name, _TYPES)
    found = application.steps[kind].step(placement, batch)
    assert found == pytest.approx((step_s, sync_s), abs=1e-6)


@needs_data
@pytest.mark.parametrize(
    ("name", "progress", "epochs"),
    [
        ("cifar10", 39062.908, 100),
        ("bert", 14774, 2),
        ("deepspeech2", 28536, 80),
        ("yolov3", 103443.978, 50),
        ("imagenet", 576525.595, 90),
    ],
)
def test_the_work_of_an_application_is_that_of_the_published_code(
    name: str, progress: float, epochs: int
) -> None:
    application = read_application(Path(_DATA) / "profiles" / name, _TYPES)
    assert application.total_progress == pytest.approx(progress, abs=1e-3)
    assert len(application.epochs) == epochs


@needs_data
def test_a_batch_that_was_not_measured_is_not_guessed() -> None:
    application = read_application(Path(_DATA) / "profiles" / "bert", _TYPES)
    assert application.steps["rtx"].step((1,), 500) is None
    assert application.steps["rtx"].step((1,), 1) is None


@needs_data
def test_a_fit_of_measured_times_is_at_least_as_good_as_the_published_one() -> None:
    with (Path(_DATA) / "profiles" / "bert" / "placements-rtx.csv").open() as file:
        rows = list(csv.DictReader(file))
    alone = fit_throughput(_times([row for row in rows if row["placement"] == "1"]))
    assert alone.compute_s == pytest.approx(0.165362, rel=0.01)
    assert alone.compute_s_per_sample == pytest.approx(0.023490, rel=0.01)
    times = _times(rows)
    published = ThroughputModel(
        compute_s=0.163483,
        compute_s_per_sample=0.021810,
        network_sync_s=0.308218,
        network_sync_s_per_replica=0.028185,
        node_sync_s=0.162131,
        node_sync_s_per_replica=0.052958,
        overlap=1.00001,
    )
    assert _off(fit_throughput(times), times) <= _off(published, times)


def _times(rows: list[dict[str, str]]) -> StepTimes:
    step = np.array([float(row["step_time"]) for row in rows])
    sync = np.array([float(row["sync_time"]) for row in rows])
    return StepTimes(
        nodes=np.array([len(row["placement"]) for row in rows]),
        replicas=np.array([sum(map(int, row["placement"])) for row in rows]),
        local_batch=np.array([int(float(row["local_bsz"])) for row in rows]),
        gradient_s=step - sync,
        step_s=step,
    )


def _off(model: ThroughputModel, times: StepTimes) -> float:
    """Root mean squares of the logarithms of both kinds of times."""
    passes = np.log(model.gradient_s(times.local_batch) / times.gradient_s)
    steps = model.iteration_s(times.nodes, times.replicas, times.local_batch) / times.step_s
    return float(np.sqrt(np.mean(passes**2)) + np.sqrt(np.mean(np.log(steps) ** 2)))


def _written(directory: Path, placements: str) -> Path:
    (directory / "placements-v100.csv").write_text(placements)
    (directory / "validation-8.csv").write_text(
        "progress,iteration,metric,grad_sqr,grad_var\n10,10,0.5,1,2\n20,20,0.6,1,3\n"
    )
    return directory


GOOD = "placement,local_bsz,step_time,sync_time\n1,4,0.1,0.01\n1,8,0.3,0.01\n21,4,0.4,0.2\n"


def test_own_tables_are_read(tmp_path: Path) -> None:
    application = read_application(_written(tmp_path, GOOD), ["v100"])
    assert application.steps["v100"].step((1,), 6) == pytest.approx((0.2, 0.01))
    assert application.steps["v100"].step((1, 2), 4) == pytest.approx((0.4, 0.2))
    assert application.epoch(5) == 0
    assert application.epoch(10) == 1
    assert application.epoch(99) == 1
    assert application.statistics(1, 8).variance == 3


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ("1,4,fast,0.1", "line 2, column step_time"),
        ("1,4,0.1", "line 2, column sync_time"),
        ("x,4,0.1,0.1", "line 2, column placement"),
        ("1,4,nan,0.1", "line 2, column step_time"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: str, place: str) -> None:
    header = "placement,local_bsz,step_time,sync_time"
    with pytest.raises(ConfigError, match=place):
        read_application(_written(tmp_path, f"{header}\n{row}\n"), ["v100"])


def test_a_directory_without_tables_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no placements-TYPE\.csv"):
        read_application(tmp_path, ["v100"])
