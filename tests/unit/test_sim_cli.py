"""``synergyctl simulate`` as scripts and people use it."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slurm_synergy.cli.commands import cli
from slurm_synergy.errors import ConfigError

CLUSTER = """
nodes:
  - {name: small, count: 2, gpu_type: v100, gpus: 4, cpus: 12, mem_gib: 250}
"""
KEYS = [
    "policy",
    "mechanism",
    "jobs",
    "avg_jct_s",
    "p99_jct_s",
    "makespan_s",
    "gpu_hours_per_job",
    "restarts_per_job",
    "gpu_util",
    "cpu_util",
    "mem_util",
    "contention",
    "ftf",
    "floor",
    "round_ms",
    "wall_s",
]


def run(tmp_path: Path, *options: str, cluster: str = CLUSTER) -> Result:
    (tmp_path / "cluster.yaml").write_text(cluster)
    (tmp_path / "trace.csv").write_text(
        "job_id,model,arrival_s,iterations,gpus\n0,res18,0,9000,1\n1,gnmt,9,30000,2\n"
    )
    argv = ["simulate", "--cluster", str(tmp_path / "cluster.yaml")]
    if not {"--trace", "--generate"} & set(options):
        argv += ["--trace", str(tmp_path / "trace.csv")]
    return CliRunner().invoke(cli, [*argv, *options])


def test_json_is_the_documented_object(tmp_path: Path) -> None:
    result = run(tmp_path, "--policy", "srtf", "--mechanism", "tune", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found) == KEYS
    assert list(found["contention"]) == ["mean", "max"]
    assert list(found["ftf"]) == ["worst", "unfair_fraction", "pooled"]
    assert list(found["floor"]) == ["judged", "below", "worst"]
    assert list(found["round_ms"]) == ["median", "p95"]
    assert (found["policy"], found["mechanism"], found["jobs"]) == ("srtf", "tune", 2)
    assert found["avg_jct_s"] == pytest.approx((9000 * 0.64 / 2.4 + 30_000 * 0.12 + 1) / 2)


def test_jobs_and_timeline_are_written(tmp_path: Path) -> None:
    jobs, timeline = tmp_path / "jobs.csv", tmp_path / "timeline.csv"
    result = run(tmp_path, "--jobs-out", str(jobs), "--timeline-out", str(timeline))
    assert result.exit_code == 0, result.output
    assert "average JCT" in result.stdout
    lines = list(csv.DictReader(jobs.read_text().splitlines()))
    assert [(line["job_id"], line["model"], line["gpus"]) for line in lines] == [
        ("0", "res18", "1"),
        ("1", "gnmt", "2"),
    ]
    assert float(lines[0]["speedup"]) == pytest.approx(2.4)
    assert timeline.read_text().splitlines()[1].split(",")[3] == "1"


def test_what_had_to_be_assumed_is_in_the_output(tmp_path: Path) -> None:
    accounts = tmp_path / "accounts"
    accounts.write_text(
        "JobID|Submit|Elapsed|AllocTRES\n1|2024-05-01T10:00:00|01:00:00|gres/gpu=2,node=1\n"
    )
    result = run(tmp_path, "--trace", f"sacct:{accounts}", "--json", "--split", "0/100/0")
    assert result.exit_code == 0, result.output
    assumed = " ".join(json.loads(result.stdout)["assumptions"])
    assert "dealt out 0/100/0" in assumed
    assert "elapsed times" in assumed
    other = CLUSTER.replace("v100", "a100")
    found = json.loads(run(tmp_path, "--json", cluster=other).stdout)
    assert found["assumptions"] == ["GPUs of type a100 are taken to be as fast as a v100"]


def test_reference_semantics_and_costs_change_the_outcome(tmp_path: Path) -> None:
    exact = json.loads(run(tmp_path, "--json").stdout)["avg_jct_s"]
    late = json.loads(run(tmp_path, "--json", "--profiling-cost", "100").stdout)["avg_jct_s"]
    ideal = run(tmp_path, "--json", "--profiling-cost", "100", "--ideal")
    rounds = json.loads(run(tmp_path, "--json", "--reference-semantics").stdout)["avg_jct_s"]
    assert late == pytest.approx(exact + 100, abs=1)
    assert json.loads(ideal.stdout)["avg_jct_s"] == exact
    assert rounds > exact


@pytest.mark.parametrize(
    ("options", "place"),
    [
        (("--policy", "lottery"), "--policy = 'lottery'"),
        (("--mechanism", "magic"), "--mechanism = 'magic'"),
        (("--measure", "5"), "--measure = '5'"),
        (("--measure", "²:5"), "--measure = '²:5'"),
        (("--measure", "7:999999999999"), "job 7 is to be measured but not in the trace"),
        (("--jobs-out", "/none/jobs.csv"), "/none/jobs.csv: is in a directory"),
        (("--trace", "/none"), "/none: cannot be read"),
        (("--generate", "noise:"), "--generate = 'noise:'"),
        (("--split", "1/2"), "split = '1/2'"),
    ],
)
def test_wrong_words_are_named(tmp_path: Path, options: tuple[str, ...], place: str) -> None:
    result = run(tmp_path, *options)
    assert isinstance(result.exception, ConfigError)
    assert place in str(result.exception)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("nodes: []", "nodes"),
        ("- a", "nodes"),
        (CLUSTER.replace("gpus: 4", "gpus: 0"), "nodes[0].gpus = 0"),
        (CLUSTER.replace("count: 2", "count: 999999999"), "nodes[0].count = 999999999"),
        (CLUSTER.replace("mem_gib: 250", "mem_gib: .inf"), "nodes[0].mem_gib = inf"),
        (CLUSTER + "pool: a\n", "pool: is unknown"),
        (CLUSTER.replace("gpus: 4", "gpus: true"), "nodes[0].gpus = True"),
        (CLUSTER.replace("cpus: 12, ", ""), "nodes[0].cpus: is missing"),
        (CLUSTER.replace("count: 2", "kount: 2"), "nodes[0].kount"),
        (CLUSTER + CLUSTER.replace("nodes:", ""), "two groups"),
        ("nodes: [", "cannot be read"),
    ],
)
def test_wrong_pools_are_named(tmp_path: Path, content: str, place: str) -> None:
    result = run(tmp_path, cluster=content)
    assert isinstance(result.exception, ConfigError)
    assert place in str(result.exception)


@pytest.mark.parametrize("option", ["--round", "--restart-cost", "--profile-error"])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_numbers_are_finite(tmp_path: Path, option: str, value: str) -> None:
    result = run(tmp_path, option, value)
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.stderr
