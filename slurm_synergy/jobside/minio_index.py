"""The index of a data cache: which items it holds and where they lie; shared by all processes.

A mapped ``control`` file has the counters, a mapped ``table-N`` an open-addressing hash table of
64-byte slots. Readers take no lock: each slot carries a checksum, so one that is half written reads
as absent. Writers hold a lock that ends with their process. A writer that died inside leaves the
busy word set; the next one then counts everything anew from the slots, which alone are the truth.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from slurm_synergy.errors import CacheError
from slurm_synergy.jobside.minio_place import CachePlace

__all__ = ["Head", "Index", "Namespace", "Slot", "Word", "encoded"]

_CONTROL_BYTES = 4096
_MAGIC, _VERSION = b"SYNC", 2
_U64 = struct.Struct("<Q")
_QUIET = struct.Struct("<QQ")  # busy, shrinking
_STATE = struct.Struct("<QQ")  # the first two counters
_START = struct.Struct("<4sI")
_HEAD_AT, _BUSY_AT, _SHRINKING_AT, _BOOT_AT, _SPACES_AT = 8, 256, 264, 320, 512
_SLOT = struct.Struct("<16sQQQQHHIII")
_WHAT = struct.Struct("<16sQQQQHHI")  # of a slot: what its checksum is over
_KEY = struct.Struct("<QQ")
_TAIL = struct.Struct("<II")  # checksum of what is before, run
_CHECKED = _WHAT.size
_FREE = bytes(_SLOT.size)
_GONE = b"\xff" * _SLOT.size
_FIRST_BITS = 10
_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
_MAX_SPACES = 32


class Slot(NamedTuple):
    """One item: its bytes, its place in the permutation and the source that it was made from."""

    key: bytes
    place: int
    offset: int
    length: int
    stamp: int
    segment: int
    namespace: int
    sample: int
    check: int
    run: int


@dataclass(slots=True)
class Head:
    """The counters, changed only under the lock. ``full`` and ``no_space`` are 0 or 1."""

    generation: int = 1
    table: int = 0
    filled: int = 0
    items: int = 0
    used_bytes: int = 0
    budget_bytes: int = 0
    segment: int = 0
    tail: int = 0
    segment_bytes: int = 1 << 20
    run: int = 0
    full: int = 0
    no_space: int = 0
    lease_generation: int = 0
    process_bytes: int = 0
    measured_at_s: int = 0


@dataclass(slots=True)
class Namespace:
    """One data set: how many items it has (0: unknown), and the sizes that were seen of it."""

    ident: int = 0
    items: int = 0
    seen: int = 0
    seen_bytes: int = 0
    smallest: int = 0
    largest: int = 0
    used_bytes: int = 0
    run: int = 0


_HEAD = struct.Struct(f"<{len(fields(Head))}Q")
_SPACE = struct.Struct(f"<{len(fields(Namespace))}Q")
_BUDGET_AT = _HEAD_AT + 8 * [field.name for field in fields(Head)].index("budget_bytes")
_FULL_AT = _HEAD_AT + 8 * [field.name for field in fields(Head)].index("full")


class Word(IntEnum):
    """Where the counters are in :attr:`Index.words`; those of a data set count from its first."""

    GENERATION, TABLE, FILLED, ITEMS, USED, BUDGET, SEGMENT, TAIL = range(1, 9)
    RUN, FULL, NO_SPACE = 10, 11, 12
    BUSY, SHRINKING = _BUSY_AT // 8, _SHRINKING_AT // 8
    SPACES, SPACE_WORDS = _SPACES_AT // 8, _SPACE.size // 8
    SPACE_ITEMS, SPACE_SEEN, SPACE_SEEN_BYTES, SPACE_SMALLEST, SPACE_LARGEST, SPACE_USED = (
        *range(1, 7),
    )


_GENERATION = int(Word.GENERATION)
_head_values = attrgetter(*(field.name for field in fields(Head)))
_space_values = attrgetter(*(field.name for field in fields(Namespace)))


class _Exclusive:
    """A block under the lock: a class, as a generator costs each insert twice as much."""

    __slots__ = ("_head", "_index", "_patient")

    def __init__(self, index: Index, patient: bool) -> None:
        self._index, self._patient = index, patient

    def __enter__(self) -> Head:
        self._head = self._index.acquire(self._patient)
        return self._head

    def __exit__(self, kind: object, *_: object) -> None:
        self._index.release(self._head if kind is None else None)


class Index:
    """The index in an open cache directory; makes it where there is none.

    Raises CacheError for one of another version in use, OSError where there is no room.
    """

    def __init__(self, place: CachePlace) -> None:
        self._place, self._thread = place, threading.Lock()
        self._lock_fd = place.open_file("control", os.O_RDWR | os.O_CREAT)
        self._number = -1
        if place.alone or not self._attach():
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            try:
                if not self._attach():
                    self._begin()
            finally:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        # The control file as numbers of eight bytes, for what is done for every item.
        self.words = memoryview(self._control).cast("Q")
        self.refresh()
        if place.alone:
            with self.exclusive() as head:
                head.run += 1
                head.full = head.no_space = head.lease_generation = head.process_bytes = 0
            place.unlink("kept")
            place.share()

    # -- making, attaching -------------------------------------------------------------------------

    def _attach(self) -> bool:
        """Map the control file; False when it is to be made."""
        if os.fstat(self._lock_fd).st_size < _CONTROL_BYTES:
            return False
        self._control = mmap.mmap(self._lock_fd, _CONTROL_BYTES)
        magic = self._control[: _START.size]
        if magic == bytes(_START.size):
            return False
        # What a crash of the machine left on a disk may be torn.
        if magic == _START.pack(_MAGIC, _VERSION) and (
            self._control[_BOOT_AT : _BOOT_AT + 36] == _boot()
        ):
            return True
        if not self._place.alone:
            raise CacheError(f"{self._place.path} is in use by another version of slurm-synergy")
        return False

    def _begin(self) -> None:
        for name in self._place.names():
            if name != "control":
                self._place.unlink(name)
        os.posix_fallocate(self._lock_fd, 0, _CONTROL_BYTES)
        self._control = mmap.mmap(self._lock_fd, _CONTROL_BYTES)
        self._control[:] = bytes(_CONTROL_BYTES)
        self._make_table(0, _FIRST_BITS)
        _HEAD.pack_into(self._control, _HEAD_AT, *_head_values(Head()))
        self._control[_BOOT_AT : _BOOT_AT + 36] = _boot()
        self._control[: _START.size] = _START.pack(_MAGIC, _VERSION)

    def _make_table(self, number: int, bits: int) -> mmap.mmap:
        self._place.unlink(f"table-{number}")
        fd = self._place.open_file(f"table-{number}", os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            # Reserved now: on a full tmpfs a later store would be a bus error.
            os.posix_fallocate(fd, 0, _SLOT.size << bits)
            return mmap.mmap(fd, _SLOT.size << bits)
        except OSError:
            self._place.unlink(f"table-{number}")
            raise
        finally:
            os.close(fd)

    def refresh(self) -> None:
        """Look at the newest table. Raises OSError when it is gone."""
        for _ in range(8):
            number = self.state[1]
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
            self._bits = (len(self._table) // _SLOT.size).bit_length() - 1
            return
        raise OSError(f"{self._place.path}: the table of the data cache is gone")

    @property
    def generation(self) -> int:
        """Grows whenever items moved or went."""
        return self.words[_GENERATION]

    @property
    def state(self) -> tuple[int, int]:
        """Generation and number of the table: the same while nothing moves."""
        return _STATE.unpack_from(self._control, _HEAD_AT)

    @property
    def full(self) -> bool:
        """No item will be taken in; one look without a lock."""
        return self._control[_FULL_AT : _FULL_AT + 16] != bytes(16)

    @property
    def head(self) -> Head:
        """The counters as they are now, perhaps while somebody changes them."""
        return self._read_head()

    @property
    def budget_bytes(self) -> int:
        """The budget as it is now."""
        budget: int = _U64.unpack_from(self._control, _BUDGET_AT)[0]
        return budget

    def _read_head(self) -> Head:
        return Head(*_HEAD.unpack_from(self._control, _HEAD_AT))

    @property
    def shrinking(self) -> bool:
        """Somebody is giving memory back, which takes long."""
        return self.words[_SHRINKING_AT // 8] != 0

    # -- the lock ----------------------------------------------------------------------------------

    def reopen(self) -> None:
        """After a fork: a lock of this process's own. Raises OSError."""
        self._thread = threading.Lock()
        self._lock_fd = self._place.open_file("control", os.O_RDWR)

    def exclusive(self, *, patient: bool = False) -> _Exclusive:
        """The counters, to be changed; written back when the block ends well.

        Raises BlockingIOError while another process is giving memory back, which takes long,
        unless ``patient``.
        """
        return _Exclusive(self, patient)

    def lock(self) -> None:
        """Keep others out, and no more than that; see :meth:`acquire`."""
        self._thread.acquire()
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
        except BaseException:
            self._thread.release()
            raise

    def unlock(self) -> None:
        """Let others in again."""
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        finally:
            self._thread.release()

    def acquire(self, patient: bool) -> Head:
        """What :meth:`exclusive` does before the block."""
        long = _U64.unpack_from(self._control, _SHRINKING_AT)[0] and not patient
        self._thread.acquire()
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | (fcntl.LOCK_NB if long else 0))
            try:
                head = self._read_head()
                if head.table != self._number:
                    self.refresh()
                if _U64.unpack_from(self._control, _BUSY_AT)[0]:
                    self._recover()
                    head = self._read_head()
                _U64.pack_into(self._control, _BUSY_AT, 1)
                return head
            except BaseException:
                fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
                raise
        except BaseException:
            self._thread.release()
            raise

    def release(self, head: Head | None) -> None:
        """What it does behind it; without ``head``, the next one counts everything anew."""
        try:
            if head is not None:
                self.publish(head)
                _QUIET.pack_into(self._control, _BUSY_AT, 0, 0)
        finally:
            fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
            self._thread.release()

    def publish(self, head: Head) -> None:
        """Make the counters seen by all."""
        _HEAD.pack_into(self._control, _HEAD_AT, *_head_values(head))

    def announce_shrinking(self) -> None:
        """From now on the others do not wait for the lock."""
        _U64.pack_into(self._control, _SHRINKING_AT, 1)

    def _recover(self) -> None:
        head = self._read_head()
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
            if raw == _FREE:
                continue
            head.filled += 1
            slot = _decode(raw)
            if slot is None:
                self._put_raw(at, _GONE)
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
        _U64.pack_into(self._control, _SHRINKING_AT, 0)

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
            if raw == _FREE:
                return at, None
            if raw[:16] == key:
                slot = _decode(raw)
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
            slot = _decode(self._raw(at))
            if slot is not None:
                yield at, slot

    def insert(self, head: Head, slot: Slot) -> None:
        """Add an item that is not held. Raises OSError when there is no room for the index."""
        if 2 * (head.filled + 1) > 1 << self._bits:
            self._rebuild(head)
        table, mask = self._table, (1 << self._bits) - 1
        at = self._start(slot.key)
        while table[at * 64 : at * 64 + 64] != _FREE:
            at = (at + 1) & mask
        head.filled += 1
        head.items += 1
        head.used_bytes += slot.length
        self._put_raw(at, _encode(slot))

    def is_free(self, at: int) -> bool:
        """No item was ever put into this slot of the table."""
        return at >= 0 and self._table[at << 6 : (at << 6) + 64] == _FREE

    def write(self, at: int, raw: bytes) -> None:
        """Put what :func:`encoded` made into the first free slot from there on. Under the lock."""
        table = self._table
        while table[at << 6 : (at << 6) + 64] != _FREE:
            at = (at + 1) & ((1 << self._bits) - 1)
        table[at << 6 : (at << 6) + 64] = raw

    def replace(self, at: int, slot: Slot) -> None:
        """The item at this position lies elsewhere now."""
        self._put_raw(at, _encode(slot))

    def remove(self, head: Head, at: int, slot: Slot) -> None:
        """Forget the item at this position."""
        self._put_raw(at, _GONE)
        head.items -= 1
        head.used_bytes -= slot.length

    def set_run(self, at: int, run: int) -> None:
        """Note that the item was found good in this run."""
        struct.pack_into("<I", self._table, at * 64 + 60, run)

    def _rebuild(self, head: Head) -> None:
        """A new table without the forgotten items, larger where that is needed."""
        raws = [self._raw(at) for at in range(1 << self._bits)]
        held = [raw for raw in raws if raw not in (_FREE, _GONE)]
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

    # -- data sets ---------------------------------------------------------------------------------

    def namespaces(self) -> list[Namespace]:
        """The data sets that are known, in the order of their numbers."""
        found = []
        for number in range(_MAX_SPACES):
            space = self.namespace(number)
            if not space.ident:
                break
            found.append(space)
        return found

    @property
    def has_one_namespace(self) -> bool:
        """There is no second data set; one look without a lock."""
        return not _U64.unpack_from(self._control, _SPACES_AT + _SPACE.size)[0]

    def namespace(self, number: int) -> Namespace:
        """The data set with this number."""
        at = _SPACES_AT + number * _SPACE.size
        return Namespace(*_SPACE.unpack_from(self._control, at))

    def write_namespace(self, number: int, space: Namespace) -> None:
        """Under the lock only."""
        _SPACE.pack_into(self._control, _SPACES_AT + number * _SPACE.size, *_space_values(space))

    def enter_namespace(self, ident: int, items: int) -> int:
        """The number of a data set, which is used in this run. Raises CacheError when too many."""
        run = self.head.run
        for number, space in enumerate(self.namespaces()):
            if space.ident == ident and space.run == run:
                return number
        with self.exclusive(patient=True) as head:
            spaces = self.namespaces()
            known = [number for number, space in enumerate(spaces) if space.ident == ident]
            number = known[0] if known else len(spaces)
            if number >= _MAX_SPACES:
                raise CacheError(f"a job's data cache holds at most {_MAX_SPACES} data sets")
            space = spaces[number] if known else Namespace(ident=ident, items=items)
            space.run = head.run
            self.write_namespace(number, space)
        return number

    def close(self) -> None:
        """Unmap everything; the files stay."""
        os.close(self._lock_fd)


def _boot() -> bytes:
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        text = ""
    return text.encode("ascii").ljust(36)[:36]


def encoded(run: int, *what: object) -> bytes:
    """A slot for the table; ``what`` are the fields of :class:`Slot` up to ``sample``."""
    checked = _WHAT.pack(*what)
    return checked + _TAIL.pack(zlib.crc32(checked), run)


def _encode(slot: Slot) -> bytes:
    return encoded(slot.run, *slot[:-2])


def _decode(raw: bytes) -> Slot | None:
    """The slot; None for a free one, one that is gone and one that is half written."""
    slot = Slot._make(_SLOT.unpack(raw))
    return slot if slot.check == zlib.crc32(raw[:_CHECKED]) else None
