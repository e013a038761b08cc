"""The segment files of a data cache: where the items' bytes lie.

A segment is only ever appended to, so a view of an item stays good for as long as somebody holds
it, also when the file is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os

from slurm_synergy.jobside.minio_insert import Tail
from slurm_synergy.jobside.minio_layout import Head, Slot
from slurm_synergy.jobside.minio_place import CachePlace

__all__ = ["Segments"]

_NO_TAIL = Tail(-1, -1, 0)
_MAX_SEGMENT_NUMBER = 65_535


class Segments:
    """The segments in an open cache directory, as this process has mapped them.

    ``tail`` is the one that items are appended to, if this process has it open.
    """

    __slots__ = ("_maps", "_place", "tail")

    def __init__(self, place: CachePlace) -> None:
        self._place, self.tail = place, _NO_TAIL
        self._maps: dict[int, memoryview] = {}

    def forget_maps(self) -> None:
        """Segments that are gone give their memory back with the last mapping."""
        self._maps = {}

    def after_fork(self) -> None:
        """A process of its own has mappings and a tail of its own."""
        self._maps, self.tail = {}, _NO_TAIL

    def view(self, slot: Slot) -> memoryview | None:
        """The item, read-only and not copied; None when its segment is gone."""
        whole = self._maps.get(slot.segment)
        if whole is None:
            if not slot.length:
                return memoryview(b"")
            try:
                fd = self._place.open_file(f"seg-{slot.segment}", os.O_RDONLY)
            except FileNotFoundError:
                return None
            try:
                whole = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ))
            finally:
                os.close(fd)
            self._maps[slot.segment] = whole
        end = slot.offset + slot.length
        return whole[slot.offset : end] if end <= len(whole) else None

    def append(self, head: Head, content: bytes | memoryview) -> tuple[int, int]:
        """Where the content was written. Raises OSError when there is no room, with no harm."""
        length = len(content)
        if not length:
            return head.segment, head.tail  # takes no file
        tail = self.tail
        if tail.number != head.segment or head.tail == 0:
            tail = self._open_tail(head, length)
        elif head.tail + length > tail.size:
            head.segment, head.tail = head.segment + 1, 0
            tail = self._open_tail(head, length)
        # A write takes the room it needs or fails; only what was written is ever mapped and read.
        offset = head.tail
        written = os.pwrite(tail.fd, content, offset)
        while written < length:
            written += os.pwrite(tail.fd, memoryview(content)[written:], offset + written)
        head.tail = offset + (length + 7 & ~7)
        return tail.number, offset

    def _open_tail(self, head: Head, length: int) -> Tail:
        if self.tail.fd >= 0:
            os.close(self.tail.fd)
            self.tail = _NO_TAIL
        fd, size = -1, 0
        if head.tail:
            fd = self._place.open_file(f"seg-{head.segment}", os.O_RDWR)
            size = os.fstat(fd).st_size  # a segment never changes its size
            if head.tail + length > size:
                os.close(fd)
                head.segment, head.tail = head.segment + 1, 0
        if not head.tail:
            # Only what items are written to takes memory.
            size = max(head.segment_bytes, length, 1)
            fd = self._new_segment(head)
            os.ftruncate(fd, size)
        self.tail = Tail(head.segment, fd, size)
        return self.tail

    def _new_segment(self, head: Head) -> int:
        """A descriptor of an empty file, which no other process has open as its tail."""
        while head.segment <= _MAX_SEGMENT_NUMBER:
            name = f"seg-{head.segment}"
            with contextlib.suppress(FileExistsError):
                return self._place.open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            # Somebody made it and could not write to it: nothing is in it.
            self._place.unlink(name)
            head.segment += 1
        raise OSError(28, "the data cache was resized too often")

    def remove(self, number: int) -> None:
        """Views stay good; the memory goes with the last of them."""
        self._place.unlink(f"seg-{number}")
        self._maps.pop(number, None)

    def close(self) -> None:
        """Close the tail. Views that were handed out stay good."""
        self._maps = {}
        if self.tail.fd >= 0:
            os.close(self.tail.fd)
            self.tail = _NO_TAIL
