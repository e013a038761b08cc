#!/usr/bin/env python3
"""What the data cache costs and gives, on this machine, with real processes.

* ``hit_us``: a hit of the cache; ``dict_us``: the same item out of a plain dictionary of this
  process; ``page_cache_us``: open, read and close of a file that the kernel has in memory. Each is
  the median over rounds over all items, in random order; nothing is done with the items, and
  ``used_us`` is a hit whose bytes are copied once, which is what reading the file does too.
* ``first_epoch_pct``: CPU time within the cache's calls in an epoch that fills it, over CPU time
  of an epoch without it. Items are read from files in the page cache and then worked on for
  ``--work-ms`` (decoding a photograph of this size takes about as long as the default); rounds of
  both alternate, medians over rounds. ``first_epoch_us_per_item`` is the same per item, and
  ``first_epoch_whole_pct`` compares whole epochs, where other programs on the machine disturb more.
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

from slurm_synergy.jobside.minio_place import remove_unused
from slurm_synergy.jobside.minio_store import MinioStore, Source

EXIT_TOO_SLOW = 1
LIMIT_PERCENT = 5.0
_BUDGET = 8 << 30  # as of a real job: segments of 128 MiB; only what is written takes memory
_WORKERS = (1, 2, 4)


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


def _work(work_s: float) -> None:
    until_s = time.process_time() + work_s
    while time.process_time() < until_s:
        pass


def _epoch_s(
    files: list[Path], work_s: float, cache: tuple[MinioStore, Source] | None
) -> tuple[list[float], list[float]]:
    """CPU seconds of each item without and within the calls of the cache."""
    clock = time.process_time
    apart_s, calls_s = [], []
    for index, path in enumerate(files):
        began_s = clock()
        if cache is not None:
            store, source = cache
            assert store.get(source.key_of_index(index)) is None
        looked_s = clock()
        content = path.read_bytes()
        read_s = clock()
        if cache is not None:
            store.put(source.of_index(index), content)
        put_s = clock()
        _work(work_s)
        calls_s.append(looked_s - began_s + put_s - read_s)
        apart_s.append(clock() - put_s + read_s - looked_s)
    return apart_s, calls_s


def _first_epochs(root: Path, files: list[Path], work_s: float, rounds: int) -> dict[str, float]:
    plain_s: list[float] = []
    filling_s: list[float] = []
    calls_s: list[float] = []
    for number in range(rounds):
        apart, calls = _epoch_s(files, work_s, None)
        plain_s.append(sum(apart) + sum(calls))
        store = MinioStore(root / f"first-{number}")
        store.set_budget(_BUDGET)
        apart, calls = _epoch_s(files, work_s, (store, store.enter("files", len(files))))
        filling_s.append(sum(apart) + sum(calls))
        calls_s.append(sum(calls))
        assert store.head.items == len(files)
        store.close()
        remove_unused(store.path)
    without_s = statistics.median(plain_s)
    return {
        "first_epoch_pct": statistics.median(calls_s) / without_s * 100,
        "first_epoch_us_per_item": statistics.median(calls_s) / len(files) * 1e6,
        "first_epoch_whole_pct": (statistics.median(filling_s) / without_s - 1) * 100,
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
        result |= _first_epochs(root, files[: items // 4], work_ms / 1e3, max(rounds // 2, 3))
        result["workers"] = _scaling(store.path, items)
        store.close()
    return result


def main() -> int:
    """Print the figures; exit status 1 when the first epoch costs more than the limit."""
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
    return EXIT_TOO_SLOW if float(str(result["first_epoch_pct"])) > LIMIT_PERCENT else 0


if __name__ == "__main__":
    raise SystemExit(main())
