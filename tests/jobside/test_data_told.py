"""What a training process tells of its data set, and what its launcher makes of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import slurm_synergy.jobside as synergy
from slurm_synergy.errors import LeaseError
from slurm_synergy.jobside import data_told
from slurm_synergy.jobside.data_reading import DataReader
from slurm_synergy.jobside.data_told import DataTold, data_of, described, read_told, tell, tell_of
from slurm_synergy.jobside.minio_place import cache_path
from slurm_synergy.jobside.minio_store import MinioStore
from slurm_synergy.jobside.storage_probe import read_bandwidth


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_told, "_said", False)


class Items:
    """A map-style data set with these attributes."""

    def __init__(self, count: int, **attributes: Any) -> None:
        self._count = count
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return self._count


def files_in(folder: Path, count: int, size: int = 8192) -> list[Path]:
    made = [folder / f"{number}.bin" for number in range(count)]
    for path in made:
        path.write_bytes(os.urandom(size))
    return made


@pytest.mark.parametrize(
    "dataset",
    [
        Items(3, samples=[("/a", 0), ("/b", 1), ("/c", 0)]),  # torchvision
        Items(3, samples=[1, 2, 3], paths=["/a", "/b", "/c"]),
        Items(3, synergy_files=(Path("/a"), Path("/b"), Path("/c"))),
        Items(3, files=["/a", "/b", "/c"], dataset=Items(9)),
    ],
)
def test_lists_of_files_are_found_whatever_they_are_called(dataset: Items) -> None:
    assert data_of(dataset) == DataTold(samples=3, file_count=3, files=("/a", "/b", "/c"))


def test_a_part_of_a_data_set_has_its_part_of_the_files() -> None:
    whole = Items(1000, imgs=[(f"/{number}", 0) for number in range(1000)])
    told = data_of(Items(200, dataset=whole))
    assert told is not None
    assert (told.samples, told.file_count, len(told.files)) == (200, 200, 256)
    # Ten large files with a hundred items each.
    told = data_of(Items(1000, files=[f"/{number}" for number in range(10)]))
    assert told is not None and (told.samples, told.file_count) == (1000, 10)


def test_what_tells_nothing_is_no_error(tmp_path: Path) -> None:
    assert data_of(iter(())) is None
    assert data_of(Items(5)) == DataTold(samples=5, file_count=0)
    assert data_of(Items(5, samples=[1, 2])) == DataTold(samples=5, file_count=0)
    assert DataTold(samples=5, file_count=5, files=("/no/such",)).mib() == 0.0
    board = tmp_path / "board"
    assert read_told(board) is None
    tell_of(Items(5, files=["/a"]), tmp_path / "gone" / "board")
    for text in ("", "[]", '{"samples": 1}', '{"samples": 1, "file_count": 2, "files": 3}'):
        (tmp_path / "data.json").write_text(text, encoding="utf-8")
        assert read_told(board) is None


def test_it_is_written_beside_the_board_whole(tmp_path: Path) -> None:
    board = tmp_path / "board"
    told = described(["/a", os.fsdecode(b"/\xff")], samples=7)
    tell(board, told)
    assert read_told(board) == told
    assert [path.name for path in tmp_path.iterdir()] == ["data.json"]


def test_a_program_can_say_it_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synergy.describe_data(["/a"])  # without a launcher nobody is told
    monkeypatch.setenv("SYNERGY_BOARD", str(tmp_path / "board"))
    monkeypatch.chdir("/")
    synergy.describe_data([Path("a"), "/b"], samples=10)
    told = read_told(tmp_path / "board")
    assert told == DataTold(samples=10, file_count=2, files=("/a", "/b"))
    with pytest.raises(LeaseError, match="int is no path"):
        synergy.describe_data([3])  # type: ignore[list-item]


def test_the_training_loader_tells_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Items(2, files=["/a", "/b"])
    monkeypatch.setattr(data_told, "_last", (0, 0))
    tell_of(data, tmp_path / "board")
    assert read_told(tmp_path / "board") == described(["/a", "/b"], samples=2)
    (tmp_path / "data.json").unlink()
    tell_of(data, tmp_path / "board")  # the next epoch
    assert read_told(tmp_path / "board") is None


def found_by(reader: DataReader) -> Any:
    reading = reader.begin(readers=2, most_s=1.0)
    reading._thread.join(60)
    return reading.found


def test_sizes_are_those_of_the_files_or_of_the_items_in_the_cache(tmp_path: Path) -> None:
    env = {"SLURM_JOB_ID": "77", "SYNERGY_CACHE_DIR": str(tmp_path)}
    reader = DataReader(env, tmp_path / "board", lambda: ())
    assert found_by(reader).how == "no data files are known"
    data = tmp_path / "data"
    data.mkdir()
    tell(tmp_path / "board", described(files_in(data, 4), samples=400))
    found = found_by(reader)
    assert (found.samples, found.dataset_mib, found.cached) == (400, 4 / 128, False)
    store = MinioStore(cache_path(env))
    try:
        store.set_budget(1 << 20)
        source = store.enter("all", 50)
        for number in range(10):
            store.put(source.of_index(number), bytes(16384))
        found = found_by(reader)
    finally:
        store.close()
    assert (found.samples, found.dataset_mib, found.cached) == (50, 50 / 64, True)


def test_files_that_the_processes_have_open_are_read_where_none_are_told(tmp_path: Path) -> None:
    (one,) = files_in(tmp_path, 1, size=1 << 20)
    env = {"SLURM_JOB_ID": "77", "SYNERGY_CACHE_DIR": str(tmp_path)}
    reader = DataReader(env, tmp_path / "board", lambda: (os.getpid(),))
    with one.open("rb"):
        found = found_by(reader)
    assert found.dataset_mib == 0.0  # how many more there are is not known
    assert found.in_memory or found.storage_mib_s > 0


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ("/a", "a list of paths"),
        (Path("/a"), "a list of paths"),
        (7, "a list of paths"),
        ([], "is empty"),
        (["/a\0b"], "no file can have this name"),
        (["/"], "is a directory"),
    ],
)
def test_what_describes_no_files_is_refused(files: Any, words: str) -> None:
    with pytest.raises(LeaseError, match=words):
        synergy.describe_data(files)


@pytest.mark.parametrize("samples", [-5, 2.5, "10", True, 10**30])
def test_a_number_of_samples_that_is_none_is_refused(samples: Any) -> None:
    with pytest.raises(LeaseError, match="number of items"):
        synergy.describe_data(["/a"], samples=samples)


def test_a_loader_does_not_replace_what_the_program_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = tmp_path / "board"
    monkeypatch.setenv("SYNERGY_BOARD", str(board))
    monkeypatch.setattr(data_told, "_last", (0, 0))
    synergy.describe_data({"/a"}, samples=10)
    tell_of(Items(5), board)
    assert read_told(board) == DataTold(samples=10, file_count=1, files=("/a",))


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert DataTold(samples=1, file_count=1, files=(str(pipe), "/a\0b")).mib() == 0.0
    assert read_bandwidth([pipe], readers=1).mib_s is None
