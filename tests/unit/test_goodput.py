"""The throughput model, statistical efficiency, and the choice of a batch size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_synergy.core.goodput import (
    BatchLimits,
    GradientStatistics,
    Learner,
    ThroughputModel,
    best_batch,
    best_batches,
    fixed_batch,
    gain,
    goodput_at,
)
from slurm_synergy.errors import ModelError

# The worked example of the specification (algorithms F.4), from a run of the published code.
MODEL = ThroughputModel(
    compute_s=0.05,
    compute_s_per_sample=0.002,
    network_sync_s=0.08,
    network_sync_s_per_replica=0.004,
    node_sync_s=0.02,
    node_sync_s_per_replica=0.001,
    overlap=1.6,
)
NOISE = GradientStatistics(square=0.00136, variance=0.000502)
LIMITS = BatchLimits(initial=128, largest=4096, local_least=32, local_most=256)


@pytest.mark.parametrize(
    ("nodes", "replicas", "local_batch", "accumulation", "expected"),
    [
        (1, 1, 64, 0, 359.5506),
        (1, 2, 64, 0, 705.8237),
        (1, 8, 64, 1, 2835.9336),
        (2, 16, 64, 0, 4206.6227),
        (3, 24, 64, 2, 7398.0204),
    ],
)
def test_throughput_is_that_of_the_worked_example(
    nodes: int, replicas: int, local_batch: int, accumulation: int, expected: float
) -> None:
    found = MODEL.throughput(nodes, replicas, local_batch, accumulation)
    assert float(found) == pytest.approx(expected, abs=5e-5)

    quick = MODEL.rate(nodes, replicas, local_batch, accumulation)
    assert quick == pytest.approx(float(found), rel=1e-12)


def test_efficiency_is_that_of_the_worked_example() -> None:
    found = NOISE.efficiency(np.array([128, 256, 1024, 4096]) / 128)
    assert found == pytest.approx([1, 0.577902, 0.163592, 0.042297], abs=5e-7)


def test_the_best_batches_are_those_of_the_worked_example() -> None:
    found = best_batch(MODEL, NOISE, LIMITS, [1, 1, 1, 1, 2, 3], [1, 2, 4, 8, 16, 24])
    expected = [418.3007, 705.8237, 1075.114, 1226.9169, 830.3397, 750.9584]
    assert found.goodput == pytest.approx(expected, abs=5e-5)
    assert found.local_batch.tolist() == [128, 64, 32, 32, 32, 32]
    assert found.accumulation.tolist() == [0] * 6


def test_a_configuration_that_needs_more_than_the_largest_batch_is_worth_nothing() -> None:
    limits = BatchLimits(initial=128, largest=256, local_least=32, local_most=64)
    found = best_batch(MODEL, NOISE, limits, [1, 2], [8, 16])
    assert found.goodput[0] > 0
    assert found.goodput[1] == 0
    assert found.local_batch[1] == 0


def test_without_accumulation_a_batch_beyond_the_memory_is_worth_nothing() -> None:
    limits = BatchLimits(initial=128, largest=512, local_least=16, local_most=64, accumulate=False)
    found = best_batch(MODEL, NOISE, limits, [1, 1], [1, 2])
    assert found.goodput[0] == 0
    assert found.goodput[1] > 0


def test_a_fixed_batch_is_shared_and_never_grows() -> None:
    found = fixed_batch(MODEL, LIMITS, [1, 1, 1], [1, 2, 8])
    assert (found.local_batch * (found.accumulation + 1) * [1, 2, 8]).tolist() == [128, 128, 0]
    assert found.goodput[:2] == pytest.approx(
        MODEL.throughput([1, 1], [1, 2], found.local_batch[:2], found.accumulation[:2])
    )


times = st.floats(min_value=1e-4, max_value=10)
models = st.builds(
    ThroughputModel,
    compute_s=times,
    compute_s_per_sample=times,
    node_sync_s=times,
    node_sync_s_per_replica=times,
    network_sync_s=times,
    network_sync_s_per_replica=times,
    overlap=st.floats(min_value=1, max_value=10),
)


@given(models, st.integers(1, 512), st.integers(1, 64))
def test_an_iteration_takes_between_the_longer_part_and_the_sum(
    model: ThroughputModel, batch: int, replicas: int
) -> None:
    gradient, sync = model.gradient_s(batch), model.sync_s(1, replicas)
    took = float(model.iteration_s(1, replicas, batch))
    assert max(gradient, sync) * (1 - 1e-12) <= took <= (gradient + sync) * (1 + 1e-12)


@given(models, st.integers(1, 512), st.integers(1, 63))
def test_more_replicas_scale_less_than_linearly(
    model: ThroughputModel, batch: int, replicas: int
) -> None:
    one, more = (float(model.throughput(1, k, batch)) for k in (replicas, replicas + 1))
    assert more / one <= (replicas + 1) / replicas * (1 + 1e-9)


@given(
    st.floats(min_value=1e-6, max_value=1e6),
    st.floats(min_value=1e-6, max_value=1e6),
    st.floats(min_value=1, max_value=1e3),
)
def test_efficiency_falls_and_gain_grows_with_the_batch(
    square: float, variance: float, scale: float
) -> None:
    noise = GradientStatistics(square=square, variance=variance)
    assert 0 < float(noise.efficiency(scale)) <= 1
    assert float(noise.efficiency(scale * 2)) <= float(noise.efficiency(scale))
    assert 1 - 1e-9 <= float(gain(noise, scale)) <= scale * (1 + 1e-9)
    assert float(gain(noise, scale * 2)) >= float(gain(noise, scale)) * (1 - 1e-9)


@given(models, st.integers(4, 8))
def test_no_batch_that_fits_without_accumulation_is_better_than_the_best(
    model: ThroughputModel, local: int
) -> None:
    limits = BatchLimits(initial=8, largest=64, local_least=1, local_most=8)
    best = best_batch(model, NOISE, limits, [1], [2], candidates=200)
    worth = model.throughput(1, 2, local) * NOISE.efficiency(2 * local / 8)
    assert best.goodput[0] >= float(worth) * (1 - 1e-9)


@pytest.mark.parametrize("overlap", [0.5, 11])
def test_an_overlap_out_of_range_is_refused(overlap: float) -> None:
    with pytest.raises(ModelError, match="overlap"):
        ThroughputModel(compute_s=1, compute_s_per_sample=1, overlap=overlap)


def test_batch_limits_out_of_order_are_refused() -> None:
    with pytest.raises(ModelError, match="out of order"):
        BatchLimits(initial=256, largest=128, local_least=1, local_most=2)


def test_many_jobs_at_once_get_what_each_gets_alone() -> None:
    slower = ThroughputModel(compute_s=0.2, compute_s_per_sample=0.01, node_sync_s=0.3)
    learners = [
        Learner(model=MODEL, statistics=NOISE, limits=LIMITS),
        Learner(model=slower, statistics=NOISE, limits=LIMITS),
    ]
    replicas = [1, 2, 4, 8] * 200  # more than are judged together
    of = [0, 1, 1, 0] * 200
    found = best_batches(learners, of, 1, replicas)
    for at in range(4):
        one = learners[of[at]]
        alone = best_batch(one.model, one.statistics, one.limits, [1], [replicas[at]])
        assert found.goodput[at::4] == pytest.approx([float(alone.goodput[0])] * 200)
        assert found.local_batch[at] == alone.local_batch[0]


def test_no_gpu_is_faster_than_its_input() -> None:
    """With half the supply a batch may be smaller, and goodput is at most the supply."""
    learner = Learner(model=MODEL, statistics=NOISE, limits=LIMITS)
    free = best_batches([learner], [0], 1, 4)
    fed = best_batches([learner], [0], 1, 4, most_rate=[float(free.goodput[0]) / 2])
    assert float(fed.goodput[0]) <= float(free.goodput[0]) / 2
    assert fed.local_batch[0] <= free.local_batch[0]


def test_the_goodput_of_a_given_batch_is_that_of_the_best_where_it_is_the_best() -> None:
    learner = Learner(model=MODEL, statistics=NOISE, limits=LIMITS)
    best = best_batches([learner], [0, 0], [1, 2], [4, 16])
    again = goodput_at([learner] * 2, [1, 2], [4, 16], best.local_batch, best.accumulation)
    assert again == pytest.approx(best.goodput)
    assert (goodput_at([learner] * 2, [1, 2], [4, 16], [200, 200], [0, 0]) < best.goodput).all()
