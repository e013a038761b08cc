"""A real training under a real launcher teaches a real controller how fast it is."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adaptive_program import PER_SAMPLE_VARIANCE
from fake_controller import until
from forks import Forks
from inprocess import ROOT
from launchers import free_port
from service_world import ServiceWorld
from test_launch import Rig, rig

from slurm_synergy.cluster import Observation
from slurm_synergy.controller.survey import Surveyor
from slurm_synergy.core.model import Elasticity, Job
from slurm_synergy.core.scaling import BatchSize, Scaling
from slurm_synergy.jobside.board import Board
from slurm_synergy.jobside.training import MOST_TIMES, StepMeans, Training

__all__ = ["rig"]  # fixture

pytest.importorskip("torch", reason="the training is a real one (extra torch)")

UID = os.getuid()
JOB = 77  # as the rig's environment says
PAUSE_S = 0.03
PATIENCE_S = 120.0


class FastClock:
    """Half a minute is over in a second and a half."""

    def now_s(self) -> float:
        return time.time() * 20


class Controller(ServiceWorld):
    """With surveys, and a job of two GPUs that its launchers in ``rig`` find."""

    def __init__(self, state_dir: Path, munge_socket: Path, rig: Rig) -> None:
        super().__init__(
            state_dir,
            munge_socket,
            operators=frozenset(),
            lease_s=6.0,
            learner_clock=FastClock(),
            on_measured=lambda job_id: self.surveyor.measured(job_id),
        )
        self.surveyor = Surveyor(leases=self.book, learner=self.learner, clock=self.clock)
        rig.env["SYNERGY_ENDPOINT"] = self.server.endpoint
        rig.env["SYNERGY_MUNGE_SOCKET"] = str(munge_socket)
        rig.env["PATH"] = os.environ["PATH"]  # the real munge
        rig.env["OMP_NUM_THREADS"] = "1"

    def runs(self, elasticity: Elasticity, **more: Any) -> Observation:
        """The job holds two GPUs of node n1; what the loop reads of that."""
        job = Job(
            job_id=JOB,
            user="u",
            submitted_s=0.0,
            gpus=2,
            elasticity=elasticity,
            max_gpus=8,
            wrapped=True,
            **more,
        )
        self.grant(JOB, 6, uid=UID)
        return self.observe((replace(self.status(JOB, lease=self.book.lease(JOB)), job=job),))

    @property
    def points(self) -> int:
        """How many points are known of the job."""
        shown = self.learner.describe(JOB)
        return int(str(shown["points"])) if shown is not None else 0


@pytest.fixture
def controller(tmp_path: Path, munge_socket: Path, rig: Rig) -> Iterator[Controller]:
    made = Controller(tmp_path / "state", munge_socket, rig)
    yield made
    rig.close()
    made.close()


def learned(controller: Controller, holds: Callable[[Scaling], bool], what: str) -> Scaling:
    """What the next round believes, once it ``holds``."""

    def found() -> Scaling | None:
        profile = controller.ledger.read()[JOB].profile
        scaling = profile.scaling if profile is not None else None
        return scaling if scaling is not None and holds(scaling) else None

    scaling = until(found, timeout_s=PATIENCE_S, what=what)
    assert isinstance(scaling, Scaling)
    return scaling


def test_an_adaptive_training_tells_its_steps_and_its_noise(
    controller: Controller, rig: Rig, forks: Forks, tmp_path: Path
) -> None:
    controller.runs(Elasticity.ADAPTIVE)
    words = ("adaptive_program.py", str(tmp_path), "60000", "1", "8", "256", "16", "SGD", "")
    program = Path(__file__).with_name(words[0])
    rig.env |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "WORLD_SIZE": "2"}
    rig.env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for rank in ("0", "1"):
        own = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "RANK": rank, "LOCAL_RANK": rank}
        rig.start(*forks.python, str(program), *words[1:], str(PAUSE_S), **own)
    first = learned(controller, lambda one: one.statistics.variance > 0, "a belief")
    speed = first.speeds["v100"]
    assert (speed.explored_gpus, speed.local_most) == (2, 16)
    assert float(speed.model.gradient_s(4)) >= PAUSE_S * 0.98  # less than asleep it cannot take
    assert first.statistics.variance == pytest.approx(PER_SAMPLE_VARIANCE / 8, rel=0.8)
    shown = controller.learner.describe(JOB)
    assert shown is not None and (shown["points"], shown["refused"]) == (1, 0)
    # Another batch, in passes of their own, is another point.
    larger = BatchSize(local=16, replicas=2, accumulation=1)
    controller.book.resize(
        job_id=JOB, placement=replace(controller.placement(JOB, 6), batch=larger)
    )
    until(lambda: controller.points == 2, timeout_s=PATIENCE_S, what="a second point")


def test_a_training_that_is_new_tries_batch_sizes_and_goes_on_with_its_own(
    controller: Controller, rig: Rig, forks: Forks, tmp_path: Path
) -> None:
    """One copy of the model, on the two GPUs that it is split over."""
    seen = controller.runs(Elasticity.ADAPTIVE, batch=(8, 12), scale_unit=2)
    arguments = ("60000", "1", "8", "12", "16", "SGD", "", str(PAUSE_S))
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    rig.start(
        *forks.python,
        str(Path(__file__).with_name("adaptive_program.py")),
        str(tmp_path),
        *arguments,
        MASTER_PORT=free_port(),
        **alone,
    )

    def surveyed() -> bool:
        controller.surveyor.observed(seen)
        return not controller.surveyor.comes_first(seen.jobs[0]) and controller.points > 1

    until(surveyed, timeout_s=PATIENCE_S, what="a survey")
    known = controller.learner.local_batches(JOB, "v100")
    assert known is not None and known[0] == 16
    assert len(known[1]) >= 2 and max(known[1]) <= 16
    assert learned(controller, bool, "a belief").speeds["v100"].explored_gpus == 2

    def tried() -> list[int]:
        text = (tmp_path / "0-of-1.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()[:-1]]
        return [int(line["batch"]) for line in lines]

    until(lambda: tried()[-1] == 8, timeout_s=PATIENCE_S, what="its own batch")
    assert {8, 12} <= set(tried())


def test_a_training_that_never_changes_its_batch_is_learned_from_its_progress(
    controller: Controller, rig: Rig, forks: Forks, tmp_path: Path
) -> None:
    controller.runs(Elasticity.STRONG_SCALING)
    rig.start(
        *forks.python,
        str(ROOT / "examples" / "train_distributed.py"),
        f"--step-seconds={PAUSE_S}",
        "--samples=60000",
        "--workers=0",
        f"--out={tmp_path / 'steps.jsonl'}",
        RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=free_port(),
    )
    scaling = learned(controller, lambda one: bool(one.own_batch), "a belief")
    assert scaling.own_batch == 12
    speed = scaling.speeds["v100"]
    assert (speed.explored_gpus, speed.local_most) == (2, 6)
    assert 0 < speed.model.rate(1, 2, 6) <= 12 / (PAUSE_S * 0.98)


def test_the_board_holds_as_many_times_as_a_report_may_have(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", rank=0, ranks=1)
    assert board.read_training() is None
    times = tuple(
        StepMeans(
            local_batch=number,
            accumulation=number % 3,
            replicas=2,
            steps=10 * number,
            gradient_s=0.1 * number,
            step_s=0.2 * number,
        )
        for number in range(1, MOST_TIMES + 2)
    )
    told = Training(
        times=times[:MOST_TIMES],
        square=1.5,
        variance=2.5,
        initial_batch=2**32 - 1,
        local_most=7,
        progress=1e9,
    )
    board.write_training(replace(told, times=times, initial_batch=2**40))
    assert Board.attach(tmp_path / "board").read_training() == told
