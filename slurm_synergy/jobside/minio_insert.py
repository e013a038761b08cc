"""Taking an item into the data cache in the usual case, in as few steps as can be.

A first epoch pays this for every item, between its decoding and the next one, with the processor's
caches cold: there each step of Python costs four times what it costs in a tight loop. So the
counters are read and written one by one, where :class:`~minio_layout.Head` would read and write
all. Whatever is not usual (a new size, a full segment or budget, several data sets, another process
that died inside) is left to the store, with nothing changed.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from slurm_synergy.jobside.minio_index import Index
from slurm_synergy.jobside.minio_item import Item
from slurm_synergy.jobside.minio_layout import Word, encoded

__all__ = ["Miss", "Offer", "Tail", "insert_quickly", "limit_of", "sample_of"]

_EDGE = 1024
_NOWHERE = 1 << 64
_ZEROS = bytes(8)
_NO_MISS = (-1, -1, -1)
# As plain numbers: a look at a class for each of them would cost as much as the rest.
_FILLED, _ITEMS, _USED, _TAIL = (
    *(int(Word.FILLED), int(Word.ITEMS)),
    *(int(Word.USED), int(Word.TAIL)),
)
_RUN, _FULL, _AFTER_NO_SPACE = int(Word.RUN), int(Word.FULL), int(Word.NO_SPACE) + 1
_BUSY, _SPACES, _SPACE_WORDS = int(Word.BUSY), int(Word.SPACES), int(Word.SPACE_WORDS)
_SECOND_SPACE = _SPACES + _SPACE_WORDS


Miss = tuple[int, int, int]
"""A look that found nothing: generation and table in which that holds, and the free slot that the
item would get, -1 for none. A plain tuple, as each miss makes one."""

Offer = tuple[Item, bytes | memoryview, int]
"""An item with its content and the stamp of what it was made from."""


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
    index: Index, tail: Tail, offers: Sequence[Offer], missed: dict[bytes, Miss]
) -> int:
    """Take in items of one data set that ``missed`` has looked for; how many, from the first on.

    With the next one nothing was done: the store has to see. Nobody may be giving memory back: the
    lock is waited for.
    """
    words = index.words
    index.lock()
    try:
        generation, table, filled, items, used, budget, segment, offset = words[1:9].tolist()
        if (
            (table, segment, offset > 0) != (index.table[0], tail.number, True)
            or any(words[_FULL:_AFTER_NO_SPACE])
            or words[_BUSY]
            or words[_SECOND_SPACE]
        ):
            return 0
        first = _SPACES + offers[0][0].namespace * _SPACE_WORDS
        of_set, seen, seen_bytes, smallest, largest, in_use = words[first + 1 : first + 7].tolist()
        run, room, begin, end = words[_RUN], index.table[1], offset, offset
        slots: list[tuple[int, bytes]] = []
        pieces: list[bytes | memoryview] = []
        for item, content, stamp in offers:
            key, place, namespace, exact = item
            length = len(content)
            at = missed.get(key, _NO_MISS)
            left = budget - used - length
            if (
                at[:2] != (generation, table)
                or filled >= room
                or offset + length > tail.size
                or left < smallest
                or not smallest <= length <= largest
                or not index.is_free(at[2])
            ):
                break
            # Where all items fit, so does this one.
            if budget * (seen + 1) < (seen_bytes + length) * of_set and place >= limit_of(
                budget, of_set, seen + 1, seen_bytes + length,
                one_size=smallest == largest, exact=exact,
            ):  # fmt: skip
                break
            del missed[key]  # an item that comes twice is not put in twice
            if offset > end:
                pieces.append(_ZEROS[: offset - end])
            pieces.append(content)
            what = (key, place, offset, length, stamp, segment, namespace, sample_of(content))
            slots.append((at[2], encoded(run, *what)))
            end = offset + length
            offset = end + 7 & ~7
            seen, seen_bytes, filled = seen + 1, seen_bytes + length, filled + 1
            used, in_use = used + length, in_use + length
        if not slots or not _written(tail.fd, pieces, begin, end - begin):
            return 0
        words[_BUSY] = 1
        for free, raw in slots:
            index.write(free, raw)
        words[_FILLED], words[_ITEMS], words[_USED] = filled, items + len(slots), used
        words[_TAIL] = offset
        words[first + 2], words[first + 3], words[first + 6] = seen, seen_bytes, in_use
        words[_BUSY] = 0
        return len(slots)
    finally:
        index.unlock()


def _written(fd: int, pieces: list[bytes | memoryview], offset: int, length: int) -> bool:
    try:
        if len(pieces) == 1:
            return os.pwrite(fd, pieces[0], offset) == length
        return os.pwritev(fd, pieces, offset) == length
    except OSError:
        return False  # the store meets it again, and tells
