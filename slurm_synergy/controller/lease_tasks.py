"""The tasks' side of the leases: they register, renew, tell how far they are, and finish."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from slurm_synergy.cluster import Clock
from slurm_synergy.controller.learning import JobTold
from slurm_synergy.controller.learning_steps import Progress
from slurm_synergy.controller.lease_probing import ProbingLeases
from slurm_synergy.controller.lease_table import Listener
from slurm_synergy.controller.ledger import Ledger, StoredLease
from slurm_synergy.controller.sessions import Sessions
from slurm_synergy.controller.task_view import TaskView, UnknownToken
from slurm_synergy.controller.tasks import TaskIdentity, TaskReport
from slurm_synergy.core.model import Node
from slurm_synergy.core.wording import counted
from slurm_synergy.errors import LeaseError, LedgerError

__all__ = ["TaskLeases"]

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_SAVE_PROGRESS_EVERY_S = 5.0


class TaskLeases(ProbingLeases):
    """Leases that tasks renew; thread-safe.

    ``on_event`` is called with a job id when a job's first task registers or any task ends,
    ``on_measured`` when all its tasks have answered a probe, ``on_training`` with what a job's
    first rank tells of its training.
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
        super().__init__(ledger, clock, lease_s=lease_s, node_of=node_of, grace_of=grace_of)
        self._on_event, self._on_measured, self._on_training = on_event, on_measured, on_training
        self._sessions = Sessions()
        # Their floors were put in place by the controller before this one.
        self._settled = set(self._entries)
        self._unsaved: set[int] = set()
        self._progress_saved_s = 0.0

    def subscribe(self, listener: Listener) -> None:
        """Have ``listener`` called with the ids of jobs whenever there is news for their tasks."""
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
            token = self._sessions.begin(identity)
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
            found = self._sessions.task_of(token)
            claimed = (job_id, restart_count, rank)
            if found is None or (found.job_id, found.restart_count, found.rank) != claimed:
                raise UnknownToken("unknown session token: register again")
            return found

    def renew(self, identity: TaskIdentity, report: TaskReport) -> TaskView:
        """Take in progress, extend the lease, and say how it stands. Raises Gone."""
        with self._lock:
            renewed = self._renewed(identity, report)
            self._save_progress_if_due()
        return self._told(identity, *renewed)

    def renew_at_once(self, identity: TaskIdentity, report: TaskReport) -> TaskView | None:
        """``renew``, unless that would wait for a disk or for others; then None, and no change.

        For a thread that must not wait until somebody has written something. Raises Gone.
        """
        if report.training is not None or not self._lock.acquire(blocking=False):
            return None
        try:
            probed = self._probes.of(identity.job_id) is not None
            if probed or self._progress_is_due():
                return None
            renewed = self._renewed(identity, report)
        finally:
            self._lock.release()
        return self._told(identity, *renewed)

    def _renewed(
        self, identity: TaskIdentity, report: TaskReport
    ) -> tuple[TaskView, bool, JobTold | None, bool]:
        """The view; whether a stop moved; what is told of training; whether a probe is answered."""
        entry = self._current(identity.job_id, identity.restart_count)
        moved = entry.tasks.report(identity, report, self._clock.now_s())
        self._unsaved.add(identity.job_id)
        probe = self._probes.of(identity.job_id)
        answered = probe is not None and bool(entry.tasks.answers(probe.number))
        # While it is probed the job is not as fast as it is.
        told = _training_told(entry.stored, identity, report) if probe is None else None
        return self._extended(entry, identity), moved, told, answered

    def _told(
        self,
        identity: TaskIdentity,
        view: TaskView,
        moved: bool,
        told: JobTold | None,
        answered: bool,
    ) -> TaskView:
        """Have others know what a renewal brought; the lock is not held."""
        if moved:
            self._announce({identity.job_id})
        if told is not None:
            self._on_training(told)
        if answered:
            self._on_measured(identity.job_id)
            view = self.view(identity)
        return view

    def _progress_is_due(self) -> bool:
        return self._clock.now_s() - self._progress_saved_s >= _SAVE_PROGRESS_EVERY_S

    def _save_progress_if_due(self) -> None:
        """Write the progress of all that told some since the last time, in one transaction."""
        if not self._progress_is_due():
            return
        self._progress_saved_s = self._clock.now_s()
        entries = [self._entries[one] for one in self._unsaved if one in self._entries]
        try:
            self._save_progress(entries)
        except LedgerError as err:
            # A full disk must not take the lease from a running job.
            _LOG.error("the progress of %s is not saved: %s", counted(len(entries), "job"), err)
        else:
            self._unsaved.clear()

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
            self._save_progress((entry,))
        self._announce({identity.job_id})
        self._on_event(identity.job_id)


def _training_told(
    stored: StoredLease, identity: TaskIdentity, report: TaskReport
) -> JobTold | None:
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
