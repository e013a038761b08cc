"""Programs that are run in forks of a Python that has imported torch and more: see zygote.py.

An import of torch takes seconds of CPU time, and one of the controller two: a training over several
ranks and interruptions many of them. What is tested of a start by ``exec`` (the injection, the
controller's own script) is tested elsewhere.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ZYGOTE = Path(__file__).with_name("zygote.py")
STANDIN = Path(__file__).with_name("standin.py")
_READY_WITHIN_S = 240.0


class Forked:
    """A program in a fork, as far as :class:`subprocess.Popen` is needed for it."""

    def __init__(self, pid: int, arguments: list[str], files: tuple[Path, Path, Path]) -> None:
        self.pid, self.args = pid, arguments
        self._out, self._err, self._status = files
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        if self.returncode is None and self._status.exists():
            self.returncode = os.waitstatus_to_exitcode(int(self._status.read_text()))
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Its output and error output, once it has ended; raises TimeoutExpired before."""
        self.wait(timeout)
        return self._out.read_text(), self._err.read_text()

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended; raises TimeoutExpired before."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if deadline_s is not None and time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(0.01)
        return status

    def send_signal(self, number: int) -> None:
        """Nothing happens once it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


class Forks:
    """Starts programs in forks of a Python that has imported ``modules``."""

    def __init__(self, place: Path, *modules: str) -> None:
        self._place, self._numbers = place, itertools.count()
        self._zygote = subprocess.Popen(
            [sys.executable, str(ZYGOTE), str(place), *modules],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._ready = False

    def _answer(self) -> int:
        assert self._zygote.stdout is not None
        ready, _, _ = select.select([self._zygote.stdout], [], [], _READY_WITHIN_S)
        assert ready, f"{ZYGOTE.name} did not answer within {_READY_WITHIN_S:g} s"
        line = self._zygote.stdout.readline()
        assert line, f"{ZYGOTE.name} ended with status {self._zygote.wait()}"
        return int(line)

    def _await(self) -> None:
        if not self._ready:
            self._ready = self._answer() == 0

    @property
    def python(self) -> tuple[str, ...]:
        """The words in place of ``python`` for a program that others start: it is a fork, too."""
        self._await()
        return (sys.executable, "-S", "-E", str(STANDIN), f"{self._place}/socket")

    def start(
        self,
        arguments: list[str],
        environment: Mapping[str, str],
        cwd: Path | None = None,
        *,
        log: Path | None = None,
    ) -> Forked:
        """Run a Python script with its output captured, or all of it added to ``log``."""
        self._await()
        number = next(self._numbers)
        out, err, status = (self._place / f"{number}.{name}" for name in ("out", "err", "status"))
        if log is not None:
            out = err = log
        request = {
            "arguments": arguments,
            "environment": dict(environment),
            "cwd": str(cwd or Path.cwd()),
            "out": str(out),
            "err": str(err),
            "status": str(status),
        }
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(json.dumps(request).encode() + b"\n")
        self._zygote.stdin.flush()
        return Forked(self._answer(), arguments, (out, err, status))

    def close(self) -> None:
        """End all of them."""
        assert self._zygote.stdin is not None and self._zygote.stdout is not None
        self._zygote.stdin.close()
        self._zygote.wait()
        self._zygote.stdout.close()
