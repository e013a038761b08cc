#!/usr/bin/env python3
"""Trains on scikit-learn's digits with the Trainer of transformers; can be stopped by lease.

It writes one JSON line per batch ({"loss", "samples"}) to ``--out``. Interrupted anywhere and
continued, with other worker counts, the lines are those of an uninterrupted run.

    srun-less trial:  python examples/train_huggingface.py --checkpoints /tmp/digits-huggingface
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Subset
from train_digits import Digits, build_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from slurm_synergy.jobside.integrations.huggingface import LeaseCallback


class FixedDigits(Dataset[dict[str, torch.Tensor]]):
    """The digits with their numbers, as a dictionary and without random shifts."""

    def __init__(self) -> None:
        digits = Digits()
        self._images, self._labels = digits.images, digits.labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {
            "images": self._images[index],
            "labels": self._labels[index],
            "numbers": torch.tensor(index),
        }


class DigitsModel(nn.Module):
    """The network of train_digits.py, with its loss, as the Trainer wants it."""

    def __init__(self, out: Path, step_seconds: float) -> None:
        super().__init__()
        self.network = build_model()
        self._out, self._step_seconds = out, step_seconds

    def forward(
        self, images: torch.Tensor, labels: torch.Tensor, numbers: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The loss of a batch, which goes into the file."""
        logits = self.network(images)
        loss = nn.functional.cross_entropy(logits, labels)
        if self.training:
            line: dict[str, Any] = {"loss": loss.item(), "samples": numbers.tolist()}
            with self._out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            time.sleep(self._step_seconds)
        return {"loss": loss, "logits": logits}


def train(options: argparse.Namespace, callbacks: Sequence[TrainerCallback] = ()) -> None:
    """Train, or continue training."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    data = FixedDigits()
    args = TrainingArguments(
        output_dir=str(options.checkpoints),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulate,
        dataloader_num_workers=options.workers,
        learning_rate=0.01,
        seed=options.seed,
        save_strategy="no",  # besides at a stop; any other works as well
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        use_cpu=options.cpu,
    )
    lease = LeaseCallback()
    trainer = Trainer(
        model=DigitsModel(options.out, options.step_seconds),
        args=args,
        train_dataset=Subset(data, range(min(options.samples, len(data)))),
        callbacks=[lease, *callbacks],
    )
    trainer.train(resume_from_checkpoint=lease.checkpoint(args))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--workers", type=int, default=2, help="loader workers without a lease")
    parser.add_argument("--samples", type=int, default=1797)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="sleep per batch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", help="train on the CPU in any case")
    parser.add_argument("--out", type=Path, default=Path("digits-huggingface.jsonl"))
    parser.add_argument("--checkpoints", type=Path, default=Path("digits-huggingface"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(parse())
