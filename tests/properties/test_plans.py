"""Promises that every policy and mechanism keeps, on random pools and histories."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from builders import Harness, quiet
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from promises import check_actions, check_all_placed, check_idle_gpus, shuffled, telling
from strategies import RIVALS, jobs, nodes, profiles, snapshots

from slurm_synergy.core.decide import check_plan, decide
from slurm_synergy.core.model import Enforcement, JobPhase, Node, Plan, Snapshot
from slurm_synergy.core.snapshot import is_pinned
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES

# A solver is a program of its own: too slow for hundreds of plans, it has tests of its own below.
SOLVING = {"opt"}
SKIPPING = {name for name, one in MECHANISMS.items() if getattr(one, "may_skip", False)}
# These rank by age or by the service had so far, so time alone is an event to them: las shares out
# time by stopping what ran in favour of what waited.
AGEING = {"ftf", "ftf_ascending", "las", "sia"}
# The policies to compare with have a module of their own.
OURS = sorted(set(POLICIES) - RIVALS)
PAIRS = list(itertools.product(OURS, sorted(set(MECHANISMS) - SOLVING)))
FULL_PAIRS = [pair for pair in PAIRS if pair[1] not in SKIPPING]
SKIPPING_PAIRS = [pair for pair in PAIRS if pair[1] in SKIPPING]


def test_only_the_baselines_that_the_specification_allows_leave_jobs_out() -> None:
    assert sorted(SKIPPING) == ["drf", "greedy", "tetris", "tetris_align"]


def plans(snapshot: Snapshot, pairs: list[tuple[str, str]]) -> Iterator[tuple[str, str, Plan]]:
    """What each pair decides, on a snapshot that nobody has looked at."""
    for policy, mechanism in pairs:
        with telling(policy, mechanism):
            plan = decide(replace(snapshot), POLICIES[policy], MECHANISMS[mechanism])
        yield policy, mechanism, plan


@settings(max_examples=40)
@given(snapshot=snapshots())
def test_every_plan_keeps_the_promises(snapshot: Snapshot) -> None:
    for policy, mechanism, plan in plans(snapshot, PAIRS):
        with telling(policy, mechanism):
            check_plan(snapshot, plan)


@settings(max_examples=40)
@given(snapshot=snapshots())
def test_exactly_the_granted_jobs_are_placed(snapshot: Snapshot) -> None:
    for policy, mechanism in FULL_PAIRS:
        with telling(policy, mechanism):
            _assert_all_placed(policy, mechanism, replace(snapshot))


def _assert_all_placed(policy: str, mechanism: str, snapshot: Snapshot) -> None:
    decision = POLICIES[policy].choose(snapshot)
    check_all_placed(decision, MECHANISMS[mechanism].place(snapshot, decision))


@settings(max_examples=40)
@given(snapshot=snapshots())
def test_a_job_that_a_baseline_leaves_out_was_granted_and_can_be_stopped(
    snapshot: Snapshot,
) -> None:
    for policy, mechanism in SKIPPING_PAIRS:
        with telling(policy, mechanism):
            _assert_left_out_rightly(policy, mechanism, replace(snapshot))


def _assert_left_out_rightly(policy: str, mechanism: str, snapshot: Snapshot) -> None:
    decision = POLICIES[policy].choose(snapshot)
    layout = MECHANISMS[mechanism].place(snapshot, decision)
    placed = {one.job_id for one in layout.placements}
    assert placed.isdisjoint(layout.unplaced)
    assert placed | set(layout.unplaced) == {grant.job_id for grant in decision.grants}
    for status in snapshot.jobs:
        if status.job.job_id in layout.unplaced:
            assert not is_pinned(status, snapshot)


@pytest.mark.parametrize(("policy", "mechanism"), list(itertools.product(OURS, sorted(SOLVING))))
@settings(max_examples=4, deadline=None)
@given(snapshot=snapshots())
def test_plans_of_a_solver_keep_the_promises(
    policy: str, mechanism: str, snapshot: Snapshot
) -> None:
    plan = decide(snapshot, POLICIES[policy], MECHANISMS[mechanism])
    check_plan(snapshot, plan)
    assert plan.solver["status"] in {"trivial", "optimal", "feasible", "infeasible", "none"}
    _assert_all_placed(policy, mechanism, snapshot)


@settings(max_examples=25)
@given(snapshot=snapshots(), seed=st.integers(0, 1000))
def test_the_plan_does_not_depend_on_the_order_of_mappings_or_on_earlier_calls(
    snapshot: Snapshot, seed: int
) -> None:
    for policy, mechanism, first in plans(snapshot, PAIRS):
        with telling(policy, mechanism):
            other = shuffled(snapshot, seed)
            assert decide(other, POLICIES[policy], MECHANISMS[mechanism]) == first


@settings(max_examples=40)
@given(snapshot=snapshots())
def test_no_single_gpu_job_waits_beside_a_gpu_that_it_could_use(snapshot: Snapshot) -> None:
    assume(not snapshot.draining)
    for policy, mechanism, plan in plans(snapshot, FULL_PAIRS):
        with telling(policy, mechanism):
            check_idle_gpus(snapshot, plan)


@settings(max_examples=40)
@given(snapshot=snapshots())
def test_actions_never_promise_the_same_gpu_core_or_memory_twice(snapshot: Snapshot) -> None:
    for policy, mechanism, plan in plans(snapshot, PAIRS):
        with telling(policy, mechanism):
            check_actions(snapshot, plan)


# Not the baselines that may leave a granted job out: the policy's word for that job can stop
# another one that fits, which is started again as soon as the first is left out (record 014).
@settings(max_examples=25)
@given(data=st.data(), pool=nodes(), enforcement=st.sampled_from(Enforcement))
def test_without_events_the_cluster_comes_to_rest(
    data: st.DataObject, pool: list[Node], enforcement: Enforcement
) -> None:
    count = data.draw(st.integers(1, 8))
    early = data.draw(st.integers(0, count))
    coming = [(data.draw(jobs(n)), data.draw(profiles())) for n in range(1, count + 1)]
    for policy, mechanism in FULL_PAIRS:
        with telling(policy, mechanism):
            harness = Harness(pool, policy, mechanism, enforcement)
            for one, belief in coming:
                if one.job_id == early:
                    harness.round()
                harness.submit(one, belief=belief)
            _assert_comes_to_rest(harness, ageing=policy in AGEING)


def _assert_comes_to_rest(harness: Harness, *, ageing: bool) -> None:
    for _ in range(6):
        if ageing:
            harness.clock.time_s -= 300.0
        last = harness.round()
    # One round to decide, one to start what was stopped; the rest must be quiet. Restarts for
    # memory may add one more of each.
    assert quiet(last) and quiet(harness.results[-2])
    shown = {held.phase for held in harness.cluster.jobs.values()}
    assert shown <= {JobPhase.PENDING, JobPhase.RUNNING}
