"""Act two: a real training is preempted, restarts elsewhere, and nothing of it is lost."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slurm_synergy.cli.demo_acts import Submitted, Watch, all_completed
from slurm_synergy.cli.demo_screen import Screen
from slurm_synergy.cli.demo_stage import RESUME_NODES, Stage, last_json_line
from slurm_synergy.errors import DemoError

__all__ = ["Resumed", "StepClock", "Training", "first_difference", "read_training", "run_resume"]

_SCRIPT = "examples/digits.sbatch"
_EPOCHS = 3
_SHORT_EPOCHS = 4
# Pauses per step, so that each job ends when the story wants it to: the reference once the shorter
# job runs, the shorter job once the preempted one is back. They change no loss.
_REFERENCE_STEP_S = 0.25
_PREEMPTED_STEP_S = 0.15
_SHORT_STEP_S = 0.2
_STEPS_BEFORE_PREEMPTION = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What a training left: the loss of each step by step number, and its weights' SHA-256."""

    losses: dict[int, float]
    weights: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What act two showed. ``restart_s`` is what the preemption cost (docs/demo.md)."""

    identical: bool
    restart_s: float


def read_training(path: Path) -> Training:
    """The results of train_digits.py. Raises DemoError when they are not whole."""
    losses: dict[int, float] = {}
    weights = ""
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            values = json.loads(line)
            if "weights_sha256" in values:
                weights = values["weights_sha256"]
            elif values["step"] in losses:
                raise DemoError(f"{path.name}: step {values['step']} is there twice")
            else:
                losses[values["step"]] = values["loss"]
    except (OSError, ValueError, KeyError) as err:
        raise DemoError(f"{path}: not the results of a training: {err!r}") from err
    if not weights or sorted(losses) != list(range(1, len(losses) + 1)):
        raise DemoError(f"{path}: the training did not come to its end, or steps are missing")
    return Training(losses=losses, weights=weights)


def first_difference(one: Training, other: Training) -> str:
    """Where two trainings differ, in words; empty when they are equal to the last bit."""
    if len(one.losses) != len(other.losses):
        return f"{len(one.losses)} steps and {len(other.losses)} steps"
    for step, loss in one.losses.items():
        if loss != other.losses[step]:
            return f"the loss of step {step} is {loss!r} and {other.losses[step]!r}"
    if one.weights != other.weights:
        return f"the final weights have SHA-256 {one.weights} and {other.weights}"
    return ""


class StepClock:
    """Notes when each step of a training first appeared in its file, to some 20 ms."""

    _LOOK_EVERY_S = 0.02

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: dict[int, float] = {}
        self._stop = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Look at the file inside the block, from a thread of its own."""
        thread = threading.Thread(target=self._look, name="step-clock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def last(self) -> int:
        """The newest step so far, 0 before the first."""
        return max(list(self._seen), default=0)

    def first_after(self, step: int) -> int:
        """The first step seen that is newer than ``step``."""
        return min(seen for seen in list(self._seen) if seen > step)

    def at_s(self, step: int) -> float:
        """When ``step`` was seen first, in seconds since the epoch."""
        return self._seen[step]

    def _look(self) -> None:
        size = -1
        while not self._stop.wait(self._LOOK_EVERY_S):
            try:
                status = self._path.stat()
            except OSError:
                continue
            if status.st_size == size:
                continue
            size = status.st_size
            step = last_json_line(self._path).get("step")
            if isinstance(step, int):
                self._seen.setdefault(step, status.st_mtime)


class _Play:
    """The jobs of act two, once both trainings run."""

    def __init__(self, watch: Watch, screen: Screen, directory: Path) -> None:
        self._watch, self._screen, self._directory = watch, screen, directory

    def submit(self, name: str, minutes: int, *arguments: str) -> Submitted:
        out = self._directory / f"{name}.jsonl"
        return self._watch.submit(
            self._directory,
            f"--job-name={name}",
            f"--time={minutes}",
            "--output=%x-%j.out",
            _SCRIPT,
            *arguments,
            f"--out={out.name}",
            progress_in=out,
        )

    def preempt_and_resume(
        self, reference: Submitted, preempted: Submitted, clock: StepClock
    ) -> float:
        """Have a shorter job arrive and see ``preempted`` stop and restart; restart_s."""
        watch, job_id = self._watch, preempted.job_id
        watch.until(
            lambda _: (
                clock.last() >= _STEPS_BEFORE_PREEMPTION
                and last_json_line(reference.progress_in).get("step", 0) != 0
            ),
            what=f"both trainings make steps, the second one {_STEPS_BEFORE_PREEMPTION} of them",
            within_s=90,
        )
        short = self.submit(
            "short", 5, f"--epochs={_SHORT_EPOCHS}", f"--step-seconds={_SHORT_STEP_S}"
        )
        watch.until(lambda facts: facts[job_id].pending, what="the lease is ended", within_s=60)
        requeued_s, stop_step = time.time(), clock.last()
        self._screen.say(f"  preempted was stopped after step {stop_step} and is requeued")
        facts = watch.until(
            lambda facts: facts[job_id].running and facts[job_id].restarts > 0,
            what="the preempted training runs again",
            within_s=90,
        )
        started_s = facts[job_id].start_s
        assert started_s is not None  # it runs
        watch.until(
            lambda _: clock.last() > stop_step, what="its first step after that", within_s=60
        )
        self._refuse_other_story(preempted, short)
        first_s = clock.at_s(clock.first_after(stop_step))
        return (requeued_s - clock.at_s(stop_step)) + (first_s - started_s)

    def _refuse_other_story(self, preempted: Submitted, short: Submitted) -> None:
        before, *after = self._watch.nodes[preempted.job_id]
        taken = self._watch.nodes[short.job_id]
        if after == [] or after == [before] or taken != [before]:
            raise DemoError(
                f"the training was on {before}, then on {after or 'no other node'}; the shorter "
                f"job was on {taken}: it should have taken the training's node"
            )
        self._screen.say(
            f"  preempted runs again on {after[-1]}; its old node {before} is taken by short"
        )


def run_resume(stage: Stage, screen: Screen) -> Resumed:
    """The second act."""
    directory = stage.directory("resume")
    screen.heading("A real training is preempted by a shorter job (policy srtf)")
    with stage.controller(
        directory, policy="srtf", mechanism="tune", nodes=RESUME_NODES
    ) as controller:
        watch = Watch(stage, controller, screen)
        play = _Play(watch, screen, directory)
        same = (f"--epochs={_EPOCHS}", "--seed=7")
        with screen.watching():
            reference = play.submit("reference", 30, *same, f"--step-seconds={_REFERENCE_STEP_S}")
            preempted = play.submit("preempted", 60, *same, f"--step-seconds={_PREEMPTED_STEP_S}")
            clock = StepClock(preempted.progress_in)
            with clock.running():
                restart_s = play.preempt_and_resume(reference, preempted, clock)
            facts = watch.until(all_completed, what="all three jobs complete", within_s=120)
    if facts[reference.job_id].restarts:
        raise DemoError("the reference run was interrupted too; there is nothing to compare with")
    return Resumed(identical=_compare(screen, reference, preempted), restart_s=restart_s)


def _compare(screen: Screen, reference: Submitted, preempted: Submitted) -> bool:
    one, other = read_training(reference.progress_in), read_training(preempted.progress_in)
    screen.say("")
    for name, training in (("reference", one), ("preempted", other)):
        screen.say(
            f"  {name}: {len(training.losses)} steps, last loss "
            f"{training.losses[len(training.losses)]!r}, weights {training.weights[:16]}…"
        )
    difference = first_difference(one, other)
    screen.say(f"  DIFFERENT: {difference}" if difference else "  identical to the last bit")
    return not difference
