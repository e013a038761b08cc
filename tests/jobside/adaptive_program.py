"""An adaptive training on several ranks whose gradients have a known noise; run by the tests.

usage: adaptive_program.py OUT SAMPLES EPOCHS LO HI LOCAL OPTIMIZER [FEED [PAUSE_S]]

The loss is linear in the weights, so the gradient of a sample is the sample itself whatever the
weights: its mean is a known vector, its covariance a known one too. Rank 0 plays the controller:
FEED is ``STEP=BATCH,...``, leases to write when so many steps are done. PAUSE_S stretches
passes. Each rank writes one line per pass to OUT/<rank>-of-<world>.jsonl and what it knows in
the end to OUT/<rank>.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import slurm_synergy.jobside as synergy
from slurm_synergy.jobside.board import Board

DIMENSIONS = 40
SQUARE = 4.0
PER_SAMPLE_VARIANCE = 200.0


class Vectors(Dataset[tuple[int, torch.Tensor]]):
    """Sample i is i and a vector: the true gradient and noise."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(11)
        noise = torch.randn(samples, DIMENSIONS, generator=generator)
        true = torch.full((DIMENSIONS,), (SQUARE / DIMENSIONS) ** 0.5)
        noise -= noise.mean(0)
        self.vectors = true + noise * (PER_SAMPLE_VARIANCE / DIMENSIONS) ** 0.5

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.vectors[index]


class Linear(nn.Module):
    """The scalar product with the weights, in two parameters as models have several."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(DIMENSIONS // 2))
        self.second = nn.Parameter(torch.zeros(DIMENSIONS // 2))

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors @ torch.cat([self.first, self.second])


def main() -> None:
    """Train; every rank must hold the same weights in the end."""
    out = Path(sys.argv[1])
    samples, epochs, lo, hi, local = (int(word) for word in sys.argv[2:7])
    kind, feed = sys.argv[7], sys.argv[8] if len(sys.argv) > 8 else ""
    pause_s = float(sys.argv[9]) if len(sys.argv) > 9 else 0.0
    leases = dict(tuple(map(int, pair.split("="))) for pair in feed.split(",") if pair)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    board = Board.attach(Path(os.environ["SYNERGY_BOARD"]))
    model = DistributedDataParallel(Linear())
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    data = Vectors(samples)
    sampler: DistributedSampler[int] = DistributedSampler(data, seed=5)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=1)
    adaptive = synergy.adaptive(model, optimizer, loader, batch=(lo, hi), local_batch=local)
    synergy.register(model=model, optimizer=optimizer, adaptive=adaptive)
    synergy.resume()
    with (out / f"{rank}-of-{world}.jsonl").open("a") as log:
        for epoch in synergy.epochs(epochs):
            sampler.set_epoch(epoch)
            for indices, vectors in loader:
                optimizer.zero_grad()
                model(vectors).mean().backward()
                optimizer.step()
                line = {"epoch": epoch, "samples": indices.tolist(), "batch": adaptive.batch.total}
                log.write(json.dumps({**line, "steps": adaptive.steps}) + "\n")
                log.flush()
                time.sleep(pause_s)
                if rank == 0 and (wanted := leases.pop(adaptive.steps, None)) is not None:
                    board.write_lease(replace(board.read_lease(), batch_size=wanted))
    known = adaptive.statistics
    summary = {
        "square": known.square if known else None,
        "variance": known.variance if known else None,
        "progress": adaptive.progress,
        "steps": adaptive.steps,
        "weights": torch.cat([one.detach() for one in model.parameters()]).tolist(),
    }
    (out / f"{rank}.json").write_text(json.dumps(summary))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
