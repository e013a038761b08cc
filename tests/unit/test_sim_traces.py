"""Traces are read as they are, and what is malformed is named by file, line and column."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_synergy.errors import ConfigError
from slurm_synergy.simulator.generate import ModelMix, generate, parse_split
from slurm_synergy.simulator.sensitivity import TASKS
from slurm_synergy.simulator.traces import read_trace

HEADER = "job_id,model,arrival_s,iterations,gpus\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_a_recorded_trace_is_read_by_arrival(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "1,gnmt,7.5,100,2\n0,alexnet,3,50,1\n")
    jobs = read_trace(str(path)).jobs
    assert [(job.job_id, job.model, job.arrival_s, job.iterations, job.gpus) for job in jobs] == [
        (0, "alexnet", 3.0, 50, 1),
        (1, "gnmt", 7.5, 100, 2),
    ]


def test_run_times_may_stand_in_for_iterations(tmp_path: Path) -> None:
    path = write(tmp_path, "job_id,model,arrival_s,gpus,duration_s\n5,lstm,0,1,60.5\n")
    (job,) = read_trace(str(path)).jobs
    assert (job.iterations, job.duration_s) == (None, 60.5)


@pytest.mark.parametrize(
    ("row", "place"),
    [
        ("x,gnmt,0,1,1", "line 3, column job_id = 'x'"),
        ("0,gnmt,0,1,1", "line 3, column job_id = '0'"),
        ("2,,0,1,1", "line 3, column model"),
        ("2,gnmt,-1,1,1", "line 3, column arrival_s = '-1'"),
        ("2,gnmt,nan,1,1", "line 3, column arrival_s = 'nan'"),
        ("2,gnmt,1e300,1,1", "line 3, column arrival_s = '1e300'"),
        ("2,gnmt,0,0,1", "line 3, column iterations = '0'"),
        ("2,gnmt,0,1,1.5", "line 3, column gpus = '1.5'"),
        ("2,gnmt,0,1", "line 3, column gpus"),
        ("2,gnmt,0,1,1,9", "line 3, column (surplus)"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, row: str, place: str) -> None:
    path = write(tmp_path, f"{HEADER}0,gnmt,0,1,1\n{row}\n")
    with pytest.raises(ConfigError) as caught:
        read_trace(str(path))
    assert f"{path}: {place}" in str(caught.value)


def test_missing_columns_and_files_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, "job_id,model\n1,gnmt\n")
    with pytest.raises(ConfigError, match="line 1: has no column arrival_s, gpus"):
        read_trace(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(str(tmp_path / "none.csv"))
    with pytest.raises(ConfigError, match="has no job"):
        read_trace(str(write(tmp_path, HEADER)))
    with pytest.raises(ConfigError, match=r"line 1: the file is empty; .* must name job_id"):
        read_trace(str(write(tmp_path, "")))
    with pytest.raises(ConfigError, match="line 1: has more than one column gpus"):
        read_trace(str(write(tmp_path, HEADER.replace("gpus", "gpus,gpus"))))
    with pytest.raises(ConfigError, match="cannot be read: field larger"):
        read_trace(str(write(tmp_path, HEADER + "1," + "x" * 200_000)))
    with pytest.raises(ConfigError, match=r"phily:a\.csv: is no kind of trace"):
        read_trace("phily:a.csv")
    for option in ("jobs=inf", "jobs=nan", "from_h=-1"):
        with pytest.raises(ConfigError, match=f"{option.partition('=')[0]} = "):
            read_trace(f"philly:{path},{option}")


def test_the_philly_list_is_cut_as_the_paper_cuts_it(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "timestamp,duration,num_gpus,gpu_time,cluster\n"
        "2017-10-09 08:00:00,7200,8,0,a\n"  # kept, an hour in
        "2017-10-09 07:00:00,7200,1,0,a\n"  # kept, the first
        "2017-10-09 09:00:00,60,1,0,a\n"  # too short
        "2017-10-09 09:00:00,7200,24,0,a\n"  # too large
        "2017-10-09 12:00:00,7200,1,0,a\n",  # after to_h
    )
    trace = read_trace(f"philly:{path},to_h=3")
    assert [(job.arrival_s, job.gpus, job.duration_s) for job in trace.jobs] == [
        (0.0, 1, 7200.0),
        (3600.0, 8, 7200.0),
    ]
    assert "2 of 5 jobs" in trace.assumptions[0]
    with pytest.raises(ConfigError, match="speed=1"):
        read_trace(f"philly:{path},speed=1")


SACCT = """JobID|User|Submit|Elapsed|AllocTRES|State
12|ann|2024-05-01T10:00:00|01:00:00|billing=8,cpu=8,gres/gpu:v100=2,gres/gpu=2,mem=8G,node=1|COMPLETED
12.batch||2024-05-01T10:00:00|01:00:00|cpu=8,mem=8G,node=1|COMPLETED
13|bob|2024-05-01T09:00:00|1-00:00:30|billing=8,cpu=8,gres/gpu:a100=8,mem=8G,node=2|FAILED
14_3|bob|2024-05-01T09:30:00|00:10:00|billing=8,cpu=8,mem=8G,node=1|COMPLETED
15|bob|2024-05-01T09:30:00|00:00:00||CANCELLED by 5
"""


def test_slurms_accounting_is_a_trace(tmp_path: Path) -> None:
    path = write(tmp_path, SACCT)
    trace = read_trace(f"sacct:{path}")
    assert [
        (job.user, job.arrival_s, job.gpus, job.nodes, job.duration_s) for job in trace.jobs
    ] == [
        ("bob", 0.0, 8, 2, 86_430.0),
        ("ann", 3600.0, 2, 1, 3600.0),
    ]
    assert "1 steps, 1 jobs without GPUs, 1 that never ran" in trace.assumptions[0]


def test_malformed_accounting_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, SACCT.replace("1-00:00:30", "soon"))
    with pytest.raises(ConfigError, match=r"line 4, column Elapsed = 'soon'"):
        read_trace(f"sacct:{path}")
    path = write(tmp_path, SACCT.replace("2024-05-01T09:00:00", "Unknown"))
    with pytest.raises(ConfigError, match=r"line 4, column Submit = 'Unknown'"):
        read_trace(f"sacct:{path}")
    path.write_text(
        "JobID|User|Submit|Elapsed|AllocTRES\n8|ann|2026-01-01T00:00:00|01:00:00|cpu=4,node=1\n"
    )
    with pytest.raises(
        ConfigError, match=r"1 without gres/gpu in AllocTRES, 0 that .*AccountingStor"
    ):
        read_trace(f"sacct:{path}")


def test_generated_traces_have_the_papers_distribution() -> None:
    trace = generate("philly-derived:load=9,split=20/70/10,gpus=philly,jobs=4000,seed=3", 0)
    minutes = [(job.duration_s or 0.0) / 60 for job in trace.jobs]
    assert 10**1.5 <= min(minutes) <= max(minutes) <= 10**4
    short = sum(one < 1000 for one in minutes) / len(minutes)
    assert short == pytest.approx(0.8, abs=0.03)
    per_hour = len(trace.jobs) / (trace.jobs[-1].arrival_s / 3600)
    assert per_hour == pytest.approx(9, rel=0.06)
    for task, part in zip(TASKS, (0.2, 0.7, 0.1), strict=True):
        found = sum(job.model in TASKS[task] for job in trace.jobs) / len(trace.jobs)
        assert found == pytest.approx(part, abs=0.001)
    single = sum(job.gpus == 1 for job in trace.jobs) / len(trace.jobs)
    assert single == pytest.approx(0.909, abs=0.02)


def test_generated_traces_repeat_by_seed() -> None:
    one = generate("philly-derived:jobs=50", 7)
    assert one == generate("philly-derived:jobs=50,seed=7", 1)
    assert one != generate("philly-derived:jobs=50", 8)
    static = generate("philly-derived:jobs=5,arrivals=static", 7)
    assert {job.arrival_s for job in static.jobs} == {0.0}


@pytest.mark.parametrize(
    "recipe",
    [
        "helios",
        "philly-derived:lod=9",
        "philly-derived:load=0",
        "philly-derived:split=1/2",
        "philly-derived:gpus=two",
        "philly-derived:jobs=many",
        "philly-derived:jobs=nan",
        "philly-derived:jobs=1.5",
        "philly-derived:jobs=1e30",
        "philly-derived:load=nan",
        "philly-derived:load=1e-300",
        "philly-derived:seed=inf",
    ],
)
def test_recipes_that_are_not_understood_are_refused(recipe: str) -> None:
    with pytest.raises(ConfigError):
        generate(recipe, 0)


def test_models_are_dealt_out_one_after_another_within_a_task() -> None:
    mix = ModelMix(parse_split("0/100/0"))
    assert [mix.next() for _ in range(4)] == ["gnmt", "transformer", "lstm", "gnmt"]
