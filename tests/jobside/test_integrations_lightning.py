"""Lightning's Trainer under a lease, with the real library."""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torchjob import Job, stop

from slurm_synergy.errors import CheckpointError
from slurm_synergy.jobside.session import LeaseEnded

pytestmark = [
    pytest.mark.skipif(
        find_spec("lightning") is None,
        reason="lightning is not installed (extra `integrations`)",
    ),
    pytest.mark.filterwarnings("ignore:::lightning", "ignore::FutureWarning"),
]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SAMPLES, BATCH = 400, 16
STEPS_OF_AN_EPOCH = SAMPLES // BATCH


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module examples/train_lightning.py."""
    monkeypatch.syspath_prepend(EXAMPLES)
    # Here, not at the top: every worker reads this file, one of them runs it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the library's own imports
        import train_lightning

    yield train_lightning
    del sys.modules["train_lightning"]


def at_batch(number: int, act: Callable[[], None]) -> Any:
    """A callback that acts while the batch of that number is being used."""
    from lightning.pytorch import Callback

    class AtBatch(Callback):
        left = number

        def on_train_batch_start(self, *_: Any) -> None:
            self.left -= 1
            if self.left == 0:
                act()

    return AtBatch()


def terminate() -> None:
    """SIGTERM to this process, as Slurm sends at the time limit."""
    os.kill(os.getpid(), signal.SIGTERM)


def run(
    example: Any, job: Job, out: Path, *options: str, cores: int = 1, stop_after: int = 0
) -> bool:
    """One incarnation; True when it was stopped."""
    job.start(cores)
    common = [f"--samples={SAMPLES}", f"--batch-size={BATCH}", "--epochs=3", "--workers=1", "--cpu"]
    parsed = example.parse([*common, f"--out={out}", *options])
    try:
        example.train(parsed, [at_batch(stop_after, lambda: stop(job.boards[-1]))])
    except LeaseEnded as ended:
        assert ended.code == 85 and job.boards[-1].read_report().checkpoint_done
        return True
    return False


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.parametrize("accumulate", [1, 3])
def test_stops_in_mid_epoch_change_no_sample_and_no_loss(
    example: Any, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accumulate: int
) -> None:
    more = f"--accumulate={accumulate}"
    assert not run(example, job, tmp_path / "whole", more)
    whole = lines(tmp_path / "whole")
    monkeypatch.setenv("SYNERGY_CHECKPOINT_DIR", str(tmp_path / "interrupted"))
    # In the first epoch, in the second, at the end of the second, in the third.
    at = [5, 27, 2 * STEPS_OF_AN_EPOCH, 2 * STEPS_OF_AN_EPOCH + 8]
    begun = 0
    for cores, step in zip((2, 1, 2, 1), at, strict=True):
        assert run(example, job, tmp_path / "parts", more, cores=cores, stop_after=step - begun)
        begun = step
    assert not run(example, job, tmp_path / "parts", more, cores=2)
    parts = lines(tmp_path / "parts")
    assert parts == whole
    for epoch in range(3):
        seen = [i for line in parts if line["epoch"] == epoch for i in line["samples"]]
        assert sorted(seen) == list(range(SAMPLES))


def test_sigterm_saves_although_lightning_has_a_handler_of_its_own(
    example: Any, job: Job, tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    job.start(1)
    options = [f"--samples={SAMPLES}", f"--batch-size={BATCH}", "--epochs=1", "--workers=0"]
    parsed = example.parse([*options, "--cpu", f"--out={tmp_path / 'out'}"])
    with pytest.raises(LeaseEnded) as ended:
        example.train(parsed, [at_batch(7, terminate)])
    assert ended.value.code == 143 and job.boards[-1].read_report().checkpoint_done
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000000007"]
    signal.signal(signal.SIGTERM, before)
    assert not run(example, job, tmp_path / "out", "--epochs=1")
    seen = [i for line in lines(tmp_path / "out") for i in line["samples"]]
    assert sorted(seen) == list(range(SAMPLES))


def test_a_trainer_that_was_not_given_the_checkpoint_is_refused(
    example: Any, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(example, job, tmp_path / "out", stop_after=2)
    monkeypatch.setattr(example.LeaseCallback, "ckpt_path", lambda _self: None)
    with pytest.raises(CheckpointError, match=r"ckpt_path=lease\.ckpt_path\(\)"):
        run(example, job, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda loader: [loader, loader], "one training DataLoader"),
        (lambda loader: (batch for batch in [loader]), "one training DataLoader"),
    ],
    ids=["two-loaders", "a-generator"],
)
def test_loaders_that_could_not_be_continued_are_refused(
    example: Any,
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Any], Any],
    what: str,
) -> None:
    fit = example.Trainer.fit

    def with_other_loader(self: Any, module: Any, loader: Any, *more: Any, **named: Any) -> None:
        fit(self, module, change(loader), *more, **named)

    monkeypatch.setattr(example.Trainer, "fit", with_other_loader)
    with pytest.raises(CheckpointError, match=what):
        run(example, job, tmp_path / "out")


def test_without_a_place_for_checkpoints_it_trains_all_the_same(
    example: Any,
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("SYNERGY_CHECKPOINT_DIR")
    assert not run(example, job, tmp_path / "out", "--epochs=1")
    assert len(lines(tmp_path / "out")) == STEPS_OF_AN_EPOCH
    assert "SYNERGY_CHECKPOINT_DIR is not set" in capsys.readouterr().err
