"""Puts everything back when the helper dies, or hangs.

``python -m slurm_synergy.nodehelper.guard OPTIONS`` is started by the helper, with a pipe as its
standard input on which the helper shows that it is alive. The end of that pipe without a good-bye
is the helper's death, however it came about.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from slurm_synergy.errors import ConfigError
from slurm_synergy.nodehelper.parts import argument_parser, enforcer

__all__ = ["Guard", "main"]

_ALIVE, _GOOD_BYE = b"+", b"."
_SILENCE_S = 30.0
_TRY_FOR_S = 60.0
_PAUSE_S = 0.5


class Guard:
    """The guard from the helper's side; a context manager. Raises OSError when none can start."""

    def __init__(self, options: Sequence[str]) -> None:
        self._options = tuple(options)
        self._process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "slurm_synergy.nodehelper.guard", *self._options],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            # Not of the terminal's group, nor ended by what ends the helper.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def alive(self) -> None:
        """Say that the helper works; a guard that has died gets a successor. Raises OSError."""
        if self._process.poll() is not None:
            self._close()
            self._process = self._started()
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(OSError):
            stdin.write(_ALIVE)
            stdin.flush()

    def _close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Dismiss the guard, unless an error ends the helper: then it does its work."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # closed, as no successor could start
            if kind is None:
                self._process.stdin.write(_GOOD_BYE)
            self._process.stdin.close()
        self._process.wait()


def _give_back(arguments: Sequence[str]) -> bool:
    try:
        # Anew each time: the helper writes the record that is read here.
        return enforcer(argument_parser().parse_args(list(arguments))).give_back()
    except (OSError, ValueError, ConfigError) as err:
        sys.stderr.write(f"slurm-synergyd --node: its guard: {err}\n")
        return False


def _watch(arguments: Sequence[str], stream: int) -> bool:
    """Until the helper is gone; whether it said good-bye."""
    last, silent = b"", False
    while True:
        ready, _, _ = select.select([stream], [], [], _SILENCE_S)
        if not ready:
            if not silent:
                silent = True
                _give_back(arguments)
            continue
        read = os.read(stream, 4096)
        if not read:
            return last.endswith(_GOOD_BYE)
        last, silent = read, False


def main(arguments: Sequence[str] | None = None) -> int:
    """Watch over the helper; 0 when it said good-bye, or when all was given back."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if _watch(arguments, sys.stdin.fileno()):
        return 0
    until_s = time.monotonic() + _TRY_FOR_S
    while not _give_back(arguments):
        if time.monotonic() > until_s:
            return 1
        time.sleep(_PAUSE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
