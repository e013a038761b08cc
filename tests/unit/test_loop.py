"""The loop goes on whatever fails, and says so once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from manual_clock import ManualClock

from slurm_synergy.config import Settings
from slurm_synergy.controller import loop
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.controller.loop import Loop, Parts
from slurm_synergy.controller.status import StatusView
from slurm_synergy.core.model import JobStatus, Reason, ReasonCode
from slurm_synergy.core.snapshot import status_of
from slurm_synergy.errors import (
    ClusterError,
    LedgerError,
    LedgerUnavailable,
    SlurmCommandError,
    SlurmTimeout,
)
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.slurm.cluster import SlurmCluster
from slurm_synergy.slurm.dry_run import DryRun
from slurm_synergy.slurm.facts import JobState


class World:
    """A loop over a Slurm in memory."""

    def __init__(self, state_dir: Path, *, dry_run: bool = False) -> None:
        self.slurm, self.clock = FakeSlurm(), ManualClock()
        settings = Settings.model_validate({"scheduling": {"dry_run": dry_run}})
        self.ledger = Ledger(state_dir, clock=self.clock)
        self.book = LeaseBook(
            self.ledger, self.clock, lease_s=60.0, node_of=lambda name: self.cluster.node(name)
        )
        self.cluster = SlurmCluster(
            self.slurm, settings, self.book, self.ledger, self.ledger, self.clock
        )
        self.view = StatusView(settings, ledger=self.ledger, leases=self.book, clock=self.clock)
        self.parts = Parts(
            cluster=DryRun(self.cluster) if dry_run else self.cluster,
            policy=POLICIES["fifo"],
            mechanism=MECHANISMS["proportional"],
            scheduling=settings.scheduling,
        )
        self.loop = Loop(self.parts, self.ledger, self.clock, self.view, threading.Event())

    def turn(self, pause_s: float = 2.0) -> float:
        """One turn, after a pause."""
        self.clock.advance(pause_s)
        return self.loop.turn()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    one = World(tmp_path)
    yield one
    one.ledger.close()


def breaking(error: Exception) -> Callable[..., object]:
    def broken(*args: object) -> object:
        raise error

    return broken


def test_it_starts_what_arrives_and_looks_often_until_it_runs(world: World) -> None:
    assert world.turn() == 2.0
    job_id = world.slurm.submit()
    assert world.turn() == 1.0  # the debounce time
    assert world.turn(1.0) == 2.0  # the round ran on a reading without the start
    assert world.slurm.jobs[job_id].priority == 1
    assert world.turn() == 0.5
    world.slurm.schedule()
    assert world.turn(0.5) == 2.0
    assert world.view.status()["round"] == 2


def test_a_round_knows_when_the_last_one_was_over_reloads_and_restarts(world: World) -> None:
    world.turn()
    assert world.loop.last is not None
    first = world.loop.last.snapshot
    assert first.previous_s is None
    world.loop.replace(world.parts)
    world.turn()
    assert world.loop.last.snapshot.previous_s == first.now_s
    fresh = Loop(world.parts, world.ledger, world.clock, world.view, threading.Event(), 17.0)
    fresh.turn()
    assert fresh.last is not None
    assert fresh.last.snapshot.previous_s == 17.0


def test_a_round_follows_when_the_quantum_of_a_policy_ends(world: World) -> None:
    world.loop.replace(replace(world.parts, policy=POLICIES["gavel"]))
    world.clock.value_s = 1000 * 360.0 - 50.0
    assert world.turn(0.0) == 2.0
    assert world.loop.last is not None
    first = world.loop.last
    world.turn(48.0)
    assert world.loop.last is first
    world.turn(2.0)
    assert world.loop.last is not first
    assert world.loop.last.snapshot.now_s == 1000 * 360.0


def test_a_slurm_that_cannot_be_read_is_told_once_and_tried_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = world.slurm.submit()
    world.turn()
    world.slurm.schedule()
    world.turn()
    read = world.slurm.read_queue
    world.slurm.read_queue = breaking(ClusterError("no answer"))  # type: ignore[method-assign,assignment]
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert world.turn() == 2.0
        assert world.view.status()["trouble"] == "no answer; will be tried again"
        world.slurm.read_queue = read  # type: ignore[method-assign]
        world.turn()
    told = [record.message for record in caplog.records]
    assert sum("no answer" in text for text in told) == 1
    assert "working again" in told
    assert world.view.status()["trouble"] is None
    assert world.book.job_ids() == (job_id,)


def test_a_slurm_that_is_down_is_told_in_words_and_not_as_a_command_line(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    said = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    down = SlurmCommandError(("squeue", "-O", "x" * 500), 1, said, kind="controller_down")
    world.slurm.read_queue = breaking(down)  # type: ignore[method-assign,assignment]
    with caplog.at_level(logging.INFO):
        world.turn()
        world.turn()
    short = (
        "Slurm does not answer (Unable to contact slurm controller (connect failure)); "
        "will be tried again"
    )
    assert world.view.status()["trouble"] == short
    assert [one.message for one in caplog.records] == [f"{short}; running jobs keep what they have"]
    world.slurm.read_queue = breaking(SlurmTimeout(("squeue", "-h"), 30.0))  # type: ignore[method-assign,assignment]
    with caplog.at_level(logging.DEBUG):
        world.turn()
    assert "Slurm does not answer (squeue: nothing within 30 s)" in caplog.text
    assert "squeue -h: no answer within 30 s" in caplog.text


def test_status_is_right_at_every_reading_and_not_only_at_rounds(world: World) -> None:
    def shown() -> tuple[object, int, int]:
        (job,) = world.view.jobs(viewer_uid=0, operators=(0,))
        nodes: Any = world.view.status()["nodes"]
        return job["phase"], sum(one["gpus_used"] for one in nodes), world.view.status()["round"]  # type: ignore[return-value]

    world.turn()
    job_id = world.slurm.submit(gpus=4)
    world.turn()
    assert shown() == ("pending", 0, 1)
    world.turn(1.0)
    assert shown() == ("starting", 4, 2)
    world.slurm.schedule()
    world.turn(0.5)
    assert shown() == ("running", 4, 2)
    reason = Reason(code=ReasonCode.PREEMPTED, text="test")
    world.book.stop(job_id=job_id, reason=reason, grace_s=60.0)
    assert shown() == ("stopping", 4, 2)
    world.slurm.finish(job_id)
    world.turn(0.5)
    assert world.view.jobs(viewer_uid=0, operators=(0,)) == []
    status = world.view.status()
    assert (status["round"], status["round_age_s"], status["observed_age_s"]) == (2, 1.0, 0.0)


def test_a_dry_run_says_what_it_would_do_and_not_that_it_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, dry_run=True)
    try:
        world.slurm.submit()
        with caplog.at_level(logging.INFO):
            world.turn()
    finally:
        world.ledger.close()
    assert "dry run: would make reservation synergy over v100-[1-2]" in caplog.text
    assert "dry run: would start job 1 on v100-1" in caplog.text
    assert "1 placed, 0 wait; dry run: would start 1, stop 0, resize 0, keep 0; " in caplog.text
    assert "not done" not in caplog.text
    assert world.slurm.calls == []


def test_an_action_that_failed_is_tried_again_soon_and_not_a_whole_round_later(
    world: World,
) -> None:
    world.turn()
    job_id = world.slurm.submit(gpus=8, nodes=1)
    never = world.slurm.submit(gpus=8, nodes=2, dependency="afterok:9")
    hold = world.slurm.hold
    world.slurm.hold = breaking(ClusterError("busy"))  # type: ignore[method-assign,assignment]
    world.turn()
    world.turn()
    assert world.slurm.jobs[job_id].priority == 1
    world.slurm.hold = hold  # type: ignore[method-assign]
    for _ in range(4):
        world.turn()
    assert world.slurm.jobs[never].held.value == "admin"


def test_a_ledger_without_room_starts_nothing_and_is_tried_again(world: World) -> None:
    running = world.slurm.submit()
    world.turn()
    world.turn(1.0)
    world.slurm.schedule()
    world.turn()
    written = world.ledger._transaction
    full = LedgerUnavailable("no room; free some space")
    world.ledger._transaction = breaking(full)  # type: ignore[method-assign,assignment]
    waiting = world.slurm.submit()
    for _ in range(3):
        world.turn()
    assert world.slurm.jobs[waiting].pending
    assert world.slurm.jobs[waiting].priority == 0
    assert world.book.job_ids() == (running,)
    assert "free some space" in str(world.view.status()["trouble"])
    world.ledger._transaction = written  # type: ignore[method-assign]
    world.turn()
    world.turn()
    assert world.slurm.jobs[waiting].priority == 1
    assert world.view.status()["trouble"] is None


def test_a_stop_goes_on_while_the_ledger_has_no_room(world: World) -> None:
    ends, stops = world.slurm.submit(), world.slurm.submit()
    world.turn()
    world.turn(1.0)
    world.slurm.schedule()
    world.turn()
    reason = Reason(code=ReasonCode.PREEMPTED, text="test")
    world.book.stop(job_id=stops, reason=reason, grace_s=1.0)
    # Its end cannot be written, and must not keep the next job from being followed.
    world.slurm.finish(ends)
    full = LedgerUnavailable("no room; free some space")
    world.ledger._transaction = breaking(full)  # type: ignore[method-assign,assignment]
    world.turn()
    assert "requeue_hold" in world.slurm.calls
    assert ends in world.book.job_ids()


def test_a_suspended_job_that_was_told_to_stop_is_requeued_after_its_grace(world: World) -> None:
    job_id = world.slurm.submit()
    world.turn()
    world.turn(1.0)
    world.slurm.schedule()
    world.turn()
    reason = Reason(code=ReasonCode.PREEMPTED, text="test")
    world.book.stop(job_id=job_id, reason=reason, grace_s=5.0)
    world.slurm.jobs[job_id] = replace(world.slurm.jobs[job_id], state=JobState.SUSPENDED)
    world.turn()
    assert "requeue_hold" not in world.slurm.calls
    world.turn(5.0)
    assert "requeue_hold" in world.slurm.calls


def test_an_unusable_ledger_ends_it(world: World) -> None:
    world.turn()
    world.ledger.draining = breaking(LedgerError("disk full"))  # type: ignore[method-assign,assignment]
    with pytest.raises(LedgerError):
        world.turn()


def test_rounds_take_over_what_has_not_changed_but_not_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = [world.slurm.submit(gpus=8) for _ in range(4)][-1]

    def status() -> JobStatus:
        world.slurm.submit(dependency="afterok:1")  # something new makes a round due
        world.turn()
        world.turn()
        assert world.loop.last is not None
        return status_of(world.loop.last.snapshot)[waiting]

    for _ in range(3):
        world.turn()
        world.slurm.schedule()
    first = status()
    assert status() is first
    monkeypatch.setattr(loop, "_KNOWN_FOR_ROUNDS", 1)
    assert status() is first
    assert status() is not first
    assert status() == first
