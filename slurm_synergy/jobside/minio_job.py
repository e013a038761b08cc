"""This process's way to the data cache of its job: opened once, given up with one line.

Whatever fails in the cache costs one line on stderr and the cache, never the program.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slurm_synergy.errors import CacheError, LeaseError
from slurm_synergy.jobside.board import Board
from slurm_synergy.jobside.environment import switched_on
from slurm_synergy.jobside.minio_budget import Budget, asked_bytes
from slurm_synergy.jobside.minio_buffers import ReadBuffers
from slurm_synergy.jobside.minio_place import cache_path, remove_unused, sweep
from slurm_synergy.jobside.minio_store import Item, MinioStore, Offer, Source
from slurm_synergy.jobside.session import say

__all__ = ["JobCache", "batch_is_complete", "forget_job_cache", "job_cache", "open_early"]

_TOGETHER, _TOGETHER_BYTES = 32, 8 << 20
_LOOK_EVERY, _LOOK_EVERY_WHILE_FILLING = 256, 16


class JobCache:
    """The job's cache in this process; without a store once something failed.

    Used by forked children too. All methods behave like an empty cache when there is none.
    ``buffers`` is where what :meth:`put` gets may lie.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._store: MinioStore | None = None
        self._sources: dict[tuple[str, int], Source | None] = {}
        self._until_look = 0
        self._in_batches = False
        self._waiting: list[Offer] = []
        self._waiting_bytes = 0
        self.buffers = ReadBuffers()
        try:
            if not switched_on(env, "SYNERGY_CACHE", unset=True):
                return
            self._budget = Budget(env, _board(env), asked_bytes(env))
            path = cache_path(env)
            self._store = MinioStore(path)
            sweep(path)
            if _removes(env):
                self._remove_at_exit(path)
            self._budget.follow(self._store)
        except BlockingIOError:
            return  # memory is being given back: looked at again
        except (CacheError, LeaseError, OSError) as err:
            self._give_up(err)

    def source(self, name: str, items: int = 0) -> Source | None:
        """The data set of this name; None when there is no cache."""
        known = self._sources.get((name, items))
        if known is None and self._store is not None:
            try:
                known = self._sources[name, items] = self._store.enter(name, items)
            except (CacheError, OSError) as err:
                self._give_up(err)
        return known

    def get(self, key: bytes, stamp: Callable[[], int] = lambda: 0) -> memoryview | None:
        """The item, or None."""
        store = self._store
        if store is None:
            return None
        try:
            self._until_look -= 1
            if self._until_look < 0:
                self._look(store)
            return store.get(key, stamp)
        except OSError as err:
            self._give_up(err)
        return None

    def get_all(self, keys: Sequence[bytes]) -> Sequence[memoryview | None]:
        """What :meth:`get` gives for each, for items without a stamp."""
        store = self._store
        if store is not None:
            try:
                self._until_look -= len(keys)
                if self._until_look < 0:
                    self._look(store)
                return store.get_all(keys)
            except OSError as err:
                self._give_up(err)
        return [None] * len(keys)

    @property
    def takes_more(self) -> bool:
        """An item may be worth offering."""
        store = self._store
        return store is not None and store.takes_more

    def put(self, item: Item, content: bytes | memoryview, stamp: int = 0) -> None:
        """Offer an item that was not held; it may wait for :meth:`end_of_batch`."""
        if not self._in_batches:
            self.put_all(((item, content, stamp),))
            return
        waiting = self._waiting
        if waiting and waiting[0][0].namespace != item.namespace:
            self._take_waiting()
        waiting.append((item, content, stamp))
        self._waiting_bytes += len(content)
        if len(waiting) >= _TOGETHER or self._waiting_bytes >= _TOGETHER_BYTES:
            self._take_waiting()

    def end_of_batch(self) -> None:
        """Take in what waits. From the first call on, :meth:`put` lets items wait for the next.

        Then a batch costs one lock and one write, and its items half of the time.
        """
        self._in_batches = True
        if self._waiting:
            self._take_waiting()

    def _take_waiting(self) -> None:
        offers = self._waiting.copy()
        self._waiting.clear()
        self._waiting_bytes = 0
        self.put_all(offers)

    def put_all(self, offers: Sequence[Offer]) -> None:
        """Offer items of one data set that were not held."""
        store = self._store
        if store is None or not offers:
            return
        # While it fills, the processes may still be growing.
        self._until_look = min(self._until_look, _LOOK_EVERY_WHILE_FILLING)
        try:
            store.put_all(offers)
        except OSError as err:
            held = store.head
            say(
                f"no more room for the data cache in {store.path} ({err.strerror or err}):"
                f" it stays at {held.items} items, {held.used_bytes >> 20} MiB"
            )
        except CacheError as err:
            self._give_up(err)

    @property
    def store(self) -> MinioStore | None:
        """The store itself, where there is one."""
        return self._store

    def _look(self, store: MinioStore) -> None:
        self._until_look = _LOOK_EVERY
        try:
            self._budget.follow(store)
        except BlockingIOError:
            self._until_look = 0
        except LeaseError:
            return  # the board's writer died inside: the last lease holds

    def _give_up(self, err: Exception) -> None:
        store, self._store = self._store, None
        self._waiting.clear()
        if store is not None:
            store.leave()
        say(f"the data are read without a cache: {err}")

    def close(self) -> None:
        """Use it no more; items that were handed out stay good."""
        store, self._store = self._store, None
        self._waiting.clear()
        if store is not None:
            store.close()

    def _remove_at_exit(self, path: Path) -> None:
        from multiprocessing.util import Finalize

        # Below zero: when this process's workers, which use it too, have been ended. Forked
        # children do not inherit it.
        Finalize(None, self._remove, (path,), exitpriority=-100)

    def _remove(self, path: Path) -> None:
        self.close()
        remove_unused(path)


def _removes(env: Mapping[str, str]) -> bool:
    """This process is to remove the cache when it ends; elsewhere a launcher does."""
    return not env.get("SYNERGY_BOARD") and not _in_worker()


def _in_worker() -> bool:
    """This is a worker of a PyTorch loader."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


def _board(env: Mapping[str, str]) -> Board | None:
    path = env.get("SYNERGY_BOARD")
    return Board.attach(Path(path)) if path else None


_cache: JobCache | None = None


def job_cache() -> JobCache:
    """The cache of this process, opened at the first call; children that are forked share it."""
    global _cache
    if _cache is None:
        _cache = JobCache(os.environ)
    return _cache


def open_early() -> None:
    """Open the cache where a data set is made, before there are workers, which share it then.

    So what is to be said of it is said once, and this process can remove it where no launcher
    does: workers come and go, and do not know when the last of them has ended.
    """
    if not _in_worker():
        job_cache()


def batch_is_complete() -> None:
    """The items of a batch were fetched by this process: see :meth:`JobCache.end_of_batch`."""
    if _cache is not None:
        _cache.end_of_batch()


def forget_job_cache() -> None:
    """Close the cache of this process; the next :func:`job_cache` looks at the environment."""
    global _cache
    known, _cache = _cache, None
    if known is not None:
        known.close()
