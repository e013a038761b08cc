"""The lease-aware DataLoader, in this process, with real workers."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess import lease
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torchjob import Job, Noise, Numbers, Stream, Values, Workers, as_list, flat, stop

import slurm_synergy.jobside as synergy
from slurm_synergy.errors import CheckpointError, ConfigError
from slurm_synergy.jobside import session as session_module
from slurm_synergy.jobside import torch_loader

# -- what a program sees that knows nothing of us -------------------------------------------------


def test_without_a_lease_a_loader_is_exactly_pytorchs(job: Job) -> None:
    job.start(None)
    loader = DataLoader(Numbers(20), batch_size=4, shuffle=True)
    assert type(iter(loader)).__module__ == "torch.utils.data.dataloader"


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unregistered_program_sees_pytorchs_own_order_and_generator(
    job: Job, workers: int
) -> None:
    def run() -> tuple[list[int], float]:
        loader = DataLoader(Numbers(40), batch_size=4, shuffle=True, num_workers=workers)
        order = flat(loader) + flat(loader)
        return order, float(torch.rand(1))

    job.start(None)
    plain = run()
    job.start(1 + workers)
    assert run() == plain


def test_a_loader_remains_a_dataloader(job: Job) -> None:
    job.start()

    class Mine(DataLoader[int]):
        """A subclass with an iteration of its own."""

        def __iter__(self) -> Any:
            return iter([list(batch) for batch in super().__iter__()])

    loader = Mine(Numbers(6), batch_size=2, shuffle=True, collate_fn=as_list)
    assert isinstance(loader, DataLoader)
    assert sorted(flat(loader)) == list(range(6))
    assert len(loader) == 3
    with pytest.raises(ValueError, match="batch_size attribute should not be set"):
        loader.batch_size = 3


def test_loaders_can_be_pickled_and_made_anew_from_their_attributes(job: Job) -> None:
    job.start()
    loader = DataLoader(Numbers(6), batch_size=2, shuffle=True)
    assert sorted(flat(pickle.loads(pickle.dumps(loader)))) == list(range(6))
    assert sorted(flat(copy.copy(loader))) == list(range(6))
    again = DataLoader(loader.dataset, batch_size=loader.batch_size, sampler=loader.sampler)
    assert sorted(flat(again)) == list(range(6))


def test_a_user_who_asks_for_no_workers_gets_none(job: Job) -> None:
    job.start(8)
    loader = DataLoader(Workers(4), batch_size=2, shuffle=True, collate_fn=as_list)
    assert {who[1] for batch in loader for who in batch} == {0}


# -- workers ---------------------------------------------------------------------------------------


def test_workers_get_the_granted_cpus_and_default_signals(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted = os.sched_getaffinity(0)
    monkeypatch.setenv("SYNERGY_GRANTED_CPUS", ",".join(map(str, sorted(granted))))
    job.start(2)
    synergy.register(values=Values())
    loader = DataLoader(Workers(8), batch_size=2, shuffle=True, num_workers=1, collate_fn=as_list)
    iterator = iter(loader)
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # ours, in this process
    who = next(iterator)
    os.sched_setaffinity(0, {min(granted)})  # as some imported libraries do
    try:
        who = [entry for batch in loader for entry in batch]
    finally:
        os.sched_setaffinity(0, granted)
    assert {width for *_, width, _ in who} == {len(granted)}
    assert {default for *_, default in who} == {1}


def test_keep_keeps_the_users_number(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNERGY_WORKERS", "keep")
    job.start(3)
    loader = DataLoader(Workers(4), batch_size=2, shuffle=True, num_workers=1, collate_fn=as_list)
    assert {who[1] for batch in loader for who in batch} == {1}


def test_the_worker_count_changes_within_an_epoch_without_loss(job: Job) -> None:
    board = job.start(1)
    assert board is not None
    synergy.register(values=Values())
    loader = DataLoader(Workers(60), batch_size=2, shuffle=True, num_workers=1, collate_fn=as_list)
    seen, counts = [], []
    for number, batch in enumerate(loader):
        seen.extend(index for index, *_ in batch)
        counts.append(batch[0][1])
        if number in (5, 15):
            board.write_lease(lease(3 if number == 5 else 1))
    assert sorted(seen) == list(range(60))
    assert counts[0] == 1 and 3 in counts and counts[-1] == 1
    # Exactly the order of an undisturbed epoch.
    job.start(None)
    reference = DataLoader(Numbers(60), batch_size=2, shuffle=True)
    synergy.register(values=Values())
    assert flat(reference) == seen


def test_a_lease_of_the_same_size_restarts_no_worker(job: Job) -> None:
    board = job.start(2)
    assert board is not None
    loader = DataLoader(Workers(40), batch_size=2, shuffle=True, num_workers=1, collate_fn=as_list)
    pids = set()
    for batch in loader:
        pids.add(batch[0][2])
        board.write_lease(lease(2, mem_mib=5, generation=len(pids)))
    assert len(pids) == 2


def test_persistent_workers_persist_and_follow_the_lease(job: Job) -> None:
    board = job.start(2)
    assert board is not None
    synergy.register(values=Values())
    loader = DataLoader(
        Workers(20),
        batch_size=2,
        shuffle=True,
        num_workers=1,
        collate_fn=as_list,
        persistent_workers=True,
    )
    epochs = [[who for batch in loader for who in batch] for _ in range(2)]
    assert {pid for _, _, pid, *_ in epochs[0]} == {pid for _, _, pid, *_ in epochs[1]}
    assert [i for i, *_ in epochs[0]] != [i for i, *_ in epochs[1]]
    board.write_lease(lease(1))
    third = [who for batch in loader for who in batch]
    assert sorted(i for i, *_ in third) == list(range(20))
    assert {workers for _, workers, *_ in third} == {1}


def test_other_loaders_only_take_over_the_worker_count(job: Job) -> None:
    job.start(3)
    synergy.register(values=Values())
    DataLoader(Numbers(4), shuffle=True)
    training = DataLoader(Numbers(4), shuffle=True)  # the first one is gone: this is the primary
    validation = DataLoader(Workers(6), batch_size=2, num_workers=1, collate_fn=as_list)
    who = [entry for batch in validation for entry in batch]
    assert [index for index, *_ in who] == list(range(6))
    assert {workers for _, workers, *_ in who} == {3}
    assert session_module.current().step == 0
    list(training)
    assert session_module.current().step == 4


# -- stopping and continuing -----------------------------------------------------------------------


def incarnation(job: Job, loader: Any, *, cores: int, stop_after: int, epochs: int = 2) -> Values:
    """One life of a training; its values are (epoch, batch) of everything that it has seen."""
    board = job.start(cores)
    values = Values()
    synergy.register(values=values)
    synergy.resume()
    steps = 0
    made = loader()
    try:
        for epoch in synergy.epochs(epochs):
            for batch in made:
                values.values.append([epoch, [float(value) for value in batch]])
                steps += 1
                if steps == stop_after:
                    stop(board)
    except synergy.LeaseEnded as ended:
        assert ended.code == 85
        assert board is not None and board.read_report().checkpoint_done
    else:
        assert board is not None and not board.read_report().checkpoint_done
    return values


LOADERS = {
    "own": lambda: DataLoader(Noise(46), batch_size=4, shuffle=True, num_workers=2),
    "own-without-workers": lambda: DataLoader(Noise(46), batch_size=4, shuffle=True),
    "drop-last": lambda: DataLoader(
        Noise(46), batch_size=4, shuffle=True, drop_last=True, num_workers=1
    ),
    "sequential": lambda: synergy.primary(DataLoader(Noise(46), batch_size=4, num_workers=1)),
    "unbatched": lambda: DataLoader(
        Numbers(12), batch_size=None, sampler=RandomSampler(Numbers(12)), collate_fn=lambda x: [x]
    ),
    "weighted": lambda: DataLoader(
        Noise(46), batch_size=4, sampler=WeightedRandomSampler([1.0] * 46, 46), num_workers=1
    ),
    "batch-sampler": lambda: DataLoader(
        Noise(46),
        batch_sampler=torch.utils.data.BatchSampler(SequentialSampler(Numbers(46)), 4, False),
        num_workers=1,
    ),
    "stream": lambda: DataLoader(Stream(46), batch_size=4, num_workers=2),
}


@pytest.mark.parametrize("loader", LOADERS.values(), ids=LOADERS.keys())
def test_three_interruptions_change_nothing(
    job: Job, loader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = incarnation(job, loader, cores=1, stop_after=-1).values
    monkeypatch.setenv("SYNERGY_CHECKPOINT_DIR", str(tmp_path / "other"))
    steps = len(undisturbed)
    for cores, stop_after in ((2, 3), (1, 2), (3, steps // 2), (2, -1)):
        values = incarnation(job, loader, cores=cores, stop_after=stop_after).values
    assert values == undisturbed
    assert {epoch for epoch, _ in values} == {0, 1}


def test_each_sample_once_an_epoch_over_three_interruptions(job: Job) -> None:
    def loader() -> Any:
        return DataLoader(Numbers(50), batch_size=3, shuffle=True, num_workers=1)

    for cores, stop_after in ((2, 3), (1, 5), (3, 4), (2, -1)):
        values = incarnation(job, loader, cores=cores, stop_after=stop_after)
    for epoch in range(2):
        seen = [int(v) for e, batch in values.values if e == epoch for v in batch]
        assert sorted(seen) == list(range(50))


def test_a_stop_at_the_end_of_an_epoch_waits_for_the_next_one(job: Job) -> None:
    def loader() -> Any:
        return DataLoader(Numbers(8), batch_size=4, shuffle=True)

    assert len(incarnation(job, loader, cores=1, stop_after=2).values) == 2
    session = session_module.current()
    assert (session.epoch, session.epoch_samples, session.step) == (1, 0, 2)
    # After the last batch of all, training is over: there is nothing to stop.
    assert len(incarnation(job, loader, cores=1, stop_after=2).values) == 4
    report = job.boards[-1].read_report()
    assert (report.step, report.epoch, report.checkpoint_done) == (4, 2, False)


def test_an_epoch_that_is_left_early_is_over(job: Job) -> None:
    job.start(1)
    synergy.register(values=Values())
    loader = DataLoader(Numbers(20), batch_size=2, shuffle=True)
    firsts = []
    for epoch in synergy.epochs(3):
        for batch in loader:
            firsts.append(int(batch[0]))
            break
        assert session_module.current().epoch == epoch
    assert len(set(firsts)) > 1
    assert session_module.current().step == 3


def test_of_two_passes_at_once_the_later_one_counts(job: Job) -> None:
    job.start(1)
    synergy.register(values=Values())
    loader = DataLoader(Numbers(6), shuffle=True)
    pairs = list(zip(loader, loader, strict=True))
    assert sorted(int(first) for first, _ in pairs) == list(range(6))
    assert sorted(int(second) for _, second in pairs) == list(range(6))
    assert session_module.current().step <= 8


def test_the_report_says_what_happened(job: Job) -> None:
    board = job.start(1)
    assert board is not None
    synergy.register(values=Values())
    loader = DataLoader(Numbers(10), batch_size=4, shuffle=True)
    list(loader)
    report = board.read_report()
    assert (report.step, report.samples, report.epoch) == (3, 10, 1)
    assert report.heartbeat_monotonic_s > 0
    assert report.step_s > 0 and report.wait_s > 0


def test_an_unregistered_program_is_left_to_the_users_signal(job: Job) -> None:
    board = job.start(1)
    stop(board)
    assert board is not None
    loader = DataLoader(Numbers(10), batch_size=4, shuffle=True)
    assert sorted(flat(loader)) == list(range(10))
    report = board.read_report()
    assert report.step == 3 and report.heartbeat_monotonic_s == 0
    assert not report.checkpoint_done


def test_starting_anew_beside_checkpoints_is_refused(job: Job) -> None:
    def loader() -> Any:
        return DataLoader(Numbers(8), batch_size=2, shuffle=True)

    incarnation(job, loader, cores=1, stop_after=1)
    job.start(1)
    synergy.register(values=Values())
    with pytest.raises(CheckpointError, match="resume\\(\\) was not called"):
        list(loader())


def test_a_save_that_fails_lets_training_go_on(
    job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = job.start(1)
    assert board is not None
    synergy.register(values=Values())
    seen: list[int] = []
    for batch in DataLoader(Numbers(10), batch_size=2, shuffle=True):
        if not seen:
            (tmp_path / "checkpoints").touch()  # not a directory
            stop(board)
        seen.extend(int(value) for value in batch)
    assert sorted(seen) == list(range(10))
    assert not board.read_report().checkpoint_done
    assert capsys.readouterr().err.count("training goes on") == 1


def test_a_checkpoint_of_other_objects_is_refused(job: Job) -> None:
    incarnation(job, lambda: DataLoader(Numbers(8), shuffle=True), cores=1, stop_after=1)
    job.start(1)
    synergy.register(values=Values(), more=Values())
    with pytest.raises(CheckpointError, match="no state of more \\(it has values\\)"):
        synergy.resume()


def test_a_data_set_that_shrank_is_refused(job: Job) -> None:
    incarnation(job, lambda: DataLoader(Numbers(8), shuffle=True), cores=1, stop_after=5)
    with pytest.raises(Exception, match="did the data set change"):
        incarnation(job, lambda: DataLoader(Numbers(3), shuffle=True), cores=1, stop_after=-1)


def test_saves_by_step_count_happen_at_boundaries(job: Job, tmp_path: Path) -> None:
    job.start(1)
    synergy.register(values=Values())
    synergy.save_every(steps=3)
    list(DataLoader(Numbers(20), batch_size=2, shuffle=True))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-000000000006", "step-000000000009"]


def test_saves_by_time_happen_without_being_asked(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNERGY_CHECKPOINT_INTERVAL_S", "0.000001")
    job.start(1)
    synergy.register(values=Values())
    list(DataLoader(Numbers(6), batch_size=2, shuffle=True))
    assert (tmp_path / "checkpoints" / "step-000000000002").is_dir()


# -- seeds and ranks -------------------------------------------------------------------------------


def _order(job: Job, seed: int, **loader: Any) -> list[int]:
    job.start(None, seed=seed)
    made = DataLoader(Numbers(30), batch_size=5, **loader)
    synergy.register(values=Values())
    return flat(made)


def test_the_order_follows_the_users_seed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _order(job, 1, shuffle=True) == _order(job, 1, shuffle=True)
    assert _order(job, 1, shuffle=True) != _order(job, 2, shuffle=True)
    seeded = [torch.Generator().manual_seed(5) for _ in range(2)]
    assert _order(job, 1, shuffle=True, generator=seeded[0]) == _order(
        job, 2, shuffle=True, generator=seeded[1]
    )
    monkeypatch.setenv("SYNERGY_SEED", "4")
    assert _order(job, 1, shuffle=True) == _order(job, 2, shuffle=True)
    monkeypatch.setenv("SYNERGY_SEED", "four")
    with pytest.raises(ConfigError, match="SYNERGY_SEED = 'four'"):
        _order(job, 1, shuffle=True)


@pytest.mark.parametrize("samples", [20, 23, 24])
def test_ranks_of_a_distributed_sampler_share_an_epoch(job: Job, samples: int) -> None:
    seen, lengths = [], []
    for rank in range(3):
        job.start(None, seed=rank)  # ranks are often seeded differently
        data = Numbers(samples)
        sampler: DistributedSampler[int] = DistributedSampler(data, num_replicas=3, rank=rank)
        loader = DataLoader(data, batch_size=2, sampler=sampler)
        synergy.register(values=Values())
        batches = list(loader)
        lengths.append((len(batches), len(loader)))
        seen.extend(flat(batches))
    assert set(seen) == set(range(samples))
    assert len(set(lengths)) == 1 and lengths[0][0] == lengths[0][1]


def test_a_failure_of_ours_leaves_an_unregistered_loader_as_it_is(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job.start(1)

    def broken(*_args: Any) -> Any:
        raise RuntimeError("broken")

    monkeypatch.setattr(torch_loader, "Pass", broken)
    monkeypatch.setattr(torch_loader, "_complained", False)
    loader = DataLoader(Numbers(10), batch_size=4, shuffle=True)
    for _ in range(2):
        assert sorted(flat(loader)) == list(range(10))
    assert capsys.readouterr().err.count("used as it is: RuntimeError: broken") == 1
