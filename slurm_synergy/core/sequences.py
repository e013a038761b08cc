"""How a sequence differs from the one before it: from round to round most of it stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress, count
from operator import is_not
from typing import TypeVar

__all__ = ["alike", "changes"]

_T = TypeVar("_T")


def alike(one: Sequence[object], other: Sequence[object]) -> int:
    """How many of the first elements of both are the very same objects."""
    return next(compress(count(), map(is_not, one, other)), min(len(one), len(other)))


def changes(before: Sequence[_T], now: Sequence[_T]) -> tuple[list[_T], list[_T]]:
    """What is in ``now`` alone, and what was in ``before`` alone, by identity and in their order.

    For sequences without an element twice. Quick where both begin alike.
    """
    same = alike(before, now)
    left, came = before[same:], now[same:]
    old, new = list(map(id, left)), list(map(id, came))
    fresh, lost = set(new).difference(old), set(old).difference(new)
    return (
        list(compress(came, map(fresh.__contains__, new))),
        list(compress(left, map(lost.__contains__, old))),
    )
