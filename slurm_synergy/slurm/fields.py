"""The small grammars inside Slurm's text: keys, times, durations, sizes, GPU counts, id sets.

Pure functions. All raise ``SlurmParseError`` that names the field and quotes the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime

from slurm_synergy.errors import SlurmParseError

__all__ = [
    "NULL_WORDS",
    "as_null",
    "first_tasks",
    "int_or",
    "parse_count_range",
    "parse_duration_s",
    "parse_gpus",
    "parse_gpus_with_ids",
    "parse_id_set",
    "parse_int",
    "parse_mib",
    "parse_time_s",
    "parse_words",
    "required",
    "scan_keys",
]

NULL_WORDS = frozenset({"", "(null)", "None", "NONE", "N/A", "n/a", "Unknown", "none"})
"""The words with which Slurm says that there is no value."""

_KEY = re.compile(r"(?:^|(?<=\s))([A-Za-z][A-Za-z0-9_/:]*)=(\S*)")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", re.ASCII)
_DURATION = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?(?:\.\d+)?")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)(?:[nc]?)", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_GPU = re.compile(r"(?:gres[:/])?gpu((?:[:=][^:=(]+)*)(?:\(([^)]*)\))?", re.IGNORECASE)


def as_null(text: str) -> str | None:
    """``None`` when the text is one of Slurm's words for "no value"."""
    return None if text.strip() in NULL_WORDS else text


def scan_keys(text: str) -> dict[str, str]:
    """All ``Key=value`` pairs of a text without user-written parts; the first of a key wins."""
    found: dict[str, str] = {}
    for match in _KEY.finditer(text):
        found.setdefault(match[1], match[2])
    return found


def parse_int(text: str, field: str) -> int:
    """A plain integer, negative ones too."""
    if not re.fullmatch(r"-?\d{1,19}", text):
        raise SlurmParseError(f"{field}: not a number", text)
    return int(text)


def int_or(text: str, default: int) -> int:
    """A plain number, or ``default`` for anything else."""
    return int(text) if text.isascii() and text.isdigit() else default


def parse_count_range(text: str, field: str) -> tuple[int, int]:
    """``2`` or ``1-3`` as (least, most); sizes such as ``4K`` nodes are understood."""
    match = re.fullmatch(r"(\d+)(K?)(?:-(\d+)(K?))?", text)
    if not match:
        raise SlurmParseError(f"{field}: not a count", text)
    least = int(match[1]) * (1024 if match[2] else 1)
    most = int(match[3]) * (1024 if match[4] else 1) if match[3] else least
    return least, most


def parse_time_s(text: str, field: str) -> float | None:
    """``2026-11-29T22:35:42`` in UTC, or epoch seconds, as epoch seconds; null words as None."""
    if as_null(text) is None:
        return None
    if text.isdigit():
        return float(text)
    try:
        if not _TIME.fullmatch(text):
            raise ValueError(text)
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError as err:
        raise SlurmParseError(f"{field}: not a time (YYYY-MM-DDTHH:MM:SS)", text) from err


def parse_duration_s(text: str, field: str) -> float | None:
    """``[D-]HH:MM:SS``, ``MM:SS``, ``N sec`` or ``D-HH`` as seconds; no limit as ``None``."""
    if as_null(text) is None or text.upper() in (
        "UNLIMITED",
        "INFINITE",
        "PARTITION_LIMIT",
    ):
        return None
    seconds = re.fullmatch(r"(\d+) ?(?:s|sec)", text)
    if seconds:
        return float(seconds[1])
    match = _DURATION.fullmatch(text)
    if not match:
        raise SlurmParseError(f"{field}: not a duration ([D-]HH:MM:SS)", text)
    days, parts = (
        match[1],
        [int(part) for part in match.groups()[1:] if part is not None],
    )
    if days is not None:
        hours, minutes, secs = (*parts, 0, 0)[:3]
        return float(int(days) * 86400 + hours * 3600 + minutes * 60 + secs)
    if len(parts) == 3:
        return float(parts[0] * 3600 + parts[1] * 60 + parts[2])
    minutes, secs = (*parts, 0)[:2]
    return float(minutes * 60 + secs)


def parse_mib(text: str, field: str) -> int:
    """``100G``, ``1000000M``, ``61440`` (MiB), ``1.5T`` as MiB, rounded up."""
    match = _SIZE.fullmatch(text)
    if not match:
        raise SlurmParseError(f"{field}: not a size", text)
    exact = float(match[1]) * _MIB[match[2].upper()]
    return int(exact) if exact == int(exact) else int(exact) + 1


def parse_words(text: str) -> tuple[str, ...]:
    """A comma-separated list; null words as an empty tuple."""
    if as_null(text) is None:
        return ()
    return tuple(word for word in text.split(",") if word)


def parse_id_set(text: str, field: str) -> tuple[int, ...]:
    """``0-1,12-13`` as ``(0, 1, 12, 13)``; null words as an empty tuple."""
    if as_null(text) is None:
        return ()
    ids: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?(?:/\d+)?", piece)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise SlurmParseError(f"{field}: not a set of ids", text)
        ids.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(ids)


def first_tasks(text: str, count: int) -> tuple[int, ...]:
    """The lowest ``count`` task ids of an array's waiting members: ``0-9:2,12%4`` and the like.

    Slurm cuts long lists anywhere and ends them in ``...``: the piece that this belongs to is left
    out.
    """
    pieces = text.partition("%")[0].strip("[]").split(",")
    if pieces[-1].endswith("..."):
        pieces = pieces[:-1]
    tasks: list[int] = []
    for piece in pieces:
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?", piece)
        if not match:
            raise SlurmParseError("ArrayTaskId: not a list of tasks", text)
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        tasks.extend(range(first, last + 1, max(1, step))[: max(0, count - len(tasks))])
    return tuple(tasks)


def parse_gpus(text: str, field: str) -> dict[str, int]:
    """GPU counts by type from any of Slurm's forms; the type ``""`` means any type.

    ``gres:gpu:v100:2``, ``gres/gpu:2``, ``gpu:v100:8(S:0-1)``, ``cpu=2,gres/gpu=1``. What is not
    a GPU is passed over.
    """
    return {kind: count for kind, count, _ in parse_gpus_with_ids(text, field)}


def parse_gpus_with_ids(text: str, field: str) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    """As ``parse_gpus``, with the indices of ``(IDX:0-1)``: (type, count, indices)."""
    if as_null(text) is None:
        return ()
    totals: dict[str, tuple[int, tuple[int, ...]]] = {}
    for item in re.split(r",(?![^(]*\))", text):
        match = _GPU.fullmatch(item.strip())
        if not match:
            continue
        words = [word for word in re.split(r"[:=]", match[1]) if word and word != "no_consume"]
        count = words.pop() if words and words[-1].isdigit() else "1"
        if len(words) > 1:
            raise SlurmParseError(f"{field}: not a GPU count", item)
        kind = words[0] if words else ""
        indices: tuple[int, ...] = ()
        if match[2] and match[2].startswith("IDX:"):
            indices = parse_id_set(match[2].removeprefix("IDX:"), field)
        before, known = totals.get(kind, (0, ()))
        totals[kind] = (before + int(count), known + indices)
    return tuple((kind, count, ids) for kind, (count, ids) in totals.items())


def required(keys: Mapping[str, str], key: str, record: str) -> str:
    """The value of a key that every release prints."""
    try:
        return keys[key]
    except KeyError:
        raise SlurmParseError(f"{record}: no {key}=", " ".join(keys)[:200]) from None
