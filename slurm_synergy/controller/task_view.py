"""What a running task may know of its job's lease, and why it may be told nothing."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_synergy.controller.ledger import StoredLease
from slurm_synergy.controller.probes import Probe
from slurm_synergy.core.model import Node
from slurm_synergy.errors import LeaseError

__all__ = ["Gone", "NotYetKnown", "Over", "TaskView", "UnknownToken", "task_view"]


class Gone(LeaseError):
    """The job or this incarnation of it is not scheduled any more."""


class Over(Gone):
    """Slurm has ended this incarnation: whatever of it is left must not go on.

    The job is started anew, here or elsewhere; two copies would spoil each other's work.
    """


class NotYetKnown(LeaseError):
    """A newer incarnation than ours: it will be known after the next look at the queue."""


class UnknownToken(LeaseError):
    """The session token is not (or no longer) one of ours: register again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskView:
    """What one task may know of its job's lease, on its own node."""

    generation: int
    expires_in_s: float
    cores: tuple[int, ...]
    floor_cores: tuple[int, ...]
    mem_mib: int
    floor_mem_mib: int
    node_cores: int
    stop: bool
    stop_within_s: float
    stop_step: int
    stop_committed: bool
    grace_s: float = 0.0
    probe: Probe | None = None
    batch_size: int = 0


def task_view(
    stored: StoredLease,
    name: str,
    node: Node | None,
    *,
    now_s: float,
    expires_in_s: float,
    probe: Probe | None,
    stop_step: tuple[int, bool],
    grace_s: float,
) -> TaskView:
    """The part of a lease that is about node ``name``; ``node`` None: it is not known now.

    While the job is probed it has the cores of ``probe``, and its batch, if any. ``stop_step`` is
    the last step under discussion and whether it is committed.
    """
    lease = stored.lease
    batch = lease.placement.batch.total if lease.placement.batch else 0
    share = lease.placement.on(name)
    granted_mib = lease.granted.get(name, share).mem_mib
    floor_mib = node.proportional(share.gpus).mem_mib if node else share.mem_mib
    return TaskView(
        generation=lease.generation,
        expires_in_s=expires_in_s,
        cores=(lease.cores if probe is None else probe.cores).get(name, ()),
        probe=probe,
        floor_cores=lease.floor.get(name, ()),
        mem_mib=share.mem_mib,
        floor_mem_mib=min(granted_mib, floor_mib),
        node_cores=node.total.cpus if node else 0,
        stop=stored.stopping is not None,
        stop_within_s=max(0.0, (stored.stop_deadline_s or now_s) - now_s),
        stop_step=stop_step[0],
        stop_committed=stop_step[1],
        grace_s=grace_s,
        batch_size=(probe.batch_size if probe else 0) or batch,
    )
