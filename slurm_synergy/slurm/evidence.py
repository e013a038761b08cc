"""What ``synergyctl check`` looks at in Slurm. Nothing is changed: probes only ask or are refused.

Two probes need a word. Whether job_submit.lua is in force shows only when a job is submitted, so
``sbatch --test-only`` tries two that it must refuse. Whether this user may operate shows only when
something is changed, so a reservation is deleted that does not exist: Slurm looks at the right
before it looks for the reservation (measured on 22.05).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from slurm_synergy.errors import ClusterError, SlurmCommandError
from slurm_synergy.slurm import parse
from slurm_synergy.slurm.cli_client import CliSlurmClient
from slurm_synergy.slurm.commands import CommandRunner
from slurm_synergy.slurm.facts import ConfigFacts, NodeFacts, PartitionFacts, ReservationFacts
from slurm_synergy.slurm.fields import parse_time_s, scan_keys

__all__ = ["NOT_ALLOWED", "Evidence", "gather"]

NOT_ALLOWED = "not allowed"
"""Value of ``Evidence.rights`` when Slurm refuses this user an operator's change."""

_T = TypeVar("_T")
_HOPELESS = ("not_installed", "controller_down")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Slurm as it shows itself from here; None where it could not be read (see ``problems``).

    ``server_time_s`` and ``asked_s`` are the two clocks at about the same moment (epoch seconds).
    ``partition_raw`` has the partition's record by key. ``refusals`` are Slurm's words on a job
    without GPUs and on one with an unknown hint, None when it would have taken them. ``rights`` is
    "" when this user may operate, else why not.
    """

    client: str = ""
    client_version: tuple[int, ...] = ()
    config: ConfigFacts | None = None
    server_time_s: float | None = None
    asked_s: float = 0.0
    partition: PartitionFacts | None = None
    partition_raw: dict[str, str] = field(default_factory=dict)
    nodes: tuple[NodeFacts, ...] | None = None
    reservations: tuple[ReservationFacts, ...] | None = None
    job_count: int | None = None
    refusals: tuple[str | None, str | None] | None = None
    rights: str | None = None
    problems: tuple[tuple[str, str], ...] = ()


class _Gathering:
    """One look at everything; each part may fail for itself."""

    def __init__(self, runner: CommandRunner, timeout_s: float) -> None:
        self._runner, self._timeout_s = runner, timeout_s
        self.problems: list[tuple[str, str]] = []
        self.hopeless = False

    def run(self, *argv: str) -> str:
        return self._runner.run(argv, timeout_s=self._timeout_s).check().stdout

    def said(self, *argv: str) -> str | None:
        """What a command says when it is refused; None when it is not."""
        result = self._runner.run(argv, timeout_s=self._timeout_s)
        if result.rc == 0:
            return None
        return result.stderr.strip() or result.stdout.strip() or f"exit status {result.rc}"

    def part(self, what: str, read: Callable[[], _T]) -> _T | None:
        """``read()``, or None with a problem noted; nothing is asked of a Slurm that is down."""
        if self.hopeless:
            return None
        try:
            return read()
        except ClusterError as err:
            self.problems.append((what, err.in_short))
            self.hopeless = getattr(err, "kind", "") in _HOPELESS
            return None


def gather(
    runner: CommandRunner, *, partition: str, timeout_s: float, now_s: Callable[[], float]
) -> Evidence:
    """Look at the Slurm behind ``runner``. Raises nothing that Slurm causes."""
    at = _Gathering(runner, timeout_s)
    client = CliSlurmClient(runner, timeout_s=timeout_s, tries=1)
    version = at.part("client", lambda: at.run("scontrol", "--version").strip()) or ""
    text = at.part("controller", lambda: at.run("scontrol", "show", "config"))
    asked_s = now_s()
    config = at.part("controller", lambda: parse.parse_config(text or "")) if text else None
    record = at.part(
        "partition", lambda: at.run("scontrol", "-a", "-o", "show", "partition", partition)
    )
    found = at.part("partition", lambda: client.read_partition(partition)) if record else None
    return Evidence(
        client=version,
        client_version=_version(version),
        config=config,
        server_time_s=_server_time_s(text or ""),
        asked_s=asked_s,
        partition=found,
        partition_raw=scan_keys(record or ""),
        nodes=at.part("nodes", client.read_nodes),
        reservations=at.part("reservations", client.read_reservations),
        job_count=at.part(
            "jobs", lambda: len(at.run("squeue", "-h", "-a", "-t", "all", "-o", "%A").splitlines())
        ),
        refusals=at.part("job_submit", lambda: _refusals(at, partition)) if found else None,
        rights=at.part("rights", lambda: _rights(at)),
        problems=tuple(at.problems),
    )


def _version(text: str) -> tuple[int, ...]:
    match = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part) for part in match.groups() if part) if match else ()


def _server_time_s(config: str) -> float | None:
    match = re.match(r"Configuration data as of (\S+)", config)
    return parse_time_s(match[1], "Configuration data as of") if match else None


def _refusals(at: _Gathering, partition: str) -> tuple[str | None, str | None]:
    job = ("sbatch", "--test-only", f"--partition={partition}", "--wrap=true")
    return (
        at.said(*job),
        at.said(*job, "--gres=gpu:1", "--comment=synergy:is_there_such_a_hint=1"),
    )


def _rights(at: _Gathering) -> str:
    """ "" when this user may operate, ``NOT_ALLOWED``, or what else went wrong."""
    name = f"synergy-check-{secrets.token_hex(8)}"
    try:
        at.run("scontrol", "delete", f"ReservationName={name}")
    except SlurmCommandError as err:
        if err.kind == "permission":
            return NOT_ALLOWED
        if err.kind in _HOPELESS:
            raise
        return "" if err.kind == "not_found" else err.in_short
    return ""
