"""DALI's own file reader goes through the data cache, and gives exactly what it gave without."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")

import numpy as np
import nvidia.dali.fn as fn
import nvidia.dali.ops as ops
from dali_pipelines import SAMPLES, Job, Values
from nvidia.dali import Pipeline, pipeline_def
from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

import slurm_synergy.jobside as synergy
from slurm_synergy.jobside import minio_job
from slurm_synergy.jobside import session as session_module
from slurm_synergy.jobside.dali_listing import Unclear, listing
from slurm_synergy.jobside.data_told import read_told


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    handler = signal.getsignal(signal.SIGTERM)
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("SYNERGY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SYNERGY_CACHE_MIB", "1")
    monkeypatch.setattr(minio_job, "_cache", None)
    made = Job(tmp_path, monkeypatch)
    made.start()
    yield made
    if minio_job._cache is not None:
        minio_job._cache.close()
    signal.signal(signal.SIGTERM, handler)
    session_module._session = None


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Build and use a pipeline with DALI's own reader."""

    def run(step: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setenv("SYNERGY_CACHE", "0")
            return step()

    return run


@pipeline_def
def reading(reader: dict[str, Any], more: str = "") -> Any:
    """Contents, labels, and a random number, which belong to the same seeds as without us."""
    content, label = fn.readers.file(name="reader", **{"random_shuffle": True, **reader})
    if more == "source_info":
        return content, label, fn.get_property(content, key="source_info")
    return content, label, fn.random.uniform(range=(0, 1))


def make(reader: dict[str, Any], *, more: str = "", **options: Any) -> Any:
    given = {"batch_size": 4, "num_threads": 1, "device_id": None, "seed": 5, **options}
    pipe = reading(reader, more, **given)
    pipe.build()
    return pipe


def goes_through_cache(pipe: Any) -> bool:
    return bool(pipe.__dict__.get("_synergy_cached"))


def outputs(pipe: Any, runs: int = 16) -> list[Any]:
    found = []
    for _ in range(runs):
        batch = pipe.run()
        found.append([[np.asarray(sample).tolist() for sample in part] for part in batch])
        assert [str(part.dtype) for part in batch][:2] == [
            "DALIDataType.UINT8",
            "DALIDataType.INT32",
        ]
    return found


@pytest.mark.parametrize(
    "reader",
    [
        {},
        {"initial_fill": 3, "num_shards": 3, "shard_id": 1, "pad_last_batch": True, "seed": 9},
        {"num_shards": 2, "stick_to_shard": True, "dont_use_mmap": True, "labels": "own"},
        {"random_shuffle": False, "shuffle_after_epoch": True, "num_shards": 2, "shard_id": 1},
    ],
)
def test_samples_order_and_sizes_are_dalis(
    job: Job, plain: Callable[[Any], Any], reader: dict[str, Any]
) -> None:
    Path(job.files[3]).write_bytes(b"1")
    Path(job.files[4]).write_bytes(b"more than four")
    reader = {**reader, "files": job.files}
    if reader.get("labels") == "own":
        reader["labels"] = [7 * number - 50 for number in range(SAMPLES)]
    theirs = plain(lambda: make(reader))
    ours = make(reader)
    assert goes_through_cache(ours) and not goes_through_cache(theirs)
    assert ours.reader_meta() == theirs.reader_meta()
    assert ours.reader_meta("reader") == theirs.reader_meta("reader")
    assert outputs(ours) == outputs(theirs)
    told = read_told(job.board.path)
    assert told is not None and told.file_count == SAMPLES


def test_what_the_cache_holds_is_not_opened_again(job: Job) -> None:
    pipe = make({"files": job.files, "pad_last_batch": True})
    loader = DALIGenericIterator(
        pipe, ["content", "label", "noise"], reader_name="reader", auto_reset=True,
        last_batch_policy=LastBatchPolicy.PARTIAL,
    )  # fmt: skip
    for epoch in range(3):
        labels = [int(label) for (part,) in loader for label in part["label"].ravel()]
        assert sorted(labels) == list(range(SAMPLES))
        if epoch == 0:
            store = minio_job.job_cache().store
            assert store is not None and store.head.items == SAMPLES
            for path in job.files:
                Path(path).unlink()


def test_a_reader_that_is_a_class_as_well(job: Job, plain: Callable[[Any], Any]) -> None:
    class Old(Pipeline):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(4, 1, None, seed=5)
            self.input = ops.readers.File(files=job.files, random_shuffle=True)

        def define_graph(self) -> Any:
            return self.input(name="reader")

    ours, theirs = Old(), Old()
    plain(theirs.build)
    ours.build()
    assert goes_through_cache(ours) and outputs(ours) == outputs(theirs)


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_dalis_checkpoints_fit_with_and_without_the_cache(
    job: Job, plain: Callable[[Any], Any], first: str
) -> None:
    reader = {"files": job.files}
    theirs = plain(lambda: make(reader, enable_checkpointing=True))
    ours = make(reader, enable_checkpointing=True)
    for pipe in (ours, theirs):
        outputs(pipe, 8)
    checkpoint = ours.checkpoint()
    assert checkpoint == theirs.checkpoint()
    options = {"enable_checkpointing": True, "checkpoint": checkpoint}
    again = make(reader, **options) if first == "theirs" else plain(lambda: make(reader, **options))
    assert goes_through_cache(again) == (first == "theirs")
    assert outputs(again) == outputs(theirs)


@pytest.mark.parametrize("save", [True, False])
def test_a_stopped_job_continues_at_the_sample(job: Job, save: bool) -> None:
    found: list[tuple[int, int]] = []
    for stop_at in (3, -1):
        pipe = make({"files": job.files}, enable_checkpointing=save)
        assert goes_through_cache(pipe)
        loader = DALIGenericIterator(
            pipe, ["content", "label", "noise"], reader_name="reader", auto_reset=True,
            last_batch_policy=LastBatchPolicy.DROP,
        )  # fmt: skip
        synergy.register(values=Values())
        synergy.resume()
        try:
            for epoch in synergy.epochs(2):
                for number, (part,) in enumerate(loader, 1):
                    found += [(epoch, int(label)) for label in part["label"].ravel()]
                    if epoch == 0 and number == stop_at:
                        job.stop()
        except synergy.LeaseEnded:
            job.start()
    for epoch in range(2):
        labels = [label for at, label in found if at == epoch]
        assert len(labels) == len(set(labels)) == SAMPLES // 4 * 4


@pytest.mark.parametrize(
    ("reader", "options", "says"),
    [
        ({}, {"more": "source_info"}, "asks for the names of the files"),
        ({}, {"exec_dynamic": False}, "exec_dynamic"),
        ({"skip_cached_images": True}, {}, "skips what the decoder has kept"),
        ({"random_shuffle": False}, {}, ""),
    ],
)
def test_otherwise_the_reader_is_left_alone_with_one_line(
    job: Job, capsys: pytest.CaptureFixture[str], reader: Any, options: Any, says: str
) -> None:
    pipe = make({"files": job.files, **reader}, **options)
    assert not goes_through_cache(pipe)
    pipe.run()
    err = capsys.readouterr().err
    assert says in err and err.count("past the data cache") == bool(says)


def test_a_pipeline_to_be_serialized_is_the_programs(job: Job) -> None:
    pipe = reading({"files": job.files}, batch_size=4, num_threads=1, device_id=None)
    again = Pipeline.deserialize(pipe.serialize())
    assert not goes_through_cache(again) and len(again.run()) == 3


# -- which files ----------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name in ("b/2.JPG", "b/1.jpeg", "a-first/x.png", "a-first/.hidden.png", "a-first/y.txt",
                 "C/z.bmp", "C/deep/not.jpg", "é/ü.jpg", "top.jpg", "empty/note.md"):  # fmt: skip
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    (root / "b" / "link.jpg").symlink_to(root / "C" / "z.bmp")
    (root / "linked").symlink_to(root / "C", target_is_directory=True)
    (root / "list").write_text("b/2.JPG 5\n\nC/z.bmp\t 07 \r\na-first/y.txt 0")
    (root / "with space").mkdir()
    (root / "with space" / "a file.png").write_bytes(b"spaces")
    (root / "spaces").write_text("with space/a file.png 3\n")
    return root


@pytest.mark.parametrize(
    "reader",
    [
        {"file_root": "tree"},
        {"file_root": "tree", "case_sensitive_filter": True},
        {"file_root": "tree/", "file_filters": ["*.TXT", "z*"], "dir_filters": "[!x]*"},
        {"file_root": "tree", "file_filters": "*.TXT", "dir_filters": ["a*", "c"]},
        {"file_list": "tree/spaces"},
        {"file_list": "tree/list", "file_root": "tree"},
        {"files": ["b/2.JPG", "C/z.bmp"], "file_root": "tree", "labels": [4, -1]},
        {"files": "tree/b/2.JPG", "labels": 9},
    ],
)
def test_the_files_and_labels_are_those_that_dali_finds(
    job: Job, plain: Callable[[Any], Any], tree: Path, monkeypatch: pytest.MonkeyPatch, reader: Any
) -> None:
    monkeypatch.chdir(tree.parent)
    theirs = plain(lambda: make(reader, batch_size=1))
    ours = make(reader, batch_size=1)
    assert goes_through_cache(ours) == (reader.get("dir_filters") != "[!x]*")  # left to DALI
    assert ours.reader_meta() == theirs.reader_meta()
    assert outputs(ours, 24) == outputs(theirs, 24)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"file_list": "wrong"}, "a name and a label"),
        ({"files": ["s3://bucket/a"]}, "not in a file system"),
        ({"files": ["a", "b"], "labels": [1]}, "one label each"),
        ({"files": ["a"], "labels": [1 << 31]}, "32 bits"),
        ({"files": ["a"], "file_list": "wrong"}, "go together"),
        ({"file_root": "."}, "no files"),
        ({"file_root": ".", "file_filters": ["a?"]}, "names and stars"),
        ({}, "go together"),
    ],
)
def test_what_is_not_certain_is_left_to_dali(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("wrong").write_text("a 1\nb2\n")
    with pytest.raises(Unclear, match=says):
        listing(given, ["*.jpg"])
