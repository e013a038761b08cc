"""What is kept between rounds follows the jobs that are there, not all that ever were."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from builders import GIB, elastic, job, node, pending, profile, running, scaling, snapshot

from slurm_synergy.core import kinds, pipeline
from slurm_synergy.core.batch_curves import Curves
from slurm_synergy.core.decide import check_plan, decide
from slurm_synergy.core.goodput import BatchLimits, Learner
from slurm_synergy.core.kinds import Needs, Pool
from slurm_synergy.core.model import Job, JobStatus, Node, Placement, Plan, Profile, Snapshot
from slurm_synergy.core.pipeline import floor_share
from slurm_synergy.core.snapshot import inherit
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES

_AT_ONCE = 4
_FORGOTTEN_AT_LEAST = 10


@pytest.fixture(autouse=True)
def _forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let everything forget after a few jobs rather than after a thousand."""
    for name, module in list(sys.modules.items()):
        if name.startswith("slurm_synergy.") and hasattr(module, "_FORGOTTEN_AT_LEAST"):
            monkeypatch.setattr(module, "_FORGOTTEN_AT_LEAST", _FORGOTTEN_AT_LEAST)
    monkeypatch.setattr(pipeline, "_MOST_FITTED", _FORGOTTEN_AT_LEAST)
    monkeypatch.setattr(kinds, "_SHARED", {})
    yield
    pipeline._fitted.clear()


def _nodes() -> list[Node]:
    return [
        node("v100-0", "v100", 4, 16, 240 * GIB),
        node("v100-1", "v100", 4, 16, 240 * GIB),
        node("a100-0", "a100", 8, 32, 480 * GIB),
    ]


def _job(job_id: int) -> Job:
    if job_id % 2:
        return job(job_id, 1, min_mem_mib_per_node=4000 + job_id)
    return elastic(job_id)


def _belief(job_id: int, at: int) -> Profile:
    """A profile of which something is new in every round."""
    if job_id % 2:
        return replace(profile(gpu_rate=100.0 + at), key=f"round-{at}")
    explored = {"v100": 4, "a100": 4}
    return replace(Profile(), scaling=scaling(explored=explored, sync_s=0.01 + at / 1e5))


def _round(
    jobs: list[Job], at: int, mechanism: str, policy: str, before: tuple[Snapshot, Plan] | None
) -> tuple[Snapshot, Plan]:
    held: dict[int, Placement] = {}
    if before is not None:
        held = {one.job_id: one for one in before[1].placements}
    statuses: list[JobStatus] = []
    for one in jobs:
        belief, there = _belief(one.job_id, at), held.get(one.job_id)
        statuses.append(running(one, there, belief) if there else pending(one, belief))
    shot = snapshot(_nodes(), statuses)
    if before is not None:
        inherit(shot, before[0])
    plan = decide(shot, POLICIES[policy], MECHANISMS[mechanism])
    check_plan(shot, plan)
    return shot, plan


class _Rounds:
    """Rounds one after the other, each with the jobs of the last one but for the oldest."""

    def __init__(self, policy: str, mechanism: str, *, length: int | None = None) -> None:
        self._policy, self._mechanism, self._length = policy, mechanism, length
        self._jobs: list[Job] = []
        self._before: tuple[Snapshot, Plan] | None = None
        self._number = count()

    def play(self, rounds: int) -> Counter[str]:
        """Play so many more; how many values of each type of ours there are then."""
        for _ in range(rounds):
            at = next(self._number)
            if self._length and at % self._length == 0:  # another simulation
                self._jobs, self._before = [], None
            self._jobs = [*self._jobs, _job(at + 1)][-_AT_ONCE:]
            self._before = _round(self._jobs, at, self._mechanism, self._policy, self._before)
        gc.collect()
        types = map(type, gc.get_objects())
        # Types of others, which were imported before, may call anything their module.
        return Counter(
            one.__qualname__
            for one in types
            if str(getattr(one, "__module__", "")).startswith("slurm_synergy.")
        )


@pytest.mark.parametrize(
    ("policy", "mechanism", "length"),
    [
        ("sia", "proportional", None),
        ("sia", "tune", None),
        ("srtf", "tune", None),
        ("sia", "proportional", 10),
    ],
)
def test_jobs_that_are_gone_leave_nothing_behind(
    policy: str, mechanism: str, length: int | None
) -> None:
    """Neither in one run nor, with a ``length``, in several one after the other."""
    rounds = _Rounds(policy, mechanism, length=length)
    before = rounds.play(60)
    after = rounds.play(200)
    grown = {name: more for name, more in (after - before).items() if more > 100}
    assert not grown


def test_needs_follow_the_number_of_jobs() -> None:
    needs = Needs(Pool(_nodes()), floor_share)
    needs.expect(_AT_ONCE)
    gc.collect()
    before = sum(isinstance(one, Profile) for one in gc.get_objects())
    for at in range(500):
        needs.of(pending(job(1), profile(gpu_rate=100.0 + at)))
    kept = sum(isinstance(one, Profile) for one in gc.get_objects()) - before
    assert kept <= 2 * (2 * _AT_ONCE + _FORGOTTEN_AT_LEAST)


def test_a_job_keeps_its_need_while_others_come_and_go() -> None:
    needs = Needs(Pool(_nodes()), floor_share)
    needs.expect(1)
    stays = pending(job(1), profile(gpu_rate=50.0))
    first = needs.of(stays)
    for at in range(200):
        needs.of(pending(job(2), profile(gpu_rate=100.0 + at)))
        assert needs.of(stays) is first
    assert needs.of(pending(job(3), profile(gpu_rate=50.0))) is first


def test_equal_jobs_share_a_need_that_was_not_asked_for_in_a_while() -> None:
    needs = Needs(Pool(_nodes()), floor_share)
    needs.expect(1)
    first = needs.of(pending(job(1), profile(gpu_rate=50.0)))
    for at in range(200):
        needs.of(pending(job(2), profile(gpu_rate=100.0 + at)))
    assert needs.of(pending(job(3), profile(gpu_rate=50.0))) is first


def test_needs_on_kinds_of_node_that_are_gone_are_forgotten_the_oldest_first() -> None:
    pools = [Pool([node("n1", gpus=size)]) for size in range(1, 2 * kinds._MOST_SHARED)]
    last = pools[-1]
    kept = Needs.shared(last, floor_share)
    for one in pools:
        Needs.shared(one, floor_share)
        assert Needs.shared(last, floor_share) is kept
    assert len(kinds._SHARED) <= kinds._MOST_SHARED


def test_curves_take_room_for_their_jobs_and_configurations_only() -> None:
    curves = Curves(5)
    speed = scaling().speeds["v100"]
    limits = BatchLimits(initial=32, largest=4096, local_least=1, local_most=256)
    learner = Learner(model=speed.model, statistics=scaling().statistics, limits=limits)
    row = np.array(learner.numbers, dtype=np.float64)
    shapes = [(1, 1), (1, 2), (2, 4)]
    columns = np.arange(len(shapes))
    nodes, replicas = np.array(shapes).T
    jobs = 200
    for slot in range(jobs):
        slots = np.full(len(shapes), slot)
        curves.find(slots, shapes, columns, np.tile(row, (len(shapes), 1)), nodes, replicas)
    assert curves._at.size <= 2 * jobs * 2 * len(shapes)
