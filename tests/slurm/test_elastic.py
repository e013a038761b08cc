"""Elastic jobs on a real Slurm: GPUs in other numbers and of another type, real ranks (gloo)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from elastic_world import SRUN, ElasticJob, ScriptedController, Step, until
from harness import ControllerProcess, Slurm, controller, slurm

from slurm_synergy.devcluster import DevCluster

__all__ = ["controller", "slurm"]  # fixtures

pytest.importorskip("torch", reason="the training is a real one (extra torch)")

JOURNEY = (
    Step("v100", 1),
    Step("v100", 2),
    Step("a100", 4, nodes=2),
    Step("v100", 2, batch=(6, 2, 0)),
)
HINTS = "elastic=full,max_gpus=8,batch=12-48"


@pytest.fixture
def scripted(
    cluster: DevCluster, slurm: Slurm, tmp_path: Path
) -> Iterator[Callable[..., ScriptedController]]:
    """A factory of controllers whose decisions are the test's; stopped after it."""
    made: list[ScriptedController] = []

    def make(**settings: object) -> ScriptedController:
        home = tmp_path / f"controller-{len(made)}"
        home.mkdir()
        made.append(ScriptedController(cluster, home, **settings))
        return made[-1]

    yield make
    for one in made:
        one.stop()
    slurm.cancel_all()
    for one in made:
        slurm.client.delete_reservation(one.settings.reservation_name)


# Each wait has a deadline of its own, with words.
@pytest.mark.timeout(900)
def test_a_training_runs_through_other_numbers_and_types_of_gpus(
    scripted: Callable[..., ScriptedController], slurm: Slurm, torch_python: str
) -> None:
    daemon = scripted()
    daemon.start()
    job = ElasticJob(slurm, daemon, torch_python).submit(hints=HINTS)
    saved: list[str] = []
    for run, step in enumerate(JOURNEY):
        daemon.say(elastic=step)
        job.trains_on(step, run=run)
        if run:
            saved, before = job.published(), saved
            assert saved, "each run after the first began from a checkpoint"
            assert saved != before, "and each stop left one of its own"
    # Another batch is told to the tasks in place.
    before = daemon.shown(job.job_id)
    assert (before["elasticity"], before["most_gpus"]) == ("full", 8)
    assert before["lease"]["batch"] == 12
    daemon.say(elastic=Step("v100", 2, batch=(12, 2, 0)))
    until(lambda: daemon.shown(job.job_id)["lease"]["batch"] == 24, lambda: f"24 samples: {job}")
    job.ends_well().check_nothing_lost()
    assert job.worlds() == [step.gpus for step in JOURNEY]
    assert job.facts.restarts == len(JOURNEY) - 1


def test_a_job_goes_only_where_its_account_may(
    controller: Callable[..., ControllerProcess], slurm: Slurm, cluster: DevCluster
) -> None:
    """A type whose partition does not admit the account stays closed, though its GPUs are free."""
    create = ["scontrol", "create", "PartitionName=gpu-a100", "Nodes=a100-1"]
    cluster.run([*create, "AllowAccounts=vision", "State=UP"])
    try:
        daemon = controller(
            pool={"nodes": "v100-1,a100-1", "type_partitions": {"a100": "gpu-a100"}}
        )
        daemon.start()
        first = slurm.submit("--gres=gpu:8", "--mem=1000M")
        allocation = slurm.running(first).allocation
        assert [part.node for part in allocation] == ["v100-1"]
        second = slurm.submit("--gres=gpu:8", "--mem=1000M")
        named = slurm.submit("--gres=gpu:1", "--mem=1000M", "--comment=synergy:gpu_types=a100")

        def waiting() -> set[int]:
            rounds = daemon.journal
            return {int(job) for job in rounds[-1]["plan"]["waiting"]} if rounds else set()

        until(lambda: waiting() >= {second, named}, lambda: f"both wait: {daemon.log[-3000:]}")
        told = daemon.journal[-1]["plan"]["waiting"][str(named)]["text"]
        assert "account (none) may not use GPUs of type a100 (gpu-a100)" in told
        assert slurm.job(second).pending
    finally:
        slurm.cancel_all()
        cluster.run(["scontrol", "delete", "PartitionName=gpu-a100"])


def test_tasks_follow_the_gpus_unless_the_script_says_how_many(
    scripted: Callable[..., ScriptedController], slurm: Slurm
) -> None:
    """Submitted with a number per node, which plain Slurm could never change."""
    daemon = scripted()
    daemon.start()
    where = "bash -c 'echo KIND $SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME'"
    lines = [
        f"export SYNERGY_ENDPOINT={daemon.endpoint}",
        f"export SYNERGY_MUNGE_SOCKET={daemon.cluster.munge_socket}",
        f"{SRUN} {where.replace('KIND', 'gpu')}",
        f"{SRUN} --ntasks-per-node=1 {where.replace('KIND', 'node')}",
        "echo all",
    ]
    job_id = slurm.submit(
        "--job-name=tasks",
        "--gres=gpu:1",
        "--ntasks-per-node=1",
        "--mem=1000M",
        "--comment=synergy:elastic=scale,max_gpus=8",
        script="\n".join(lines) + "\n",
        wrapped=False,
    )
    daemon.say(tasks=Step("a100", 4, nodes=2))
    until(
        lambda: "all\n" in slurm.output(job_id),
        lambda: f"the job's end: {slurm.job(job_id)}\n{slurm.output(job_id)}\n{daemon.log[-3000:]}",
    )
    told = sorted(
        line for line in slurm.output(job_id).splitlines() if line.startswith(("gpu", "node"))
    )
    assert told == [
        "gpu 0 of 4 on a100-1",
        "gpu 1 of 4 on a100-1",
        "gpu 2 of 4 on a100-2",
        "gpu 3 of 4 on a100-2",
        "node 0 of 2 on a100-1",
        "node 1 of 2 on a100-2",
    ]


def test_sia_starts_an_elastic_job_on_its_least_and_a_rigid_one_as_asked(
    controller: Callable[..., ControllerProcess], slurm: Slurm
) -> None:
    daemon = controller(
        pool={"nodes": "v100-1,a100-1"},
        scheduling={"policy": "sia", "round_s": 5.0, "sia": {"power": -1.0, "idle_cost": 2.0}},
    )
    daemon.start()
    hints = "--comment=synergy:elastic=scale,min_gpus=1,max_gpus=8"
    elastic = slurm.submit("--gres=gpu:4", "--mem=1000M", "--ntasks-per-node=4", hints)
    rigid = slurm.submit("--gres=gpu:a100:4", "--mem=1000M", "--ntasks-per-node=4")
    (part,) = slurm.running(elastic).allocation
    assert len(part.gpu_ids) == 1
    assert slurm.job(elastic).num_tasks == 1
    (part,) = slurm.running(rigid).allocation
    assert (part.node, len(part.gpu_ids)) == ("a100-1", 4)
    solver = daemon.journal[-1]["plan"]["solver"]
    assert (solver["parameters"]["power"], solver["parameters"]["idle_cost"]) == (-1.0, 2.0)


@pytest.mark.timeout(600)
def test_a_training_is_grown_by_what_it_tells(
    controller: Callable[..., ControllerProcess], slurm: Slurm, torch_python: str, tmp_path: Path
) -> None:
    """From its least number of GPUs, by the policy itself, once its reports say that it pays."""
    daemon = controller(
        pool={"nodes": "v100-1"},
        scheduling={"policy": "sia", "round_s": 3.0, "grace_s": 90.0, "start_deadline_s": 60.0},
        profiling={"enabled": False},
    )
    daemon.start()
    job, done, samples = ElasticJob(slurm, daemon, torch_python), tmp_path / "done", 320
    program = Path(__file__).with_name("growing_program.py")
    job.submit(
        "--gres=gpu:2",
        "--ntasks-per-node=2",
        hints="elastic=full,min_gpus=1,max_gpus=2,batch=8-64",
        program=(program, job.out, samples, 8, 64, 8, 0.0125, done),
    )
    job.trains_on(Step("v100", 1), run=0)
    job.trains_on(Step("v100", 2), run=1)
    done.touch()
    job.ends_well().check_nothing_lost(samples, steps=None)
    assert job.worlds() == [1, 2]
    grown = [line["batch"] for line in job.lines() if line["run"] == 1]
    assert max(grown) > 8, "and with its GPUs its batch"


@pytest.mark.timeout(600)
def test_batch_sizes_are_tried_once_on_each_type(
    scripted: Callable[..., ScriptedController], slurm: Slurm, torch_python: str, tmp_path: Path
) -> None:
    """On the one GPU that a new job has there, while it trains; the next of its key tries none."""
    daemon, done, samples = scripted(), tmp_path / "done", 160
    daemon.start()

    def submit(name: str) -> ElasticJob:
        job = ElasticJob(slurm, daemon, torch_python, name)
        program = Path(__file__).with_name("growing_program.py")
        hints = "elastic=full,min_gpus=1,max_gpus=2,batch=8-64,profile=tries"
        return job.submit(hints=hints, program=(program, job.out, samples, 8, 64, 8, 0.008, done))

    def tried(job: ElasticJob, kind: str) -> int:
        said = rf"job {job.job_id}: (\d+) batch sizes tried on {kind} in "
        found = re.findall(said, daemon.log)
        assert len(found) < 2, f"tried twice on {kind}: {job}"
        return int(found[0]) if found else 0

    first = submit("first")
    for run, kind in enumerate(("v100", "a100")):
        daemon.say(first=Step(kind, 1))
        first.trains_on(Step(kind, 1), run=run)
        until(lambda kind=kind: tried(first, kind), lambda: f"sizes are tried: {first}")  # type: ignore[misc]
        used = {line["batch"] for line in first.lines() if line["run"] == run}
        # As many as the time allows; two passes of what one GPU has room for are the most.
        assert len(used) >= min(tried(first, kind), 3) and max(used) <= 16
    second = submit("second")
    daemon.say(first=Step("a100", 1), second=Step("v100", 1))
    second.trains_on(Step("v100", 1), run=0)
    until(lambda: daemon.shown(second.job_id)["learning"], lambda: f"it tells: {second}")
    rounds = len(daemon.journal)
    until(lambda: len(daemon.journal) > rounds + 2, lambda: f"three rounds: {second}")
    assert not tried(second, "v100")
    assert {line["batch"] for line in second.lines()} == {8}
    done.touch()
    for job in (first, second):
        job.ends_well().check_nothing_lost(samples, steps=None)
