"""A training job whose pipeline is known: storage, cache, cores and GPUs are threads that sleep.

A reader fetches batches: items that a fixed-hit cache holds come at once, the others at the pace of
the storage. ``cpus`` workers preprocess; the trainer takes what is ready. Each stage keeps a
calendar, and what passes between stages carries the time at which it was ready: a machine that
wakes a thread too late moves nothing in the calendars, by which the job's progress is told.
"""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_synergy.core.model import PipelineModel, Profile
from slurm_synergy.profiler.points import Reading

__all__ = ["EmulatedJob", "Pace"]

GPU_TYPE = "emulated"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The truth: samples/s of the GPUs and of one core, the data set, and its storage.

    With ``own_reads`` each worker reads for itself before it preprocesses, as workers of a PyTorch
    loader do; otherwise reading runs ahead of preprocessing.
    """

    gpu_rate: float = 1600.0
    core_rate: float = 240.0
    items: int = 1600
    item_mib: float = 0.5
    storage_mib_s: float = 240.0
    batch: int = 16
    own_reads: bool = False

    @property
    def dataset_mib(self) -> float:
        """Size of all items."""
        return self.items * self.item_mib

    @property
    def profile(self) -> Profile:
        """The truth as a profile; the processes themselves need no memory."""
        most = 64
        return Profile(
            key="truth",
            gpu_rate_per_gpu={GPU_TYPE: self.gpu_rate},
            pipeline=PipelineModel(
                preprocess=((1, self.core_rate), (most, most * self.core_rate)),
                dataset_mib=self.dataset_mib,
                samples_per_epoch=self.items,
                storage_mib_s=self.storage_mib_s,
            ),
        )


class _Calendar:
    """When something is free again; work on it takes its time, one after the other."""

    def __init__(self, begin_s: float) -> None:
        self._lock = threading.Lock()
        self._free_s = begin_s

    def work(self, ready_s: float, seconds: float) -> float:
        """When the work is done that can begin at ``ready_s``; returns at that time."""
        with self._lock:
            self._free_s = done_s = max(self._free_s, ready_s) + seconds
        left_s = done_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)
        return done_s


class _Channel:
    """A queue of bounded length between stages, which keeps the times of both its ends."""

    def __init__(self, size: int, ended: threading.Event) -> None:
        self._ended = ended
        self._slots: queue.Queue[float] = queue.Queue()
        self._things: queue.Queue[tuple[float, Sequence[int]]] = queue.Queue()
        for _ in range(size):
            self._slots.put(0.0)

    def put(self, ready_s: float, batch: Sequence[int]) -> float:
        """Hand on what is ready; returns when there was room. Raises _Ended."""
        at_s: float = max(ready_s, self._taken(self._slots))
        self._things.put((at_s, batch))
        return at_s

    def get(self, asked_s: float) -> tuple[float, Sequence[int]]:
        """When there was a batch, and the batch. Raises _Ended."""
        ready_s, batch = self._taken(self._things)
        at_s = max(asked_s, ready_s)
        self._slots.put(at_s)
        return at_s, batch

    def _taken(self, place: queue.Queue[Any]) -> Any:
        while not self._ended.is_set():
            try:
                return place.get(timeout=0.1)
            except queue.Empty:
                continue
        raise _Ended


class _Ended(Exception):
    """The job is not needed any longer."""


class EmulatedJob:
    """Runs the job with some cores and some MiB of cache; ``readings`` tells its progress."""

    def __init__(self, pace: Pace, *, cpus: int, cache_mib: float, seed: int = 0) -> None:
        self._pace, self._cpus = pace, cpus
        held = min(int(cache_mib / pace.item_mib), pace.items)
        self._random = random.Random(seed)
        self._held = frozenset(self._random.sample(range(pace.items), held))
        self._ended = threading.Event()
        self._begin_s = time.monotonic()
        self._storage = _Calendar(self._begin_s)
        self._read = _Channel(2, self._ended)
        self._made = _Channel(2 * cpus, self._ended)

    def readings(self) -> Generator[Reading, None, None]:
        """The progress after each step, for as long as it is asked for."""
        stages = [self._order, *[self._preprocess] * self._cpus]
        threads = [threading.Thread(target=self._until_ended, args=(one,)) for one in stages]
        for thread in threads:
            thread.start()
        gpus, now_s = _Calendar(self._begin_s), self._begin_s
        step, samples, stepped_s, waited_s = 0, 0, 0.0, 0.0
        try:
            while True:
                came_s, batch = self._made.get(now_s)
                done_s = gpus.work(came_s, len(batch) / self._pace.gpu_rate)
                step, samples = step + 1, samples + len(batch)
                waited_s += came_s - now_s
                stepped_s += done_s - came_s
                now_s = done_s
                yield Reading(
                    now_s=now_s, step=step, samples=samples, stepped_s=stepped_s, waited_s=waited_s
                )
        finally:
            self._ended.set()
            for thread in threads:
                thread.join()

    def _until_ended(self, stage: Callable[[], None]) -> None:
        with contextlib.suppress(_Ended):
            stage()

    def _order(self) -> None:
        """Epoch after epoch in random order, read ahead unless the workers read for themselves."""
        pace, now_s = self._pace, self._begin_s
        while True:
            items = list(range(pace.items))
            self._random.shuffle(items)
            for at in range(0, pace.items, pace.batch):
                batch = items[at : at + pace.batch]
                if not pace.own_reads:
                    now_s = self._fetch(now_s, batch)
                now_s = self._read.put(now_s, batch)

    def _fetch(self, ready_s: float, batch: Sequence[int]) -> float:
        missed = sum(item not in self._held for item in batch)
        return self._storage.work(ready_s, missed * self._pace.item_mib / self._pace.storage_mib_s)

    def _preprocess(self) -> None:
        core, now_s = _Calendar(self._begin_s), self._begin_s
        while True:
            now_s, batch = self._read.get(now_s)
            if self._pace.own_reads:
                now_s = self._fetch(now_s, batch)
            now_s = core.work(now_s, len(batch) / self._pace.core_rate)
            now_s = self._made.put(now_s, batch)
