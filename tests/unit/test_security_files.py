"""What we write: for its user alone, whatever the umask, and never through somebody else's link."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from manual_clock import ManualClock

from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.controller.state_files import make_state_dir, open_private
from slurm_synergy.errors import LeaseError, LedgerError
from slurm_synergy.jobside.board import Board
from slurm_synergy.jobside.environment import Task
from slurm_synergy.jobside.private import PrivateDir, command_number

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can prepare another user's files")
TASK = Task(
    job_id=7,
    restart_count=0,
    rank=0,
    ranks=1,
    local_rank=0,
    local_ranks=1,
    node="n1",
    step_id=0,
    nodes=1,
    granted_cpus=1,
    granted_mem_mib=1,
)


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def any_umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def hostile_link(link: Path, target: Path) -> None:
    """A link of another user to a file of ours."""
    target.write_text("precious")
    link.symlink_to(target)
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)


@pytest.mark.usefixtures("any_umask")
def test_the_state_directory_is_closed_under_every_umask(
    tmp_path: Path, clock: ManualClock
) -> None:
    state = tmp_path / "state"
    with Ledger(state, clock=clock):
        modes = {path.name: mode(path) for path in state.iterdir()}
    assert mode(state) == 0o700
    assert {"ledger.sqlite", "ledger.sqlite-wal", "lock"} <= set(modes)
    assert set(modes.values()) == {0o600}


@pytest.mark.usefixtures("any_umask")
def test_boards_and_private_directories_are_closed_under_every_umask(tmp_path: Path) -> None:
    private = PrivateDir({"TMPDIR": str(tmp_path)}, TASK)
    Board.create(private.path / "board", rank=0, ranks=1)
    assert (mode(private.path), mode(private.path / "board")) == (0o700, 0o600)
    private.remove()
    fd = open_private(tmp_path / "told", os.O_WRONLY, 0o644)
    os.close(fd)
    assert mode(tmp_path / "told") == 0o644


@as_root
@pytest.mark.parametrize("name", ["ledger.sqlite", "lock"])
def test_a_link_in_the_place_of_the_ledger_is_refused_with_a_remedy(
    tmp_path: Path, clock: ManualClock, name: str
) -> None:
    target, state = tmp_path / "precious", tmp_path / "state"
    state.mkdir(mode=0o700)
    hostile_link(state / name, target)
    with pytest.raises(LedgerError, match="state_dir"):
        Ledger(state, clock=clock)
    assert (target.read_text(), mode(target)) == ("precious", 0o644)


def test_files_that_are_no_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match=r"it is no file|No such device"):
        open_private(tmp_path / "fifo", os.O_WRONLY)
    (tmp_path / "link").symlink_to(tmp_path / "new")
    with pytest.raises(OSError, match="symbolic links"):
        open_private(tmp_path / "link", os.O_WRONLY)
    assert not (tmp_path / "new").exists()


@as_root
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    planted = tmp_path / "journal.jsonl"
    planted.write_text("theirs")
    planted.chmod(0o666)
    os.chown(planted, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match=f"it belongs to user id {NOBODY}"):
        open_private(planted, os.O_WRONLY | os.O_APPEND)
    assert planted.read_text() == "theirs"


@pytest.mark.parametrize("open_to", [0o770, 0o707, 0o777])
def test_a_state_directory_that_others_may_write_to_is_refused(
    tmp_path: Path, clock: ManualClock, open_to: int
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(open_to)
    with pytest.raises(LedgerError, match=r"others may write to it \(chmod go-w\)"):
        Ledger(state, clock=clock)
    assert list(state.iterdir()) == []


@as_root
def test_the_state_directory_of_another_user_is_refused() -> None:
    # pytest's own directories are closed to others.
    place = Path(tempfile.mkdtemp(prefix="synergy-", dir="/tmp"))
    place.chmod(0o755)
    for name, owner in (("theirs", 1), ("target", NOBODY)):
        (place / name).mkdir(mode=0o755)
        os.chown(place / name, owner, owner)
    (place / "link").symlink_to(place / "target")
    os.chown(place / "link", 1, 1, follow_symlinks=False)
    try:
        os.seteuid(NOBODY)
        make_state_dir(place / "target")
        for name in ("theirs", "link"):
            with pytest.raises(PermissionError, match="it belongs to user id 1"):
                make_state_dir(place / name)
    finally:
        os.seteuid(0)
        shutil.rmtree(place)


@as_root
def test_what_root_makes_in_the_services_directory_belongs_to_the_service(tmp_path: Path) -> None:
    state = tmp_path / "state"
    make_state_dir(state)
    os.chown(state, NOBODY, NOBODY)
    os.close(open_private(state / "lock", os.O_RDWR))
    assert (state / "lock").stat().st_uid == NOBODY
    os.close(open_private(state / "lock", os.O_RDWR))


@as_root
def test_a_board_is_neither_made_nor_opened_through_a_link_or_of_somebody_else(
    tmp_path: Path,
) -> None:
    target = tmp_path / "precious"
    hostile_link(tmp_path / "board", target)
    with pytest.raises(LeaseError, match="cannot create the board"):
        Board.create(tmp_path / "board", rank=0, ranks=1)
    with pytest.raises(LeaseError, match="cannot open the board"):
        Board.attach(tmp_path / "board")
    assert target.read_text() == "precious"
    Board.create(tmp_path / "theirs", rank=0, ranks=1)
    os.chown(tmp_path / "theirs", NOBODY, NOBODY)
    with pytest.raises(LeaseError, match="another user"):
        Board.attach(tmp_path / "theirs")


@as_root
def test_the_order_of_commands_is_not_taken_from_somebody_elses_file() -> None:
    env = {"ENVIRONMENT": "BATCH", "SLURM_JOB_ID": f"4{os.getpid()}", "SLURM_RESTART_COUNT": "0"}
    planted = Path(f"/tmp/synergy-{os.getuid()}-4{os.getpid()}-0-0.commands")
    try:
        planted.symlink_to("/etc/passwd")
        assert command_number(env, "python train.py") == 1
        planted.unlink()
        planted.write_text("0" * 16 + "\n")
        os.chown(planted, NOBODY, NOBODY)
        assert command_number(env, "python train.py") == 1
        assert planted.read_text() == "0" * 16 + "\n"
    finally:
        planted.unlink()


@as_root
def test_a_private_directory_is_never_one_that_was_there(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    trap.mkdir()
    link = tmp_path / f"synergy-{os.getuid()}-7-0-0-0-deadbeef"
    link.symlink_to(trap)
    (trap / "precious").write_text("kept")
    private = PrivateDir({"TMPDIR": str(tmp_path)}, TASK)
    assert private.path.parent == tmp_path
    assert not private.path.is_symlink()
    private.remove()
    # Neither used nor swept away with what lies behind it.
    assert (trap / "precious").read_text() == "kept"
