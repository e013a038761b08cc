"""What a running job's pace says about its profile."""

from __future__ import annotations

from itertools import pairwise

import pytest
from builders import profile, res
from hypothesis import given
from hypothesis import strategies as st

from slurm_synergy.core.model import Profile
from slurm_synergy.core.pipeline import job_rate
from slurm_synergy.profiler.refining import Pace, Sums, deviation, pace_between, refined

# 100 samples/s for each of at most 24 cores, 1000 samples/s for each GPU.
BELIEF = profile(per_core=100.0, gpu_rate=1000.0)
ONE = (res(1, 4, 60_000),)
PLENTY = (res(1, 20, 60_000),)


def sums(samples: int, stepped_s: float, waited_s: float) -> Sums:
    return Sums(samples=samples, stepped_s=stepped_s, waited_s=waited_s)


def rate(found: Profile, shares: tuple[object, ...] = ONE) -> float:
    known = job_rate(found, "v100", shares)  # type: ignore[arg-type]
    assert known is not None
    return known


def test_the_pace_is_that_of_the_slowest_task_and_the_longest_wait() -> None:
    before = (sums(100, 1.0, 1.0), sums(100, 1.0, 1.0))
    now = (sums(500, 3.0, 3.0), sums(500, 4.0, 1.0))
    assert pace_between(before, now) == Pace(samples_per_s=100.0, wait_share=0.5)


@pytest.mark.parametrize(
    "now",
    [
        (),
        (sums(500, 3.0, 3.0), sums(500, 3.0, 3.0)),  # another task
        (sums(100, 1.0, 1.0),),  # no step
        (sums(90, 9.0, 9.0),),  # another process
        (sums(200, 1.5, 0.5),),
    ],
)
def test_without_steps_of_the_same_tasks_there_is_no_pace(now: tuple[Sums, ...]) -> None:
    assert pace_between((sums(100, 1.0, 1.0),), now) is None


def test_where_the_loader_sets_the_pace_its_curve_follows() -> None:
    pace = Pace(samples_per_s=360.0, wait_share=0.64)
    assert deviation(BELIEF, pace, "v100", ONE) == pytest.approx(-0.1)
    found = refined(BELIEF, pace, "v100", ONE)
    assert rate(found) == pytest.approx(400 * 0.98)
    assert found.gpu_rate_per_gpu == BELIEF.gpu_rate_per_gpu


def test_where_the_gpus_set_the_pace_their_rate_follows_and_no_other_types() -> None:
    pace = Pace(samples_per_s=900.0, wait_share=0.01)
    found = refined(BELIEF, pace, "v100", PLENTY)
    assert found.gpu_rate_per_gpu["v100"] == pytest.approx(980.0)
    assert found.gpu_rate_per_gpu["a100"] == BELIEF.gpu_rate_per_gpu["a100"]
    assert found.pipeline == BELIEF.pipeline


def test_a_loader_that_keeps_up_is_at_least_as_fast_as_the_gpus() -> None:
    slow = profile(per_core=40.0, gpu_rate=1000.0)
    found = refined(slow, Pace(samples_per_s=1000.0, wait_share=0.0), "v100", PLENTY)
    assert rate(found, PLENTY) > rate(slow, PLENTY)


def test_in_between_and_behind_slow_storage_nothing_is_learned() -> None:
    even = Pace(samples_per_s=390.0, wait_share=0.05)
    assert refined(BELIEF, even, "v100", ONE) == BELIEF
    stored = profile(dataset_mib=1_000_000.0, samples=1_000_000, storage_mib_s=300.0)
    reads = Pace(samples_per_s=280.0, wait_share=0.7)
    assert refined(stored, reads, "v100", ONE) == stored


def test_a_cache_that_is_not_full_yet_is_no_other_phase_and_teaches_nothing() -> None:
    """All cached 800 samples/s, nothing cached 300: whatever lies between is as expected."""
    kept = profile(dataset_mib=100_000.0, samples=100_000, storage_mib_s=300.0)
    shares = (res(1, 8, 100_000),)
    assert rate(kept, shares) == pytest.approx(800.0)
    for seen, off in ((310.0, 0.0), (800.0, 0.0), (150.0, -0.5), (880.0, 0.1)):
        pace = Pace(samples_per_s=seen, wait_share=0.7)
        assert deviation(kept, pace, "v100", shares) == pytest.approx(off)
        assert (refined(kept, pace, "v100", shares) == kept) is (seen <= 800.0)


def test_what_is_not_known_stays_unknown() -> None:
    pace = Pace(samples_per_s=280.0, wait_share=0.7)
    assert refined(Profile(), pace, "v100", ONE) == Profile()
    assert deviation(Profile(), pace, "v100", ONE) is None
    assert deviation(BELIEF, pace, "h100", ONE) is None


@given(
    st.floats(0.81, 1.19),
    st.sampled_from([(ONE, 0.6), (PLENTY, 0.0)]),
)
def test_repeated_it_comes_to_what_was_seen(factor: float, where: tuple[object, float]) -> None:
    shares, wait_share = where
    found = BELIEF
    # With much more than 1000 samples/s to load, GPUs are what is seen.
    pace = Pace(
        samples_per_s=factor * rate(BELIEF, shares),  # type: ignore[arg-type]
        wait_share=wait_share,
    )
    errors = []
    for _ in range(40):
        errors.append(abs(rate(found, shares) - pace.samples_per_s))  # type: ignore[arg-type]
        found = refined(found, pace, "v100", shares)  # type: ignore[arg-type]
    assert errors[-1] <= 0.001 * pace.samples_per_s + 1e-9
    assert all(later <= earlier + 1e-9 for earlier, later in pairwise(errors))
