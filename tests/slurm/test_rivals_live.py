"""The policies to compare with, on a real Slurm: jobs run, give way, resume and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from elastic_world import ElasticJob, until
from harness import ControllerProcess, Slurm, controller, slurm

from slurm_synergy.cli.control import Target, ask
from slurm_synergy.slurm.facts import JobState

__all__ = ["controller", "slurm"]  # fixtures

Factory = Callable[..., ControllerProcess]

GPUS = 8
# A step is a line: its number, the run, when it was, and the GPUs that the job has.
SCRIPT = """
log={home}/{name}.log
while [ ! -e {home}/finish ]; do
    step=$(($(wc -l < $log) + 1))
    echo $step ${{SLURM_RESTART_COUNT:-0}} $(date +%s.%N) $SLURM_GPUS_ON_NODE >> $log
    sleep 0.2
done
"""
FAST = {
    "mechanism": "proportional",
    "round_s": 3.0,
    "poll_s": 0.3,
    "debounce_s": 0.1,
    "grace_s": 0.5,
    "retry_backoff_s": 0.5,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "gavel": {"quantum_s": 8.0},
    "themis": {"quantum_s": 2.0},
    "shockwave": {"quantum_s": 2.0, "limit_s": 2.0},
}
MISSING = "the speed of 2 of 2 jobs is not known here"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a job's log."""

    number: int
    run: int
    time_s: float
    gpus: int


@dataclass(frozen=True, slots=True)
class Worker:
    """A job that counts its steps, and goes on where it was after a stop."""

    job_id: int
    log: Path

    @classmethod
    def submit(cls, slurm: Slurm, name: str, gpus: int) -> Worker:
        log = slurm.home / f"{name}.log"
        log.touch()
        script = SCRIPT.format(home=slurm.home, name=name)
        wanted = (f"--gres=gpu:{gpus}", "--mem=1000M", "--time=10", f"--job-name={name}")
        return cls(slurm.submit(*wanted, script=script), log)

    def steps(self) -> list[Line]:
        lines = self.log.read_text(encoding="utf-8").splitlines(keepends=True)
        words = [line.split() for line in lines if line.endswith("\n")]
        return [Line(int(a), int(b), float(c), int(d)) for a, b, c, d in words]

    def runs(self) -> set[int]:
        return {step.run for step in self.steps()}


@pytest.mark.parametrize("policy", SETTINGS)
def test_jobs_take_turns_over_a_restart_of_the_controller_too_resume_and_end(
    controller: Factory, slurm: Slurm, policy: str
) -> None:
    daemon = controller(
        pool={"nodes": "v100-1"},
        scheduling={**FAST, "policy": policy, policy: SETTINGS[policy]},
        profiling={"enabled": False},
    )
    daemon.start()
    first = Worker.submit(slurm, "first", GPUS)
    until(first.steps, lambda: f"the first one runs:\n{daemon.log[-3000:]}")
    second = Worker.submit(slurm, "second", GPUS)
    workers = (first, second)
    if policy == "gavel":  # a new process must know when the quantum began that it finds
        daemon.stop()
        daemon.start()

    def story() -> str:
        return f"{[one.steps()[-3:] for one in workers]}\n{daemon.log[-4000:]}"

    until(second.steps, lambda: f"it gives way: {story()}")
    socket = daemon.cluster.munge_socket
    target = Target(endpoint=daemon.endpoint, source="test", munge_socket=socket)
    status = ask(target, "status")
    assert (status["policy"], status["trouble"]) == (policy, None)
    assert [one["what"] for one in status["missing_inputs"]] == [MISSING]
    shown = {job["job_id"]: job for job in ask(target, "jobs")["jobs"]}
    assert {one.job_id: set(shown[one.job_id]["held_s"]) for one in workers} == {
        one.job_id: {"v100"} for one in workers
    }
    (slurm.home / "finish").touch()
    for one in workers:
        facts = slurm.wait(one.job_id, lambda facts: facts.state.finished, timeout_s=120)
        assert facts.state is JobState.COMPLETED, story()
        numbers = [step.number for step in one.steps()]
        assert numbers == list(range(1, len(numbers) + 1)), story()
    assert slurm.job(first.job_id).restarts >= 1
    _check_capacity([run for one in workers for run in _runs(one)])
    _check_quanta(daemon.journal, SETTINGS[policy]["quantum_s"])


def _check_quanta(rounds: Sequence[dict[str, Any]], quantum_s: float) -> None:
    """A stop was decided in the first round after the end of a quantum only."""
    turns = 0
    for before, one in pairwise(rounds):
        stopped, stopping = (
            {action["job_id"] for action in two["actions"] if action["kind"] == "stop"}
            for two in (one, before)
        )
        if stopped - stopping:  # what takes longer is told again
            now_s, before_s = (two["snapshot"]["now_s"] for two in (one, before))
            assert now_s // quantum_s > before_s // quantum_s, (now_s, before_s, one["actions"])
            turns += 1
    assert turns


@pytest.mark.timeout(900)
def test_pollux_grows_a_training_and_moves_it_for_a_job_that_names_its_type(
    controller: Factory, slurm: Slurm, torch_python: str, tmp_path: Path
) -> None:
    """Two GPU types; the training reports its steps, and loses none of them."""
    pytest.importorskip("torch", reason="the training is a real one (extra torch)")
    daemon = controller(
        pool={"nodes": "v100-1,a100-1"},
        scheduling={
            **FAST,
            "policy": "pollux",
            "grace_s": 90.0,
            "start_deadline_s": 60.0,
            "pollux": {"seed": 3, "restart_s": 1.0},
        },
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

    def grown() -> bool:
        assert not job.facts.state.finished, f"it ended: {job}"
        return 2 in job.worlds()

    until(grown, lambda: f"it grows: {job}", timeout_s=400)
    (part,) = job.facts.allocation
    kind = str(part.gpu_type)
    other = {"v100": "a100", "a100": "v100"}[kind]
    rigid = slurm.submit(f"--gres=gpu:{kind}:8", "--mem=1000M")

    def moved() -> bool:
        there = [one.gpu_type for one in job.facts.allocation]
        return slurm.job(rigid).running and there == [other]

    until(moved, lambda: f"it gives way: {slurm.job(rigid)} {job}")
    run = job.facts.restarts
    until(lambda: job.lines()[-1]["run"] >= run, lambda: f"it goes on: {job}")
    target = Target(
        endpoint=daemon.endpoint, source="test", munge_socket=daemon.cluster.munge_socket
    )
    assert ask(target, "status")["missing_inputs"] == []
    done.touch()
    job.ends_well().check_nothing_lost(samples, steps=None)
    assert job.worlds()[:2] == [1, 2] and slurm.job(rigid).running


@dataclass(frozen=True, slots=True)
class Run:
    """From the first to the last step of a run."""

    begin_s: float
    end_s: float
    gpus: int


def _runs(one: Worker) -> list[Run]:
    found = []
    for run in sorted(one.runs()):
        steps = [step for step in one.steps() if step.run == run]
        (gpus,) = {step.gpus for step in steps}
        found.append(Run(steps[0].time_s, steps[-1].time_s, gpus))
    return found


def _check_capacity(runs: list[Run]) -> None:
    """At no time did runs have more GPUs than there are."""
    for now in runs:
        there = [one for one in runs if one.begin_s <= now.begin_s <= one.end_s]
        assert sum(one.gpus for one in there) <= GPUS, runs
