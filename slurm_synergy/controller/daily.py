"""Once a day: the summary of the day before, in the log and as a file in the state directory.

It is computed by a child process of low priority: a journal of a large site takes a while to read,
and neither a round nor a lease may wait for that.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

from slurm_synergy.cluster import Clock

__all__ = ["DailySummary"]

_LOG = logging.getLogger(__name__)

_DAY_S = 86_400
_KEPT = 30
_TIMEOUT_S = 1800.0


class DailySummary:
    """Call ``look`` often; at the first call of a new day (UTC) it begins the summary."""

    def __init__(self, state_dir: Path, clock: Clock) -> None:
        self._state_dir, self._clock = state_dir, clock
        self._day = self._today()
        self._thread: threading.Thread | None = None

    def _today(self) -> int:
        return int(self._clock.now_s()) // _DAY_S

    def look(self) -> None:
        """Begin the summary of yesterday when a day is over. Returns at once."""
        today = self._today()
        if today <= self._day or (self._thread is not None and self._thread.is_alive()):
            return
        day, self._day = today - 1, today
        self._thread = threading.Thread(
            target=self._write, args=(day,), name="daily-summary", daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Whether no summary is being made, after at most ``timeout_s``."""
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _write(self, day: int) -> None:
        try:
            text = self._computed(day * _DAY_S)
            for line in json.loads(text)["words"]:
                _LOG.info("summary: %s", line)
            directory = self._state_dir / "summaries"
            directory.mkdir(mode=0o700, exist_ok=True)
            name = datetime.fromtimestamp(day * _DAY_S, UTC).strftime("%Y-%m-%d.json")
            fd = os.open(
                directory / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600
            )
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(text)
            for old in sorted(directory.glob("????-??-??.json"))[:-_KEPT]:
                old.unlink(missing_ok=True)
        except (OSError, ValueError, KeyError, subprocess.SubprocessError) as err:
            _LOG.warning("there is no summary of the day: %s", err)

    def _computed(self, since_s: float) -> str:
        program = [sys.executable, "-m", "slurm_synergy.controller.summary"]
        done = subprocess.run(
            [*program, str(self._state_dir), str(since_s)],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode != 0:
            raise ValueError(done.stderr.strip()[-500:] or f"exit status {done.returncode}")
        return done.stdout
