"""What jobs tell of their steps: what is believed, what is refused, what is kept."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learning_truth import TRUTH, place, told

from slurm_synergy.controller.codec import decode, encode
from slurm_synergy.controller.learning_points import (
    MOST_TIMES,
    Learned,
    Point,
    StepTime,
    TrainingReport,
    believed,
    overlaid,
    taken_in,
    times_of,
)
from slurm_synergy.core.goodput import GradientStatistics, ThroughputModel
from slurm_synergy.errors import ModelError
from slurm_synergy.profiler.fit import fit_throughput

GOOD = told((1, 1), (32,)).times[0]


def fitted(points: tuple[Point, ...]) -> ThroughputModel:
    return fit_throughput(times_of(points))


def test_points_are_means_by_how_often_they_were_seen() -> None:
    once = replace(GOOD, steps=10, gradient_s=1.0, step_s=1.0)
    learned = taken_in(Learned(), TrainingReport(times=(once,)), place(1))
    often = replace(GOOD, steps=30, gradient_s=2.0, step_s=3.0)
    learned = taken_in(learned, TrainingReport(times=(often,)), place(1))
    (point,) = learned.points
    assert (point.steps, point.gradient_s, point.step_s) == (40, 1.75, 2.5)


def test_a_mean_over_many_steps_still_follows_a_program_that_changes() -> None:
    learned = Learned()
    for seconds in (1.0, 2.0, 2.0, 2.0, 2.0):
        one = replace(GOOD, steps=2**53, gradient_s=seconds, step_s=seconds)
        learned = taken_in(learned, TrainingReport(times=(one,)), place(1))
    assert 1.9 < learned.points[0].step_s < 2.0


def test_gpus_count_as_explored_once_something_was_measured_on_them() -> None:
    learned = taken_in(Learned(), TrainingReport(square=1.0, initial_batch=32), place(4))
    assert learned.explored == {}
    learned = taken_in(learned, told((1, 4), (32,)), place(4))
    learned = taken_in(learned, told((1, 2), (32,)), place(2))
    learned = taken_in(learned, told((1, 1), (32,)), place(1, kind="a100"))
    assert learned.explored == {"v100": 4, "a100": 1}


HOSTILE = {
    "not a number": replace(GOOD, step_s=math.nan),
    "infinite": replace(GOOD, gradient_s=math.inf),
    "negative": replace(GOOD, step_s=-1.0),
    "nothing": replace(GOOD, gradient_s=0.0),
    "a day": replace(GOOD, step_s=86_400.0),
    "no samples": replace(GOOD, local_batch=0),
    "negative samples": replace(GOOD, local_batch=-32),
    "absurd samples": replace(GOOD, local_batch=2**40),
    "no steps": replace(GOOD, steps=0),
    "more copies than GPUs": replace(GOOD, replicas=3),
    "no copies": replace(GOOD, replicas=0),
    "endless passes": replace(GOOD, accumulation=2**40),
    "faster with synchronisation": replace(GOOD, step_s=GOOD.gradient_s / 10),
    "absurdly fast": replace(GOOD, local_batch=2**30, gradient_s=1e-6, step_s=1e-6),
}


@pytest.mark.parametrize("bad", HOSTILE.values(), ids=HOSTILE)
def test_step_times_that_cannot_be_true_are_refused_in_words(bad: StepTime) -> None:
    with pytest.raises(ModelError, match=r"\d"):
        taken_in(Learned(), TrainingReport(times=(GOOD, bad)), place(2))


@pytest.mark.parametrize(
    "bad",
    [
        TrainingReport(times=(GOOD,) * (MOST_TIMES + 1)),
        TrainingReport(square=math.nan, initial_batch=32),
        TrainingReport(variance=math.inf, initial_batch=32),
        TrainingReport(square=-1.0, variance=2.0, initial_batch=32),
        TrainingReport(square=1e300, variance=1.0, initial_batch=32),
        TrainingReport(square=1.0, variance=1.0),
        TrainingReport(initial_batch=-1),
        TrainingReport(local_most=2**40),
        TrainingReport(progress=math.nan),
        TrainingReport(progress=-1.0),
    ],
)
def test_reports_that_cannot_be_true_are_refused(bad: TrainingReport) -> None:
    with pytest.raises(ModelError, match=r"\d|initial batch"):
        taken_in(Learned(), bad, place(2))


def test_copies_that_do_not_share_the_gpus_evenly_are_refused() -> None:
    with pytest.raises(ModelError, match="3 replicas on 4 GPUs"):
        taken_in(Learned(), TrainingReport(times=(replace(GOOD, replicas=3),)), place(4))


numbers = st.one_of(st.floats(), st.integers(-(2**70), 2**70))
whole = st.integers(-(2**70), 2**70)


@settings(max_examples=200, deadline=None)
@given(
    st.builds(
        TrainingReport,
        times=st.lists(
            st.builds(
                StepTime,
                local_batch=whole,
                replicas=st.integers(-2, 5),
                steps=whole,
                gradient_s=numbers,
                step_s=numbers,
                accumulation=whole,
            ),
            max_size=3,
        ).map(tuple),
        square=numbers,
        variance=numbers,
        initial_batch=whole,
        local_most=whole,
        progress=numbers,
    )
)
def test_whatever_is_told_it_is_refused_or_can_be_kept_and_believed(report: TrainingReport) -> None:
    try:
        learned = taken_in(Learned(), report, place(4))
    except ModelError:
        return
    assert decode(Learned, json.loads(json.dumps(encode(learned), allow_nan=False))) == learned
    believed(learned, lambda points: TRUTH)


def test_of_too_many_points_those_go_of_which_there_are_most() -> None:
    learned = taken_in(Learned(), told((2, 8), (32,)), place(8, nodes=2))
    for batch in range(1, 400):
        learned = taken_in(learned, told((1, 1), (batch,)), place(1))
    assert len(learned.points) == 200
    assert learned.points[0].gpus == 8
    assert [one.local_batch for one in learned.points[1:]] == list(range(201, 400))


def test_the_truth_is_believed_within_a_few_percent() -> None:
    learned = Learned()
    for nodes, gpus in ((1, 1), (1, 2), (1, 4), (2, 8), (4, 16)):
        report = told((nodes, gpus), (16, 64, 128))
        learned = taken_in(learned, report, place(gpus, nodes=nodes))
    scaling = believed(learned, fitted)
    assert scaling is not None
    speed = scaling.speeds["v100"]
    assert (speed.explored_gpus, speed.local_most) == (16, 128)
    for shape in ((1, 2, 100), (2, 8, 40), (8, 32, 64)):
        assert speed.model.rate(*shape) == pytest.approx(TRUTH.rate(*shape), rel=0.05)


def test_nothing_told_is_nothing_believed() -> None:
    assert believed(Learned(), fitted) is None


def test_more_samples_than_were_seen_to_have_room_need_the_jobs_word() -> None:
    learned = taken_in(Learned(), told((1, 1), (32,)), place(1))
    found = believed(learned, fitted)
    assert found is not None and found.speeds["v100"].local_most == 32
    learned = taken_in(learned, TrainingReport(local_most=256), place(1))
    found = believed(learned, fitted)
    assert found is not None and found.speeds["v100"].local_most == 256


def test_statistics_are_those_of_the_batch_that_the_hints_name() -> None:
    report = replace(told((1, 1), (32,)), square=1.0, variance=10.0, initial_batch=64)
    found = believed(taken_in(Learned(), report, place(1)), fitted, initial_batch=32)
    assert found is not None
    assert found.statistics == GradientStatistics(square=1.0, variance=20.0)


def test_statistics_that_hardly_change_are_the_same_belief() -> None:
    def with_noise(variance: float) -> Learned:
        report = replace(told((1, 1), (32,)), square=1.0, variance=variance, initial_batch=32)
        return taken_in(Learned(), report, place(1))

    first = believed(with_noise(10.0), fitted)
    assert first is not None
    assert first.statistics == GradientStatistics(square=1.0, variance=10.0)
    assert believed(with_noise(10.2), fitted, first) == first
    assert believed(with_noise(11.0), fitted, first) != first
    # In a huge batch it is the small part that counts.
    assert believed(with_noise(1000.0), fitted, believed(with_noise(100.0), fitted)) != first


def test_a_jobs_own_word_goes_before_that_of_others_with_its_key() -> None:
    theirs = taken_in(Learned(), told((1, 4), (32, 64), slower=2.0), place(4))
    theirs = taken_in(theirs, TrainingReport(square=9.0, initial_batch=32), place(4))
    own = taken_in(Learned(), told((1, 4), (32,)), place(4))
    both = overlaid(own, theirs)
    by_batch = {point.local_batch: point.step_s for point in both.points}
    assert by_batch[32] == own.points[0].step_s
    assert by_batch[64] == theirs.points[1].step_s
    assert both.explored == {"v100": 4}
    assert both.statistics == GradientStatistics(square=9.0)
    noisy = taken_in(own, TrainingReport(variance=3.0, initial_batch=64), place(4))
    assert overlaid(noisy, theirs).statistics == GradientStatistics(square=0.0, variance=3.0)
    assert overlaid(own, None) is own
