"""Fitting the throughput model: truth is found again, what was not seen looks perfect."""

import numpy as np
import pytest

from slurm_synergy.core.goodput import ThroughputModel
from slurm_synergy.errors import ModelError
from slurm_synergy.profiler.fit import StepTimes, fit_throughput

TRUTH = ThroughputModel(
    compute_s=0.08,
    compute_s_per_sample=0.003,
    node_sync_s=0.05,
    node_sync_s_per_replica=0.004,
    network_sync_s=0.12,
    network_sync_s_per_replica=0.009,
    overlap=1.8,
)


def _measured(shapes: list[tuple[int, int]], batches: list[int]) -> StepTimes:
    rows = [(nodes, replicas, batch) for nodes, replicas in shapes for batch in batches]
    nodes, replicas, local = (np.array(column) for column in zip(*rows, strict=True))
    return StepTimes(
        nodes=nodes,
        replicas=replicas,
        local_batch=local,
        gradient_s=TRUTH.gradient_s(local),
        step_s=TRUTH.iteration_s(nodes, replicas, local),
    )


def test_the_truth_is_found_again() -> None:
    times = _measured([(1, 1), (1, 2), (1, 4), (1, 8), (2, 16), (3, 24)], [8, 32, 128])
    found = fit_throughput(times)
    predicted = found.iteration_s(times.nodes, times.replicas, times.local_batch)
    assert predicted == pytest.approx(times.step_s, rel=0.02)
    unseen = (np.array([4]), np.array([32]), np.array([64]))
    assert found.iteration_s(*unseen) == pytest.approx(TRUTH.iteration_s(*unseen), rel=0.05)


def test_scales_that_were_not_measured_look_perfect() -> None:
    found = fit_throughput(_measured([(1, 1)], [8, 32, 128]))
    one, many = (float(found.throughput(1, count, 32)) for count in (1, 8))
    assert many == pytest.approx(8 * one, rel=1e-3)


def test_the_network_is_not_faster_than_a_node_s_inside() -> None:
    found = fit_throughput(_measured([(1, 1), (1, 2), (1, 4)], [8, 32]))
    assert found.network_sync_s >= found.node_sync_s * 1.09
    assert found.network_sync_s_per_replica >= found.node_sync_s_per_replica * 1.09


def test_a_single_batch_size_splits_the_time_in_halves() -> None:
    times = _measured([(1, 1)], [32])
    found = fit_throughput(times)
    assert found.compute_s == pytest.approx(float(times.gradient_s[0]) / 2)
    assert float(found.gradient_s(32)) == pytest.approx(float(times.gradient_s[0]), rel=1e-2)


def test_measurements_with_noise_are_fitted_within_it() -> None:
    times = _measured([(1, 1), (1, 4), (2, 8), (2, 16)], [8, 16, 32, 64])
    noise = np.random.default_rng(3).uniform(0.95, 1.05, times.step_s.shape)
    noisy = StepTimes(
        nodes=times.nodes,
        replicas=times.replicas,
        local_batch=times.local_batch,
        gradient_s=times.gradient_s * noise,
        step_s=times.step_s * noise,
    )
    found = fit_throughput(noisy)
    predicted = found.iteration_s(times.nodes, times.replicas, times.local_batch)
    assert predicted == pytest.approx(times.step_s, rel=0.06)


def test_no_measurement_is_refused() -> None:
    none = np.empty(0, dtype=np.int64)
    with pytest.raises(ModelError, match="one or more"):
        StepTimes(
            nodes=none, replicas=none, local_batch=none, gradient_s=none * 1.0, step_s=none * 1.0
        )


def test_a_time_that_is_not_positive_is_refused() -> None:
    one = np.array([1])
    with pytest.raises(ModelError, match="positive"):
        StepTimes(
            nodes=one,
            replicas=one,
            local_batch=one,
            gradient_s=np.array([0.1]),
            step_s=np.array([0.0]),
        )
