"""A controller's parts over a Slurm in memory, for tests of the adapter."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import FakeSlurm
from manual_clock import ManualClock

from slurm_synergy.cluster import ObservedJob
from slurm_synergy.config import Settings
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.round import RoundResult, run_round
from slurm_synergy.slurm.cluster import SlurmCluster

__all__ = ["MakeWorld", "World", "make_world", "world"]


class World:
    """A controller's parts over a Slurm in memory; ``boot`` replaces a dead controller."""

    def __init__(self, state_dir: Path, slurm: FakeSlurm | None = None, **settings: Any) -> None:
        self.slurm = slurm or FakeSlurm()
        self.clock = ManualClock(1000.0)
        self.settings = Settings.model_validate(
            {"scheduling": {"start_deadline_s": 10.0, "retry_backoff_s": 5.0}} | settings
        )
        self.state_dir = state_dir
        self.ledger: Ledger | None = None

    def boot(self) -> None:
        """A controller starts on what its predecessor left."""
        self.close()
        self.ledger = Ledger(self.state_dir, clock=self.clock, catalogue=CATALOGUE.get)
        self.book = LeaseBook(
            self.ledger, self.clock, lease_s=60.0, node_of=lambda name: self.cluster.node(name)
        )
        self.cluster = SlurmCluster(
            self.slurm,
            self.settings,
            self.book,
            self.ledger,
            self.ledger,
            self.clock,
            helper_silent=self.book.helpers.silent,
        )
        self.cluster.prepare()

    def round(self, policy: str = "fifo") -> RoundResult:
        assert self.ledger is not None
        self.cluster.tick()
        return run_round(
            self.cluster,
            self.ledger,
            self.clock,
            POLICIES[policy],
            MECHANISMS["proportional"],
            300.0,
        )

    def step(self) -> None:
        """A round, and what Slurm makes of it by the next reading."""
        self.round()
        self.slurm.schedule()
        self.clock.advance(1.0)
        self.slurm.settle()
        self.cluster.tick()

    def seen(self, job_id: int) -> ObservedJob:
        jobs = {one.job.job_id: one for one in self.cluster.look().jobs}
        return jobs[job_id]

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()


MakeWorld = Callable[..., World]


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[MakeWorld]:
    """Worlds with state directories of their own; the arguments are those of ``World``."""
    with contextlib.ExitStack() as stack:

        def make(slurm: FakeSlurm | None = None, **settings: Any) -> World:
            place = tmp_path / secrets.token_hex(4)
            one = World(place, slurm, **settings)
            stack.callback(one.close)
            one.boot()
            return one

        yield make


@pytest.fixture
def world(make_world: MakeWorld) -> World:
    return make_world()
