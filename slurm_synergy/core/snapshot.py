"""What a snapshot says about one job: what it holds, and what of that may change.

``pinned`` jobs keep their nodes and GPUs whatever the policy says; ``frozen`` ones, a subset, keep
their cores and memory as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import compress
from operator import not_

from slurm_synergy.core.model import JobPhase, JobStatus, Placement, Reason, Snapshot
from slurm_synergy.core.values import quick

__all__ = [
    "Ascending",
    "Changes",
    "Stamp",
    "Standing",
    "held",
    "inherit",
    "is_frozen",
    "is_pinned",
    "keeps_all",
    "standing",
    "status_of",
]


# Until Python 3.12, looking up a member of an enumeration takes longer than comparing it.
_ON_THE_WAY_BACK = (JobPhase.STOPPING, JobPhase.ENDING)
_STARTING = JobPhase.STARTING


class Stamp:
    """Names one ``Standing``; it is nothing but itself."""

    __slots__ = ()


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """How jobs differ from those of an ``earlier`` standing.

    ``renewed`` are the ids of those that are new or have another status, ``gone`` of those that are
    no longer there. All others have the very same status.
    """

    earlier: Stamp
    renewed: Collection[int]
    gone: Collection[int]


class Standing:
    """The jobs of a snapshot by what they hold; all ascending by id.

    ``pending`` are those that hold nothing, ``holding`` the others, ``jobs`` and ``by_id`` both.
    ``changes`` tells what is not as it was a round ago, where that is known.
    """

    __slots__ = ("_unheld", "by_id", "changes", "holding", "jobs", "pending", "stamp")

    def __init__(
        self, by_id: Mapping[int, JobStatus], changes: Changes | None = None, idle: bool = False
    ) -> None:
        """``idle`` tells that no job holds anything."""
        self.by_id = by_id
        self.stamp = Stamp()
        self.changes = changes
        jobs = self.jobs = tuple(by_id.values())
        leases = () if idle else [status.lease for status in jobs]
        self.holding = list(compress(jobs, leases))
        self.pending: Sequence[JobStatus] = jobs
        if self.holding:
            self.pending = list(compress(jobs, map(not_, leases)))
        self._unheld: Sequence[int] | None = None

    @property
    def unheld(self) -> Sequence[int]:
        """Ids of pending jobs that are not shown as held by us, ascending."""
        if self._unheld is None:
            self._unheld = [one.job.job_id for one in self.pending if not one.held_by_us]
        return self._unheld

    def after(
        self, by_id: Mapping[int, JobStatus], renewed: Collection[int], gone: Collection[int]
    ) -> Standing:
        """The jobs as they are a round later: all but ``renewed`` and ``gone`` are as here."""
        idle = not self.holding and all([by_id[job_id].lease is None for job_id in renewed])  # noqa: C419 - quicker
        found = Standing(by_id, Changes(earlier=self.stamp, renewed=renewed, gone=gone), idle)
        if idle and self._unheld is not None:
            before = set(self._unheld).difference(gone, renewed)
            new = [job_id for job_id in renewed if not by_id[job_id].held_by_us]
            found._unheld = sorted(before.union(new)) if before or new else ()
        return found


class Ascending:
    """Reasons that come in the order of job ids, so that nobody need sort them; kept with a round.

    ``entered`` are the jobs that have one and had none among those of ``earlier``, the round of
    that standing; None where that is not known.
    """

    __slots__ = ("earlier", "entered", "reasons")

    def __init__(
        self, reasons: Mapping[int, Reason], earlier: Stamp | None, entered: Collection[int]
    ) -> None:
        self.reasons = reasons
        self.earlier = earlier
        self.entered = entered

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot, waiting: Mapping[int, Reason]) -> Ascending | None:
        """What is known of just these reasons in the round of ``snapshot``, if anything."""
        found = snapshot.derived.get(cls)
        return found if isinstance(found, cls) and found.reasons is waiting else None


def standing(snapshot: Snapshot) -> Standing:
    """The jobs of ``snapshot`` by what they hold: the same object whenever asked."""
    found = snapshot.derived.get(Standing)
    if not isinstance(found, Standing):
        by_id = {status.job.job_id: status for status in snapshot.jobs}
        found = snapshot.derived[Standing] = Standing(by_id)
    return found


def status_of(snapshot: Snapshot) -> Mapping[int, JobStatus]:
    """Job statuses by job id, ascending."""
    return standing(snapshot).by_id


def inherit(snapshot: Snapshot, earlier: Snapshot) -> None:
    """Let ``snapshot`` use what was derived from the nodes of ``earlier`` if they are the same.

    What follows from the nodes alone, like the demand of a profile on a kind of node, need not be
    computed anew in every round. It changes no decision.
    """
    if snapshot.nodes == earlier.nodes:
        object.__setattr__(snapshot, "_of_nodes", earlier.of_nodes)
        object.__setattr__(snapshot, "_usable", earlier.usable)
        object.__setattr__(snapshot, "_by_name", earlier.nodes_by_name)


def held(status: JobStatus) -> Placement | None:
    """The placement that the job holds and may keep; None when it will be placed anew.

    A stopping or ending job holds GPUs still, but they are on their way back.
    """
    lease = status.lease
    return None if lease is None or status.phase in _ON_THE_WAY_BACK else lease.placement


def is_frozen(status: JobStatus, snapshot: Snapshot) -> bool:
    """Whether nothing about the job's placement may change.

    That is so while it starts, when no wrapper obeys our leases, and when a node of it is down or
    drains: others cannot use what it holds there, so moving it would only cost its progress.
    """
    placement = held(status)
    return placement is not None and keeps_all(status, placement, snapshot.usable)


def keeps_all(status: JobStatus, placement: Placement, usable: Set[str]) -> bool:
    """``is_frozen`` of a job that holds ``placement``, with the names of the usable nodes."""
    if status.phase is _STARTING or not status.job.wrapped:
        return True
    for name, _ in placement.shares:  # noqa: SIM110 - a generator here costs a tenth of a decision
        if name not in usable:
            return True
    return False


def is_pinned(status: JobStatus, snapshot: Snapshot) -> bool:
    """Whether the job keeps its nodes and GPUs, ahead of every policy."""
    if held(status) is None:
        return False
    return not status.job.preemptible or is_frozen(status, snapshot)
