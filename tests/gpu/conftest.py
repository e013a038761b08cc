"""Tests that need a GPU: without one they are skipped, and say why."""

from __future__ import annotations

import subprocess
import sys

import pytest

_COUNT = "import torch; print(torch.cuda.device_count())"


def _reason_to_skip() -> str:
    # In a process of its own: nothing else of the tests shall begin to use a GPU.
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=120, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "no PyTorch that could use a GPU"
    return "" if int(asked.stdout) else "no GPU that PyTorch can use"


@pytest.fixture(scope="session")
def gpu() -> int:
    """The number of a GPU."""
    reason = _reason_to_skip()
    if reason:
        pytest.skip(reason)
    return 0
