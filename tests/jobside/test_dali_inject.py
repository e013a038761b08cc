"""Unchanged scripts that use DALI, run by their own interpreters under a launcher's board."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("nvidia.dali", reason="DALI is not installed: pip install nvidia-dali-cuda120")

from dali_pipelines import write_files
from forks import Forks
from inprocess import finish, injected, lease, start, wait_for

from slurm_synergy.jobside.binding import pin_tree
from slurm_synergy.jobside.board import Board

PRELOAD = ("nvidia.dali.fn", "nvidia.dali.plugin.pytorch")
SCRIPT = """
import sys
import nvidia.dali.fn as fn
from nvidia.dali import pipeline_def
from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy
@pipeline_def
def pipe(files):
    content, label = fn.readers.file(
        files=files, name="reader", random_shuffle=True, pad_last_batch=True)
    return label, fn.random.uniform(range=(0, 1))
made = pipe(sys.argv[1:], batch_size=4, num_threads=7, device_id=None)
loader = DALIGenericIterator(made, ["label", "noise"], reader_name="reader",
    last_batch_policy=LastBatchPolicy.PARTIAL, auto_reset=True)
for _ in range(2):
    print(made.num_threads, sorted(int(n) for (part,) in loader for n in part["label"]))
"""
# Goes on when it is told to, so that its threads can be looked at.
WAITING = (
    SCRIPT
    + """
import os, pathlib, time
pathlib.Path(os.environ["READY"]).touch()
while not pathlib.Path(os.environ["GO"]).exists():
    time.sleep(0.02)
next(loader)
"""
)


@pytest.fixture
def board(tmp_path: Path) -> Board:
    made = Board.create(tmp_path / "board", rank=0, ranks=1)
    made.write_lease(lease(3))
    return made


def _written(tmp_path: Path, text: str) -> str:
    script = tmp_path / "script.py"
    script.write_text(text)
    return str(script)


@pytest.mark.parametrize("cache", ["0", "1"])
def test_an_unchanged_script_takes_the_leases_threads_and_reports(
    board: Board, tmp_path: Path, forks: Forks, cache: str
) -> None:
    files = write_files(tmp_path / "data", 10)
    more = {"SYNERGY_CACHE": cache, "SYNERGY_CACHE_MIB": "1", "SYNERGY_CACHE_DIR": str(tmp_path)}
    words, environment = [_written(tmp_path, SCRIPT), *files], injected(board, None, **more)
    # One of them is started as jobs are.
    process = forks.start(words, environment) if cache == "1" else start(words, environment)
    status, out, err = finish(process)
    assert (status, err) == (0, "")
    assert out == f"3 {list(range(10))}\n" * 2
    report = board.read_report()
    assert (report.step, report.samples, report.epoch) == (6, 20, 2)
    # Its reader went through the data cache where there was one.
    assert len(list(tmp_path.glob("synergy-cache-*"))) == int(cache)


def test_dalis_threads_follow_a_new_binding_at_once(
    board: Board, tmp_path: Path, forks: Forks
) -> None:
    files = write_files(tmp_path / "data", 10)
    ready, go = tmp_path / "ready", tmp_path / "go"
    environment = injected(board, None, READY=str(ready), GO=str(go))
    process = forks.start([_written(tmp_path, WAITING), *files], environment)
    try:
        wait_for(lambda: ready.exists() or process.poll() is not None, "pipeline", 120)
        assert process.poll() is None
        one = min(os.sched_getaffinity(0))
        assert pin_tree(process.pid, {one}).wrong == 0  # as the launcher does with a new lease
        threads = {
            int(task.name): (task / "comm").read_text().strip()
            for task in Path(f"/proc/{process.pid}/task").iterdir()
        }
        assert len([name for name in threads.values() if "[DALI]" in name]) >= 3
        assert {frozenset(os.sched_getaffinity(tid)) for tid in threads} == {frozenset({one})}
        go.touch()
        assert process.wait(120) == 0
    finally:
        process.kill()


STOPPED = """
import sys
import nvidia.dali.fn as fn
from nvidia.dali import pipeline_def
from nvidia.dali.plugin.pytorch import DALIGenericIterator
import slurm_synergy.jobside as synergy
from slurm_synergy.jobside.board import Board
@pipeline_def(enable_checkpointing=True)
def pipe(files):
    content, label = fn.readers.file(files=files, name="reader", random_shuffle=True)
    return label, fn.random.uniform(range=(0, 1))
loader = DALIGenericIterator(pipe(sys.argv[2:], batch_size=2, num_threads=1, device_id=None),
    ["label", "noise"], reader_name="reader", auto_reset=True)
board = Board.attach(synergy._session().board.path)
synergy.register()
synergy.resume()
for epoch in synergy.epochs(2):
    for (part,) in loader:
        print(epoch, *part["label"].ravel().tolist(), part["noise"].tolist(), flush=True)
        if sys.argv[1] == "stop" and epoch == 1:
            import dataclasses
            board.write_lease(dataclasses.replace(board.read_lease(), stop=True))
            import time
            time.sleep(0.05)  # longer than the session leaves the board alone
"""


def test_a_stopped_script_goes_on_in_a_new_process(
    board: Board, tmp_path: Path, forks: Forks
) -> None:
    files, script = write_files(tmp_path / "data", 10), _written(tmp_path, STOPPED)
    environment = injected(board, tmp_path / "checkpoints")
    status, before, err = finish(forks.start([script, "stop", *files], environment))
    assert status == 85, err
    assert 6 <= len(before.splitlines()) < 10
    board.write_lease(lease(3))
    status, after, err = finish(forks.start([script, "go", *files], environment))
    assert status == 0, err
    lines = [line.partition("[")[0].split() for line in (before + after).splitlines()]
    for epoch in "01":
        labels = sorted(int(n) for at, *numbers in lines for n in numbers if at == epoch)
        assert labels == list(range(10))
