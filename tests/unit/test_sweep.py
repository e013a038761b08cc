"""The search over core counts on pipelines whose truth is known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_synergy.errors import ModelError
from slurm_synergy.profiler.sweep import (
    MOST_POINTS,
    PLATEAU,
    Confidence,
    Measurement,
    Sweep,
    SweepResult,
    SweepSpan,
)

Truth = Callable[[int], float]


def span(most: int = 24, proportional: int = 3, gpus: int = 1, step: int = 0) -> SweepSpan:
    return SweepSpan(gpus=gpus, most_cpus=most, proportional_cpus=proportional, step=step)


def swept(truth: Truth, over: SweepSpan, noise: Callable[[], float] = lambda: 1.0) -> Sweep:
    """The whole search; each point is the mean of 50 steps whose times are scaled by ``noise``."""
    sweep = Sweep(span=over)
    while (cpus := sweep.next_cpus) is not None:
        took_s = sum(noise() / truth(cpus) for _ in range(50))
        sweep = sweep.fed(Measurement(cpus=cpus, samples_per_s=50 / took_s, iterations=50))
        assert len(sweep.points) <= MOST_POINTS
    return sweep


def worst_error(result: SweepResult, truth: Truth) -> float:
    return max(abs(result.rate(cpus) / truth(cpus) - 1) for cpus in result.span.counts)


def true_knee(truth: Truth, over: SweepSpan) -> int:
    return next(cpus for cpus in over.counts if truth(cpus) >= PLATEAU * truth(over.counts[-1]))


def test_the_search_begins_at_the_top_and_measures_the_proportional_share() -> None:
    sweep = swept(lambda cpus: min(100.0 * cpus, 900.0), span())
    asked = [point.cpus for point in sweep.points]
    assert asked[:3] == [24, 1, 3]
    result = sweep.result()
    assert result.knee_cpus == 9
    assert result.gpu_bound
    assert result.gpu_samples_per_s == pytest.approx(900)
    assert result.confidence is Confidence.HIGH
    assert result.iterations == 50 * len(asked)


def test_it_ends_early_when_one_core_per_gpu_keeps_the_gpus_busy() -> None:
    sweep = swept(lambda cpus: 500.0, span(most=48, proportional=12, gpus=4))
    assert [point.cpus for point in sweep.points] == [48, 4, 12]
    result = sweep.result()
    assert (result.knee_cpus, result.gpu_bound) == (4, True)
    assert result.rate(1) == pytest.approx(125)  # below one core per GPU: in proportion


def test_counts_are_whole_cores_per_gpu_and_the_proportional_share() -> None:
    assert span(most=16, proportional=6, gpus=4).counts == (4, 6, 8, 12, 16)
    assert span(most=2, proportional=1, gpus=1).counts == (1, 2)
    assert span(most=3, proportional=9, gpus=8).counts == (3,)
    assert span(most=6, proportional=3, gpus=1, step=2).counts == (1, 3, 5)


def test_with_two_cores_both_are_measured_and_nothing_else() -> None:
    sweep = swept(lambda cpus: 10.0 * cpus, span(most=2, proportional=2))
    assert sorted(point.cpus for point in sweep.points) == [1, 2]
    result = sweep.result()
    assert result.knee_cpus == 2
    assert not result.gpu_bound
    assert result.curve == ((1, pytest.approx(10)), (2, pytest.approx(20)))


def test_waits_tell_how_fast_the_gpus_would_be_and_who_sets_the_pace() -> None:
    def measured(cpus: int, share: float) -> Measurement:
        rate = 10.0 * cpus
        return Measurement(
            cpus=cpus,
            samples_per_s=rate,
            iterations=50,
            wait_share=share,
            busy_samples_per_s=rate / (1 - share),
        )

    starved = Sweep(span=span(most=2, proportional=2)).fed(measured(2, 0.5)).fed(measured(1, 0.75))
    assert (starved.result().gpu_samples_per_s, starved.result().gpu_bound) == (40.0, False)
    busy = Sweep(span=span(most=2, proportional=2)).fed(measured(2, 0.01)).fed(measured(1, 0.5))
    assert (busy.result().gpu_samples_per_s, busy.result().gpu_bound) == (20.0, True)


def test_a_sweep_that_is_cut_keeps_what_it_knows_and_says_so() -> None:
    sweep = Sweep(span=span())
    with pytest.raises(ModelError, match="without measurements"):
        sweep.cut("the job ended").result()
    sweep = sweep.fed(Measurement(cpus=24, samples_per_s=900.0, iterations=20)).cut("out of time")
    assert sweep.done
    result = sweep.result()
    assert (result.confidence, result.why) == (Confidence.LOW, "out of time")
    assert result.rate(24) == 900.0
    finished = swept(lambda cpus: 5.0, span())
    assert finished.cut("too late to matter") is finished


def test_points_that_contradict_each_other_lower_the_confidence() -> None:
    sweep = Sweep(span=span(most=2, proportional=2))
    sweep = sweep.fed(Measurement(cpus=2, samples_per_s=60.0, iterations=50))
    sweep = sweep.fed(Measurement(cpus=1, samples_per_s=100.0, iterations=50))
    result = sweep.result()
    assert result.confidence is Confidence.LOW
    assert "slower than fits the other points" in result.why or "faster than fits" in result.why
    assert result.rate(1) == result.rate(2) == 80.0


def test_a_curve_that_eight_points_do_not_show_well_is_told_to_be_uncertain() -> None:
    full = swept(lambda cpus: cpus / (1 + 0.02 * (cpus - 1)), span(most=128, proportional=16))
    assert full.result().confidence is Confidence.HIGH
    few = Sweep(span=span(most=128, proportional=16), most_points=3)
    while (cpus := few.next_cpus) is not None:
        rate = cpus / (1 + 0.02 * (cpus - 1))
        few = few.fed(Measurement(cpus=cpus, samples_per_s=rate, iterations=50))
    assert len(few.points) == 3
    result = few.result()
    assert result.confidence is Confidence.LOW
    assert "3 points leave" in result.why


def test_a_point_measured_again_replaces_the_first() -> None:
    sweep = Sweep(span=span(most=2, proportional=2))
    for rate in (10.0, 30.0):
        sweep = sweep.fed(Measurement(cpus=2, samples_per_s=rate, iterations=50))
    assert [point.samples_per_s for point in sweep.points] == [30.0]
    with pytest.raises(ModelError, match="outside the sweep"):
        sweep.fed(Measurement(cpus=3, samples_per_s=1.0, iterations=1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples_per_s": 0.0},
        {"samples_per_s": float("inf")},
        {"iterations": 0},
        {"cpus": 0},
        {"wait_share": 1.5},
        {"busy_samples_per_s": -1.0},
    ],
)
def test_a_measurement_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    good = {"cpus": 1, "samples_per_s": 1.0, "iterations": 1}
    with pytest.raises(ModelError):
        Measurement(**{**good, **wrong})  # type: ignore[arg-type]


def test_a_foot_where_one_core_does_less_than_its_part_does_not_hide_the_knee() -> None:
    # The training process itself takes 0.38 of a core: the loader has only the rest.
    def truth(cpus: int) -> float:
        return min(cpus - 0.38, 49.8)

    result = swept(truth, span(most=128, proportional=16)).result()
    assert worst_error(result, truth) < 0.05
    assert abs(result.knee_cpus - true_knee(truth, result.span)) <= 1


# -- properties ------------------------------------------------------------------------------------

MACHINES = st.tuples(
    st.sampled_from([1, 2, 4, 8]),  # GPUs of the job, of 8 on the node
    st.sampled_from([2, 4, 8, 16, 24, 32, 48, 64, 96, 128]),
).filter(lambda machine: machine[1] >= machine[0])


def span_of(machine: tuple[int, int]) -> SweepSpan:
    gpus, most = machine
    return span(most=most, proportional=max(most * gpus // 8 // gpus * gpus, gpus), gpus=gpus)


@st.composite
def plain_pipelines(draw: st.DrawFn) -> Truth:
    """Loading grows with the cores, until the GPUs, or the loader itself, set the pace."""
    per_core = draw(st.floats(0.1, 1000))
    gpu_cores = draw(st.floats(0.5, 200))
    return lambda cpus: per_core * min(cpus, gpu_cores)


@st.composite
def soft_pipelines(draw: st.DrawFn) -> Truth:
    """Every further core adds less than the one before (Amdahl), under a bound by the GPUs."""
    serial = draw(st.floats(0.0, 0.1))
    gpu_cores = draw(st.floats(0.5, 200))
    return lambda cpus: 100.0 * min(cpus / (1 + serial * (cpus - 1)), gpu_cores)


@given(machine=MACHINES, truth=plain_pipelines())
@settings(max_examples=300)
def test_every_cell_within_five_per_cent_and_the_knee_within_one_core(
    machine: tuple[int, int], truth: Truth
) -> None:
    over = span_of(machine)
    result = swept(truth, over).result()
    assert {over.counts[-1], over.proportional} <= {point.cpus for point in result.points}
    assert worst_error(result, truth) <= 0.05
    places = [over.counts.index(one) for one in (result.knee_cpus, true_knee(truth, over))]
    assert abs(places[0] - places[1]) <= 1
    assert result.confidence is Confidence.HIGH


@given(machine=MACHINES, truth=soft_pipelines())
@settings(max_examples=300)
def test_a_curve_that_bends_slowly_is_known_as_well(machine: tuple[int, int], truth: Truth) -> None:
    over = span_of(machine)
    result = swept(truth, over).result()
    assert worst_error(result, truth) <= 0.05
    # Such a curve has no sharp knee: what counts is the speed at the one that was found.
    top = truth(over.counts[-1])
    assert truth(result.knee_cpus) >= PLATEAU * 0.95 * top


@given(
    machine=MACHINES,
    truth=st.one_of(plain_pipelines(), soft_pipelines()),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=300)
def test_ten_per_cent_of_timing_noise_leave_every_cell_within_ten(
    machine: tuple[int, int], truth: Truth, seed: int
) -> None:
    gauss = random.Random(seed).gauss
    result = swept(truth, span_of(machine), lambda: max(0.1, gauss(1.0, 0.1))).result()
    assert worst_error(result, truth) <= 0.10
