#!/usr/bin/env python3
"""Trains the digits network until it is accurate enough, with a batch size that follows the lease.

With SGD under AdaScale: what was tuned for a batch of 32 keeps working for one of hundreds. Prints
one JSON line per epoch ({"epoch", "batch", "accuracy", "steps", "samples", "progress"}) to
``--out``; stops at ``--target`` or after the progress of ``--epochs`` epochs.

    synergy-srun python examples/adaptive_digits.py
    srun-less trial:  python examples/adaptive_digits.py --batch 32 512
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import slurm_synergy.jobside as synergy


def make_data() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """1,437 images to train with, and 360 (every fifth) with their labels to judge by."""
    images, labels = load_digits(return_X_y=True)
    points = torch.tensor(images, dtype=torch.float32) / 16
    classes = torch.tensor(labels, dtype=torch.int64)
    judged = torch.arange(len(classes)) % 5 == 0
    return TensorDataset(points[~judged], classes[~judged]), points[judged], classes[judged]


def build_model() -> nn.Module:
    """Two dense layers; 10 classes."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(options: argparse.Namespace) -> None:
    """Train, or continue training."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    data, points, classes = make_data()
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.rate)
    lo, hi = options.batch
    loader = DataLoader(data, batch_size=lo, shuffle=True)
    adaptive = synergy.adaptive(
        model, optimizer, loader, batch=(lo, hi), local_batch=options.local_batch
    )
    scheduler = adaptive.schedule(
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5), per="epoch"
    )
    synergy.register(model=model, optimizer=optimizer, scheduler=scheduler, adaptive=adaptive)
    synergy.resume()
    progress = synergy.state()  # travels with the checkpoints
    with options.out.open("a") as out:
        for epoch in adaptive.epochs(options.epochs):
            for images, labels in loader:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(images), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                progress["samples"] = progress.get("samples", 0) + len(labels)
            with torch.no_grad():
                accuracy = (model(points).argmax(1) == classes).float().mean().item()
            line = {"epoch": epoch, "batch": adaptive.batch.total, "accuracy": accuracy}
            line |= {"steps": adaptive.steps, "samples": progress["samples"]}
            out.write(json.dumps(line | {"progress": adaptive.epochs_done}) + "\n")
            out.flush()
            if accuracy >= options.target:
                return


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, nargs=2, default=(32, 512), metavar=("LO", "HI"))
    parser.add_argument("--local-batch", type=int, default=128, help="of one pass on one GPU")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate at LO")
    parser.add_argument("--epochs", type=int, default=40, help="at the batch size LO")
    parser.add_argument("--target", type=float, default=0.96, help="accuracy to stop at")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("adaptive.jsonl"))
    train(parser.parse_args())


if __name__ == "__main__":
    main()
