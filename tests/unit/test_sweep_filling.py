"""From a sweep to a profile, its matrix, and advice; and the meter of one point."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.model import PipelineModel, Profile, ProfileOrigin
from slurm_synergy.core.pipeline import job_rate
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import ModelError
from slurm_synergy.profiler.filling import DataFacts, filled, matrix, pipeline_of
from slurm_synergy.profiler.points import Meter, MeterState, Reading
from slurm_synergy.profiler.sizing import NodeShape, sizes
from slurm_synergy.profiler.sweep import Measurement, Sweep, SweepResult, SweepSpan


def measured(truth: Profile, gpu_type: str, gpus: int, most: int) -> SweepResult:
    """A sweep on a job that runs as ``truth`` says, with its data set in memory."""
    sweep = Sweep(
        span=SweepSpan(gpus=gpus, most_cpus=most, proportional_cpus=max(gpus, most // 8 * gpus))
    )
    while (cpus := sweep.next_cpus) is not None:
        rate = job_rate(truth, gpu_type, (Resources(gpus=gpus, cpus=cpus, mem_mib=10**7),))
        assert rate is not None
        sweep = sweep.fed(Measurement(cpus=cpus, samples_per_s=rate, iterations=50))
    return sweep.result()


@pytest.mark.parametrize("name", sorted(CATALOGUE))
@pytest.mark.parametrize("gpus", [1, 4])
def test_every_cell_of_w_is_within_five_per_cent_of_the_truth(name: str, gpus: int) -> None:
    truth = CATALOGUE[name]
    assert truth.pipeline is not None
    facts = DataFacts(
        dataset_mib=truth.pipeline.dataset_mib,
        samples_per_epoch=truth.pipeline.samples_per_epoch,
        storage_mib_s=truth.pipeline.storage_mib_s,
        process_mem_mib=truth.pipeline.process_mem_mib,
    )
    found = filled(measured(truth, "v100", gpus, 48), key=name, gpu_type="v100", facts=facts)
    assert (found.origin, found.key) == (ProfileOrigin.MEASURED, name)
    cpus = range(gpus, 49, gpus)
    mem_mib = range(20_480, 700_000, 30_000)
    ours = matrix(found, "v100", gpus=gpus, cpus=cpus, mem_mib=mem_mib)
    true = matrix(truth, "v100", gpus=gpus, cpus=cpus, mem_mib=mem_mib)
    for row, true_row in zip(ours, true, strict=True):
        assert row == pytest.approx(true_row, rel=0.05)


def test_memory_is_filled_from_sizes_and_bandwidth_by_the_exact_hit_ratio() -> None:
    truth = Profile(
        gpu_rate_per_gpu={"x": 1000.0}, pipeline=PipelineModel(preprocess=((1, 100.0),))
    )
    facts = DataFacts(
        dataset_mib=1000.0, samples_per_epoch=10_000, storage_mib_s=5.0, process_mem_mib=200
    )
    found = filled(measured(truth, "x", 1, 8), key="k", gpu_type="x", facts=facts)
    # 600 MiB hold 400 of 1000 MiB, so an epoch of 10,000 samples reads 600 MiB at 5 MiB/s.
    ((none, some, whole),) = matrix(found, "x", gpus=1, cpus=[8], mem_mib=[200, 600, 1200])
    assert none == pytest.approx(10_000 * 5.0 / 1000)
    assert some == pytest.approx(10_000 * 5.0 / 600)
    assert whole == pytest.approx(100.0)
    with pytest.raises(ModelError, match="knows no GPU type 'y', only x"):
        matrix(found, "y", gpus=1, cpus=[1], mem_mib=[1])


def test_above_the_knee_loading_is_taken_to_grow_on_for_faster_gpus() -> None:
    def profile(rate: float) -> Profile:
        pipeline = PipelineModel(preprocess=((1, 50.0), (64, 3200.0)))
        return Profile(gpu_rate_per_gpu={"x": rate}, pipeline=pipeline)

    pipeline = pipeline_of(measured(profile(400.0), "x", 1, 32), DataFacts())
    assert pipeline.preprocess[-1][0] == 32
    assert pipeline.preprocess[-1][1] == pytest.approx(1600, rel=0.05)
    # Where one core per GPU is enough, nothing was seen but that: the same in proportion.
    busy = pipeline_of(measured(profile(40.0), "x", 1, 32), DataFacts())
    assert busy.preprocess == ((1, 40.0), (32, pytest.approx(1280.0)))


def test_where_the_loader_sets_the_pace_up_to_the_top_nothing_is_added() -> None:
    truth = Profile(
        gpu_rate_per_gpu={"x": 1e6}, pipeline=PipelineModel(preprocess=((1, 50.0), (8, 400.0)))
    )
    pipeline = pipeline_of(measured(truth, "x", 1, 8), DataFacts())
    assert pipeline.preprocess[-1] == (8, pytest.approx(400.0))


def test_what_slow_reads_hid_is_taken_to_grow_on_and_is_not_trusted() -> None:
    """Four cores preprocess what the storage gives; more memory would let more cores show."""
    sweep = Sweep(span=SweepSpan(gpus=1, most_cpus=16, proportional_cpus=2))
    while (cpus := sweep.next_cpus) is not None:
        rate = min(400.0, 100.0 * cpus)
        sweep = sweep.fed(
            Measurement(
                cpus=cpus,
                samples_per_s=rate,
                iterations=50,
                wait_share=1 - rate / 1000,
                busy_samples_per_s=1000.0,
            )
        )
    result = sweep.result()
    facts = DataFacts(dataset_mib=1000.0, samples_per_epoch=10_000, storage_mib_s=40.0)
    found = filled(result, key="k", gpu_type="x", facts=facts)
    assert not found.confident
    ((none, whole),) = matrix(found, "x", gpus=1, cpus=[8], mem_mib=[1, 2000])
    assert (none, whole) == (pytest.approx(400, rel=0.02), pytest.approx(800, rel=0.1))
    # Storage that would have given much more is not what they waited for.
    other = filled(result, key="k", gpu_type="x", facts=replace(facts, storage_mib_s=400.0))
    ((whole,),) = matrix(other, "x", gpus=1, cpus=[8], mem_mib=[2000])
    assert whole == pytest.approx(400, rel=0.02)


def test_facts_that_cannot_be_are_refused() -> None:
    for wrong in ({"dataset_mib": -1}, {"storage_mib_s": 0}, {"samples_per_epoch": 0}):
        with pytest.raises(ModelError):
            DataFacts(**wrong)
    result = measured(CATALOGUE["resnet18-imagenet"], "v100", 1, 8)
    with pytest.raises(ModelError, match="needs a key and a GPU type"):
        filled(result, key="", gpu_type="v100")


# -- advice ----------------------------------------------------------------------------------------

SHAPE = NodeShape(gpu_type="v100", gpus=8, cpus=24, mem_mib=500_000)


def test_sizes_are_the_least_for_full_speed_and_for_ninety_per_cent() -> None:
    profile = Profile(
        gpu_rate_per_gpu={"v100": 1000.0},
        pipeline=PipelineModel(
            preprocess=((1, 100.0), (8, 800.0), (16, 1000.0)),
            dataset_mib=100 * 1024,
            samples_per_epoch=1_000_000,
            storage_mib_s=50.0,
            process_mem_mib=10 * 1024,
        ),
    )
    full, less = sizes(profile, SHAPE, 1)
    assert (full.cpus, full.of_full) == (15, pytest.approx(0.97, abs=0.01))
    assert (less.cpus, less.of_full) == (12, pytest.approx(0.9, abs=0.01))
    for size in (full, less):
        below = Resources(gpus=1, cpus=size.cpus, mem_mib=size.mem_mib - 1024)
        assert (job_rate(profile, "v100", (below,)) or 0) < size.samples_per_s
        assert size.mem_mib % 1024 == 0
    with pytest.raises(ModelError, match="more than the 8"):
        sizes(profile, SHAPE, 9)
    with pytest.raises(ModelError, match="does not know GPUs of type 'a100'"):
        sizes(profile, NodeShape(gpu_type="a100", gpus=8, cpus=24, mem_mib=500_000), 1)


def test_a_job_that_one_core_feeds_gets_one_line_of_advice() -> None:
    (only,) = sizes(CATALOGUE["gnmt-wmt16"], SHAPE, 1)
    assert (only.cpus, only.mem_mib, only.of_full) == (1, 20 * 1024, pytest.approx(1.0))


# -- the meter -------------------------------------------------------------------------------------


def fed(
    meter: Meter, rate: float, seconds: float, start: Reading, *, waits: float = 0.5
) -> tuple[Meter, Reading]:
    """Readings ten times a second of a program that does ``rate`` steps/s of 8 samples each."""
    now = start
    for tick in range(1, round(seconds * 10) + 1):
        steps = round(rate * tick / 10)
        spent_s = steps / rate
        now = Reading(
            now_s=start.now_s + tick / 10,
            step=start.step + steps,
            samples=start.samples + 8 * steps,
            stepped_s=start.stepped_s + spent_s * (1 - waits),
            waited_s=start.waited_s + spent_s * waits,
        )
        meter = meter.seen(now)
        if meter.state in (MeterState.KNOWN, MeterState.STUCK):
            break
    return meter, now


ZERO = Reading(now_s=100.0, step=0, samples=0)


def test_a_point_is_the_rate_after_the_warm_up_with_its_waits() -> None:
    meter, _ = fed(Meter(cpus=4).seen(ZERO), 20.0, 60, ZERO)
    point = meter.measurement
    assert point is not None
    assert point.cpus == 4
    assert point.samples_per_s == pytest.approx(160)
    assert 50 <= point.iterations <= 54
    assert point.wait_share == pytest.approx(0.5)
    assert point.busy_samples_per_s == pytest.approx(320)


def test_batches_that_other_cores_had_loaded_do_not_count() -> None:
    meter, now = fed(Meter(cpus=1).seen(ZERO), 40.0, 1.0, ZERO)  # what was fetched ahead
    assert meter.measurement is None
    meter, _ = fed(meter, 10.0, 60, now)
    assert meter.measurement is not None
    assert meter.measurement.samples_per_s == pytest.approx(80, rel=0.05)


@pytest.mark.parametrize("beginning", [12.0, 23.0])
def test_workers_that_start_or_queues_that_run_dry_do_not_count(beginning: float) -> None:
    meter, now = fed(Meter(cpus=1).seen(ZERO), beginning, 1.5, ZERO)
    assert meter.state is MeterState.COUNTING
    meter, _ = fed(meter, 20.0, 60, now)
    assert meter.measurement is not None
    assert meter.measurement.samples_per_s == pytest.approx(160, rel=0.01)


def test_a_long_warm_up_takes_a_third_of_the_time_at_most() -> None:
    meter, _ = fed(Meter(cpus=64, warmup=200, most_s=30.0).seen(ZERO), 2.0, 60, ZERO)
    assert meter.measurement is not None
    assert meter.measurement.iterations == pytest.approx(40, abs=2)


def test_a_slow_point_ends_with_the_steps_that_there_were() -> None:
    meter, now = fed(Meter(cpus=1, most_s=20.0).seen(ZERO), 1.0, 30, ZERO)
    assert meter.measurement is not None
    assert meter.measurement.iterations < 20
    assert meter.measurement.samples_per_s == pytest.approx(8)
    assert now.now_s == pytest.approx(120, abs=0.2)
    stuck, _ = fed(Meter(cpus=1, most_s=20.0).seen(ZERO), 0.2, 60, ZERO)
    assert stuck.state is MeterState.STUCK
    assert stuck.measurement is None


def test_a_program_that_tells_no_waits_is_timed_by_the_clock() -> None:
    meter = Meter(cpus=2).seen(ZERO)
    for tick in range(1, 100):
        meter = meter.seen(Reading(now_s=100 + tick / 10, step=tick, samples=8 * tick))
    point = meter.measurement
    assert point is not None
    assert point.samples_per_s == pytest.approx(80)
    assert (point.wait_share, point.busy_samples_per_s) == (None, None)


def test_a_program_that_began_anew_is_measured_anew() -> None:
    meter, _ = fed(Meter(cpus=2).seen(ZERO), 20.0, 2.0, ZERO)
    assert meter.state is MeterState.COUNTING
    meter = meter.seen(Reading(now_s=103.0, step=0, samples=0))
    assert (meter.state, meter.window) == (MeterState.WARMING, ())


@given(rate=st.floats(0.5, 500), waits=st.floats(0, 0.99))
@settings(max_examples=50)
def test_a_steady_program_is_measured_right_at_any_pace(rate: float, waits: float) -> None:
    meter, _ = fed(Meter(cpus=2).seen(ZERO), rate, 200, ZERO, waits=waits)
    assert meter.measurement is not None
    assert meter.measurement.samples_per_s == pytest.approx(8 * rate, rel=1e-6)
    assert math.isclose(meter.measurement.wait_share or 0.0, waits, abs_tol=1e-6)
