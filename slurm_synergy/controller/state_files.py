"""Files of the state directory: of this user alone, and never through a link of somebody else.

The umask decides nothing here. root may work on the state of the service's account (``synergyctl
release-all`` does): what it makes then belongs to that account.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["make_state_dir", "open_private"]


def make_state_dir(path: Path) -> None:
    """Make the directory, mode 0700, unless it is there; raises OSError for one not to be trusted.

    That is one that belongs to another user (not root), or that others may write to.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for status in (path.lstat(), path.stat()):
        if os.geteuid() != 0 and status.st_uid not in (os.geteuid(), 0):
            raise _untrusted(f"it belongs to user id {status.st_uid}", path)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _untrusted("others may write to it (chmod go-w)", path)


def open_private(path: Path, flags: int, mode: int = 0o600) -> int:
    """A descriptor of the regular file at ``path`` in a state directory, made if it is not there.

    Its mode is ``mode`` afterwards. Raises OSError for a link, for what is no file, and for a file
    of another user than this one and the directory's.
    """
    fd = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    try:
        status, owner = os.fstat(fd), path.parent.stat().st_uid
        if not stat.S_ISREG(status.st_mode):
            raise _untrusted("it is no file", path)
        if status.st_uid not in (os.geteuid(), owner):
            raise _untrusted(f"it belongs to user id {status.st_uid}", path)
        if stat.S_IMODE(status.st_mode) != mode:
            os.fchmod(fd, mode)
        if os.geteuid() == 0 and status.st_uid != owner:
            os.fchown(fd, owner, -1)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _untrusted(why: str, path: Path) -> OSError:
    return PermissionError(errno.EPERM, why, str(path))
