"""Every error that slurm-synergy raises on purpose.

    SynergyError
    ├── ConfigError            a setting is wrong: file, key, value, remedy
    ├── ModelError             a value of the domain model is invalid
    ├── HintError              a job's hints are malformed
    ├── PlanError              one of our own invariants failed; the round is skipped
    ├── SolverError            a solver failed and no fallback was feasible
    ├── ClusterError           the cluster could not be read or changed
    │   ├── SlurmCommandError  a Slurm command failed: argv, rc, stderr
    │   ├── SlurmTimeout       a Slurm command did not answer in time
    │   ├── SlurmReadBackError an accepted update did not take effect
    │   └── SlurmParseError    Slurm's answer was not understood: the text
    ├── DevClusterError        the embedded cluster could not be started or stopped
    ├── DemoError              the demonstration did not show what it promises
    ├── LedgerError            the state database is unusable (never auto-deleted)
    │   └── LedgerUnavailable  it cannot be written just now (full disk): tried again
    ├── LeaseError             a lease call was refused or failed
    │   ├── NoControllerError  no controller answers at that address
    │   ├── UnknownJobError    the job that is asked about is not known, or not yet
    │   └── MungeError         munge cannot be used on this machine: nobody can be authenticated
    ├── CheckpointError        a checkpoint could not be written or trusted
    └── CacheError             the data cache of a job cannot be used

Expected results (a job waits, a start was refused) are values, never exceptions.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CacheError",
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "DemoError",
    "DevClusterError",
    "HintError",
    "LeaseError",
    "LedgerError",
    "LedgerUnavailable",
    "ModelError",
    "MungeError",
    "NoControllerError",
    "PlanError",
    "SlurmCommandError",
    "SlurmParseError",
    "SlurmReadBackError",
    "SlurmTimeout",
    "SolverError",
    "SynergyError",
    "UnknownJobError",
]


class SynergyError(Exception):
    """Base of all errors of this package."""

    @property
    def in_short(self) -> str:
        """The error in a line for people; ``str()`` may tell more."""
        return str(self)


class ConfigError(SynergyError):
    """A setting is wrong. ``str()`` reads ``FILE: KEY = VALUE: what; remedy``."""

    def __init__(
        self, what: str, *, file: str = "", key: str = "", value: object = None, remedy: str = ""
    ) -> None:
        place = ": ".join(part for part in (file, key) if part)
        shown = "" if value is None else f" = {value!r}"
        text = f"{place}{shown}: {what}" if place else what
        super().__init__(f"{text}; {remedy}" if remedy else text)
        self.file, self.key, self.value, self.what, self.remedy = file, key, value, what, remedy


class ModelError(SynergyError, ValueError):
    """A value of the domain model is invalid (negative cores, empty GPU type, ...)."""


class HintError(SynergyError, ValueError):
    """A job's hints are malformed; the text names the key and a valid example."""


class PlanError(SynergyError):
    """A plan breaks an invariant of ours: it is not applied, running leases are renewed."""


class SolverError(SynergyError):
    """A solver failed and there was no feasible fallback."""


class ClusterError(SynergyError):
    """The cluster could not be read or changed."""


class SlurmCommandError(ClusterError):
    """A Slurm command failed.

    ``kind`` classifies it: ``not_found``, ``permission``, ``not_pending`` (runs or completes),
    ``pending``, ``finished``, ``controller_down`` (or its authentication), ``in_use``, ``exists``,
    ``disabled``, ``not_installed``, ``invalid`` or ``other`` (Slurm's exit status is 1 for nearly
    everything). An exit status of 0 means that the command was not sent, or its answer useless.
    """

    def __init__(self, argv: Sequence[str], rc: int, stderr: str, *, kind: str = "other") -> None:
        super().__init__(f"{' '.join(argv)}: exit status {rc}: {stderr.strip() or '(no message)'}")
        self.argv, self.rc, self.stderr, self.kind = tuple(argv), rc, stderr, kind

    @property
    def in_short(self) -> str:
        """Without the command line, which ``str()`` has, for people who do not debug us."""
        said = self.stderr.strip().splitlines() or ["no message"]
        if self.kind == "controller_down":
            return f"Slurm does not answer ({said[0].rpartition('error: ')[2]})"
        return f"{self.argv[0] if self.argv else 'Slurm'} failed: {said[0]}"


class SlurmTimeout(ClusterError):
    """A Slurm command gave no answer within ``timeout_s`` seconds."""

    def __init__(self, argv: Sequence[str], timeout_s: float) -> None:
        super().__init__(f"{' '.join(argv)}: no answer within {timeout_s:g} s")
        self.argv, self.timeout_s = tuple(argv), timeout_s

    @property
    def in_short(self) -> str:
        """Without the command line, which ``str()`` has, for people who do not debug us."""
        return f"Slurm does not answer ({self.argv[0]}: nothing within {self.timeout_s:g} s)"


class SlurmReadBackError(ClusterError):
    """Slurm accepted an update, but the record shows something else."""


class SlurmParseError(ClusterError):
    """Slurm's answer was not understood. ``text`` is the part at fault."""

    def __init__(self, what: str, text: str) -> None:
        shown = text if len(text) <= 200 else f"{text[:200]}…"
        super().__init__(f"{what}: {shown!r}")
        self.what, self.text = what, text


class DevClusterError(SynergyError):
    """The embedded cluster could not be started or stopped."""


class DemoError(SynergyError):
    """The demonstration did not come to its end, or did not show what it promises."""


class LedgerError(SynergyError):
    """The state database cannot be used. Nothing is deleted: the message says what to do."""


class LedgerUnavailable(LedgerError):
    """The state database is intact but cannot be written now: no space, read-only, in use."""


class LeaseError(SynergyError):
    """A lease call was refused or failed."""


class NoControllerError(LeaseError):
    """No controller answers at the address: it is stopped, or not reachable from here."""


class UnknownJobError(LeaseError):
    """The job that is asked about is not known, or not yet: an answer, and nobody's fault."""


class MungeError(LeaseError):
    """munge or its daemon cannot be used on this machine, so no credential can be checked."""


class CheckpointError(SynergyError):
    """A checkpoint could not be written, or is damaged and must not be loaded."""


class CacheError(SynergyError):
    """The data cache of a job cannot be used; the data are read without it."""
