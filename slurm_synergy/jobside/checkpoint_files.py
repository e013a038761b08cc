"""Files of checkpoints: written whole, made durable, summed, and compared with their sums."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from slurm_synergy.errors import CheckpointError

__all__ = [
    "bytes_in",
    "check_sums",
    "file_sum",
    "files_in",
    "sums_of",
    "sync_dir",
    "sync_tree",
    "write_file",
]


def sync_dir(path: Path) -> None:
    """Make durable which names a directory has."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as err:
        # Some network file systems cannot sync a directory; their renames are synchronous.
        if err.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def _open_own(name: str, flags: int) -> int:
    """Open for writing, but never through a link: the directory may be one that others write to."""
    fd = os.open(name, flags | os.O_NOFOLLOW, 0o600)
    os.fchmod(fd, 0o600)  # whatever the umask, and whoever made it
    return fd


def write_file(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file whole: other ranks see it complete and synced, or not at all."""
    partial = path.with_name(path.name + ".part")
    with open(partial, "wb", opener=_open_own) as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def file_sum(path: Path) -> dict[str, Any]:
    """The size and BLAKE2b sum of a file, as manifests have them."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32))
        return {"bytes": os.fstat(file.fileno()).st_size, "blake2b": digest.hexdigest()}


def files_in(directory: Path) -> list[Path]:
    """All files below ``directory``, in the order of their names."""
    return sorted(path for path in directory.rglob("*") if not path.is_dir())


def sync_tree(directory: Path) -> None:
    """Make durable what others have written below ``directory``."""
    for path in files_in(directory):
        if path.is_symlink():
            continue
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    for inner in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
        sync_dir(inner)


def bytes_in(directory: Path) -> int:
    """The size of all files; they and the directory may vanish meanwhile."""
    total = 0
    with contextlib.suppress(OSError):
        for path in files_in(directory):
            total += path.stat().st_size
    return total


def sums_of(directory: Path, *, leave_out: str = "") -> dict[str, dict[str, Any]]:
    """The sums of all files below ``directory`` but one, by their path in it."""
    paths = {str(path.relative_to(directory)): path for path in files_in(directory)}
    return {name: file_sum(path) for name, path in paths.items() if name != leave_out}


def check_sums(directory: Path, sums: Mapping[str, Any]) -> None:
    """Raise CheckpointError when a file below ``directory`` is not what ``sums`` say."""
    for name, expected in sums.items():
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts or file_sum(directory / inside) != expected:
            raise CheckpointError(f"{name} does not match its checksum")
