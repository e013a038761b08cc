"""The index of a data cache: which items it holds and where they lie; shared by all processes.

A mapped ``control`` file has the counters, a mapped ``table-N`` an open-addressing hash table of
64-byte slots. Readers take no lock: each slot carries a checksum, so one that is half written reads
as absent. After a writer that died inside everything is counted anew from the slots, which alone
are the truth.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator

from slurm_synergy.jobside.minio_control import Control
from slurm_synergy.jobside.minio_layout import (
    FREE,
    GONE,
    RUN_AT,
    SLOT_BYTES,
    Head,
    Slot,
    Word,
    decoded,
    encoded,
)
from slurm_synergy.jobside.minio_place import CachePlace

__all__ = ["Index"]

_KEY = struct.Struct("<QQ")
_FIRST_BITS = 10
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
_TABLE, _BUSY, _SHRINKING = int(Word.TABLE), int(Word.BUSY), int(Word.SHRINKING)


class Index(Control):
    """The index in an open cache directory; makes it where there is none.

    Raises CacheError for one of another version in use, OSError where there is no room.
    """

    def __init__(self, place: CachePlace) -> None:
        self._number = -1
        super().__init__(place)
        self.refresh()
        if place.alone:
            with self.exclusive() as head:
                head.run += 1
                head.full = head.no_space = head.lease_generation = head.process_bytes = 0
            place.unlink("kept")
            place.share()

    # -- tables ------------------------------------------------------------------------------------

    def _make_first_table(self) -> None:
        self._make_table(0, _FIRST_BITS)

    def _make_table(self, number: int, bits: int) -> mmap.mmap:
        self._place.unlink(f"table-{number}")
        fd = self._place.open_file(f"table-{number}", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            # Reserved now: on a full tmpfs a later store would be a bus error.
            os.posix_fallocate(fd, 0, SLOT_BYTES << bits)
            return mmap.mmap(fd, SLOT_BYTES << bits)
        except OSError:
            self._place.unlink(f"table-{number}")
            raise
        finally:
            os.close(fd)

    def refresh(self) -> None:
        """Look at the newest table. Raises OSError when it is gone."""
        for _ in range(8):
            number = self.words[_TABLE]
            if number == self._number:
                return
            try:
                fd = self._place.open_file(f"table-{number}", os.O_RDWR)
            except FileNotFoundError:
                continue  # replaced between the two looks
            try:
                self._table = mmap.mmap(fd, 0)
            finally:
                os.close(fd)
            self._number = number
            self._bits = (len(self._table) // SLOT_BYTES).bit_length() - 1
            return
        raise OSError(f"{self._place.path}: the table of the data cache is gone")

    def _entered(self, head: Head) -> Head:
        if head.table != self._number:
            self.refresh()
        if not self.words[_BUSY]:
            return head
        self._recover()
        return self.head

    def _recover(self) -> None:
        head = self.head
        head.filled = head.items = head.used_bytes = 0
        names = [name for name in self._place.names() if name.startswith("seg-")]
        head.segment = max((int(name[4:]) for name in names), default=head.segment)
        head.tail = 0
        in_use: set[int] = set()
        spaces = self.namespaces()
        for space in spaces:
            space.used_bytes = 0
        for at in range(1 << self._bits):
            raw = self._raw(at)
            if raw == FREE:
                continue
            head.filled += 1
            slot = decoded(raw)
            if slot is None:
                self._put_raw(at, GONE)
                continue
            head.items += 1
            head.used_bytes += slot.length
            if slot.namespace < len(spaces):
                spaces[slot.namespace].used_bytes += slot.length
            in_use.add(slot.segment)
            if slot.segment == head.segment:
                head.tail = max(head.tail, slot.offset + slot.length + 7 & ~7)
        for name in names:
            if int(name[4:]) not in in_use:
                self._place.unlink(name)
        for number, space in enumerate(spaces):
            self.write_namespace(number, space)
        head.generation += 1
        self.publish(head)
        self.words[_SHRINKING] = 0

    # -- slots -------------------------------------------------------------------------------------

    def _raw(self, at: int) -> bytes:
        return self._table[at * 64 : at * 64 + 64]

    def _put_raw(self, at: int, raw: bytes) -> None:
        self._table[at * 64 : at * 64 + 64] = raw

    def _start(self, key: bytes) -> int:
        high, low = _KEY.unpack(key)
        mixed: int = ((low ^ high) * _GOLDEN) & _MASK64
        return mixed >> (64 - self._bits)

    def find(self, key: bytes) -> tuple[int, Slot] | None:
        """Position and content of the item's slot; None when it is not held."""
        at, slot = self.look(key)
        return None if slot is None else (at, slot)

    def look(self, key: bytes) -> tuple[int, Slot | None]:
        """The item's slot; or None with the position of the one it would get, -1 for none."""
        table, bits = self._table, self._bits
        high, low = _KEY.unpack(key)
        mask = (1 << bits) - 1
        at = first = (((low ^ high) * _GOLDEN) & _MASK64) >> (64 - bits)
        while True:
            raw = table[at << 6 : (at << 6) + 64]
            if raw == FREE:
                return at, None
            if raw[:16] == key:
                slot = decoded(raw)
                if slot is not None:
                    return at, slot
            at = (at + 1) & mask
            if at == first:
                return -1, None

    @property
    def table(self) -> tuple[int, int]:
        """Number of the table that is looked at, and items that it takes before it is replaced."""
        return self._number, 1 << self._bits - 1

    def slots(self) -> Iterator[tuple[int, Slot]]:
        """All items with their positions."""
        for at in range(1 << self._bits):
            slot = decoded(self._raw(at))
            if slot is not None:
                yield at, slot

    # -- changes, under the lock -------------------------------------------------------------------

    def insert(self, head: Head, slot: Slot) -> None:
        """Add an item that is not held. Raises OSError when there is no room for the index."""
        if 2 * (head.filled + 1) > 1 << self._bits:
            self._rebuild(head)
        table, mask = self._table, (1 << self._bits) - 1
        at = self._start(slot.key)
        while table[at * 64 : at * 64 + 64] != FREE:
            at = (at + 1) & mask
        head.filled += 1
        head.items += 1
        head.used_bytes += slot.length
        self._put_raw(at, _encode(slot))

    def is_free(self, at: int) -> bool:
        """No item was ever put into this slot of the table."""
        return at >= 0 and self._table[at << 6 : (at << 6) + 64] == FREE

    def write(self, at: int, raw: bytes) -> None:
        """Put what :func:`encoded` made into the first free slot from there on. Under the lock."""
        table = self._table
        while table[at << 6 : (at << 6) + 64] != FREE:
            at = (at + 1) & ((1 << self._bits) - 1)
        table[at << 6 : (at << 6) + 64] = raw

    def replace(self, at: int, slot: Slot) -> None:
        """The item at this position lies elsewhere now."""
        self._put_raw(at, _encode(slot))

    def remove(self, head: Head, at: int, slot: Slot) -> None:
        """Forget the item at this position."""
        self._put_raw(at, GONE)
        head.items -= 1
        head.used_bytes -= slot.length

    def set_run(self, at: int, run: int) -> None:
        """Note that the item was found good in this run."""
        struct.pack_into("<I", self._table, at * SLOT_BYTES + RUN_AT, run)

    def _rebuild(self, head: Head) -> None:
        """A new table without the forgotten items, larger where that is needed."""
        raws = [self._raw(at) for at in range(1 << self._bits)]
        held = [raw for raw in raws if raw not in (FREE, GONE)]
        old, larger = head.table, self._bits + (4 * len(held) > 1 << self._bits)
        bits = max(larger, (2 * self._expected(head)).bit_length())
        try:
            table = self._make_table(old + 1, bits)
        except OSError:  # no room for all that may come
            bits = larger
            table = self._make_table(old + 1, bits)
        self._table, self._bits, self._number = table, bits, old + 1
        for raw in held:
            self.write(self._start(raw[:16]), raw)
        head.table, head.filled = old + 1, len(held)
        head.generation += 1
        self.publish(head)
        self._place.unlink(f"table-{old}")

    def _expected(self, head: Head) -> int:
        """Items that this run may come to hold, by the sizes that were seen; 0 where unknown."""
        expected = 0
        for space in self.namespaces():
            if space.run == head.run and space.seen_bytes:
                fit = head.budget_bytes * space.seen // space.seen_bytes
                expected += min(space.items, fit)
        return expected


def _encode(slot: Slot) -> bytes:
    return encoded(slot.run, *slot[:-2])
