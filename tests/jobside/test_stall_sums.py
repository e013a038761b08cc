"""The sums of stepping and waiting that a training process tells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from inprocess import OURS

from slurm_synergy.jobside.board import Board
from slurm_synergy.jobside.session import Session


class ByHand:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_sums_are_exactly_the_time_spent_over_epochs_and_whatever_lies_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OURS:
        monkeypatch.delenv(name, raising=False)
    clock = ByHand()
    board = Board.create(tmp_path / "board", rank=0, ranks=1)
    session = Session(board, None, clock)
    waits_s = (4.0, 0.0, 0.25, 0.0, 1.0)

    def source() -> Iterator[tuple[int, int]]:
        for wait_s in waits_s:
            clock.now_s += wait_s
            yield 0, 8

    for epoch in range(1, 4):
        session.begin_epoch()
        for _ in session.drive(source(), lambda: False):
            clock.now_s += 0.5  # the step
        report = board.read_report()
        assert report.step == 5 * epoch
        assert report.waited_s == pytest.approx(5.25 * epoch)
        assert report.stepped_s == pytest.approx(2.5 * epoch)
        clock.now_s += 100.0  # validation belongs to neither
    board.close()
