"""Leases made from leases: other shares, other cores, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from slurm_synergy.controller.binding import CoreBinding
from slurm_synergy.controller.ledger import StoredLease
from slurm_synergy.controller.tasks import JobTasks
from slurm_synergy.core.model import Placement
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import LeaseError

__all__ = ["bound", "described", "resized", "same_terms", "unbound"]


def resized(stored: StoredLease, placement: Placement) -> StoredLease:
    """With other cores and memory on the GPUs that it holds. Raises LeaseError."""
    lease = stored.lease
    if lease.placement.gpu_layout != placement.gpu_layout:
        raise LeaseError(
            f"job {lease.job_id}: GPUs do not change in place: it holds "
            f"{lease.placement.gpu_layout}, not {placement.gpu_layout}"
        )
    return replace(stored, lease=replace(lease, placement=placement))


def same_terms(
    stored: StoredLease, owner_uid: int, placement: Placement, granted: Mapping[str, Resources]
) -> bool:
    """Whether the lease gives that owner the same already."""
    lease = stored.lease
    return (
        stored.owner_uid == owner_uid
        and lease.placement == placement
        and dict(lease.granted) == dict(granted)
    )


def unbound(stored: StoredLease, nodes: Iterable[str]) -> StoredLease:
    """Without any cores on ``nodes``."""
    lease, left = stored.lease, set(nodes)
    return replace(
        stored,
        lease=replace(
            lease,
            cores={name: ids for name, ids in lease.cores.items() if name not in left},
            floor={name: ids for name, ids in lease.floor.items() if name not in left},
        ),
    )


def bound(stored: StoredLease, bindings: Mapping[str, CoreBinding]) -> StoredLease:
    """With these cores by node, and none on nodes that are not its own; the same if it has them."""
    lease = stored.lease
    nodes = lease.placement.nodes
    cores = {name: held for name, held in lease.cores.items() if name in nodes}
    floor = {name: held for name, held in lease.floor.items() if name in nodes}
    for name, binding in bindings.items():
        cores[name], floor[name] = binding.cores, binding.floor
    if cores == lease.cores and floor == lease.floor:
        return stored
    return replace(stored, lease=replace(lease, cores=cores, floor=floor))


def described(stored: StoredLease, tasks: JobTasks, now_s: float) -> Mapping[str, object]:
    """A lease and what its tasks told, as JSON values for status output."""
    lease = stored.lease
    stop: Mapping[str, object] | None = None
    if stored.stopping is not None:
        stop = {
            "code": stored.stopping.code.value,
            "text": stored.stopping.text,
            "state": tasks.stop_state().value,
            "within_s": round(max(0.0, (stored.stop_deadline_s or now_s) - now_s), 1),
        }
    return {
        "generation": lease.generation,
        "incarnation": stored.incarnation,
        "owner_uid": stored.owner_uid,
        "gpu_type": lease.placement.gpu_type,
        "batch": lease.placement.batch.total if lease.placement.batch else None,
        "expires_in_s": round(lease.expires_s - now_s, 1),
        "nodes": [
            {
                "node": name,
                "gpus": share.gpus,
                "cpus": share.cpus,
                "mem_mib": share.mem_mib,
                "granted_mem_mib": lease.granted.get(name, share).mem_mib,
                "cores": list(lease.cores.get(name, ())),
                "floor": list(lease.floor.get(name, ())),
            }
            for name, share in lease.placement.shares
        ],
        "stop": stop,
        "progress": tasks.describe(),
    }
