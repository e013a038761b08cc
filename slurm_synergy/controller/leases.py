"""The keeper of leases: who holds which cores and memory, and how far a stop has come.

One lease per job that holds GPUs. Cores are assigned over all leases of a node at once, so a
change of one job may move cores of its neighbours; every lease that changes gets a newer
generation, is written to the ledger first, and then wakes the tasks that wait for news.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from slurm_synergy.cluster import Clock, StopState
from slurm_synergy.controller.binding import CoreBinding, CoreRequest, assign_cores
from slurm_synergy.controller.learning import JobTold
from slurm_synergy.controller.learning_steps import Progress
from slurm_synergy.controller.ledger import Ledger, StoredLease
from slurm_synergy.controller.node_view import NodeView, node_view
from slurm_synergy.controller.probes import Measured, Probe, Probes, TaskProfiling
from slurm_synergy.controller.tasks import JobTasks, TaskIdentity, TaskReport
from slurm_synergy.core.model import JobStatus, Lease, Node, Placement, Reason
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import LeaseError, LedgerError
from slurm_synergy.profiler.refining import Sums

__all__ = ["Gone", "LeaseBook", "NotYetKnown", "Over", "TaskView", "UnknownToken"]

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_SAVE_PROGRESS_EVERY_S = 5.0
_ENDED_REMEMBERED = 4096


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


@dataclass(slots=True)
class _Entry:
    stored: StoredLease
    tasks: JobTasks = field(default_factory=JobTasks)
    progress_saved_s: float = 0.0


class LeaseBook:
    """All leases; thread-safe. Implements ``LeasePort`` of the seam.

    ``node_of`` yields a node of the pool by name (None: not known now); it must not call back.
    ``on_event`` is called with a job id when a job's first task registers or any task ends.
    ``grace_of`` yields how long a stop would leave a job, in seconds (0: not known now).
    ``on_measured`` is called with a job id when all its tasks have answered a probe,
    ``on_training`` with what a job's first rank tells of its training.
    """

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        *,
        lease_s: float,
        node_of: Callable[[str], Node | None],
        on_event: Callable[[int], None] = lambda job_id: None,
        grace_of: Callable[[int], float] = lambda job_id: 0.0,
        on_measured: Callable[[int], None] = lambda job_id: None,
        on_training: Callable[[JobTold], None] = lambda told: None,
    ) -> None:
        self._ledger, self._clock, self._lease_s = ledger, clock, lease_s
        self._node_of, self._on_event, self._grace_of = node_of, on_event, grace_of
        self._on_measured, self._on_training = on_measured, on_training
        self._probes = Probes(
            node_of=node_of,
            leases_on=self._leases_on,
            reserved_on=lambda name: self._reserved.get(name, frozenset()),
        )
        self._lock = threading.RLock()
        self._entries: dict[int, _Entry] = {}
        self._tokens: dict[str, TaskIdentity] = {}
        self._token_of: dict[TaskIdentity, str] = {}
        self._on_node: dict[str, set[int]] = {}
        self._reserved: dict[str, frozenset[int]] = {}
        self._ended: dict[int, int] = {}
        self._gpus: dict[int, dict[str, tuple[int, ...]]] = {}
        self._listeners: list[Callable[[int], None]] = []
        for stored in ledger.load_leases():
            # Renewals are not written: whoever was told of it last may have all of its time left.
            lease = replace(stored.lease, expires_s=clock.now_s() + lease_s)
            entry = _Entry(replace(stored, lease=lease))
            entry.tasks.restore(stored.finished)
            self._entries[stored.lease.job_id] = entry
            self._note_nodes(stored.lease.job_id)
        # Their floors were put in place by the controller before this one.
        self._settled = set(self._entries)

    # LeasePort of the seam

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
            if old is not None and same_run and _equal(old.stored, owner_uid, placement, granted):
                return old.stored.lease
            unknown = [node for node in placement.nodes if self._node_of(node) is None]
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
            if not same_run:
                self._probes.end(job_id)
            self._ended.pop(job_id, None)
            if not same_run:
                self._gpus.pop(job_id, None)
                self._settled.discard(job_id)
                self._drop_tokens(job_id)
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
                        updates[job_id] = _resized(stored, placement)
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
            self._save_progress(entry)
            self._ledger.end_lease(job_id)
            self._leave_nodes(job_id)
            del self._entries[job_id]
            self._probes.end(job_id)
            self._gpus.pop(job_id, None)
            self._settled.discard(job_id)
            if over:
                self._ended[job_id] = entry.stored.incarnation
            while len(self._ended) > _ENDED_REMEMBERED:
                del self._ended[next(iter(self._ended))]
            self._drop_tokens(job_id)
            changed = self._change({}, entry.stored.lease.placement.nodes)
        self._announce({job_id, *changed})

    def set_reserved(self, node: str, cores: Iterable[int]) -> None:
        """Keep all leases off these cores of a node: a job without the wrapper runs there."""
        with self._lock:
            wanted = frozenset(cores)
            if self._reserved.get(node, frozenset()) == wanted:
                return
            self._reserved[node] = wanted
            changed = self._change({}, (node,))
        self._announce(changed)

    def set_gpus(self, job_id: int, gpus: Mapping[str, tuple[int, ...]]) -> None:
        """The GPUs that a job has got, by node: its floor is put near them, once.

        Slurm chooses them at the start, after the lease was made. Later its floor stays.
        """
        with self._lock:
            entry = self._entries.get(job_id)
            if entry is None or self._gpus.get(job_id) == gpus:
                return
            known, self._gpus[job_id] = job_id in self._gpus, dict(gpus)
            nodes = [node for name in gpus if (node := self._node_of(name)) is not None]
            moving = {node.name for node in nodes if self._near(job_id, node)}
            if known or job_id in self._settled or not moving:
                return
            # Those that start beside it have no final place yet either.
            fresh = {job_id, *(self._entries.keys() - self._gpus.keys() - self._settled)}
            anew = {one: _unbound(self._entries[one].stored, moving) for one in fresh}
            changed = self._change(anew, moving)
        self._announce(changed)

    def _near(self, job_id: int, node: Node) -> tuple[int, ...]:
        """The sockets of the job's GPUs on the node, as far as they are known."""
        ids = self._gpus.get(job_id, {}).get(node.name, ())
        known = {node.gpu_sockets[one] for one in ids if one < len(node.gpu_sockets)}
        return tuple(sorted(known - {-1}))

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

    def on_node(self, name: str) -> tuple[NodeView, ...]:
        """The leases of all jobs that hold something on a node, by job id."""
        with self._lock:
            now_s, node = self._clock.now_s(), self._node_of(name)
            cores = node.total.cpus if node else 0
            return tuple(
                node_view(self._entries[one].stored, name, now_s=now_s, node_cores=cores)
                for one in sorted(self._on_node.get(name, ()))
            )

    # The tasks' side

    def subscribe(self, listener: Callable[[int], None]) -> None:
        """Have ``listener`` called with a job id whenever there is news for its tasks."""
        with self._lock:
            self._listeners.append(listener)

    def owner_uid(self, job_id: int, restart_count: int) -> int:
        """Who owns the job. Raises Gone or NotYetKnown."""
        with self._lock:
            return self._current(job_id, restart_count).stored.owner_uid

    def register(self, identity: TaskIdentity) -> tuple[str, TaskView]:
        """Take in an authenticated task: a new session token and its view of the lease.

        Raises Gone, NotYetKnown, or LeaseError for a task that contradicts the lease.
        """
        with self._lock:
            entry = self._current(identity.job_id, identity.restart_count)
            if identity.node not in entry.stored.lease.placement.nodes:
                raise LeaseError(f"job {identity.job_id} holds nothing on node {identity.node!r}")
            first = entry.tasks.register(identity)
            # Whoever measured is not there any more, or not alone.
            probed = self._probes.end(identity.job_id)
            self._tokens.pop(self._token_of.get(identity, ""), None)
            token = secrets.token_urlsafe(32)
            self._tokens[token], self._token_of[identity] = identity, token
            view = self._extended(entry, identity)
        if probed:
            self._announce({identity.job_id})
        if first:
            self._on_event(identity.job_id)
        return token, view

    def identity(self, token: str, job_id: int, restart_count: int, rank: int) -> TaskIdentity:
        """The task that the token was given to. Raises Gone or UnknownToken.

        A token is good only for the task that it was issued to.
        """
        with self._lock:
            self._current(job_id, restart_count)
            found = self._tokens.get(token)
            claimed = (job_id, restart_count, rank)
            if found is None or (found.job_id, found.restart_count, found.rank) != claimed:
                raise UnknownToken("unknown session token: register again")
            return found

    def renew(self, identity: TaskIdentity, report: TaskReport) -> TaskView:
        """Take in progress, extend the lease, and say how it stands. Raises Gone."""
        with self._lock:
            entry = self._current(identity.job_id, identity.restart_count)
            now_s = self._clock.now_s()
            moved = entry.tasks.report(identity, report, now_s)
            if now_s - entry.progress_saved_s >= _SAVE_PROGRESS_EVERY_S:
                try:
                    self._save_progress(entry)
                except LedgerError as err:
                    # A full disk must not take the lease from a running job.
                    _LOG.error("progress of job %d is not saved: %s", identity.job_id, err)
            probe = self._probes.of(identity.job_id)
            answered = probe is not None and bool(entry.tasks.answers(probe.number))
            # While it is probed the job is not as fast as it is.
            told = _told(entry.stored, identity, report) if probe is None else None
            view = self._extended(entry, identity)
        if moved:
            self._announce({identity.job_id})
        if told is not None:
            self._on_training(told)
        if answered:
            self._on_measured(identity.job_id)
            view = self.view(identity)
        return view

    def view(self, identity: TaskIdentity) -> TaskView:
        """Extend the lease and say how it stands for that task. Raises Gone."""
        with self._lock:
            return self._extended(self._current(identity.job_id, identity.restart_count), identity)

    def unless_busy(self, look: Callable[..., _T], *args: Any) -> _T | None:
        """``look(*args)``, a method of ours that touches no disk; None while others have the book.

        For a thread that must not wait until somebody has written something.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return look(*args)
        finally:
            self._lock.release()

    def finish(
        self, identity: TaskIdentity, *, exit_code: int, checkpointed: bool, report: TaskReport
    ) -> None:
        """A task has ended; durable on return. Raises Gone."""
        with self._lock:
            entry = self._current(identity.job_id, identity.restart_count)
            entry.tasks.finish(
                identity, exit_code=exit_code, checkpointed=checkpointed, report=report
            )
            entry.stored = replace(entry.stored, finished=entry.tasks.ended_reports())
            self._ledger.save_leases([entry.stored])
            self._save_progress(entry)
        self._announce({identity.job_id})
        self._on_event(identity.job_id)

    # Profiling leases

    def measurable_jobs(self) -> tuple[int, ...]:
        """Jobs all of whose tasks train and can measure, by id; none that shall stop."""
        with self._lock:
            return tuple(
                job_id
                for job_id, entry in sorted(self._entries.items())
                if entry.stored.stopping is None and entry.tasks.measurable
            )

    def profiling(self, job_id: int) -> tuple[TaskProfiling, ...]:
        """What the job's tasks told of themselves, by rank; none without a lease."""
        with self._lock:
            entry = self._entries.get(job_id)
            return entry.tasks.profiling() if entry else ()

    def sums(self, job_id: int) -> tuple[Sums, ...]:
        """What the job's tasks have done so far, by rank; none without a lease."""
        with self._lock:
            entry = self._entries.get(job_id)
            return entry.tasks.sums() if entry else ()

    def owner_of(self, job_id: int) -> int | None:
        """The user id of the job's owner; None without a lease."""
        with self._lock:
            entry = self._entries.get(job_id)
            return entry.stored.owner_uid if entry else None

    def free_cores(self, node: str) -> frozenset[int]:
        """Cores of a node that are nobody's: in no lease, no floor, no probe, not reserved."""
        with self._lock:
            return self._probes.free(node)

    def probe(self, job_id: int, probe: Probe, cpus: int) -> Probe | None:
        """Have a job measure ``probe`` with ``cpus`` cores on each of its nodes, from now on.

        None when it holds no lease, shall stop, or there are not that many cores now. An earlier
        probe of the job ends.
        """
        with self._lock:
            entry = self._entries.get(job_id)
            if entry is None or entry.stored.stopping is not None:
                return None
            begun = self._probes.begin(entry.stored.lease, probe, cpus)
        if begun is not None:
            self._announce({job_id})
        return begun

    def end_probe(self, job_id: int) -> None:
        """The job has the cores of its lease again; without a probe nothing happens."""
        with self._lock:
            ended = self._probes.end(job_id)
        if ended:
            self._announce({job_id})

    def probing(self, job_id: int) -> Probe | None:
        """The job's probe, unless it has ended or its cores were taken back."""
        with self._lock:
            return self._probes.of(job_id)

    def answers(self, job_id: int) -> tuple[Measured, ...]:
        """What all tasks answered to the job's probe, by rank; none before the last of them."""
        with self._lock:
            entry, probe = self._entries.get(job_id), self._probes.of(job_id)
            return entry.tasks.answers(probe.number) if entry and probe else ()

    def _leases_on(self, name: str) -> tuple[Lease, ...]:
        return tuple(self._entries[one].stored.lease for one in self._on_node.get(name, ()))

    def snapshot(self) -> Mapping[int, Mapping[str, object]]:
        """All leases as JSON values, by job id, for status output."""
        with self._lock:
            now_s = self._clock.now_s()
            return {job_id: _describe(e, now_s) for job_id, e in sorted(self._entries.items())}

    # Inside; the lock is held

    def _current(self, job_id: int, restart_count: int) -> _Entry:
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

    def _change(self, updates: Mapping[int, StoredLease], nodes: Iterable[str]) -> set[int]:
        """Write updated leases and what they do to others on ``nodes``; ids of changed leases."""
        beside = {node: set(self._on_node.get(node, ())) for node in nodes}
        after = {one: self._entries[one].stored for jobs in beside.values() for one in jobs}
        for job_id, stored in updates.items():
            after[job_id] = stored
            for node in beside.keys() & set(stored.lease.placement.nodes):
                beside[node].add(job_id)
        for node, jobs in sorted(beside.items()):
            after.update(self._rebound(node, {job_id: after[job_id] for job_id in jobs}))
        changed: dict[int, StoredLease] = {}
        for job_id, stored in after.items():
            known = self._entries.get(job_id)
            if known is None or stored != known.stored:
                lease = replace(stored.lease, generation=stored.lease.generation + 1)
                changed[job_id] = replace(stored, lease=lease)
        if changed:
            self._ledger.save_leases(changed.values())
        for job_id, stored in changed.items():
            if job_id in self._entries:
                self._leave_nodes(job_id)
                self._entries[job_id].stored = stored
            else:
                self._entries[job_id] = _Entry(stored)
            self._note_nodes(job_id)
        return set(changed) | self._probes.take_back(beside)

    def _note_nodes(self, job_id: int) -> None:
        for node in self._entries[job_id].stored.lease.placement.nodes:
            self._on_node.setdefault(node, set()).add(job_id)

    def _leave_nodes(self, job_id: int) -> None:
        for node in self._entries[job_id].stored.lease.placement.nodes:
            self._on_node[node].discard(job_id)
            if not self._on_node[node]:
                del self._on_node[node]

    def _rebound(self, name: str, leases: Mapping[int, StoredLease]) -> dict[int, StoredLease]:
        node = self._node_of(name)
        if node is None:
            # It left the pool with jobs on it: they keep what they have.
            return {}
        requests = [
            CoreRequest(
                job_id=job_id,
                cores=stored.lease.placement.on(name).cpus,
                floor=node.proportional(stored.lease.placement.on(name).gpus).cpus,
                held=stored.lease.cores.get(name, ()),
                held_floor=stored.lease.floor.get(name, ()),
                near=self._near(job_id, node),
            )
            for job_id, stored in leases.items()
            if stored.wrapped and name in stored.lease.placement.nodes
        ]
        bound = assign_cores(
            node_cores=node.total.cpus,
            sockets=node.sockets,
            requests=requests,
            reserved=self._reserved.get(name, frozenset()),
            threads_per_core=node.threads_per_core,
        )
        return {job_id: _bind(leases[job_id], name, cores) for job_id, cores in bound.items()}

    def _extended(self, entry: _Entry, identity: TaskIdentity) -> TaskView:
        stored, name = entry.stored, identity.node
        now_s = self._clock.now_s()
        lease = replace(stored.lease, expires_s=now_s + self._lease_s)
        entry.stored = replace(stored, lease=lease)
        share, node = lease.placement.on(name), self._node_of(name)
        granted_mib = lease.granted.get(name, share).mem_mib
        floor_mib = node.proportional(share.gpus).mem_mib if node else share.mem_mib
        stop_step, committed = entry.tasks.stop_step(identity.step_id)
        probe = self._probes.of(lease.job_id)
        return TaskView(
            generation=lease.generation,
            expires_in_s=self._lease_s,
            cores=lease.cores.get(name, ()) if probe is None else probe.cores.get(name, ()),
            probe=probe,
            floor_cores=lease.floor.get(name, ()),
            mem_mib=share.mem_mib,
            floor_mem_mib=min(granted_mib, floor_mib),
            node_cores=node.total.cpus if node else 0,
            stop=stored.stopping is not None,
            stop_within_s=max(0.0, (stored.stop_deadline_s or now_s) - now_s),
            stop_step=stop_step,
            stop_committed=committed,
            grace_s=self._grace_of(lease.job_id),
            batch_size=lease.placement.batch.total if lease.placement.batch else 0,
        )

    def _save_progress(self, entry: _Entry) -> None:
        tasks = entry.tasks
        entry.progress_saved_s = self._clock.now_s()
        if tasks.step or tasks.done_samples:
            self._ledger.save_progress(
                entry.stored.lease.job_id,
                done_samples=tasks.done_samples,
                samples_per_s=tasks.samples_per_s,
                step=tasks.step,
            )

    def _drop_tokens(self, job_id: int) -> None:
        for token in [key for key, known in self._tokens.items() if known.job_id == job_id]:
            self._token_of.pop(self._tokens.pop(token), None)

    def _announce(self, job_ids: Iterable[int]) -> None:
        # Outside the lock: a listener may call back.
        for listener in tuple(self._listeners):
            for job_id in job_ids:
                listener(job_id)


def _told(stored: StoredLease, identity: TaskIdentity, report: TaskReport) -> JobTold | None:
    """What a task tells of the training of its job; steps are the same for all its ranks."""
    if identity.rank != 0:
        return None
    return JobTold(
        job_id=identity.job_id,
        owner_uid=stored.owner_uid,
        placement=stored.lease.placement,
        report=report.training,
        progress=Progress(
            incarnation=identity.restart_count,
            step=report.step,
            samples=report.samples,
            stepped_s=report.stepped_s,
        ),
        program=report.profiling.program if report.profiling else "",
    )


def _resized(stored: StoredLease, placement: Placement) -> StoredLease:
    """With other cores and memory on the GPUs that it holds. Raises LeaseError."""
    lease = stored.lease
    if lease.placement.gpu_layout != placement.gpu_layout:
        raise LeaseError(
            f"job {lease.job_id}: GPUs do not change in place: it holds "
            f"{lease.placement.gpu_layout}, not {placement.gpu_layout}"
        )
    return replace(stored, lease=replace(lease, placement=placement))


def _equal(
    stored: StoredLease, owner_uid: int, placement: Placement, granted: Mapping[str, Resources]
) -> bool:
    lease = stored.lease
    return (
        stored.owner_uid == owner_uid
        and lease.placement == placement
        and dict(lease.granted) == dict(granted)
    )


def _unbound(stored: StoredLease, nodes: Iterable[str]) -> StoredLease:
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


def _bind(stored: StoredLease, node: str, bound: CoreBinding) -> StoredLease:
    lease = stored.lease
    nodes = lease.placement.nodes
    cores = {name: held for name, held in lease.cores.items() if name in nodes}
    floor = {name: held for name, held in lease.floor.items() if name in nodes}
    return replace(
        stored,
        lease=replace(lease, cores=cores | {node: bound.cores}, floor=floor | {node: bound.floor}),
    )


def _describe(entry: _Entry, now_s: float) -> Mapping[str, object]:
    stored, lease = entry.stored, entry.stored.lease
    stop: Mapping[str, object] | None = None
    if stored.stopping is not None:
        stop = {
            "code": stored.stopping.code.value,
            "text": stored.stopping.text,
            "state": entry.tasks.stop_state().value,
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
        "progress": entry.tasks.describe(),
    }
