"""What a snapshot says about one job: what it holds, and what of that may change.

``pinned`` jobs keep their nodes and GPUs whatever the policy says; ``frozen`` ones, a subset, keep
their cores and memory as well.
"""

from __future__ import annotations

from slurm_synergy.core.model import JobPhase, JobStatus, Node, Placement, Snapshot

__all__ = [
    "held",
    "is_frozen",
    "is_pinned",
    "is_usable",
    "status_of",
]


def status_of(snapshot: Snapshot) -> dict[int, JobStatus]:
    """Job statuses by job id, ascending."""
    return {status.job.job_id: status for status in snapshot.jobs}


def is_usable(node: Node) -> bool:
    """Whether anything may be started on the node this round."""
    return node.capacity.gpus > 0


def held(status: JobStatus) -> Placement | None:
    """The placement that the job holds and may keep; None when it will be placed anew.

    A stopping or ending job holds GPUs still, but they are on their way back.
    """
    if status.lease is None or status.phase in (JobPhase.STOPPING, JobPhase.ENDING):
        return None
    return status.lease.placement


def is_frozen(status: JobStatus, snapshot: Snapshot) -> bool:
    """Whether nothing about the job's placement may change.

    That is so while it starts, when no wrapper obeys our leases, and when a node of it is down or
    drains: others cannot use what it holds there, so moving it would only cost its progress.
    """
    placement = held(status)
    if placement is None:
        return False
    if status.phase is JobPhase.STARTING or not status.job.wrapped:
        return True
    usable = {node.name for node in snapshot.nodes if is_usable(node)}
    return not usable.issuperset(placement.nodes)


def is_pinned(status: JobStatus, snapshot: Snapshot) -> bool:
    """Whether the job keeps its nodes and GPUs, ahead of every policy."""
    if held(status) is None:
        return False
    return not status.job.preemptible or is_frozen(status, snapshot)
