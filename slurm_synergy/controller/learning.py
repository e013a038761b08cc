"""Learns from elastic jobs, while they run, how fast they would be on other GPUs.

Reports come with the renewals of leases; they are checked and gathered at once. What follows from
them, and the writing, is done by a thread of its own: no call and no round waits for a fit. What
it found is believed by the next round.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Protocol

from slurm_synergy.cluster import Clock, Observation, ObservedJob
from slurm_synergy.controller.learning_points import (
    Learned,
    Point,
    TrainingReport,
    believed,
    overlaid,
    taken_in,
    times_of,
)
from slurm_synergy.controller.learning_steps import Progress, StepWindow
from slurm_synergy.controller.learning_store import Lesson, Subject
from slurm_synergy.controller.profiling_results import is_anothers_own_key, own_key
from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.goodput import ThroughputModel
from slurm_synergy.core.model import Elasticity, Placement, Plan, Snapshot
from slurm_synergy.errors import ModelError, SynergyError
from slurm_synergy.profiler.evidence import StoredProfile
from slurm_synergy.profiler.fit import fit_throughput

__all__ = ["JobTold", "Learner", "LessonStore"]

_LOG = logging.getLogger(__name__)
_QUIET_S = 600.0  # a job's refusals are not logged more often
_MOST_FITS = 1024  # remembered by what they were made from
# Means that moved less than this fraction bring no other model, and no other plan.
_WORTH_FITTING = 0.02


class LessonStore(Protocol):
    """The ledger, as far as it concerns what is learned of elastic jobs."""

    def lesson(self, subject: Subject) -> Lesson | None:
        """What is kept of a job or a profile key."""
        ...

    def save_lessons(self, lessons: list[Lesson]) -> None:
        """Keep what was learned, all of it or nothing; durable on return."""
        ...

    def stored_profile(self, key: str) -> StoredProfile | None:
        """What is kept under a profile key."""
        ...

    def profile_key(self, job_id: int) -> str:
        """Which profile is that of a job that names none itself; empty when not known."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTold:
    """A report of a running job, with what we know ourselves: whose it is and where it runs.

    ``report`` is None from a job that tells only its ``progress``; ``program`` names what it runs,
    empty where not known.
    """

    job_id: int
    owner_uid: int
    placement: Placement
    report: TrainingReport | None = None
    progress: Progress = field(default_factory=Progress)
    program: str = ""


@dataclass(slots=True)
class _Job:
    lesson: Lesson
    window: StepWindow = field(default_factory=StepWindow)
    tells: bool = False
    last: TrainingReport | None = None
    told_s: float = 0.0
    refused: int = 0
    why: str = ""
    complained_s: float | None = None


class Learner:
    """Takes in reports of elastic jobs, and writes what follows; an audience of the loop.

    Thread-safe. ``fit`` makes a model of the points of one GPU type, and may take its time. A job
    may report every ``least_between_s`` seconds; what comes sooner waits at its launcher.
    """

    def __init__(
        self,
        store: LessonStore,
        clock: Clock,
        *,
        least_between_s: float = 5.0,
        fit: Callable[[tuple[Point, ...]], ThroughputModel] | None = None,
    ) -> None:
        self._store, self._clock, self._fit = store, clock, fit or _fitted
        self._least_between_s = least_between_s
        self._lock = threading.RLock()
        self._jobs: dict[int, _Job] = {}
        self._seen: dict[int, ObservedJob] = {}
        # Looked at without the lock, with every renewal of every job; replaced whole.
        self._steady: frozenset[int] = frozenset()
        self._keys: dict[str, Lesson] = {}
        self._due: dict[int, None] = {}
        self._fits: dict[object, ThroughputModel] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="learning")
        self._work: Future[None] | None = None
        self._closed = False

    # Of the lease book

    def reported(self, told: JobTold) -> None:
        """A job has told something; refused is what cannot be true, and changes nothing.

        Progress alone says something only of elastic jobs whose batch never changes.
        """
        if told.report is None and told.job_id not in self._steady:
            return
        with self._lock:
            if self._closed:
                return
            try:
                self._hear(told)
            except SynergyError as err:
                # The lease must be renewed whatever becomes of learning.
                _LOG.warning("job %d: what it told is not kept: %s", told.job_id, err.in_short)

    def surveyed(self, told: JobTold) -> None:
        """What was found out about a job's steps on our own order; like ``reported``."""
        with self._lock:
            if self._closed or told.report is None:
                return
            try:
                self._take_in(self._job(told), told, told.report)
            except SynergyError as err:
                _LOG.warning("job %d: what was measured is not kept: %s", told.job_id, err.in_short)

    def local_batches(self, job_id: int, gpu_type: str) -> tuple[int, frozenset[int]] | None:
        """What one copy of the job's model takes in a pass on GPUs of that type.

        The most samples that were told to have room, and the sizes whose time is known, of this
        job or others with its key; None before it has told anything of its steps.
        """
        with self._lock:
            job = self._jobs.get(job_id)
            most = job.lesson.learned.local_most.get(gpu_type, 0) if job is not None else 0
            if job is None or not job.tells or not most:
                return None
            key = job.lesson.subject.key
            others = self._keys.get(key) or self._store.lesson(Subject(job_id=0, key=key))
            both = overlaid(job.lesson.learned, others.learned if others and key else None)
            return most, frozenset(
                point.local_batch
                for point in both.points
                if point.gpu_type == gpu_type and not point.whole
            )

    def settle(self, timeout_s: float) -> bool:
        """Wait until all reports so far are believed; False if that takes longer."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            with self._lock:
                work = self._work
                if not self._due and (work is None or work.done()):
                    return True
            if work is not None:
                try:
                    work.result(max(0.0, deadline_s - time.monotonic()))
                except TimeoutError:
                    return False
        return False

    def close(self) -> None:
        """Believe and write what was told so far, and end the thread; idempotent."""
        with self._lock:
            self._closed = True
        self._pool.shutdown(wait=True)

    def describe(self, job_id: int) -> Mapping[str, object] | None:
        """What is learned of a job, as JSON values; None when it never told anything."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None:
                return None
            learned = job.lesson.learned
            return {
                "points": len(learned.points),
                "explored_gpus": dict(learned.explored),
                "told_s": round(max(0.0, self._clock.now_s() - job.told_s), 1),
                "refused": job.refused,
                "refused_because": job.why or None,
            }

    # Audience of the loop

    def observed(self, observation: Observation) -> None:
        """Slurm has been read: note profile keys, and forget jobs that are gone."""
        with self._lock:
            self._seen = {seen.job.job_id: seen for seen in observation.jobs}
            self._steady = frozenset(
                job_id
                for job_id, seen in self._seen.items()
                if seen.job.elasticity is Elasticity.STRONG_SCALING
            )
            self._jobs = {one: job for one, job in self._jobs.items() if one in self._seen}
            used = {job.lesson.subject.key for job in self._jobs.values()}
            self._keys = {key: one for key, one in self._keys.items() if key in used}

    def publish(self, snapshot: Snapshot, plan: Plan, took_s: Mapping[str, float]) -> None:
        """A round has been run: nothing to do."""

    def failed(self, text: str) -> None:
        """The controller cannot work just now: nothing to do."""

    # Inside; the lock is held

    def _hear(self, told: JobTold) -> None:
        job, now_s = self._job(told), self._clock.now_s()
        if told.report is not None:
            job.tells = True
        elif not job.tells:
            made = job.window.note(told.progress, now_s, self._replicas(told))
            told = replace(told, report=made)
        if told.report is None or job.last == told.report:
            return  # launchers repeat what they know until there is something new
        if job.last is not None and 0 <= now_s - job.told_s < self._least_between_s:
            return
        job.last, job.told_s = told.report, now_s
        self._take_in(job, told, told.report)

    def _take_in(self, job: _Job, told: JobTold, report: TrainingReport) -> None:
        try:
            learned = taken_in(job.lesson.learned, report, told.placement)
        except ModelError as err:
            self._refuse(job, told.job_id, str(err))
            return
        job.lesson = replace(job.lesson, learned=learned, told_s=self._clock.now_s())
        self._teach_key(told, report, job.lesson.subject.key)
        self._due[told.job_id] = None
        if self._work is None or self._work.done():
            self._work = self._pool.submit(self._learn)

    def _job(self, told: JobTold) -> _Job:
        job_id = told.job_id
        seen = self._seen.get(job_id)
        key = (seen.profile_key if seen else "") or self._store.profile_key(job_id)
        key = key or own_key(told.owner_uid, told.program)
        subject = Subject(job_id=job_id, key=key)
        job = self._jobs.get(job_id)
        if job is None:
            kept = self._store.lesson(subject)
            if kept is None and key:
                kept = self._store.lesson(Subject(job_id=job_id, key=""))
            job = self._jobs[job_id] = _Job(lesson=kept or _nothing(subject, told.owner_uid))
        if job.lesson.subject != subject:
            job.lesson = replace(job.lesson, subject=subject)
        return job

    def _replicas(self, told: JobTold) -> int:
        """How many copies of its model a job has, as far as its hints say."""
        seen = self._seen.get(told.job_id)
        return max(told.placement.gpus // (seen.job.scale_unit if seen else 1), 1)

    def _teach_key(self, told: JobTold, report: TrainingReport, key: str) -> None:
        """Let other jobs with the key profit, if its owner may teach it."""
        subject = Subject(job_id=0, key=key)
        if not key or not self._may_teach(told.owner_uid, key):
            return
        kept, known = self._store.lesson(subject), self._keys.get(key)
        if known is None or (kept is None and known.scaling is not None):
            known = kept  # new here, or forgotten meanwhile by a user's word
        if known is not None and known.owner_uid != told.owner_uid:
            return
        known = known or _nothing(subject, told.owner_uid)
        learned = taken_in(known.learned, report, told.placement)
        self._keys[key] = replace(known, learned=learned, told_s=self._clock.now_s())

    def _may_teach(self, owner_uid: int, key: str) -> bool:
        """Whether jobs of that owner may change what others with the key start with."""
        if is_anothers_own_key(key, owner_uid):
            return False
        kept = self._store.stored_profile(key)
        if kept is None:
            return CATALOGUE.get(key) is None
        return kept.evidence is not None and kept.evidence.owner_uid == owner_uid

    def _refuse(self, job: _Job, job_id: int, why: str) -> None:
        job.refused, job.why, now_s = job.refused + 1, why, self._clock.now_s()
        if job.complained_s is None or now_s - job.complained_s >= _QUIET_S:
            job.complained_s = now_s
            _LOG.warning("job %d: a report of its training is not believed: %s", job_id, why)

    # In the thread

    def _learn(self) -> None:
        """Believe and write what is due, until nothing is."""
        while True:
            with self._lock:
                if not self._due:
                    self._work = None
                    return
                job_id = next(iter(self._due))
                del self._due[job_id]
                job = self._jobs.get(job_id)
                if job is None:
                    continue  # gone meanwhile
                lesson, of_key = job.lesson, self._keys.get(job.lesson.subject.key)
            try:
                self._believe(lesson, of_key)
            except SynergyError as err:
                # It is still known here, and written with the next report.
                _LOG.warning("job %d: what it told is not kept: %s", job_id, err.in_short)
            except Exception:  # noqa: BLE001 - a fit must not end learning
                _LOG.exception("job %d: a mistake of the program in learning", job_id)

    def _believe(self, lesson: Lesson, of_key: Lesson | None) -> None:
        subject = lesson.subject
        others = of_key or (
            self._store.lesson(Subject(job_id=0, key=subject.key)) if subject.key else None
        )
        both = overlaid(lesson.learned, others.learned if others else None)
        steady = subject.job_id in self._steady
        scaling = believed(
            both,
            self._model,
            lesson.scaling,
            initial_batch=self._initial_batch(subject.job_id),
            steady=steady,
        )
        new = [replace(lesson, scaling=scaling)]
        if of_key is not None:
            scaling = believed(of_key.learned, self._model, of_key.scaling, steady=steady)
            new.append(replace(of_key, scaling=scaling))
        with self._lock:
            job = self._jobs.get(subject.job_id)
            if job is None:
                return  # it is gone: Slurm has forgotten it, and so have we
            self._store.save_lessons(new)
            # Reports may have come in meanwhile; they are due themselves.
            job.lesson = replace(job.lesson, scaling=new[0].scaling)
            for one in new[1:]:
                kept = self._keys.get(one.subject.key)
                if kept is not None:
                    self._keys[one.subject.key] = replace(kept, scaling=one.scaling)

    def _initial_batch(self, job_id: int) -> int:
        """What the hints of a job say that it was tuned for; 0 where they do not."""
        with self._lock:
            seen = self._seen.get(job_id)
        return seen.job.batch[0] if seen is not None and seen.job.batch is not None else 0

    def _model(self, points: tuple[Point, ...]) -> ThroughputModel:
        alike = tuple((one.place, _grain(one.gradient_s), _grain(one.step_s)) for one in points)
        found = self._fits.get(alike)
        if found is None:
            if len(self._fits) >= _MOST_FITS:
                self._fits.clear()
            found = self._fits[alike] = self._fit(points)
        return found


def _nothing(subject: Subject, owner_uid: int) -> Lesson:
    return Lesson(subject=subject, owner_uid=owner_uid, told_s=0.0, learned=Learned())


def _grain(seconds: float) -> int:
    return round(math.log(seconds) / _WORTH_FITTING)


def _fitted(points: tuple[Point, ...]) -> ThroughputModel:
    return fit_throughput(times_of(points))
