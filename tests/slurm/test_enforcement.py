"""``borrow``, ``requeue`` and ``auto`` on a real Slurm whose cores are the machine's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import ControllerProcess, Slurm, controller, slurm
from test_end_to_end import FAST, THREADS, Job, free_port, masks, needs_two_cores, until

from slurm_synergy.devcluster import DevCluster, NodeShape

__all__ = ["controller", "slurm"]  # fixtures

Factory = Callable[..., ControllerProcess]
HUNGRY = "--comment=synergy:profile=resnet18-imagenet,min_mem=100M"
MODEST = "--comment=synergy:profile=gnmt-wmt16,min_mem=100M"


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "threads.py"
    path.write_text(THREADS, encoding="utf-8")
    return f"python3 {path} {tmp_path}"


@pytest.fixture
def own_cores(cluster: DevCluster) -> Iterator[None]:
    """A partition in which Slurm gives every job cores of its own."""
    change = ["scontrol", "update", "PartitionName=synergy"]
    cluster.run([*change, "OverSubscribe=NO"], check=True)
    yield
    cluster.run([*change, "OverSubscribe=FORCE:8"], check=True)


def start(controller: Factory, enforcement: str, policy: str = "fifo") -> ControllerProcess:
    daemon = controller(
        enforcement=enforcement,
        pool={"nodes": "real-1"},
        scheduling={**FAST, "policy": policy, "mechanism": "tune"},
        leases={"listen": f"127.0.0.1:{free_port()}", "lease_s": 4.0},
    )
    daemon.start()
    return daemon


@needs_two_cores
def test_jobs_borrow_cores_beyond_what_slurm_gave_them_and_keep_their_floor(
    controller: Factory, slurm: Slurm, program: str, own_cores: None
) -> None:
    daemon = start(controller, "auto")
    assert "enforcement borrow: partition 'synergy' has OverSubscribe=NO, but" in daemon.log
    cpus = sorted(os.sched_getaffinity(0))
    both = f"{cpus[0]}-{cpus[-1]}" if len(cpus) > 1 else str(cpus[0])
    hungry = Job(slurm, daemon).submit(f"{program}/end-hungry", "--gres=gpu:1", HUNGRY)
    pid = hungry.pid()
    (part,) = slurm.job(hungry.job_id).allocation
    assert len(part.cpu_ids) == len(cpus) // 2, "its proportional share, and no more"
    until(lambda: masks(pid) == {both}, f"it borrows the others: {masks(pid)}\n{hungry.output}")

    modest = Job(slurm, daemon).submit(f"{program}/end-modest", "--gres=gpu:1", MODEST)
    other = modest.pid()
    until(
        lambda: len(masks(pid) | masks(other)) == 2 and both not in masks(pid) | masks(other),
        f"each has its own: {masks(pid)}, {masks(other)}",
    )
    (slurm.home / "end-modest").touch()
    modest.completed()
    until(lambda: masks(pid) == {both}, f"the cores came back: {masks(pid)}")
    assert slurm.job(hungry.job_id).restarts == 0
    # Without the controller it falls back to as many cores as Slurm gave it.
    daemon.kill()
    until(lambda: masks(pid) < {str(cpu) for cpu in cpus}, f"its floor: {masks(pid)}")
    (slurm.home / "end-hungry").touch()
    hungry.completed()


@needs_two_cores
def test_with_requeue_slurm_gives_what_was_planned_and_a_change_restarts_the_job(
    controller: Factory, slurm: Slurm, program: str, own_cores: None
) -> None:
    daemon = start(controller, "requeue", policy="srtf")
    cpus = sorted(os.sched_getaffinity(0))
    long_one = Job(slurm, daemon).submit(
        f"{program}/end-long", "--gres=gpu:2", "--time=600", HUNGRY
    )
    long_one.pid()
    (part,) = slurm.job(long_one.job_id).allocation
    assert len(part.cpu_ids) == len(cpus)
    short = Job(slurm, daemon).submit(f"{program}/end-short", "--gres=gpu:1", "--time=5", MODEST)
    other = short.pid()
    (part,) = slurm.job(short.job_id).allocation
    assert len(part.cpu_ids) == len(cpus) // 2
    assert len(masks(other)) == 1
    stopped = slurm.job(long_one.job_id)
    assert stopped.pending
    (slurm.home / "end-short").touch()
    short.completed()
    again = slurm.running(long_one.job_id, timeout_s=40)
    assert again.restarts == 1
    assert len(again.allocation[0].cpu_ids) == len(cpus)
    (slurm.home / "end-long").touch()
    long_one.completed()


def test_floors_are_on_the_sockets_of_the_gpus_that_slurm_chose(
    fresh_cluster: Callable[..., DevCluster], tmp_path: Path
) -> None:
    shape = NodeShape(
        nodes="v100-1",
        gpus=8,
        cores=48,
        mem_mib=500_000,
        gpu_type="v100",
        sockets=2,
        threads_per_core=2,
        gpus_by_socket=True,
    )
    cluster = fresh_cluster(nodes=[shape], real_node=False)
    slurm = Slurm(cluster, tmp_path)
    daemon = ControllerProcess(cluster, tmp_path, pool={"nodes": "v100-1"})
    daemon.start()
    try:
        jobs = [slurm.submit(f"--gres=gpu:v100:{gpus}") for gpus in (2, 2, 4)]
        sockets = {}
        for job_id in jobs:
            (part,) = slurm.running(job_id).allocation
            sockets[job_id] = {gpu // 4 for gpu in part.gpu_ids}

        def floors() -> dict[int, set[int]]:
            seen = daemon.journal[-1]["snapshot"]["jobs"]
            leases = {one["job"]["job_id"]: one["lease"] for one in seen}
            return {job: set(leases[job]["floor"]["v100-1"]) for job in jobs if leases.get(job)}

        def near() -> bool:
            found = floors()
            return len(found) == len(jobs) and all(
                {core // 24 for core in found[job_id]} <= sockets[job_id] for job_id in jobs
            )

        slurm.client.cancel(slurm.submit("--gres=gpu:v100:8"))  # its arrival is a round
        until(near, f"floors {floors()} near {sockets}\n{daemon.log}")
        found = floors()
        assert [len(found[job_id]) for job_id in jobs] == [12, 12, 24]
        assert len(set().union(*found.values())) == 48
        for floor in found.values():
            assert {core ^ 1 for core in floor} == floor, "both threads of each core"
    finally:
        daemon.stop()
        slurm.cancel_all()
