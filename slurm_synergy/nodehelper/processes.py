"""Processes in cgroups: whose they are, moving them, and their CPU masks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from slurm_synergy.jobside.process import is_slurmstepd

__all__ = ["job_processes", "owners", "pids_in", "set_masks"]


def pids_in(place: Path) -> list[int]:
    """The processes of one cgroup; none of one that is gone."""
    try:
        return [int(word) for word in (place / "cgroup.procs").read_text().split()]
    except (OSError, ValueError):
        return []


def _real_uid(pid: int) -> int | None:
    """The real user id of a process; None when it has ended."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        return int(text.partition("\nUid:")[2].split(maxsplit=1)[0])
    except (OSError, ValueError, IndexError):
        return None


def job_processes(place: Path, uid: int) -> Iterator[int]:
    """The processes of that user in one cgroup, without Slurm's step daemon, which is root's."""
    for pid in pids_in(place):
        if _real_uid(pid) == uid and not (uid == 0 and is_slurmstepd(pid)):
            yield pid


def owners(pids: Iterable[int]) -> set[int]:
    """The real user ids of those processes that still run."""
    return {uid for pid in pids if (uid := _real_uid(pid)) is not None}


def set_masks(pids: Iterable[int], cpus: Collection[int]) -> None:
    """Let every thread of these processes run on ``cpus``.

    A newer kernel keeps a mask that Slurm set also when the cpuset grows.
    """
    for pid in pids:
        with contextlib.suppress(OSError):
            for thread in [int(one.name) for one in Path(f"/proc/{pid}/task").iterdir()]:
                with contextlib.suppress(OSError):
                    if os.sched_getaffinity(thread) != set(cpus):
                        os.sched_setaffinity(thread, cpus)
