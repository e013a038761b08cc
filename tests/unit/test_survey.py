"""Batch sizes on arrival: what an emulated job tries, for how long, and when it need not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from builders import elastic, node
from learning_truth import TRUTH, place, told
from manual_clock import ManualClock

from slurm_synergy.cluster import Observation, ObservedJob
from slurm_synergy.controller.learning import Learner
from slurm_synergy.controller.learning_points import TrainingReport
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.controller.probes import Measured, Probe, TaskProfiling
from slurm_synergy.controller.survey import Surveyor, totals_to_try
from slurm_synergy.controller.tasks import TaskIdentity, TaskReport
from slurm_synergy.core.model import Elasticity, JobPhase, JobStatus, Reason, ReasonCode
from slurm_synergy.core.scaling import Scaling, shared_out

NODES = {f"{kind}-1": node(f"{kind}-1", kind, 4, 16, 400_000) for kind in ("v100", "a100")}
BATCH, ROOM = (32, 1024), 128
LATENCY_S = 0.3  # between two sizes
BUDGET_S = 20.0
PATIENCE_S = 120.0
MOVED = Reason(code=ReasonCode.MOVED, text="elsewhere")


class World:
    """A book, a learner and surveys of jobs whose steps take as long as the truth says."""

    def __init__(self, directory: Path, clock: ManualClock) -> None:
        self.clock, self.slower = clock, 1.0
        self.jobs: dict[int, ObservedJob] = {}
        self.tried: list[int] = []
        self.ledger = Ledger(directory, clock=clock)
        self.learner = Learner(self.ledger, clock)
        self.book = LeaseBook(
            self.ledger,
            clock,
            lease_s=60,
            node_of=NODES.get,
            on_measured=lambda job_id: self.surveyor.measured(job_id),
            on_training=self.learner.reported,
        )
        self.surveyor = Surveyor(leases=self.book, learner=self.learner, clock=clock)

    def close(self) -> None:
        self.learner.close()
        self.ledger.close()

    def start(
        self,
        job_id: int,
        *,
        kind: str = "v100",
        gpus: int = 1,
        run: int = 0,
        steps: int = 10,
        **more: object,
    ) -> None:
        """The job runs there and has made its first steps."""
        job = elastic(job_id, 1, **{"batch": BATCH, "wrapped": True, **more})
        where = place(gpus, kind=kind, job_id=job_id)
        self.book.grant(
            status=JobStatus(job=job),
            owner_uid=1000,
            incarnation=run,
            placement=where,
            granted=dict(where.shares),
        )
        self.jobs[job_id] = ObservedJob(job=job, phase=JobPhase.RUNNING, allocated=where.shares)
        self.task = TaskIdentity(
            job_id=job_id, restart_count=run, rank=0, ranks=1, node=where.nodes[0]
        )
        self.book.register(self.task)
        self.renew(step=steps)

    def renew(
        self,
        measured: Measured | None = None,
        training: TrainingReport | None = None,
        step: int = 10,
    ) -> tuple[Probe | None, int]:
        """One renewal: the probe and the batch that the task is told."""
        profiling = TaskProfiling(measured=measured, program="run-1")
        view = self.book.renew(
            self.task,
            TaskReport(step=step, samples=32 * step, profiling=profiling, training=training),
        )
        return view.probe, view.batch_size

    def tell(self) -> None:
        """The job says that it can follow the batch."""
        self.clock.advance(30)
        first = replace(
            told((1, 1), (32,), slower=self.slower), local_most=ROOM, progress=self.clock.now_s()
        )
        self.renew(training=first)
        assert self.learner.settle(PATIENCE_S)

    def observe(self) -> None:
        jobs = tuple(self.jobs.values())
        observation = Observation(nodes=tuple(NODES.values()), jobs=jobs, free={})
        self.surveyor.observed(observation)
        self.learner.observed(observation)

    def answer(self) -> bool:
        """The launcher measures what it is told, as long as it is let; False without a probe."""
        probe, total = self.renew()
        if probe is None:
            return False
        self.tried.append(total)
        size = shared_out(total, initial=BATCH[0], replicas=1, local_most=ROOM)
        step_s = self.slower * (size.accumulation + 1) * float(TRUTH.gradient_s(size.local))
        steps = min(
            max(probe.steps, math.ceil(1 / step_s)),
            int(probe.longest_s / step_s) - probe.warmup_steps,
        )
        if steps < 4:
            self.clock.advance(probe.longest_s)
            self.renew(Measured(probe=probe.number))
            return True
        self.clock.advance((probe.warmup_steps + steps) * step_s + LATENCY_S)
        rate = size.total / step_s
        self.renew(
            Measured(probe=probe.number, steps=steps, samples_per_s=rate, busy_samples_per_s=rate)
        )
        return True

    def survey(self) -> float:
        """See the survey through; how long it took (s)."""
        self.observe()
        began_s = self.clock.now_s()
        while self.answer():
            self.observe()
        assert self.learner.settle(PATIENCE_S)
        return self.clock.now_s() - began_s

    def belief(self, job_id: int) -> Scaling:
        profile = self.ledger.read()[job_id].profile
        assert profile is not None and profile.scaling is not None
        return profile.scaling


@pytest.fixture
def world(tmp_path: Path, clock: ManualClock) -> Iterator[World]:
    world = World(tmp_path, clock)
    yield world
    world.close()


def test_sizes_span_the_range_and_the_room_whatever_is_left_out() -> None:
    totals = totals_to_try(BATCH, ROOM)
    assert (totals[0], totals[1], len(totals)) == (32, 256, 10)
    assert totals[2] in sorted(totals)[3:6]
    assert sorted(totals_to_try((32, 40), ROOM)) == list(range(32, 41))
    assert totals_to_try((32, 32), ROOM) == (32,)
    assert totals_to_try((300, 400), ROOM) == (300,)


def test_ten_sizes_within_twenty_gpu_seconds_tell_how_fast_the_job_is(world: World) -> None:
    world.slower = 0.25
    world.start(1)
    world.observe()
    assert world.surveyor.comes_first(world.jobs[1])
    assert world.renew() == (None, 0)  # its program may not know about batches
    world.tell()
    took_s = world.survey()
    assert took_s <= BUDGET_S
    assert len(world.tried) == 10
    assert world.renew() == (None, 0)
    speed = world.belief(1).speeds["v100"]
    assert (speed.explored_gpus, speed.local_most) == (1, ROOM)
    for size in (8, 64, 128):
        assert float(speed.model.gradient_s(size)) == pytest.approx(
            world.slower * float(TRUTH.gradient_s(size)), rel=0.05
        )
    assert not world.surveyor.comes_first(world.jobs[1])


def test_a_slow_job_tries_less_and_still_keeps_to_the_time(world: World) -> None:
    world.slower = 8.0
    world.start(1)
    world.tell()
    assert world.survey() <= BUDGET_S + LATENCY_S
    assert world.renew() == (None, 0)


def test_what_the_ledger_knows_is_not_tried_again(world: World) -> None:
    world.start(1)
    world.tell()
    world.survey()
    world.tried.clear()
    # The same program as another job, and the same job after a restart.
    world.start(2)
    world.tell()
    assert world.survey() == 0.0
    world.start(1, run=1)
    world.tell()
    assert world.survey() == 0.0
    assert not world.tried
    # Another type is new.
    world.start(1, kind="a100", run=2)
    world.tell()
    assert 0 < world.survey() <= BUDGET_S
    assert set(world.belief(1).speeds) == {"v100", "a100"}


@pytest.mark.parametrize(
    "more",
    [
        {"elasticity": Elasticity.STRONG_SCALING},
        {"elasticity": Elasticity.RIGID, "batch": None},
        {"batch": (32, 32)},
        {"gpus": 2},
    ],
)
def test_without_the_users_word_or_one_gpu_nothing_is_tried(
    world: World, more: dict[str, object]
) -> None:
    world.start(1, **more)  # type: ignore[arg-type]
    world.tell()
    assert world.survey() == 0.0
    assert not world.surveyor.comes_first(world.jobs[1])


def test_a_program_that_never_tells_its_steps_is_not_waited_for(world: World) -> None:
    world.start(1)
    world.observe()
    assert world.surveyor.comes_first(world.jobs[1])
    world.clock.advance(61)
    world.observe()
    assert not world.surveyor.comes_first(world.jobs[1])


def test_a_program_that_starts_slowly_is_waited_for(world: World) -> None:
    world.start(1, steps=0)
    for _ in range(5):
        world.observe()
        world.clock.advance(50)
    world.tell()
    world.observe()
    assert world.answer()


def test_a_job_that_is_stopped_or_does_not_answer_gets_its_batch_back(world: World) -> None:
    world.start(1)
    world.tell()
    world.observe()
    world.answer()
    world.answer()
    assert world.surveyor.describe(1) == {"batch_size": 82, "tried": 2, "left": 8}
    world.book.stop(job_id=1, reason=MOVED, grace_s=60)
    world.observe()
    assert world.renew() == (None, 0)
    assert world.learner.settle(PATIENCE_S)
    assert len(world.tried) == 2
    assert world.surveyor.describe(1) is None
    world.start(2)
    world.jobs.pop(1)
    world.tell()
    world.observe()
    world.clock.advance(60)
    world.observe()
    assert world.renew() == (None, 0)


def test_switching_profiling_off_ends_surveys(world: World) -> None:
    world.start(1)
    world.tell()
    world.observe()
    probe, total = world.renew()
    assert probe is not None and total == BATCH[0]
    world.surveyor.reload(False)
    assert world.renew() == (None, 0)
    world.observe()
    assert world.renew() == (None, 0)
