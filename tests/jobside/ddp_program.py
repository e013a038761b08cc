"""A distributed training as a user writes it; run by the tests, not by pytest.

usage: ddp_program.py LOG_DIR EPOCHS STEP_S
Each rank appends one line per step to LOG_DIR/<rank>-of-<world>.jsonl: step, epoch, samples.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import slurm_synergy.jobside as synergy

SAMPLES = 101


class Points(Dataset[tuple[int, torch.Tensor]]):
    """Sample i is i and a point made from it."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.tensor([index / SAMPLES, 1.0])


def main() -> None:
    """Train for a while; every rank must see the same weights in the end."""
    log_dir, epochs, step_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(100 + rank)  # ranks seeded differently, as programs often do
    model = DistributedDataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = Points()
    sampler: DistributedSampler[int] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=3, sampler=sampler, num_workers=1)
    synergy.register(model=model, optimizer=optimizer)
    synergy.resume()
    log = (log_dir / f"{rank}-of-{world}.jsonl").open("a")
    for epoch in synergy.epochs(epochs):
        sampler.set_epoch(epoch)
        for indices, points in loader:
            optimizer.zero_grad()
            model(points).square().mean().backward()
            optimizer.step()
            log.write(json.dumps({"epoch": epoch, "samples": indices.tolist()}) + "\n")
            log.flush()
            time.sleep(step_s * (1 + rank))  # ranks of different speed
    weights = [torch.zeros(1, 2) for _ in range(world)]
    dist.all_gather(weights, model.module.weight.detach())
    assert all(torch.equal(weights[0], other) for other in weights)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
