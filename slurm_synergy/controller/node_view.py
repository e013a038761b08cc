"""What the helper on a compute node may know of its leases (contract: ``proto/node.proto``)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_synergy.controller.ledger import StoredLease
from slurm_synergy.proto import node_pb2 as pb

__all__ = ["NodeView", "leases_message", "node_view"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One job's lease on one node; ``node_cores`` is 0 for a node that is not known now."""

    job_id: int
    owner_uid: int
    incarnation: int
    generation: int
    expires_in_s: float
    cores: tuple[int, ...]
    mem_mib: int
    node_cores: int


def node_view(stored: StoredLease, node: str, *, now_s: float, node_cores: int) -> NodeView:
    """The part of a lease that is about ``node``. Nobody pins a job without the wrapper."""
    lease = stored.lease
    return NodeView(
        job_id=lease.job_id,
        owner_uid=stored.owner_uid,
        incarnation=stored.incarnation,
        generation=lease.generation,
        expires_in_s=max(0.0, lease.expires_s - now_s),
        cores=lease.cores.get(node, ()) if stored.wrapped else (),
        mem_mib=lease.placement.on(node).mem_mib,
        node_cores=node_cores,
    )


def leases_message(node: str, views: Sequence[NodeView]) -> pb.NodeLeases:
    """The views as a message; its ``state`` changes with all of them but the durations."""
    leases = [
        pb.NodeLease(
            job_id=view.job_id,
            owner_uid=view.owner_uid,
            restart_count=view.incarnation,
            generation=view.generation,
            cores=view.cores,
            node_cores=view.node_cores,
            mem_mib=view.mem_mib,
        )
        for view in views
    ]
    timeless = pb.NodeLeases(node=node, leases=leases)
    timeless.state = hashlib.sha256(timeless.SerializeToString(deterministic=True)).digest()
    for lease, view in zip(timeless.leases, views, strict=True):
        lease.expires_in_s = view.expires_in_s
    return timeless
