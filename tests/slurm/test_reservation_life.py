"""The controller's reservation on a real Slurm: its size, its owner, its end, and maintenance."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import ControllerProcess, Slurm, controller, slurm

from slurm_synergy.devcluster import DevCluster
from slurm_synergy.slurm.facts import ReservationFacts

__all__ = ["controller", "slurm"]  # fixtures

Factory = Callable[..., ControllerProcess]
NAME = "synergy-test"


def found(slurm: Slurm, name: str = NAME) -> ReservationFacts | None:
    return next((one for one in slurm.client.read_reservations() if one.name == name), None)


def wait_for(slurm: Slurm, nodes: set[str], daemon: ControllerProcess) -> ReservationFacts:
    """Until the reservation covers just ``nodes``."""
    deadline_s = time.monotonic() + 40
    while (one := found(slurm)) is None or set(one.nodes) != nodes:
        if time.monotonic() > deadline_s:
            pytest.fail(f"the reservation is {one}, not over {nodes}:\n{daemon.log}")
        time.sleep(0.1)
    return one


@pytest.fixture
def reserve(slurm: Slurm) -> Iterator[Callable[..., None]]:
    """Make a reservation as an admin does; it is deleted after the test."""
    made: list[str] = []

    def make(name: str, nodes: str, *fields: str) -> None:
        argv = ("scontrol", "create", "reservation", f"ReservationName={name}", f"Nodes={nodes}")
        slurm.cluster.run([*argv, "Users=root", *fields], check=True)
        made.append(name)

    yield make
    slurm.cancel_all()
    for name in made:
        slurm.client.delete_reservation(name)


def blocked(daemon: ControllerProcess, job_id: int) -> list[str]:
    """Why the job was not planned, of each round in which it was not, oldest first."""
    return [
        str(one["blocked"]["text"])
        for record in daemon.journal
        for one in record["snapshot"]["jobs"]
        if one["job"]["job_id"] == job_id and one["blocked"]
    ]


def test_it_follows_the_demand_takes_no_node_of_others_and_outlives_the_controller(
    controller: Factory, slurm: Slurm
) -> None:
    other = slurm.submit("--gres=gpu:v100:1", "-wv100-1", partition="main")
    slurm.running(other)
    daemon = controller(
        pool={"nodes": "v100-[1-3]", "reserve_least": 0, "reserve_idle_s": 0.0},
        scheduling={"round_s": 3.0, "poll_s": 0.5},
    )
    daemon.start()
    first, second = (slurm.submit("--gres=gpu:v100:8") for _ in range(2))
    facts = slurm.running(first), slurm.running(second)
    assert {one.node_list for one in facts} == {("v100-2",), ("v100-3",)}
    made = wait_for(slurm, {"v100-2", "v100-3"}, daemon)
    assert made.flags >= {"IGNORE_JOBS", "FLEX", "SPEC_NODES"}
    # Killed, and started again: the same reservation goes on, and so do the jobs in it.
    daemon.kill()
    daemon.start()
    slurm.client.cancel(first)
    kept = wait_for(slurm, set(facts[1].node_list), daemon)
    assert kept.start_s == made.start_s
    assert slurm.running(second).start_s == facts[1].start_s
    slurm.client.cancel(other)
    third, fourth = (slurm.submit("--gres=gpu:v100:8") for _ in range(2))
    assert {slurm.running(third).node_list, slurm.running(fourth).node_list} == {
        ("v100-1",),
        facts[0].node_list,
    }
    wait_for(slurm, {"v100-1", "v100-2", "v100-3"}, daemon)


def test_one_of_the_same_name_that_is_not_ours_is_refused(
    controller: Factory, slurm: Slurm, reserve: Callable[..., None]
) -> None:
    reserve(NAME, "v100-2", "StartTime=now", "Duration=60")
    before = found(slurm)
    daemon = controller()
    done = daemon.run("--once")
    assert done.returncode == 1
    assert f"reservation '{NAME}' over v100-2 was not made by this controller" in done.stderr
    assert "cluster.controller_name" in done.stderr
    assert found(slurm) == before


def test_it_comes_to_its_end_and_slurmctld_restarts_but_jobs_in_it_run_on(
    fresh_cluster: Callable[..., DevCluster], tmp_path: Path
) -> None:
    cluster = fresh_cluster(real_node=False)
    jobs = Slurm(cluster, tmp_path)
    daemon = ControllerProcess(cluster, tmp_path, pool={"nodes": "v100-1"})
    daemon.start()
    try:
        job_id = jobs.submit("--gres=gpu:v100:4")
        before = jobs.running(job_id)
        made = wait_for(jobs, {"v100-1"}, daemon)
        cluster.slurmctld_stop()
        cluster.slurmctld_start()
        again = wait_for(jobs, {"v100-1"}, daemon)
        assert (again.start_s, again.users) == (made.start_s, made.users)
        # An end that is near is put off as soon as it is seen.
        cluster.run(["scontrol", "update", f"ReservationName={NAME}", "EndTime=now+60minutes"])
        jobs.running(jobs.submit("--gres=gpu:v100:1"))
        deadline_s = time.monotonic() + 20
        while (now := found(jobs)) and (now.end_s or 0.0) < time.time() + 86_400:
            assert time.monotonic() < deadline_s, f"it was not renewed: {now}\n{daemon.log}"
            time.sleep(0.2)
        # The controller is away, and the reservation ends.
        daemon.stop()
        cluster.run(["scontrol", "update", f"ReservationName={NAME}", "EndTime=now+2seconds"])
        deadline_s = time.monotonic() + 60
        while found(jobs) is not None:
            assert time.monotonic() < deadline_s, "Slurm keeps a reservation that has ended"
            time.sleep(0.2)
        daemon.start()
        wait_for(jobs, {"v100-1"}, daemon)
        after = jobs.running(job_id)
        assert (after.start_s, after.restarts) == (before.start_s, before.restarts)
    finally:
        daemon.stop()


def test_no_job_starts_that_would_not_end_before_maintenance(
    controller: Factory, slurm: Slurm, reserve: Callable[..., None]
) -> None:
    reserve("maint", "v100-1", "StartTime=now+20minutes", "Duration=60", "Flags=MAINT,IGNORE_JOBS")
    daemon = controller(pool={"nodes": "v100-[1-2]"}, scheduling={"round_s": 5.0, "poll_s": 0.5})
    daemon.start()
    long_one = slurm.submit("--gres=gpu:v100:8", "--time=60")
    assert slurm.running(long_one).node_list == ("v100-2",)
    late = slurm.submit("--gres=gpu:v100:8", "--time=60")
    short = slurm.submit("--gres=gpu:v100:4", "--time=10")
    facts = slurm.running(short)
    assert facts.node_list == ("v100-1",)
    assert slurm.job(late).pending
    deadline_s = time.monotonic() + 20
    # In one round only: in the next it is planned on the nodes that are not reserved.
    while not any("reservation" in why for why in blocked(daemon, late)):
        assert time.monotonic() < deadline_s, daemon.log
        time.sleep(0.1)
    # Nor was it tried: Slurm would have left it waiting.
    assert f"job {late}: did not start" not in daemon.log
    slurm.cluster.run(["scontrol", "delete", "ReservationName=maint"], check=True)
    slurm.client.cancel(long_one)
    # A round between the two finds the first node, where it comes before the short job.
    assert slurm.running(late).node_list in (("v100-1",), ("v100-2",))


def test_two_controllers_have_reservations_of_their_own(controller: Factory, slurm: Slurm) -> None:
    for name, node in (("one", "v100-1"), ("two", "v100-2")):
        daemon = controller(pool={"nodes": node, "reservation_name": name})
        assert daemon.run("--once").returncode == 0
    assert {one.name: one.nodes for one in slurm.client.read_reservations()} == {
        "one": ("v100-1",),
        "two": ("v100-2",),
    }
