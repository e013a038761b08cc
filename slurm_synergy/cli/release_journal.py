"""What ``release-all`` has done, one JSON object per line, kept in the state directory."""

from __future__ import annotations

import json
import os
import pwd
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from slurm_synergy.controller.state_files import make_state_dir, open_private
from slurm_synergy.errors import LedgerError

__all__ = ["ReleaseJournal"]


class ReleaseJournal:
    """Appends to ``released.jsonl``; every line is on disk when ``write`` returns.

    Raises LedgerError when it cannot be written: nothing is done that leaves no trace.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / "released.jsonl"
        try:
            make_state_dir(directory)
            self._fd = open_private(self.path, os.O_WRONLY | os.O_APPEND)
        except OSError as err:
            raise self._refusal(err) from err

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def write(self, event: str, **facts: object) -> None:
        """One line: what happened, when (epoch seconds), and by whom."""
        uid = os.getuid()
        try:
            user = pwd.getpwuid(uid).pw_name
        except KeyError:
            user = str(uid)
        record = {"at_s": round(time.time(), 3), "by": user, "event": event, **facts}
        try:
            os.write(self._fd, (json.dumps(record) + "\n").encode())
            os.fsync(self._fd)
        except OSError as err:
            raise self._refusal(err) from err

    def _refusal(self, err: OSError) -> LedgerError:
        return LedgerError(
            f"cannot write {self.path}: {err.strerror}; run this as the controller's user or root, "
            "and see that there is room"
        )
