"""The files and labels that DALI's file reader would find for its arguments, in its order.

Anything whose meaning to DALI is not certain raises :class:`Unclear`, so that nobody trains on
other samples than DALI would have given. Nothing here imports DALI.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Unclear", "listing"]

_BLANKS = b" \t\n\v\f\r"
# DALI reads a line of a list into a buffer of 16 KiB.
_LONGEST_LINE = 16_000
_LARGEST_LABEL = 2**31 - 1


class Unclear(Exception):
    """It is not certain what DALI would read; the text says why."""


def listing(given: dict[str, Any], default_filters: Sequence[str]) -> tuple[list[str], list[int]]:
    """(paths, labels) by the reader's keywords. Raises Unclear, and OSError as the system does.

    ``default_filters`` are the patterns that hold where ``file_filters`` is left out.
    """
    root, files, list_file = (given.get(name) for name in ("file_root", "files", "file_list"))
    for path in (root, list_file):
        if path is not None and not (isinstance(path, str) and path):
            raise Unclear("file_root and file_list are to be paths")
    if files is not None and list_file is None:
        found = _of_files(root, files, given.get("labels"))
    elif list_file is not None and files is None and given.get("labels") is None:
        found = _of_list(root, list_file)
    elif root is not None and files is None and given.get("labels") is None:
        found = _of_folders(root, given, default_filters)
    else:
        raise Unclear("its arguments do not go together")
    paths, labels = found
    if not paths:
        raise Unclear("it finds no files")
    if any("://" in path for path in (paths[0], paths[-1], root or "")):
        raise Unclear("its files are not in a file system")
    if not all(0 <= abs(label) <= _LARGEST_LABEL for label in labels):
        raise Unclear("its labels are no numbers of 32 bits")
    return paths, labels


def _of_files(root: str | None, files: Any, labels: Any) -> tuple[list[str], list[int]]:
    names = [files] if isinstance(files, str) else list(files)
    numbers = range(len(names)) if labels is None else labels
    numbers = [int(one) for one in ([numbers] if isinstance(numbers, int) else numbers)]
    if not all(isinstance(name, str) and name for name in names) or len(names) != len(numbers):
        raise Unclear("its files are not strings with one label each")
    return [os.path.join(root or "", name) for name in names], numbers  # noqa: PTH118 (many)


def _of_list(root: str | None, list_file: str) -> tuple[list[str], list[int]]:
    where = list_file.rpartition("/")[0] if root is None else root
    paths, labels = [], []
    for line in Path(list_file).read_bytes().split(b"\n"):
        text = line.rstrip(_BLANKS)
        if not text:
            continue
        digits = re.search(rb"[0-9]+\Z", text)
        name = text[: digits.start()] if digits else text
        bare = name.rstrip(_BLANKS)
        if not digits or not bare or bare == name or len(line) > _LONGEST_LINE or b"\0" in line:
            raise Unclear(f"a line of {list_file} is not a name and a label")
        paths.append(os.path.join(where, os.fsdecode(bare)))  # noqa: PTH118 (many)
        labels.append(int(digits[0]))
    return paths, labels


def _of_folders(
    root: str, given: dict[str, Any], default_filters: Sequence[str]
) -> tuple[list[str], list[int]]:
    exact = bool(given.get("case_sensitive_filter", False))
    files = _pattern(given.get("file_filters", default_filters), exact)
    wanted = given.get("dir_filters")
    folders = None if wanted is None else _pattern(wanted, exact)
    names = []
    with os.scandir(root) as entries:
        for entry in entries:
            os.stat(entry.path)  # noqa: PTH116 (one that leads nowhere is an error for DALI too)
            name = os.fsencode(entry.name)
            if entry.is_dir() and (folders is None or folders.fullmatch(name)):
                names.append(name)
    paths, labels = [], []
    for label, folder in enumerate(sorted(names)):
        where = os.path.join(root, os.fsdecode(folder))  # noqa: PTH118 (a Path takes much longer)
        for name in sorted(_plain_files(where)):
            if files.fullmatch(name):
                paths.append(f"{where}/{os.fsdecode(name)}")
                labels.append(label)
    return paths, labels


def _plain_files(folder: str) -> Iterable[bytes]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink() or entry.is_file(follow_symlinks=False):
                yield os.fsencode(entry.name)


def _pattern(filters: Any, exact: bool) -> re.Pattern[bytes]:
    """One expression for all patterns; of what these may hold only the star."""
    several = [filters] if isinstance(filters, str) else list(filters)
    for one in several:
        if not isinstance(one, str) or not one.isascii() or re.search(r"[][\\?]", one):
            raise Unclear(f"its pattern {one!r} is more than names and stars")
    if not several:
        raise Unclear("its list of patterns is empty")
    parts = (b".*".join(re.escape(part).encode() for part in one.split("*")) for one in several)
    return re.compile(b"|".join(parts), re.DOTALL | (0 if exact else re.IGNORECASE))
