"""The daemon's end of the process in which pyslurm runs (``pyslurm_worker``)."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

from slurm_synergy.errors import SlurmCommandError, SlurmParseError, SlurmTimeout
from slurm_synergy.slurm import pyslurm_worker
from slurm_synergy.slurm.commands import classify

__all__ = ["Asked", "PyslurmProcess"]

_PART = 1 << 20
_START_S = 20.0
_SAID = 4000


class Asked(Protocol):
    """Somebody who answers questions as ``pyslurm_worker.Relay`` does."""

    def ask(self, question: Mapping[str, Any], *, timeout_s: float) -> Any:
        """The result. Raises ``SlurmCommandError``, ``SlurmTimeout`` or ``SlurmParseError``."""

    def close(self) -> None:
        """Forget what was told: the next answer is one of somebody who told nothing before."""


class PyslurmProcess:
    """A process with pyslurm in it, started when it is first asked and anew after its end.

    Safe to use from several threads, one question at a time. An answer that does not come in time,
    or a process that ends meanwhile, is an error of that question alone. ``slurm_conf`` is the
    ``SLURM_CONF`` of the process; without it the caller's counts.
    """

    def __init__(self, slurm_conf: str | None = None) -> None:
        self._conf = slurm_conf
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._rest = b""

    def __del__(self) -> None:
        self.close()

    def start(self, timeout_s: float = _START_S) -> str:
        """The release of pyslurm, once its process is up.

        Raises ``SlurmTimeout``, or ``SlurmCommandError`` with what it said at last.
        """
        with self._lock:
            self.close()
            self._errors = tempfile.TemporaryFile(mode="a+b")  # noqa: SIM115 - see close()
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(pyslurm_worker.__file__))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=self._environment(),
                start_new_session=True,
            )
            return str(self._result("import", timeout_s))

    def ask(self, question: Mapping[str, Any], *, timeout_s: float) -> Any:
        """See ``Asked``."""
        with self._lock:
            if self._process is None:
                self.start()
            assert self._process is not None and self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it is told when its answer is missed
                self._process.stdin.write(json.dumps(question).encode() + b"\n")
                self._process.stdin.flush()
            return self._result(str(question["do"]), timeout_s)

    @property
    def pid(self) -> int | None:
        """The process, if there is one now."""
        process = self._process
        return None if process is None else process.pid

    def close(self) -> None:
        """End the process. See ``Asked``."""
        with self._lock:
            process, self._process = self._process, None
            errors, self._errors = self._errors, None
            self._rest = b""
            if process is not None:
                process.kill()
                process.communicate()
            if errors is not None:
                errors.close()

    def _environment(self) -> dict[str, str]:
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM_", "PYSLURM_"))
            or key in ("SLURM_CONF", "SLURM_CONF_SERVER")
        }
        return kept | {"LC_ALL": "C"} | ({"SLURM_CONF": self._conf} if self._conf else {})

    def _result(self, kind: str, timeout_s: float) -> Any:
        argv = ("pyslurm", kind)
        try:
            told = json.loads(self._line(argv, timeout_s))
        except BaseException:
            self.close()
            raise
        # Slurm's library complains here of what it raises as well; it must not pile up.
        if self._errors is not None:
            self._errors.truncate(0)
        if "refused" in told:
            raise SlurmCommandError(argv, 1, told["refused"], kind=classify(told["refused"]))
        if "broken" in told:
            self.close()
            raise SlurmParseError(f"pyslurm: {kind}", told["broken"])
        return told["ok"]

    def _line(self, argv: tuple[str, str], timeout_s: float) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        until_s = time.monotonic() + timeout_s
        parts, pipe = [self._rest], self._process.stdout
        with selectors.DefaultSelector() as ready:
            ready.register(pipe, selectors.EVENT_READ)
            while b"\n" not in parts[-1]:
                if not ready.select(max(0.0, until_s - time.monotonic())):
                    raise SlurmTimeout(argv, timeout_s)
                parts.append(os.read(pipe.fileno(), _PART))
                if not parts[-1]:
                    raise self._ended(argv)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        return line

    def _ended(self, argv: tuple[str, str]) -> SlurmCommandError:
        assert self._process is not None and self._errors is not None
        status = self._process.wait()
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _SAID))
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        text = said[-1] if said else f"its process ended with status {status}"
        # Nobody answers, as with a slurmctld that is down: asked again if that is up.
        return SlurmCommandError(argv, status, text, kind="controller_down")
