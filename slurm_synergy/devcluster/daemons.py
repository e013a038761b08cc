"""The daemons of one embedded cluster: start, wait for, stop; and the end of all they started."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from slurm_synergy.devcluster import processes
from slurm_synergy.devcluster.processes import ProcessId
from slurm_synergy.devcluster.programs import clean_environment, tail
from slurm_synergy.errors import DevClusterError

__all__ = ["Answer", "Ask", "Daemons", "Spawn"]

# Those that others need, in the order in which they are ended, after all others.
_NEEDED = ("slurmdbd", "mariadbd", "munged")


class Answer(Protocol):
    """What a command answered."""

    returncode: int
    stdout: str


Ask = Callable[[Sequence[str]], Answer]
"""Runs a command against the cluster, for a limited time; its failure is an answer too."""


class Spawn(Protocol):
    """Starts a daemon of the cluster under a name, with more variables in its environment."""

    def __call__(self, name: str, argv: Sequence[str], **env: str) -> None: ...


class Daemons:
    """Daemons by name (``munged``, ``slurmctld``, ``slurmd-NODE``), each known by its identity."""

    def __init__(self, state_dir: Path, known: Mapping[str, ProcessId] | None = None) -> None:
        self._state_dir = state_dir
        self._known = dict(known or {})

    @property
    def known(self) -> Mapping[str, ProcessId]:
        """Every daemon that was started, running or not."""
        return self._known

    def runs(self, name: str) -> bool:
        """Whether the daemon of this name runs."""
        return name in self._known and processes.alive(self._known[name])

    @property
    def pids(self) -> dict[str, int]:
        """The pids of those that run."""
        return {name: who.pid for name, who in self._known.items() if processes.alive(who)}

    def spawn(self, name: str, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a daemon in a session of its own. Raises DevClusterError when it ends at once."""
        with (self._state_dir / "log" / f"{name}.out").open("ab") as output:
            child = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**clean_environment(), **env},
                cwd=self._state_dir,
                start_new_session=True,
            )
        identity = processes.identify(child.pid)
        # The daemon outlives this object, and processes.end reaps it: Popen must not warn of it.
        child.returncode = 0
        if identity is None:
            raise DevClusterError(f"{name} ended at once:\n{self.why(name)}")
        self._known[name] = identity

    def why(self, name: str) -> str:
        """What a daemon said last; unlike its log this has what it said before opening the log."""
        return tail(self._state_dir / "log" / f"{name}.out")

    def await_ready(self, name: str, ready: Callable[[], bool], deadline_s: float) -> None:
        """Wait until the daemon is ready, on the monotonic clock.

        Raises DevClusterError with the tail of its log when it ends or the time is over.
        """

        def settled() -> bool:
            return not self.runs(name) or ready()

        if not processes.wait_until(settled, max(0.0, deadline_s - time.monotonic())):
            raise DevClusterError(f"{name} is not ready in time:\n{self.why(name)}")
        if not self.runs(name):
            raise DevClusterError(f"{name} ended:\n{self.why(name)}")

    def stop(self, name: str, *, grace_s: float) -> None:
        """End one daemon: SIGTERM, after ``grace_s`` seconds SIGKILL; 0 means SIGKILL at once."""
        process = self._known.get(name)
        if process is None:
            raise DevClusterError(f"there is no {name}; known: {', '.join(self._known)}")
        if processes.end([process], grace_s=grace_s):
            raise DevClusterError(f"{name} (pid {process.pid}) does not end")

    def end_all(self, cluster_name: str, marker: str) -> tuple[int, ...]:
        """End all daemons, step daemons and job processes; their pids.

        First those that could start something, then all that they started, at last those that the
        others need. Raises DevClusterError when something does not end.
        """
        needed = [self._known[name] for name in _NEEDED if name in self._known]
        daemons = [who for who in self._known.values() if processes.alive(who)]
        ended = {who.pid for who in daemons}
        left = processes.end([who for who in daemons if who not in needed], grace_s=5.0)
        for _ in range(20):
            found = processes.job_processes(
                cluster_name, marker, self._state_dir, keep=[who.pid for who in needed]
            )
            if not found:
                break
            ended.update(who.pid for who in found)
            left = processes.end(found, grace_s=0.0)
        for who in needed:
            left.extend(processes.end([who], grace_s=2.0))
        if left:
            raise DevClusterError(
                f"processes that do not end: {', '.join(str(who.pid) for who in left)}"
            )
        return tuple(sorted(ended))
