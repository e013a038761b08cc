"""Taking an item into the data cache in the usual case, in as few steps as can be.

A first epoch pays this for every item, between its decoding and the next one, with the processor's
caches cold: there each step of Python costs four times what it costs in a tight loop. So the
counters are read and written one by one, where :class:`~minio_index.Head` would read and write all.
Whatever is not usual (a new size, a full segment or budget, several data sets, another process that
died inside) is left to the store, with nothing changed.
"""

from __future__ import annotations

import math
import os
import zlib
from typing import NamedTuple

from slurm_synergy.jobside.minio_index import Index, Word, encoded
from slurm_synergy.jobside.minio_item import Item

__all__ = ["Miss", "Tail", "insert_quickly", "limit_of", "sample_of"]

_EDGE = 1024
_NOWHERE = 1 << 64
# As plain numbers: a look at a class for each of them would cost as much as the rest.
_FILLED, _ITEMS, _USED, _TAIL = (
    *(int(Word.FILLED), int(Word.ITEMS)),
    *(int(Word.USED), int(Word.TAIL)),
)
_RUN, _FULL, _AFTER_NO_SPACE = int(Word.RUN), int(Word.FULL), int(Word.NO_SPACE) + 1
_BUSY, _SPACES, _SPACE_WORDS = int(Word.BUSY), int(Word.SPACES), int(Word.SPACE_WORDS)
_SECOND_SPACE = _SPACES + _SPACE_WORDS


Miss = tuple[bytes, tuple[int, int, int], int]
"""A look that found nothing: the key, the state of the index for which that holds, and the free
slot that the item would get, -1 for none. A plain tuple, as each miss makes one."""


class Tail(NamedTuple):
    """The segment that items are appended to, open in this process; ``number`` -1: none."""

    number: int
    fd: int
    size: int


def sample_of(content: bytes | memoryview) -> int:
    """A checksum of both ends: what was torn lacks one of them."""
    return zlib.crc32(content[-_EDGE:], zlib.crc32(content[:_EDGE]))


def limit_of(
    share_bytes: int, items: int, seen: int, seen_bytes: int, *, one_size: bool, exact: bool
) -> int:
    """Items whose place is below it belong to the prefix that the share can hold.

    ``seen`` sizes, ``seen_bytes`` in all, are known of the data set's ``items``. Exact where the
    places are and all items have one size; otherwise somewhat longer, so that the budget fills in
    the first epoch all the same.
    """
    if not items or not seen_bytes:
        return _NOWHERE
    fit = share_bytes * seen // seen_bytes
    if not one_size:
        fit += fit // 4 + 64
    if not exact:
        fit += 4 * math.isqrt(max(fit, 0)) + 16
    return (min(max(fit, 0), items) << 64) // items


def insert_quickly(
    index: Index, tail: Tail, item: Item, content: bytes | memoryview, stamp: int, miss: Miss
) -> bool:
    """Take in an item that ``miss`` has looked for; False: nothing was done, the store has to see.

    Nobody may be giving memory back: the lock is waited for.
    """
    words, length = index.words, len(content)
    index.lock()
    try:
        generation, table, filled, items, used, budget, segment, offset = words[1:9].tolist()
        end = offset + length
        key, state, at = miss
        if (
            (item.key, generation, table, filled) != (key, *state)
            or (table, True) != (index.table[0], filled < index.table[1])
            or (segment, offset > 0) != (tail.number, True)
            or end > tail.size
            or at < 0
        ):
            return False
        first = _SPACES + item.namespace * _SPACE_WORDS
        of_set, seen, seen_bytes, smallest, largest, in_use = words[first + 1 : first + 7].tolist()
        seen, seen_bytes = seen + 1, seen_bytes + length
        left = budget - used - length
        if (
            not smallest <= length <= largest
            or left < smallest
            or any(words[_FULL:_AFTER_NO_SPACE])
            or words[_BUSY]
            or words[_SECOND_SPACE]
        ):
            return False
        same = smallest == largest
        if item.place >= limit_of(
            budget, of_set, seen, seen_bytes, one_size=same, exact=item.exact
        ):
            return False
        if not _written(tail.fd, content, offset):
            return False
        what = (key, item.place, offset, length, stamp, segment, item.namespace)
        raw = encoded(words[_RUN], *what, sample_of(content))
        words[_BUSY] = 1
        index.write(at, raw)
        words[_FILLED], words[_ITEMS], words[_USED] = filled + 1, items + 1, used + length
        words[_TAIL] = offset + (length + 7 & ~7)
        words[first + 2], words[first + 3], words[first + 6] = seen, seen_bytes, in_use + length
        words[_BUSY] = 0
        return True
    finally:
        index.unlock()


def _written(fd: int, content: bytes | memoryview, offset: int) -> bool:
    try:
        return os.pwrite(fd, content, offset) == len(content)
    except OSError:
        return False  # the store meets it again, and tells
