"""Where a job's data cache lies on its node: one private directory per user and job.

``PLACE/synergy-cache-UID-JOB``, mode 0700. Whoever uses it holds a shared lock on the directory,
which ends with the process however that ends; without any lock nobody needs it any more. PLACE is
``SYNERGY_CACHE_DIR`` or ``/dev/shm``. A symbolic link, a directory of somebody else or one that
others may enter is never used.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from slurm_synergy.errors import CacheError, LeaseError
from slurm_synergy.jobside.environment import switched_on

__all__ = ["CachePlace", "cache_path", "keep_or_remove", "remove_unused", "sweep"]

_MEMORY = Path("/dev/shm")
# A directory is made first and locked then: leave others' the time for that.
_YOUNG_S = 60.0
_KEPT = "kept"
_SESSION = "session"
_KEPT_S = 86_400.0
_TRIES = 20


def cache_path(env: Mapping[str, str]) -> Path:
    """The directory of this job's cache; outside Slurm, of this login session's programs."""
    job = env.get("SLURM_JOB_ID", "")
    name = job if job.isdigit() else f"{_SESSION}{os.getsid(0)}"
    root = Path(env.get("SYNERGY_CACHE_DIR") or _MEMORY)
    return root / f"synergy-cache-{os.getuid()}-{name}"


class CachePlace:
    """An open cache directory. ``alone`` tells that nobody else used it when it was opened.

    Others wait until the first one calls :meth:`share`. ``fd`` is to be used for all access to
    files inside. Raises CacheError when the directory cannot be made or trusted.
    """

    __slots__ = ("alone", "fd", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            for _ in range(_TRIES):
                fd = _opened(path)
                if fd < 0:
                    continue
                try:
                    self.alone = _lock(fd, fcntl.LOCK_EX)
                    if not self.alone:
                        fcntl.flock(fd, fcntl.LOCK_SH)
                    if _is_at(fd, path):
                        self.fd = fd
                        return
                except OSError:
                    os.close(fd)
                    raise
                os.close(fd)  # its last user removed it meanwhile
        except OSError as err:
            reason = err.strerror or str(err)
            raise CacheError(
                f"cannot use {path} for the data cache: {reason}; set SYNERGY_CACHE_DIR to a"
                " writable directory on this node"
            ) from err
        raise CacheError(f"{path} is made and removed all the time; set SYNERGY_CACHE_DIR")

    def share(self) -> None:
        """What lies here is in order: let others in."""
        fcntl.flock(self.fd, fcntl.LOCK_SH)

    def open_file(self, name: str, flags: int) -> int:
        """A descriptor of a file inside. Raises OSError."""
        safe = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        return os.open(name, flags | safe, 0o600, dir_fd=self.fd)

    def names(self) -> list[str]:
        """The files inside."""
        return os.listdir(self.fd)  # noqa: PTH208 (a Path knows no descriptors)

    def unlink(self, name: str) -> None:
        """Remove a file inside; one that is not there is fine."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def close(self) -> None:
        """Give the lock back."""
        fd, self.fd = self.fd, -1
        os.close(fd)


def _opened(path: Path) -> int:
    """A descriptor of the directory, which is made where there is none; -1: it went meanwhile."""
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            path.chmod(0o700)  # whatever the umask
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    status = os.fstat(fd)
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(fd)
        raise PermissionError(1, "it is not a private directory (mode 0700) of this user")
    return fd


def _lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        there, here = path.lstat(), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def remove_unused(path: Path) -> bool:
    """Remove the cache at ``path`` unless somebody uses it; True when it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        if os.fstat(fd).st_uid != os.getuid() or not _lock(fd, fcntl.LOCK_EX):
            return False
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    finally:
        os.close(fd)


def sweep(path: Path) -> None:
    """Remove caches of this user beside ``path`` that a killed job or program left behind."""
    for other in path.parent.glob(f"synergy-cache-{os.getuid()}-*"):
        with contextlib.suppress(OSError):
            age_s = time.time() - other.lstat().st_mtime
            least_s = _KEPT_S if (other / _KEPT).exists() else _YOUNG_S
            if other != path and (age_s > least_s or _is_of_ended_session(other.name)):
                remove_unused(other)


def _is_of_ended_session(name: str) -> bool:
    """Nobody can come who would use it: its login session has no leader any more."""
    session = name.rpartition(_SESSION)[2]
    try:
        return session.isdigit() and os.getsid(int(session)) < 0
    except ProcessLookupError:
        return True
    except (OSError, ValueError, OverflowError):  # no name that we have given
        return False


def keep_or_remove(env: Mapping[str, str], *, continues: bool) -> bool:
    """What a launcher does with the cache when its command has ended; True when it is gone.

    Where the command will continue, a cache on a disk stays for that, for a day at most. One in
    memory stays only with ``SYNERGY_CACHE_KEEP=1``: it would take memory from other jobs unless
    the site removes it when the job leaves the node.
    """
    path = cache_path(env)
    in_memory = path.parent == _MEMORY
    if continues and (not in_memory or _keeps(env)):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid():
                (path / _KEPT).touch(mode=0o600)
        return False
    return remove_unused(path)


def _keeps(env: Mapping[str, str]) -> bool:
    with contextlib.suppress(LeaseError):
        return switched_on(env, "SYNERGY_CACHE_KEEP", unset=False)
    return False
