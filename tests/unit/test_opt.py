"""The solver in its child process, and OPT beside TUNE."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import pytest
from builders import CATALOGUE, job, node, pending, placement, profile, res, running, snapshot

from slurm_synergy import milp
from slurm_synergy.core.decide import check_plan, decide
from slurm_synergy.core.model import Plan, Snapshot
from slurm_synergy.core.pipeline import job_rate, proportional_rate
from slurm_synergy.errors import SolverError
from slurm_synergy.mechanisms import MECHANISMS, opt
from slurm_synergy.milp import Constraint, Problem, Solution, Variable, solve
from slurm_synergy.policies import POLICIES

KNAPSACK = Problem(
    variables=(Variable(gain=2.0, most=3), Variable(gain=3.0, most=3), Variable(gain=1.5)),
    constraints=(Constraint(terms=((0, 1.0), (1, 2.0), (2, 1.0)), limit=4.5),),
)


def test_a_small_program_is_solved_with_its_bound() -> None:
    found = solve(KNAPSACK, limit_s=20)
    assert found.status == "optimal"
    assert found.values == (3, 0, 1)
    assert found.objective == pytest.approx(7.5)
    assert found.bound == pytest.approx(7.5)
    assert found.gap == pytest.approx(0.0, abs=1e-6)
    assert found.took_s > 0


def test_an_equation_is_kept() -> None:
    equal = Constraint(terms=((1, 1.0),), limit=1.0, equal=True)
    found = solve(
        Problem(variables=KNAPSACK.variables, constraints=(*KNAPSACK.constraints, equal)),
        limit_s=20,
    )
    assert found.values is not None and found.values[1] == 1


def test_a_program_without_an_answer_says_so() -> None:
    impossible = Constraint(terms=((0, 1.0),), limit=9.0, equal=True)
    found = solve(Problem(variables=KNAPSACK.variables, constraints=(impossible,)), limit_s=20)
    assert found.status == "infeasible" and found.values is None


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Another program in the place of the solver."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_a_solver_that_does_not_stop_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(milp, "_GRACE_S", 0.3)
    pid_file = tmp_path / "pid"
    stand_in(tmp_path, monkeypatch, f"sleep 60 & echo $! > {pid_file}; wait")
    began_s = time.monotonic()
    found = solve(KNAPSACK, limit_s=0.3)
    assert found.status == "none" and found.values is None
    assert time.monotonic() - began_s < 10
    child = int(pid_file.read_text())
    deadline_s = time.monotonic() + 5
    while _runs(child) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


def test_a_solver_that_is_killed_from_outside_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "kill -9 $$")
    assert solve(KNAPSACK, limit_s=5).status == "none"


def test_a_solver_that_fails_is_an_error_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "echo 'install it with pip' >&2; exit 1")
    with pytest.raises(SolverError, match="status 1: install it with pip"):
        solve(KNAPSACK, limit_s=5)


def gain(shot: Snapshot, found: Plan) -> float:
    """What OPT maximises, of a plan on one kind of node."""
    statuses = {status.job.job_id: status for status in shot.jobs}
    total = 0.0
    for one in found.placements:
        profile_ = statuses[one.job_id].profile
        rate = job_rate(profile_, one.gpu_type, [share for _, share in one.shares])
        parts = [(shot.node(name), share.gpus) for name, share in one.shares]
        base = proportional_rate(statuses[one.job_id], parts)
        total += one.gpus * (rate / base if rate and base else 1.0)
    return total


@pytest.mark.parametrize("seed", [1, 2])
def test_tune_is_near_the_bound_and_nothing_is_above_it(seed: int) -> None:
    order = random.Random(seed)
    hungry = ["alexnet-imagenet", "resnet18-imagenet", "resnet50-imagenet", "m5-audio"]
    frugal = ["gnmt-wmt16", "lstm-wikitext2"]
    jobs = [
        pending(job(n), CATALOGUE[order.choice(hungry if order.random() < 0.3 else frugal)])
        for n in range(1, 33)
    ]
    shot = snapshot([node(f"v100-{n}") for n in range(4)], jobs)
    plans = {
        name: decide(shot, POLICIES["fifo"], MECHANISMS[name])
        for name in ("proportional", "tune", "opt")
    }
    for found in plans.values():
        check_plan(shot, found)
    report = plans["opt"].solver
    assert report["status"] == "optimal"
    bound = float(str(report["bound"]))
    gains = {name: gain(shot, found) for name, found in plans.items()}
    assert max(gains.values()) <= bound * (1 + 1e-6)
    assert gains["tune"] >= 0.95 * bound
    assert gains["proportional"] <= gains["tune"]


def test_opt_gives_cores_to_the_job_that_gains_most() -> None:
    steep = pending(job(1, 4), profile(per_core=100, gpu_rate=600))
    flat = pending(job(2, 4), profile(per_core=100, gpu_rate=310))
    shot = snapshot([node()], [steep, flat])
    found = decide(shot, POLICIES["fifo"], MECHANISMS["opt"])
    check_plan(shot, found)
    assert [one.shares[0][1].cpus for one in found.placements] == [12, 12]
    frugal = pending(job(2, 4), profile(per_core=1000, gpu_rate=250))
    found = decide(snapshot([node()], [steep, frugal]), POLICIES["fifo"], MECHANISMS["opt"])
    assert [one.shares[0][1].cpus for one in found.placements] == [23, 1]


def test_without_an_answer_all_get_their_proportional_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opt, "solve", lambda *_args, **_more: Solution(status="none", took_s=1.0))
    steep = pending(job(1, 4), profile(per_core=100, gpu_rate=600))
    frugal = pending(job(2, 4), profile(per_core=1000, gpu_rate=250))
    shot = snapshot([node()], [steep, frugal])
    found = decide(shot, POLICIES["fifo"], MECHANISMS["opt"])
    check_plan(shot, found)
    assert found.solver["status"] == "none" and found.solver["ms"] == 1000.0
    assert [one.shares[0][1].cpus for one in found.placements] == [12, 12]


def test_opt_leaves_to_frozen_jobs_what_they_hold() -> None:
    plain = running(
        job(2, 4, wrapped=False, preemptible=False), placement(2, v100_1=res(4, 10, 100_000))
    )
    steep = pending(job(1, 4), profile(per_core=100, gpu_rate=600))
    shot = snapshot([node()], [steep, plain])
    found = decide(shot, POLICIES["fifo"], MECHANISMS["opt"])
    check_plan(shot, found)
    spot = found.placement(1)
    assert spot is not None and spot.shares[0][1].cpus == 14


def test_where_no_job_has_a_choice_no_solver_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opt, "solve", lambda *_args, **_more: pytest.fail("was started"))
    found = decide(snapshot([node()], [pending(job(1, 4))]), POLICIES["fifo"], MECHANISMS["opt"])
    assert found.solver["status"] == "trivial"
