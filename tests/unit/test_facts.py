"""What Sia's matrix takes over from the round before changes nothing in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import elastic, job, node, pending, profile, running, scaling, snapshot

from slurm_synergy.core.batch_curves import Curves, best_of
from slurm_synergy.core.decide import decide
from slurm_synergy.core.elastic import as_granted
from slurm_synergy.core.goodput import BatchLimits, GradientStatistics, Learner
from slurm_synergy.core.model import Configuration, JobStatus, Profile, Snapshot
from slurm_synergy.core.scaling import BatchSize, Scaling
from slurm_synergy.core.snapshot import inherit
from slurm_synergy.core.worth import Worth, worth_of
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies.sia import SIA

NODES = [node("v100-0"), node("v100-1"), node("a100-0", "a100")]
CELLS = ("goodput", "replicas", "least_gpus", "current")


def belief(**more: Any) -> Profile:
    known = scaling(explored={"v100": 4, "a100": 2}, **more)
    found: Profile = replace(profile(per_core=1e4), scaling=known)
    return found


def first_round() -> Snapshot:
    jobs: list[JobStatus] = [pending(elastic(number), belief()) for number in range(1, 4)]
    jobs.append(pending(elastic(4, batch=None), belief()))
    jobs.append(pending(job(5, 2, nodes=1), profile()))
    plan = decide(snapshot(NODES, jobs), SIA, MECHANISMS["tune"])
    placed = {one.job_id: one for one in plan.placements}
    now = [running(one.job, placed[one.job.job_id], one.profile) for one in jobs]
    found: Snapshot = snapshot(NODES, now)
    return found


def changed(status: JobStatus, change: Callable[[Scaling], Scaling]) -> JobStatus:
    known = status.profile.scaling
    if known is None:
        return status
    return replace(status, profile=replace(status.profile, scaling=change(known)))


def noisier(known: Scaling) -> Scaling:
    now = GradientStatistics(square=1.0, variance=known.statistics.variance * 9)
    return replace(known, speeds=dict(known.speeds), statistics=now)


def slower(known: Scaling) -> Scaling:
    one = known.speeds["v100"]
    model = replace(one.model, compute_s=one.model.compute_s * 3)
    return replace(known, speeds={**known.speeds, "v100": replace(one, model=model)})


def smaller(known: Scaling) -> Scaling:
    one = replace(known.speeds["a100"], local_most=16, explored_gpus=8)
    return replace(known, speeds={**known.speeds, "a100": one})


def without(status: JobStatus) -> JobStatus:
    return JobStatus(job=status.job, profile=status.profile)


def starved(status: JobStatus) -> JobStatus:
    return replace(status, profile=replace(status.profile, pipeline=profile(20.0).pipeline))


def of_few_gpus(status: JobStatus) -> JobStatus:
    return replace(status, job=replace(status.job, max_gpus=2))


@pytest.mark.parametrize(
    "change",
    [
        lambda status: changed(status, noisier),
        lambda status: changed(status, slower),
        lambda status: changed(status, smaller),
        lambda status: changed(status, lambda known: replace(known, accumulate=False)),
        lambda status: changed(status, lambda known: replace(known, own_batch=64)),
        lambda status: changed(status, lambda known: replace(smaller(known), speeds={})),
        lambda status: replace(status, profile=replace(status.profile, scaling=None)),
        without,
        starved,
        of_few_gpus,
    ],
)
def test_a_later_round_has_the_matrix_of_a_fresh_one(
    change: Callable[[JobStatus], JobStatus],
) -> None:
    first = first_round()
    before = worth_of(first, first.jobs)
    assert any(before.configuration(row, 0).batch for row in np.nonzero(before.goodput[:, 0])[0])
    later = replace(first, jobs=tuple(change(one) for one in first.jobs))
    fresh = replace(later)
    inherit(later, first)
    assert_same(worth_of(later, later.jobs), worth_of(fresh, fresh.jobs))
    # Whoever is left keeps its own row, and a new job does not get that of another.
    last = replace(later, jobs=(*later.jobs[2:], pending(elastic(9), belief(noise=50.0))))
    fresh = replace(last)
    inherit(last, later)
    assert_same(worth_of(last, last.jobs), worth_of(fresh, fresh.jobs))


def test_columns_are_made_once_for_the_same_shapes_in_reach() -> None:
    first = first_round()
    usage = worth_of(first, first.jobs).usage
    later = replace(first, jobs=tuple(changed(one, noisier) for one in first.jobs))
    inherit(later, first)
    assert worth_of(later, later.jobs).usage is usage
    less = worth_of(later, later.jobs, {"a100-0": 1}).usage
    assert (usage.limits[0], less.limits[0]) == (8, 7)
    assert worth_of(later, later.jobs).usage is usage


def test_without_jobs_there_is_nothing_to_choose() -> None:
    nobody = snapshot(NODES, [])
    assert worth_of(nobody, ()).cells([], []) == []
    assert SIA.choose(nobody).grants == ()


def assert_same(one: Worth, other: Worth) -> None:
    assert one.configurations == other.configurations
    for name in CELLS:
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    rows, columns = np.nonzero(one.goodput)
    several = [each.cells(rows.tolist(), columns.tolist()) for each in (one, other)]
    assert several[0] == several[1]
    # Cells that are asked for alone are as those that are asked for together.
    assert one.configuration(int(rows[-1]), int(columns[-1])) == several[0][-1]


def test_new_noise_leaves_a_granted_job_as_it_is_and_a_new_model_does_not() -> None:
    first = first_round()
    one = Configuration(gpus=4, nodes=1, gpu_type="v100", batch=BatchSize(local=32, replicas=4))
    found = []
    before = first
    for change in (lambda known: known, noisier, slower):
        later = replace(before, jobs=tuple(changed(status, change) for status in before.jobs))
        inherit(later, before)
        found.append(as_granted(later, later.jobs[0], one))
        before = later
    assert found[0].job is found[1].job is found[2].job
    assert found[0].profile is found[1].profile
    assert found[2].profile.gpu_rate_per_gpu["v100"] < found[1].profile.gpu_rate_per_gpu["v100"]


@pytest.mark.parametrize("most", [0, 5, 100])
def test_curves_find_what_is_found_without_them_however_many_are_kept(most: int) -> None:
    curves, rng = Curves(50, most), np.random.default_rng(1)
    limits = BatchLimits(initial=32, largest=4096, local_least=1, local_most=256)
    model = scaling().speeds["v100"].model
    plain = [(kind, gpus) for kind in ("v100", "a100") for gpus in (1, 2, 4)]
    for _ in range(4):
        noise = [GradientStatistics(variance=float(rng.uniform(0, 9))) for _ in range(3)]
        learners = [Learner(model=model, statistics=one, limits=limits) for one in noise]
        numbers = np.array([learners[number].numbers for number in (0, 1, 2, 1, 0, 2, 1)])
        columns = np.array([0, 1, 2, 3, 4, 5, 0])
        jobs, nodes = np.array([7, 8, 9, 8, 7, 9, 8]), np.ones(7, dtype=np.int64)
        replicas = np.array([plain[column][1] for column in columns])
        fed = rng.uniform(100, 5000, 7)
        at = curves.find(jobs, plain, columns, numbers, nodes, replicas)
        goodput, which = curves.tops(at, numbers, nodes, replicas, fed)
        found = goodput, *curves.batches(at, numbers, replicas, which)
        alone = best_of(numbers, nodes, replicas, fed, 50)
        for one, other in zip(found, alone, strict=True):
            assert np.array_equal(one, other)
        model = replace(model, compute_s=model.compute_s * float(rng.choice([1.0, 2.0])))
        plain = plain[::-1]
