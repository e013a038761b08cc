#!/usr/bin/env python3
"""A PyTorch training loop whose hardware is emulated; the loop itself is an ordinary one.

The loop below is what a user writes: a Dataset, a DataLoader with worker processes, a step for
each batch. Only the two costs that a machine would cause are pretended, by sleeping:

* a worker sleeps as long as fetching and preprocessing its batch would take on one core, and
* the training process sleeps as long as the GPUs would compute on the batch.

How long that is comes from the catalogue of published figures. How fast the job runs does not: it
comes out of the worker processes running ahead of the training process (or failing to). A busy
machine wakes a sleeper late; the pretended hardware would not have been late, so that what was
overslept is taken off the next cost of the same process.

The number of workers is the number of cores, as in any DataLoader program; where the lease has
fewer cores by now, the workers share them. There is no cache in
this program, so the share of items that a cache of the job's memory budget would hold is emulated
too: the budget is SYNERGY_LEASE_MEM_MIB (kept up to date on the board in SYNERGY_BOARD) where
there is one, else Slurm's SLURM_MEM_PER_NODE, else --memory-mib.

Run it by hand:  python examples/emulated_train.py --model resnet18-imagenet --samples 40000
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.model import PipelineModel, Profile
from slurm_synergy.core.pipeline import loader_rate
from slurm_synergy.errors import SynergyError
from slurm_synergy.jobside.board import Board, LeaseView

REPORT_EVERY_S = 1.0


class Share:
    """The memory in MiB that the job may use on this node, and its cores, as far as it was told."""

    def __init__(self, fallback_mib: int) -> None:
        self._fallback_mib = fallback_mib
        self._board: Board | None = None
        self._board_pid = 0

    def now_mib(self) -> int:
        """The budget at this moment; it changes while the job runs when its lease does."""
        return self._lease().mem_mib or self._told_mib()

    def busy_cores(self, workers: int) -> int:
        """How many of ``workers`` can run at once: the lease may have fewer cores by now."""
        return min(workers, self._lease().core_count or workers)

    def _lease(self) -> LeaseView:
        path = os.environ.get("SYNERGY_BOARD")
        if path and self._board_pid != os.getpid():  # a worker opens the board for itself
            self._board, self._board_pid = _attach(path), os.getpid()
        return LeaseView() if self._board is None else self._board.read_lease()

    def _told_mib(self) -> int:
        for name in ("SYNERGY_LEASE_MEM_MIB", "SLURM_MEM_PER_NODE"):
            value = os.environ.get(name, "")
            if value.isdigit() and int(value) > 0:
                return int(value)
        return self._fallback_mib

    def __getstate__(self) -> dict[str, object]:
        return {"_fallback_mib": self._fallback_mib, "_board": None, "_board_pid": 0}


def _attach(path: str) -> Board | None:
    try:
        return Board.attach(Path(path))
    except SynergyError as err:
        print(f"emulated_train: {err}; using the memory of the start", file=sys.stderr)
        return None


class Pretended:
    """Hardware of this process that is pretended: using it takes as long as it would take there."""

    def __init__(self) -> None:
        self._late_s = 0.0

    def use(self, cost_s: float) -> None:
        """Sleep for a cost, less what was overslept before."""
        due_s = time.monotonic() + cost_s - self._late_s
        time.sleep(max(due_s - time.monotonic(), 0.0))
        self._late_s = max(time.monotonic() - due_s, 0.0)


class EmulatedImages(Dataset[int]):
    """``samples`` items; loading them takes as long as the pipeline's figures say."""

    def __init__(self, samples: int, pipeline: PipelineModel, share: Share) -> None:
        self._samples = samples
        self._pipeline = pipeline
        self._share = share
        self._core = Pretended()  # each worker process has a copy of its own

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> int:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[int]:
        """Load one batch: all workers together reach the pipeline's rate, so one has 1/n of it."""
        info = get_worker_info()
        workers = info.num_workers if info is not None else 1
        cores = self._share.busy_cores(workers)
        rate = loader_rate(self._pipeline, cores, self._share.now_mib())
        self._core.use(len(indices) * workers / rate)
        return indices


class Reporter:
    """Prints the pace about once a second, and a summary in JSON at the end.

    ``seconds`` are those since it was made, up to the latest batch, ``at_s`` the time of that
    batch, as a Unix time, and ``workers_s`` what starting the workers took before.
    """

    def __init__(self, total: int, workers_s: float) -> None:
        self._total, self._workers_s = total, workers_s
        self._begun_s = self._last_s = time.monotonic()
        self._epoch_s = time.time() - self._begun_s
        self._next_s = self._begun_s
        self._waited_s = 0.0
        self.done = 0

    def batch(self, samples: int, waited_s: float) -> None:
        """Count a batch that was trained on, and what the wait for it cost."""
        self.done += samples
        self._waited_s += waited_s
        self._last_s = time.monotonic()
        if self._last_s >= self._next_s:
            self._next_s = self._last_s + REPORT_EVERY_S
            print(json.dumps(self._numbers()), flush=True)

    def _numbers(self) -> dict[str, float]:
        took_s = max(self._last_s - self._begun_s, 1e-9)
        return {
            "samples": self.done,
            "of": self._total,
            "seconds": round(took_s, 2),
            "samples_per_s": round(self.done / took_s, 1),
            "data_wait": round(self._waited_s / took_s, 3),
            "at_s": round(self._epoch_s + self._last_s, 2),
            "workers_s": round(self._workers_s, 2),
        }

    def summary(self) -> None:
        """The last line of the program."""
        print(json.dumps({**self._numbers(), "finished": True}), flush=True)


def train(loader: DataLoader[int], gpu_rate: float, total: int) -> None:
    """One pass over ``total`` samples; ``gpu_rate`` in samples/s is what all GPUs reach."""
    began_s = time.monotonic()
    batches = iter(loader)  # starts the workers
    gpus, reporter = Pretended(), Reporter(total, time.monotonic() - began_s)
    asked_s = time.monotonic()
    for batch in batches:
        arrived_s = time.monotonic()
        gpus.use(len(batch) / gpu_rate)  # forward, backward, optimiser step
        reporter.batch(len(batch), arrived_s - asked_s)
        asked_s = time.monotonic()
    reporter.summary()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; unknown models are refused with the known ones."""
    parser = argparse.ArgumentParser(description="Train an emulated model.", allow_abbrev=False)
    parser.add_argument(
        "--model",
        required=True,
        choices=sorted(CATALOGUE),
        metavar="NAME",
        help="one of: %(choices)s",
    )
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of this task (default 1)")
    parser.add_argument("--gpu-type", default="v100", help="GPU type (default v100)")
    parser.add_argument("--batch", type=int, default=512, help="samples per step (default 512)")
    parser.add_argument(
        "--samples",
        type=int,
        default=100_000,
        help="samples to train on, times EMULATED_TIME_SCALE (default 100000)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=3,
        help="DataLoader workers when nobody says better (default 3)",
    )
    parser.add_argument(
        "--memory-mib",
        type=int,
        default=62_500,
        help="memory when nobody says better (default 62500)",
    )
    args = parser.parse_args(argv)
    for name in ("gpus", "batch", "samples", "memory_mib"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if args.workers < 0:
        parser.error("--workers must not be negative")
    profile = CATALOGUE[args.model]
    if args.gpu_type not in profile.gpu_rate_per_gpu:
        known = ", ".join(sorted(profile.gpu_rate_per_gpu))
        parser.error(f"{args.model} has no figures for GPU type {args.gpu_type}; known: {known}")
    args.samples = max(args.batch, round(args.samples * _time_scale(parser)))
    return args


def _time_scale(parser: argparse.ArgumentParser) -> float:
    text = os.environ.get("EMULATED_TIME_SCALE", "1")
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not 0 < scale < float("inf"):
        parser.error(f"EMULATED_TIME_SCALE={text!r} must be a positive number, for example 0.5")
    return scale


def pipeline_of(profile: Profile) -> PipelineModel:
    """The profile's input pipeline; a model without one is never slowed by its data."""
    return profile.pipeline or PipelineModel(preprocess=((1, 1e9),))


def main(argv: Sequence[str] | None = None) -> int:
    """Train; returns the exit status."""
    args = parse(argv)
    torch.manual_seed(0)
    # The emulated machine has more cores than the real one that torch compares with.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    profile = CATALOGUE[args.model]
    dataset = EmulatedImages(args.samples, pipeline_of(profile), Share(args.memory_mib))
    loader = DataLoader(dataset, batch_size=args.batch, shuffle=True, num_workers=args.workers)
    train(loader, profile.gpu_rate_per_gpu[args.gpu_type] * args.gpus, args.samples)
    return 0


if __name__ == "__main__":
    sys.exit(main())
