"""Slurm host lists: ``v100-[1-2,4],a100-1`` to names and back.

Unlike Slurm itself, several bracket groups and a suffix after them are understood. The order of
the names is kept, both ways, and so are duplicates: a list that Slurm printed is not ours to tidy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

from slurm_synergy.errors import SlurmParseError

__all__ = ["MAX_NAMES", "compress", "expand"]

MAX_NAMES = 100_000
"""Most names that one list may stand for; more is taken for a mistake or an attack."""

_NULL = frozenset({"", "(null)", "None", "N/A", "none assigned"})
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_NUMBERED = re.compile(r"(.*?)(\d{1,18})(\D*)", re.DOTALL)


def expand(text: str, *, max_names: int = MAX_NAMES) -> tuple[str, ...]:
    """The names that a host list stands for. Slurm's words for "none" give an empty tuple.

    Raises ``SlurmParseError`` for unbalanced brackets, empty items, ranges that run backwards and
    lists of more than ``max_names`` names.
    """
    if text.strip() in _NULL:
        return ()
    names: list[str] = []
    for item in _split_items(text.strip()):
        names.extend(_expand_item(item, text, max_names - len(names)))
    return tuple(names)


def _split_items(text: str) -> Iterator[str]:
    depth = start = 0
    for place, char in enumerate(text):
        if char == "[":
            depth += 1
        elif char == "]":
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:place]
            start = place + 1
        if depth not in (0, 1):
            raise SlurmParseError(f"host list: misplaced {char!r} at {place}", text)
    if depth:
        raise SlurmParseError("host list: '[' without ']'", text)
    yield text[start:]


def _expand_item(item: str, text: str, room: int) -> list[str]:
    if not item or any(char.isspace() for char in item):
        raise SlurmParseError("host list: empty name or white space", text)
    parts = re.split(r"\[([^\]]*)\]", item)
    groups = [_ranges(body, text) for body in parts[1::2]]
    if prod(sum(hi - lo + 1 for lo, hi, _ in group) for group in groups) > room:
        raise SlurmParseError("host list: too many names", text)
    numbers = [
        [str(value).zfill(width) for lo, hi, width in group for value in range(lo, hi + 1)]
        for group in groups
    ]
    return [
        "".join(literal + value for literal, value in zip(parts[::2], (*chosen, ""), strict=True))
        for chosen in product(*numbers)
    ]


def _ranges(body: str, text: str) -> list[tuple[int, int, int]]:
    """``01-03,7`` to (first, last, width)."""
    found = []
    for piece in body.split(","):
        match = _RANGE.fullmatch(piece)
        if not match or len(piece) > 40:
            raise SlurmParseError(f"host list: {piece!r} is not a range", text)
        lo, hi = match[1], match[2] or match[1]
        if int(hi) < int(lo):
            raise SlurmParseError(f"host list: range {piece!r} runs backwards", text)
        found.append((int(lo), int(hi), len(lo)))
    return found


def compress(names: Iterable[str]) -> str:
    """The shortest list with one bracket per item that expands to exactly ``names``, in order.

    Raises ``SlurmParseError`` for names that a host list cannot hold (brackets, commas, blanks).
    """
    items: list[str] = []
    group: list[tuple[str, str, str]] = []
    for name in names:
        if not name or re.search(r"[\[\],\s]", name):
            raise SlurmParseError("not a node name", name)
        match = _NUMBERED.fullmatch(name)
        parts = (match[1], match[2], match[3]) if match else (name, "", "")
        if group and (not parts[1] or (parts[0], parts[2]) != (group[0][0], group[0][2])):
            items.append(_join(group))
            group = []
        group.append(parts)
        if not parts[1]:
            items.append(name)
            group = []
    if group:
        items.append(_join(group))
    return ",".join(items)


def _join(group: Sequence[tuple[str, str, str]]) -> str:
    prefix, first, suffix = group[0]
    if len(group) == 1:
        return prefix + first + suffix
    runs: list[list[str]] = []
    for _, digits, _ in group:
        if runs and _follows(runs[-1], digits):
            runs[-1][1] = digits
        else:
            runs.append([digits, digits])
    body = ",".join(lo if lo == hi else f"{lo}-{hi}" for lo, hi in runs)
    return f"{prefix}[{body}]{suffix}"


def _follows(run: Sequence[str], digits: str) -> bool:
    """True when appending ``digits`` to the run expands to the very same text (padding kept)."""
    return int(digits) == int(run[1]) + 1 and digits == str(int(digits)).zfill(len(run[0]))
