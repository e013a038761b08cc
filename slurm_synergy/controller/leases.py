"""The keeper of leases: who holds which cores and memory, and how far a stop has come.

One lease per job that holds GPUs. Cores are assigned over all leases of a node at once, so a
change of one job may move cores of its neighbours; every lease that changes gets a newer
generation, is written to the ledger first, and then wakes the tasks that wait for news.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from slurm_synergy.cluster import Clock, StopState
from slurm_synergy.controller.binding import CoreBinding, CoreRequest, assign_cores
from slurm_synergy.controller.ledger import Ledger, StoredLease
from slurm_synergy.controller.tasks import JobTasks, TaskIdentity, TaskReport
from slurm_synergy.core.model import JobStatus, Lease, Node, Placement, Reason
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import LeaseError, LedgerError

__all__ = ["Gone", "LeaseBook", "NotYetKnown", "Over", "TaskView", "UnknownToken"]

_LOG = logging.getLogger(__name__)
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
    ) -> None:
        self._ledger, self._clock, self._lease_s = ledger, clock, lease_s
        self._node_of, self._on_event, self._grace_of = node_of, on_event, grace_of
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
            entry = _Entry(stored)
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
            self._ended.pop(job_id, None)
            if not same_run:
                self._gpus.pop(job_id, None)
                self._settled.discard(job_id)
                self._drop_tokens(job_id)
            lease = self._entries[job_id].stored.lease
        self._announce(changed)
        return lease

    def resize(self, *, job_id: int, placement: Placement) -> Lease:
        """Change cores and memory of a running job in place; a newer generation on return.

        The placement that it has already changes nothing. Raises LeaseError when the job holds no
        lease, or for other nodes or GPUs than it holds.
        """
        with self._lock:
            stored = self._stored(job_id)
            lease = stored.lease
            if lease.placement.gpu_layout != placement.gpu_layout:
                raise LeaseError(
                    f"job {job_id}: GPUs do not change in place: it holds "
                    f"{lease.placement.gpu_layout}, not {placement.gpu_layout}"
                )
            if lease.placement == placement:
                return lease
            updated = replace(stored, lease=replace(lease, placement=placement))
            changed = self._change({job_id: updated}, placement.nodes)
            lease = self._entries[job_id].stored.lease
        self._announce(changed)
        return lease

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
            self._tokens.pop(self._token_of.get(identity, ""), None)
            token = secrets.token_urlsafe(32)
            self._tokens[token], self._token_of[identity] = identity, token
            view = self._extended(entry, identity)
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
            view = self._extended(entry, identity)
        if moved:
            self._announce({identity.job_id})
        return view

    def view(self, identity: TaskIdentity) -> TaskView:
        """Extend the lease and say how it stands for that task. Raises Gone."""
        with self._lock:
            return self._extended(self._current(identity.job_id, identity.restart_count), identity)

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
        touched = set(nodes)
        beside = {job_id for node in touched for job_id in self._on_node.get(node, ())}
        after = {job_id: self._entries[job_id].stored for job_id in sorted(beside)} | dict(updates)
        for node in sorted(touched):
            after.update(self._rebound(node, after))
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
        return set(changed)

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
        return TaskView(
            generation=lease.generation,
            expires_in_s=self._lease_s,
            cores=lease.cores.get(name, ()),
            floor_cores=lease.floor.get(name, ()),
            mem_mib=share.mem_mib,
            floor_mem_mib=min(granted_mib, floor_mib),
            node_cores=node.total.cpus if node else 0,
            stop=stored.stopping is not None,
            stop_within_s=max(0.0, (stored.stop_deadline_s or now_s) - now_s),
            stop_step=stop_step,
            stop_committed=committed,
            grace_s=self._grace_of(lease.job_id),
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
