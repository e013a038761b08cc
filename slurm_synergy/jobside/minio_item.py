"""How the items of a data cache are known, and their places in their data set's permutation."""

from __future__ import annotations

import hashlib
import math
import struct
from functools import lru_cache
from typing import NamedTuple

__all__ = ["Item", "Source", "stride_of"]

_KEY = struct.Struct("<QQ")
_GOLDEN_SECTION = (5**0.5 - 1) / 2


class Item(NamedTuple):
    """How an item is known: ``key`` of 16 bytes, ``place`` in [0, 2**64), number of its data set,
    ``exact`` where the places of the data set are those of a permutation."""

    key: bytes
    place: int
    namespace: int
    exact: bool = False


def stride_of(items: int) -> int:
    """A step through ``items`` places that meets each of them once, evenly spread from the start.

    The golden section of them, or the next number above that has no divisor in common with them.
    """
    stride = max(round(items * _GOLDEN_SECTION), 1)
    while math.gcd(stride, items) != 1:
        stride += 1
    return stride


class Source(NamedTuple):
    """A data set in the cache: its number and identity there, and its items (0: unknown).

    ``stride`` is :func:`stride_of` these, needed for :meth:`of_index` alone.
    """

    number: int
    ident: int
    items: int
    stride: int = 1

    def of_index(self, index: int) -> Item:
        """The item with this number, from 0 to ``items - 1``, at its place in the permutation."""
        items = self.items
        place = ((index * self.stride + self.ident) % items << 64) // items
        return Item(_KEY.pack(self.ident, index), place, self.number, True)

    def of_name(self, name: str) -> Item:
        """The item with this name, a path say."""
        return self.of_key(self.key_of_name(name))

    def of_key(self, key: bytes) -> Item:
        """The item with a key that :meth:`key_of_name` gave."""
        return Item(key, int.from_bytes(key[:8], "little"), self.number)

    def key_of_index(self, index: int) -> bytes:
        """The key alone, which is all that a look needs."""
        return _KEY.pack(self.ident, index)

    def key_of_name(self, name: str) -> bytes:
        """The key alone, which is all that a look needs."""
        digest = _salted(self.ident).copy()
        digest.update(name.encode("utf-8", "surrogateescape"))
        return digest.digest()


@lru_cache(maxsize=64)
def _salted(ident: int) -> hashlib.blake2b:
    """The beginning of each name's digest: making it anew takes three times as long as the rest."""
    return hashlib.blake2b(digest_size=16, salt=_KEY.pack(ident, 0))
