"""The keeper of leases: who holds which cores and memory, and how far a stop has come.

One lease per job that holds GPUs. Cores are assigned over all leases of a node at once, so a
change of one job may move cores of its neighbours; every lease that changes gets a newer
generation, is written to the ledger first, and then wakes the tasks that wait for news.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from slurm_synergy.cluster import StopState
from slurm_synergy.controller.lease_tasks import TaskLeases
from slurm_synergy.controller.lease_terms import described, resized, same_terms, unbound
from slurm_synergy.controller.ledger import StoredLease
from slurm_synergy.controller.node_view import NodeView, node_view
from slurm_synergy.controller.task_view import Gone, NotYetKnown, Over, TaskView, UnknownToken
from slurm_synergy.controller.tasks import JobTasks
from slurm_synergy.core.model import JobStatus, Lease, Placement, Reason
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import LeaseError

__all__ = ["Gone", "LeaseBook", "NotYetKnown", "Over", "TaskView", "UnknownToken"]

_ENDED_REMEMBERED = 4096


class LeaseBook(TaskLeases):
    """All leases; thread-safe. Implements ``LeasePort`` of the seam.

    ``node_of`` yields a node of the pool by name (None: not known now); it must not call back.
    ``grace_of`` yields how long a stop would leave a job, in seconds (0: not known now). What is
    called when tasks tell something: see ``TaskLeases``.
    """

    def grant(
        self,
        *,
        status: JobStatus,
        owner_uid: int,
        incarnation: int,
        placement: Placement,
        granted: Mapping[str, Resources],
    ) -> Lease:
        """Make (or replace) the lease of a job about to start or adopted; durable on return.

        Granting the same again to the same incarnation changes nothing. Raises LeaseError when a
        node of the placement is not known.
        """
        job_id = status.job.job_id
        with self._lock:
            old = self._entries.get(job_id)
            same_run = old is not None and old.stored.incarnation == incarnation
            if (
                old is not None
                and same_run
                and same_terms(old.stored, owner_uid, placement, granted)
            ):
                return old.stored.lease
            unknown = [node for node in placement.nodes if self._cores.node_of(node) is None]
            if unknown:
                raise LeaseError(f"job {job_id}: not nodes of the pool: {', '.join(unknown)}")
            lease = Lease(
                job_id=job_id,
                generation=self._ledger.last_generation(job_id),
                placement=placement,
                expires_s=self._clock.now_s() + self._lease_s,
                cores=old.stored.lease.cores if old else {},
                floor=old.stored.lease.floor if old else {},
                granted=dict(granted),
            )
            stored = StoredLease(
                lease=lease,
                owner_uid=owner_uid,
                incarnation=incarnation,
                wrapped=status.job.wrapped,
            )
            if old is not None and same_run:
                stored = replace(
                    old.stored, lease=lease, owner_uid=owner_uid, wrapped=status.job.wrapped
                )
            tasks = old.tasks if old is not None and same_run else JobTasks()
            before = old.stored.lease.placement.nodes if old else ()
            changed = self._change({job_id: stored}, (*before, *placement.nodes))
            self._entries[job_id].tasks = tasks
            self._ended.pop(job_id, None)
            if not same_run:
                self._probes.end(job_id)
                self._cores.forget_gpus(job_id)
                self._settled.discard(job_id)
                self._sessions.end_all_of(job_id)
            lease = self._entries[job_id].stored.lease
        self._announce(changed)
        return lease

    def resize(self, *, job_id: int, placement: Placement) -> Lease:
        """``resize_all`` for one job: its lease then. Raises LeaseError when it is refused."""
        refused = self.resize_all((placement,))
        if job_id in refused:
            raise refused[job_id]
        with self._lock:
            return self._stored(job_id).lease

    def resize_all(self, placements: Sequence[Placement]) -> Mapping[int, LeaseError]:
        """Change cores and memory of running jobs in place; newer generations on return.

        All are written in one transaction before any task is told. The placement that a job has
        already changes nothing. Refused are jobs that hold no lease, and other nodes or GPUs than
        a job holds; by job id. Raises LedgerError when they cannot be written: nothing changes.
        """
        updates: dict[int, StoredLease] = {}
        refused: dict[int, LeaseError] = {}
        changed: set[int] = set()
        with self._lock:
            for placement in placements:
                job_id = placement.job_id
                try:
                    stored = self._stored(job_id)
                    if stored.lease.placement != placement:
                        updates[job_id] = resized(stored, placement)
                except LeaseError as err:
                    refused[job_id] = err
            if updates:
                nodes = {name for one in updates.values() for name in one.lease.placement.nodes}
                changed = self._change(updates, nodes)
        self._announce(changed)
        return refused

    def stop(self, *, job_id: int, reason: Reason, grace_s: float) -> None:
        """Ask the job to checkpoint and leave within ``grace_s`` seconds; idempotent.

        A second call keeps the first one's deadline. Raises LeaseError without a lease.
        """
        with self._lock:
            stored = self._stored(job_id)
            if stored.stopping is not None:
                return
            updated = replace(
                stored, stopping=reason, stop_deadline_s=self._clock.now_s() + grace_s
            )
            self._probes.end(job_id)
            changed = self._change({job_id: updated}, ())
        self._announce(changed)

    def stop_state(self, job_id: int) -> StopState:
        """How far a stop has come. Raises LeaseError when the job holds no lease."""
        with self._lock:
            stored = self._stored(job_id)
            state = self._entries[job_id].tasks.stop_state()
            deadline_s = stored.stop_deadline_s
            overdue = deadline_s is not None and self._clock.now_s() >= deadline_s
            return StopState.OVERDUE if state is StopState.WAITING and overdue else state

    def end(self, job_id: int) -> None:
        """Slurm shows that the job's run is over: forget its lease; unknown jobs are no error.

        Whatever of that run still asks for its lease is told to end.
        """
        self._drop(job_id, over=True)

    def let_go(self, job_id: int) -> None:
        """We schedule the job no more: forget its lease; its tasks run on as Slurm has them."""
        self._drop(job_id, over=False)

    def _drop(self, job_id: int, *, over: bool) -> None:
        with self._lock:
            entry = self._entries.get(job_id)
            if entry is None:
                return
            self._save_progress((entry,))
            self._ledger.end_lease(job_id)
            self._cores.leave(entry.stored)
            del self._entries[job_id]
            self._unsaved.discard(job_id)
            self._probes.end(job_id)
            self._cores.forget_gpus(job_id)
            self._settled.discard(job_id)
            if over:
                self._ended[job_id] = entry.stored.incarnation
            while len(self._ended) > _ENDED_REMEMBERED:
                del self._ended[next(iter(self._ended))]
            self._sessions.end_all_of(job_id)
            changed = self._change({}, entry.stored.lease.placement.nodes)
        self._announce({job_id, *changed})

    def set_reserved(self, node: str, cores: Iterable[int]) -> None:
        """Keep all leases off these cores of a node: a job without the wrapper runs there."""
        with self._lock:
            if not self._cores.reserve(node, cores):
                return
            changed = self._change({}, (node,))
        self._announce(changed)

    def set_gpus(self, job_id: int, gpus: Mapping[str, tuple[int, ...]]) -> None:
        """The GPUs that a job has got, by node: its floor is put near them, once.

        Slurm chooses them at the start, after the lease was made. Later its floor stays.
        """
        with self._lock:
            before = self._cores.gpus_of(job_id)
            if job_id not in self._entries or before == gpus:
                return
            self._cores.note_gpus(job_id, gpus)
            nodes = [node for name in gpus if (node := self._cores.node_of(name)) is not None]
            moving = {node.name for node in nodes if self._cores.near(job_id, node)}
            if before is not None or job_id in self._settled or not moving:
                return
            # Those that start beside it have no final place yet either.
            fresh = {job_id, *(self._entries.keys() - self._cores.placed() - self._settled)}
            anew = {one: unbound(self._entries[one].stored, moving) for one in fresh}
            changed = self._change(anew, moving)
        self._announce(changed)

    def lease(self, job_id: int) -> Lease | None:
        """The lease in force, or None."""
        with self._lock:
            entry = self._entries.get(job_id)
            return entry.stored.lease if entry else None

    def stopping(self, job_id: int) -> Reason | None:
        """Why the job was told to stop, or None when it was not."""
        with self._lock:
            entry = self._entries.get(job_id)
            return entry.stored.stopping if entry else None

    def incarnation(self, job_id: int) -> int | None:
        """The restart count that the job's lease was made for; None without a lease."""
        with self._lock:
            entry = self._entries.get(job_id)
            return entry.stored.incarnation if entry else None

    def job_ids(self) -> tuple[int, ...]:
        """Jobs with a lease, ascending."""
        with self._lock:
            return tuple(sorted(self._entries))

    def nodes_of(self, job_ids: Iterable[int]) -> Mapping[int, tuple[str, ...]]:
        """The nodes of each job's lease; none of a job without one."""
        with self._lock:
            return {
                job_id: entry.stored.lease.placement.nodes if entry else ()
                for job_id, entry in ((one, self._entries.get(one)) for one in job_ids)
            }

    def on_node(self, name: str) -> tuple[NodeView, ...]:
        """The leases of all jobs that hold something on a node, by job id."""
        with self._lock:
            now_s, node = self._clock.now_s(), self._cores.node_of(name)
            cores = node.total.cpus if node else 0
            return tuple(
                node_view(self._entries[one].stored, name, now_s=now_s, node_cores=cores)
                for one in sorted(self._cores.jobs_on(name))
            )

    def snapshot(self) -> Mapping[int, Mapping[str, object]]:
        """All leases as JSON values, by job id, for status output."""
        with self._lock:
            now_s = self._clock.now_s()
            return {
                job_id: described(entry.stored, entry.tasks, now_s)
                for job_id, entry in sorted(self._entries.items())
            }
