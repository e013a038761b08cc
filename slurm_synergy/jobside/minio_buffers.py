"""Memory that files are read into on their way into the data cache, used again and again.

Items that wait for the end of their batch would otherwise lie in memory that the C library takes
from the kernel for each batch and gives back behind it. Faulting that in costs more than everything
else that the cache does for an item.
"""

from __future__ import annotations

from collections import deque

__all__ = ["ReadBuffers"]

_STEP_BYTES, _LARGEST_BYTES = 64 << 10, 256 << 10
_MOST = 64


class ReadBuffers:
    """A ring of buffers. One of which anybody holds a view is not handed out again meanwhile.

    Threads may share it: a buffer is taken off the ring until there is a view of it.
    """

    def __init__(self) -> None:
        self._ring: deque[bytearray] = deque()

    def take(self, size: int) -> memoryview | None:
        """Room for ``size`` bytes with anything in it; None where new memory is to be used."""
        if size > _LARGEST_BYTES:
            return None
        ring = self._ring
        try:
            buffer = ring.popleft()
        except IndexError:
            buffer = _for(size)
        else:
            try:
                # Python refuses to resize what has a view; the room for it stays with the buffer.
                buffer.append(0)
                buffer.pop()
            except BufferError:
                if len(ring) >= _MOST - 1:
                    ring.append(buffer)
                    return None
                ring.appendleft(buffer)
                buffer = _for(size)
            if len(buffer) < size:
                buffer = _for(size)
        view = memoryview(buffer)[:size]
        ring.append(buffer)
        return view


def _for(size: int) -> bytearray:
    return bytearray(-(-size // _STEP_BYTES) * _STEP_BYTES)
