"""The board: both records whole, at any moment, from two processes."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from slurm_synergy.errors import LeaseError
from slurm_synergy.jobside.board import Board, LeaseView, Report

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_written_is_read_from_another_mapping(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", rank=2, ranks=4)
    other = Board.attach(tmp_path / "board")
    assert (other.rank, other.ranks) == (2, 4)
    assert other.read_lease() == LeaseView()
    assert other.read_report() == Report()
    lease = LeaseView(
        generation=3, until_monotonic_s=1.5, mem_mib=9, batch_size=7, stop=True, stop_step=11,
        stop_committed=True, silent=False, core_count=24, cores=(0, 5, 9),
    )  # fmt: skip
    before = other.lease_sequence()
    board.write_lease(lease)
    assert other.read_lease() == lease
    assert other.lease_sequence() != before
    report = Report(
        step=1, samples=2, epoch=3, step_s=0.5, wait_s=0.25, proposed_stop_step=4,
        accepted_stop_step=5, refused_stop_step=6, checkpoint_done=True, heartbeat_monotonic_s=8.0,
        stepped_s=9.5, waited_s=10.25,
    )  # fmt: skip
    other.write_report(report)
    assert board.read_report() == report
    assert stat.S_IMODE((tmp_path / "board").stat().st_mode) == 0o600


def test_flags_do_not_mix(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", rank=0, ranks=1)
    for committed in (False, True):
        for silent in (False, True):
            view = LeaseView(stop_committed=committed, silent=silent)
            board.write_lease(view)
            assert board.read_lease() == view


def test_a_reader_never_sees_half_a_lease(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", rank=0, ranks=1)
    code = (
        "import sys; from pathlib import Path\n"
        "from slurm_synergy.jobside.board import Board, LeaseView\n"
        "board = Board.attach(Path(sys.argv[1]))\n"
        "for n in range(1, 30001):\n"
        "    board.write_lease(LeaseView(generation=n, mem_mib=n, core_count=n, cores=(n,) * 40))\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "board")],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )
    seen = set()
    while writer.poll() is None:
        view = board.read_lease()
        assert view.generation == view.mem_mib == view.core_count
        assert set(view.cores) <= {view.generation}
        seen.add(view.generation)
    assert writer.returncode == 0
    assert len(seen) > 10


def test_what_is_not_a_board_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_bytes(b"x" * 4096)
    for name in ("none", "empty", "text"):
        with pytest.raises(LeaseError, match=name):
            Board.attach(tmp_path / name)


def test_too_many_cores_are_an_error_not_an_overflow(tmp_path: Path) -> None:
    board = Board.create(tmp_path / "board", rank=0, ranks=1)
    board.write_report(Report(step=5))
    with pytest.raises(LeaseError, match="at most"):
        board.write_lease(LeaseView(cores=tuple(range(1000))))
    board.write_lease(LeaseView(cores=tuple(range(170))))
    assert board.read_report().step == 5
    assert board.read_lease().cores == tuple(range(170))
