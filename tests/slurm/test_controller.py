"""The controller on a real Slurm: starts, stops, restarts, adoption, and what it leaves alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, ControllerProcess, Slurm, controller, slurm

from slurm_synergy.devcluster import DevCluster
from slurm_synergy.slurm.facts import Hold, JobState

__all__ = ["controller", "slurm"]  # fixtures

Factory = Callable[..., ControllerProcess]


def placed(daemon: ControllerProcess, job_id: int) -> dict[str, Any]:
    """The newest placement that the journal has for the job: node -> share."""
    # The round's record is written after the job was released.
    deadline_s = time.monotonic() + 5
    while time.monotonic() < deadline_s:
        for record in reversed(daemon.journal):
            for one in record["plan"]["placements"]:
                if one["job_id"] == job_id:
                    return dict(one["shares"])
        time.sleep(0.1)
    pytest.fail(f"job {job_id} was never placed:\n{daemon.log}")


def last_seen(daemon: ControllerProcess, job_id: int) -> dict[str, Any]:
    """The job as the newest round saw it."""
    for one in daemon.journal[-1]["snapshot"]["jobs"]:
        if one["job"]["job_id"] == job_id:
            return dict(one)
    pytest.fail(f"the last round did not see job {job_id}:\n{daemon.log}")


def check_allocation(daemon: ControllerProcess, slurm: Slurm, job_id: int, cpus: int) -> None:
    """Nodes, GPUs and memory as planned; CPUs of each node as given."""
    facts, plan = slurm.running(job_id), placed(daemon, job_id)
    assert {part.node for part in facts.allocation} == set(plan)
    for part in facts.allocation:
        share = plan[part.node]
        assert len(part.gpu_ids) == share["gpus"]
        assert part.mem_mib == share["mem_mib"]
        assert len(part.cpu_ids) == cpus


@pytest.mark.parametrize(
    ("options", "nodes", "gpus"),
    [
        (["--gres=gpu:v100:2", "-c1"], 1, 2),
        (["--gres=gpu:2"], 1, 2),
        (["--gres=gpu:v100:8", "-N2", "--ntasks-per-node=1"], 2, 8),
        (["--gres=gpu:v100:2", "-N2", "--ntasks-per-node=2"], 2, 2),
    ],
    ids=["one node", "any type", "one task per node", "one task per GPU"],
)
def test_a_job_starts_on_exactly_what_was_planned(
    controller: Factory, slurm: Slurm, options: list[str], nodes: int, gpus: int
) -> None:
    daemon = controller()
    daemon.start()
    job_id = slurm.submit(*options, script="srun -l hostname\nsleep 60\n")
    facts = slurm.running(job_id)
    types = {part.gpu_type for part in facts.allocation}
    assert len(types) == 1
    # Under shared enforcement the job gets all cores of its nodes; its lease has its share.
    cores = {"v100": 24, "a100": 64}[next(iter(types)) or ""]
    check_allocation(daemon, slurm, job_id, cores)
    assert len(facts.allocation) == nodes
    assert all(len(part.gpu_ids) == gpus for part in facts.allocation)
    share = next(iter(placed(daemon, job_id).values()))
    assert share["cpus"] == cores * gpus // 8


def test_requeue_enforcement_asks_for_exactly_the_planned_cores(
    controller: Factory, slurm: Slurm
) -> None:
    daemon = controller(enforcement="requeue")
    daemon.start()
    one = slurm.submit("--gres=gpu:v100:4")
    two = slurm.submit("--gres=gpu:v100:2", "-N2", "--ntasks-per-node=2")
    check_allocation(daemon, slurm, one, 12)
    check_allocation(daemon, slurm, two, 6)


def test_two_jobs_share_a_node_and_its_cores(controller: Factory, slurm: Slurm) -> None:
    daemon = controller(pool={"nodes": "v100-1"})
    daemon.start()
    first = slurm.submit("--gres=gpu:v100:4", script=task_script(daemon, slurm))
    second = slurm.submit("--gres=gpu:v100:4", script=task_script(daemon, slurm))
    parts = [slurm.running(job_id).allocation[0] for job_id in (first, second)]
    assert [part.node for part in parts] == ["v100-1", "v100-1"]
    assert set(parts[0].gpu_ids).isdisjoint(parts[1].gpu_ids)
    for job_id in (first, second):
        wait_for(lambda job_id=job_id: "cores 12 of 24" in slurm.output(job_id), slurm, job_id)


def test_a_running_job_is_held_so_that_every_requeue_lands_held(
    controller: Factory, slurm: Slurm
) -> None:
    daemon = controller()
    daemon.start()
    job_id = slurm.submit("--gres=gpu:v100:1")
    slurm.wait(job_id, lambda facts: facts.running and facts.held is Hold.ADMIN)


def task_script(daemon: ControllerProcess, slurm: Slurm) -> str:
    """Runs the task that speaks to the lease service, then waits to be requeued."""
    return (
        f"export SYNERGY_ENDPOINT={daemon.endpoint} PYTHONPATH={ROOT}\n"
        f"export SYNERGY_MUNGE_SOCKET={daemon.cluster.munge_socket}\n"
        f"{sys.executable} {ROOT}/tests/slurm/lease_task.py {slurm.home}/saved.$SLURM_JOB_ID\n"
        "sleep 300 & wait\n"
    )


def wait_for(holds: Callable[[], bool], slurm: Slurm, job_id: int, timeout_s: float = 15) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline_s:
            pytest.fail(f"not in time; job {job_id} printed:\n{slurm.output(job_id)}")
        time.sleep(0.1)


def test_a_shorter_job_stops_a_longer_one_which_restarts_after_its_checkpoint(
    controller: Factory, slurm: Slurm
) -> None:
    daemon = controller(
        pool={"nodes": "v100-1"},
        scheduling={
            "policy": "srtf",
            "grace_s": 60.0,
            "round_s": 20.0,
            "poll_s": 0.5,
            "debounce_s": 0.2,
        },
    )
    daemon.start()
    long = slurm.submit("--gres=gpu:v100:8", "--time=20:00:00", script=task_script(daemon, slurm))
    slurm.running(long)
    wait_for(lambda: "cores 24" in slurm.output(long), slurm, long)
    short = slurm.submit("--gres=gpu:v100:8", "--time=0:30:00", script="sleep 3\n")
    stopped_s = time.monotonic()
    slurm.running(short)
    assert time.monotonic() - stopped_s < 10
    assert (slurm.home / f"saved.{long}").read_text().startswith("0 ")
    facts = slurm.wait(short, lambda facts: facts.state is JobState.COMPLETED)
    ended_s = time.monotonic()
    facts = slurm.running(long)
    assert time.monotonic() - ended_s < 10
    assert facts.restarts == 1
    wait_for(lambda: slurm.output(long).count("cores 24") == 2, slurm, long)


def test_a_job_that_does_not_answer_a_stop_is_requeued_after_the_grace_time(
    controller: Factory, slurm: Slurm
) -> None:
    daemon = controller(
        pool={"nodes": "v100-1"},
        scheduling={
            "policy": "srtf",
            "grace_s": 1.0,
            "poll_s": 0.5,
            "debounce_s": 0.2,
            "round_s": 20.0,
        },
    )
    daemon.start()
    long = slurm.submit("--gres=gpu:v100:8", "--time=20:00:00")
    slurm.running(long)
    short = slurm.submit("--gres=gpu:v100:8", "--time=0:30:00", script="sleep 1\n")
    slurm.running(short)
    assert slurm.running(long).restarts == 1


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_restarted_controller_adopts_running_jobs(
    controller: Factory, slurm: Slurm, how: str
) -> None:
    daemon = controller()
    daemon.start()
    job_id = slurm.submit("--gres=gpu:v100:4")
    before = slurm.running(job_id)
    getattr(daemon, how)()
    waiting = slurm.submit("--gres=gpu:v100:2")
    daemon.start()
    slurm.running(waiting)
    after = slurm.job(job_id)
    assert (after.start_s, after.allocation, after.restarts) == (
        before.start_s,
        before.allocation,
        before.restarts,
    )
    leases = [
        one for one in daemon.journal[-1]["snapshot"]["jobs"] if one["job"]["job_id"] == job_id
    ]
    assert leases[0]["lease"]["generation"] >= 1


def test_a_controller_without_its_ledger_adopts_running_jobs(
    controller: Factory, slurm: Slurm
) -> None:
    first = controller()
    first.start()
    job_id = slurm.submit("--gres=gpu:v100:4")
    slurm.running(job_id)
    first.stop()
    second = controller()
    second.start()
    waiting = slurm.submit("--gres=gpu:v100:2")
    slurm.running(waiting)
    facts = slurm.job(job_id)
    assert facts.running and facts.restarts == 0
    assert f"job {job_id}: adopted" in second.log


def test_a_job_without_the_wrapper_runs_untouched_to_its_end(
    controller: Factory, slurm: Slurm
) -> None:
    daemon = controller(
        pool={"nodes": "v100-1"},
        scheduling={"policy": "srtf", "poll_s": 0.5, "debounce_s": 0.2, "round_s": 20.0},
    )
    daemon.start()
    plain = slurm.submit("--gres=gpu:v100:4", "--time=20:00:00", script="sleep 8\n", wrapped=False)
    assert len(slurm.running(plain).allocation[0].cpu_ids) == 12
    shorter = slurm.submit("--gres=gpu:v100:8", "--time=0:10:00")
    time.sleep(2)
    assert slurm.job(shorter).pending
    facts = slurm.wait(plain, lambda facts: facts.state.finished)
    assert facts.state is JobState.COMPLETED
    assert facts.restarts == 0
    slurm.running(shorter)


def test_the_cores_of_a_job_without_the_wrapper_are_nobody_elses(
    controller: Factory, slurm: Slurm
) -> None:
    daemon = controller(pool={"nodes": "v100-1"})
    daemon.start()
    plain = slurm.submit("--gres=gpu:v100:4", wrapped=False)
    reserved = set(slurm.running(plain).allocation[0].cpu_ids)
    other = slurm.submit("--gres=gpu:v100:4", script=task_script(daemon, slurm))
    wait_for(lambda: "cores 12" in slurm.output(other), slurm, other)
    time.sleep(1)
    daemon.stop()
    daemon.start()
    last = slurm.submit("--gres=gpu:v100:1")
    wait_for(
        lambda: any(s["job"]["job_id"] == last for s in daemon.journal[-1]["snapshot"]["jobs"]),
        slurm,
        other,
    )
    jobs = {one["job"]["job_id"]: one for one in daemon.journal[-1]["snapshot"]["jobs"]}
    cores = set(jobs[other]["lease"]["cores"]["v100-1"])
    assert len(cores) == 12
    assert cores.isdisjoint(reserved)


def test_jobs_of_other_partitions_are_never_touched(controller: Factory, slurm: Slurm) -> None:
    other = slurm.submit("--gres=gpu:v100:1", partition="main", script="sleep 300\n")
    held = slurm.submit("--hold", partition="main")
    slurm.running(other)
    before = slurm.job(other), slurm.job(held)
    daemon = controller()
    daemon.start()
    ours = slurm.submit("--gres=gpu:v100:4")
    facts = slurm.running(ours)
    assert (slurm.job(other), slurm.job(held)) == before
    # Nor is a node taken on which others run.
    assert {part.node for part in facts.allocation}.isdisjoint(before[0].node_list)


def test_a_cancelled_job_makes_room(controller: Factory, slurm: Slurm) -> None:
    daemon = controller(pool={"nodes": "v100-1"})
    daemon.start()
    first = slurm.submit("--gres=gpu:v100:8")
    slurm.running(first)
    second = slurm.submit("--gres=gpu:v100:8")
    slurm.wait(second, lambda facts: facts.held is Hold.ADMIN)
    slurm.client.cancel(first)
    slurm.running(second)


def test_a_job_that_cannot_start_is_held_again_and_tried_later(
    controller: Factory, slurm: Slurm
) -> None:
    daemon = controller(
        scheduling={
            "start_deadline_s": 2.0,
            "retry_backoff_s": 3.0,
            "poll_s": 0.5,
            "debounce_s": 0.2,
            "round_s": 20.0,
        }
    )
    daemon.start()
    # Jobs of a partition that is down are accepted, and stay pending when they are released.
    slurm.cluster.run(["scontrol", "update", "partition=synergy", "state=down"])
    try:
        job_id = slurm.submit("--gres=gpu:v100:4")
        wait_for(lambda: f"job {job_id}: Slurm does not start it" in daemon.log, slurm, job_id)
        slurm.wait(job_id, lambda facts: facts.pending and facts.held is Hold.ADMIN)
    finally:
        slurm.cluster.run(["scontrol", "update", "partition=synergy", "state=up"])
    slurm.running(job_id)


def test_drained_nodes_get_nothing_and_are_used_again_later(
    controller: Factory, slurm: Slurm
) -> None:
    daemon = controller(pool={"nodes": "v100-[1-2]"})
    update = ["scontrol", "update", "nodename=v100-1"]
    slurm.cluster.run([*update, "state=drain", "reason=test"])
    try:
        daemon.start()
        first = slurm.submit("--gres=gpu:v100:8")
        assert slurm.running(first).node_list == ("v100-2",)
        second = slurm.submit("--gres=gpu:v100:8")
        time.sleep(1.5)
        assert slurm.job(second).pending
    finally:
        slurm.cluster.run([*update, "state=resume"])
    assert slurm.running(second).node_list == ("v100-1",)


def test_a_job_of_a_lost_node_starts_elsewhere(controller: Factory, slurm: Slurm) -> None:
    daemon = controller(pool={"nodes": "v100-[1-2]"})
    daemon.start()
    job_id = slurm.submit("--gres=gpu:v100:8")
    slurm.wait(job_id, lambda facts: facts.running and facts.held is Hold.ADMIN)
    (lost,) = slurm.job(job_id).node_list
    update = ["scontrol", "update", f"nodename={lost}"]
    # Drained as well, or the node would return to service by itself.
    slurm.cluster.run([*update, "state=drain", "reason=test"])
    slurm.cluster.run([*update, "state=down", "reason=test"])
    try:
        facts = slurm.wait(job_id, lambda facts: facts.running and facts.restarts == 1)
        assert facts.node_list != (lost,)
    finally:
        slurm.cluster.run([*update, "state=resume"], check=False)


def test_an_ordinary_users_job_is_let_into_the_reservation(
    controller: Factory, slurm: Slurm, as_user: Any
) -> None:
    daemon = controller()
    daemon.start()
    as_user.home.chmod(0o755)
    argv = ["sbatch", "--parsable", "-p", "synergy", "--gres=gpu:v100:1", "-o", "/dev/null"]
    done = as_user.run(slurm.cluster, argv, input="#!/bin/bash\nsynergy-srun true; sleep 60\n")
    slurm.jobs.append(int(done.stdout))
    facts = slurm.running(slurm.jobs[-1])
    assert facts.user == as_user.name
    assert facts.reservation == daemon.settings.reservation_name


def test_malformed_hints_keep_a_job_held_and_disturb_nobody(
    controller: Factory, slurm: Slurm
) -> None:
    daemon = controller()
    daemon.start()
    bad = slurm.submit("--gres=gpu:v100:1")
    slurm.running(bad)
    held = slurm.submit("--gres=gpu:v100:8", "-N4")
    slurm.wait(held, lambda facts: facts.held is Hold.ADMIN)
    slurm.client.set_admin_comment(held, "synergy:v=1,wrapper=perhaps")
    slurm.client.cancel(bad)
    good = slurm.submit("--gres=gpu:v100:2")
    slurm.running(good)
    assert slurm.job(held).pending
    assert "malformed" in daemon.log


def test_slurmctld_down_changes_nothing(
    fresh_cluster: Callable[..., DevCluster], tmp_path: Path
) -> None:
    cluster = fresh_cluster(real_node=False)
    jobs = Slurm(cluster, tmp_path)
    daemon = ControllerProcess(cluster, tmp_path)
    daemon.start()
    try:
        job_id = jobs.submit("--gres=gpu:v100:4")
        before = jobs.running(job_id)
        time.sleep(1)
        cluster.slurmctld_stop()
        wait_for(lambda: "tried again" in daemon.log, jobs, job_id, timeout_s=60)
        cluster.slurmctld_start()
        wait_for(lambda: "working again" in daemon.log, jobs, job_id, timeout_s=60)
        after = jobs.job(job_id)
        assert (after.start_s, after.restarts) == (before.start_s, before.restarts)
        assert jobs.running(jobs.submit("--gres=gpu:v100:4")).running
    finally:
        daemon.stop()
