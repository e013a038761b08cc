"""A training loop that only its loader's CPU time limits: 2 ms of a core per sample.

Each epoch's seconds go to standard output; with BENCH_TRACE set, the time of every batch goes to
that file (monotonic seconds, one a line).
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

BATCH = 8
SAMPLE_CPU_S = 0.002


class Images(Dataset[int]):
    """``samples`` items, each of which takes the same CPU time to make."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> int:
        until_s = time.thread_time() + SAMPLE_CPU_S
        while time.thread_time() < until_s:
            pass
        return index


def main() -> None:
    """``cpu_bound_train.py SAMPLES EPOCHS WORKERS``."""
    samples, epochs, workers = (int(word) for word in sys.argv[1:4])
    torch.set_num_threads(1)
    # There are two workers on purpose, on one core too.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    loader = DataLoader(
        Images(samples),
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
        persistent_workers=True,
    )
    trace = os.environ.get("BENCH_TRACE")
    times = Path(trace).open("w", encoding="ascii", buffering=1) if trace else None  # noqa: SIM115
    for _ in range(epochs):
        began_s = time.monotonic()
        for _batch in loader:
            if times is not None:
                times.write(f"{time.monotonic()}\n")
        print(time.monotonic() - began_s, flush=True)


if __name__ == "__main__":
    main()
