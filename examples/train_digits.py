#!/usr/bin/env python3
"""Trains a small network on scikit-learn's handwritten digits: a real job that can be stopped.

It writes one JSON line per step ({"step", "epoch", "loss"}) to ``--out``, and at the end one with
the SHA-256 of the final weights. Interrupted by lease and continued, on other nodes and with other
worker counts, it writes exactly what an uninterrupted run with the same seed writes; a repeated
step (the work since the last checkpoint) overwrites its earlier line.

    srun-less trial:  SYNERGY_CHECKPOINT_DIR=/tmp/digits python examples/train_digits.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

import slurm_synergy.jobside as synergy


class Digits(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """1,797 images of 8 x 8 pixels, each shifted a little at random when it is fetched."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images = torch.tensor(images, dtype=torch.float32).reshape(-1, 8, 8) / 16
        self.labels = torch.tensor(labels, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        shift = (random.randint(-1, 1), random.randint(-1, 1))
        return torch.roll(self.images[index], shift, dims=(0, 1)), self.labels[index]


def build_model() -> nn.Module:
    """A convolution and two dense layers with dropout; 10 classes."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(16 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class LossFile:
    """The loss curve; its position is part of the training state, so no step is there twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes = self.steps = 0
        path.touch()

    def state_dict(self) -> dict[str, int]:
        return {"bytes": self._bytes, "steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._bytes, self.steps = state["bytes"], state["steps"]

    def add_step(self, epoch: int, loss: float) -> None:
        self.steps += 1
        self.write(step=self.steps, epoch=epoch, loss=loss)

    def write(self, **values: object) -> None:
        line = json.dumps(values).encode() + b"\n"
        with self._path.open("r+b") as file:
            file.seek(self._bytes)
            file.write(line)
            file.truncate()
        self._bytes += len(line)


def weights_sum(model: nn.Module) -> str:
    """SHA-256 over all weights, in the order of their names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def train(options: argparse.Namespace) -> None:
    """Train, or continue training, and write the results."""
    torch.manual_seed(options.seed)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs)
    losses = LossFile(options.out)
    loader = DataLoader(
        Digits(), batch_size=options.batch_size, shuffle=True, num_workers=options.workers
    )

    synergy.register(model=model, optimizer=optimizer, scheduler=scheduler, losses=losses)
    if synergy.resume():
        print(f"continuing after {scheduler.last_epoch} whole epochs", flush=True)
    for epoch in synergy.epochs(options.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.add_step(epoch, loss.item())
            time.sleep(options.step_seconds)
        scheduler.step()
    losses.write(step=losses.steps, weights_sha256=weights_sum(model))


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=2, help="loader workers without a lease")
    parser.add_argument(
        "--step-seconds", type=float, default=0.0, help="sleep per step, to stretch the time"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("digits.jsonl"))
    train(parser.parse_args())


if __name__ == "__main__":
    main()
