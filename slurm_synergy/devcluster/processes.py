"""Processes that outlive the command that started them: known by pid *and* start time.

A pid alone may have been given to a stranger since; with the start time it cannot be confused.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessId", "alive", "end", "identify", "job_processes", "wait_until"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessId:
    """A pid and the process's start time in clock ticks since boot (``/proc/PID/stat``)."""

    pid: int
    start_ticks: int


def _stat(pid: int) -> list[str] | None:
    """The fields after the command name: state, ppid, ...; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def identify(pid: int) -> ProcessId | None:
    """Who has this pid now; None for nobody or a zombie."""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return None
    return ProcessId(pid=pid, start_ticks=int(fields[19]))


def alive(process: ProcessId) -> bool:
    """Whether exactly this process still runs (a zombie does not)."""
    return identify(process.pid) == process


def _reap(pid: int) -> None:
    # A daemon that this very process started stays a zombie until it is waited for.
    with contextlib.suppress(ChildProcessError, OSError):
        os.waitpid(pid, os.WNOHANG)


def wait_until(holds: Callable[[], bool], timeout_s: float, *, pause_s: float = 0.02) -> bool:
    """Ask until it holds or the time is over; the last answer."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(pause_s)
    return True


def _send(process: ProcessId, number: int) -> None:
    if alive(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


def end(processes: Iterable[ProcessId], *, grace_s: float) -> list[ProcessId]:
    """Ask the processes to end (SIGTERM), insist after ``grace_s`` (SIGKILL); those that remain."""
    targets = list(processes)

    def gone() -> bool:
        for process in targets:
            _reap(process.pid)
        return not any(alive(process) for process in targets)

    if grace_s > 0:
        for process in targets:
            _send(process, signal.SIGTERM)
        if wait_until(gone, grace_s):
            return []
    for process in targets:
        _send(process, signal.SIGKILL)
    wait_until(gone, 5.0)
    return [process for process in targets if alive(process)]


def _environment(pid: int) -> frozenset[bytes]:
    try:
        return frozenset(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return frozenset()


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _is_step_daemon(pid: int, state_dir: Path) -> bool:
    """A slurmstepd that a slurmd of this cluster started: it works in the state directory."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace")
        return name.startswith("slurmstepd") and Path(f"/proc/{pid}/cwd").readlink() == state_dir
    except OSError:
        return False


def job_processes(
    cluster_name: str, marker: str, state_dir: Path, *, keep: Iterable[int] = ()
) -> list[ProcessId]:
    """Step daemons and job processes of one cluster, with their descendants.

    They are told by their environment: ``marker`` is what our slurmd passes on to its step daemons,
    and everything that these launch has SLURM_CLUSTER_NAME and SLURMD_NODENAME. Step daemons of
    24.11 write their titles over their environment; they are known by name and working directory
    (``state_dir``). A shell in which the user only talks to the cluster has none of these, and is
    left alone, as are the pids in ``keep``.
    """
    named = f"SLURM_CLUSTER_NAME={cluster_name}".encode()
    wanted = marker.encode()
    place = state_dir.resolve()  # as /proc shows it
    spared = {*keep, os.getpid()}
    children: dict[int, list[int]] = {}
    found: list[int] = []
    for pid in _pids():
        fields = _stat(pid)
        if fields is None:
            continue
        children.setdefault(int(fields[1]), []).append(pid)
        environment = _environment(pid)
        launched = any(entry.startswith(b"SLURMD_NODENAME=") for entry in environment)
        of_a_job = wanted in environment or (named in environment and launched)
        if pid not in spared and (of_a_job or _is_step_daemon(pid, place)):
            found.append(pid)
    everything: set[int] = set()
    while found:
        pid = found.pop()
        if pid not in everything and pid not in spared:
            everything.add(pid)
            found.extend(children.get(pid, ()))
    return [process for pid in sorted(everything) if (process := identify(pid)) is not None]
