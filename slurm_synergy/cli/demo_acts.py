"""The two acts of the demonstration: better shares, and a preemption that loses nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm_synergy.cli.demo_screen import Finished, Row, Screen, comparison
from slurm_synergy.cli.demo_stage import (
    MOTIVATING_NODES,
    Controller,
    Stage,
    last_json_line,
)
from slurm_synergy.errors import DemoError
from slurm_synergy.slurm.facts import JobFacts, JobState

__all__ = [
    "MOTIVATING_JOBS",
    "Submitted",
    "Watch",
    "all_completed",
    "average_s",
    "motivating",
    "progress",
    "run_motivating",
]

MOTIVATING_JOBS = (
    "image-resnet18",
    "speech-m5",
    "language-gnmt",
    "language-transformerxl",
)
_POLL_S = 0.5
_LEASES_EVERY_S = 3.0
_ENDED_BADLY = frozenset(
    {
        JobState.FAILED,
        JobState.TIMEOUT,
        JobState.CANCELLED,
        JobState.NODE_FAIL,
        JobState.OUT_OF_MEMORY,
        JobState.BOOT_FAIL,
        JobState.DEADLINE,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A job of the demonstration; ``submitted_s`` is of its first incarnation."""

    name: str
    job_id: int
    submitted_s: float
    progress_in: Path


class Watch:
    """Follows jobs and shows them; remembers the shares and the nodes that each had."""

    def __init__(self, stage: Stage, controller: Controller, screen: Screen) -> None:
        self._stage, self._controller, self._screen = stage, controller, screen
        self._jobs: list[Submitted] = []
        self._shares: dict[int, list[tuple[int, int]]] = {}
        self._leases_due_s = 0.0
        self.nodes: dict[int, list[str]] = {}

    def submit(
        self,
        directory: Path,
        *arguments: str,
        progress_in: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Submitted:
        """``sbatch ARGUMENTS`` in ``directory``; the job is watched from now on.

        ``progress_in`` is where the job writes how far it is; its output by default.
        """
        shown = " ".join(("sbatch", *arguments))
        facts = self._stage.submit(self._controller, directory, *arguments, env=env)
        self._screen.say(f"  {shown}  ->  job {facts.job_id}")
        job = Submitted(
            name=facts.name,
            job_id=facts.job_id,
            submitted_s=facts.submit_s,
            progress_in=progress_in or directory / facts.std_out,
        )
        self._jobs.append(job)
        return job

    def until(
        self,
        done: Callable[[Mapping[int, JobFacts]], bool],
        *,
        what: str,
        within_s: float,
    ) -> dict[int, JobFacts]:
        """Show the jobs until ``done``; the facts of that moment.

        Raises DemoError when a job ends badly, the controller ends, or ``within_s`` seconds pass.
        """
        deadline_s = time.monotonic() + within_s
        while True:
            self._controller.check()
            facts = self._stage.jobs([job.job_id for job in self._jobs])
            self._note(facts)
            self._screen.show([self._row(job, facts.get(job.job_id)) for job in self._jobs])
            self._refuse_failures(facts)
            if done(facts):
                return facts
            if time.monotonic() > deadline_s:
                raise DemoError(f"waited {within_s:.0f} s for this in vain: {what}")
            time.sleep(_POLL_S)

    def shares(self, job_id: int) -> tuple[tuple[int, int], ...]:
        """Cores and memory in MiB that the job's leases gave it, in order."""
        return tuple(self._shares.get(job_id, ()))

    def _note(self, facts: Mapping[int, JobFacts]) -> None:
        for job_id, job in facts.items():
            visited = self.nodes.setdefault(job_id, [])
            if job.state is JobState.RUNNING and job.node_list:
                node = ",".join(job.node_list)
                if not visited or visited[-1] != node:
                    visited.append(node)
        now_s = time.monotonic()
        if now_s >= self._leases_due_s:
            self._leases_due_s = now_s + _LEASES_EVERY_S
            for job_id, share in self._stage.leases(self._controller).items():
                had = self._shares.setdefault(job_id, [])
                if had[-1:] != [share]:
                    had.append(share)

    def _row(self, job: Submitted, facts: JobFacts | None) -> Row:
        running = facts is not None and facts.state is JobState.RUNNING
        had = self.shares(job.job_id) if running else ()
        return Row(
            job_id=job.job_id,
            name=job.name,
            state=facts.state.value.lower() if facts is not None else "unknown",
            node=",".join(facts.node_list) if facts is not None and running else "",
            cpus=had[-1][0] if had else None,
            mem_mib=had[-1][1] if had else None,
            progress=progress(last_json_line(job.progress_in)) if running else "",
        )

    def _refuse_failures(self, facts: Mapping[int, JobFacts]) -> None:
        for job in self._jobs:
            found = facts.get(job.job_id)
            if found is None:
                raise DemoError(f"job {job.job_id} ({job.name}) is unknown to Slurm")
            if found.state in _ENDED_BADLY:
                code, by_signal = found.exit_code
                raise DemoError(
                    f"job {job.job_id} ({job.name}) ended as {found.state.value}, exit status "
                    f"{code}, signal {by_signal}, reason {found.reason or 'none'}"
                )


def progress(numbers: Mapping[str, object]) -> str:
    """A job's own words about its progress, in short."""
    done, total = numbers.get("samples"), numbers.get("of")
    if isinstance(done, int) and isinstance(total, int) and total > 0:
        rate, wait = numbers.get("samples_per_s", 0.0), numbers.get("data_wait", 0.0)
        return f"{done / total:4.0%}  {rate:.0f} samples/s, waits for data {wait:.0%}"
    step, loss = numbers.get("step"), numbers.get("loss")
    if isinstance(step, int):
        return f"step {step}" + (f", loss {loss:.4f}" if isinstance(loss, float) else "")
    return ""


def all_completed(facts: Mapping[int, JobFacts]) -> bool:
    """Whether Slurm has every one of the jobs as COMPLETED."""
    return all(job.state is JobState.COMPLETED for job in facts.values())


def average_s(results: Sequence[Finished]) -> float:
    """The average job completion time in seconds."""
    return sum(one.jct_s for one in results) / len(results)


def motivating(
    stage: Stage, screen: Screen, mechanism: str, *, time_scale: float
) -> tuple[Finished, ...]:
    """The four jobs of Synergy's motivating example under ``mechanism``; what became of each."""
    directory = stage.directory(mechanism)
    screen.heading(f"Four jobs of 4 GPUs each on two nodes, mechanism: {mechanism}")
    with stage.controller(
        directory, policy="fifo", mechanism=mechanism, nodes=MOTIVATING_NODES
    ) as controller:
        watch = Watch(stage, controller, screen)
        env = {"EMULATED_TIME_SCALE": str(time_scale)}
        jobs = [
            watch.submit(directory, f"examples/{name}.sbatch", env=env) for name in MOTIVATING_JOBS
        ]
        with screen.watching():
            facts = watch.until(
                all_completed, what="all four jobs complete", within_s=90 + 150 * time_scale
            )
    return tuple(_finished(job, facts[job.job_id], watch) for job in jobs)


def _finished(job: Submitted, facts: JobFacts, watch: Watch) -> Finished:
    if facts.end_s is None:
        raise DemoError(f"job {job.job_id} ({job.name}) has no end time")
    had = watch.shares(job.job_id)
    return Finished(
        name=job.name,
        node=",".join(watch.nodes[job.job_id]),
        cpus=tuple(cpus for cpus, _ in had),
        mem_mib=tuple(mem_mib for _, mem_mib in had),
        jct_s=facts.end_s - job.submitted_s,
    )


def run_motivating(stage: Stage, screen: Screen, *, time_scale: float) -> dict[str, float]:
    """The first act; the average JCT in seconds by mechanism."""
    runs = [
        (mechanism, motivating(stage, screen, mechanism, time_scale=time_scale))
        for mechanism in ("proportional", "tune")
    ]
    screen.say("")
    screen.table(comparison(runs))
    averages = {mechanism: average_s(results) for mechanism, results in runs}
    ratio = averages["proportional"] / averages["tune"]
    screen.say(
        f"average JCT: {averages['proportional']:.1f} s proportional, {averages['tune']:.1f} s "
        f"tune: {ratio:.2f} times better (the paper reports 1.5)"
    )
    return averages
