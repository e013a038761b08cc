"""What the tests of the in-process part share: sessions of their own, and real child processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from slurm_synergy.jobside.board import Board, LeaseView

ROOT = Path(__file__).resolve().parents[2]
INJECT = ROOT / "slurm_synergy" / "jobside" / "inject"
OURS = ("SYNERGY_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_")


def clean_environment(**more: str) -> dict[str, str]:
    """The environment without anything that would make this process part of a job."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


def injected(board: Board, checkpoints: Path | None, **more: str) -> dict[str, str]:
    """The environment that the launcher gives to a training process."""
    place = {} if checkpoints is None else {"SYNERGY_CHECKPOINT_DIR": str(checkpoints)}
    hook = {"SYNERGY_BOARD": str(board.path), "PYTHONPATH": f"{INJECT}:{ROOT}"}
    return clean_environment(**hook, **place, **more)


def start(
    arguments: list[str], environment: Mapping[str, str], cwd: Path | None = None
) -> subprocess.Popen[str]:
    """Run a Python program with its output captured."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=dict(environment),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 120) -> tuple[int, str, str]:
    """(exit status, output, error output); the process does not outlive the test."""
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout_s:g} s:\n{out}\n{err}") from None
    return process.returncode, out, err


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
    """Poll until ``condition`` holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"no {what} within {timeout_s:g} s"
        time.sleep(0.01)


def lease(cores: int, **more: object) -> LeaseView:
    """A lease over ``cores`` cores that do not exist on this machine."""
    return LeaseView(core_count=cores, **more)  # type: ignore[arg-type]
