"""Starting one child and passing signals on: shared by the wrapper and the launcher.

Signals are blocked and fetched with ``sigtimedwait`` instead of being handled, because only that
tells who sent them. Who sent them matters: slurmstepd signals every process of a step itself, and
a terminal every process of the foreground group, so that passing those on would deliver them twice.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

__all__ = [
    "FORWARDED",
    "block_signals",
    "exit_like",
    "fetch_signal",
    "find_program",
    "is_slurmstepd",
    "reap",
    "sent_by_slurmstepd",
    "sent_by_terminal",
    "signal_all",
    "spawn",
    "spawn_exit_code",
    "spawn_tethered",
]

FORWARDED = frozenset(
    {
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGCONT,
    }
)
_SI_KERNEL = 0x80
_NOT_FOUND = 127
_NOT_EXECUTABLE = 126
_TETHER = Path(__file__).resolve().with_name("tether.py")


def block_signals(extra: Iterable[int] = ()) -> set[int]:
    """Block what is fetched with :func:`fetch_signal`; returns the mask that was in force.

    Call it before any thread starts: threads inherit the mask.
    """
    wanted = {*FORWARDED, signal.SIGCHLD, *extra}
    return set(signal.pthread_sigmask(signal.SIG_BLOCK, wanted))


def fetch_signal(timeout_s: float, extra: Iterable[int] = ()) -> signal.struct_siginfo | None:
    """The next blocked signal, or None after ``timeout_s`` seconds."""
    return signal.sigtimedwait({*FORWARDED, signal.SIGCHLD, *extra}, max(0.0, timeout_s))


def sent_by_terminal(info: signal.struct_siginfo) -> bool:
    """Whether the kernel sent it (Ctrl-C, hang-up): the whole foreground group has it."""
    return info.si_code == _SI_KERNEL


def sent_by_slurmstepd(info: signal.struct_siginfo) -> bool:
    """Whether the sender is a slurmstepd, which signals all processes of its step.

    The one exception is ``scancel --batch``, which signals slurmstepd's direct child alone.
    """
    return is_slurmstepd(info.si_pid)


def is_slurmstepd(pid: int) -> bool:
    """Whether that process is one of Slurm's step daemons."""
    try:
        return Path(f"/proc/{pid}/comm").read_bytes().startswith(b"slurmstepd")
    except OSError:
        return False


def find_program(name: str, path: str) -> str:
    """The file that a shell would run for ``name``, or ``name`` itself when there is none."""
    if "/" in name:
        return name
    for folder in path.split(":"):
        candidate = Path(folder or ".") / name
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate)
    return name


def spawn(argv: Sequence[str], env: Mapping[str, str], mask: Iterable[int]) -> int:
    """Start ``argv`` with signal mask ``mask``; returns its pid.

    No Python code runs between fork and exec, so threads of this process do not matter. File
    descriptors that were inherited stay open in the child, those of this process are not passed on.
    Raises OSError when the program cannot be run.
    """
    program = find_program(argv[0], env.get("PATH", os.defpath))
    # Python ignores these two for itself; a child must find the default again.
    restored = (signal.SIGPIPE, signal.SIGXFSZ)
    try:
        return os.posix_spawn(program, list(argv), env, setsigmask=mask, setsigdef=restored)
    except OSError as err:
        if err.errno != errno.ENOEXEC:
            raise
        # A script without "#!": shells and execvp run it with sh.
        shell = ["/bin/sh", program, *argv[1:]]
        return os.posix_spawn(shell[0], shell, env, setsigmask=mask, setsigdef=restored)


def spawn_tethered(argv: Sequence[str], env: Mapping[str, str], mask: Iterable[int]) -> int:
    """Like :func:`spawn`, but the child is killed when this process dies, however it dies.

    To be called from the main thread: it is the thread whose end the kernel watches.
    """
    program = find_program(argv[0], env.get("PATH", os.defpath))
    if not Path(program).exists():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)
    if Path(program).is_dir() or not os.access(program, os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), program)
    tether = [sys.executable, "-I", "-S", str(_TETHER), str(os.getpid()), program]
    return spawn([*tether, *argv], env, mask)


def spawn_exit_code(err: OSError) -> int:
    """The shell's exit status for a program that could not be started: 127 not found, else 126."""
    return _NOT_FOUND if err.errno == errno.ENOENT else _NOT_EXECUTABLE


def reap(pid: int) -> int | None:
    """The exit status of child ``pid`` if it has ended (negative: killed by that signal)."""
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done == pid else None


def signal_all(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal these processes; one that has ended is no error."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def exit_like(code: int) -> int:
    """End as the child did: returns its exit status, or dies by the signal that ended it."""
    if code >= 0:
        return code
    number = -code
    # The child has left its core file already; a second one of ours would tell nothing.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return 128 + number
