"""Every sample once an epoch, whatever batches, leases, workers, stops and ranks an epoch sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import lease
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchjob import Job, Numbers, Stream, flat, stop

import slurm_synergy.jobside as synergy
from slurm_synergy.errors import ConfigError
from slurm_synergy.jobside.adaptive_training import Adaptive
from slurm_synergy.jobside.board import Board
from slurm_synergy.jobside.sampler import StepSampler, passes_in
from slurm_synergy.jobside.session import LeaseEnded


class Training:
    """A model of one weight whose gradient is the mean of the samples of a pass."""

    def __init__(self, samples: int, *, workers: int = 0, **limits: Any) -> None:
        self.weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.model = nn.ParameterList([self.weight])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.loader = DataLoader(Numbers(samples), batch_size=4, shuffle=True, num_workers=workers)
        self.adaptive: Adaptive = synergy.adaptive(
            self.model, self.optimizer, self.loader, **{"batch": (4, 64), **limits}
        )
        self.seen: list[int] = []
        self.steps: list[tuple[int, float]] = []  # (samples, gradient used)

    def register(self) -> None:
        synergy.register(model=self.model, optimizer=self.optimizer, adaptive=self.adaptive)
        synergy.resume()

    def one_pass(self, batch: Any) -> None:
        self.seen.extend(flat([batch]))
        before, steps = self.weight.item(), self.adaptive.steps
        self.optimizer.zero_grad()
        (self.weight * batch.double().mean()).sum().backward()
        self.optimizer.step()
        if self.adaptive.steps > steps:
            self.steps.append((self.adaptive._samples, before - self.weight.item()))

    def epoch(self, leases: dict[int, LeaseChange] | None = None) -> None:
        for number, batch in enumerate(self.loader):
            self.one_pass(batch)
            if leases and number in leases:
                board, change = leases[number]
                board.write_lease(replace(board.read_lease(), **change))


LeaseChange = tuple[Board, dict[str, Any]]


def started(job: Job, cores: int = 2) -> Board:
    board = job.start(cores)
    assert board is not None
    return board


# -- the sampler -----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(1, 200),
    ranks=st.integers(1, 5),
    parts=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=6
    ),
)
def test_each_sample_once_over_changes_of_the_batch(
    samples: int, ranks: int, parts: list[tuple[int, int, int]]
) -> None:
    """``parts``: samples of a pass, passes of a step, steps until the next change."""
    seen: list[int] = []
    consumed, part = 0, 0
    while consumed < samples:
        local, passes, steps = parts[part % len(parts)]
        part += 1
        own = [
            StepSampler(
                samples,
                batch_size=local,
                passes=passes,
                seed=3,
                consumed=consumed,
                rank=rank,
                ranks=ranks,
            )
            for rank in range(ranks)
        ]
        sources = [iter(one) for one in own]
        for _ in range(steps):
            taken, count = own[0].step_at(consumed)
            if not taken:
                break
            step = [[next(source) for _ in range(count)] for source in sources]
            assert all(0 < len(one) <= max(local, 1) for rank in step for one in rank)
            indices = [index for rank in step for one in rank for index in one]
            assert len(set(indices)) == taken  # ranks with too few repeat some of this step
            seen.extend(set(indices))
            consumed += taken
    assert sorted(seen) == list(range(samples))


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(0, 200),
    ranks=st.integers(1, 5),
    local=st.integers(1, 9),
    passes=st.integers(1, 4),
    drop_last=st.booleans(),
)
def test_the_length_is_the_number_of_passes(
    samples: int, ranks: int, local: int, passes: int, *, drop_last: bool
) -> None:
    for rank in range(ranks):
        sampler = StepSampler(
            samples,
            batch_size=local,
            passes=passes,
            seed=3,
            rank=rank,
            ranks=ranks,
            drop_last=drop_last,
        )
        assert len(list(sampler)) == passes_in(
            samples, ranks=ranks, local=local, passes=passes, drop_last=drop_last
        )


# -- the loader ------------------------------------------------------------------------------------


def test_without_a_lease_the_batch_is_the_initial_one(job: Job) -> None:
    job.start(None)
    training = Training(30)
    training.register()
    assert len(training.loader) == 8
    for _ in synergy.epochs(2):
        training.epoch()
    assert [samples for samples, _ in training.steps] == [4] * 7 + [2] + [4] * 7 + [2]
    assert sorted(training.seen) == sorted([*range(30)] * 2)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_batch_follows_the_lease_within_an_epoch(job: Job, workers: int) -> None:
    board = started(job)
    training = Training(200, workers=workers)
    training.register()
    training.epoch({4: (board, {"batch_size": 32}), 20: (board, {"batch_size": 8})})
    assert sorted(training.seen) == list(range(200))
    sizes = [samples for samples, _ in training.steps]
    assert sizes == [4] * 5 + [32] * 2 + [8] * 14 + [4]
    assert len(training.loader) == 50  # 25 steps of two passes


def test_a_change_of_workers_and_batch_at_once_loses_nothing(job: Job) -> None:
    board = started(job, 1)
    training = Training(300, workers=1)
    training.register()
    changes: dict[int, LeaseChange] = {
        3: (board, {"batch_size": 16, "core_count": 3}),
        9: (board, {"batch_size": 64, "core_count": 1}),
        30: (board, {"core_count": 4}),
        31: (board, {"batch_size": 4}),
    }
    training.epoch(changes)
    training.epoch(changes)
    assert sorted(training.seen) == sorted([*range(300)] * 2)


def test_accumulated_passes_make_one_step_with_their_mean(job: Job) -> None:
    board = started(job)
    board.write_lease(lease(2, batch_size=20))
    training = Training(50, scaling="none")
    training.register()
    training.epoch()
    assert [samples for samples, _ in training.steps] == [20, 20, 10]
    for number, (samples, used) in enumerate(training.steps):
        part = training.seen[number * 20 : number * 20 + samples]
        passes = -(-samples // 4)
        means = []
        for at in range(passes):
            own = part[at * samples // passes : (at + 1) * samples // passes]
            means.append(sum(own) / len(own))
        assert used == pytest.approx(sum(means) / passes)
    assert training.adaptive.steps == 3


def test_a_program_that_said_nothing_keeps_its_batch(job: Job) -> None:
    board = started(job)
    board.write_lease(lease(2, batch_size=32))
    loader = DataLoader(Numbers(40), batch_size=4, shuffle=True)
    synergy.register()
    assert [len(batch) for batch in loader] == [4] * 10


def test_an_epoch_goes_on_after_stops_with_other_batches(job: Job) -> None:
    seen: list[int] = []
    sizes: list[int] = []
    for batch_size, passes in ((32, 9), (8, 5), (64, 17), (4, 3), (12, None)):
        board = started(job)
        board.write_lease(lease(2, batch_size=batch_size))
        training = Training(250, workers=1)
        training.register()
        try:
            for number, batch in enumerate(training.loader, 1):
                training.one_pass(batch)
                if number == passes:
                    stop(board)
        except LeaseEnded:
            pass
        seen += training.seen
        sizes += [samples for samples, _ in training.steps]
        # Stopped between steps, never with gradients that no step has used.
        assert sum(samples for samples, _ in training.steps) == len(training.seen)
    assert sorted(seen) == list(range(250))
    assert sizes[:2] == [32, 32] and sizes[2:5] == [8] * 3 and sizes[5:7] == [64, 64]


def test_statistics_progress_and_batch_are_in_the_checkpoint(job: Job) -> None:
    board = started(job)
    board.write_lease(lease(2, batch_size=16))
    training = Training(160)
    training.register()
    with pytest.raises(LeaseEnded):
        for number, batch in enumerate(training.loader):
            training.one_pass(batch)
            if number == 21:
                stop(board)
    kept = training.adaptive.state_dict()
    assert kept["meter"]["parted"][2] > 0 and kept["progress"] > 6
    started(job)
    again = Training(160)
    again.register()
    assert again.adaptive.state_dict() == kept
    assert again.adaptive.statistics == training.adaptive.statistics


# -- what cannot be done ---------------------------------------------------------------------------


def test_what_is_not_registered_is_missed(job: Job) -> None:
    job.start()
    training = Training(20)
    synergy.register(model=training.model)
    with pytest.raises(ConfigError, match="adaptive=adaptive"):
        training.epoch()


def test_a_loader_with_an_order_of_its_own_is_refused(job: Job) -> None:
    job.start()
    stream: IterableDataset[int] = Stream(20)
    weight = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="sampler or data set of its own"):
        synergy.adaptive(weight, optimizer, DataLoader(stream, batch_size=2), batch=(2, 4))


def test_a_closure_is_refused(job: Job) -> None:
    job.start()
    training = Training(20)
    with pytest.raises(ConfigError, match="closure"):
        training.optimizer.step(lambda: 1.0)
