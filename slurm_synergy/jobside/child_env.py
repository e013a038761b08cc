"""The environment of a task's training process: what the lease says, and what frameworks expect."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_synergy.errors import LeaseError
from slurm_synergy.jobside import environment
from slurm_synergy.jobside.board import LeaseView
from slurm_synergy.jobside.environment import Task

__all__ = ["Told", "child_env"]

_INJECT = Path(__file__).resolve().parent / "inject"


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What the launcher knows when the program starts.

    ``cpus`` is how many CPUs it may use, ``endpoint`` where the controller is (None: nowhere),
    ``grace_s`` what a stop leaves for a checkpoint (0: not known).
    """

    board: Path
    lease: LeaseView
    cpus: int
    endpoint: str | None = None
    grace_s: float = 0.0


def child_env(
    own: Mapping[str, str], task: Task, told: Told, say: Callable[[str], None]
) -> dict[str, str]:
    """``own`` with what is added to it; what the user has set stays. ``say`` hears of defaults."""
    env, lease = dict(own), told.lease
    env["SYNERGY_BOARD"] = str(told.board)
    env["SYNERGY_LEASE_CPUS"] = str(lease.core_count)
    if lease.mem_mib:
        env["SYNERGY_LEASE_MEM_MIB"] = str(lease.mem_mib)
    if told.grace_s:
        env["SYNERGY_GRACE_S"] = f"{told.grace_s:g}"
    if lease.batch_size:
        env["SYNERGY_BATCH_SIZE"] = str(lease.batch_size)
    env["SYNERGY_CHECKPOINT_DIR"] = environment.checkpoint_dir(env, str(Path.cwd()))
    if told.endpoint is not None:
        env["SYNERGY_ENDPOINT"] = told.endpoint
    if _injects(env, say):
        env["PYTHONPATH"] = environment.prepend_path(str(_INJECT), env.get("PYTHONPATH"))
    else:
        env["SYNERGY_INJECT"] = "0"  # the one word that all parts of the program look for
    # Where the node is only pretended the lease's cores are more than this machine has.
    threads = min(lease.core_count, told.cpus)
    # Asking DNS takes time, and only a step over several nodes needs its answer.
    several = task.nodes > 1 and "MASTER_ADDR" not in env
    head = environment.first_host(env.get("SLURM_STEP_NODELIST", "")) if several else ""
    resolves = [head] if _resolves(head) else []
    filled = environment.training_defaults(env, task, threads=threads, resolves=resolves)
    if filled:
        say("set " + " ".join(f"{name}={value}" for name, value in filled.items()))
    return {**env, **filled}


def _injects(env: Mapping[str, str], say: Callable[[str], None]) -> bool:
    try:
        return environment.switched_on(env, "SYNERGY_INJECT", unset=True)
    except LeaseError as err:
        say(f"{err}; the program's data loaders follow the lease")
        return True


def _resolves(host: str) -> bool:
    try:
        return bool(host and socket.getaddrinfo(host, None))
    except OSError:
        return False
