#!/usr/bin/env python3
"""What our DataLoader iterator costs per batch, against PyTorch's own, in the same run.

The step between two batches is emulated by spinning, as the training process would be busy (a
sleep would add the timer's own error, which is larger than what is measured); what is timed is the
call for the next batch. Blocks of batches from both iterators alternate, in random order within a
pair, over the same data set. A block's figure is the mean of its calls, without those that took
more than five times their median, where another program had the core; the result is the median
over the pairs. Batches are fetched in the training process (no workers), which would hide most of
what is to be measured. The loader is as after ``synergy.register``: our own order, the lease
looked at for every batch, a report on the board ten times a second. Prints the times per batch in
ms, step included.

With ``--cached`` each item is a file of ``--file-kib``, which the plain loader reads from the page
cache and ours from the job's data cache, as a declared data set is by injection. Each has gone
through all items once before; ours has filled the cache meanwhile. All items lie in memory twice,
so the default is fewer batches.

    python benchmarks/iterator_overhead.py --json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import slurm_synergy.jobside as synergy
from slurm_synergy.jobside import torch_loader
from slurm_synergy.jobside.board import Board, LeaseView
from slurm_synergy.jobside.minio_job import job_cache

EXIT_TOO_SLOW = 1
LIMIT_PERCENT = 1.0
TAKEN_AWAY = 5.0
WARM_UP = 2
BATCH_SIZE = 8


class Files(Dataset[torch.Tensor]):
    """``items`` items, each read from a file of its own in ``place``."""

    synergy_deterministic = True  # what the cache goes by

    def __init__(self, place: Path, items: int, file_bytes: int) -> None:
        self._paths = [place / f"item-{number}" for number in range(items)]
        for path in self._paths:
            path.write_bytes(os.urandom(file_bytes))

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        content = bytearray(self._paths[index].read_bytes())
        return torch.frombuffer(content, dtype=torch.uint8)


def _block_ms(batches: Iterator[Any], count: int, step_s: float) -> float:
    """Mean time of the calls for a batch, each after an emulated step."""
    clock = time.perf_counter
    took_s = []
    for _ in range(count):
        busy_until_s = clock() + step_s
        while clock() < busy_until_s:
            pass
        called_s = clock()
        next(batches)
        took_s.append(clock() - called_s)
    limit_s = TAKEN_AWAY * statistics.median(took_s)
    return statistics.fmean(each for each in took_s if each <= limit_s) * 1e3


def measure(
    *, pairs: int, block: int, step_s: float, cached_in: Path | None = None, file_bytes: int = 0
) -> dict[str, float]:
    """Medians over ``pairs`` of blocks of ``block`` batches: plain_ms, ours_ms, overhead_pct."""
    items = (pairs + WARM_UP + 1) * block * BATCH_SIZE
    data: Any = TensorDataset(torch.zeros(items, 16))
    if cached_in is not None:
        data = Files(cached_in, items, file_bytes)

    def loader() -> DataLoader[Any]:
        return DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)

    if cached_in is not None:
        for _batch in loader():
            pass
    plain = iter(loader())
    torch_loader.install(torch.utils.data)
    synergy.register()
    synergy.resume()
    our_loader = loader()
    if cached_in is not None:
        for _batch in our_loader:
            pass
        held = job_cache().store
        assert held is not None and held.head.items == items
    ours = iter(our_loader)
    assert type(ours) is not type(plain)
    order = random.Random(0)
    plain_ms: list[float] = []
    ours_ms: list[float] = []
    for pair in range(pairs + WARM_UP):
        both = [(plain, plain_ms), (ours, ours_ms)]
        order.shuffle(both)
        for batches, times in both:
            took_ms = _block_ms(batches, block, step_s)
            if pair >= WARM_UP:
                times.append(took_ms)
    extra_ms = statistics.median(o - p for o, p in zip(ours_ms, plain_ms, strict=True))
    base_ms = step_s * 1e3 + statistics.median(plain_ms)
    return {
        "plain_ms": round(base_ms, 5),
        "ours_ms": round(base_ms + extra_ms, 5),
        "overhead_pct": round(100 * extra_ms / base_ms, 3),
    }


def main() -> int:
    """Measure and print; status 1 when the overhead is 1 % or more."""
    parser = argparse.ArgumentParser(description="Overhead of the lease-aware DataLoader.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--pairs", type=int, help="default: 50, with --cached 20")
    parser.add_argument("--block", type=int, help="batches per block: 100, with --cached 25")
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--file-kib", type=int, default=110, help="with --cached: size of a file")
    parser.add_argument("--cached", action="store_true", help="files, and ours through the cache")
    options = parser.parse_args()
    pairs, block = (20, 25) if options.cached else (50, 100)
    torch.set_num_threads(1)
    memory = Path("/dev/shm") if options.cached and Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory) as place:
        board = Board.create(Path(place) / "board", rank=0, ranks=1)
        board.write_lease(LeaseView(core_count=1, mem_mib=4096 if options.cached else 0))
        os.environ["SYNERGY_BOARD"] = str(board.path)
        os.environ["SYNERGY_CHECKPOINT_DIR"] = str(Path(place) / "checkpoints")
        os.environ["SYNERGY_CACHE_DIR"] = place
        result = measure(
            pairs=options.pairs or pairs,
            block=options.block or block,
            step_s=options.step_ms / 1e3,
            cached_in=Path(place) if options.cached else None,
            file_bytes=options.file_kib << 10,
        )
    if options.json:
        print(json.dumps(result))
    else:
        print(
            f"plain {result['plain_ms']:.4f} ms, ours {result['ours_ms']:.4f} ms per batch:"
            f" {result['overhead_pct']:.2f} % (limit {LIMIT_PERCENT:g} %)"
        )
    return EXIT_TOO_SLOW if result["overhead_pct"] >= LIMIT_PERCENT else 0


if __name__ == "__main__":
    raise SystemExit(main())
