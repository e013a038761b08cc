#!/usr/bin/env python3
"""Trains on scikit-learn's digits with Lightning; can be stopped by lease and continued exactly.

It writes one JSON line per batch ({"batch", "epoch", "loss", "samples"}) to ``--out``. Interrupted
anywhere and continued, with other worker counts, the lines are those of an uninterrupted run.

    srun-less trial:  SYNERGY_CHECKPOINT_DIR=/tmp/digits python examples/train_lightning.py
    several GPUs:     synergy-srun python examples/train_lightning.py --devices 4 --nodes 2
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Subset
from train_digits import Digits, build_model

from slurm_synergy.jobside.integrations.lightning import LeaseCallback


class NumberedDigits(Digits):
    """The digits with their numbers, to show which were used."""

    def __getitem__(self, index: int) -> Any:
        return index, *super().__getitem__(index)


class DigitsModule(LightningModule):  # type: ignore[misc]
    """The network of train_digits.py."""

    def __init__(self, out: Path, step_seconds: float) -> None:
        super().__init__()
        self.model = build_model()
        self._out, self._step_seconds = out, step_seconds

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """One batch; its loss goes into the file."""
        indices, images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        line = {
            "batch": batch_idx,
            "epoch": self.current_epoch,
            "loss": loss.item(),
            "samples": indices.tolist(),
        }
        with self._out.open("a") as file:
            file.write(json.dumps(line) + "\n")
        time.sleep(self._step_seconds)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """The share of digits that are recognised."""
        _indices, images, labels = batch
        self.log("accuracy", (self.model(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> Any:
        """SGD with momentum and a cosine schedule."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)]


def train(options: argparse.Namespace, callbacks: Sequence[Callback] = ()) -> None:
    """Train, or continue training."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    data = NumberedDigits()
    numbers = range(min(options.samples, len(data)))
    training = DataLoader(
        Subset(data, numbers),
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
    )
    validation = DataLoader(Subset(data, range(len(numbers), len(data))), batch_size=256)

    lease = LeaseCallback()
    trainer = Trainer(
        accelerator="cpu" if options.cpu else "auto",
        devices=options.devices,
        num_nodes=options.nodes,
        strategy="ddp" if options.devices * options.nodes > 1 else "auto",
        max_epochs=options.epochs,
        accumulate_grad_batches=options.accumulate,
        callbacks=[lease, *callbacks],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        logger=False,
    )
    module = DigitsModule(options.out, options.step_seconds)
    trainer.fit(module, training, validation, ckpt_path=lease.ckpt_path())


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--workers", type=int, default=2, help="loader workers without a lease")
    parser.add_argument("--samples", type=int, default=1600, help="the rest is for validation")
    parser.add_argument("--devices", type=int, default=1, help="tasks on each node")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="sleep per batch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU in any case")
    parser.add_argument("--out", type=Path, default=Path("digits-lightning.jsonl"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(parse())
