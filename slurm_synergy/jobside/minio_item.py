"""How the items of a data cache are known, and their places in their data set's permutation."""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

__all__ = ["Item", "Source", "place_of_index"]

_KEY = struct.Struct("<QQ")
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Item(NamedTuple):
    """How an item is known: ``key`` of 16 bytes, ``place`` in [0, 2**64), number of its data set,
    ``exact`` where the places of the data set are those of a permutation."""

    key: bytes
    place: int
    namespace: int
    exact: bool = False


def place_of_index(index: int, items: int, seed: int) -> int:
    """The place of item ``index`` of ``items`` in the permutation, scaled to 64 bits.

    A bijection of the next power of two is repeated until it lands below ``items``.
    """
    bits = max((items - 1).bit_length(), 1)
    mask, shift = (1 << bits) - 1, (bits + 1) // 2
    rank = index
    while True:
        rank = (rank + seed) & mask
        rank = ((rank ^ rank >> shift) * _MIX_1) & mask
        rank = ((rank ^ rank >> shift) * _MIX_2) & mask
        rank ^= rank >> shift
        if rank < items:
            return (rank << 64) // items


class Source(NamedTuple):
    """A data set in the cache: its number and identity there, and its items (0: unknown)."""

    number: int
    ident: int
    items: int

    def of_index(self, index: int) -> Item:
        """The item with this number, from 0 to ``items - 1``."""
        place = place_of_index(index, self.items, self.ident)
        return Item(self.key_of_index(index), place, self.number, exact=True)

    def of_name(self, name: str) -> Item:
        """The item with this name, a path say."""
        key = self.key_of_name(name)
        place = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        return Item(key, place, self.number)

    def key_of_index(self, index: int) -> bytes:
        """The key alone, which is all that a look needs."""
        return _KEY.pack(self.ident, index)

    def key_of_name(self, name: str) -> bytes:
        """The key alone, which is all that a look needs."""
        text = name.encode("utf-8", "surrogateescape")
        return hashlib.blake2b(text, digest_size=16, salt=_KEY.pack(self.ident, 0)).digest()
