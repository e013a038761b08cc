"""This process's way to the data cache of its job: opened once, given up with one line.

Whatever fails in the cache costs one line on stderr and the cache, never the program.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from slurm_synergy.errors import CacheError, LeaseError
from slurm_synergy.jobside.board import Board
from slurm_synergy.jobside.minio_budget import Budget, asked_bytes
from slurm_synergy.jobside.minio_place import cache_path, remove_unused, sweep
from slurm_synergy.jobside.minio_store import Item, MinioStore, Source
from slurm_synergy.jobside.session import say

__all__ = ["JobCache", "job_cache"]

_LOOK_EVERY = 256


class JobCache:
    """The job's cache in this process; without a store once something failed.

    Used by forked children too. All methods behave like an empty cache when there is none.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self._store: MinioStore | None = None
        self._sources: dict[tuple[str, int], Source | None] = {}
        self._until_look = 0
        if env.get("SYNERGY_CACHE") == "0":
            return
        try:
            self._budget = Budget(env, _board(env), asked_bytes(env))
            path = cache_path(env)
            self._store = MinioStore(path)
            sweep(path)
            if not env.get("SYNERGY_BOARD"):
                atexit.register(self._remove, os.getpid())  # else the launcher does
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

    @property
    def takes_more(self) -> bool:
        """An item may be worth offering."""
        store = self._store
        return store is not None and store.takes_more

    def put(self, item: Item, content: bytes | memoryview, stamp: int = 0) -> None:
        """Offer an item that was not held."""
        store = self._store
        if store is None:
            return
        self._until_look = 0  # while it fills, the processes may still be growing
        try:
            store.put(item, content, stamp)
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
        self._store = None
        say(f"the data are read without a cache: {err}")

    def close(self) -> None:
        """Use it no more; items that were handed out stay good."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _remove(self, pid: int) -> None:
        if self._store is not None and os.getpid() == pid:
            path = self._store.path
            self.close()
            remove_unused(path)


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
