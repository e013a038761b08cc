"""Limits on a real Slurm: those that keep a job from starting, and its own time limit."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from harness import ControllerProcess, Slurm, controller, slurm

from slurm_synergy.devcluster import DevCluster, NodeShape
from slurm_synergy.slurm.facts import Hold

__all__ = ["controller", "slurm"]  # fixtures

Factory = Callable[..., ControllerProcess]

TWO_NODES = (NodeShape(nodes="n[1-2]", gpus=8, cores=16, mem_mib=64_000, gpu_type="v100"),)


def reason_of(daemon: ControllerProcess, job_id: int) -> dict[str, str]:
    """Why the newest plan lets the job wait; empty when it does not."""
    plan = daemon.journal[-1]["plan"] if daemon.journal else {"waiting": {}}
    return dict(plan["waiting"].get(str(job_id), {}))


def until(holds: Callable[[], Any], daemon: ControllerProcess, *, timeout_s: float = 90) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline_s:
            pytest.fail(f"not within {timeout_s:g} s:\n{daemon.log[-3000:]}")
        time.sleep(0.1)


def is_limited(daemon: ControllerProcess, job_id: int, word: str) -> bool:
    """The job waits, and both the code and the words tell of the limit."""
    reason = reason_of(daemon, job_id)
    return reason.get("code") == "limited" and word in reason["text"]


def tries(daemon: ControllerProcess, job_id: int) -> int:
    """How often Slurm did not start the job because of a limit."""
    return daemon.log.count(f"job {job_id}: Slurm does not start it")


def test_a_job_beyond_the_partitions_limits_is_explained_and_started_when_they_change(
    controller: Factory, slurm: Slurm
) -> None:
    daemon = controller(pool={"nodes": "v100-[1-2]"})
    update = ["scontrol", "update", "partition=synergy"]
    slurm.cluster.run([*update, "MaxTime=10", "MaxNodes=1"])
    try:
        daemon.start()
        long = slurm.submit("--gres=gpu:4", "--time=20")
        wide = slurm.submit("--gres=gpu:4", "-N2", "--time=5")
        until(lambda: is_limited(daemon, long, "MaxTime"), daemon)
        until(lambda: is_limited(daemon, wide, "MaxNodes"), daemon)
        # Its GPUs are not kept for it.
        slurm.running(slurm.submit("--gres=gpu:8", "--time=5", script="sleep 3\n"))
        # It is held again after each try.
        slurm.wait(long, lambda facts: facts.held is Hold.ADMIN)
        # Waits of 2, 4, 8 seconds: however slow this machine is, there are only so many tries.
        assert max(tries(daemon, long), tries(daemon, wide)) <= 5
    finally:
        slurm.cluster.run([*update, "MaxTime=UNLIMITED", "MaxNodes=UNLIMITED"])
    slurm.running(long)
    slurm.running(wide)


def test_the_time_limit_is_for_all_runs_together(controller: Factory, slurm: Slurm) -> None:
    daemon = controller(pool={"nodes": "v100-1"})
    daemon.start()
    job_id = slurm.submit("--gres=gpu:2", "--time=10")
    slurm.wait(job_id, lambda facts: facts.running and facts.held is Hold.ADMIN)
    daemon.stop()
    # As if it had run for four minutes and a bit: 260 seconds on two GPUs.
    with closing(sqlite3.connect(daemon.home / "state" / "ledger.sqlite")) as ledger, ledger:
        ledger.execute("UPDATE jobs SET attained_gpu_s = ? WHERE job_id = ?", (2 * 260, job_id))
    daemon.start()
    slurm.cluster.run(["scontrol", "requeue", str(job_id)])
    facts = slurm.wait(job_id, lambda facts: facts.running and facts.restarts == 1)
    assert facts.time_limit_s == 6 * 60
    # For the scheduler it is still the job's limit as a whole.
    seen = [one["job"] for one in daemon.journal[-1]["snapshot"]["jobs"]]
    assert [job["time_limit_s"] for job in seen if job["job_id"] == job_id] == [10 * 60]


@pytest.fixture
def own_cluster(
    fresh_cluster: Callable[..., DevCluster], tmp_path: Path
) -> Iterator[tuple[Slurm, ControllerProcess]]:
    """A cluster with a license, that leaves interactive and het jobs to Slurm; its controller."""
    cluster = fresh_cluster(
        nodes=TWO_NODES,
        real_node=False,
        site={"interactive": "pass", "heterogeneous": "pass"},
        extra_conf=("Licenses=solver:1",),
    )
    tmp_path.chmod(0o755)
    jobs = Slurm(cluster, tmp_path)
    # What is left to Slurm does not get into the controller's reservation.
    daemon = ControllerProcess(cluster, tmp_path, pool={"nodes": "", "reservation": False})
    daemon.start()
    yield jobs, daemon
    daemon.stop()


def test_licenses_and_what_a_site_leaves_to_slurm(
    own_cluster: tuple[Slurm, ControllerProcess],
) -> None:
    jobs, daemon = own_cluster
    first = jobs.submit("--gres=gpu:1", "--mem=1000", "--licenses=solver", "--time=5")
    jobs.running(first)
    second = jobs.submit("--gres=gpu:1", "--mem=1000", "--licenses=solver", "--time=5")
    until(lambda: is_limited(daemon, second, "licenses are in use"), daemon)
    assert jobs.job(second).held is Hold.ADMIN

    step = ["srun", "-p", "synergy", "--gpus=2", "--mem=100", "-t2", "bash", "-c"]
    show = 'echo "$SLURM_JOB_ID $CUDA_VISIBLE_DEVICES"; sleep 2'
    done = jobs.cluster.run([*step, show])
    job_id, gpus = done.stdout.split()
    assert len(gpus.split(",")) == 2
    assert "synergy:pass=interactive" in jobs.job(int(job_id)).admin_comment
    # While it ran it was seen, so that its GPUs and cores were nobody else's.
    assert f"job {job_id}: adopted as it runs" in daemon.log

    het = ["sbatch", "--parsable", "-p", "synergy", "--gres=gpu:1", "--mem=100", "-t2", "-o",
           "/dev/null", ":", "-p", "synergy", "--mem=100", "-t2"]  # fmt: skip
    head = int(jobs.cluster.run(het, input="#!/bin/bash\nsleep 300\n").stdout)
    jobs.jobs.append(head)
    # Slurm starts het jobs in its backfill cycle.
    jobs.running(head, timeout_s=60)
    jobs.running(head + 1)
    assert jobs.job(head).held is Hold.NONE

    jobs.client.cancel(first)
    jobs.running(second)
    assert tries(daemon, second) <= 4
