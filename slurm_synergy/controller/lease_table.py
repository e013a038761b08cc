"""The leases in memory and how they change: written to the ledger first, then known to all.

The ground of :class:`~slurm_synergy.controller.leases.LeaseBook`. Every lease that changes gets a
newer generation; cores are assigned over all leases of a node at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from slurm_synergy.cluster import Clock
from slurm_synergy.controller.binding import CoreBinding
from slurm_synergy.controller.lease_cores import LeaseCores
from slurm_synergy.controller.lease_terms import bound
from slurm_synergy.controller.ledger import JobProgress, Ledger, StoredLease
from slurm_synergy.controller.node_helpers import NodeHelpers
from slurm_synergy.controller.probes import Probes
from slurm_synergy.controller.task_view import Gone, NotYetKnown, Over, TaskView, task_view
from slurm_synergy.controller.tasks import JobTasks, TaskIdentity
from slurm_synergy.core.model import Lease, Node
from slurm_synergy.errors import LeaseError

__all__ = ["Entry", "LeaseTable", "Listener"]

Listener = Callable[[Collection[int]], None]
"""Is called with the ids of jobs whose tasks have news."""


@dataclass(slots=True)
class Entry:
    """One job's lease and what its tasks told."""

    stored: StoredLease
    tasks: JobTasks = field(default_factory=JobTasks)


class LeaseTable:
    """Leases by job id. Its methods are for the book, which holds the lock."""

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        *,
        lease_s: float,
        node_of: Callable[[str], Node | None],
        grace_of: Callable[[int], float],
    ) -> None:
        self._ledger, self._clock, self._lease_s = ledger, clock, lease_s
        self._grace_of = grace_of
        self.helpers = NodeHelpers(clock, lease_s=lease_s)
        """Who on the nodes obeys the leases as root."""
        self._cores = LeaseCores(node_of)
        self._probes = Probes(
            node_of=node_of,
            leases_on=self._leases_on,
            reserved_on=self._cores.reserved_on,
        )
        self._lock = threading.RLock()
        self._entries: dict[int, Entry] = {}
        self._ended: dict[int, int] = {}
        self._listeners: list[Listener] = []
        for stored in ledger.load_leases():
            # Renewals are not written: whoever was told of it last may have all of its time left.
            lease = replace(stored.lease, expires_s=clock.now_s() + lease_s)
            entry = Entry(replace(stored, lease=lease))
            entry.tasks.restore(stored.finished)
            self._entries[lease.job_id] = entry
            self._cores.enter(stored)

    def _current(self, job_id: int, restart_count: int) -> Entry:
        entry = self._entries.get(job_id)
        if entry is None:
            if restart_count <= self._ended.get(job_id, -1):
                raise Over(f"restart {restart_count} of job {job_id} has ended")
            raise Gone(f"job {job_id} holds no lease")
        if restart_count < entry.stored.incarnation:
            raise Over(f"job {job_id} was restarted since (restart {entry.stored.incarnation})")
        if restart_count > entry.stored.incarnation:
            raise NotYetKnown(f"restart {restart_count} of job {job_id} is not known yet")
        return entry

    def _stored(self, job_id: int) -> StoredLease:
        entry = self._entries.get(job_id)
        if entry is None:
            raise LeaseError(f"job {job_id} holds no lease")
        return entry.stored

    def _leases_on(self, name: str) -> tuple[Lease, ...]:
        return tuple(self._entries[one].stored.lease for one in self._cores.jobs_on(name))

    def _change(self, updates: Mapping[int, StoredLease], nodes: Iterable[str]) -> set[int]:
        """Write updated leases and what they do to others on ``nodes``; ids of changed leases."""
        beside = {node: self._cores.jobs_on(node) for node in nodes}
        after = {one: self._entries[one].stored for jobs in beside.values() for one in jobs}
        for job_id, stored in updates.items():
            after[job_id] = stored
            for node in beside.keys() & set(stored.lease.placement.nodes):
                beside[node].add(job_id)
        bindings: dict[int, dict[str, CoreBinding]] = {}
        for node, jobs in sorted(beside.items()):
            for job_id, cores in self._cores.assigned(node, [after[one] for one in jobs]).items():
                bindings.setdefault(job_id, {})[node] = cores
        changed: dict[int, StoredLease] = {}
        for job_id, stored in after.items():
            if job_id in bindings:
                stored = bound(stored, bindings[job_id])
            known = self._entries.get(job_id)
            if known is None or (stored is not known.stored and stored != known.stored):
                lease = replace(stored.lease, generation=stored.lease.generation + 1)
                changed[job_id] = replace(stored, lease=lease)
        self._write(changed)
        return set(changed) | self._probes.take_back(beside)

    def _write(self, changed: Mapping[int, StoredLease]) -> None:
        """To the ledger, then to memory: when the ledger fails nothing has changed."""
        if changed:
            self._ledger.save_leases(changed.values())
        for job_id, stored in changed.items():
            entry = self._entries.get(job_id)
            if entry is None:
                self._entries[job_id] = Entry(stored)
            else:
                self._cores.leave(entry.stored)
                entry.stored = stored
            self._cores.enter(stored)

    def _extended(self, entry: Entry, identity: TaskIdentity) -> TaskView:
        """Extend the lease: it ends a lease time from now. How it stands for that task."""
        now_s, name = self._clock.now_s(), identity.node
        lease = replace(entry.stored.lease, expires_s=now_s + self._lease_s)
        entry.stored = replace(entry.stored, lease=lease)
        return task_view(
            entry.stored,
            name,
            self._cores.node_of(name),
            now_s=now_s,
            expires_in_s=self._lease_s,
            probe=self._probes.of(lease.job_id),
            stop_step=entry.tasks.stop_step(identity.step_id),
            grace_s=self._grace_of(lease.job_id),
        )

    def _save_progress(self, entries: Iterable[Entry]) -> None:
        told = [
            JobProgress(
                job_id=entry.stored.lease.job_id,
                done_samples=entry.tasks.done_samples,
                samples_per_s=entry.tasks.samples_per_s,
                step=entry.tasks.step,
            )
            for entry in entries
            if entry.tasks.step or entry.tasks.done_samples
        ]
        if told:
            self._ledger.save_progress(told)

    def _announce(self, job_ids: Iterable[int]) -> None:
        # Outside the lock: a listener may call back.
        told = tuple(job_ids)
        if told:
            for listener in tuple(self._listeners):
                listener(told)
