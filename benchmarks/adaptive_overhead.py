#!/usr/bin/env python3
"""What measuring the gradient's noise adds to a training step, on a small convolutional network.

One process. Each pair of blocks trains the same network on the same batches once plainly and once
adaptively, in random order; the figure is the median over the pairs of the CPU time of a step.
``alone``: one pass a step, the noise from consecutive gradients. ``passes``: two passes a step,
against a plain loop that accumulates two. Prints ms per step and the overhead in percent.

    python benchmarks/adaptive_overhead.py --json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import slurm_synergy.jobside as synergy

LIMIT_PERCENT = 1.0
LOCAL_BATCH = 64
SKIPPED_BLOCKS = 2  # the first steps are all measured


class Images(Dataset[tuple[torch.Tensor, int]]):
    """So many images, of 64 different ones."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.images = torch.rand(64, 3, 32, 32)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index % 64], index % 10


class Loop:
    """Trains block by block; ``passes`` batches a step."""

    def __init__(self, data: Images, passes: int) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 64, 10),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.passes = passes
        self.loader: Any = DataLoader(data, batch_size=LOCAL_BATCH, shuffle=True)
        self.batches: Any = None

    def block(self, steps: int) -> float:
        """CPU milliseconds of a step."""
        self.batches = self.batches or iter(self.loader)
        began_s = time.process_time()
        for _ in range(steps):
            for number in range(self.passes):
                images, labels = next(self.batches)
                self.one_pass(images, labels, number)
        return (time.process_time() - began_s) / steps * 1e3

    def one_pass(self, images: Any, labels: Any, number: int) -> None:
        """A plain loop, accumulating by hand."""
        if number == 0:
            self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(images), labels) / self.passes
        loss.backward()  # type: ignore[no-untyped-call]
        if number == self.passes - 1:
            self.optimizer.step()


class AdaptiveLoop(Loop):
    """The same under ``synergy.adaptive``."""

    def __init__(self, data: Images, passes: int) -> None:
        super().__init__(data, passes)
        initial = LOCAL_BATCH * passes
        self.adaptive = synergy.adaptive(
            self.model,
            self.optimizer,
            self.loader,
            batch=(initial, initial),
            local_batch=LOCAL_BATCH,
        )

    def one_pass(self, images: Any, labels: Any, number: int) -> None:
        """A plain loop, as users have it."""
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(images), labels).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def measure(*, passes: int, pairs: int, block: int) -> dict[str, float]:
    """Medians over the pairs: plain_ms, adaptive_ms, overhead_pct."""
    samples = (pairs + SKIPPED_BLOCKS) * block * passes * LOCAL_BATCH
    data = Images(samples)
    plain, ours = Loop(data, passes), AdaptiveLoop(data, passes)
    order = random.Random(0)
    times: list[tuple[float, float]] = []
    for pair in range(pairs + SKIPPED_BLOCKS):
        if order.random() < 0.5:
            one, other = plain.block(block), ours.block(block)
        else:
            other, one = ours.block(block), plain.block(block)
        if pair >= SKIPPED_BLOCKS:
            times.append((one, other))
    base_ms = statistics.median(one for one, _ in times)
    extra_ms = statistics.median(other - one for one, other in times)
    return {
        "plain_ms": round(base_ms, 4),
        "adaptive_ms": round(base_ms + extra_ms, 4),
        "overhead_pct": round(100 * extra_ms / base_ms, 3),
    }


def main() -> int:
    """Measure and print; status 1 when the overhead is 1 % or more."""
    parser = argparse.ArgumentParser(description="Overhead of adaptive training.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--block", type=int, default=20, help="steps per block")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        name: measure(passes=passes, pairs=options.pairs, block=options.block)
        for name, passes in (("alone", 1), ("passes", 2))
    }
    print(json.dumps(found) if options.json else found)
    return int(max(one["overhead_pct"] for one in found.values()) >= LIMIT_PERCENT)


if __name__ == "__main__":
    raise SystemExit(main())
