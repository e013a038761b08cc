"""What the wrapper and the launcher keep on node-local storage.

A task's private directory, with removal of those that nobody uses any more, and the order of the
commands of one script.

A launcher that is killed cannot remove its directory; the next one of the same user on the node
does. Each live launcher holds a lock on its own, which ends with the process however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path

from slurm_synergy.errors import LeaseError
from slurm_synergy.jobside.environment import Task

__all__ = ["PrivateDir", "command_number"]

# A directory is made first and locked then: leave others' the time for that.
_YOUNG_S = 60.0


# Fixed, because a script may change TMPDIR between two commands.
_ORDER_PLACE = Path("/tmp")
# Nothing tells the last command of a script: what nobody has touched for so long is removed.
_FORGOTTEN_S = 60 * 86_400.0


def command_number(env: Mapping[str, str], command: str) -> int:
    """Which of the different commands of this run of the script ``command`` is, counted from 1.

    By the order of their first start, so that a requeued script gets the same numbers although
    ports or host names in its commands differ; the same command again, as in a loop that retries,
    keeps its number. 1 outside a batch script, and where the order cannot be kept.
    """
    if env.get("ENVIRONMENT") != "BATCH":
        return 1
    # The script's own pid tells its runs apart where several clusters on one machine count jobs.
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_TASK_PID")
    run = "-".join(env.get(name) or "0" for name in names)
    path = _ORDER_PLACE / f"synergy-{os.getuid()}-{run}.commands"
    line = hashlib.sha256(command.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
        os.utime(fd)
    except OSError:
        return 1
    _sweep_orders(f"synergy-{os.getuid()}-*.commands")
    with os.fdopen(fd, "r+", encoding="ascii", errors="replace") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return 1
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            known = file.read().split()
            if line not in known:
                file.write(f"{line}\n")
                known.append(line)
        except OSError:
            return 1
    return known.index(line) + 1


def _sweep_orders(pattern: str) -> None:
    for path in _ORDER_PLACE.glob(pattern):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _FORGOTTEN_S:
                path.unlink()


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
                path.chmod(0o700)  # whatever the umask
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
