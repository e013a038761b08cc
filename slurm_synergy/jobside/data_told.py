"""What a training process knows of its data set, told to its launcher once.

How many items an epoch has and which files they lie in: the launcher reads some of these files to
find out how large the items are and how fast the storage is. It stands in a small file beside the
board, ``data.json``, written whole or not at all; a process without a launcher tells nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slurm_synergy.errors import LeaseError

__all__ = ["DataTold", "data_of", "described", "read_told", "tell", "tell_files", "tell_of"]

_NAME = "data.json"
_MIB = 1 << 20
_MOST_FILES = 256
_LARGEST_BYTES = 2 << 20
_LONGEST_CHAIN = 8
_MOST_ITEMS = 2**53
# Lists of the files of a data set: torchvision's two, and what people write.
_LISTS = ("samples", "imgs", "files", "paths")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTold:
    """``samples`` items an epoch in ``file_count`` files, some of which are ``files``."""

    samples: int
    file_count: int
    files: tuple[str, ...] = ()

    def mib(self) -> float:
        """Its size, from that of the files that are known by name; 0 where it cannot be known."""
        sizes = []
        for name in self.files:
            with contextlib.suppress(OSError, ValueError):
                status = os.stat(name)  # noqa: PTH116 (a Path takes much longer)
                if stat.S_ISREG(status.st_mode):
                    sizes.append(status.st_size)
        return self.file_count * sum(sizes) / len(sizes) / _MIB if sizes else 0.0


def described(files: Sequence[Any], samples: int) -> DataTold:
    """A data set of ``samples`` items in these files: absolute paths of some, drawn at random."""
    chosen = files
    if len(files) > _MOST_FILES:
        draw = random.Random(0)
        chosen = [files[at] for at in sorted(draw.sample(range(len(files)), _MOST_FILES))]
    paths = tuple(os.path.abspath(os.fspath(_path_of(one))) for one in chosen)  # noqa: PTH100
    return DataTold(samples=samples, file_count=len(files), files=paths)


def _path_of(entry: Any) -> str | os.PathLike[str]:
    """The path in an entry of a list of files. Raises TypeError for anything else."""
    if isinstance(entry, tuple | list) and entry:
        entry = entry[0]  # (path, label)
    if isinstance(entry, dict):
        entry = entry.get("filename")  # the cache files of a Hugging Face data set
    if isinstance(entry, str | os.PathLike):
        return entry
    raise TypeError(f"{type(entry).__name__} is no path")


def data_of(dataset: Any) -> DataTold | None:
    """What a map-style data set tells of itself; None where it has no length.

    Its files are known where it, or one that it wraps, has a list of them. Nothing is opened.
    """
    try:
        samples = len(dataset)
    except (TypeError, NotImplementedError):
        return None
    inner = dataset
    for _ in range(_LONGEST_CHAIN):  # Subset and the like have their data set in ``dataset``
        # A data set may be anything: what looks like a list of files need not be one.
        with contextlib.suppress(Exception):
            for files in _lists_of(inner):
                if not isinstance(files, list | tuple) or not files:
                    continue
                with contextlib.suppress(TypeError):
                    return _part(described(files, samples), len(inner))
        inner = getattr(inner, "dataset", None)
        if inner is None:
            break
    return DataTold(samples=samples, file_count=0)


def _lists_of(dataset: Any) -> Iterator[Any]:
    """What may be a list of its files: as declared, or as it is there without being made."""
    yield getattr(dataset, "synergy_files", None)
    kept = getattr(dataset, "__dict__", {})
    yield from (kept.get(name) for name in _LISTS)
    if type(dataset).__module__.startswith("datasets."):  # Hugging Face's
        yield dataset.cache_files


def _part(whole: DataTold, items: int) -> DataTold:
    """Of the data set of ``items`` items only those that an epoch has."""
    count = max(1, round(whole.file_count * whole.samples / max(items, 1)))
    return DataTold(samples=whole.samples, file_count=count, files=whole.files)


def tell(board: Path, told: DataTold) -> None:
    """Write it down beside the board. Raises OSError."""
    draft = board.with_name(f".{_NAME}.{os.getpid()}")
    draft.write_text(json.dumps(asdict(told)), encoding="utf-8", errors="surrogateescape")
    draft.replace(board.with_name(_NAME))


# What the program has said itself is not replaced by what a loader's data set tells.
_said = False


def tell_files(files: Iterable[Any], samples: int = 0) -> None:
    """Tell the launcher of this process, if it has one, of items in these files.

    ``samples`` items, or one in each file. Raises LeaseError for something else than paths of
    files, for none at all, and for a number of items that is none.
    """
    global _said
    if isinstance(files, str | bytes | os.PathLike) or not isinstance(files, Iterable):
        raise LeaseError(f"the files of a data set are a list of paths, not {files!r:.80}")
    if isinstance(samples, bool) or not isinstance(samples, int) or not 0 <= samples <= _MOST_ITEMS:
        raise LeaseError(f"samples= is the number of items of an epoch, not {samples!r:.80}")
    listed = list(files)
    if not listed:
        raise LeaseError("the list of the files of the data set is empty")
    try:
        told = described(listed, samples or len(listed))
    except TypeError as err:
        raise LeaseError(f"the files of a data set are paths: {err}") from err
    for name in told.files:
        if "\0" in name:
            raise LeaseError(f"no file can have this name: {name!r:.80}")
        if Path(name).is_dir():
            raise LeaseError(f"{name} is a directory: name the files in it")
    _said = True
    board = os.environ.get("SYNERGY_BOARD")
    if board:
        with contextlib.suppress(OSError):  # a profile without its memory side
            tell(Path(board), told)


_last: tuple[int, int] = (0, 0)


def tell_of(dataset: Any, board: Path) -> None:
    """Tell of the data set of the training loader, once; never an error for the program.

    Nothing is told where the program has said it itself.
    """
    global _last
    if _said:
        return
    with contextlib.suppress(Exception):
        mark = os.getpid(), id(dataset)
        if mark == _last:
            return
        _last = mark
        told = data_of(dataset)
        if told is not None:
            tell(board, told)


def read_told(board: Path) -> DataTold | None:
    """What the training process has told; None where it told nothing, or nonsense."""
    try:
        with board.with_name(_NAME).open("rb") as file:
            content = json.loads(file.read(_LARGEST_BYTES).decode("utf-8", "surrogateescape"))
        return DataTold(
            samples=max(0, int(content["samples"])),
            file_count=max(0, int(content["file_count"])),
            files=tuple(str(path) for path in content["files"][:_MOST_FILES]),
        )
    except (OSError, ValueError, TypeError, KeyError):
        return None
