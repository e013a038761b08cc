"""DALI's pipelines read files through the job's data cache: the right ones, once an epoch."""

from __future__ import annotations

import gc
import pickle
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")

from dali_pipelines import SAMPLES, Job, Values, write_files
from hypothesis import given
from hypothesis import strategies as st
from nvidia.dali import pipeline_def
from nvidia.dali.plugin.pytorch import DALIGenericIterator

import slurm_synergy.jobside as synergy
from slurm_synergy.errors import ConfigError
from slurm_synergy.jobside import CachedFiles, minio_job
from slurm_synergy.jobside import session as session_module


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("SYNERGY_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("SYNERGY_CACHE_MIB", "1")
    monkeypatch.setattr(minio_job, "_cache", None)
    yield Job(tmp_path, monkeypatch)
    if minio_job._cache is not None:
        minio_job._cache.close()
    signal.signal(signal.SIGTERM, handler)
    session_module._session = None


@pipeline_def
def cached(source: CachedFiles, parallel: bool) -> Any:
    """Contents and labels as they are."""
    return source.nodes(parallel=parallel)


def _loader(source: CachedFiles, *, parallel: bool = False, save: bool = True) -> Any:
    pipe = cached(
        source, parallel, batch_size=source.batch_size, num_threads=1, device_id=None, seed=1,
        enable_checkpointing=save,
    )  # fmt: skip
    return DALIGenericIterator(pipe, ["content", "label"], auto_reset=True)


def _labels(batch: Any) -> list[int]:
    (part,) = batch
    labels = [int(label) for label in part["label"].ravel()]
    assert part["content"].tolist() == [[label] * 4 for label in labels]
    return labels


@pytest.mark.parametrize("parallel", [False, True])
def test_files_come_through_the_cache_and_a_stopped_job_continues(
    job: Job, parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make() -> Any:
        gc.collect()  # pipelines of before must not end in a child that is forked
        source = CachedFiles(job.files, batch_size=4, shuffle=True, seed=3)
        return _loader(source, parallel=parallel)

    job.start()
    # Held from here on: the workers of a pipeline may be the only ones that use it, and where all
    # of these have ended, the next ones compare each item with its file before they believe it.
    cache = minio_job.job_cache().store
    found: list[tuple[int, int]] = []
    for stop_at in (8, -1):
        loader = make()
        synergy.register(values=Values())
        synergy.resume()
        try:
            for epoch in synergy.epochs(3):
                for number, batch in enumerate(loader, 1):
                    found += [(epoch, label) for label in _labels(batch)]
                    if epoch == 1 and number == stop_at - 6:
                        job.stop()
        except synergy.LeaseEnded:
            job.start()
        del loader
    for epoch in range(3):
        assert sorted(label for at, label in found if at == epoch) == list(range(SAMPLES))
    orders = [tuple(label for at, label in found if at == epoch) for epoch in range(3)]
    assert len(set(orders)) == 3
    assert cache is not None and cache.head.items == SAMPLES
    # What the cache holds is not opened again.
    for path in job.files[1:]:
        Path(path).unlink()
    assert sorted(label for batch in make() for label in _labels(batch)) == list(range(SAMPLES))


def test_without_a_cache_the_files_are_read(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNERGY_CACHE", "0")
    job.start()
    source = CachedFiles(job.files, [number % 5 for number in range(SAMPLES)], batch_size=4)
    labels = [int(label) for (part,) in _loader(source) for label in part["label"]]
    assert labels == [number % 5 for number in range(SAMPLES)]
    assert not list(Path(job.files[0]).parent.parent.glob("synergy-cache-*"))


def test_labels_number_the_folders_as_dalis_reader_does(tmp_path: Path) -> None:
    for name, count in (("b", 2), ("a", 3)):
        write_files(tmp_path / name, count)
    (tmp_path / "list.txt").touch()
    source = CachedFiles.from_folders(tmp_path, batch_size=2)
    assert [Path(path).parent.name for path in source.files] == ["a"] * 3 + ["b"] * 2
    assert source.labels == [0, 0, 0, 1, 1] and len(source) == 3


@given(
    files=st.integers(1, 40),
    shards=st.integers(1, 4),
    batch=st.integers(1, 9),
    last=st.sampled_from(["partial", "fill", "drop"]),
    shuffle=st.booleans(),
    seed=st.integers(0, 9),
)
def test_shards_share_each_epoch_out(
    files: int, shards: int, batch: int, last: str, shuffle: bool, seed: int
) -> None:
    shards = min(shards, files)
    sources = [
        CachedFiles(
            [str(number) for number in range(files)], batch_size=batch, shuffle=shuffle,
            seed=seed, shard_id=shard, num_shards=shards, last_batch=last,
        )
        for shard in range(shards)
    ]  # fmt: skip
    for epoch in (0, 1):
        seen: Counter[int] = Counter()
        for original in sources:
            source, again = (pickle.loads(pickle.dumps(original)) for _ in range(2))
            source._contents = again._contents = lambda chosen: chosen  # type: ignore[method-assign]
            sizes = []
            for number in range(len(source)):
                info = SimpleNamespace(iteration=number, epoch_idx=epoch)
                chosen, labels = source(info)
                assert again(info)[0] == chosen and [int(label[0]) for label in labels] == chosen
                seen.update(chosen)
                sizes.append(len(chosen))
            with pytest.raises(StopIteration):
                source(SimpleNamespace(iteration=len(source), epoch_idx=epoch))
            assert all(size == batch for size in sizes[: -1 if last == "partial" else None])
        if last == "partial":
            assert seen == Counter(range(files))
        if last == "fill":
            assert set(seen) == set(range(files))
        if last != "partial":
            assert len({len(source) for source in sources}) == 1
        if last == "drop":
            assert max(seen.values(), default=1) == 1


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"files": []}, "0 files"),
        ({"batch_size": 0}, "batches of 0"),
        ({"shard_id": 2, "num_shards": 2}, "shard 2 of 2"),
        ({"labels": [1]}, "1 labels for 2 files"),
        ({"last_batch": "wrap"}, "one of partial, fill, drop"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CachedFiles(**{"files": ["a", "b"], "batch_size": 1, **wrong})
