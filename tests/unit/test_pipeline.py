from __future__ import annotations

import math
from dataclasses import replace

import pytest
from builders import GIB, job, node, pending, profile, res
from hypothesis import given
from hypothesis import strategies as st

from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.model import PipelineModel, Profile
from slurm_synergy.core.pipeline import (
    THETA,
    demand,
    fetch_rate,
    fit_to_job,
    floor_share,
    job_rate,
    loader_rate,
    min_mem_mib,
    preprocess_rate,
    proportional_rate,
    proportional_share,
    reference_rate,
)

# algorithms F.5: 140 GB, 1.28 million samples, T(3) = 1500 and T(12) = 4500 samples/s.
GB = 1e9 / 2**20


def example(storage_gb_s: float) -> PipelineModel:
    return PipelineModel(
        preprocess=((3, 1500.0), (12, 4500.0)),
        dataset_mib=140 * GB,
        samples_per_epoch=1_280_000,
        storage_mib_s=storage_gb_s * 1000 * 1e6 / 2**20,
    )


def test_the_hand_checked_memory_fill_comes_out() -> None:
    fast, slow = example(0.5), example(0.1)
    half = round(70 * GB)
    assert fetch_rate(fast, half) == pytest.approx(9143, rel=1e-3)
    assert loader_rate(fast, 12, half) == 4500
    assert loader_rate(slow, 12, half) == pytest.approx(1828.6, rel=1e-3)
    assert loader_rate(slow, 3, half) == 1500


def test_preprocessing_is_proportional_below_linear_between_and_flat_above_the_points() -> None:
    model = example(0.5)
    assert preprocess_rate(model, 0) == 0
    assert preprocess_rate(model, 1) == 500
    assert preprocess_rate(model, 6) == 2500
    assert preprocess_rate(model, 24) == 4500


def test_a_fully_cached_data_set_never_waits_for_storage() -> None:
    assert fetch_rate(example(0.1), math.ceil(140 * GB)) == math.inf
    assert fetch_rate(PipelineModel(preprocess=((1, 1.0),)), 0) == math.inf


def test_the_slowest_node_decides_for_all_ranks() -> None:
    belief = profile(per_core=100, gpu_rate=1000)
    even = job_rate(belief, "v100", [res(2, 6), res(2, 6)])
    uneven = job_rate(belief, "v100", [res(2, 9), res(2, 3)])
    assert even == 1200
    assert uneven == 600


def test_gpus_limit_when_data_is_plenty() -> None:
    assert job_rate(profile(per_core=1000, gpu_rate=10), "v100", [res(4, 12)]) == 40


@pytest.mark.parametrize("belief", [Profile(), profile(types=("a100",))])
def test_the_rate_of_an_unknown_profile_is_unknown(belief: Profile) -> None:
    assert job_rate(belief, "v100", [res(1, 3)]) is None


def test_a_job_without_a_known_profile_demands_its_proportional_share() -> None:
    found = demand(pending(job(gpus=4)), node(), 4)
    assert (found.cpus, found.mem_mib) == (12, 250_000)


def test_an_unwrapped_job_demands_its_proportional_share_whatever_its_profile() -> None:
    one = job(gpus=4, wrapped=False, preemptible=False)
    found = demand(pending(one, profile(per_core=1000, gpu_rate=10)), node(), 4)
    assert (found.cpus, found.mem_mib) == (12, 250_000)


def test_demand_is_the_least_that_reaches_most_of_the_plateau() -> None:
    # 4 GPUs take 2000 samples/s; 97 % of it is 1940, which 20 cores of 100 each reach.
    status = pending(job(gpus=4), profile(per_core=100, gpu_rate=500))
    assert demand(status, node(), 4).cpus == 20


def test_demand_never_falls_below_the_rate_at_the_proportional_share() -> None:
    # 12 cores give the plateau exactly: 97 % of it would take fewer, but P1 says 12.
    status = pending(job(gpus=4), profile(per_core=100, gpu_rate=300))
    assert THETA * 1200 < 1170
    assert demand(status, node(), 4).cpus == 12


def test_an_uncertain_profile_never_takes_cores_below_the_proportional_share() -> None:
    one = node(cpus=24)
    sure = pending(job(1), profile(per_core=1000.0, gpu_rate=1000.0))
    assert demand(sure, one, 1).cpus == 1
    unsure = replace(sure, profile=replace(sure.profile, confident=False))
    assert demand(unsure, one, 1).cpus == 3
    # It may still ask for more.
    hungry = pending(job(1), replace(profile(per_core=100.0, gpu_rate=1000.0), confident=False))
    assert demand(hungry, one, 1).cpus == 10


def test_what_few_gpus_have_shown_of_a_loader_does_not_hold_for_more_of_them() -> None:
    shown = replace(profile(per_core=100.0, gpu_rate=300.0), measured_gpus=2)
    assert fit_to_job(shown, job(1, 2)) == shown
    assert fit_to_job(shown, job(1, 1)) == shown
    assert fit_to_job(shown, job(1, 4)).pipeline is None
    assert fit_to_job(shown, job(1, 4, nodes=2)) == shown
    status = pending(job(1, 4), fit_to_job(shown, job(1, 4)))
    assert demand(status, node(cpus=24), 4).cpus == 12


def test_memory_demand_is_what_the_cache_needs_in_whole_gib() -> None:
    belief = profile(
        per_core=100,
        gpu_rate=300,
        dataset_mib=400 * GIB,
        samples=1_000_000,
        storage_mib_s=100.0,
        process_mem_mib=10 * GIB,
    )
    found = demand(pending(job(gpus=4), belief), node(mem_mib=500 * GIB), 4)
    assert found.mem_mib % GIB == 0
    assert belief.pipeline is not None
    assert fetch_rate(belief.pipeline, found.mem_mib) >= THETA * 1200
    assert fetch_rate(belief.pipeline, found.mem_mib - GIB) < THETA * 1200


def test_cores_come_in_multiples_of_the_tasks_if_those_divide_the_gpus() -> None:
    belief = profile(per_core=100, gpu_rate=325)
    assert demand(pending(job(gpus=4), belief), node(), 4).cpus == 13
    assert demand(pending(job(gpus=4, tasks_per_node=4), belief), node(), 4).cpus == 16
    assert demand(pending(job(gpus=4, tasks_per_node=3), belief), node(), 4).cpus == 13


def test_the_proportional_share_is_whole_cores_per_task_but_at_least_one_core() -> None:
    four = pending(job(gpus=4, tasks_per_node=4))
    assert proportional_share(four, node(cpus=28), 4).cpus == 12
    assert proportional_share(pending(job()), node(gpus=8, cpus=4), 1).cpus == 1


def test_minimum_memory_is_the_users_or_else_the_profiles() -> None:
    belief = profile(process_mem_mib=20 * GIB)
    assert min_mem_mib(pending(job(), belief)) == 20 * GIB
    assert min_mem_mib(pending(job(min_mem_mib_per_node=GIB), belief)) == GIB
    assert min_mem_mib(pending(job())) == 0


def test_a_users_process_memory_replaces_that_of_the_profile() -> None:
    one = job(min_mem_mib_per_node=7 * GIB)
    fitted = fit_to_job(CATALOGUE["m5-audio"], one)
    assert fitted.pipeline is not None and fitted.pipeline.process_mem_mib == 7 * GIB
    assert fit_to_job(CATALOGUE["m5-audio"], job()) == CATALOGUE["m5-audio"]
    assert fit_to_job(Profile(), one) == Profile()
    assert fit_to_job(CATALOGUE["m5-audio"], replace(one, job_id=99)) is fitted, "of all alike"


def test_the_proportional_share_is_raised_to_the_minimum_memory() -> None:
    status = pending(job(gpus=1, min_mem_mib_per_node=100_000))
    assert proportional_share(status, node(), 1).mem_mib == 100_000
    assert floor_share(status, node(), 1).mem_mib == 100_000


def test_the_reference_rate_is_that_of_the_best_allowed_kind_of_node() -> None:
    pool = [node("a100-1", "a100", cpus=64), node("v100-1")]
    belief = profile(per_core=100, gpu_rate=10_000)
    assert reference_rate(pending(job(gpus=2), belief), pool) == 1600
    assert reference_rate(pending(job(gpus=2, gpu_types=("v100",)), belief), pool) == 600
    assert reference_rate(pending(job(gpus=9, nodes=1), belief), pool) is None
    assert reference_rate(pending(job(gpus=16, nodes=None), belief), pool) == 12_800
    assert reference_rate(pending(job(gpus=2)), pool) is None


@given(
    gpus=st.integers(1, 8),
    cpus=st.integers(8, 100),
    mem_mib=st.integers(8 * GIB, 900 * GIB),
    per_core=st.floats(1, 1000),
    gpu_rate=st.floats(1, 5000),
    dataset_mib=st.floats(0, 900 * GIB),
    storage=st.floats(1, 5000),
    tasks=st.integers(1, 4),
)
def test_floor_and_demand_keep_the_proportional_rate(
    gpus: int,
    cpus: int,
    mem_mib: int,
    per_core: float,
    gpu_rate: float,
    dataset_mib: float,
    storage: float,
    tasks: int,
) -> None:
    belief = profile(per_core, gpu_rate, dataset_mib=dataset_mib, storage_mib_s=storage)
    where = node(gpus=8, cpus=cpus, mem_mib=mem_mib)
    status = pending(job(gpus=gpus, tasks_per_node=tasks), belief)
    wish, floor = demand(status, where, gpus), floor_share(status, where, gpus)
    least = proportional_rate(status, [(where, gpus)])
    best = job_rate(belief, "v100", [res(gpus, cpus, mem_mib)])
    full = job_rate(belief, "v100", [res(gpus, wish.cpus, wish.mem_mib)])
    bare = job_rate(belief, "v100", [floor])
    assert least is not None and best is not None and full is not None and bare is not None
    assert bare >= least * (1 - 1e-9)
    assert full >= least * (1 - 1e-9)
    if tasks == 1:
        assert full >= THETA * best * (1 - 1e-9)
    assert wish.cpus <= cpus and wish.mem_mib <= mem_mib
    assert floor.cpus <= wish.cpus and floor.mem_mib <= wish.mem_mib
