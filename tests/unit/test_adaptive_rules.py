"""The noise of gradients, batches and learning rates of adaptive jobs: the rules, without torch."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_synergy.core.goodput import GradientStatistics, gain
from slurm_synergy.errors import ConfigError
from slurm_synergy.jobside.adaptive_batch import BatchRange, gain_at, rate_factor
from slurm_synergy.jobside.adaptive_noise import NoiseMeter, Norms

SQUARE, VARIANCE, INITIAL = 4.0, 12.0, 32


def drawn(random_: np.random.Generator, *, count: int, scale: float, **more: bool) -> Norms:
    """Norms of ``count`` parts of a batch, with a true gradient and noise of known size."""
    dimensions = 50
    true = np.full(dimensions, (SQUARE / dimensions) ** 0.5)
    deviation = (VARIANCE * count / scale / dimensions) ** 0.5
    parts = true + deviation * random_.standard_normal((count, dimensions))
    local, total = float((parts**2).sum(1).mean()), float((parts.mean(0) ** 2).sum())
    return Norms(local=local, total=total, count=count, scale=scale, **more)


@pytest.mark.parametrize(("count", "scale"), [(2, 1.0), (2, 4.0), (8, 1.0), (4, 16.0)])
def test_the_known_noise_is_found_whatever_the_batch_and_its_parts(
    count: int, scale: float
) -> None:
    meter, random_ = NoiseMeter(INITIAL), np.random.default_rng(0)
    for _ in range(3000):
        meter.add(drawn(random_, count=count, scale=scale))
    known = meter.statistics
    assert known is not None and not meter.differenced
    assert known.square == pytest.approx(SQUARE, rel=0.15)
    assert known.variance == pytest.approx(VARIANCE, rel=0.15)


def test_the_first_measurement_counts_in_full() -> None:
    meter = NoiseMeter(INITIAL)
    assert meter.statistics is None
    meter.add(Norms(local=10.0, total=6.0, count=2, scale=1.0))
    known = meter.statistics
    assert known is not None
    assert (known.square, known.variance) == (pytest.approx(2.0), pytest.approx(4.0))


def test_a_measurement_stands_for_the_steps_since_the_one_before() -> None:
    often, seldom = NoiseMeter(INITIAL), NoiseMeter(INITIAL)
    for local in (10.0, 30.0):
        norms = {"local": local, "total": 6.0, "count": 2, "scale": 1.0}
        for _ in range(10):
            often.add(Norms(**norms))  # type: ignore[arg-type]
        seldom.add(Norms(**norms, steps=10))  # type: ignore[arg-type]
    assert often.statistics is not None and seldom.statistics is not None
    assert seldom.statistics.square == pytest.approx(often.statistics.square)
    assert seldom.statistics.variance == pytest.approx(often.statistics.variance)


def test_neither_estimate_becomes_negative() -> None:
    meter = NoiseMeter(INITIAL)
    meter.add(Norms(local=10.0, total=1.0, count=2, scale=1.0))
    meter.add(Norms(local=1.0, total=9.0, count=2, scale=100.0, steps=100))
    known = meter.statistics
    assert known is not None and known.square >= 0 and known.variance > 0


@pytest.mark.parametrize("local", [float("nan"), float("inf")])
def test_an_overflow_tells_nothing(local: float) -> None:
    meter = NoiseMeter(INITIAL)
    meter.add(Norms(local=local, total=1.0, count=2, scale=1.0))
    meter.add(Norms(local=1.0, total=1.0, count=1, scale=1.0))
    assert meter.statistics is None


def test_true_parts_end_the_history_of_differences() -> None:
    meter, random_ = NoiseMeter(INITIAL), np.random.default_rng(1)
    for _ in range(50):
        meter.add(Norms(local=900.0, total=500.0, count=2, scale=2.0, differenced=True))
    assert meter.differenced
    for _ in range(400):
        meter.add(drawn(random_, count=2, scale=1.0))
    known = meter.statistics
    assert not meter.differenced and known is not None
    assert known.variance == pytest.approx(VARIANCE, rel=0.3)
    # Alone again: what was measured in parts holds for a while, then the differences.
    meter.add(Norms(local=900.0, total=500.0, count=2, scale=2.0, differenced=True))
    assert meter.statistics == known and not meter.differenced
    meter.add(Norms(local=900.0, total=500.0, count=2, scale=2.0, steps=900, differenced=True))
    assert meter.differenced and meter.statistics is not None
    assert meter.statistics.square == pytest.approx(100.0)


def test_statistics_travel_as_json_and_are_void_for_another_initial_batch() -> None:
    meter, random_ = NoiseMeter(INITIAL), np.random.default_rng(2)
    for _ in range(20):
        meter.add(drawn(random_, count=4, scale=2.0))
    state = json.loads(json.dumps(meter.state_dict()))
    same, other = NoiseMeter(INITIAL), NoiseMeter(2 * INITIAL)
    same.load_state_dict(state)
    other.load_state_dict(state)
    assert same.statistics == meter.statistics and same.state_dict() == meter.state_dict()
    assert other.statistics is None


# -- batches ---------------------------------------------------------------------------------------


@given(
    wanted=st.integers(0, 5000),
    initial=st.integers(1, 300),
    more=st.integers(0, 4000),
    local_most=st.integers(1, 400),
    ranks=st.integers(1, 64),
)
def test_a_batch_is_within_the_range_and_the_memory(
    wanted: int, initial: int, more: int, local_most: int, ranks: int
) -> None:
    limits = BatchRange(initial=initial, largest=initial + more, local_most=local_most)
    batch = limits.batch_of(wanted, ranks)
    passes = batch.accumulation + 1
    assert batch.local <= local_most and batch.replicas == ranks
    asked = min(max(wanted, initial), initial + more) if wanted else initial
    assert asked <= batch.total < asked + ranks * passes
    if ranks > 1 and batch.accumulation:
        assert -(-asked // (ranks * batch.accumulation)) > local_most  # one pass less is too much


def test_alone_beyond_the_initial_batch_takes_two_passes() -> None:
    limits = BatchRange(initial=64, largest=1024, local_most=512)
    assert limits.batch_of(64, 1).accumulation == 0
    assert limits.batch_of(128, 1).accumulation == 1
    assert limits.batch_of(128, 2).accumulation == 0
    assert limits.batch_of(1024, 1).total == 1024


def test_the_split_is_the_one_that_the_controller_judges() -> None:
    from slurm_synergy.core.goodput import BatchLimits, ThroughputModel, best_batch

    model = ThroughputModel(compute_s=0.05, compute_s_per_sample=0.002, overlap=1.6)
    for largest in (300, 1000, 4096):
        for ranks in (1, 2, 8):
            limits = BatchLimits(initial=128, largest=largest, local_least=1, local_most=100)
            statistics = GradientStatistics(square=0.0, variance=1.0)
            choice = best_batch(model, statistics, limits, 1, ranks)
            local, passes = int(choice.local_batch[0]), int(choice.accumulation[0])
            total = local * ranks * (passes + 1)
            ours = BatchRange(initial=128, largest=4096, local_most=100).batch_of(total, ranks)
            assert (ours.local, ours.accumulation) == (local, passes)


def test_a_running_epoch_follows_changes_that_can_pay() -> None:
    limits = BatchRange(initial=64, largest=1024, local_most=512)
    now = limits.batch_of(512, 2)
    assert not limits.worth_a_change(now, 512)
    assert not limits.worth_a_change(now, 530)
    assert limits.worth_a_change(now, 540) and limits.worth_a_change(now, 480)
    assert limits.worth_a_change(limits.batch_of(1000, 2), 4096)  # as far as it goes


@pytest.mark.parametrize(
    ("initial", "largest", "local"), [(0, 8, 1), (8, 4, 1), (8, 16, 0), (-1, -1, 1)]
)
def test_an_impossible_range_is_refused(initial: int, largest: int, local: int) -> None:
    with pytest.raises(ConfigError, match="batch"):
        BatchRange(initial=initial, largest=largest, local_most=local)


# -- learning rates --------------------------------------------------------------------------------


def test_the_gain_is_that_of_the_controller() -> None:
    random_ = random.Random(3)
    for _ in range(100):
        known = GradientStatistics(square=random_.random(), variance=random_.random() + 1e-6)
        scale = 1 + 40 * random_.random()
        assert gain_at(known, scale) == pytest.approx(float(gain(known, scale)))


def test_the_gain_lies_between_one_step_and_as_many_as_the_batch_is_larger() -> None:
    assert gain_at(GradientStatistics(square=0.0, variance=1.0), 8.0) == pytest.approx(8.0)
    assert gain_at(GradientStatistics(square=1e9, variance=1e-6), 8.0) == pytest.approx(1.0)
    assert gain_at(None, 8.0) == 1.0
    assert gain_at(None, 0.25) == 0.25


@pytest.mark.parametrize(
    ("rule", "factor"), [("adascale", 2.5), ("sqrt", 2.0), ("linear", 4.0), ("none", 1.0)]
)
def test_the_rules_scale_the_learning_rate(rule: str, factor: float) -> None:
    known = GradientStatistics(square=1.0, variance=4.0)
    assert rate_factor(rule, known, 4.0) == pytest.approx(factor)
    assert rate_factor(rule, known, 1.0) == rate_factor(rule, known, 0.3) == 1.0


def test_an_unknown_rule_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"adascale.*sqrt.*linear"):
        rate_factor("cube", None, 2.0)
