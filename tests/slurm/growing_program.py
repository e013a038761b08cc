"""An adaptive training on as many ranks as it gets, which more GPUs make faster; run by the tests.

usage: growing_program.py OUT SAMPLES LO HI LOCAL SAMPLE_S DONE

A sample takes SAMPLE_S of its rank's time, and its gradient is mostly noise, so that twice the GPUs
with twice the batch learn nearly twice as fast. Rank 0 writes one line per pass to OUT, as
``examples/train_distributed.py`` does, with the batch size. Ends after the epoch in which the file
DONE is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import slurm_synergy.jobside as synergy

DIMENSIONS = 40


def make_data(samples: int) -> TensorDataset:
    """Vectors with a small mean, and their numbers."""
    vectors = torch.randn(samples, DIMENSIONS, generator=torch.Generator().manual_seed(11))
    return TensorDataset(vectors + 0.05, torch.arange(samples))


def write(out: Path, epoch: int, numbers: torch.Tensor, batch: int) -> None:
    """Rank 0 writes the samples that all ranks have had in this pass."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, numbers.tolist())
    if dist.get_rank() == 0:
        progress = synergy.state()  # travels with the checkpoints
        progress["passes"] = progress.get("passes", 0) + 1
        line = {"step": progress["passes"], "epoch": epoch, "ranks": len(parts), "batch": batch}
        line |= {"run": int(os.environ.get("SLURM_RESTART_COUNT") or 0)}
        with out.open("a") as file:
            numbers_of_all = sorted(number for part in parts for number in part)
            file.write(json.dumps({**line, "samples": numbers_of_all}) + "\n")


def is_done(done: Path) -> bool:
    """As rank 0 sees it."""
    seen = torch.tensor([float(done.exists())])
    dist.broadcast(seen, 0)
    return bool(seen.item())


def main() -> None:
    """Train until told to end."""
    out, done = Path(sys.argv[1]), Path(sys.argv[7])
    samples, lo, hi, local = (int(word) for word in sys.argv[2:6])
    sample_s = float(sys.argv[6])
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    model = DistributedDataParallel(nn.Linear(DIMENSIONS, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    data = make_data(samples)
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=5)
    loader = DataLoader(data, batch_size=local, sampler=sampler)
    adaptive = synergy.adaptive(model, optimizer, loader, batch=(lo, hi), local_batch=local)
    synergy.register(model=model, optimizer=optimizer, adaptive=adaptive)
    synergy.resume()
    for epoch in synergy.epochs(10_000):
        sampler.set_epoch(epoch)
        for vectors, numbers in loader:
            optimizer.zero_grad()
            model(vectors).mean().backward()
            optimizer.step()
            write(out, epoch, numbers, adaptive.batch.total)
            time.sleep(sample_s * len(numbers))
        if is_done(done):
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
