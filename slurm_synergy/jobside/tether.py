"""Runs a command that dies with its launcher: ``python tether.py LAUNCHER PROGRAM WORDS...``.

Slurm's step daemon takes its tasks along when it is killed, but not what these have started: the
training would keep its GPUs while Slurm gives them to others. The kernel's parent-death signal is
kept over exec; only code that runs in the child itself can ask for it. Standard library only, and
nothing of ours: this starts once per task, before every program.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_NOT_EXECUTABLE = 126


def main(argv: list[str]) -> int:
    """Become the program; returns only when it cannot be run."""
    launcher, program, words = int(argv[0]), argv[1], argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        return 128 + signal.SIGKILL  # it died before the kernel knew
    # Python ignores or handles these for itself; the program must find the default.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    try:
        try:
            os.execv(program, words)
        except OSError as err:
            if err.errno != errno.ENOEXEC:
                raise
            # A script without "#!": shells and execvp run it with sh.
            os.execv("/bin/sh", ["/bin/sh", program, *words[1:]])
    except OSError as err:
        sys.stderr.write(f"synergy-srun: cannot run {words[0]}: {err.strerror}\n")
    return _NOT_EXECUTABLE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
