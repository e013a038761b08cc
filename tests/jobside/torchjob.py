"""What the tests of lease-aware loaders share: data sets, and incarnations of a job in-process."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from inprocess import lease
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from slurm_synergy.jobside import session as session_module
from slurm_synergy.jobside import torch_loader
from slurm_synergy.jobside.board import Board


class Numbers(Dataset[int]):
    """Sample i is the number i."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        return index


class Noise(Numbers):
    """Random augmentation, drawn where the sample is fetched."""

    def __getitem__(self, index: int) -> float:
        return index + random.random() + float(torch.rand(1))


class Workers(Numbers):
    """Tells who fetched: the number of workers, the worker's affinity, its SIGTERM handler."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        return (
            index,
            info.num_workers if info else 0,
            os.getpid(),
            len(os.sched_getaffinity(0)),
            int(default),
        )


class Stream(IterableDataset[int]):
    """A stream without positions, split among workers."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(first, self.samples, step))


class Values:
    """The least that can be registered."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = list(state["values"])


def as_list(batch: Any) -> list[Any]:
    """A collate function that can be pickled and changes nothing."""
    return list(batch)


class Job:
    """Incarnations of one job inside this process: each begins with nothing but its files."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._tmp_path, self._monkeypatch = tmp_path, monkeypatch
        self.boards: list[Board] = []
        monkeypatch.setenv("SYNERGY_CHECKPOINT_DIR", str(tmp_path / "checkpoints"))
        # These epochs take milliseconds: look at the board for every batch, report every one.
        monkeypatch.setattr(session_module, "_LOOK_EVERY_S", 0.0)
        monkeypatch.setattr(session_module, "_REPORT_EVERY_S", 0.0)

    def start(self, cores: int | None = 2, *, seed: int = 7) -> Board | None:
        """A new incarnation; ``cores`` None: without a launcher."""
        self._monkeypatch.setattr(session_module, "_session", None)
        self._monkeypatch.setattr(torch_loader, "_primary", lambda: None)
        torch.manual_seed(seed)
        random.seed(seed)
        if cores is None:
            self._monkeypatch.delenv("SYNERGY_BOARD", raising=False)
            return None
        board = Board.create(self._tmp_path / f"board{len(self.boards)}", rank=0, ranks=1)
        board.write_lease(lease(cores))
        self.boards.append(board)
        self._monkeypatch.setenv("SYNERGY_BOARD", str(board.path))
        torch_loader.install(torch.utils.data)
        return board


def flat(batches: Any) -> list[int]:
    return [int(value) for batch in batches for value in batch]


def stop(board: Board | None) -> None:
    assert board is not None
    board.write_lease(lease(board.read_lease().core_count, stop=True))
