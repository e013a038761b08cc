"""A batch size that was decided for a job reaches it with its lease, and its plan is kept whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from builders import elastic, node, pending, profile, scaling, snapshot
from service_world import ServiceWorld

from slurm_synergy.controller.codec import decode, encode
from slurm_synergy.core.decide import decide
from slurm_synergy.core.model import Plan, Snapshot
from slurm_synergy.core.scaling import BatchSize
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies.sia import SIA

UID = os.getuid()


@pytest.fixture
def world(tmp_path: Path, munge_socket: Path) -> Iterator[ServiceWorld]:
    world = ServiceWorld(tmp_path, munge_socket, operators=frozenset({UID}))
    yield world
    world.close()


def test_a_changed_batch_is_a_new_generation_of_the_lease(world: ServiceWorld) -> None:
    world.grant(1, 10, uid=UID)
    assert world.register(world.task(1)).lease.batch_size == 0
    batch = BatchSize(local=16, replicas=4, accumulation=1)
    lease = world.book.resize(job_id=1, placement=replace(world.placement(1, 10), batch=batch))
    assert lease.generation == 2 and lease.placement.batch == batch
    assert world.register(world.task(1)).lease.batch_size == 128


def test_a_round_of_sia_is_the_same_after_a_journey_through_the_journal() -> None:
    belief = replace(profile(), scaling=scaling(explored={"v100": 4}), gpu_rate_per_gpu={})
    shot = snapshot(
        [node(), node("a100-0", "a100")], [pending(elastic(at), belief) for at in (1, 2)]
    )
    plan = decide(shot, SIA, MECHANISMS["tune"])
    assert decode(Plan, encode(plan)) == plan
    assert decode(Snapshot, encode(shot)) == shot
    assert decide(decode(Snapshot, encode(shot)), SIA, MECHANISMS["tune"]) == plan
