"""The loop goes on whatever fails, and says so once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm
from manual_clock import ManualClock

from slurm_synergy.config import Settings
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.controller.loop import Loop, Parts
from slurm_synergy.controller.status import StatusView
from slurm_synergy.errors import ClusterError, LedgerError
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.slurm.cluster import SlurmCluster


class World:
    """A loop over a Slurm in memory."""

    def __init__(self, state_dir: Path) -> None:
        self.slurm, self.clock = FakeSlurm(), ManualClock()
        settings = Settings()
        self.ledger = Ledger(state_dir, clock=self.clock)
        self.book = LeaseBook(
            self.ledger, self.clock, lease_s=60.0, node_of=lambda name: self.cluster.node(name)
        )
        self.cluster = SlurmCluster(
            self.slurm, settings, self.book, self.ledger, self.ledger, self.clock
        )
        self.view = StatusView(settings, ledger=self.ledger, leases=self.book, clock=self.clock)
        parts = Parts(
            cluster=self.cluster,
            policy=POLICIES["fifo"],
            mechanism=MECHANISMS["proportional"],
            scheduling=settings.scheduling,
        )
        self.loop = Loop(parts, self.ledger, self.clock, self.view, threading.Event())

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
        assert world.view.status()["trouble"] == "no answer"
        world.slurm.read_queue = read  # type: ignore[method-assign]
        world.turn()
    told = [record.message for record in caplog.records]
    assert sum("no answer" in text for text in told) == 1
    assert "working again" in told
    assert world.view.status()["trouble"] is None
    assert world.book.job_ids() == (job_id,)


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


def test_an_unusable_ledger_ends_it(world: World) -> None:
    world.turn()
    world.ledger.draining = breaking(LedgerError("disk full"))  # type: ignore[method-assign,assignment]
    with pytest.raises(LedgerError):
        world.turn()
