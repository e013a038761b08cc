"""Slurm's jobs on a node as its cgroups show them, and what may be changed of these."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["CGROUPS", "Cpusets", "JobPlace", "is_unified", "read_cpus", "show_cpus"]

CGROUPS = Path("/sys/fs/cgroup")
"""Where Linux has them."""

_MOST_CPUS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlace:
    """A job that Slurm has on this node: its owner, and the CPUs that Slurm gave it.

    ``uid`` is -1 for a job whose owner cannot be told.
    """

    job_id: int
    uid: int
    cpus: frozenset[int]


class Cpusets(Protocol):
    """The CPUs of Slurm's jobs on this node. Methods raise OSError."""

    def jobs(self) -> Mapping[int, JobPlace]:
        """The jobs that Slurm confines to CPUs here, by id."""
        ...

    def machine(self) -> frozenset[int]:
        """All CPUs that jobs can have on this node."""
        ...

    def held(self) -> Mapping[int, frozenset[int]]:
        """The CPUs of jobs that have other ones than Slurm gave them because of us."""
        ...

    def confine(self, job: JobPlace, cpus: frozenset[int]) -> bool:
        """Let the job run on exactly ``cpus``; whether anything had to be changed."""
        ...

    def give_back(self, job_id: int) -> bool:
        """Let the job run on what Slurm gave it; False when some of it must be tried again."""
        ...

    def give_all_back(self) -> bool:
        """The same for every job that was ever changed, also by a helper before this one."""
        ...


def is_unified(root: Path = CGROUPS) -> bool:
    """Whether the machine has cgroup v2 alone."""
    return (root / "cgroup.controllers").exists()


def read_cpus(text: str) -> frozenset[int]:
    """``0-2,5`` as a set; empty text is the empty set. Raises ValueError."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if not part:
            continue
        low, dash, high = part.partition("-")
        first, last = int(low), int(high) if dash else int(low)
        if not 0 <= first <= last < _MOST_CPUS:
            raise ValueError(f"{text!r} is no list of CPUs")
        found.update(range(first, last + 1))
    return frozenset(found)


def show_cpus(cpus: Collection[int]) -> str:
    """The set as the kernel writes it: ``0-2,5``."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)
