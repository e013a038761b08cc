"""A real training reaches its accuracy with an adaptive batch as with the fixed one."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from inprocess import ROOT, lease
from torchjob import Job

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("sklearn") is None,
    reason="scikit-learn is not installed (extra `examples`)",
)


def load_example() -> ModuleType:
    path = ROOT / "examples" / "adaptive_digits.py"
    spec = importlib.util.spec_from_file_location("adaptive_digits", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(job: Job, place: Path, batch_size: int) -> dict[str, Any]:
    """The last line of a run under a lease of that batch; 0: the user's own."""
    place.mkdir()
    board = job.start(1)
    assert board is not None
    board.write_lease(lease(1, batch_size=batch_size))
    options = {"batch": (32, 512), "local_batch": 128, "rate": 0.1, "epochs": 40}
    load_example().train(
        argparse.Namespace(**options, target=0.96, seed=1, out=place / "out.jsonl")
    )
    last: dict[str, Any] = json.loads((place / "out.jsonl").read_text().splitlines()[-1])
    return last


def test_an_adaptive_run_reaches_the_accuracy_of_the_fixed_one(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNERGY_CHECKPOINT_DIR", str(tmp_path / "fixed-checkpoints"))
    fixed = train(job, tmp_path / "fixed", 0)
    monkeypatch.setenv("SYNERGY_CHECKPOINT_DIR", str(tmp_path / "adaptive-checkpoints"))
    adaptive = train(job, tmp_path / "adaptive", 128)
    assert fixed["batch"] == 32 and adaptive["batch"] == 128
    assert min(fixed["accuracy"], adaptive["accuracy"]) >= 0.96
    # With far fewer steps, for more samples: as many as the noise of the gradient foretold.
    assert adaptive["steps"] < 0.7 * fixed["steps"]
    assert adaptive["samples"] < 2.5 * fixed["samples"]
    assert fixed["progress"] == pytest.approx(fixed["epoch"] + 1)
    assert 0.6 < adaptive["progress"] / fixed["progress"] < 1.6
