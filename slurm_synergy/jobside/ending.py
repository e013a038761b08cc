"""How a training process ends early: exit statuses, the exception, and SIGTERM.

SIGTERM ends a process that trains alone as a stop by lease does, but with status 143: Slurm sends
it for a requeue, whose exit status it ignores, but also at the time limit and for scancel, where
"stopped by lease" would be untrue.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

from slurm_synergy.jobside.environment import LEASE_STOP_EXIT

__all__ = ["EXIT_STOPPED", "EXIT_TERMINATED", "LeaseEnded", "TermWatch", "say"]

EXIT_STOPPED = LEASE_STOP_EXIT
EXIT_TERMINATED = 128 + signal.SIGTERM


class LeaseEnded(SystemExit):
    """Raised from a request for the next batch: a checkpoint is published, the process must end.

    ``code`` is 85 after a stop by lease, 143 after SIGTERM. Under torchrun it is 0: torchrun
    would restart workers that end with any other status; the launcher reads the board instead.
    """

    def __init__(self, code: int) -> None:
        super().__init__(0 if "TORCHELASTIC_RUN_ID" in os.environ else code)


def say(text: str) -> None:
    """One line to the user, on stderr."""
    sys.stderr.write(f"slurm-synergy: {text}\n")
    sys.stderr.flush()


class TermWatch:
    """Notes SIGTERM in ``came``, and calls the handler that was there before."""

    def __init__(self) -> None:
        self.came = False
        self._pid = os.getpid()
        self._previous: Any = None

    def begin(self) -> None:
        """Take the signal over; a second call, or one outside the main thread, does nothing."""
        if self._previous is None and threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._on_sigterm) or 0

    def leave_out_previous(self) -> None:
        """The owner of the handler that was there before must not act on SIGTERM."""
        if self._previous is not None:
            self._previous = signal.SIG_DFL

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # A forked child inherited this handler and has nothing to save: let it end.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.came = True
        if callable(self._previous):
            self._previous(number, frame)
