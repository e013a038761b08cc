#!/usr/bin/env python3
"""Trains on several ranks, with DistributedDataParallel or (``--shard``) with a sharded model.

Can be stopped by lease and continued exactly, with another number of ranks too. Rank 0 writes one
JSON line per step ({"step", "epoch", "loss", "samples", "ranks", "run"}) to ``--out``: the mean
loss and the samples of all ranks, the number of them, and that of the job's restarts. The batch is
split among the ranks, so that the losses do not depend on their number.

    synergy-srun --ntasks-per-node=4 python examples/train_distributed.py --shard
    srun-less trial:  SYNERGY_CHECKPOINT_DIR=/tmp/distributed \\
                      torchrun --nproc-per-node=2 examples/train_distributed.py
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import slurm_synergy.jobside as synergy


def make_data(samples: int) -> TensorDataset:
    """Points of two rings, their classes, and their numbers."""
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(2, (samples,), generator=generator)
    angle = torch.rand(samples, generator=generator, dtype=torch.float64) * 6.2832
    radius = 1.0 + classes + 0.3 * torch.randn(samples, generator=generator, dtype=torch.float64)
    points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return TensorDataset(points, classes, torch.arange(samples))


def build_model() -> nn.Sequential:
    """Two dense layers; in double precision, so that sums in another order hardly differ."""
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2)).double()


def over_ranks(model: nn.Sequential, device: torch.device, *, shard: bool) -> nn.Module:
    """The model over all ranks: each has a copy, or a part of every parameter."""
    if not shard:
        return DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def register(model: nn.Module, optimizer: torch.optim.Optimizer, *, shard: bool) -> None:
    """What makes up the state; a sharded model is saved by all ranks together."""
    if not shard:
        synergy.register(model=model, optimizer=optimizer)
        return
    from slurm_synergy.jobside.integrations.fsdp import ShardedState

    synergy.register(sharded=ShardedState(model, optimizer))


def report(out: Path, step: int, epoch: int, loss: torch.Tensor, numbers: torch.Tensor) -> None:
    """Rank 0 writes the mean loss and the samples of all ranks."""
    world = dist.get_world_size()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    used: list[Any] = [None] * world
    dist.all_gather_object(used, numbers.tolist())
    if dist.get_rank() == 0:
        samples = sorted(number for part in used for number in part)
        line = {"step": step, "epoch": epoch, "loss": mean.item() / world, "samples": samples}
        line |= {"ranks": world, "run": int(os.environ.get("SLURM_RESTART_COUNT") or 0)}
        with out.open("a") as file:
            file.write(json.dumps(line) + "\n")


def train(options: argparse.Namespace) -> None:
    """Train, or continue training."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.manual_seed(options.seed)
    model = over_ranks(build_model().to(device), device, shard=options.shard)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = make_data(options.samples)
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=options.seed)
    loader = DataLoader(
        data, batch_size=options.batch_size // world, sampler=sampler, num_workers=options.workers
    )
    register(model, optimizer, shard=options.shard)
    synergy.resume()
    progress = synergy.state()  # travels with the checkpoints
    for epoch in synergy.epochs(options.epochs):
        sampler.set_epoch(epoch)
        for points, classes, numbers in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points.to(device)), classes.to(device))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            progress["steps"] = progress.get("steps", 0) + 1
            report(options.out, progress["steps"], epoch, loss, numbers)
            time.sleep(options.step_seconds)


def main() -> None:
    """Read the command line, meet the other ranks, and train."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--shard", action="store_true", help="shard the model over the ranks (FSDP)"
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1200)
    parser.add_argument("--batch-size", type=int, default=12, help="of all ranks together")
    parser.add_argument("--workers", type=int, default=1, help="loader workers without a lease")
    parser.add_argument("--step-seconds", type=float, default=0.0, help="sleep per step")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("distributed.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ:  # started by synergy-srun
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
