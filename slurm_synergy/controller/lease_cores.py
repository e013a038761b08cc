"""Whose cores are whose on the nodes of the pool: the part of the book that assigns them.

Cores are assigned over all leases of a node at once, so a change of one job may move cores of its
neighbours. Not thread-safe: the keeper of the leases holds its lock around every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from slurm_synergy.controller.binding import CoreBinding, CoreRequest, assign_cores
from slurm_synergy.controller.ledger import StoredLease
from slurm_synergy.core.model import Node

__all__ = ["LeaseCores"]

_Gpus = Mapping[str, tuple[int, ...]]


class LeaseCores:
    """Which jobs hold something on a node, near which GPUs they are, and what no lease may have.

    ``node_of`` yields a node of the pool by name, None for one that is not known now.
    """

    def __init__(self, node_of: Callable[[str], Node | None]) -> None:
        self.node_of = node_of
        self._jobs_on: dict[str, set[int]] = {}
        self._reserved: dict[str, frozenset[int]] = {}
        self._gpus: dict[int, _Gpus] = {}

    def enter(self, stored: StoredLease) -> None:
        """The job holds something on the nodes of its placement."""
        for node in stored.lease.placement.nodes:
            self._jobs_on.setdefault(node, set()).add(stored.lease.job_id)

    def leave(self, stored: StoredLease) -> None:
        """It holds nothing there any more."""
        for node in stored.lease.placement.nodes:
            self._jobs_on[node].discard(stored.lease.job_id)
            if not self._jobs_on[node]:
                del self._jobs_on[node]

    def jobs_on(self, node: str) -> set[int]:
        """The jobs that hold something on a node: a copy."""
        return set(self._jobs_on.get(node, ()))

    def reserved_on(self, node: str) -> frozenset[int]:
        """Cores of a node that no lease may have."""
        return self._reserved.get(node, frozenset())

    def reserve(self, node: str, cores: Iterable[int]) -> bool:
        """No lease may have these cores of a node; False when it is so already."""
        wanted = frozenset(cores)
        if self.reserved_on(node) == wanted:
            return False
        self._reserved[node] = wanted
        return True

    def placed(self) -> frozenset[int]:
        """Jobs whose GPUs are known."""
        return frozenset(self._gpus)

    def gpus_of(self, job_id: int) -> _Gpus | None:
        """The GPUs that a job has got, by node; None while they are not known."""
        return self._gpus.get(job_id)

    def note_gpus(self, job_id: int, gpus: _Gpus) -> None:
        """These are the job's GPUs now."""
        self._gpus[job_id] = dict(gpus)

    def forget_gpus(self, job_id: int) -> None:
        """The job, or this run of it, has no GPUs any more."""
        self._gpus.pop(job_id, None)

    def near(self, job_id: int, node: Node) -> tuple[int, ...]:
        """The sockets of the job's GPUs on the node, as far as they are known."""
        ids = self._gpus.get(job_id, {}).get(node.name, ())
        known = {node.gpu_sockets[one] for one in ids if one < len(node.gpu_sockets)}
        return tuple(sorted(known - {-1}))

    def assigned(self, name: str, leases: Iterable[StoredLease]) -> Mapping[int, CoreBinding]:
        """The cores on node ``name`` of these jobs, which are all that hold something there."""
        node = self.node_of(name)
        if node is None:
            # It left the pool with jobs on it: they keep what they have.
            return {}
        requests = []
        for stored in leases:
            lease = stored.lease
            if not stored.wrapped or name not in lease.placement.nodes:
                continue
            share = lease.placement.on(name)
            requests.append(
                CoreRequest(
                    job_id=lease.job_id,
                    cores=share.cpus,
                    floor=node.proportional(share.gpus).cpus,
                    held=lease.cores.get(name, ()),
                    held_floor=lease.floor.get(name, ()),
                    near=self.near(lease.job_id, node),
                )
            )
        return assign_cores(
            node_cores=node.total.cpus,
            sockets=node.sockets,
            requests=requests,
            reserved=self.reserved_on(name),
            threads_per_core=node.threads_per_core,
        )
