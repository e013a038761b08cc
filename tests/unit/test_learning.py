"""Learning from elastic jobs: through the ledger into the round, over restarts, whoever lies."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from builders import elastic, node, pending, snapshot
from learning_truth import TRUTH, place, told
from manual_clock import ManualClock

from slurm_synergy.cluster import Observation, ObservedJob
from slurm_synergy.controller.learning import JobTold, Learner
from slurm_synergy.controller.learning_points import Learned, Point, TrainingReport
from slurm_synergy.controller.learning_steps import Progress
from slurm_synergy.controller.learning_store import Lesson, Subject
from slurm_synergy.controller.ledger import Ledger, StoredLease
from slurm_synergy.controller.profile_shelf import ProfileShelf
from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.decide import check_plan, decide
from slurm_synergy.core.goodput import GradientStatistics, ThroughputModel
from slurm_synergy.core.model import (
    Elasticity,
    JobPhase,
    Lease,
    Placement,
    Profile,
    ProfileOrigin,
)
from slurm_synergy.core.scaling import Scaling, TypeSpeed
from slurm_synergy.errors import LeaseError, LedgerUnavailable
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies.sia import SIA
from slurm_synergy.profiler.evidence import Evidence
from slurm_synergy.profiler.sweep import Confidence

PATIENCE_S = 120.0
OWNER, OTHER = 1000, 2000
SHAPES = ((1, 1), (1, 2), (1, 4), (2, 8), (4, 16))
NOISE = 40.0


class World:
    """A ledger with running jobs, and a learner over it, that can be restarted."""

    def __init__(self, directory: Path, clock: ManualClock) -> None:
        self.directory, self.clock = directory, clock
        self.keys: dict[int, str] = {}
        self.elasticity = Elasticity.ADAPTIVE
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(self.directory, clock=self.clock)
        self.learner = Learner(self.ledger, self.clock)

    def restart(self) -> None:
        self.close()
        self.open()
        self.observe()

    def close(self) -> None:
        self.learner.close()
        self.ledger.close()

    def run(self, job_id: int, key: str = "", uid: int = OWNER) -> None:
        """The job holds a lease, and its hints name that profile."""
        lease = Lease(job_id=job_id, generation=1, placement=place(1, job_id=job_id), expires_s=0.0)
        self.ledger.save_leases([StoredLease(lease=lease, owner_uid=uid, incarnation=0)])
        self.keys[job_id] = key
        self.observe()

    def observe(self) -> None:
        jobs = tuple(
            ObservedJob(
                job=elastic(job_id, elasticity=self.elasticity),
                phase=JobPhase.RUNNING,
                allocated=(),
                profile_key=self.keys[job_id],
            )
            for job_id in sorted(self.keys)
        )
        self.learner.observed(Observation(nodes=(), jobs=jobs, free={}))

    def tell(
        self,
        report: TrainingReport,
        where: Placement,
        *,
        uid: int = OWNER,
        program: str = "",
        settle: bool = True,
    ) -> None:
        self.clock.advance(30)
        self.learner.reported(
            JobTold(
                job_id=where.job_id,
                owner_uid=uid,
                placement=where,
                report=report,
                program=program,
            )
        )
        if settle:
            assert self.learner.settle(PATIENCE_S)

    def tell_all(self, job_id: int = 1, *, uid: int = OWNER) -> None:
        """The job runs on more and more GPUs and tells the truth."""
        for nodes, gpus in SHAPES:
            report = replace(
                told((nodes, gpus), (16, 64, 128)), square=1.0, variance=NOISE, initial_batch=32
            )
            self.tell(report, place(gpus, nodes=nodes, job_id=job_id), uid=uid)

    def belief(self, job_id: int) -> Profile | None:
        return self.ledger.read()[job_id].profile


@pytest.fixture
def world(tmp_path: Path, clock: ManualClock) -> Iterator[World]:
    world = World(tmp_path, clock)
    yield world
    world.close()


def truth(explored: int) -> Scaling:
    speed = TypeSpeed(model=TRUTH, local_most=128, explored_gpus=explored)
    return Scaling(
        speeds={"v100": speed}, statistics=GradientStatistics(square=1.0, variance=NOISE)
    )


def scaling_of(profile: Profile | None) -> Scaling:
    assert profile is not None and profile.scaling is not None
    return profile.scaling


def test_the_round_believes_what_the_job_told_within_a_few_percent(world: World) -> None:
    world.run(1)
    assert world.belief(1) is None
    world.tell_all()
    speed = scaling_of(world.belief(1)).speeds["v100"]
    assert speed.explored_gpus == 16
    for shape in ((1, 2, 100), (1, 4, 16), (2, 8, 64), (3, 12, 20), (8, 32, 32)):
        assert speed.model.rate(*shape) == pytest.approx(TRUTH.rate(*shape), rel=0.05)


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_it_gets_the_configuration_that_the_truth_would_get(world: World, nodes: int) -> None:
    world.run(1)
    world.tell_all()
    pool = [node(f"v100-{at}", "v100", 4, 16, 240_000) for at in range(nodes)]

    def chosen(*beliefs: Profile) -> list[object]:
        jobs = [pending(elastic(number + 1), one) for number, one in enumerate(beliefs)]
        return [one.configuration for one in SIA.choose(snapshot(pool, jobs)).grants]

    learned, true = world.belief(1), Profile(scaling=truth(16))
    assert learned is not None
    assert chosen(learned) == chosen(true)
    bent = Profile(scaling=replace(truth(16), statistics=GradientStatistics(variance=0.01)))
    shapes = [replace(one, batch=None) for one in chosen(learned, bent, bent)]  # type: ignore[type-var]
    assert shapes == [replace(one, batch=None) for one in chosen(true, bent, bent)]  # type: ignore[type-var]


def test_a_restart_keeps_everything(world: World) -> None:
    world.run(1, "resnet")
    world.tell_all()
    before, of_key = world.belief(1), world.ledger.profile("resnet")
    lesson = world.ledger.lesson(Subject(job_id=1, key="resnet"))
    assert lesson is not None and len(lesson.learned.points) == 15
    world.restart()
    assert world.belief(1) == before
    assert world.ledger.profile("resnet") == of_key
    assert world.ledger.lesson(Subject(job_id=1, key="resnet")) == lesson
    # What comes then is added to it.
    world.tell(told((8, 32), (64,)), place(32, nodes=8))
    lesson = world.ledger.lesson(Subject(job_id=1, key="resnet"))
    assert lesson is not None and len(lesson.learned.points) == 16
    assert scaling_of(world.belief(1)).explored_gpus == 32
    assert scaling_of(world.belief(1)).statistics.variance == NOISE


def test_what_was_explored_outlives_a_stop(world: World) -> None:
    world.run(1)
    world.tell_all()
    world.ledger.end_lease(1)
    assert scaling_of(world.belief(1)).explored_gpus == 16
    world.restart()
    assert scaling_of(world.belief(1)).explored_gpus == 16


def test_the_next_job_with_the_same_key_starts_with_it(world: World) -> None:
    world.run(1, "resnet")
    world.tell_all()
    world.ledger.forget_job(1)
    del world.keys[1]
    world.restart()
    assert 1 not in world.ledger.read()
    found = world.ledger.profile("resnet")
    assert scaling_of(found).explored_gpus == 16
    # Its own word then goes before it, where there is one.
    world.run(2, "resnet")
    noisy = replace(told((1, 1), (16,)), variance=7.0, initial_batch=32)
    world.tell(noisy, place(1, job_id=2))
    own = scaling_of(world.belief(2))
    assert own.explored_gpus == 16
    assert own.statistics == GradientStatistics(square=0.0, variance=7.0)
    assert own.speeds["v100"].model.rate(2, 8, 64) == pytest.approx(TRUTH.rate(2, 8, 64), rel=0.05)


def test_jobs_of_one_program_that_name_no_key_learn_from_each_other(world: World) -> None:
    world.run(1)
    world.tell(told((1, 4), (64,)), place(4), program="run-7")
    world.run(2)
    world.tell(told((1, 1), (64,)), place(1, job_id=2), program="run-7")
    assert scaling_of(world.belief(2)).explored_gpus == 4
    world.run(3)
    world.tell(told((1, 1), (64,)), place(1, job_id=3), program="run-8")
    assert scaling_of(world.belief(3)).explored_gpus == 1


def test_nobody_teaches_the_key_under_which_another_users_program_is_known(world: World) -> None:
    key = f"u{OTHER}-run-7a"
    world.run(1, key)
    world.tell_all()
    assert world.ledger.profile(key) is None
    assert scaling_of(world.belief(1)).explored_gpus == 16
    world.run(2, uid=OTHER)
    world.tell(told((1, 1), (64,)), place(1, job_id=2), uid=OTHER, program="run-7a")
    assert scaling_of(world.ledger.profile(key)).explored_gpus == 1


def test_what_others_start_with_only_its_owner_changes(world: World) -> None:
    world.run(1, "resnet")
    world.tell_all()
    before = world.ledger.profile("resnet")
    world.run(2, "resnet", uid=OTHER)
    world.tell(told((8, 32), (64,), slower=9.0), place(32, nodes=8, job_id=2), uid=OTHER)
    assert world.ledger.profile("resnet") == before
    assert scaling_of(world.belief(2)).explored_gpus == 32


def test_measured_and_built_in_profiles_are_taught_by_those_who_may(world: World) -> None:
    built_in = "resnet18-imagenet"
    measured = Profile(
        key="mine", gpu_rate_per_gpu={"v100": 5.0}, origin=ProfileOrigin.MEASURED, restart_s=77.0
    )
    evidence = Evidence(
        gpu_type="v100",
        gpus=1,
        most_cpus=4,
        proportional_cpus=3,
        points=(),
        confidence=Confidence.HIGH,
        measured_s=0.0,
        owner_uid=OWNER,
    )
    world.ledger.save_profile(measured, evidence)
    world.ledger.save_profile(replace(measured, key="for-all"))
    for job_id, (key, uid, explored) in enumerate(
        (("mine", OTHER, 0), ("mine", OWNER, 4), ("for-all", OWNER, 0), (built_in, OWNER, 0)), 1
    ):
        world.run(job_id, key, uid=uid)
        world.tell(told((1, 4), (64,)), place(4, job_id=job_id), uid=uid)
        assert scaling_of(world.belief(job_id)).explored_gpus == 4
        found = world.ledger.profile(key)
        assert (found.scaling.explored_gpus if found and found.scaling else 0) == explored
    # What was measured of cores stays with what was learned of GPUs.
    found = world.ledger.profile("mine")
    assert found is not None and replace(found, scaling=None) == measured
    assert replace(world.belief(2) or Profile(), scaling=None) == measured
    # And follows when that is measured anew.
    world.ledger.save_profile(replace(measured, restart_s=5.0), evidence)
    assert (world.belief(2) or Profile()).restart_s == 5.0


def test_a_belief_stays_the_same_object_until_something_is_learned(world: World) -> None:
    world.run(1, "resnet")
    world.tell_all()
    first, of_key = world.belief(1), world.ledger.profile("resnet")
    assert world.belief(1) is first
    assert world.ledger.profile("resnet") is of_key
    world.tell(told((1, 2), (16, 64), slower=1.001), place(2))
    assert world.belief(1) is first
    world.tell(told((1, 4), (16, 64), slower=2.0), place(4))
    assert world.belief(1) is not first


HOSTILE = (
    TrainingReport(square=math.nan, initial_batch=32),
    TrainingReport(variance=-1.0, initial_batch=32),
    replace(told((1, 1), (32,)), progress=math.inf),
    told((1, 1), (2**50,)),
    told((1, 1), range(1, 30)),
    told((1, 1), (32,), slower=1e-30),
    told((1, 1), (32,), slower=-1.0),
    told((8, 64), (32,)),
)


@pytest.mark.parametrize("report", HOSTILE)
def test_a_hostile_report_changes_nothing_and_is_told_of(
    world: World, report: TrainingReport, caplog: pytest.LogCaptureFixture
) -> None:
    world.run(1, "resnet")
    world.tell_all()
    belief, of_key = world.belief(1), world.ledger.profile("resnet")
    lesson = world.ledger.lesson(Subject(job_id=1, key="resnet"))
    with caplog.at_level(logging.WARNING):
        world.tell(report, place(1))
        world.tell(replace(report, local_most=7), place(1))
    assert world.belief(1) is belief
    assert world.ledger.profile("resnet") is of_key
    assert world.ledger.lesson(Subject(job_id=1, key="resnet")) == lesson
    assert [one.message.partition(":")[0] for one in caplog.records] == ["job 1"]
    shown = world.learner.describe(1)
    assert shown is not None and shown["refused"] == 2
    assert shown["refused_because"] and shown["points"] == 15
    assert json.dumps(shown, allow_nan=False)


def test_repeated_reports_count_once_and_quick_ones_wait(world: World) -> None:
    world.run(1)
    report = told((1, 1), (32,))
    for _ in range(3):
        world.tell(report, place(1))

    def steps() -> int:
        lesson = world.ledger.lesson(Subject(job_id=1, key=""))
        assert lesson is not None
        return sum(point.steps for point in lesson.learned.points)

    assert steps() == 50
    other = told((1, 1), (64,))
    world.clock.advance(-29)  # one second after the last
    world.tell(report, place(1))
    assert steps() == 50
    world.clock.advance(-29)
    world.tell(other, place(1))
    assert steps() == 100


def test_no_report_waits_for_a_fit(tmp_path: Path, clock: ManualClock) -> None:
    world, go, began = World(tmp_path, clock), threading.Event(), threading.Event()
    try:

        def slow(points: tuple[Point, ...]) -> ThroughputModel:
            began.set()
            assert go.wait(PATIENCE_S)
            return TRUTH

        world.learner = Learner(world.ledger, clock, fit=slow)
        world.run(1)
        world.run(2)
        world.tell(told((1, 1), (32,)), place(1), settle=False)
        assert began.wait(PATIENCE_S)
        # The thread is busy, and everything else goes on.
        world.tell(told((1, 2), (32,)), place(2), settle=False)
        world.tell(told((1, 1), (32,)), place(1, job_id=2), settle=False)
        assert world.belief(1) is None
        assert not world.learner.settle(0.01)
        go.set()
        assert world.learner.settle(PATIENCE_S)
        assert scaling_of(world.belief(1)).explored_gpus == 2
        assert scaling_of(world.belief(2)).explored_gpus == 1
    finally:
        go.set()
        world.close()


def test_closing_writes_what_was_told(world: World) -> None:
    world.run(1)
    world.tell(told((1, 1), (32,)), place(1), settle=False)
    world.restart()
    assert scaling_of(world.belief(1)).explored_gpus == 1


def test_a_fit_that_fails_or_a_full_disk_ends_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.run(1)
    full = LedgerUnavailable("the disk is full")

    def refuse(lessons: list[Lesson]) -> None:
        raise full

    with monkeypatch.context() as patch:
        patch.setattr(world.ledger, "save_lessons", refuse)
        world.tell(told((1, 1), (32,)), place(1))
    assert "the disk is full" in caplog.text
    assert world.belief(1) is None

    def broken(points: tuple[Point, ...]) -> ThroughputModel:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(world.learner, "_fit", broken)
        world.tell(told((1, 2), (32,)), place(2))
    assert "a mistake of the program" in caplog.text
    world.tell(told((1, 4), (32,)), place(4))
    lesson = world.ledger.lesson(Subject(job_id=1, key=""))
    assert lesson is not None and len(lesson.learned.points) == 3
    assert scaling_of(world.belief(1)).explored_gpus == 4


def test_jobs_that_are_gone_leave_nothing(world: World) -> None:
    world.run(1)
    world.tell_all()
    world.ledger.forget_job(1)
    del world.keys[1]
    world.observe()
    assert world.learner.describe(1) is None
    assert world.ledger.lesson(Subject(job_id=1, key="")) is None
    # Not even what was written after that, once the ledger is opened again.
    lesson = Lesson(
        subject=Subject(job_id=1, key=""), owner_uid=OWNER, told_s=0.0, learned=Learned()
    )
    world.ledger.save_lessons([lesson])
    world.restart()
    assert world.ledger.lesson(Subject(job_id=1, key="")) is None


def test_a_key_that_is_forgotten_is_forgotten_whole(world: World) -> None:
    world.run(1, "resnet")
    world.tell_all()
    shelf = ProfileShelf(world.ledger, CATALOGUE.get)
    with pytest.raises(LeaseError, match=f"belongs to user id {OWNER}"):
        shelf.forget_profile("resnet", uid=OTHER, operators=())
    assert world.ledger.profile("resnet") is not None
    assert shelf.forget_profile("resnet", uid=OWNER, operators=())["forgotten"]
    assert world.ledger.profile("resnet") is None
    with pytest.raises(LeaseError, match="no profile is kept"):
        shelf.forget_profile("resnet", uid=OWNER, operators=())
    assert scaling_of(world.belief(1)).explored_gpus == 16
    # It is not brought back by who goes on teaching it.
    world.tell(told((1, 2), (32,)), place(2))
    assert scaling_of(world.ledger.profile("resnet")).explored_gpus == 2


def test_of_too_many_keys_of_a_user_the_oldest_go(world: World) -> None:
    def lesson(number: int, uid: int) -> Lesson:
        subject = Subject(job_id=0, key=f"u{uid}-{number}")
        return Lesson(
            subject=subject,
            owner_uid=uid,
            told_s=float(number),
            learned=Learned(),
            scaling=truth(1),
        )

    world.ledger.save_lessons([lesson(0, OTHER)])
    world.ledger.save_lessons([lesson(number, OWNER) for number in range(203)])
    kept = [number for number in range(203) if world.ledger.profile(f"u{OWNER}-{number}")]
    assert kept == list(range(3, 203))
    assert world.ledger.profile(f"u{OTHER}-0") is not None


def test_a_job_that_only_advances_is_learned_from_too(world: World) -> None:
    world.elasticity = Elasticity.STRONG_SCALING
    world.run(1)
    for restart, gpus in enumerate((1, 2, 4)):
        step_s = float(TRUTH.iteration_s(1, gpus, 128 // gpus))
        for steps in (0, 10, 100, 200):
            world.clock.advance(30)
            world.learner.reported(
                JobTold(
                    job_id=1,
                    owner_uid=OWNER,
                    placement=place(gpus),
                    progress=Progress(
                        incarnation=restart,
                        step=1000 * restart + steps,
                        samples=128 * (1000 * restart + steps),
                        stepped_s=steps * step_s,
                    ),
                )
            )
            assert world.learner.settle(PATIENCE_S)
        scaling = scaling_of(world.belief(1))
        assert scaling.explored_gpus == gpus
    speed = scaling.speeds["v100"]
    for gpus in (1, 2, 4):
        # How much of a step is synchronisation it does not tell.
        seen = TRUTH.rate(1, gpus, 128 // gpus)
        assert speed.model.rate(1, gpus, 128 // gpus) == pytest.approx(seen, rel=0.1)
    # Its hints name no batch, and it grows nevertheless; the batch stays its own.
    assert scaling.own_batch == 128
    pool = [node("v100-1", "v100", 8, 24, 800_000)]
    one = pending(elastic(elasticity=world.elasticity, batch=None), world.belief(1))
    shot = snapshot(pool, [one])
    (grant,) = SIA.choose(shot).grants
    assert (grant.configuration.gpus, grant.configuration.batch) == (8, None)
    check_plan(shot, decide(shot, SIA, MECHANISMS["tune"]))
    # Who tells more is asked for no more than that.
    world.tell(told((1, 4), (32,)), place(4))
    before = world.belief(1)
    for steps in (1, 100, 200):
        world.clock.advance(30)
        late = Progress(incarnation=9, step=steps, samples=999 * steps, stepped_s=float(steps))
        world.learner.reported(
            JobTold(job_id=1, owner_uid=OWNER, placement=place(4), progress=late)
        )
    assert world.learner.settle(PATIENCE_S)
    assert world.belief(1) is before


def test_progress_says_nothing_of_jobs_whose_batch_may_change(world: World) -> None:
    world.run(1)
    for steps in (0, 10, 100):
        world.clock.advance(30)
        now = Progress(step=steps, samples=32 * steps, stepped_s=float(steps))
        world.learner.reported(JobTold(job_id=1, owner_uid=OWNER, placement=place(1), progress=now))
    assert world.learner.settle(PATIENCE_S)
    assert world.belief(1) is None


def test_progress_of_unknown_jobs_or_without_time_says_nothing(world: World) -> None:
    world.elasticity = Elasticity.STRONG_SCALING
    world.run(1)
    silent = JobTold(
        job_id=1, owner_uid=OWNER, placement=place(1), progress=Progress(step=50, samples=500)
    )
    world.learner.reported(silent)
    world.clock.advance(60)
    world.learner.reported(replace(silent, progress=Progress(step=90, samples=900)))
    world.learner.reported(replace(silent, job_id=9))
    assert world.learner.settle(PATIENCE_S)
    assert world.belief(1) is None
    assert world.learner.describe(9) is None
