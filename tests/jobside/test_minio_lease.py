"""The cache is part of the job's memory: follows the lease, and does not outlive the job."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inprocess import ROOT, clean_environment, finish, start

from slurm_synergy.errors import CacheError
from slurm_synergy.jobside import minio_job
from slurm_synergy.jobside.board import Board, LeaseView
from slurm_synergy.jobside.minio import CachedDataset
from slurm_synergy.jobside.minio_budget import Budget, anonymous_bytes
from slurm_synergy.jobside.minio_store import MinioStore

MIB = 1 << 20
EPILOG = ROOT / "etc" / "epilog-synergy-cache.sh"


class Machine:
    """What the processes use, and what time it is."""

    def __init__(self) -> None:
        self.used_mib, self.now_s = 10, 1000.0

    def measure(self, pid: int) -> int:
        return self.used_mib * MIB

    def clock(self) -> float:
        return self.now_s


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MinioStore]:
    made = MinioStore(tmp_path / "cache")
    yield made
    made.close()


@pytest.fixture
def board(tmp_path: Path) -> Board:
    return Board.create(tmp_path / "board", rank=0, ranks=1)


def _budget(board: Board | None, machine: Machine, asked_mib: int | None = None) -> Budget:
    asked = None if asked_mib is None else asked_mib * MIB
    return Budget({}, board, asked, measure=machine.measure, clock=machine.clock)


def test_the_budget_follows_the_lease_up_and_down(store: MinioStore, board: Board) -> None:
    machine = Machine()
    board.write_lease(LeaseView(generation=1, mem_mib=100))
    budget = _budget(board, machine)
    wanted = [(1, 100, 80), (2, 50, 35), (3, 200, 170)]
    for generation, lease_mib, cache_mib in wanted:
        board.write_lease(LeaseView(generation=generation, mem_mib=lease_mib))
        budget.follow(store)
        assert store.head.budget_bytes == cache_mib * MIB


def test_a_process_that_sees_an_older_lease_changes_nothing(
    store: MinioStore, board: Board
) -> None:
    board.write_lease(LeaseView(generation=5, mem_mib=100))
    _budget(board, Machine()).follow(store)
    board.write_lease(LeaseView(generation=4, mem_mib=1000))
    _budget(board, Machine()).follow(store)
    assert store.head.budget_bytes == 80 * MIB


def test_processes_that_grow_take_memory_from_the_cache(store: MinioStore, board: Board) -> None:
    machine = Machine()
    board.write_lease(LeaseView(generation=1, mem_mib=100))
    budget = _budget(board, machine)
    budget.follow(store)
    machine.used_mib = 70
    budget.follow(store)
    assert store.head.budget_bytes == 80 * MIB  # not measured at every look
    machine.now_s += 31
    budget.follow(store)
    assert store.head.budget_bytes == 20 * MIB
    machine.used_mib, machine.now_s = 10, machine.now_s + 31
    budget.follow(store)
    assert store.head.budget_bytes == 20 * MIB  # what was used once may be used again


def test_the_user_may_ask_for_less(store: MinioStore, board: Board) -> None:
    board.write_lease(LeaseView(generation=1, mem_mib=100))
    budget = _budget(board, Machine(), asked_mib=30)
    budget.follow(store)
    assert store.head.budget_bytes == 30 * MIB
    board.write_lease(LeaseView(generation=2, mem_mib=30))
    budget.follow(store)
    assert store.head.budget_bytes == 17 * MIB


def test_without_any_figure_there_is_no_cache(board: Board) -> None:
    for source in (None, board):
        with pytest.raises(CacheError, match="set SYNERGY_CACHE_MIB"):
            _budget(source, Machine())


def test_the_memory_of_a_process_and_its_children_is_measured() -> None:
    before = anonymous_bytes(os.getpid())
    program = "import sys; held = b'x' * (64 << 20); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        ["python3", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert anonymous_bytes(os.getpid()) - before >= 60 * MIB
    finally:
        child.communicate()


def test_a_data_set_gives_memory_back_in_place(
    tmp_path: Path, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    used_mib = anonymous_bytes(board.launcher_pid) >> 20
    monkeypatch.setenv("SYNERGY_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "3")
    monkeypatch.setenv("SYNERGY_BOARD", str(board.path))
    monkeypatch.setattr(minio_job, "_cache", None)
    board.write_lease(LeaseView(generation=1, mem_mib=2 * used_mib + 100))
    data = CachedDataset([bytes([n]) * (MIB // 4) for n in range(100)], decode=bytes)
    assert all(data[n][0] == n for n in range(100))
    cache = minio_job.job_cache()
    assert cache.store is not None and cache.store.head.items == 100
    board.write_lease(LeaseView(generation=2, mem_mib=1))
    for n in range(400):
        assert data[n % 100][0] == n % 100
    assert cache.store.head.items == 0 and not list(cache.store.path.glob("seg-*"))
    cache.close()


# -- the end of the job ----------------------------------------------------------------------------

PROGRAM = """
import os, sys
import slurm_synergy.jobside as synergy
data = synergy.CachedDataset([b"a", b"b"], decode=bytes)
print(data[0], data[0], os.listdir(os.environ["SYNERGY_CACHE_DIR"]))
os._exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize(("status", "stays"), [(0, False), (3, False), (85, True)])
def test_the_launcher_removes_the_cache_when_the_job_is_over(
    tmp_path: Path, status: int, stays: bool
) -> None:
    place = tmp_path / "caches"
    place.mkdir()
    environment = clean_environment(
        SYNERGY_CACHE_DIR=str(place), SYNERGY_CACHE_MIB="1", TMPDIR=str(tmp_path)
    )
    words = ["-m", "slurm_synergy.jobside.launch", "--", shutil.which("python3") or "", "-c"]
    code, out, _err = finish(start([*words, PROGRAM, str(status)], environment))
    assert code == status and "synergy-cache-" in out
    assert bool(list(place.iterdir())) == stays


def _epilog(*places: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", str(EPILOG), *map(str, places)],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(os.getuid() != 0, reason="an epilog runs as root")
def test_the_epilog_removes_what_a_killed_job_left(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    place.chmod(0o1777)
    for parent in tmp_path.parents:
        if parent.is_relative_to(tempfile.gettempdir()) and parent != Path(tempfile.gettempdir()):
            parent.chmod(parent.stat().st_mode | 0o011)
    tmp_path.chmod(0o711)
    for name in ("synergy-cache-1234-7", "synergy-cache-1234-77", "synergy-cache-4321-7"):
        (place / name).mkdir(mode=0o700)
        (place / name / "seg-0").write_bytes(b"x")
        for path in (place / name, place / name / "seg-0"):
            os.chown(path, int(name.split("-")[2]), 0)
    done = _epilog(place, tmp_path / "none", SLURM_JOB_UID="1234", SLURM_JOB_ID="7")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    left = sorted(path.name for path in place.iterdir())
    assert left == ["synergy-cache-1234-77", "synergy-cache-4321-7"]


@pytest.mark.skipif(os.getuid() != 0, reason="an epilog runs as root")
@pytest.mark.parametrize("trap", ["link", "someone else's"])
def test_the_epilog_touches_nothing_but_the_users_own_directory(tmp_path: Path, trap: str) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / "precious").touch()
    path = tmp_path / "synergy-cache-1234-7"
    if trap == "link":
        path.symlink_to(victim)
        os.chown(path, 1234, 0, follow_symlinks=False)
    else:
        victim.rename(path)
        victim = path
    done = _epilog(tmp_path, SLURM_JOB_UID="1234", SLURM_JOB_ID="7")
    assert done.returncode == 0 and (victim / "precious").exists()


@pytest.mark.parametrize(
    "environment",
    [{}, {"SLURM_JOB_UID": "../..", "SLURM_JOB_ID": "7"}, {"SLURM_JOB_UID": "0"}],
    ids=str,
)
def test_the_epilog_never_fails_a_node(tmp_path: Path, environment: dict[str, Any]) -> None:
    assert _epilog(tmp_path, **environment).returncode == 0
