"""Keeps measured profiles true while jobs run, and notices when a job is not the same any more."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from slurm_synergy.cluster import Clock
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.core.model import JobPhase, JobStatus, Profile, ProfileOrigin, Snapshot
from slurm_synergy.core.resources import Resources
from slurm_synergy.profiler.evidence import Evidence, StoredProfile
from slurm_synergy.profiler.refining import (
    OTHER_PHASE,
    Pace,
    Sums,
    deviation,
    pace_between,
    refined,
)

__all__ = ["ProfileWriter", "Refiner"]

_LOG = logging.getLogger(__name__)
_SHORTEST_S = 60.0
_WINDOWS = 3
# Less than this is not worth a write, nor another plan.
_WORTH_WRITING = 0.02


class ProfileWriter(Protocol):
    """The ledger, as far as a refiner needs it."""

    def stored_profile(self, key: str) -> StoredProfile | None:
        """What is kept under a key, with what it rests on."""
        ...

    def save_profile(self, profile: Profile, evidence: Evidence | None = None) -> None:
        """Keep a profile under its key; durable on return."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    generation: int
    at_s: float
    sums: tuple[Sums, ...]


class Refiner:
    """Compares the pace of running jobs with their profiles, from round to round.

    Not thread-safe: its user holds a lock.
    """

    def __init__(self, leases: LeaseBook, store: ProfileWriter, clock: Clock) -> None:
        self._leases, self._store, self._clock = leases, store, clock
        self._marks: dict[int, _Mark] = {}
        self._off: dict[int, int] = {}
        # As stored when the first step was taken, and as it is now.
        self._pending: dict[str, tuple[StoredProfile, StoredProfile]] = {}

    def look(self, snapshot: Snapshot) -> frozenset[int]:
        """Learn from the time since the last look; jobs that are in another phase since.

        Raises LedgerError when something worth writing cannot be written.
        """
        changed = set()
        running = [
            status
            for status in snapshot.jobs
            if status.phase is JobPhase.RUNNING
            and status.profile.origin is ProfileOrigin.MEASURED
            and status.profile.pipeline is not None
        ]
        known = {status.job.job_id for status in running}
        self._marks = {one: mark for one, mark in self._marks.items() if one in known}
        self._off = {one: count for one, count in self._off.items() if one in known}
        for status in running:
            pace = self._pace(status)
            if pace is not None and self._takes_in(status, pace):
                changed.add(status.job.job_id)
        self._write()
        return frozenset(changed)

    def _pace(self, status: JobStatus) -> Pace | None:
        """The job's pace since its mark; a new mark when that was long enough ago."""
        job_id, now_s = status.job.job_id, self._clock.now_s()
        lease = self._leases.lease(job_id)
        if lease is None or self._leases.probing(job_id) is not None:
            self._marks.pop(job_id, None)
            return None
        mark = self._marks.get(job_id)
        same = mark is not None and mark.generation == lease.generation
        if mark is not None and same and now_s - mark.at_s < _SHORTEST_S:
            return None
        sums = self._leases.sums(job_id)
        self._marks[job_id] = _Mark(generation=lease.generation, at_s=now_s, sums=sums)
        return pace_between(mark.sums, sums) if mark is not None and same else None

    def _takes_in(self, status: JobStatus, pace: Pace) -> bool:
        """Refine the job's profile; True when the job has been another one for a while."""
        job_id, key = status.job.job_id, status.profile.key
        lease, stored = self._leases.lease(job_id), self._store.stored_profile(key)
        kept = self._so_far(stored) if stored is not None else None
        if lease is None or stored is None or kept is None or kept.evidence is None:
            return False
        if kept.evidence.owner_uid != self._leases.owner_of(job_id):
            return False
        shares: Sequence[Resources] = [share for _, share in lease.placement.shares]
        gpu_type = lease.placement.gpu_type
        off = deviation(kept.profile, pace, gpu_type, shares)
        if off is None:
            return False
        if abs(off) <= OTHER_PHASE:
            self._off.pop(job_id, None)
            better = refined(kept.profile, pace, gpu_type, shares)
            self._pending[key] = (stored, replace(kept, profile=better))
            return False
        self._off[job_id] = self._off.get(job_id, 0) + 1
        if self._off[job_id] < _WINDOWS:
            return False
        del self._off[job_id]
        _LOG.info(
            "job %d: %.0f %% %s than its profile %r says: it has changed",
            *(job_id, 100 * abs(off), "faster" if off > 0 else "slower", key),
        )
        return True

    def _so_far(self, stored: StoredProfile) -> StoredProfile:
        """What is stored with all steps since."""
        base, pending = self._pending.get(stored.profile.key, (stored, stored))
        return pending if base == stored else stored

    def _write(self) -> None:
        """Write what has moved enough; the rest goes on gathering."""
        for key, (base, pending) in list(self._pending.items()):
            if self._store.stored_profile(key) != base:
                del self._pending[key]  # forgotten, measured anew or imported meanwhile
            elif _moved(base.profile, pending.profile) >= _WORTH_WRITING:
                self._store.save_profile(pending.profile, pending.evidence)
                del self._pending[key]


def _moved(before: Profile, now: Profile) -> float:
    """By which fraction rates differ at most."""
    ratios = [now.gpu_rate_per_gpu[kind] / rate for kind, rate in before.gpu_rate_per_gpu.items()]
    if before.pipeline is not None and now.pipeline is not None:
        old, new = before.pipeline.preprocess, now.pipeline.preprocess
        ratios += [b[1] / a[1] for a, b in zip(old, new, strict=True)]
    return max((abs(ratio - 1) for ratio in ratios), default=0.0)
