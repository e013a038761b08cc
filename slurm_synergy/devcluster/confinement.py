"""Whether the real node's slurmd can use task/cgroup on this machine."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from slurm_synergy.errors import DevClusterError

__all__ = [
    "AFFINITY",
    "AFFINITY_AND_CGROUP",
    "choose_task_plugin",
    "claim_cpusets",
    "remove_cpusets",
]

AFFINITY = "task/affinity"
AFFINITY_AND_CGROUP = "task/affinity,task/cgroup"

_CGROUPS = Path("/sys/fs/cgroup")
_V1 = ("cpuset", "memory", "freezer")


def choose_task_plugin() -> tuple[str, str]:
    """The TaskPlugin for the node with real cores, and why it lacks task/cgroup ("" if not).

    task/cgroup is used on cgroup v1, as root. On v2 it needs a systemd that delegates the
    controllers, which a container lacks.
    """
    if os.geteuid() != 0:
        return AFFINITY, "task/cgroup is off: only root can make cgroups"
    lacking = [
        name
        for name in _V1
        if not ((_CGROUPS / name).is_mount() and os.access(_CGROUPS / name, os.W_OK))
    ]
    if lacking:
        return AFFINITY, (
            f"task/cgroup is off: no writable cgroup v1 hierarchy for {', '.join(lacking)} "
            f"below {_CGROUPS}"
        )
    return AFFINITY_AND_CGROUP, ""


def _trees(node: str) -> list[Path]:
    return [_CGROUPS / name / f"slurm_{node}" for name in _V1]


def claim_cpusets(node: str) -> None:
    """Refuse when another cluster confines a node of this name: they would share cpusets."""
    taken = [str(tree) for tree in _trees(node) if tree.exists()]
    if taken:
        raise DevClusterError(
            f"{taken[0]} exists: another cluster confines the cores of a node {node}; take it down"
        )


def remove_cpusets(node: str) -> None:
    """Remove what the node's slurmd left in the cgroup file systems."""
    for tree in _trees(node):
        for place in sorted(tree.glob("**/"), reverse=True):
            # Busy ones belong to processes that are still ending; they are empty directories.
            with contextlib.suppress(OSError):
                place.rmdir()
