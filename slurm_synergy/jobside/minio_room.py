"""How much room a data cache has where it lies.

On a disk that is what the file system has free; in memory also what the machine has left, and what
the limits of this process's cgroups leave, since items in a tmpfs are memory of who wrote them. A
limit that Slurm or a container runtime has set ends processes that go beyond it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Room", "room_for"]

_SPARE_PART = 10
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_IN_MEMORY = ("tmpfs", "ramfs")
# Limit, use, and what of the use the kernel frees by itself: less the shared part.
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")
_V2 = ("memory.max", "memory.current", "file", "shmem")


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The most that a cache may come to hold, in bytes, and ``what`` sets that bound."""

    most_bytes: int
    what: str


def room_for(path: Path, held_bytes: int, *, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> Room:
    """The room of the cache at ``path``, which holds ``held_bytes`` already; a tenth is left free.

    Raises OSError when there is no such directory.
    """
    system = os.statvfs(path)
    found = [(system.f_bavail * system.f_frsize, f"the file system of {path.parent}")]
    if _lies_in_memory(path, proc):
        found += _memory_left(proc, cgroups)
    free, what = min(found)
    return Room(
        most_bytes=(held_bytes + max(free, 0)) * (_SPARE_PART - 1) // _SPARE_PART, what=what
    )


def _lies_in_memory(path: Path, proc: Path) -> bool:
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    with contextlib.suppress(OSError):
        for line in (proc / "self/mountinfo").read_text(errors="replace").splitlines():
            mount, _, kind = line.partition(" - ")
            if mount.split()[2:3] == [number]:
                return kind.split(" ", 1)[0] in _IN_MEMORY
    return False


def _memory_left(proc: Path, cgroups: Path) -> Iterator[tuple[int, str]]:
    with contextlib.suppress(OSError):
        text = (proc / "meminfo").read_text(errors="replace")
        left = re.search(r"^MemAvailable:\s*(\d+) kB", text, re.M)
        if left is not None:
            yield int(left[1]) * 1024, "the memory of this machine"
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text(errors="replace").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, place = rest.partition(":")
            if not controllers:
                yield from _left_in(cgroups, place, _V2)
            elif "memory" in controllers.split(","):
                yield from _left_in(cgroups / "memory", place, _V1)


def _left_in(root: Path, place: str, names: tuple[str, str, str, str]) -> Iterator[tuple[int, str]]:
    """Of a cgroup and those above it; in a container that may be only what is mounted there."""
    limit, use, cache, shared = names
    inner = root / place.strip("/")
    for each in (inner, *inner.parents):
        if not each.is_relative_to(root):
            break
        # "max" is no number, and not every level has the files.
        with contextlib.suppress(OSError, ValueError):
            most = int((each / limit).read_text())
            words = (line.split() for line in (each / "memory.stat").read_text().splitlines())
            stat = {word[0]: int(word[1]) for word in words if len(word) == 2}
            freed = max(0, stat.get(cache, 0) - stat.get(shared, 0))
            used = int((each / use).read_text()) - freed
            yield most - used, "the memory limit of this job"
