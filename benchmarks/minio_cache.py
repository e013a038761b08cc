#!/usr/bin/env python3
"""What the data cache costs and gives, on this machine, with real processes.

* ``hit_us``: a hit of the cache; ``dict_us``: the same item out of a plain dictionary of this
  process; ``page_cache_us``: open, read and close of a file that the kernel has in memory. Each is
  the median over rounds over all items, in random order; nothing is done with the items, and
  ``used_us`` is a hit whose bytes are copied once, which is what reading the file does too.
* ``first_epoch_pct``: what an epoch that fills the cache costs more in CPU time than one without
  it, over the CPU time of the latter. Items are files in the page cache, through ``CachedDataset``,
  in batches as PyTorch's loader fetches them, and decoded for ``--work-ms`` (a photograph of this
  size takes about as long as the default); how long decoding took is left out of the difference, as
  other programs on the machine disturb it. ``first_epoch_us_per_item`` is the same per item.
  ``first_epoch_opened_pct``: through ``cached_open``, as an injected ``ImageFolder``. Rounds of all
  alternate, medians over rounds. Either above the limit makes the exit status 1.
  ``first_epoch_wall_pct``, ``first_epoch_opened_wall_pct``: what the whole epochs take longer by
  the clock, nothing left out; to be believed on a quiet machine only, so no limit is on them.
* ``workers``: items per second of CPU time and of wall time that 1, 2 and 4 processes take
  together from one cache; cores of this machine limit the latter.

    python benchmarks/minio_cache.py --json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from slurm_synergy.jobside import minio, minio_job
from slurm_synergy.jobside.minio import CachedDataset
from slurm_synergy.jobside.minio_place import remove_unused
from slurm_synergy.jobside.minio_store import MinioStore, Source

EXIT_TOO_SLOW = 1
LIMIT_PERCENT = 5.0
_BUDGET = 8 << 30  # as of a real job: segments of 128 MiB; only what is written takes memory
_WORKERS = (1, 2, 4)
_BATCH = 32


def _per_item_us(take: Callable[[int], object], order: list[int], rounds: int) -> float:
    took_us = []
    for _ in range(rounds):
        random.shuffle(order)
        began_s = time.process_time()
        for index in order:
            take(index)
        took_us.append((time.process_time() - began_s) / len(order) * 1e6)
    return statistics.median(took_us)


def _hits(store: MinioStore, source: Source, files: list[Path], rounds: int) -> dict[str, float]:
    held = {index: path.read_bytes() for index, path in enumerate(files)}
    order = list(range(len(files)))

    def hit(index: int) -> memoryview:
        view = store.get(source.key_of_index(index))
        assert view is not None
        return view

    for index in order:
        assert hit(index) == held[index]
    return {
        "hit_us": _per_item_us(hit, order, rounds),
        "used_us": _per_item_us(lambda index: bytes(hit(index)), order, rounds),
        "dict_us": _per_item_us(held.__getitem__, order, rounds),
        "page_cache_us": _per_item_us(lambda index: files[index].read_bytes(), order, rounds),
    }


class _Files:
    """A data set of raw files; ``decoded_s`` is the CPU time that decoding them took."""

    def __init__(self, files: list[Path], work_s: float) -> None:
        self.files, self._work_s, self.decoded_s = files, work_s, 0.0

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> bytes:
        return self.files[index].read_bytes()

    def decode(self, content: bytes | memoryview) -> int:
        """Busy for as long as decoding takes."""
        began_s = time.process_time()
        while time.process_time() < began_s + self._work_s:
            pass
        self.decoded_s += time.process_time() - began_s
        return len(content)


def _batched(data: _Files) -> Callable[[list[int]], object]:
    return CachedDataset(data, decode=data.decode).__getitems__


def _opened(data: _Files) -> Callable[[list[int]], object]:
    def fetch(numbers: list[int]) -> None:
        for index in numbers:
            with minio.cached_open(data.files[index]) as file:
                data.decode(file.read())
        minio_job.batch_is_complete()

    return fetch


def _plain(data: _Files) -> Callable[[list[int]], object]:
    return lambda numbers: [data.decode(data[index]) for index in numbers]


class _Epoch(NamedTuple):
    """Seconds of an epoch: CPU time without decoding, CPU time in all, and by the clock."""

    apart_s: float
    whole_s: float
    wall_s: float


def _epoch(
    root: Path, data: _Files, how: Callable[[_Files], Callable[[list[int]], object]]
) -> _Epoch:
    """An epoch with a new cache, which is there but not used where ``how`` is :func:`_plain`."""
    os.environ["SYNERGY_CACHE_DIR"] = str(root)
    os.environ["SYNERGY_CACHE_MIB"] = str(_BUDGET >> 20)
    minio_job.forget_job_cache()
    store, fetch = minio_job.job_cache().store, how(data)  # made once for all epochs
    data.decoded_s, numbers = 0.0, list(range(len(data)))
    began_s, began_wall_s = time.process_time(), time.perf_counter()
    for first in range(0, len(numbers), _BATCH):
        fetch(numbers[first : first + _BATCH])
    whole_s, wall_s = time.process_time() - began_s, time.perf_counter() - began_wall_s
    assert store is not None and store.head.items == (0 if how is _plain else len(data))
    minio_job.forget_job_cache()
    remove_unused(store.path)
    return _Epoch(whole_s - data.decoded_s, whole_s, wall_s)


def _first_epochs(root: Path, files: list[Path], work_s: float, rounds: int) -> dict[str, float]:
    data = _Files(files, work_s)
    taken: dict[Callable[..., Any], list[_Epoch]] = {}
    for _ in range(rounds):
        for how in (_plain, _batched, _opened):
            taken.setdefault(how, []).append(_epoch(root, data, how))
    plain, batched, opened = (
        _Epoch(*map(statistics.median, zip(*taken[how], strict=True)))
        for how in (_plain, _batched, _opened)
    )
    return {
        "first_epoch_pct": (batched.apart_s - plain.apart_s) / plain.whole_s * 100,
        "first_epoch_us_per_item": (batched.apart_s - plain.apart_s) / len(files) * 1e6,
        "first_epoch_opened_pct": (opened.apart_s - plain.apart_s) / plain.whole_s * 100,
        "first_epoch_wall_pct": (batched.wall_s / plain.wall_s - 1) * 100,
        "first_epoch_opened_wall_pct": (opened.wall_s / plain.wall_s - 1) * 100,
    }


def _take_all(path: Path, items: int, share: range, pipe: object) -> None:
    store = MinioStore(path)
    source = store.enter("files", items)
    order = list(share)
    for index in order:
        store.get(source.key_of_index(index))
    pipe.send(None)  # type: ignore[attr-defined]
    pipe.recv()  # type: ignore[attr-defined]
    began_s = time.process_time()
    for _ in range(20):
        random.shuffle(order)
        for index in order:
            assert store.get(source.key_of_index(index)) is not None
    pipe.send(time.process_time() - began_s)  # type: ignore[attr-defined]


def _scaling(path: Path, items: int) -> dict[str, dict[str, float]]:
    context = multiprocessing.get_context("fork")
    found = {}
    for workers in _WORKERS:
        pipes, processes = [], []
        for number in range(workers):
            ours, theirs = context.Pipe()
            share = range(number, items, workers)
            process = context.Process(target=_take_all, args=(path, items, share, theirs))
            process.start()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            pipe.recv()
        began_s = time.perf_counter()
        for pipe in pipes:
            pipe.send(None)
        cpu_s = sum(pipe.recv() for pipe in pipes)
        wall_s = time.perf_counter() - began_s
        for process in processes:
            process.join()
        found[str(workers)] = {
            "items_per_wall_s": 20 * items / wall_s,
            "cpu_us_per_item": cpu_s / (20 * items) * 1e6,
        }
    return found


def measure(*, items: int, item_kib: int, rounds: int, work_ms: float) -> dict[str, object]:
    """All figures for so many items of that size, in tmpfs where the machine has one."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        root = Path(folder)
        files = [root / f"item-{index}" for index in range(items)]
        for path in files:
            path.write_bytes(os.urandom(item_kib << 10))
        store = MinioStore(root / "cache")
        store.set_budget(_BUDGET)
        source = store.enter("files", items)
        for index, path in enumerate(files):
            store.put(source.of_index(index), path.read_bytes())
        result: dict[str, object] = {"items": items, "item_kib": item_kib, "work_ms": work_ms}
        result |= _hits(store, source, files, rounds)
        result |= _first_epochs(root, files[: items // 2], work_ms / 1e3, max(rounds // 2, 3))
        result["workers"] = _scaling(store.path, items)
        store.close()
    return result


def main() -> int:
    """Print the figures; exit status 1 when a first epoch costs more than the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--items", type=int, default=800)
    parser.add_argument("--item-kib", type=int, default=110)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--work-ms", type=float, default=5.0)
    given = parser.parse_args()
    result = measure(
        items=given.items, item_kib=given.item_kib, rounds=given.rounds, work_ms=given.work_ms
    )
    result["limit_pct"] = LIMIT_PERCENT
    if given.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:24} {value}")
    limited = (result["first_epoch_pct"], result["first_epoch_opened_pct"])
    return EXIT_TOO_SLOW if any(float(str(each)) > LIMIT_PERCENT for each in limited) else 0


if __name__ == "__main__":
    raise SystemExit(main())
