"""What the cluster shows and what we remember, as one snapshot.

Most of it is as it was a round ago: ``Known`` is what may be taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from slurm_synergy.cluster import News, Observation, ObservedJob, Record
from slurm_synergy.core.model import (
    Enforcement,
    JobPhase,
    JobStatus,
    Lease,
    Node,
    Placement,
    Profile,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.pipeline import fit_to_job
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.snapshot import Standing, inherit, status_of
from slurm_synergy.core.values import maker
from slurm_synergy.errors import ModelError

__all__ = ["Known", "build_snapshot"]

_NAME, _SEEN_ID = attrgetter("name"), attrgetter("job.job_id")
_FORGOTTEN_AT_LEAST = 1000
# Until Python 3.12, looking up a member of an enumeration takes longer than comparing it.
_PENDING = JobPhase.PENDING
# Of a job that holds nothing; with its defaults there is nothing to check.
_PENDING_STATUS = maker(JobStatus, checked=False)
_SNAPSHOT = maker(Snapshot, checked=False)


class Known:
    """What a round may take over from the one before it; changes no decision.

    The statuses of pending jobs of which nothing has changed, known by the very objects that they
    were made from or by the cluster's news, and what follows from the nodes alone. Only a cluster
    and records that show an unchanged job by the same objects gain from it.
    """

    __slots__ = (
        "_began_after_s",
        "_made",
        "_number",
        "_open",
        "_standing",
        "_statuses",
        "snapshot",
    )

    def __init__(self, began_after_s: float | None = None) -> None:
        self._began_after_s = began_after_s
        self.snapshot: Snapshot | None = None
        # Of pending jobs, with what they were made from.
        self._made: dict[int, tuple[ObservedJob, Record | None, Profile | None, JobStatus]] = {}
        # All of the last snapshot, ascending by id, and the number of its observation if it has
        # one; and those whose status may be another one though nothing is new of them.
        self._statuses: dict[int, JobStatus] = {}
        self._number: int | None = None
        self._open: dict[int, ObservedJob] = {}
        self._standing: Standing | None = None

    @property
    def previous_s(self) -> float | None:
        """When the last round was, in epoch seconds; None if there was none.

        One that begins anew is told by ``began_after_s``.
        """
        return self._began_after_s if self.snapshot is None else self.snapshot.now_s

    def standing(
        self,
        observation: Observation,
        records: Mapping[int, Record],
        profile_of: Callable[[str], Profile | None],
        now_s: float,
    ) -> Standing:
        """The status of each job, ascending by id, and what of them is new."""
        news, before = observation.news, self._standing
        goes_on = news is not None and self._goes_on(news)
        still_open = self._open.keys()
        statuses = self._make(observation, records, profile_of, now_s).copy()
        if before is None or news is None or not goes_on:
            self._standing = Standing(statuses)
        else:
            renewed = still_open | news.changed.keys() if still_open else news.changed.keys()
            gone = frozenset(news.gone)
            self._standing = before.after(statuses, frozenset(renewed - gone), gone)
        return self._standing

    def _goes_on(self, news: News) -> bool:
        """Whether ``news`` are what is new since the last round."""
        return self._number is not None and news.number == self._number + 1

    def _make(
        self,
        observation: Observation,
        records: Mapping[int, Record],
        profile_of: Callable[[str], Profile | None],
        now_s: float,
    ) -> dict[int, JobStatus]:
        """All statuses, those that may have changed made anew."""
        todo, found = self._unsettled(observation)
        last, is_sorted = next(reversed(found), -1), True
        is_silent = observation.news is None
        for seen in todo:
            job = seen.job
            job_id = job.job_id
            record = records.get(job_id)
            if job_id not in found:
                is_sorted = is_sorted and job_id > last
                last = max(last, job_id)
            profile = None if record is None else record.profile
            if record is None or profile is None or is_silent or seen.phase is not _PENDING:
                found[job_id] = self._status(seen, record, profile_of, observation, now_s)
                continue
            found[job_id] = _PENDING_STATUS(  # what _status would make, in a third of the time
                job=job,
                profile=profile if profile.pipeline is None else fit_to_job(profile, job),
                done_samples=record.done_samples,
                attained_service_gpu_s=record.attained_service_gpu_s,
                restarts=seen.restarts,
                blocked=seen.blocked,
                held_by_us=seen.held_by_us,
                held_s=record.held_s,
            )
        if len(found) != len(observation.jobs):
            raise ModelError("the cluster shows a job twice, or its news are not of what it shows")
        self._statuses = found if is_sorted else dict(sorted(found.items()))
        self._number = observation.news.number if observation.news is not None else None
        return self._statuses

    def _status(
        self,
        seen: ObservedJob,
        record: Record | None,
        profile_of: Callable[[str], Profile | None],
        observation: Observation,
        now_s: float,
    ) -> JobStatus:
        """The status of a job, as before if it was made from the very same."""
        job_id = seen.job.job_id
        self._open[job_id] = seen
        profile = record.profile if record is not None else None
        if profile is None:
            profile = profile_of(seen.profile_key or (record.profile_key if record else ""))
        before = self._made.get(job_id)
        if (
            before is not None
            and before[0] is seen
            and before[1] is record
            and before[2] is profile
        ):
            return before[3]
        mine, believed = record or Record(job_id=job_id), profile or Profile()
        status = _status(seen, mine, believed, observation, now_s)
        if seen.phase is _PENDING:
            self._made[job_id] = (seen, record, profile, status)
        return status

    def _unsettled(
        self, observation: Observation
    ) -> tuple[Collection[ObservedJob], dict[int, JobStatus]]:
        """The jobs to look at, and the statuses of the others."""
        news, still_open = observation.news, self._open
        goes_on = news is not None and self._goes_on(news)
        self._open, self._number = {}, None
        if news is None or not goes_on:
            return sorted(observation.jobs, key=_SEEN_ID), {}
        found = self._statuses
        for job_id in news.gone:
            found.pop(job_id, None)
            self._made.pop(job_id, None)
            still_open.pop(job_id, None)
        return {**still_open, **news.changed}.values(), found

    def finish(self, snapshot: Snapshot) -> None:
        """End with ``snapshot``; forget jobs that are gone when there are many of them."""
        if self.snapshot is not None:
            inherit(snapshot, self.snapshot)
        self.snapshot = snapshot
        if len(self._made) > 2 * len(snapshot.jobs) + _FORGOTTEN_AT_LEAST:
            now = status_of(snapshot)
            self._made = {job_id: kept for job_id, kept in self._made.items() if job_id in now}


def build_snapshot(
    observation: Observation,
    records: Mapping[int, Record],
    *,
    round_number: int,
    now_s: float,
    round_s: float,
    profile_of: Callable[[str], Profile | None],
    draining: bool = False,
    previous_s: float | None = None,
    known: Known | None = None,
) -> Snapshot:
    """Merge what the cluster shows with what we remember.

    The cluster is the truth for what runs and where; our records for leases, progress, and for
    jobs that were told to stop. ``profile_of`` finds the profile for a profile key,
    ``previous_s`` is as in the snapshot. Raises ModelError when the observation contradicts itself.
    """
    known = known or Known()
    jobs = known.standing(observation, records, profile_of, now_s)
    nodes = tuple(sorted(observation.nodes, key=_NAME))
    before = known.snapshot
    # Jobs are distinct and in order as they come, and nodes that were checked before need not be.
    make = Snapshot if before is None or nodes != before.nodes else _SNAPSHOT
    snapshot = make(
        round=round_number,
        now_s=now_s,
        round_s=round_s,
        nodes=nodes,
        jobs=jobs.jobs,
        enforcement=observation.enforcement,
        draining=draining,
        previous_s=previous_s,
    )
    snapshot.derived[Standing] = jobs
    known.finish(snapshot)
    return snapshot


def _status(
    seen: ObservedJob, record: Record, profile: Profile, observation: Observation, now_s: float
) -> JobStatus:
    lease, phase = None, _PENDING
    if seen.phase is not _PENDING:
        lease = _lease(seen, record, observation, now_s)
        phase = _phase(seen, record) if lease else _PENDING
    return JobStatus(
        job=seen.job,
        profile=fit_to_job(profile, seen.job),
        phase=phase,
        lease=lease if phase is not _PENDING else None,
        done_samples=record.done_samples,
        attained_service_gpu_s=record.attained_service_gpu_s,
        restarts=seen.restarts,
        blocked=seen.blocked if seen.phase is _PENDING else _blocked(seen, phase, record),
        held_by_us=seen.held_by_us,
        held_s=record.held_s,
    )


def _phase(seen: ObservedJob, record: Record) -> JobPhase:
    active = (JobPhase.RUNNING, JobPhase.STARTING)
    if record.stopping is not None and seen.phase in active:
        return JobPhase.STOPPING
    return seen.phase


def _blocked(seen: ObservedJob, phase: JobPhase, record: Record) -> Reason | None:
    if seen.blocked is not None:
        return seen.blocked
    if phase is JobPhase.ENDING and record.stopping is None:
        # It ends by itself, most likely for good: no place is kept for it.
        return Reason(code=ReasonCode.GPUS_BUSY, text="ends; its GPUs are being freed")
    if phase is seen.phase or phase is not _PENDING:
        return None
    # The cluster says that it starts or ends, but not where: wait until that is over.
    return Reason(code=ReasonCode.GPUS_BUSY, text=f"the cluster reports it as {seen.phase.value}")


def _lease(
    seen: ObservedJob, record: Record, observation: Observation, now_s: float
) -> Lease | None:
    """The job's lease: ours, if the cluster shows the job where we put it, else an adopted one."""
    allocated = tuple((name, share) for name, share in seen.allocated if share.gpus)
    if not allocated:
        return record.lease
    layout = tuple(sorted((name, share.gpus) for name, share in allocated))
    if record.lease is not None and record.lease.placement.gpu_layout == layout:
        return record.lease
    nodes = {node.name: node for node in observation.nodes}
    return _adopt(seen, allocated, nodes, observation.enforcement, now_s)


def _adopt(
    seen: ObservedJob,
    allocated: Sequence[tuple[str, Resources]],
    nodes: Mapping[str, Node],
    enforcement: Enforcement,
    now_s: float,
) -> Lease:
    """A lease for a job that runs, but not by our records (a lost ledger, an operator's start).

    It is taken to hold its proportional share of cores, as it does when no controller answers.
    """
    shares = []
    for name, share in allocated:
        cpus = share.cpus
        if not seen.job.wrapped:
            cpus = len(seen.cores.get(name, ())) or share.cpus
        elif enforcement is not Enforcement.REQUEUE and name in nodes:
            cpus = min(cpus, max(nodes[name].proportional(share.gpus).cpus, 1))
        shares.append((name, replace(share, cpus=cpus)))
    types = [nodes[name].gpu_type for name, _ in shares if name in nodes]
    gpu_type = types[0] if types else seen.gpu_type
    return Lease(
        job_id=seen.job.job_id,
        generation=0,
        placement=Placement(job_id=seen.job.job_id, gpu_type=gpu_type, shares=tuple(shares)),
        expires_s=now_s,
        cores={} if seen.job.wrapped else dict(seen.cores),
        floor={} if seen.job.wrapped else dict(seen.cores),
        granted=dict(allocated),
    )
