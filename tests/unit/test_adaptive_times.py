"""Means of step times: what counts, what does not, and when they are told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slurm_synergy.core.scaling import BatchSize
from slurm_synergy.jobside.adaptive_times import StepMeter, SyncTimer
from slurm_synergy.jobside.training import MOST_TIMES, StepMeans

ALONE = BatchSize(local=8, replicas=1)
PAIR = BatchSize(local=8, replicas=2, accumulation=1)


class Training:
    """Steps on a clock of their own."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.meter = StepMeter(lambda: self.now_s)
        self.sync = SyncTimer(SimpleNamespace(type="cpu"), lambda: self.now_s)
        self.meter.due()

    def step(
        self,
        batch: BatchSize | None,
        pass_s: float,
        sync_s: float = 0.0,
        *,
        measured: bool = False,
        wait_s: float = 0.0,
    ) -> tuple[StepMeans, ...]:
        """One step, that waits for data before each pass."""
        self.meter.begin_step(batch)
        passes = (batch.accumulation if batch else 0) + 1
        for number in range(passes):
            self.now_s += wait_s
            self.meter.begin_pass()
            self.now_s += pass_s
            if number == passes - 1:
                if measured:
                    self.sync.ready()
                self.now_s += sync_s
                if measured:
                    self.sync.done()
            self.meter.end_pass()
        self.meter.end_step(self.sync)
        return self.meter.due()


def test_waiting_the_first_steps_and_the_rest_of_an_epoch_do_not_count() -> None:
    training = Training()
    for _ in range(2):
        assert not training.step(ALONE, 9.0)
    for _ in range(4):
        training.step(ALONE, 0.1, wait_s=5.0)
        training.step(None, 7.0)
    (told,) = training.step(ALONE, 0.6)
    assert (told.local_batch, told.replicas, told.accumulation, told.steps) == (8, 1, 0, 5)
    assert told.gradient_s == told.step_s == pytest.approx(0.2)


def test_measured_steps_tell_the_gradient_and_all_of_them_the_synchronising() -> None:
    training = Training()
    for number in range(30):
        # The measured ones are held up more than the others.
        measured = number % 10 == 5
        told = training.step(PAIR, 0.1, 0.3 if measured else 0.02, measured=measured)
        if told:
            break
        assert measured or training.now_s < 103.5, "nothing is told before a step was measured"
    assert told[0].steps < 30
    assert told[0].gradient_s == pytest.approx(0.1)
    mean_s = (told[0].steps - 1) * 0.02 / told[0].steps + 0.3 / told[0].steps
    assert told[0].step_s == pytest.approx(0.1 + mean_s)


def test_batches_are_told_apart_and_there_are_not_too_many() -> None:
    training = Training()
    sizes = [BatchSize(local=size, replicas=1) for size in range(1, MOST_TIMES + 5)]
    for size in sizes:
        for _ in range(7):
            told = training.step(size, 0.001 * size.local)
    training.now_s += 60
    told = training.step(ALONE, 1.0)
    assert [one.local_batch for one in told] == list(range(1, MOST_TIMES + 1))
    for one in told[:7]:
        assert one.gradient_s == pytest.approx(0.001 * one.local_batch)


def test_it_is_told_soon_at_first_and_every_half_minute_later() -> None:
    training = Training()
    at = []
    while len(at) < 7:
        if training.step(ALONE, 0.5):
            at.append(training.now_s - 100.0)
    gaps = [round(after - before) for before, after in zip([0.0, *at], at, strict=False)]
    assert gaps == [4, 6, 12, 24, 30, 30, 30]
