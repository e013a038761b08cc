"""An elastic job as a rigid one of the shape that it was granted, and what its speed is there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import elastic, job, node, pending, placement, profile, res, scaling, snapshot

from slurm_synergy.core.elastic import as_granted, as_placed, model_on, objection, reshaped
from slurm_synergy.core.model import Configuration, Elasticity, Profile
from slurm_synergy.core.pipeline import job_rate
from slurm_synergy.core.scaling import BatchSize, Scaling, TypeSpeed
from slurm_synergy.core.snapshot import inherit
from slurm_synergy.errors import ModelError

NODES = [node("v100-0"), node("v100-1"), node("a100-0", "a100")]


def explored(**most: int) -> Scaling:
    return scaling({"v100": 1.0, "a100": 2.0, "t4": 0.5}, explored=most)


def test_what_was_measured_on_several_gpus_of_a_type_is_used_there() -> None:
    known = explored(v100=4, a100=8)
    assert model_on(known, "v100") == known.speeds["v100"].model
    assert model_on(known, "a100") == known.speeds["a100"].model


def test_a_type_with_a_single_gpu_only_learns_from_the_largest_other_by_their_ratio() -> None:
    """Half as fast with one GPU, half as fast with sixteen."""
    found, teacher = model_on(explored(v100=2, a100=16), "t4"), explored().speeds["a100"].model
    assert found is not None
    ratio = float(teacher.throughput(2, 16, 256)) / float(found.throughput(2, 16, 256))
    own = explored().speeds["t4"].model
    alone = float(teacher.throughput(1, 1, 256)) / float(own.throughput(1, 1, 256))
    assert ratio == pytest.approx(alone, rel=1e-6)


def test_what_is_learned_from_another_type_is_scaling_and_not_the_time_of_a_pass() -> None:
    """A type that takes small batches only is not believed slow with them."""
    known = explored(a100=16)
    small = replace(known.speeds["t4"], local_most=8)
    found = model_on(replace(known, speeds={**known.speeds, "t4": small}), "t4")
    assert found is not None
    for local in (1, 3, 8):
        own = small.model.throughput(1, 1, local)
        assert float(found.throughput(1, 1, local)) == pytest.approx(float(own))
    # With the largest batch that both take, sixteen GPUs are as many times as fast as one.
    teacher = known.speeds["a100"].model
    gains = [
        float(model.throughput(2, 16, 8)) / float(model.throughput(1, 1, 8))
        for model in (found, teacher)
    ]
    assert gains[0] == pytest.approx(gains[1], rel=1e-6)


def test_without_any_run_on_several_gpus_the_profile_of_one_is_all_there_is() -> None:
    known = explored()
    assert model_on(known, "t4") == known.speeds["t4"].model
    assert model_on(known, "h100") is None


def test_on_another_shape_tasks_follow_the_gpus_and_memory_never_shrinks() -> None:
    asked = elastic(1, 4, tasks_per_node=4, min_mem_mib_per_node=40_000)
    for gpus, nodes, tasks, mem_mib in ((1, 1, 1, 40_000), (8, 1, 8, 80_000), (16, 2, 8, 80_000)):
        found = reshaped(asked, Configuration(gpus=gpus, nodes=nodes, gpu_type="a100"))
        assert (found.gpus, found.nodes, found.tasks_per_node) == (gpus, nodes, tasks)
        assert found.min_mem_mib_per_node == mem_mib
        assert found.gpu_types == ("a100",) and found.elasticity is Elasticity.RIGID


def test_a_granted_job_has_the_rate_of_its_configuration() -> None:
    belief = replace(profile(per_core=1e6), scaling=explored(v100=8), gpu_rate_per_gpu={})
    batch = BatchSize(local=32, replicas=4)
    one = Configuration(gpus=4, nodes=1, gpu_type="v100", batch=batch)
    shot = snapshot(NODES, [pending(elastic(), belief)])
    found = as_granted(shot, shot.jobs[0], one)
    rate = job_rate(found.profile, "v100", [res(4, 12, 1000)])
    model = belief.scaling.speeds["v100"].model  # type: ignore[union-attr]
    assert rate == pytest.approx(float(model.throughput(1, 4, 32)))


def test_what_was_not_run_or_takes_several_passes_is_a_guess() -> None:
    """So nothing of the proportional share is taken from the job there."""
    shot = snapshot(NODES, [pending(elastic(), replace(Profile(), scaling=explored(v100=2)))])

    def is_certain(gpus: int, passes: int = 0) -> bool:
        batch = BatchSize(local=32, replicas=gpus, accumulation=passes)
        one = Configuration(gpu_type="v100", gpus=gpus, nodes=1, batch=batch)
        return as_granted(shot, shot.jobs[0], one).profile.confident

    assert is_certain(1) and is_certain(2)
    assert not is_certain(4)
    assert not is_certain(2, passes=1)


def test_what_it_was_made_into_stays_the_same_object_over_rounds() -> None:
    one = Configuration(gpus=4, nodes=1, gpu_type="v100", batch=BatchSize(local=32, replicas=4))
    shot = snapshot(NODES, [pending(elastic(), replace(Profile(), scaling=explored()))])
    first = as_granted(shot, shot.jobs[0], one)
    later = snapshot(NODES, shot.jobs)
    inherit(later, shot)
    second = as_granted(later, later.jobs[0], replace(one))
    assert first.job is second.job and first.profile is second.profile


def test_rigid_jobs_and_what_users_asked_for_are_left_alone() -> None:
    shot = snapshot(NODES, [pending(job(1, 2)), pending(elastic(2, 2))])
    for status in shot.jobs:
        asked = Configuration(gpus=2, nodes=1, gpu_type="v100")
        assert as_granted(shot, status, asked) is status
        where = placement(status.job.job_id, v100_0=res(2, 6, 1000))
        assert as_placed(shot, status, where) is status
        assert objection(status, where) is None


@pytest.mark.parametrize(
    ("gpus", "batch", "words"),
    [
        (32, None, "1 to 16 GPUs"),
        (3, None, "multiples of 2"),
        (4, BatchSize(local=8, replicas=2), "32 to 4096, not 16"),
        (4, BatchSize(local=4096, replicas=2), "not 8192"),
        (4, BatchSize(local=64, replicas=4), "not one that it may have"),
    ],
)
def test_what_a_job_may_not_have_is_said(gpus: int, batch: BatchSize | None, words: str) -> None:
    status = pending(elastic(scale_unit=2))
    where = replace(placement(1, v100_0=res(gpus, 2, 1000)), batch=batch)
    found = objection(status, where)
    assert found is not None and words in found


def test_the_total_batch_of_a_strong_scaling_job_is_fixed() -> None:
    one = elastic(elasticity=Elasticity.STRONG_SCALING)
    where = placement(1, v100_0=res(2, 2, 1000))
    right, wrong = (replace(where, batch=BatchSize(local=at, replicas=2)) for at in (16, 32))
    assert objection(pending(one), right) is None
    assert objection(pending(one), wrong) is not None


@pytest.mark.parametrize(
    "wrong",
    [{"min_gpus": 8, "max_gpus": 4}, {"scale_unit": 0}, {"batch": (64, 32)}, {"min_gpus": 0}],
)
def test_bounds_that_contradict_each_other_are_refused(wrong: dict[str, object]) -> None:
    values = {"elasticity": Elasticity.ADAPTIVE, **wrong}
    with pytest.raises(ModelError, match="job 1"):
        job(1, 2, **values)


def test_values_of_scaling_out_of_range_are_refused() -> None:
    model = explored().speeds["v100"].model
    with pytest.raises(ModelError):
        TypeSpeed(model=model, local_least=8, local_most=4)
    with pytest.raises(ModelError):
        TypeSpeed(model=model, local_most=4, explored_gpus=-1)
    with pytest.raises(ModelError):
        BatchSize(local=0, replicas=1)
