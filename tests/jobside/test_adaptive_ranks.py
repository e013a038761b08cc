"""Adaptive training on real ranks (gloo): known noise is found, batches change on all together."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from adaptive_program import PER_SAMPLE_VARIANCE, SQUARE
from forks import Forks
from inprocess import finish, injected, lease, wait_for
from launchers import Launchers, ended, free_port

from slurm_synergy.jobside.board import Board

PROGRAM = str(Path(__file__).with_name("adaptive_program.py"))


def run(
    forks: Forks,
    tmp_path: Path,
    world: int,
    *arguments: object,
    batch_size: int = 0,
    stop_at: int | None = None,
    restart: int = 0,
) -> list[int]:
    """Run the program on ``world`` ranks; ``stop_at``: ask for a stop when rank 0 is so far."""
    boards, processes = [], []
    port = free_port()
    for rank in range(world):
        board = Board.create(tmp_path / f"board{restart}.{rank}", rank=rank, ranks=world)
        board.write_lease(lease(1, batch_size=batch_size))
        boards.append(board)
        environment = injected(
            board,
            tmp_path / "checkpoints",
            RANK=str(rank),
            WORLD_SIZE=str(world),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            SLURM_RESTART_COUNT=str(restart),
            OMP_NUM_THREADS="1",
        )
        words = [PROGRAM, str(tmp_path), *map(str, arguments)]
        processes.append(forks.start(words, environment))
    with ended(processes):
        if stop_at is None:
            return [finish(process)[0] for process in processes]
        wait_for(lambda: boards[0].read_report().step >= stop_at, "training", timeout_s=120)
        with Launchers(boards):
            return [finish(process)[0] for process in processes]


def lines(tmp_path: Path, world: int) -> list[list[dict[str, Any]]]:
    texts = [(tmp_path / f"{rank}-of-{world}.jsonl").read_text() for rank in range(world)]
    return [[json.loads(line) for line in text.splitlines()] for text in texts]


def test_ranks_find_the_known_noise_and_change_the_batch_together(
    tmp_path: Path, forks: Forks
) -> None:
    """Steps of one pass and of several, with one batch after another."""
    arguments = (6000, 1, 8, 256, 16, "SGD", "200=64,220=128,235=8")
    assert run(forks, tmp_path, 2, *arguments) == [0, 0]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second  # statistics, progress and weights
    assert first["variance"] == pytest.approx(PER_SAMPLE_VARIANCE / 8, rel=0.25)
    assert first["square"] == pytest.approx(SQUARE, rel=0.5)
    ranks = lines(tmp_path, 2)
    sizes = [line["batch"] for line in ranks[0]]
    assert sizes == [line["batch"] for line in ranks[1]]
    changes = [after for before, after in pairwise(sizes) if before != after]
    assert [sizes[0], *changes] == [8, 64, 128, 8]
    seen = [index for rank in ranks for line in rank for index in line["samples"]]
    assert sorted(seen) == list(range(6000))


def test_an_epoch_goes_on_with_other_ranks_and_another_batch(tmp_path: Path, forks: Forks) -> None:
    arguments = (3200, 1, 8, 256, 16, "SGD", "", 0.04)
    assert run(forks, tmp_path, 2, *arguments, batch_size=16, stop_at=20) == [85, 85]
    assert run(forks, tmp_path, 1, *arguments, batch_size=48, restart=1) == [0]
    pair, alone = lines(tmp_path, 2), lines(tmp_path, 1)[0]
    seen = [index for rank in (*pair, alone) for line in rank for index in line["samples"]]
    assert sorted(seen) == list(range(3200))
    assert {line["batch"] for line in alone} == {48}
    assert alone[0]["steps"] >= pair[0][-1]["steps"] > 0
    known = json.loads((tmp_path / "0.json").read_text())
    assert known["variance"] == pytest.approx(PER_SAMPLE_VARIANCE / 8, rel=0.5)
