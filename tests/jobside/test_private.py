"""The private directory: new, closed to others, and swept when its owner was killed."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from slurm_synergy.errors import LeaseError
from slurm_synergy.jobside import private
from slurm_synergy.jobside.environment import task_from
from slurm_synergy.jobside.private import PrivateDir, command_number

TASK = task_from({})


def test_each_is_new_and_closed_to_others(tmp_path: Path) -> None:
    first = PrivateDir({"TMPDIR": str(tmp_path)}, TASK)
    second = PrivateDir({"TMPDIR": str(tmp_path), "SLURM_TMPDIR": str(tmp_path / "none")}, TASK)
    assert first.path != second.path
    assert {first.path.parent, second.path.parent} == {tmp_path}
    assert stat.S_IMODE(first.path.stat().st_mode) == 0o700
    for made in (first, second):
        made.remove()
    assert list(tmp_path.iterdir()) == []


def test_whoever_guesses_the_name_and_puts_a_link_there_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = iter(["aa", "bb"])
    monkeypatch.setattr("secrets.token_hex", lambda _n: next(tokens))
    (tmp_path / f"synergy-{os.getuid()}-0-0-0-0-aa").symlink_to("/etc")
    other = tmp_path / "other"
    other.mkdir()
    taken = PrivateDir({"SLURM_TMPDIR": str(tmp_path), "TMPDIR": str(other)}, TASK)
    assert taken.path.parent == other
    taken.remove()


def test_what_a_killed_launcher_left_is_removed_and_what_lives_is_not(tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path)}
    alive, dead = PrivateDir(env, TASK), PrivateDir(env, TASK)
    os.close(dead._lock)
    (dead.path / "board").touch()
    foreign = tmp_path / f"synergy-{os.getuid()}-link"
    foreign.symlink_to("/etc")
    young = tmp_path / f"synergy-{os.getuid()}-young"
    young.mkdir()
    long_ago_s = time.time() - 3600
    for path in (alive.path, dead.path):
        os.utime(path, (long_ago_s, long_ago_s))
    new = PrivateDir(env, TASK)
    assert not dead.path.exists()
    assert set(tmp_path.iterdir()) == {alive.path, new.path, foreign, young}
    alive.remove()
    new.remove()


def test_no_place_at_all_is_told_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path) -> int:
        raise OSError("no locks here")

    monkeypatch.setattr(private, "_locked", refuse)
    with pytest.raises(LeaseError, match="no locks here; set TMPDIR to a writable one"):
        PrivateDir({"TMPDIR": str(tmp_path)}, TASK)
    assert list(tmp_path.iterdir()) == []


def test_commands_of_a_script_are_numbered_by_their_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "_ORDER_PLACE", tmp_path)
    run = {"ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "7"}
    assert [command_number(run, one) for one in ("a", "b", "a", "c", "b")] == [1, 2, 1, 3, 2]
    again = {**run, "SLURM_RESTART_COUNT": "1"}
    assert [command_number(again, one) for one in ("a --port 2", "b")] == [1, 2]
    # A job of the same number on another cluster of this machine counts for itself.
    assert command_number({**run, "SLURM_TASK_PID": "4711"}, "c") == 1
    (own, *_) = sorted(tmp_path.iterdir())
    assert stat.S_IMODE(own.stat().st_mode) == 0o600
    # Typed by hand each command is for itself.
    assert command_number({"SLURM_JOB_ID": "7"}, "b") == 1


def test_where_the_order_cannot_be_kept_there_is_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "_ORDER_PLACE", tmp_path)
    run = {"ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "7"}
    target = tmp_path / "target"
    target.write_text("0\n")
    (tmp_path / f"synergy-{os.getuid()}-7-0-0.commands").symlink_to(target)
    assert command_number(run, "a") == command_number(run, "b") == 1
    assert target.read_text() == "0\n"
    monkeypatch.setattr(private, "_ORDER_PLACE", tmp_path / "none")
    assert command_number(run, "b") == 1


def test_orders_that_nobody_touches_any_more_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private, "_ORDER_PLACE", tmp_path)
    command_number({"ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "7"}, "a")
    (old,) = tmp_path.iterdir()
    os.utime(old, (1.0, 1.0))
    command_number({"ENVIRONMENT": "BATCH", "SLURM_JOB_ID": "8"}, "a")
    assert [path.name for path in tmp_path.iterdir()] == [f"synergy-{os.getuid()}-8-0-0.commands"]
