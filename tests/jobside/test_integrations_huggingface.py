"""The Trainer of transformers under a lease, with the real library."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from inprocess import lease
from torchjob import Job, stop

from slurm_synergy.errors import CheckpointError
from slurm_synergy.jobside.session import LeaseEnded

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the libraries' own imports
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (extra `integrations`)"
    )
    pytest.importorskip("accelerate", reason="accelerate is not installed (extra `integrations`)")
    from slurm_synergy.jobside.integrations.huggingface import LeaseCallback

pytestmark = pytest.mark.filterwarnings("ignore:::transformers", "ignore:::accelerate")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SAMPLES, BATCH = 200, 8
STEPS_OF_AN_EPOCH = SAMPLES // BATCH


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module examples/train_huggingface.py."""
    monkeypatch.syspath_prepend(EXAMPLES)
    import train_huggingface

    yield train_huggingface
    del sys.modules["train_huggingface"]


class StopAfter(transformers.TrainerCallback):  # type: ignore[misc]
    """Asks for a stop while the step of that number is made; the third step grows the lease."""

    def __init__(self, job: Job, step: int) -> None:
        self._job, self._step = job, step
        self.workers: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        self.workers.append(len(multiprocessing.active_children()))
        if len(self.workers) == 3:
            self._job.boards[-1].write_lease(lease(2, generation=state.global_step))
        if state.global_step + 1 == self._step:
            stop(self._job.boards[-1])


def run(
    example: Any, job: Job, place: Path, *options: str, cores: int = 1, stop_at: int = 0
) -> bool:
    """One incarnation; True when it was stopped."""
    job.start(cores)
    watch = StopAfter(job, stop_at)
    place.mkdir(exist_ok=True)
    common = [f"--samples={SAMPLES}", f"--batch-size={BATCH}", "--epochs=2", "--workers=1", "--cpu"]
    files = [f"--out={place / 'losses'}", f"--checkpoints={place / 'checkpoints'}"]
    try:
        example.train(example.parse([*common, *files, *options]), [watch])
    except LeaseEnded as ended:
        assert ended.code == 85 and job.boards[-1].read_report().checkpoint_done
        assert job.boards[-1].read_report().step == stop_at
        if cores == 1 and len(watch.workers) > 10:  # the lease grew to two cores on the way
            assert watch.workers[0] == 1 and max(watch.workers) >= 2
        return True
    assert not job.boards[-1].read_report().checkpoint_done
    return False


def lines(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "losses").read_text().splitlines()]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_stops_in_mid_epoch_change_no_sample_and_no_loss(
    example: Any, job: Job, tmp_path: Path, accumulate: int
) -> None:
    more = f"--accumulate={accumulate}"
    assert not run(example, job, tmp_path / "whole", more)
    whole = lines(tmp_path / "whole")
    per_epoch = -(-STEPS_OF_AN_EPOCH // accumulate)
    for cores, step in ((2, 5), (1, per_epoch), (3, per_epoch + 7)):
        assert run(example, job, tmp_path / "parts", more, cores=cores, stop_at=step)
    assert not run(example, job, tmp_path / "parts", more)
    parts = lines(tmp_path / "parts")
    assert parts == whole
    for epoch in range(2):
        of_epoch = parts[epoch * STEPS_OF_AN_EPOCH : (epoch + 1) * STEPS_OF_AN_EPOCH]
        assert sorted(i for line in of_epoch for i in line["samples"]) == list(range(SAMPLES))


def test_a_stop_at_the_very_end_lets_training_end(example: Any, job: Job, tmp_path: Path) -> None:
    last = 2 * STEPS_OF_AN_EPOCH
    assert not run(example, job, tmp_path / "all", stop_at=last)
    assert len(lines(tmp_path / "all")) == last


def test_a_checkpoint_that_was_cut_short_or_damaged_is_not_loaded(
    example: Any, job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "run"
    args = SimpleNamespace(output_dir=str(place / "checkpoints"))
    assert LeaseCallback().checkpoint(args) is None
    assert run(example, job, place, stop_at=3)
    assert run(example, job, place, stop_at=6)
    newest, older = (place / "checkpoints" / f"checkpoint-{step}" for step in (6, 3))
    assert LeaseCallback().checkpoint(args) == str(newest)
    cut_short = place / "checkpoints" / "checkpoint-9"
    shutil.copytree(newest, cut_short)
    for name in ("synergy-manifest.json", "trainer_state.json"):
        (cut_short / name).unlink()
    assert LeaseCallback().checkpoint(args) == str(newest)
    (newest / "optimizer.pt").write_bytes(b"x")
    assert LeaseCallback().checkpoint(args) == str(older)
    assert "checkpoint-6 is damaged and skipped" in capsys.readouterr().err
    (older / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match="none of 2 checkpoints is intact"):
        LeaseCallback().checkpoint(args)
    # One that the Trainer finished without the callback has no sums.
    (older / "synergy-manifest.json").unlink()
    assert LeaseCallback().checkpoint(args) == str(older)


@pytest.mark.parametrize("setting", ["save_only_model", "ignore_data_skip"])
def test_settings_that_would_lose_work_are_refused(
    example: Any, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    made = example.TrainingArguments
    monkeypatch.setattr(
        example, "TrainingArguments", lambda **more: made(**more, **{setting: True})
    )
    with pytest.raises(CheckpointError, match=setting):
        run(example, job, tmp_path / "run")
