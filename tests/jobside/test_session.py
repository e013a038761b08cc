"""One training process: stopped by lease or by SIGTERM, and continued to the same result."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from statistics import mean

import pytest
from forks import Forks
from inprocess import ROOT, clean_environment, finish, injected, lease, start, wait_for

import slurm_synergy.jobside as synergy
from slurm_synergy.errors import CheckpointError, LeaseError
from slurm_synergy.jobside import session as session_module
from slurm_synergy.jobside.board import Board
from slurm_synergy.jobside.session import Session

DIGITS = ROOT / "examples" / "train_digits.py"

COUNTING = """
import sys, time
import slurm_synergy.jobside as synergy

class Counter:
    def __init__(self): self.total = 0
    def state_dict(self): return {"total": self.total}
    def load_state_dict(self, state): self.total = state["total"]

counter = Counter()
synergy.register(counter=counter)
print("resumed", synergy.resume())
synergy.state().setdefault("run", sys.argv[1])
for epoch in synergy.epochs(2):
    for item in synergy.iterate(range(50), batch_size=4):
        counter.total += item
        print(epoch, item, flush=True)
        time.sleep(float(sys.argv[2]))
print("total", counter.total, synergy.state())
"""


def _board(tmp_path: Path, name: str, cores: int = 2) -> Board:
    board = Board.create(tmp_path / name, rank=0, ranks=1)
    board.write_lease(lease(cores))
    return board


def test_a_real_training_ends_bit_identically_after_three_interruptions(
    tmp_path: Path, forks: Forks
) -> None:
    arguments = [str(DIGITS), "--epochs", "4", "--seed", "3", "--step-seconds", "0.02"]

    plain = tmp_path / "plain.jsonl"
    place = {"SYNERGY_CHECKPOINT_DIR": str(tmp_path / "plain")}
    undisturbed = forks.start([*arguments, "--out", str(plain)], clean_environment(**place))

    interrupted = tmp_path / "interrupted.jsonl"
    for life, (cores, last) in enumerate(((1, 7), (3, 40), (2, 60), (1, None))):
        board = _board(tmp_path, f"board{life}", cores)
        environment = injected(board, tmp_path / "checkpoints", SLURM_RESTART_COUNT=str(life))
        process = forks.start([*arguments, "--out", str(interrupted)], environment)
        if last is not None:
            wait_for(lambda b=board, s=last: b.read_report().step >= s, f"step {last}")  # type: ignore[misc]
            board.write_lease(lease(cores, stop=True))
        status, out, err = finish(process)
        assert status == (0 if last is None else 85), err
        assert ("continuing" in out) == (life > 0)
        assert board.read_report().checkpoint_done == (last is not None)
    status, _out, err = finish(undisturbed)
    assert status == 0, err
    lines = [json.loads(line) for line in plain.read_text().splitlines()]
    assert len(lines) == 4 * 29 + 1 and lines[-1]["weights_sha256"]
    assert mean(line["loss"] for line in lines[-30:-1]) < 0.8 * lines[0]["loss"]  # it does learn
    assert interrupted.read_bytes() == plain.read_bytes()


def test_sigterm_saves_and_ends_with_143(tmp_path: Path) -> None:
    arguments = ["-c", COUNTING, "first", "0.02"]
    board = _board(tmp_path, "board")
    process = start(arguments, injected(board, tmp_path / "checkpoints"))
    wait_for(lambda: board.read_report().step >= 5, "step 5")
    process.send_signal(signal.SIGTERM)
    status, out, err = finish(process)
    assert status == 143 and "stopped at step" in err
    assert board.read_report().checkpoint_done
    process = start(
        ["-c", COUNTING, "second", "0"], injected(_board(tmp_path, "b2"), tmp_path / "checkpoints")
    )
    status, more, err = finish(process)
    assert status == 0, err
    assert "resumed True" in more
    items = [line for line in (out + more).splitlines() if line[0].isdigit()]
    assert items == [f"{epoch} {item}" for epoch in range(2) for item in range(50)]
    assert f"total {2 * sum(range(50))} {{'run': 'first'}}" in more


def test_sigterm_ends_an_unregistered_program_as_always(tmp_path: Path) -> None:
    program = """
import time
import slurm_synergy.jobside as synergy
for item in synergy.iterate(range(10_000)):
    time.sleep(0.01)
"""
    board = _board(tmp_path, "board")
    process = start(["-c", program], injected(board, None))
    wait_for(lambda: board.read_report().step >= 3, "step 3")
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == -signal.SIGTERM


def test_an_earlier_handler_still_hears_of_sigterm(tmp_path: Path) -> None:
    program = (
        """
import signal
signal.signal(signal.SIGTERM, lambda number, frame: print("heard", number, flush=True))
"""
        + COUNTING
    )
    board = _board(tmp_path, "board")
    process = start(["-c", program, "x", "0.02"], injected(board, tmp_path / "checkpoints"))
    wait_for(lambda: board.read_report().step >= 3, "step 3")
    process.send_signal(signal.SIGTERM)
    status, out, _err = finish(process)
    assert status == 143
    assert out.splitlines().count("heard 15") == 1


def test_a_forked_child_dies_of_sigterm_and_saves_nothing(tmp_path: Path) -> None:
    program = """
import os, signal, sys, time
import slurm_synergy.jobside as synergy
synergy.register()
synergy.resume()
for item in synergy.iterate(range(3)):
    if item == 1:
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    board = _board(tmp_path, "board")
    status, out, err = finish(start(["-c", program], injected(board, tmp_path / "checkpoints")))
    assert (status, out.strip()) == (0, "-15"), err
    assert not (tmp_path / "checkpoints").exists()


def test_a_program_without_launcher_is_a_plain_loop(tmp_path: Path) -> None:
    status, out, err = finish(start(["-c", COUNTING, "run", "0"], clean_environment()))
    assert status == 0 and err == ""
    assert "resumed False" in out and "total 2450" in out


def test_within_one_second_of_the_lease_a_quick_loop_has_stopped(tmp_path: Path) -> None:
    board = _board(tmp_path, "board")
    process = start(["-c", COUNTING, "x", "0.02"], injected(board, tmp_path / "checkpoints"))
    wait_for(lambda: board.read_report().step >= 3, "step 3")
    began_s = time.monotonic()
    board.write_lease(lease(2, stop=True))
    wait_for(lambda: board.read_report().checkpoint_done, "checkpoint")
    assert time.monotonic() - began_s < 1.0
    assert finish(process)[0] == 85


def test_under_torchrun_the_status_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    assert session_module.LeaseEnded(85).code == 85
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert session_module.LeaseEnded(85).code == 0


# -- wrong calls -----------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Session:
    for name in [name for name in os.environ if name.startswith(("SYNERGY_", "RANK", "WORLD_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SYNERGY_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
    monkeypatch.setattr(session_module, "_session", None)
    return session_module.current()


def test_what_cannot_be_saved_is_refused_by_name(fresh: Session) -> None:
    with pytest.raises(CheckpointError, match=r"register\(model=...\): a int has no state_dict"):
        synergy.register(model=3)


def test_the_order_of_calls_is_explained(fresh: Session) -> None:
    with pytest.raises(CheckpointError, match=r"call register\(\) first"):
        synergy.resume()
    with pytest.raises(CheckpointError, match=r"call register\(\) first"):
        synergy.save()


def test_ranks_cannot_save_by_their_clocks(fresh: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CheckpointError, match=r"use save_every\(steps=...\)"):
        synergy.save_every(seconds=5)


def test_a_rank_count_that_changes_after_resume_is_explained(
    fresh: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    synergy.register()
    assert not synergy.resume()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LeaseError, match="init_process_group"):
        next(synergy.iterate([1]))


def test_a_saved_place_is_returned_and_can_be_resumed(
    fresh: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synergy.register()
    assert not synergy.resume()
    synergy.state()["run"] = "x"
    items = synergy.iterate("abcd")
    assert [next(items), next(items)] == ["a", "b"]
    assert synergy.save() == tmp_path / "checkpoints" / "step-000000000002"
    monkeypatch.setattr(session_module, "_session", None)
    synergy.register()
    assert synergy.resume()
    assert synergy.state() == {"run": "x"}
    assert list(synergy.iterate("abcd")) == ["c", "d"]


class Slow:
    """Takes 0.3 s to write."""

    def state_dict(self) -> dict[str, int]:
        time.sleep(0.3)
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize(("grace_s", "warned"), [("0.2", True), ("60", False), ("", False)])
def test_checkpoints_slower_than_the_grace_are_told_at_the_first_one_and_at_each_start(
    fresh: Session,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    grace_s: str,
    warned: bool,
) -> None:
    monkeypatch.setenv("SYNERGY_GRACE_S", grace_s)
    synergy.register(slow=Slow())
    assert not synergy.resume()
    for _ in range(2):
        synergy.save()
    told = "but a stop waits only 0.2 s for one"
    assert capsys.readouterr().err.count(told) == warned
    monkeypatch.setattr(session_module, "_session", None)
    synergy.register(slow=Slow())
    assert synergy.resume()
    said = capsys.readouterr().err
    assert said.count(told) == warned
    assert ("ask for more time with the hint grace_s=" in said) is warned


def test_a_wrong_interval_is_named(fresh: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYNERGY_CHECKPOINT_INTERVAL_S", "soon")
    synergy.register()
    with pytest.raises(LeaseError, match="SYNERGY_CHECKPOINT_INTERVAL_S = 'soon'"):
        next(synergy.iterate([1]))


def test_the_lease_can_be_read(
    fresh: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert synergy.lease().core_count == len(os.sched_getaffinity(0))
    monkeypatch.setenv("SYNERGY_LEASE_CPUS", "5")
    monkeypatch.setenv("SYNERGY_LEASE_MEM_MIB", "700")
    assert (synergy.lease().core_count, synergy.lease().mem_mib) == (5, 700)
    monkeypatch.setenv("SYNERGY_BOARD", str(_board(tmp_path, "board", cores=9).path))
    monkeypatch.setattr(session_module, "_session", None)
    assert synergy.lease().core_count == 9


def test_the_public_names_are_those_that_are_there() -> None:
    assert sorted(synergy.__all__) == synergy.__all__
    for name in synergy.__all__:
        assert getattr(synergy, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = synergy.nothing
    assert sys.modules["slurm_synergy.jobside"] is synergy
