"""What the bytes of a data cache's index are: counters, data sets and slots.

The file ``control`` has a mark, the counters, two words about who is inside, the boot of the
machine that made it, and the data sets. A table has slots of 64 bytes, each with a checksum.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "CONTROL_BYTES",
    "FREE",
    "GONE",
    "MAX_SPACES",
    "RUN_AT",
    "SLOT_BYTES",
    "Head",
    "Namespace",
    "Slot",
    "Word",
    "decoded",
    "encoded",
    "is_good",
    "is_marked",
    "mark_good",
    "put_head",
    "put_namespace",
    "read_head",
    "read_namespace",
]

CONTROL_BYTES = 4096
MAX_SPACES = 32
SLOT_BYTES = 64
RUN_AT = 60
"""Where in a slot its run is."""
FREE = bytes(SLOT_BYTES)
"""A slot that no item was ever put into."""
GONE = b"\xff" * SLOT_BYTES
"""A slot whose item was forgotten."""

_MAGIC, _VERSION = b"SYNC", 2
_START = struct.Struct("<4sI")
_BOOT_BYTES = 36
_HEAD_AT, _BUSY_AT, _SHRINKING_AT, _BOOT_AT, _SPACES_AT = 8, 256, 264, 320, 512
_SLOT = struct.Struct("<16sQQQQHHIII")
_WHAT = struct.Struct("<16sQQQQHHI")  # of a slot: what its checksum is over
_TAIL = struct.Struct("<II")  # checksum of what is before, run
_CHECKED = _WHAT.size


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
_head_values = attrgetter(*(field.name for field in fields(Head)))
_space_values = attrgetter(*(field.name for field in fields(Namespace)))


class Word(IntEnum):
    """Where the counters are in the control file, in words of eight bytes.

    Those of a data set count from its first.
    """

    GENERATION, TABLE, FILLED, ITEMS, USED, BUDGET, SEGMENT, TAIL = range(1, 9)
    RUN, FULL, NO_SPACE = 10, 11, 12
    BUSY, SHRINKING = _BUSY_AT // 8, _SHRINKING_AT // 8
    SPACES, SPACE_WORDS = _SPACES_AT // 8, _SPACE.size // 8
    SPACE_ITEMS, SPACE_SEEN, SPACE_SEEN_BYTES, SPACE_SMALLEST, SPACE_LARGEST, SPACE_USED = (
        *range(1, 7),
    )


# -- the control file ------------------------------------------------------------------------------


def is_marked(control: mmap.mmap) -> bool:
    """Somebody has made it, of this version or another one."""
    return control[: _START.size] != bytes(_START.size)


def is_good(control: mmap.mmap) -> bool:
    """It is of this version, and of this boot: what a crash left on a disk may be torn."""
    start = control[: _START.size] == _START.pack(_MAGIC, _VERSION)
    return start and control[_BOOT_AT : _BOOT_AT + _BOOT_BYTES] == _boot()


def mark_good(control: mmap.mmap) -> None:
    """The last step of making one."""
    control[_BOOT_AT : _BOOT_AT + _BOOT_BYTES] = _boot()
    control[: _START.size] = _START.pack(_MAGIC, _VERSION)


def _boot() -> bytes:
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        text = ""
    return text.encode("ascii").ljust(_BOOT_BYTES)[:_BOOT_BYTES]


def read_head(control: mmap.mmap) -> Head:
    """The counters."""
    return Head(*_HEAD.unpack_from(control, _HEAD_AT))


def put_head(control: mmap.mmap, head: Head) -> None:
    """Write all counters."""
    _HEAD.pack_into(control, _HEAD_AT, *_head_values(head))


def read_namespace(control: mmap.mmap, number: int) -> Namespace:
    """The data set with this number."""
    return Namespace(*_SPACE.unpack_from(control, _SPACES_AT + number * _SPACE.size))


def put_namespace(control: mmap.mmap, number: int, space: Namespace) -> None:
    """Write all of a data set."""
    _SPACE.pack_into(control, _SPACES_AT + number * _SPACE.size, *_space_values(space))


# -- slots -----------------------------------------------------------------------------------------


def encoded(run: int, *what: object) -> bytes:
    """A slot for the table; ``what`` are the fields of :class:`Slot` up to ``sample``."""
    checked = _WHAT.pack(*what)
    return checked + _TAIL.pack(zlib.crc32(checked), run)


def decoded(raw: bytes) -> Slot | None:
    """The slot; None for a free one, one that is gone and one that is half written."""
    slot = Slot._make(_SLOT.unpack(raw))
    return slot if slot.check == zlib.crc32(raw[:_CHECKED]) else None
