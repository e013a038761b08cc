"""Sia's workloads are read as they are; what is malformed is named by file, line and column."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_synergy.errors import ConfigError
from slurm_synergy.simulator.sia_workload import read_workload
from slurm_synergy.simulator.traces import read_trace

HEADER = "name,time,application,num_replicas,batch_size\n"


def workload(tmp_path: Path, rows: str) -> Path:
    path = tmp_path / "workload.csv"
    path.write_text(HEADER + rows)
    return path


@pytest.fixture
def profiles(tmp_path: Path) -> Path:
    """One application: 1 s a step on one GPU, 1.5 s on two of a node, 0.5 s of it synchronising."""
    directory = tmp_path / "profiles" / "toy"
    directory.mkdir(parents=True)
    (directory / "placements-aws.csv").write_text(
        "placement,local_bsz,step_time,sync_time\n"
        "1,16,0.6,0.0\n1,32,1.0,0.0\n2,16,1.1,0.5\n2,32,1.5,0.5\n"
    )
    (directory / "scalability-aws.csv").write_text(
        "num_nodes,num_replicas,local_bsz,step_time,sync_time\n"
        "1,1,16,0.6,0.0\n1,1,32,1.0,0.0\n2,2,16,2.0,1.0\n2,2,32,2.4,1.0\n"
        "2,4,16,2.1,1.1\n2,4,32,2.5,1.1\n3,3,16,2.2,1.2\n3,3,32,2.6,1.2\n"
    )
    for batch, steps in ((32, 100), (64, 60), (256, 40)):
        (directory / f"validation-{batch}.csv").write_text(
            "progress,iteration,metric,grad_sqr,grad_var\n"
            f"50,{steps // 2},0.5,0.001,0.002\n100,{steps},0.9,0.001,0.002\n"
        )
    return tmp_path / "profiles"


def test_a_workload_is_read(tmp_path: Path) -> None:
    path = workload(tmp_path, "cifar10-0,107,cifar10,6,2048\nbert-1,110.5,bert,12,384\n")
    found = read_workload(path)
    assert [(one.name, one.submitted_s, one.application, one.gpus, one.batch) for one in found] == [
        ("cifar10-0", 107.0, "cifar10", 6, 2048),
        ("bert-1", 110.5, "bert", 12, 384),
    ]


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ("a,1,toy,2,64", "column name = 'a'"),
        ("b,soon,toy,2,64", "column time = 'soon'"),
        ("b,-1,toy,2,64", "column time = '-1'"),
        ("b,1,,2,64", "column application"),
        ("b,1,../x,2,64", "column application = '../x'"),
        ("b,1,toy,0,64", "column num_replicas = '0'"),
        ("b,1,toy,1.5,64", "column num_replicas = '1.5'"),
        ("b,1,toy,2", "column batch_size"),
        ("b,1,toy,4,3", "column batch_size = '3'"),
        ("b,1,toy,2,64,adaptive", "column (surplus)"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, row: str, place: str) -> None:
    path = workload(tmp_path, f"a,0,toy,1,32\n{row}\n")
    with pytest.raises(ConfigError) as caught:
        read_workload(path)
    assert f"{path}: line 3, {place}" in str(caught.value)


def test_what_a_workload_lacks_is_said(tmp_path: Path) -> None:
    path = workload(tmp_path, "a,0,toy,1,32\n")
    with pytest.raises(ConfigError, match="not how long they run; add profiles=DIR"):
        read_trace(f"sia:{path}")
    with pytest.raises(ConfigError, match="has no job"):
        read_trace(f"sia:{workload(tmp_path, '')}")


def test_run_times_come_from_the_measurements(tmp_path: Path, profiles: Path) -> None:
    path = workload(tmp_path, "b,9,toy,2,64\na,0,toy,1,32\n")
    trace = read_trace(f"sia:{path},profiles={profiles}")
    assert [(one.arrival_s, one.gpus) for one in trace.jobs] == [(0.0, 1), (9.0, 2)]
    assert trace.jobs[0].duration_s == pytest.approx(100 * 1.0)
    assert trace.jobs[1].duration_s == pytest.approx(60 * 1.5)
    assert "this is not Sia" in trace.assumptions[0]


def test_large_batches_take_several_passes(tmp_path: Path, profiles: Path) -> None:
    path = workload(tmp_path, "a,0,toy,2,256\n")
    (job,) = read_trace(f"sia:{path},profiles={profiles}").jobs
    # 128 samples a GPU were not measured, four passes of 32 were; they synchronise once.
    assert job.duration_s == pytest.approx(40 * (1.5 + 3 * (1.5 - 0.5)))


@pytest.mark.parametrize(
    ("row", "options", "what"),
    [
        ("a,0,toy,64,64", "", "line 2, column num_replicas = 64: toy was not measured"),
        ("a,0,none,1,32", "", "profiles/none: is not there"),
        ("a,0,toy,1,31", "", "validation-31.csv: cannot be read"),
        ("a,0,toy,1,32", ",gpu_type=h100", "no placements-TYPE.csv for any of h100"),
        ("a,0,toy,1,32", ",per_node=many", "per_node = 'many'"),
        ("a,0,toy,1,32", ",speed=2", "speed=2"),
    ],
)
def test_what_was_not_measured_is_named(
    tmp_path: Path, profiles: Path, row: str, options: str, what: str
) -> None:
    path = workload(tmp_path, row + "\n")
    with pytest.raises(ConfigError) as caught:
        read_trace(f"sia:{path},profiles={profiles}{options}")
    assert what in str(caught.value)
