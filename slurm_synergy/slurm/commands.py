"""Run Slurm's commands. The only place that spawns them, and the one that tests replace.

Commands get a small environment of their own: ``LC_ALL=C`` for the texts, ``TZ=UTC`` for the
times, and no ``SLURM_*``, ``SQUEUE_*`` or ``SCONTROL_*`` variable of the caller except the
configuration's place, since those change what is printed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import IO, Protocol, runtime_checkable

from slurm_synergy.errors import SlurmCommandError, SlurmTimeout

__all__ = [
    "Beside",
    "CommandResult",
    "CommandRunner",
    "SlurmCommands",
    "classify",
    "is_done_for_the_rest",
]

_KINDS = (
    (
        "controller_down",
        (
            "Unable to contact slurm controller",
            "Unexpected message received",
            "Socket timed out",
            "Zero Bytes were transmitted",
            "Connection refused",
            "Munge encode failed",
            "authentication error",
            "Incomplete message",
        ),
    ),
    ("finished", ("Job has already finished", "already completing or completed")),
    ("not_pending", ("no longer pending execution",)),
    ("pending", ("Job is pending execution",)),
    ("disabled", ("presently disabled",)),
    ("in_use", ("reservation is in use",)),
    ("overlap", ("overlaps with another reservation",)),
    ("exists", ("Duplicate reservation name",)),
    (
        "permission",
        ("ccess/permission denied", "Access denied", "Invalid user id", "ot authorized"),
    ),
    (
        "not_found",
        (
            "Invalid job id specified",
            " not found",
            "Requested reservation is invalid",
            "Invalid partition name specified",
        ),
    ),
    (
        "invalid",
        (
            *("Invalid", "invalid", "Requested", "not supported", "No changes", "unrecognized"),
            *("dependency problem", "is in held state", "not suspended"),
        ),
    ),
)


def classify(text: str) -> str:
    """The ``kind`` of a failed command from what it printed (its exit status tells nothing)."""
    for kind, phrases in _KINDS:
        if any(phrase in text for phrase in phrases):
            return kind
    return "other"


_OF_MEMBERS = re.compile(r"\d+_\S+: (No error|Job has already finished)")


def is_done_for_the_rest(text: str) -> bool:
    """Whether a refusal is only about members of an array that are over; the others were changed.

    Slurm then says so member by member and exits with 1: ``4_2-9: No error`` (22.05).
    """
    found = [_OF_MEMBERS.fullmatch(line.strip()) for line in text.strip().splitlines()]
    return all(found) and any(one is not None and one[1] == "No error" for one in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandResult:
    """What a command answered. Undecodable bytes are kept as surrogates."""

    argv: tuple[str, ...]
    rc: int
    stdout: str
    stderr: str

    def check(self) -> CommandResult:
        """This result if the command succeeded; raises ``SlurmCommandError`` if not."""
        if self.rc != 0:
            # "not found" texts go to standard output.
            said = self.stderr.strip() or self.stdout.strip()[:2000]
            if is_done_for_the_rest(said):
                return self
            raise SlurmCommandError(self.argv, self.rc, said, kind=classify(said))
        return self


def _file_for(name: str) -> IO[bytes]:
    """In memory: a command never waits for us to read its megabytes from a pipe.

    Raises OSError.
    """
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
    except PermissionError:  # where vm.memfd_noexec is 2
        return tempfile.TemporaryFile(buffering=0)
    return os.fdopen(fd, "rb", buffering=0)


def _text_of(fd: int) -> str:
    """All of a file, as text with the line breaks of text."""
    told = os.pread(fd, os.fstat(fd).st_size, 0).decode("utf-8", "surrogateescape")
    return told.replace("\r\n", "\n").replace("\r", "\n") if "\r" in told else told


class CommandRunner(Protocol):
    """Runs one command to its end."""

    def run(self, argv: Sequence[str], *, timeout_s: float, stdin: str = "") -> CommandResult:
        """Run ``argv``; raises ``SlurmTimeout``, or ``SlurmCommandError`` if it cannot start."""


@runtime_checkable
class Beside(Protocol):
    """A runner that can run commands beside each other."""

    def begin(self, argv: Sequence[str], *, timeout_s: float) -> Callable[[], CommandResult]:
        """Begin to run ``argv``; what is returned waits for its end, and raises as ``run``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmCommands:
    """The real runner. ``slurm_conf`` and ``bin_dir`` default to the caller's environment."""

    slurm_conf: str | None = None
    bin_dir: str | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def run(self, argv: Sequence[str], *, timeout_s: float, stdin: str = "") -> CommandResult:
        """See ``CommandRunner``. The command's process group is ended when time is over."""
        process, answer = self._started(argv)
        with answer:
            try:
                _, stderr = process.communicate(stdin, timeout=timeout_s)
            except subprocess.TimeoutExpired:
                raise SlurmTimeout(argv, timeout_s) from None
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.communicate()
            stdout = _text_of(answer.fileno())
        return CommandResult(argv=tuple(argv), rc=process.returncode, stdout=stdout, stderr=stderr)

    def begin(self, argv: Sequence[str], *, timeout_s: float) -> Callable[[], CommandResult]:
        """See ``Beside``."""
        begun = Future[CommandResult]()

        def work() -> None:
            try:
                begun.set_result(self.run(argv, timeout_s=timeout_s))
            except BaseException as err:  # noqa: BLE001 (who waits for it gets it)
                begun.set_exception(err)

        try:
            # A daemon's end does not wait for a command whose answer nobody waits for any more.
            Thread(target=work, name=argv[0], daemon=True).start()
        except RuntimeError:  # no more threads just now
            return lambda: self.run(argv, timeout_s=timeout_s)
        return begun.result

    def _started(self, argv: Sequence[str]) -> tuple[subprocess.Popen[str], IO[bytes]]:
        """The process of a command, and the file that gets what it answers."""
        program = self._resolve(argv)
        try:
            answer = _file_for(argv[0])
            try:
                process = subprocess.Popen(
                    [program, *argv[1:]],
                    stdin=subprocess.PIPE,
                    stdout=answer,
                    stderr=subprocess.PIPE,
                    encoding="utf-8",
                    errors="surrogateescape",
                    env=self._environment(),
                    start_new_session=True,
                )
            except BaseException:
                answer.close()
                raise
        except OSError as err:  # too many open files, no memory for a process
            raise SlurmCommandError(argv, 126, f"cannot be started: {err}", kind="other") from err
        return process, answer

    def _resolve(self, argv: Sequence[str]) -> str:
        path = self.bin_dir or self.environment.get("PATH", os.defpath)
        program = shutil.which(argv[0], path=path)
        if program is None:
            text = f"{argv[0]} not in {path}; install Slurm's commands or set their directory"
            raise SlurmCommandError(argv, 127, text, kind="not_installed")
        return str(Path(program).absolute())

    def _environment(self) -> dict[str, str]:
        kept = {
            key: value
            for key, value in self.environment.items()
            if key in ("PATH", "HOME", "USER", "LOGNAME", "LD_LIBRARY_PATH", "SLURM_CONF_SERVER")
        }
        # Without SQUEUE_ARRAY_UNIQUE the waiting members of an array are shown as one, whose id is
        # the array's, even when they have records of their own. As an option it would be refused
        # by releases that do not have it any more (24.11).
        kept.update(LC_ALL="C", TZ="UTC", SQUEUE_ARRAY_UNIQUE="1")
        conf = self.slurm_conf or self.environment.get("SLURM_CONF")
        return kept | ({"SLURM_CONF": conf} if conf else {})
