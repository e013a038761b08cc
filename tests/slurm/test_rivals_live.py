"""The policies to compare with, on a real Slurm: jobs run, give way, resume and end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from elastic_world import until
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
    "gavel": {"quantum_s": 2.0},
    "themis": {"quantum_s": 2.0},
    "shockwave": {"quantum_s": 2.0, "limit_s": 2.0},
    "pollux": {"seed": 3},
}
MISSING = {
    "gavel": "the speed of 2 of 2 jobs is not known here",
    "themis": "the speed of 2 of 2 jobs is not known here",
    "shockwave": "the speed of 2 of 2 jobs is not known here",
    "pollux": "none of 3 jobs is elastic",
}
# Pollux takes from one to give to several; the others take turns.
LATER = {"gavel": (8,), "themis": (8,), "shockwave": (8,), "pollux": (4, 4)}


@dataclass(frozen=True, slots=True)
class Step:
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

    def steps(self) -> list[Step]:
        lines = self.log.read_text(encoding="utf-8").splitlines(keepends=True)
        words = [line.split() for line in lines if line.endswith("\n")]
        return [Step(int(a), int(b), float(c), int(d)) for a, b, c, d in words]

    def runs(self) -> set[int]:
        return {step.run for step in self.steps()}


@pytest.mark.parametrize("policy", SETTINGS)
def test_jobs_give_way_to_each_other_resume_and_end(
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
    later = [
        Worker.submit(slurm, f"later-{gpus}-{n}", gpus) for n, gpus in enumerate(LATER[policy])
    ]
    workers = (first, *later)

    def story() -> str:
        return f"{[one.steps()[-3:] for one in workers]}\n{daemon.log[-4000:]}"

    until(lambda: all(one.steps() for one in later), lambda: f"it gives way: {story()}")
    socket = daemon.cluster.munge_socket
    target = Target(endpoint=daemon.endpoint, source="test", munge_socket=socket)
    status = ask(target, "status")
    assert (status["policy"], status["trouble"]) == (policy, None)
    assert [one["what"] for one in status["missing_inputs"]] == [MISSING[policy]]
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
