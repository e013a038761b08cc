"""DALI under a lease, with real pipelines on the CPU: nothing is lost, repeated or reordered."""

from __future__ import annotations

import contextlib
import gc
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")

from dali_pipelines import (
    SAMPLES,
    Counting,
    Job,
    Seen,
    Values,
    counted,
    numbers,
    seen,
    train,
)
from inprocess import lease
from nvidia.dali.plugin.pytorch import (
    DALIClassificationIterator,
    DALIGenericIterator,
    LastBatchPolicy,
)

import slurm_synergy.jobside as synergy
from slurm_synergy.errors import CheckpointError, ConfigError
from slurm_synergy.jobside import dali_pipeline
from slurm_synergy.jobside import session as session_module

FILL, DROP, PARTIAL = LastBatchPolicy.FILL, LastBatchPolicy.DROP, LastBatchPolicy.PARTIAL
OUTPUTS = ["content", "label", "noise"]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    handler = signal.getsignal(signal.SIGTERM)
    yield Job(tmp_path, monkeypatch)
    signal.signal(signal.SIGTERM, handler)
    session_module._session = None


def _pipe(job: Job, *, threads: int = 2, seed: int | None = 5, save: bool = True, **kw: Any) -> Any:
    return numbers(
        job.files, kw, batch_size=4, num_threads=threads, device_id=None, seed=seed,
        enable_checkpointing=save,
    )  # fmt: skip


def _loader(pipes: Any, **more: Any) -> Any:
    return DALIGenericIterator(pipes, OUTPUTS, **{"reader_name": "reader", **more})


def _resumed(job: Job, make: Any, epochs: int, cuts: list[int]) -> Seen:
    """All that incarnations see of ``make()``, each stopped when the job has seen that much."""
    found: Seen = []
    for cut in [*cuts, -1]:
        job.start()
        loader = make()
        synergy.register(values=Values())
        assert synergy.resume() is bool(cut != cuts[0])
        if cut < 0:
            return train(loader, epochs, found, at={})
        with pytest.raises(synergy.LeaseEnded) as end:
            train(loader, epochs, found, at={cut: job.stop})
        assert end.value.code == 85 and len(found) == cut
    raise AssertionError


def _uninterrupted(job: Job, make: Any, epochs: int) -> Seen:
    job.start(None)
    return train(make(), epochs, [], at={})


# (padded, shards, stick to the shard): the latter means something with shards only.
READERS = [
    (False, 1, False),
    (True, 1, False),
    (False, 2, False),
    (False, 2, True),
    (True, 2, True),
]


@pytest.mark.parametrize("save", [True, False], ids=["dali-checkpoint", "position"])
@pytest.mark.parametrize("auto", [False, True], ids=["reset", "auto-reset"])
@pytest.mark.parametrize(("padded", "shards", "stick"), READERS)
@pytest.mark.parametrize("policy", [FILL, DROP, PARTIAL])
def test_a_job_that_is_stopped_sees_what_an_uninterrupted_one_sees(
    job: Job, policy: Any, padded: bool, shards: int, stick: bool, auto: bool, save: bool
) -> None:
    def make() -> Any:
        pipe = _pipe(job, save=save, pad_last_batch=padded, num_shards=shards, stick_to_shard=stick)
        return _loader(pipe, last_batch_policy=policy, auto_reset=auto)

    expected = _uninterrupted(job, make, 4)
    assert len({epoch for epoch, *_ in expected}) == 4
    first = len([1 for epoch, *_ in expected if epoch == 0])
    # In the middle, at the last batch of an epoch but one, in the next epochs.
    cuts = [1, first - 1, first + 1, 3 * first - 1]
    cuts = sorted({cut for cut in cuts if 0 < cut < len(expected)})
    cuts = [cut for cut in cuts if expected[cut][0] == expected[cut - 1][0]]
    assert cuts and _resumed(job, make, 4, cuts) == expected


@pytest.mark.parametrize("save", [True, False], ids=["dali-checkpoint", "position"])
@pytest.mark.parametrize("policy", [FILL, DROP, PARTIAL])
def test_every_sample_comes_once_in_each_epoch(job: Job, policy: Any, save: bool) -> None:
    def make() -> Any:
        return _loader(
            _pipe(job, save=save, seed=None, pad_last_batch=True),
            last_batch_policy=policy,
            auto_reset=True,
        )

    found = _resumed(job, make, 3, [2, 8])
    for number in range(3):
        labels = [label for epoch, batch, _ in found if epoch == number for label in batch]
        if policy is PARTIAL:
            assert sorted(labels) == list(range(SAMPLES))
        if policy is FILL:  # the last sample again, to fill the batch
            assert sorted(set(labels)) == list(range(SAMPLES)) and len(labels) == 24
        if policy is DROP:
            assert len(set(labels)) == len(labels) == 20
    assert len({tuple(batch) for _, batch, _ in found}) > 12  # another order in each


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("policy", [FILL, DROP, PARTIAL])
def test_the_old_way_with_a_size_and_last_batch_padded(job: Job, policy: Any, padded: bool) -> None:
    def make() -> Any:
        pipe = _pipe(job, pad_last_batch=padded)
        with pytest.warns(Warning, match="set `reader_name`"):
            return DALIGenericIterator(
                pipe, OUTPUTS, size=SAMPLES, last_batch_padded=padded, last_batch_policy=policy
            )

    expected = _uninterrupted(job, make, 3)
    assert _resumed(job, make, 3, [3, 7]) == expected


@pytest.mark.parametrize("save", [True, False], ids=["dali-checkpoint", "position"])
def test_several_pipelines_of_one_iterator(job: Job, save: bool) -> None:
    def make() -> Any:
        pipes = [_pipe(job, save=save, num_shards=2, shard_id=shard) for shard in range(2)]
        return _loader(pipes, auto_reset=True)

    expected = _uninterrupted(job, make, 3)
    assert _resumed(job, make, 3, [2, 4]) == expected


@pytest.mark.parametrize("auto", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["after the loop", "in its last step"])
@pytest.mark.parametrize("save", [True, False], ids=["dali-checkpoint", "position"])
def test_a_checkpoint_at_the_end_of_an_epoch_continues_with_the_next(
    job: Job, save: bool, inside: bool, auto: bool
) -> None:
    def make() -> Any:
        return _loader(_pipe(job, save=save, pad_last_batch=True), auto_reset=auto)

    expected = _uninterrupted(job, make, 3)
    job.start()
    loader = make()
    synergy.register(values=Values())
    found: Seen = []
    for epoch in synergy.epochs(1):
        for batch in loader:
            found.append(seen(epoch, batch))
            if inside and len(found) == 6:
                synergy.save()
        if not inside:
            synergy.save()
    job.start()
    loader = make()
    synergy.register(values=Values())
    assert synergy.resume()
    assert train(loader, 3, found, at={}) == expected


def test_an_epoch_that_the_program_leaves_early_goes_on_as_dali_does_it(job: Job) -> None:
    def run(save_at: int) -> list[Any]:
        job.start(None if save_at < 0 else 2, name=f"early{save_at}")
        loader = _loader(_pipe(job, save=False), auto_reset=True)
        found: list[Any] = []
        if save_at < 0:
            for epoch in range(3):
                found += [seen(epoch, batch) for batch in itertools.islice(loader, 3)]
            return found
        for _ in range(2):
            synergy.register(values=Values())
            again = synergy.resume()
            with contextlib.nullcontext() if again else pytest.raises(synergy.LeaseEnded):
                for epoch in synergy.epochs(3):
                    left = 3 - session_module.current().epoch_batches
                    for batch in itertools.islice(loader, left):
                        found.append(seen(epoch, batch))
                        if len(found) == save_at and not again:
                            job.stop()
            if again:
                return found
            job.start(name=f"early{save_at}")
            loader = _loader(_pipe(job, save=False), auto_reset=True)
        raise AssertionError

    expected = run(-1)
    assert [run(at) for at in (1, 4, 8)] == [expected] * 3


# -- external sources, plain pipelines -----------------------------------------------------------


def _generator(batches: int) -> Any:
    def source() -> Iterator[Any]:
        for number in range(batches):
            yield Counting(batches)(number)

    return source


@pytest.mark.parametrize("kind", ["callable", "parallel", "generator"])
@pytest.mark.parametrize("auto", [False, True])
def test_an_external_source_continues(job: Job, kind: str, auto: bool) -> None:
    def make() -> Any:
        if kind == "parallel":
            # Pipelines of the incarnation before must not end in a child that is forked.
            gc.collect()
        generator = kind == "generator"
        more = {"cycle": "raise"} if generator else {"parallel": kind == "parallel"}
        pipe = counted(
            _generator(6) if generator else Counting(6), more, batch_size=4, num_threads=2, seed=5,
            device_id=None, enable_checkpointing=not generator,
        )  # fmt: skip
        return DALIGenericIterator(pipe, ["label", "noise"], auto_reset=auto)

    expected = _uninterrupted(job, make, 3)
    assert [batch[0] for _, batch, _ in expected] == [*range(6)] * 3
    assert _resumed(job, make, 3, [2, 7, 11]) == expected


@pytest.mark.parametrize("save", [True, False], ids=["dali-checkpoint", "position"])
def test_a_plain_pipeline_is_run_for_so_many_steps_an_epoch(job: Job, save: bool) -> None:
    def run(pipe: Any, found: list[Any], cut: int) -> list[Any]:
        for epoch in synergy.epochs(3):
            for outputs in synergy.run_pipeline(pipe, 6):
                found.append((epoch, outputs[1].as_array().ravel().tolist()))
                if len(found) == cut:
                    job.stop()
        return found

    job.start()
    expected = run(_pipe(job, save=save), [], -1)
    assert len(expected) == 18
    found: list[Any] = []
    for cut in (2, 10):
        job.start()
        pipe = _pipe(job, save=save)
        synergy.register(values=Values())
        synergy.resume()
        with pytest.raises(synergy.LeaseEnded):
            run(pipe, found, cut)
        assert len(found) == cut
    job.start()
    synergy.register(values=Values())
    assert synergy.resume()
    assert run(_pipe(job, save=save), found, -1) == expected


def test_plain_runs_are_steps_and_go_on_where_they_were(job: Job) -> None:
    def labels(pipe: Any, runs: int) -> list[Any]:
        return [pipe.run()[1].as_array().ravel().tolist() for _ in range(runs)]

    job.start(None)
    expected = labels(_pipe(job), 12)
    board = job.start()
    synergy.register(values=Values())
    pipe = _pipe(job)
    found = labels(pipe, 5)
    job.stop()
    with pytest.raises(synergy.LeaseEnded):
        pipe.run()
    assert board is not None and board.read_report().step == 5
    job.start()
    synergy.register(values=Values())
    synergy.resume()
    assert found + labels(_pipe(job), 7) == expected


def test_run_pipeline_wants_a_pipeline() -> None:
    with pytest.raises(ConfigError, match="takes a DALI pipeline, not a list"):
        synergy.run_pipeline([], 3)


# -- threads ---------------------------------------------------------------------------------------


def test_threads_are_those_of_the_lease_when_it_is_built(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.start(5)
    one, two = _pipe(job, threads=9), [_pipe(job, num_shards=2, shard_id=at) for at in range(2)]
    one.build()
    _loader(two)
    assert [one.num_threads, *(pipe.num_threads for pipe in two)] == [5, 2, 2]
    monkeypatch.setenv("SYNERGY_WORKERS", "keep")
    kept = _pipe(job, threads=9)
    kept.build()
    job.start(None)
    alone = _pipe(job, threads=7)
    alone.build()
    assert (kept.num_threads, alone.num_threads) == (9, 7)


def test_a_changed_lease_rebuilds_in_the_next_epoch_or_at_once_when_far_off(job: Job) -> None:
    job.start(None)
    expected = train(_loader(_pipe(job), auto_reset=True), 3, [], at={})
    board = job.start(4)
    assert board is not None
    pipe = _pipe(job)
    found: Seen = []
    threads: list[int] = []
    changes = {2: 6, 9: 1, 13: 2}
    loader = _loader(pipe, auto_reset=True)
    for epoch in range(3):
        for batch in loader:
            found.append(seen(epoch, batch))
            threads.append(pipe.num_threads)
            if len(found) in changes:
                board.write_lease(lease(changes[len(found)]))
    assert found == expected
    # 6 waits for the next epoch (it is not twice 4), 1 does not, 2 waits.
    assert threads == [4] * 6 + [6] * 3 + [1] * 3 + [1] * 1 + [1] * 5


def test_without_dalis_checkpoints_threads_stay_until_the_next_start(job: Job) -> None:
    board = job.start(4)
    assert board is not None
    pipe = _pipe(job, save=False)
    loader = _loader(pipe, auto_reset=True)
    for batch in loader:
        assert batch
        board.write_lease(lease(1))
    assert len([1 for _ in loader]) == 6 and pipe.num_threads == 4
    job.start(1)
    again = _pipe(job, save=False)
    again.build()
    assert again.num_threads == 1


# -- what a program sees that knows nothing of us --------------------------------------------------


@pytest.mark.parametrize("save", [True, False])
def test_an_unregistered_program_sees_dalis_own_order_and_its_steps_are_reported(
    job: Job, save: bool
) -> None:
    job.start(None)
    expected = train(_loader(_pipe(job, save=save), auto_reset=True), 3, [], at={})
    board = job.start(3)
    loader = _loader(_pipe(job, save=save), auto_reset=True)
    found: Seen = []
    for epoch in range(3):
        found += [seen(epoch, batch) for batch in loader]
    assert found == expected
    assert board is not None
    report = board.read_report()
    assert (report.step, report.samples, report.epoch) == (18, 72, 3)
    assert report.step_s > 0 and report.wait_s > 0 and report.heartbeat_monotonic_s == 0


def test_the_iterator_that_shuffles_trains_and_others_do_not_count(job: Job) -> None:
    board = job.start()
    assert board is not None
    validation = _loader(_pipe(job, random_shuffle=False), auto_reset=True)
    training = _loader(_pipe(job), auto_reset=True)
    assert len(list(validation)) == 6 and board.read_report().step == 0
    assert len(list(training)) == 6 and board.read_report().step == 6
    assert len(list(validation)) == 6 and board.read_report().step == 6
    synergy.primary(validation)
    list(validation)
    assert board.read_report().step == 12


def test_a_framework_that_counts_its_steps_is_not_counted_twice(job: Job) -> None:
    job.start()
    session = session_module.current()
    session.count_by_hook(step=3)
    assert len(list(_loader(_pipe(job), auto_reset=True))) == 6
    assert session.step == 3 and session.epoch == 0


def test_partial_batches_are_counted_as_what_they_are(job: Job) -> None:
    board = job.start()
    assert board is not None
    pipe = _pipe(job, pad_last_batch=True)
    loader = _loader(pipe, last_batch_policy=PARTIAL, auto_reset=True)
    list(loader)
    assert board.read_report().samples == SAMPLES


def test_a_classification_iterator_remains_one(job: Job) -> None:
    job.start()
    pipe = counted(Counting(3), {}, batch_size=4, num_threads=1, device_id=None)
    loader = DALIClassificationIterator(pipe)
    assert isinstance(loader, DALIClassificationIterator)
    assert [int(part[0]["data"][0][0]) for part in loader] == [0, 1, 2]


def test_the_end_of_an_epoch_without_a_reset_is_told_again_and_is_no_epoch(job: Job) -> None:
    board = job.start()
    assert board is not None
    loader = _loader(_pipe(job))
    assert len(list(loader)) == 6
    for _ in range(3):
        with pytest.raises(StopIteration):
            next(loader)
    assert board.read_report().epoch == 1


# -- what cannot be continued ----------------------------------------------------------------------


def test_a_checkpoint_of_other_pipelines_is_refused(job: Job) -> None:
    job.start()
    synergy.register(values=Values())
    with pytest.raises(synergy.LeaseEnded):
        train(_loader(_pipe(job), auto_reset=True), 2, [], at={2: job.stop})
    job.start()
    synergy.register(values=Values())
    synergy.resume()
    loader = _loader(_pipe(job, save=False), auto_reset=True)
    with pytest.raises(CheckpointError, match="build them so again"):
        next(loader)
    job.start()
    synergy.register(values=Values())
    synergy.resume()
    two = _loader([_pipe(job, num_shards=2, shard_id=at) for at in range(2)])
    with pytest.raises(CheckpointError, match="of 1 DALI pipeline"):
        next(two)


def test_a_checkpoint_before_the_first_batch_keeps_the_position(job: Job) -> None:
    def make() -> Any:
        return _loader(_pipe(job), auto_reset=True)

    expected = _uninterrupted(job, make, 2)
    job.start()
    synergy.register(values=Values())
    found: Seen = []
    with pytest.raises(synergy.LeaseEnded):
        train(make(), 2, found, at={2: job.stop})
    for _ in range(2):
        job.start()
        synergy.register(values=Values())
        synergy.resume()
        synergy.save()
    assert train(make(), 2, found, at={}) == expected


def test_a_release_without_what_rebuilding_needs_repeats_its_requests(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Any:
        return _loader(_pipe(job), auto_reset=True)

    expected = _uninterrupted(job, make, 3)
    monkeypatch.setitem(dali_pipeline._AS_NEW, "_of_another_release", None)
    assert _resumed(job, make, 3, [2, 8]) == expected
    board = job.start(4, name="other")
    assert board is not None
    pipe = _pipe(job)
    for number, _ in enumerate(_loader(pipe, auto_reset=True)):
        board.write_lease(lease(1 + number))
    assert pipe.num_threads == 4


def test_a_source_that_cannot_be_asked_again_must_be_unused_at_resume(job: Job) -> None:
    def make() -> Any:
        pipe = counted(
            _generator(6), {"cycle": "raise"}, batch_size=4, num_threads=1, device_id=None
        )
        return DALIGenericIterator(pipe, ["label", "noise"], auto_reset=True)

    job.start()
    synergy.register(values=Values())
    with pytest.raises(synergy.LeaseEnded):
        train(make(), 2, [], at={2: job.stop})
    job.start()
    loader = make()
    next(loader)
    synergy.register(values=Values())
    synergy.resume()
    with pytest.raises(CheckpointError, match="before the first batch"):
        next(loader)


def test_with_another_number_of_ranks_the_epoch_begins_again(
    job: Job, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job.start()
    synergy.register(values=Values())
    found: Seen = []
    with pytest.raises(synergy.LeaseEnded):
        train(_loader(_pipe(job), auto_reset=True), 2, found, at={2: job.stop})
    job.start()
    synergy.register(values=Values())
    synergy.resume()
    session_module.current().restored_extras["dali"]["ranks"] = 2
    again = train(_loader(_pipe(job), auto_reset=True), 1, [], at={})
    assert len(again) == 6 and again[:2] == found
    assert "epoch 0 begins again" in capsys.readouterr().err
