"""Data sets and files that are read through the job's data cache.

The cache takes raw items in until its budget is full and never replaces one (MinIO, from the
Synergy and CoorDL papers), so every epoch hits exactly the items that are held, in any order, with
any number of workers and ranks. It holds one copy per node and job.
"""

from __future__ import annotations

import copy
import errno
import io
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, SupportsIndex

from slurm_synergy.errors import CacheError
from slurm_synergy.jobside.minio_item import Source
from slurm_synergy.jobside.minio_job import JobCache, job_cache, open_early
from slurm_synergy.jobside.minio_pickle import packed, unpacked
from slurm_synergy.jobside.minio_store import Offer
from slurm_synergy.jobside.rng import capture_rng, restore_rng
from slurm_synergy.jobside.session import say

__all__ = ["CachedDataset", "CachedFile", "cached_open"]

_FILES = "files"
_LARGEST = (1 << 64) - 1
# Items of a batch that are looked for, and taken in, together; and the most bytes of these.
_TOGETHER = 32
_TOGETHER_BYTES = 8 << 20


# -- files -----------------------------------------------------------------------------------------


class CachedFile(io.RawIOBase):
    """A read-only binary file over an item in memory; :meth:`getbuffer` copies nothing."""

    def __init__(self, view: memoryview, name: str) -> None:
        self._view, self.name, self._at = view, name, 0

    def getbuffer(self) -> memoryview:
        """The whole content, read-only; good for as long as it is held."""
        return self._view

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = (0, self._at, len(self._view))[whence]
        if base + offset < 0:
            raise OSError(22, "negative position in the file", self.name)
        self._at = base + offset
        return self._at

    def _take(self, size: int | None) -> memoryview:
        start = min(self._at, len(self._view))
        end = len(self._view) if size is None or size < 0 else start + size
        part = self._view[start:end]
        self._at = start + len(part) if len(part) else self._at
        return part

    def read(self, size: SupportsIndex | None = -1, /) -> bytes:
        if size == -1 and not self._at:
            self._at = len(self._view)
            return bytes(self._view)
        return bytes(self._take(None if size is None else size.__index__()))

    def read1(self, size: int = -1, /) -> bytes:
        return self.read(size)

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        part = self._take(len(target))
        target[: len(part)] = part
        return len(part)

    def readline(self, size: SupportsIndex | None = -1, /) -> bytes:
        start = min(self._at, len(self._view))
        pieces = bytearray()
        limit = -1 if size is None else size.__index__()
        for at in range(start, len(self._view), 4096):
            piece = bytes(self._view[at : at + 4096])
            end = piece.find(b"\n") + 1
            pieces += piece[:end] if end else piece
            if end or 0 <= limit <= len(pieces):
                break
        line = bytes(pieces if limit < 0 else pieces[:limit])
        self._at = start + len(line)
        return line


def _stamp(path: str, status: os.stat_result | None = None) -> int:
    """Changes with the file: its size and the time it was written; 0 when it is not there."""
    try:
        found = Path(path).stat() if status is None else status
    except OSError:
        return 0
    return ((found.st_mtime_ns << 20) + found.st_size) % _LARGEST + 1


def read_cached(cache: JobCache, path: str, items: int) -> memoryview | None:
    """The content of a file, from the cache or newly read; None where it is not to be cached."""
    source = cache.source(_FILES if not items else f"{_FILES}:{items}", items)
    if source is None:
        return None
    plain = path.startswith("/") and "/." not in path and "//" not in path
    where = path if plain else os.path.abspath(path)  # noqa: PTH100 (a Path takes ten times as long)
    key = source.key_of_name(where)
    view = cache.get(key, lambda: _stamp(where))
    if view is not None:
        return view
    if not cache.takes_more:
        return None
    content, status = _read_file(path, cache)
    cache.put(source.of_key(key), content, _stamp(where, status))
    return content


def _read_file(path: str, cache: JobCache) -> tuple[memoryview, os.stat_result]:
    """A file's whole content, with a third of the calls that ``open`` and ``read`` make."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        size = status.st_size
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if stat.S_ISREG(status.st_mode):
            # One byte more than there should be: less than asked for is the end of the file.
            room = cache.buffers.take(size + 1)
            if room is not None and os.readv(fd, (room,)) == size:
                return room[:size].toreadonly(), status
            os.lseek(fd, 0, os.SEEK_SET)
        with io.FileIO(fd, closefd=False) as file:
            return memoryview(file.readall()), status
    finally:
        os.close(fd)


def cached_open(path: str | os.PathLike[str], mode: str = "rb") -> BinaryIO | CachedFile:
    """``open(path, "rb")`` through the job's cache.

    A file that the cache holds is not looked at again during a run. What is returned for it reads,
    seeks and has ``getbuffer()``. Raises CacheError for another mode, OSError as open does.
    """
    if mode != "rb":
        raise CacheError(f"cached_open({str(path)!r}, {mode!r}): a cached file is read as 'rb'")
    name = os.fspath(path)
    view = read_cached(job_cache(), name, 0)
    if view is None:
        return Path(name).open("rb")
    return CachedFile(view, name)


# -- data sets -------------------------------------------------------------------------------------


class CachedDataset:
    """A map-style data set whose items come from the job's cache from the second epoch on.

    ``dataset[i]`` must always give the same item: put random augmentation behind it, into
    ``transform``, which is called with each item. With ``decode`` the items of ``dataset`` are raw
    bytes, and ``decode(memoryview)`` makes the sample of them, the first time as well: a hit copies
    nothing before. Without it, items are kept pickled and each hit makes a new object.

    ``name`` tells data sets apart, for a cache that a restart finds again; the first and last item
    are part of it. A data set that gives different items for the same number is used uncached, with
    one line. Attributes of ``dataset`` can be read here too. Raises CacheError where it has no
    length or decode gets no bytes.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        decode: Callable[[memoryview], Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        name: str = "",
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise CacheError(
                f"a {type(dataset).__name__} cannot be cached: it needs __len__ and __getitem__"
            )
        self.dataset, self._decode, self._transform = dataset, decode, transform
        self._shared = False
        self._items = len(dataset)
        self._name = self._identity(name)
        if self._name:
            open_early()

    def _identity(self, name: str) -> str:
        """Follows from what the items are; empty when they are not always the same."""
        if not self._items:
            return ""
        before = capture_rng()
        ends = [self._encoded(self.dataset[at]) for at in (0, self._items - 1)]
        again = self._encoded(self.dataset[0])
        restore_rng(before)
        if again != ends[0]:
            say(
                f"{type(self.dataset).__name__} is not cached: item 0 differs from one reading to"
                " the next; move what is random into CachedDataset(..., transform=...)"
            )
            return ""
        kind = f"{type(self.dataset).__module__}.{type(self.dataset).__qualname__}"
        sums = [zlib.crc32(end) for end in ends]
        return f"{name}:{kind}:{self._decode is None}:{sums}"

    def _encoded(self, item: Any) -> bytes | memoryview:
        if self._decode is None:
            return packed(item)
        try:
            return memoryview(item).cast("B").toreadonly()
        except TypeError:
            raise CacheError(
                f"decode= takes bytes, and {type(self.dataset).__name__} gave a"
                f" {type(item).__name__}: leave decode= out, or let it give its raw bytes"
            ) from None

    def __len__(self) -> int:
        return self._items

    def __getattr__(self, name: str) -> Any:
        # Private ones must not be found there: they would go round the cache.
        if name.startswith("_") or "dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, index: SupportsIndex) -> Any:
        item = self._item(self._number(index))
        return item if self._transform is None else self._transform(item)

    def __getitems__(self, indices: Iterable[SupportsIndex]) -> list[Any]:
        """The items of a batch, as PyTorch's loader asks for them."""
        if type(self).__getitem__ is not CachedDataset.__getitem__:
            return [self[index] for index in indices]
        numbers = [self._number(index) for index in indices]
        found: list[Any] = []
        for first in range(0, len(numbers), _TOGETHER):
            items = self._items_at(numbers[first : first + _TOGETHER])
            found += items if self._transform is None else map(self._transform, items)
        return found

    def _number(self, index: SupportsIndex) -> int:
        number = index.__index__()
        if not -self._items <= number < self._items:
            raise IndexError(f"item {number} of {self._items}")
        return number % self._items

    def _item(self, number: int) -> Any:
        """An item before its transform, by way of the cache."""
        cache = job_cache()
        source = cache.source(self._name, self._items) if self._name else None
        if source is None:
            return self._fresh(self.dataset[number])
        view = cache.get(source.key_of_index(number))
        if view is not None:
            return self._held(view)
        item = self.dataset[number]
        if cache.takes_more:
            cache.put(source.of_index(number), self._encoded(item))
        return self._fresh(item)

    def _items_at(self, numbers: list[int]) -> list[Any]:
        """Like :meth:`_item` for several, in less time."""
        cache = job_cache()
        source = cache.source(self._name, self._items) if self._name else None
        if source is None:
            return [self._fresh(self.dataset[number]) for number in numbers]
        views = cache.get_all(list(map(source.key_of_index, numbers)))
        if None not in views:
            return [self._held(view) for view in views if view is not None]
        fresh = self._read(
            cache, source, [n for n, v in zip(numbers, views, strict=True) if v is None]
        )
        return [self._fresh(next(fresh)) if view is None else self._held(view) for view in views]

    def _read(self, cache: JobCache, source: Source, numbers: list[int]) -> Iterator[Any]:
        """Items of the data set, which the cache has taken in if it wanted them."""
        items: list[Any] = []
        offers: list[Offer] = []
        size = 0
        for number in numbers:
            item = self.dataset[number]
            items.append(item)
            if cache.takes_more:
                content = self._encoded(item)
                offers.append((source.of_index(number), content, 0))
                size += len(content)
                if size >= _TOGETHER_BYTES:
                    cache.put_all(offers)
                    offers, size = [], 0
        cache.put_all(offers)
        return iter(items)

    def _held(self, view: memoryview) -> Any:
        return unpacked(view, shared=self._shared) if self._decode is None else self._decode(view)

    def for_collation(self) -> CachedDataset:
        """The same for somebody who copies the items into batches at once and writes into none.

        Their larger arrays and tensors are then parts of the cache and not copied before.
        """
        if type(self) is not CachedDataset or self._transform is not None:
            return self
        twin = copy.copy(self)
        twin._shared = True
        return twin

    def _fresh(self, item: Any) -> Any:
        if self._decode is None:
            return item
        content = self._encoded(item)
        assert isinstance(content, memoryview)
        return self._decode(content)
