"""Promises that every policy and mechanism keeps, on random pools and histories."""

from __future__ import annotations

import itertools

import pytest
from builders import Harness, quiet
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from promises import check_actions, check_all_placed, check_idle_gpus, shuffled
from strategies import RIVALS, jobs, nodes, profiles, snapshots

from slurm_synergy.core.decide import check_plan, decide
from slurm_synergy.core.model import Enforcement, JobPhase, Node, Snapshot
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
every_pair = pytest.mark.parametrize(("policy", "mechanism"), PAIRS)
every_full_pair = pytest.mark.parametrize(
    ("policy", "mechanism"), [pair for pair in PAIRS if pair[1] not in SKIPPING]
)
every_skipping_pair = pytest.mark.parametrize(
    ("policy", "mechanism"), [pair for pair in PAIRS if pair[1] in SKIPPING]
)
every_solving_pair = pytest.mark.parametrize(
    ("policy", "mechanism"),
    list(itertools.product(OURS, sorted(SOLVING))),
)


def test_only_the_baselines_that_the_specification_allows_leave_jobs_out() -> None:
    assert sorted(SKIPPING) == ["drf", "greedy", "tetris", "tetris_align"]


@every_pair
@settings(max_examples=25)
@given(snapshot=snapshots())
def test_every_plan_keeps_the_promises(policy: str, mechanism: str, snapshot: Snapshot) -> None:
    plan = decide(snapshot, POLICIES[policy], MECHANISMS[mechanism])
    check_plan(snapshot, plan)


@every_full_pair
@settings(max_examples=25)
@given(snapshot=snapshots())
def test_exactly_the_granted_jobs_are_placed(
    policy: str, mechanism: str, snapshot: Snapshot
) -> None:
    _assert_all_placed(policy, mechanism, snapshot)


def _assert_all_placed(policy: str, mechanism: str, snapshot: Snapshot) -> None:
    decision = POLICIES[policy].choose(snapshot)
    check_all_placed(decision, MECHANISMS[mechanism].place(snapshot, decision))


@every_skipping_pair
@settings(max_examples=20)
@given(snapshot=snapshots())
def test_a_job_that_a_baseline_leaves_out_was_granted_and_can_be_stopped(
    policy: str, mechanism: str, snapshot: Snapshot
) -> None:
    decision = POLICIES[policy].choose(snapshot)
    layout = MECHANISMS[mechanism].place(snapshot, decision)
    placed = {one.job_id for one in layout.placements}
    assert placed.isdisjoint(layout.unplaced)
    assert placed | set(layout.unplaced) == {grant.job_id for grant in decision.grants}
    for status in snapshot.jobs:
        if status.job.job_id in layout.unplaced:
            assert not is_pinned(status, snapshot)


@every_solving_pair
@settings(max_examples=4, deadline=None)
@given(snapshot=snapshots())
def test_plans_of_a_solver_keep_the_promises(
    policy: str, mechanism: str, snapshot: Snapshot
) -> None:
    plan = decide(snapshot, POLICIES[policy], MECHANISMS[mechanism])
    check_plan(snapshot, plan)
    assert plan.solver["status"] in {"trivial", "optimal", "feasible", "infeasible", "none"}
    _assert_all_placed(policy, mechanism, snapshot)


@every_pair
@settings(max_examples=15)
@given(snapshot=snapshots(), seed=st.integers(0, 1000))
def test_the_plan_does_not_depend_on_the_order_of_mappings_or_on_earlier_calls(
    policy: str, mechanism: str, snapshot: Snapshot, seed: int
) -> None:
    first = decide(snapshot, POLICIES[policy], MECHANISMS[mechanism])
    second = decide(shuffled(snapshot, seed), POLICIES[policy], MECHANISMS[mechanism])
    assert second == first


@every_full_pair
@settings(max_examples=25)
@given(snapshot=snapshots())
def test_no_single_gpu_job_waits_beside_a_gpu_that_it_could_use(
    policy: str, mechanism: str, snapshot: Snapshot
) -> None:
    assume(not snapshot.draining)
    plan = decide(snapshot, POLICIES[policy], MECHANISMS[mechanism])
    check_idle_gpus(snapshot, plan)


@every_pair
@settings(max_examples=25)
@given(snapshot=snapshots())
def test_actions_never_promise_the_same_gpu_core_or_memory_twice(
    policy: str, mechanism: str, snapshot: Snapshot
) -> None:
    plan = decide(snapshot, POLICIES[policy], MECHANISMS[mechanism])
    check_actions(snapshot, plan)


# Not the baselines that may leave a granted job out: the policy's word for that job can stop
# another one that fits, which is started again as soon as the first is left out (record 014).
@pytest.mark.parametrize(
    ("policy", "mechanism"),
    [pair for pair in PAIRS if pair[1] not in SKIPPING],
)
@settings(max_examples=15)
@given(data=st.data(), pool=nodes(), enforcement=st.sampled_from(Enforcement))
def test_without_events_the_cluster_comes_to_rest(
    policy: str, mechanism: str, data: st.DataObject, pool: list[Node], enforcement: Enforcement
) -> None:
    harness = Harness(pool, policy, mechanism, enforcement)
    count = data.draw(st.integers(1, 8))
    early = data.draw(st.integers(0, count))
    for job_id in range(1, count + 1):
        if job_id == early:
            harness.round()
        harness.submit(data.draw(jobs(job_id)), belief=data.draw(profiles()))
    for _ in range(6):
        if policy in AGEING:
            harness.clock.time_s -= 300.0
        last = harness.round()
    # One round to decide, one to start what was stopped; the rest must be quiet. Restarts for
    # memory may add one more of each.
    assert quiet(last) and quiet(harness.results[-2])
    shown = {held.phase for held in harness.cluster.jobs.values()}
    assert shown <= {JobPhase.PENDING, JobPhase.RUNNING}
