"""Reports of elastic jobs over real gRPC: into the ledger, out of it, and never against a lease."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from builders import elastic, node, pending, snapshot
from learning_truth import TRUTH, told
from service_world import ServiceWorld

from slurm_synergy.cluster import Record
from slurm_synergy.controller.learning_points import TrainingReport
from slurm_synergy.core.decide import decide
from slurm_synergy.core.explain import explain, in_words
from slurm_synergy.core.goodput import GradientStatistics
from slurm_synergy.core.model import Elasticity, JobStatus, Profile
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.scaling import Scaling, TypeSpeed
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies.sia import SIA
from slurm_synergy.proto import lease_pb2 as pb

UID = os.getuid()
PATIENCE_S = 120.0


@pytest.fixture
def world(tmp_path: Path, munge_socket: Path) -> Iterator[ServiceWorld]:
    world = ServiceWorld(tmp_path, munge_socket, operators=frozenset({UID}))
    yield world
    world.close()


class Running:
    """A job that holds GPUs of the one node, and its first launcher."""

    def __init__(self, world: ServiceWorld, gpus: int, *, restart: int = 0, ranks: int = 1) -> None:
        self.world = world
        share = Resources(gpus=gpus, cpus=3 * gpus, mem_mib=50_000)
        placement = replace(world.placement(1, 6), shares=(("n1", share),))
        world.book.grant(
            status=world.status(1),
            owner_uid=UID,
            incarnation=restart,
            placement=placement,
            granted={"n1": share},
        )
        self.tasks = [world.task(1, rank=one, ranks=ranks, restart=restart) for one in range(ranks)]
        self.replies = [world.register(task) for task in self.tasks]

    def tell(self, training: pb.Training, rank: int = 0) -> pb.LeaseReply:
        reply = self.replies[rank]
        request = pb.RenewRequest(token=reply.token, task=self.tasks[rank], training=training)
        answer = self.world.stub.Renew(request, timeout=20)
        assert self.world.learner.settle(PATIENCE_S)
        return answer


def message(report: TrainingReport) -> pb.Training:
    return pb.Training(
        times=[
            pb.StepTimes(
                local_batch=one.local_batch,
                accumulation=one.accumulation,
                replicas=one.replicas,
                steps=one.steps,
                gradient_s=one.gradient_s,
                step_s=one.step_s,
            )
            for one in report.times
        ],
        gradient_square=report.square,
        gradient_variance=report.variance,
        initial_batch=report.initial_batch,
        local_most=report.local_most,
        progress=report.progress,
    )


def record(world: ServiceWorld) -> Record:
    return world.ledger.read()[1]


def test_a_job_that_grows_tells_until_it_gets_what_it_should(world: ServiceWorld) -> None:
    for restart, gpus in enumerate((1, 2, 4, 8)):
        job = Running(world, gpus, restart=restart)
        report = replace(
            told((1, gpus), (16, 64, 128)),
            square=1.0,
            variance=40.0,
            initial_batch=32,
            local_most=200,
        )
        assert not job.tell(message(report)).gone
        scaling = record(world).profile
        assert scaling is not None and scaling.scaling is not None
        assert scaling.scaling.explored_gpus == gpus
        world.book.end(1)
    learned = record(world).profile
    assert learned is not None and learned.scaling is not None
    speed = learned.scaling.speeds["v100"]
    assert speed.local_most == 200
    for shape in ((1, 2, 100), (1, 8, 20), (1, 6, 32)):
        assert speed.model.rate(*shape) == pytest.approx(TRUTH.rate(*shape), rel=0.03)
    assert learned.scaling.statistics == GradientStatistics(square=1.0, variance=40.0)
    # The round chooses by it what it would choose by the truth.
    own = TypeSpeed(model=TRUTH, local_most=200, explored_gpus=8)
    true = Profile(scaling=Scaling(speeds={"v100": own}, statistics=learned.scaling.statistics))
    pool = [node("n1", "v100", 8, 24, 800_000)]
    chosen = [
        SIA.choose(snapshot(pool, [pending(elastic(most=8), one)])).grants
        for one in (learned, true)
    ]
    assert chosen[0] == chosen[1]
    assert chosen[0][0].configuration.gpus == 8


def test_hostile_reports_change_nothing_and_take_no_lease(world: ServiceWorld) -> None:
    job = Running(world, 2)
    good = message(told((1, 2), (16, 64)))
    assert job.tell(good).lease.generation
    before = record(world).profile
    for bad in (
        pb.Training(gradient_square=math.nan, initial_batch=1),
        pb.Training(gradient_variance=-1.0, initial_batch=1),
        pb.Training(progress=math.inf),
        pb.Training(local_most=2**32 - 1),
        pb.Training(times=[pb.StepTimes()]),
        pb.Training(times=good.times[:1] * 1000),
        pb.Training(times=[good.times[0], pb.StepTimes(local_batch=2**32 - 1)]),
    ):
        answer = job.tell(bad)
        assert not answer.gone and answer.lease.expires_in_s == 60
        assert record(world).profile == before
    world.observe((world.status(1, lease=world.book.lease(1)),))
    (shown,) = world.view.jobs(viewer_uid=UID, operators=())
    assert shown["learning"]["refused"] == 7  # type: ignore[index]
    assert shown["learning"]["explored_gpus"] == {"v100": 2}  # type: ignore[index]
    (others,) = world.view.jobs(viewer_uid=UID + 1, operators=())
    assert "learning" not in others


def test_only_the_first_rank_is_listened_to(world: ServiceWorld) -> None:
    job = Running(world, 2, ranks=2)
    job.tell(message(told((1, 2), (16,))), rank=1)
    assert record(world).profile is None
    job.tell(message(told((1, 2), (16,))), rank=0)
    assert record(world).profile is not None


def test_what_was_told_before_a_restart_of_the_controller_is_believed_after_it(
    tmp_path: Path, munge_socket: Path
) -> None:
    found = []
    for at in range(2):
        world = ServiceWorld(tmp_path, munge_socket, operators=frozenset())
        try:
            if not at:
                Running(world, 4).tell(message(told((1, 4), (16, 64))))
            found.append(record(world).profile)
        finally:
            world.close()
    assert found[0] is not None
    assert found[0] == found[1]


def test_without_reports_a_job_keeps_its_least_gpus() -> None:
    pool = [node("n1", "v100", 8, 24, 800_000)]
    silent = elastic(most=8, min_gpus=2, elasticity=Elasticity.ADAPTIVE)
    shot = snapshot(pool, [pending(silent)])
    assert decide(shot, SIA, MECHANISMS["tune"]).placements[0].gpus == 2

    def said(one: JobStatus) -> str:
        shot = snapshot(pool, [one])
        plan = decide(shot, SIA, MECHANISMS["tune"])
        return "\n".join(in_words(explain(shot, plan, 1, market=SIA.market(shot, 1))))

    assert "has not reported its steps yet" in said(pending(silent))
    speed = TypeSpeed(model=TRUTH, local_most=128, explored_gpus=2)
    known = Profile(scaling=Scaling(speeds={"v100": speed}))
    assert "has not reported" not in said(pending(silent, known))
