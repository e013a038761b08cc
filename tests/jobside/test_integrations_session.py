"""What integrations stand on: objects that write files, and steps that a framework counts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from inprocess import lease

from slurm_synergy.errors import CheckpointError
from slurm_synergy.jobside import session as session_module
from slurm_synergy.jobside.board import Board
from slurm_synergy.jobside.session import LeaseEnded, Session


class Files:
    """Writes its value into files, one of them deeper."""

    def __init__(self, value: str = "") -> None:
        self.value = value

    def save_files(self, directory: Path) -> None:
        (directory / "deeper").mkdir()
        (directory / "deeper" / "value").write_text(self.value)
        (directory / "length").write_text(str(len(self.value)))

    def load_files(self, directory: Path) -> None:
        self.value = (directory / "deeper" / "value").read_text()


class Broken(Files):
    """Cannot write."""

    def save_files(self, directory: Path) -> None:
        raise OSError(28, "No space left on device")


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Board]:
    made = Board.create(tmp_path / "board", rank=0, ranks=1)
    made.write_lease(lease(2))
    handler = signal.getsignal(signal.SIGTERM)
    yield made
    signal.signal(signal.SIGTERM, handler)


def saved(tmp_path: Path, *values: str) -> Session:
    session = Session(None, tmp_path / "checkpoints")
    for step, value in enumerate(values):
        session.register(files=Files(value))
        if not step:
            assert not session.resume()
        session.step = step
        session.save()
    return session


def resumed(tmp_path: Path, **objects: object) -> Session:
    session = Session(None, tmp_path / "checkpoints")
    session.register(**objects)
    assert session.resume()
    return session


def test_an_object_may_write_files_of_its_own(tmp_path: Path) -> None:
    saved(tmp_path, "first")
    files = Files()
    resumed(tmp_path, files=files)
    assert files.value == "first"
    [path] = (tmp_path / "checkpoints").iterdir()
    sums = json.loads((path / "MANIFEST.json").read_bytes())["files"]
    assert {"part-files/deeper/value", "part-files/length", "state.json"} <= sums.keys()


@pytest.mark.parametrize("harm", ["change", "remove"])
def test_a_checkpoint_with_a_damaged_part_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], harm: str
) -> None:
    saved(tmp_path, "first", "second")
    newest = max((tmp_path / "checkpoints").iterdir())
    victim = newest / "part-files" / "deeper" / "value"
    victim.write_text("others") if harm == "change" else victim.unlink()
    files = Files()
    resumed(tmp_path, files=files)
    assert files.value == "first"
    assert "is damaged and skipped" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../../board", "/etc/hostname"])
def test_a_manifest_cannot_name_files_outside(tmp_path: Path, name: str) -> None:
    saved(tmp_path, "first")
    [path] = (tmp_path / "checkpoints").iterdir()
    manifest = json.loads((path / "MANIFEST.json").read_bytes())
    manifest["files"][name] = manifest["files"]["state.json"]
    (path / "MANIFEST.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        resumed(tmp_path, files=Files())


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    saved(tmp_path, "first")
    session = Session(None, tmp_path / "checkpoints")
    session.register(files=Files(), shards=Files())
    with pytest.raises(CheckpointError, match=r"no state of shards \(it has files\)"):
        session.resume()


def test_a_part_that_cannot_be_written_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    session = saved(tmp_path, "first")
    session.register(files=Broken())
    session.step += 1
    with pytest.raises(CheckpointError, match="No space left on device"):
        session.save()
    files = Files()
    resumed(tmp_path, files=files)
    assert files.value == "first"


# -- steps that a framework counts -----------------------------------------------------------------


@pytest.fixture
def hooked(board: Board, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(session_module, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(session_module, "_REPORT_EVERY_S", 0.0)
    session = Session(board, None)
    session.count_by_hook(step=10)
    return session


def test_a_stop_is_a_status_to_end_with(hooked: Session, board: Board, tmp_path: Path) -> None:
    assert [hooked.step_done(samples=4, epoch=1) for _ in range(3)] == [0, 0, 0]
    report = board.read_report()
    assert (report.step, report.samples, report.epoch) == (13, 12, 1)
    assert report.heartbeat_monotonic_s > 0 and not report.checkpoint_done
    board.write_lease(lease(2, stop=True, generation=1))
    assert hooked.step_done(samples=4, epoch=1) == 85
    assert not board.read_report().checkpoint_done  # nothing is saved yet
    with pytest.raises(LeaseEnded) as ended:
        hooked.end(85, tmp_path / "theirs")
    assert ended.value.code == 85 and board.read_report().checkpoint_done


def test_a_stop_that_is_withdrawn_is_forgotten(hooked: Session, board: Board) -> None:
    board.write_lease(lease(2, stop=True, generation=1))
    assert hooked.step_done(samples=1, epoch=0) == 85
    board.write_lease(lease(2, generation=2))
    assert [hooked.step_done(samples=1, epoch=0) for _ in range(3)][-1] == 0


def test_sigterm_is_a_status_too(hooked: Session) -> None:
    assert hooked.step_done(samples=1, epoch=0) == 0
    os.kill(os.getpid(), signal.SIGTERM)
    assert hooked.step_done(samples=1, epoch=0) == 143


def test_batches_are_handed_out_without_being_counted(hooked: Session) -> None:
    closed = []

    def source() -> Iterator[tuple[str, int]]:
        try:
            yield from (("a", 1), ("b", 1), ("c", 1))
        finally:
            closed.append(True)

    assert list(hooked.hand_out(source())) == ["a", "b", "c"]
    assert hooked.step == 10 and closed == [True]
    half = hooked.hand_out(source())
    assert next(half) == "a"
    half.close()  # type: ignore[attr-defined]
    assert closed == [True, True]


def test_a_handler_that_was_there_before_can_be_left_out(hooked: Session) -> None:
    called: list[int] = []
    hooked._term._previous = lambda *_: called.append(1)
    os.kill(os.getpid(), signal.SIGTERM)
    hooked.own_sigterm()
    os.kill(os.getpid(), signal.SIGTERM)
    assert called == [1]
