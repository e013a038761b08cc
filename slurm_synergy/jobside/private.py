"""A task's private directory on node-local storage, and removal of those that nobody uses any more.

A launcher that is killed cannot remove its directory; the next one of the same user on the node
does. Each live launcher holds a lock on its own, which ends with the process however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from slurm_synergy.errors import LeaseError
from slurm_synergy.jobside.environment import Task

__all__ = ["PrivateDir"]

# A directory is made first and locked then: leave others' the time for that.
_YOUNG_S = 60.0


class PrivateDir:
    """A new directory ``path``, mode 0700, locked until ``remove``.

    The name tells whose it is; a directory that is there already, of whoever, is never used.
    Raises LeaseError when no place takes it.
    """

    def __init__(self, env: Mapping[str, str], task: Task) -> None:
        places = [env.get("SLURM_TMPDIR"), env.get("TMPDIR"), "/dev/shm", "/tmp"]
        mine = f"synergy-{os.getuid()}-"
        name = f"{mine}{task.job_id}-{task.restart_count}-{task.step_id}-{task.rank}"
        last: OSError | None = None
        for place in map(Path, filter(None, places)):
            path = place / f"{name}-{secrets.token_hex(4)}"
            try:
                path.mkdir(mode=0o700)
            except OSError as err:
                last = err
                continue
            try:
                self._lock = _locked(path)
            except OSError as err:
                path.rmdir()
                last = err
                continue
            self.path = path
            _sweep(place, mine)
            return
        raise LeaseError(f"no place for a private directory: {last}; set TMPDIR to a writable one")

    def remove(self) -> None:
        """Remove the directory and all in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _locked(path: Path) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _sweep(place: Path, prefix: str) -> None:
    for path in place.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if not ours or time.time() - status.st_mtime < _YOUNG_S:
                continue
            fd = _locked(path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(fd)
