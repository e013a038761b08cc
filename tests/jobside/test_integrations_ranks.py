"""Frameworks over two ranks (gloo) under a lease, with the real libraries: one stop, one resume.

Both ranks end at one step, and each sample of each epoch is used once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from forks import Forks
from inprocess import ROOT, finish, injected, lease, wait_for
from launchers import Launchers, ended, free_port

from slurm_synergy.jobside.board import Board

PRELOAD = (
    *("torch.distributed", "torch.nn.parallel", "torch.utils.data", "torch._dynamo"),
    *("sklearn.datasets", "lightning.pytorch", "transformers.trainer"),
    *("nvidia.dali.fn", "nvidia.dali.plugin.pytorch"),
)
PRELOAD = tuple(name for name in PRELOAD if find_spec(name.partition(".")[0]))
HERE = Path(__file__).resolve().parent
RANKS, EPOCHS, SAMPLES, BATCH = 2, 3, 160, 4
STEPS_OF_AN_EPOCH = SAMPLES // (RANKS * BATCH)
# A stop is agreed some seconds ahead: without a pause training would be over by then.
STEP_S = 0.1
Words = Callable[[Path, float], list[str]]


def run(forks: Forks, place: Path, words: Words, number: int) -> int:
    """One incarnation of all ranks: the first is stopped, the second not; what they told last."""
    boards = [
        Board.create(place / f"board{number}.{rank}", rank=rank, ranks=RANKS)
        for rank in range(RANKS)
    ]
    for board in boards:
        board.write_lease(lease(1))
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(RANKS)}
    common |= {"SLURM_RESTART_COUNT": str(number), "LOCAL_RANK": "0"}
    processes = [
        forks.start(
            words(place / f"{rank}.jsonl", STEP_S if number == 0 else 0.0),
            injected(board, place / "checkpoints", RANK=str(rank), NODE_RANK=str(rank), **common),
            place,
        )
        for rank, board in enumerate(boards)
    ]
    with ended(processes):
        if number == 0:
            wait_for(lambda: boards[0].read_report().step >= 3, "step 3", 200)
            with Launchers(boards):
                results = [finish(process, 200) for process in processes]
        else:
            results = [finish(process, 200) for process in processes]
    for status, _out, err in results:
        assert status == (85 if number == 0 else 0), err
    reports = [board.read_report() for board in boards]
    assert {report.checkpoint_done for report in reports} == {number == 0}
    steps = {report.step for report in reports}
    assert len(steps) == 1
    return steps.pop()


def lines(place: Path, rank: int) -> list[dict[str, Any]]:
    text = (place / f"{rank}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def stopped_and_continued(forks: Forks, place: Path, words: Words) -> None:
    """Whatever the framework: both incarnations, and what both together have used."""
    stopped = run(forks, place, words, 0)
    assert 3 <= stopped < EPOCHS * STEPS_OF_AN_EPOCH
    assert [len(lines(place, rank)) for rank in range(RANKS)] == [stopped] * RANKS
    assert run(forks, place, words, 1) == EPOCHS * STEPS_OF_AN_EPOCH
    used = [lines(place, rank) for rank in range(RANKS)]
    assert [len(one) for one in used] == [EPOCHS * STEPS_OF_AN_EPOCH] * RANKS
    for epoch in range(EPOCHS):
        steps = slice(epoch * STEPS_OF_AN_EPOCH, (epoch + 1) * STEPS_OF_AN_EPOCH)
        seen = [number for rank in used for line in rank[steps] for number in line["samples"]]
        assert sorted(seen) == list(range(SAMPLES)), epoch


def of_example(name: str, *more: str) -> Words:
    """A program of examples/, with options that they all have."""
    options = [f"--epochs={EPOCHS}", f"--samples={SAMPLES}", f"--batch-size={BATCH}", "--cpu"]
    options += ["--workers=1", *more]

    def words(out: Path, step_s: float) -> list[str]:
        return [str(ROOT / "examples" / name), *options, f"--out={out}", f"--step-seconds={step_s}"]

    return words


def test_lightning(tmp_path: Path, forks: Forks) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed (extra `integrations`)")
    stopped_and_continued(forks, tmp_path, of_example("train_lightning.py", f"--nodes={RANKS}"))


def test_the_trainer_of_transformers(tmp_path: Path, forks: Forks) -> None:
    for name in ("transformers", "accelerate"):
        pytest.importorskip(name, reason=f"{name} is not installed (extra `integrations`)")
    files = f"--checkpoints={tmp_path / 'checkpoints'}"
    stopped_and_continued(forks, tmp_path, of_example("train_huggingface.py", files))


@pytest.mark.parametrize("how", ["checkpoints", "position"])
def test_dali(tmp_path: Path, forks: Forks, how: str) -> None:
    pytest.importorskip("nvidia.dali", reason="DALI is not installed (extra `dali`)")
    (tmp_path / "data").mkdir()
    files = [tmp_path / "data" / f"{number:03}" for number in range(SAMPLES)]
    for file in files:
        file.write_bytes(b"data")

    def words(out: Path, step_s: float) -> list[str]:
        program = str(HERE / "dali_ranks_program.py")
        return [program, str(out), str(EPOCHS), str(step_s), how, *map(str, files)]

    stopped_and_continued(forks, tmp_path, words)
