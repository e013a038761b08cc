"""Shockwave's window and Themis' ratios by hand, and how both are played."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from builders import job, node, pending, placement, res, running, snapshot
from test_gavel import demand_of

from slurm_synergy.core.model import JobStatus, Profile, Snapshot
from slurm_synergy.core.window import Program, Window, ordering_program, window_program
from slurm_synergy.linear import Answer, maximise
from slurm_synergy.policies import POLICIES, policy_of_plan
from slurm_synergy.policies.fair_times import Work
from slurm_synergy.policies.shockwave import SHOCKWAVE, Shockwave
from slurm_synergy.policies.themis import THEMIS
from slurm_synergy.policies.time_shares import Demand, Shares

ROUND_S = 360.0
POOL = [node("a-1", "a", gpus=1)]


def lasting(
    job_id: int, rounds: float, gpus: int = 1, done: float = 0.0, **more: object
) -> JobStatus:
    """A job that takes so many rounds alone; ``done`` of them are done."""
    one = job(job_id, gpus, nodes=None, total_samples=ROUND_S * rounds, submitted_s=0.0)
    belief = Profile(gpu_rate_per_gpu={"a": 1.0 / gpus}, restart_s=0.0)
    return pending(one, belief, done_samples=ROUND_S * done, **more)


def window(
    takes: list[float], done: list[float], rounds_alone: list[float], **more: object
) -> Window:
    fields: dict[str, object] = {
        "rounds": 2,
        "round_s": ROUND_S,
        "gpus": 1.0,
        "least": np.zeros(len(takes)),
        **more,
    }
    return Window(
        takes=np.array(takes),
        done=np.array(done),
        whole_s=np.array(rounds_alone) * ROUND_S,
        **fields,  # type: ignore[arg-type]
    )


def solved(program: Program) -> Answer:
    return maximise(
        program.gains,
        program.rows,
        program.limits,
        least=program.least,
        most=program.most,
        whole=program.whole,
    )


# window ------------------------------------------------------------------------------------------


def test_nobody_is_left_at_nothing_while_others_advance() -> None:
    # One GPU, two rounds, two jobs of five rounds: twice log .2 is more than log .4 and log 1e-6.
    program = window_program(window([1, 1], [0, 0], [5, 5]), np.ones(2), 0.0, fair=False)
    found = solved(program).values
    assert found is not None
    assert found[:2].tolist() == [1.0, 1.0]
    assert found[4:6] == pytest.approx([math.log(0.2)] * 2)


def test_utilities_are_linear_between_fifths() -> None:
    # After one round of ten jobs of one it stands at .7: between log .6 and log .8.
    program = window_program(window([1], [0.6], [10], rounds=1), np.ones(1), 0.0, fair=False)
    found = solved(program).values
    assert found is not None
    assert found[2] == pytest.approx((math.log(0.6) + math.log(0.8)) / 2)


def test_the_best_counts_are_those_of_trying_all() -> None:
    given = window([1, 2, 1], [0.1, 0.5, 0.0], [4, 3, 6], gpus=2.0, rounds=3)
    weights = np.array([1.0, 2.0, 1.0])
    program = window_program(given, weights, 1e-4, fair=False)
    answer = solved(program)
    best = -math.inf
    for counts in itertools.product(range(4), repeat=3):
        if np.dot(counts, given.takes) <= 6:
            parts = np.minimum(np.array(counts) * ROUND_S / given.whole_s, 1 - given.done)
            breaks = np.array([0, 0.2, 0.4, 0.6, 0.8, 1])
            logs = np.log(np.where(breaks > 0, breaks, 1e-6))
            utility = np.interp(given.done + parts, breaks, logs)
            last_s = float(((1 - given.done - parts) * given.whole_s).max())
            best = max(best, float(weights @ utility) / 9 - 1e-4 * last_s)
    # Gains are scaled by the largest of them: the makespan's here, or a weight's.
    scale = max(2.0 / 9, 1e-4 * ROUND_S)
    assert answer.objective == pytest.approx(best / scale, rel=1e-5)


def test_fairness_asks_for_a_part_and_may_be_impossible() -> None:
    fair = window([1, 1], [0, 0], [5, 5], least=np.array([0.4, 0.0]))
    found = solved(window_program(fair, np.ones(2), 0.0, fair=True)).values
    assert found is not None and found[:2].tolist() == [2.0, 0.0]
    both = window([1, 1], [0, 0], [5, 5], least=np.array([0.4, 0.2]))
    assert solved(window_program(both, np.ones(2), 0.0, fair=True)).status == "infeasible"


def test_urgent_jobs_have_their_rounds_first() -> None:
    given = window([1, 1], [0, 0], [5, 5])
    found = solved(ordering_program(given, np.array([1.0, 1.0]), np.array([1.0, 3.0]))).values
    assert found is not None
    assert found.reshape(2, 2).round().tolist() == [[0, 1], [1, 0]]


# policies ----------------------------------------------------------------------------------------


def granted(shot: Snapshot, policy: Shockwave = SHOCKWAVE) -> list[int]:
    return [grant.job_id for grant in policy.choose(shot).grants]


def test_the_longest_waiting_job_fills_what_the_window_leaves() -> None:
    pool = [node("a-1", "a", gpus=3)]
    shot = snapshot(pool, [lasting(1, 1), lasting(2, 9), lasting(3, 4)])
    assert granted(shot) == [1, 2, 3]
    assert SHOCKWAVE.choose(shot).solver["status"] == "optimal"


def test_a_job_that_is_treated_worse_weighs_more() -> None:
    late = lasting(1, 10, done=1)
    fresh = lasting(2, 10, done=1)
    fresh = replace(fresh, job=replace(fresh.job, submitted_s=7_000.0))
    shot = replace(snapshot(POOL, [late, fresh]), now_s=7_200.0)
    assert granted(shot) == [1]
    assert SHOCKWAVE.choose(shot).solver["fair"] is False


def test_a_solver_without_time_still_lets_jobs_run() -> None:
    shot = snapshot([node("a-1", "a", gpus=2)], [lasting(n, 5 + n) for n in range(1, 6)])
    found = Shockwave(limit_s=1e-9).choose(shot)
    assert len(found.grants) == 2


def test_alone_is_an_equal_part_of_the_cluster_from_the_first_round_on() -> None:
    shot = demand_of(POOL, lasting(1, 2), lasting(2, 2))
    work = Work(shot, ROUND_S)
    # Half of the GPU makes two rounds of work last four, after one round of waiting.
    assert work.alone_s.tolist() == [5 * ROUND_S] * 2
    assert work.left.tolist() == [2 * ROUND_S] * 2


def test_themis_makes_the_worst_ratio_as_small_as_it_can_be() -> None:
    demand = demand_of(POOL, lasting(1, 2), lasting(2, 8))
    found = THEMIS.shares(demand)
    # 720 / x1 = r (360 + 1440), 2880 / x2 = r (360 + 5760), x1 + x2 = 1.
    assert found.report["objective"] == pytest.approx(720 / 1800 + 2880 / 6120, rel=2e-3)
    assert found.parts.sum() == pytest.approx(1.0, abs=2e-3)
    assert found.parts[0, 0] == pytest.approx(0.4 / (0.4 + 2880 / 6120), rel=0.01)


def test_settings_are_reported_and_read_again_from_a_plan() -> None:
    shot = snapshot(POOL, [lasting(1, 5)])
    for name in ("gavel", "themis", "shockwave"):
        changed = replace(POLICIES[name], quantum_s=120.0, fills=False)  # type: ignore[type-var]
        report = changed.choose(shot).solver
        plan = type("Plan", (), {"policy": name, "solver": report})
        assert policy_of_plan(plan) == changed  # type: ignore[arg-type]


def test_a_decision_within_a_quantum_needs_no_solver() -> None:
    first = lasting(1, 5)
    held = running(first.job, placement(1, "a", a_1=res(1, 3, 60_000)), first.profile)
    shot = replace(snapshot(POOL, [held, lasting(2, 5)]), now_s=400.0, previous_s=365.0)

    class Never(Shockwave):
        def shares(self, demand: Demand) -> Shares:
            raise AssertionError(demand)

    found = Never().choose(shot)
    assert [grant.job_id for grant in found.grants] == [1]
