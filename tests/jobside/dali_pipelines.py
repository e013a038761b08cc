"""Real DALI pipelines on the CPU, and incarnations of a job that trains from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import nvidia.dali.fn as fn
import nvidia.dali.types as types
import pytest
from inprocess import lease
from nvidia.dali import pipeline as pipeline_module
from nvidia.dali import pipeline_def
from nvidia.dali.plugin import pytorch as plugin_module

import slurm_synergy.jobside as synergy
from slurm_synergy.jobside import dali_loader
from slurm_synergy.jobside import session as session_module
from slurm_synergy.jobside.board import Board

SAMPLES = 23


def write_files(directory: Path, samples: int = SAMPLES) -> list[str]:
    """Sample i is a file of four bytes i."""
    directory.mkdir(exist_ok=True)
    paths = [directory / f"{number:03}.bin" for number in range(samples)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number] * 4))
    return [str(path) for path in paths]


@pipeline_def
def numbers(files: list[str], reader: dict[str, Any]) -> Any:
    """(number of the sample, a random number): both tell whether a pipeline continues exactly."""
    reader = {"random_shuffle": True, "initial_fill": 8, "name": "reader", **reader}
    content, label = fn.readers.file(files=files, labels=list(range(len(files))), **reader)
    return fn.cast(content, dtype=types.INT32), label, fn.random.uniform(range=(0, 1))


class Counting:
    """An external source that answers for any number: a batch of the same number."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __call__(self, number: int) -> Any:
        if number >= self.batches:
            raise StopIteration
        return [np.full(2, number, dtype=np.int64)] * 4


@pipeline_def
def counted(source: Any, more: dict[str, Any]) -> Any:
    """What an external source gives, and a random number."""
    label = fn.external_source(source=source, dtype=types.INT64, **more)
    return label, fn.random.uniform(range=(0, 1))


class Values:
    """The least that can be registered."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {}


class Job:
    """Incarnations of one job inside this process: each begins with nothing but its files."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._tmp_path, self._monkeypatch = tmp_path, monkeypatch
        self.boards: list[Board] = []
        self.files = write_files(tmp_path / "data")
        # These epochs take milliseconds: look at the board for every batch, report every one.
        monkeypatch.setattr(session_module, "_LOOK_EVERY_S", 0.0)
        monkeypatch.setattr(session_module, "_REPORT_EVERY_S", 0.0)
        dali_loader.install_pipelines(pipeline_module)
        dali_loader.install_iterators(plugin_module)

    def start(self, cores: int | None = 2, *, name: str = "job") -> Board | None:
        """A new incarnation; ``cores`` None: without a launcher and without a checkpoint."""
        self._monkeypatch.setattr(session_module, "_session", None)
        self._monkeypatch.setattr(dali_loader, "_primary", lambda: None)
        for variable in ("SYNERGY_BOARD", "SYNERGY_CHECKPOINT_DIR"):
            self._monkeypatch.delenv(variable, raising=False)
        if cores is None:
            return None
        board = Board.create(self._tmp_path / f"board{len(self.boards)}", rank=0, ranks=1)
        board.write_lease(lease(cores))
        self.boards.append(board)
        self._monkeypatch.setenv("SYNERGY_BOARD", str(board.path))
        self._monkeypatch.setenv("SYNERGY_CHECKPOINT_DIR", str(self._tmp_path / f"ckpt-{name}"))
        return board

    @property
    def board(self) -> Board:
        return self.boards[-1]

    def stop(self) -> None:
        """The lease ends."""
        cores = self.board.read_lease().core_count
        self.board.write_lease(lease(cores, stop=True))


Seen = list[tuple[int, list[int], float]]


def seen(epoch: int, batch: Any) -> tuple[int, list[int], float]:
    """A batch of an iterator over ``numbers``, over all its pipelines."""
    labels = [int(label) for part in batch for label in part["label"].ravel()]
    return epoch, labels, round(sum(float(part["noise"].sum()) for part in batch), 4)


def train(loader: Any, epochs: int, found: Seen, *, at: dict[int, Callable[[], None]]) -> Seen:
    """The loop of a program; ``at[n]`` is called when n batches were seen. Ends as it does."""
    for epoch in synergy.epochs(epochs):
        for batch in loader:
            found.append(seen(epoch, batch))
            at.get(len(found), lambda: None)()
        if loader._auto_reset == "no":
            loader.reset()
    return found
