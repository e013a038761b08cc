"""How fast a job's data can be read when no cache helps, and how large it is.

The job's own files are read, whole and by several readers at once, as its loader does, so that
small files cost what they cost. What the kernel keeps of them is kept out of it: they are read past
the page cache (O_DIRECT) where the file system allows that, else dropped from the cache before, and
it is checked that they went. Data that lies in memory only has no bandwidth of this kind.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import stat
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Bandwidth", "DataSize", "OpenFiles", "data_size", "read_bandwidth", "warm"]

_BLOCK_BYTES = 1 << 20
_MIB = 1 << 20
_LEAST_BYTES = 4096
_MOST_FILES = 200_000
_KEPT_OPEN = 2000
# Programs, libraries and settings: nothing that a data set is made of.
_NOT_DATA = ("/proc", "/sys", "/dev", "/usr", "/lib", "/bin", "/etc", "/opt", "/run")
_IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs"})
_NOT_DATA_NAMES = (".so", ".py", ".pyc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """What reading past every cache came to.

    ``mib_s`` is None where it cannot be measured, and ``how`` says why; else how the caches were
    kept out. ``read_mib`` were read of ``files`` files in ``seconds``. ``in_memory``: all of the
    files lie in file systems that have no storage behind them.
    """

    mib_s: float | None
    how: str
    in_memory: bool = False
    read_mib: float = 0.0
    files: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSize:
    """Regular files below some places: how many, and their size in MiB."""

    files: tuple[Path, ...]
    mib: float


class OpenFiles:
    """Collects the data files that a process tree has open, look by look."""

    def __init__(self) -> None:
        self._found: dict[Path, None] = {}
        self._not_data = tuple(f"{place}/" for place in (*_NOT_DATA, sys.prefix, sys.base_prefix))

    @property
    def files(self) -> tuple[Path, ...]:
        """What was seen so far, in the order of the first sight."""
        return tuple(self._found)

    def look(self, pids: Iterable[int]) -> None:
        """Note what these processes have open for reading now."""
        if len(self._found) >= _KEPT_OPEN:
            return
        for pid in pids:
            with contextlib.suppress(OSError):
                for entry in os.scandir(f"/proc/{pid}/fd"):
                    self._note(pid, entry.name)

    def _note(self, pid: int, fd: str) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            # As text: this is done for every descriptor, while the job is measured.
            target = os.readlink(f"/proc/{pid}/fd/{fd}")  # noqa: PTH115
            if target[0] != "/" or target.startswith(self._not_data):
                return
            path = Path(target)
            if path in self._found or path.name.endswith(_NOT_DATA_NAMES):
                return
            words = Path(f"/proc/{pid}/fdinfo/{fd}").read_text(encoding="ascii").split()
            flags = int(words[words.index("flags:") + 1], 8)
            status = path.stat()
            read_only = flags & os.O_ACCMODE == os.O_RDONLY
            if read_only and stat.S_ISREG(status.st_mode) and status.st_size >= _LEAST_BYTES:
                self._found[path] = None


def data_size(places: Sequence[Path]) -> DataSize:
    """All regular files at and below ``places``, by path. Raises OSError for a missing place."""
    found: dict[Path, int] = {}
    for place in places:
        if place.is_file():
            found[place] = place.stat().st_size
            continue
        if not place.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(place))
        for folder, _, names in os.walk(place):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(OSError):
                    status = path.stat()
                    if stat.S_ISREG(status.st_mode):
                        found[path] = status.st_size
            if len(found) > _MOST_FILES:
                raise OSError(
                    errno.EFBIG, f"more than {_MOST_FILES} files; give size and samples", str(place)
                )
    return DataSize(files=tuple(sorted(found)), mib=sum(found.values()) / _MIB)


def warm(files: Sequence[Path], most_bytes: int) -> int:
    """Read ``files`` into the page cache, up to ``most_bytes``; returns the bytes read."""
    done = 0
    for path in files:
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            while done < most_bytes and (block := file.read(_BLOCK_BYTES)):
                done += len(block)
        if done >= most_bytes:
            break
    return done


def read_bandwidth(
    files: Sequence[Path], *, readers: int, most_mib: float = 512.0, most_s: float = 10.0
) -> Bandwidth:
    """MiB/s at which ``readers`` threads read ``files``, in random order, past every cache.

    Ends after ``most_mib`` or ``most_s`` seconds; fewer files are not read twice. Only regular
    files are opened: to open a pipe may take for ever.
    """
    memory = _memory_devices()
    devices = {path: _device(path) for path in files if path.is_file()}
    order = [path for path, device in devices.items() if device and device not in memory]
    random.Random(0).shuffle(order)
    for direct in (True, False):
        reading = _Reading(order, direct=direct, most_bytes=most_mib * _MIB, most_s=most_s)
        took_s = reading.run(max(1, readers))
        if reading.done_bytes and took_s > 0:
            how = "O_DIRECT" if direct else "dropped from the page cache before"
            read_mib = reading.done_bytes / _MIB
            return Bandwidth(
                mib_s=read_mib / took_s,
                how=how,
                read_mib=read_mib,
                files=reading.done_files,
                seconds=took_s,
            )
    if devices and all(device in memory for device in devices.values()):
        return Bandwidth(mib_s=None, how="the data lies in memory", in_memory=True)
    why = "the data files cannot be read" if files else "no data files are known"
    return Bandwidth(mib_s=None, how=why)


def _memory_devices() -> frozenset[str]:
    """``major:minor`` of the file systems that have no storage behind them."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
        mounts = [line.partition(" - ") for line in lines]
        return frozenset(
            head.split()[2] for head, _, tail in mounts if tail.split()[0] in _IN_MEMORY
        )
    return frozenset()


def _device(path: Path) -> str:
    try:
        device = path.stat().st_dev
    except OSError:
        return ""
    return f"{os.major(device)}:{os.minor(device)}"


class _Reading:
    """Several threads that take files from one list until it, the time or the budget is over."""

    def __init__(
        self, files: Sequence[Path], *, direct: bool, most_bytes: float, most_s: float
    ) -> None:
        self._files = iter(files)
        self._direct, self._most_bytes, self._most_s = direct, most_bytes, most_s
        self._lock = threading.Lock()
        self._until_s = 0.0
        self.done_bytes = self.done_files = 0

    def run(self, readers: int) -> float:
        began_s = time.monotonic()
        self._until_s = began_s + self._most_s
        threads = [threading.Thread(target=self._read_some) for _ in range(readers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.monotonic() - began_s

    def _read_some(self) -> None:
        buffer = mmap.mmap(-1, _BLOCK_BYTES)  # aligned to a page, as O_DIRECT wants it
        while self.done_bytes < self._most_bytes and time.monotonic() < self._until_s:
            with self._lock:
                path = next(self._files, None)
            if path is None:
                return
            with contextlib.suppress(OSError):
                self._read(path, buffer)

    def _read(self, path: Path, buffer: mmap.mmap) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if self._direct else 0)
        fd = os.open(path, flags)
        try:
            if not self._direct and not _dropped(fd):
                return
            at = 0
            while (count := os.preadv(fd, [buffer], at)) > 0:
                at += count
                with self._lock:
                    self.done_bytes += count
                over = self.done_bytes >= self._most_bytes or time.monotonic() >= self._until_s
                if over or count % mmap.PAGESIZE:
                    break
            with self._lock:
                self.done_files += 1
        finally:
            os.close(fd)


def _dropped(fd: int) -> bool:
    """Drop the file from the page cache; whether its beginning is really gone from there."""
    os.fdatasync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        return os.preadv(fd, [bytearray(_LEAST_BYTES)], 0, os.RWF_NOWAIT) == 0
    except BlockingIOError:
        return True  # it would have to wait for the storage
    except OSError as err:
        # A file system that cannot tell is believed.
        return err.errno == errno.EOPNOTSUPP
