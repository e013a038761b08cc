"""``synergyctl experiment --slurm``: cells as tasks of a job array on a real Slurm, by submitit."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from slurm_synergy.devcluster import DevCluster

DEFINITION = """
title: On a cluster
settings: {nodes: 1, jobs: 12}
grids:
  - mechanism: [proportional, tune, magic]
columns: [avg_jct_h]
"""


def test_a_grid_runs_as_a_job_array(cluster: DevCluster, tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="submitit (extra sweep) is not installed")
    (tmp_path / "try.yaml").write_text(DEFINITION)
    argv = [sys.executable, "-m", "slurm_synergy.cli.main", "experiment", "try.yaml", "--json"]
    options = ["--slurm", "--jobs", "2"]
    for option in ("partition=main", "timeout_min=5", "mem_gb=1"):
        options += ["--slurm-option", option]
    done = cluster.run([*argv, *options], cwd=tmp_path, check=False, timeout_s=240)
    assert done.returncode == 1, done.stderr
    assert "magic" in done.stderr
    assert "1 of 3 simulations failed" in done.stderr
    found = json.loads(done.stdout)
    assert [row["mechanism"] for row in found["rows"]] == ["proportional", "tune"]
    logs = list((tmp_path / "try" / "slurm").rglob("*_log.out"))
    assert len(logs) >= 3, "every cell ran as a task of its own"

    only = ["--only", "mechanism=proportional", "--only", "mechanism=tune"]
    here = cluster.run([*argv, "--fresh", *only], cwd=tmp_path)
    assert json.loads(here.stdout)["rows"] == found["rows"], "the same numbers as without Slurm"
