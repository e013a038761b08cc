"""Fair shares of the lease service: how often a caller may call, and whose turn it is.

Nothing here knows what is called. Not thread-safe: both belong to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable

from slurm_synergy.errors import LeaseError

__all__ = ["Busy", "Buckets", "Turns"]


class Busy(LeaseError):
    """Too many callers, or too many calls of one: try again later."""


class Buckets:
    """One token bucket per key: ``burst`` calls at once, ``per_s`` a second over time.

    At most ``keys`` are remembered, those used last: who is forgotten starts with a full bucket.
    """

    def __init__(
        self,
        *,
        per_s: float,
        burst: int,
        keys: int = 16_384,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_s, self._burst, self._keys, self._now_s = per_s, float(burst), keys, now_s
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, key: Hashable) -> bool:
        """Whether ``key`` may call now; that call is counted."""
        now_s = self._now_s()
        left, at_s = self._left.pop(key, (self._burst, now_s))
        left = min(self._burst, left + (now_s - at_s) * self._per_s)
        allowed = left >= 1.0
        self._left[key] = (left - 1.0 if allowed else left, now_s)
        if len(self._left) > self._keys:
            self._left.popitem(last=False)
        return allowed


class Turns:
    """Lets ``at_once`` callers through; the keys of those that wait take turns.

    So a key with many callers delays its own, not those of others. At most ``waiting`` wait, and
    ``waiting_per_key`` of one key.
    """

    def __init__(self, at_once: int, *, waiting: int, waiting_per_key: int) -> None:
        self._free, self._most, self._most_per_key = at_once, waiting, waiting_per_key
        self._queues: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()
        self._waiting = 0

    @contextlib.asynccontextmanager
    async def turn(self, key: Hashable) -> AsyncIterator[None]:
        """Wait until it is ``key``'s turn, and have it for the block. Raises Busy."""
        if self._free > 0:
            self._free -= 1
        else:
            await self._wait(key)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, key: Hashable) -> None:
        queue = self._queues.get(key)
        if self._waiting >= self._most or (queue and len(queue) >= self._most_per_key):
            raise Busy("too many callers register at once: try again")
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(key, deque()).append(mine)
        self._waiting += 1
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._pass_on()
            raise
        finally:
            self._waiting -= 1

    def _pass_on(self) -> None:
        while self._queues:
            key, queue = next(iter(self._queues.items()))
            following = queue.popleft()
            if queue:
                self._queues.move_to_end(key)
            else:
                del self._queues[key]
            if not following.done():
                following.set_result(None)
                return
        self._free += 1
