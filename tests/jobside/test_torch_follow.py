"""Loader workers follow the lease: their number, CPUs and threads, with real processes.

No sample is lost or repeated, and none is in another place than without a change of the lease.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from inprocess import lease
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SequentialSampler,
    get_worker_info,
)
from torchjob import Job, Numbers, Stream, Values, Workers, as_list

import slurm_synergy.jobside as synergy
from slurm_synergy.errors import ConfigError
from slurm_synergy.jobside import binding, torch_workers
from slurm_synergy.jobside.board import Board, LeaseView
from slurm_synergy.jobside.sampler import epoch_order
from slurm_synergy.jobside.torch_workers import (
    NEVER_S,
    WorkerInit,
    change_due_s,
    limit_threads,
)


class Loose(Workers):
    """Who fetched a sample, without a collate function that keeps the tuples."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)[:2]


class Threads(Numbers):
    """Tells how many threads the libraries of this worker would use."""

    def __getitem__(self, index: int) -> Any:
        from threadpoolctl import threadpool_info

        pools = [pool["num_threads"] for pool in threadpool_info()]
        return torch.get_num_threads(), max(pools), os.environ["OMP_NUM_THREADS"]


def dicts(batch: list[Any]) -> dict[str, list[Any]]:
    """A collate function of the program's own."""
    return {"index": [index for index, *_ in batch], "workers": [who[1] for who in batch]}


def started(job: Job, cores: int) -> Board:
    board = job.start(cores)
    assert board is not None
    return board


def follow(board: Board, loader: Any, leases: dict[int, int]) -> tuple[list[int], list[int]]:
    """One epoch: (indices in order, worker count of each batch); ``leases``: batch -> cores."""
    seen: list[int] = []
    counts: list[int] = []
    for number, batch in enumerate(loader):
        seen.extend(index for index, *_ in batch)
        counts.append(batch[0][1])
        if number in leases:
            board.write_lease(lease(leases[number], generation=number))
    return seen, counts


# -- the rule --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "wanted", "due_s"),
    [
        (4, 4, NEVER_S),
        (1, 2, 10.0),
        (2, 1, 10.0),
        (4, 9, 10.0),
        (9, 4, 10.0),
        (4, 7, 11.0),  # cores would lie idle, but not for long
        (2, 3, 11.0),
        (8, 9, 11.0),
        (23, 24, 70.0),  # 24 new workers for one more core
        (7, 4, NEVER_S),  # these share the cores that are left
        (3, 2, NEVER_S),
    ],
)
def test_within_an_epoch_the_number_follows_when_it_is_far_off(
    workers: int, wanted: int, due_s: float
) -> None:
    assert change_due_s(workers, wanted, 10.0) == due_s


def test_a_smaller_share_waits_for_the_next_epoch(job: Job) -> None:
    board = started(job, 3)
    loader = DataLoader(Workers(40), batch_size=2, shuffle=True, num_workers=1, collate_fn=as_list)
    seen, counts = follow(board, loader, {2: 2})
    assert sorted(seen) == list(range(40)) and set(counts) == {3}
    seen, counts = follow(board, loader, {})
    assert sorted(seen) == list(range(40)) and set(counts) == {2}


@pytest.mark.parametrize(("settled_s", "last"), [(3600.0, 2), (0.0, 3)])
def test_a_slightly_larger_share_is_used_once_it_has_stood(
    job: Job, monkeypatch: pytest.MonkeyPatch, settled_s: float, last: int
) -> None:
    monkeypatch.setattr(torch_workers, "_SETTLED_AFTER_S", settled_s)
    board = started(job, 2)
    synergy.register(values=Values())
    loader = DataLoader(Workers(60), batch_size=2, shuffle=True, num_workers=1, collate_fn=as_list)
    seen, counts = follow(board, loader, {2: 3})
    assert sorted(seen) == list(range(60)) and (counts[0], counts[-1]) == (2, last)
    assert set(follow(board, loader, {})[1]) == {3}


def test_a_share_that_does_not_last_changes_nothing(job: Job) -> None:
    board = started(job, 2)
    loader = DataLoader(Workers(40), batch_size=2, shuffle=True, num_workers=1, collate_fn=as_list)
    seen, counts = follow(board, loader, {2: 3, 3: 2})
    assert sorted(seen) == list(range(40)) and set(counts) == {2}


# -- nothing is lost or repeated -------------------------------------------------------------------


@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 4),
    drop_last=st.booleans(),
    persistent=st.booleans(),
    registered=st.booleans(),
    prefetch=st.integers(1, 3),
    first=st.integers(1, 3),  # each worker is a fork of all of this process
    leases=st.lists(
        st.dictionaries(st.integers(0, 20), st.integers(1, 3), max_size=2), min_size=2, max_size=2
    ),
)
@example(  # fewer persistent workers in the next epoch
    samples=4,
    batch_size=1,
    drop_last=False,
    persistent=True,
    registered=False,
    prefetch=1,
    first=3,
    leases=[{0: 2}, {}],
)
@settings(max_examples=9, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_leases_at_any_time_change_no_sample_of_two_epochs(
    samples: int,
    batch_size: int,
    drop_last: bool,
    persistent: bool,
    registered: bool,
    prefetch: int,
    first: int,
    leases: list[dict[int, int]],
) -> None:
    def loader(workers: int) -> DataLoader[Any]:
        return DataLoader(
            Workers(samples),
            batch_size=batch_size,
            shuffle=True,
            drop_last=drop_last,
            collate_fn=as_list,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=persistent and workers > 0,
        )

    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_workers, "_SETTLED_AFTER_S", 0.0)
        job = Job(Path(place), patch)
        board = started(job, first)
        if registered:
            synergy.register(values=Values())
        made = loader(1)
        got = [follow(board, made, changes)[0] for changes in leases]
        if registered:
            whole = samples - samples % batch_size if drop_last else samples
            orders = [epoch_order(samples, seed=7, epoch=epoch).tolist() for epoch in range(2)]
            assert got == [order[:whole] for order in orders]
        else:
            job.start(None)  # PyTorch's own order, with the same seed
            plain = loader(1)
            assert got == [[index for batch in plain for index, *_ in batch] for _ in range(2)]


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_workers_follow_within_an_epoch_with_every_start_method(job: Job, method: str) -> None:
    if method == "forkserver":  # else each worker takes seconds to import torch
        multiprocessing.set_forkserver_preload(["torch.utils.data"])
    board = started(job, 1)
    synergy.register(values=Values())
    loader = DataLoader(
        Workers(24),
        batch_size=2,
        shuffle=True,
        num_workers=1,
        collate_fn=as_list,
        multiprocessing_context=method,
    )
    seen, counts = follow(board, loader, {1: 2})
    assert seen == epoch_order(24, seed=7, epoch=0).tolist()
    assert (counts[0], counts[-1]) == (1, 2)


def _sampler_of_rank(rank: int) -> Callable[[], DataLoader[Any]]:
    def make() -> DataLoader[Any]:
        data = Workers(100)
        sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=2, rank=rank)
        return DataLoader(data, 2, sampler=sampler, num_workers=1, collate_fn=as_list)

    return make


KINDS: dict[str, Callable[[], DataLoader[Any]]] = {
    "rank-0-of-2": _sampler_of_rank(0),
    "rank-1-of-2": _sampler_of_rank(1),
    "batch-sampler": lambda: DataLoader(
        Workers(40),
        batch_sampler=BatchSampler(SequentialSampler(Numbers(40)), 2, False),
        num_workers=1,
        collate_fn=as_list,
    ),
    "default-collate": lambda: DataLoader(Loose(40), 2, shuffle=True, num_workers=1),
    "own-collate": lambda: DataLoader(
        Workers(40), 2, shuffle=True, num_workers=1, collate_fn=dicts
    ),
    "persistent-own-collate": lambda: DataLoader(
        Workers(40), 2, shuffle=True, num_workers=1, collate_fn=dicts, persistent_workers=True
    ),
}


def _indices_and_workers(batch: Any) -> tuple[list[int], int]:
    if isinstance(batch, dict):
        return batch["index"], batch["workers"][0]
    if torch.is_tensor(batch[0]):  # PyTorch's collation of tuples
        return batch[0].tolist(), int(batch[1][0])
    return [index for index, *_ in batch], batch[0][1]


@pytest.mark.parametrize("registered", [True, False], ids=["registered", "plain"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_every_kind_of_loader_follows_without_loss(
    job: Job, kind: Callable[[], DataLoader[Any]], registered: bool
) -> None:
    def epoch(leases: dict[int, int]) -> tuple[list[list[int]], list[int]]:
        board = started(job, 1)
        if registered:
            synergy.register(values=Values())
        loader = synergy.primary(kind())
        batches, counts = [], []
        for number, batch in enumerate(loader):
            indices, workers = _indices_and_workers(batch)
            batches.append(indices)
            counts.append(workers)
            if number in leases:
                board.write_lease(lease(leases[number]))
        return batches, counts

    plain, counts = epoch({})
    assert set(counts) == {1}
    followed, counts = epoch({3: 3, 8: 1})
    assert followed == plain
    assert 3 in counts and counts[-1] == 1
    seen = [index for batch in followed for index in batch]
    assert len(seen) == len(set(seen))


def test_a_stream_is_split_among_the_programs_own_number_of_workers(job: Job) -> None:
    board = started(job, 4)
    synergy.register(values=Values())
    loader = synergy.primary(DataLoader(Stream(41), batch_size=2, num_workers=2))
    for _epoch in range(2):
        seen: list[int] = []
        for number, batch in enumerate(loader):
            seen.extend(batch.tolist())
            if number in (1, 4):
                board.write_lease(lease(1 if number == 1 else 8))
        assert sorted(seen) == list(range(41))


def test_pinning_memory_without_an_accelerator_falls_back_as_pytorch_does(job: Job) -> None:
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator: memory is really pinned")

    def epoch() -> tuple[list[float], set[str]]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loader = DataLoader(
                Numbers(20), batch_size=2, shuffle=True, num_workers=1, pin_memory=True
            )
            batches = list(loader)
        assert not any(batch.is_pinned() for batch in batches)
        return [int(i) for batch in batches for i in batch], {str(w.message) for w in caught}

    job.start(None)
    order, warned = epoch()
    started(job, 1)
    assert epoch() == (order, warned)
    assert any("pin_memory" in text for text in warned)


def test_a_generator_of_the_programs_own_is_not_moved_by_new_workers(job: Job) -> None:
    def two_epochs(leases: dict[int, int]) -> list[list[int]]:
        board = started(job, 1)
        generator = torch.Generator().manual_seed(3)
        loader = DataLoader(
            Workers(40), 2, shuffle=True, num_workers=1, collate_fn=as_list, generator=generator
        )
        # Back to the first lease before the next epoch, whose workers draw a seed in any case.
        return [follow(board, loader, leases)[0] for _ in range(2)]

    assert two_epochs({2: 3, 9: 1}) == two_epochs({})


@pytest.mark.parametrize("persistent", [True, False])
def test_other_loaders_follow_when_their_next_pass_begins(job: Job, persistent: bool) -> None:
    board = started(job, 2)
    synergy.register(values=Values())
    training = DataLoader(Numbers(4), shuffle=True)
    validation = DataLoader(
        Workers(12), 2, num_workers=1, collate_fn=as_list, persistent_workers=persistent
    )
    passes = []
    for cores in (2, 2, 3, 1, 2):
        board.write_lease(lease(cores))
        who = [entry for batch in validation for entry in batch]
        assert [index for index, *_ in who] == list(range(12))
        assert {workers for _, workers, *_ in who} == {cores}
        passes.append({pid for _, _, pid, *_ in who})
    assert (passes[0] == passes[1]) is persistent
    assert not passes[1] & passes[2]
    assert len(training) == 4


# -- CPUs and threads ------------------------------------------------------------------------------


@pytest.fixture
def own_cpus() -> Iterator[list[int]]:
    """The CPUs of this process, which are given back."""
    before = os.sched_getaffinity(0)
    yield sorted(before)
    os.sched_setaffinity(0, before)


def test_workers_are_confined_at_once(job: Job, own_cpus: list[int]) -> None:
    if len(own_cpus) < 2:
        pytest.skip("this machine has one CPU: there is nothing to confine workers to")
    started(job, 2)
    loader = DataLoader(
        Workers(60), 1, shuffle=True, num_workers=1, collate_fn=as_list, prefetch_factor=1
    )
    widths = []
    for number, batch in enumerate(loader):
        if number == 5:  # as the launcher does when the lease changes
            # Not the tree of this process: a Slurm that serves other tests may be part of it.
            for worker in multiprocessing.active_children():
                assert worker.pid is not None
                binding.pin_tree(worker.pid, own_cpus[:1])
            os.sched_setaffinity(0, own_cpus[:1])
        widths.append(batch[0][3])
    # At most what each worker had under way when it happened, and what it had fetched ahead.
    assert widths[0] == len(own_cpus) and set(widths[10:]) == {1}


def test_a_worker_that_starts_late_takes_the_lease_of_that_moment(
    tmp_path: Path, own_cpus: list[int]
) -> None:
    if len(own_cpus) < 2:
        pytest.skip("this machine has one CPU: no lease can be larger than another")
    board = Board.create(tmp_path / "board", rank=0, ranks=1)
    board.write_lease(LeaseView(cores=tuple(own_cpus[:1])))
    init = WorkerInit(tuple(own_cpus[:1]), None, str(board.path))
    board.write_lease(LeaseView(cores=tuple(own_cpus[:2])))  # while the worker was starting
    os.sched_setaffinity(0, own_cpus[:1])
    init._take_cpus()
    assert os.sched_getaffinity(0) == set(own_cpus[:2])
    # What the launcher has widened already is not narrowed by an older lease.
    board.write_lease(LeaseView(cores=tuple(own_cpus[:1])))
    init._take_cpus()
    assert os.sched_getaffinity(0) == set(own_cpus[:2])


def test_without_a_board_a_worker_takes_the_cpus_it_was_told(own_cpus: list[int]) -> None:
    os.sched_setaffinity(0, own_cpus[:1])
    WorkerInit(tuple(own_cpus), None, "/nowhere/board")._take_cpus()
    assert os.sched_getaffinity(0) == set(own_cpus)


@pytest.mark.parametrize("threads", [1, 3])
def test_workers_use_one_thread_unless_told_otherwise(
    job: Job, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    if threads != 1:
        monkeypatch.setenv("SYNERGY_WORKER_THREADS", str(threads))
    monkeypatch.setenv("OMP_NUM_THREADS", "8")  # as the launcher sets it for the training process
    pytest.importorskip("sklearn")  # brings an OpenMP of its own, which PyTorch does not limit
    importlib.import_module("sklearn.utils._openmp_helpers")
    started(job, 1)
    loader = DataLoader(Threads(2), 1, shuffle=True, num_workers=1, collate_fn=as_list)
    for batch in loader:
        assert batch[0] == (threads, threads, str(threads))
    assert os.environ["OMP_NUM_THREADS"] == "8"


def many_threads(_worker: int) -> None:
    """A worker_init_fn of the program's own."""
    torch.set_num_threads(2)


def test_the_programs_own_worker_init_has_the_last_word(job: Job) -> None:
    started(job, 1)
    loader = DataLoader(
        Threads(2), 1, shuffle=True, num_workers=1, collate_fn=as_list, worker_init_fn=many_threads
    )
    assert {batch[0][0] for batch in loader} == {2}


def test_a_wrong_number_of_threads_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNERGY_WORKER_THREADS", "two")
    with pytest.raises(ConfigError, match=r"SYNERGY_WORKER_THREADS = 'two'.*whole number"):
        limit_threads()
    monkeypatch.setenv("SYNERGY_WORKER_THREADS", "keep")
    before = torch.get_num_threads()
    limit_threads()
    assert torch.get_num_threads() == before


ORPHAN = """
import multiprocessing, os, signal, sys
from slurm_synergy.jobside.torch_workers import end_quietly_with_parent

def work():
    end_quietly_with_parent()
    sys.excepthook(ValueError, ValueError("wrong"), None)
    sys.excepthook(ConnectionResetError, ConnectionResetError("early"), None)
    os.kill(os.getppid(), signal.SIGKILL)
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    sys.excepthook(ConnectionResetError, ConnectionResetError("late"), None)
    sys.excepthook(ValueError, ValueError("wrong again"), None)

if __name__ == "__main__":
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join()
"""


def test_a_worker_that_outlives_its_program_does_not_tell_of_broken_connections() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=60, check=False
    )
    told = done.stderr.splitlines()  # read to its end: the worker has ended too
    assert told == [
        "ValueError: wrong",
        "ConnectionResetError: early",
        "ValueError: wrong again",
    ]


def test_this_process_is_no_worker() -> None:
    assert get_worker_info() is None
