"""The optimistic profiler, live: jobs whose speed is not known are measured while they run.

The search (``profiler.sweep``) runs here, since a job may have many tasks on many nodes whose cores
must change together; its launchers measure and answer. What is known of a sweep is in memory only:
a sweep that the job, its launcher or this controller does not live to see the end of leaves
nothing behind. What it found is in the ledger before anything is planned with it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Protocol

from slurm_synergy.cluster import Clock, Observation, ObservedJob
from slurm_synergy.config import ProfilingSettings
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.controller.probes import DataRead, Measured
from slurm_synergy.controller.profiling_data import data_of
from slurm_synergy.controller.profiling_results import (
    MOST_OF_A_USER,
    Target,
    evidence_for,
    is_anothers_own_key,
    is_known,
    is_somebody_elses,
    kept_profile,
    least_free,
    own_key,
    span_of,
    target_of,
)
from slurm_synergy.controller.profiling_runs import FEWEST_POINTS, LEAST_POINT_S, Past, Run
from slurm_synergy.controller.refining import ProfileWriter, Refiner
from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.model import (
    JobPhase,
    Lease,
    Node,
    Plan,
    Profile,
    Snapshot,
)
from slurm_synergy.errors import SynergyError
from slurm_synergy.profiler.filling import held_up_elsewhere
from slurm_synergy.profiler.sweep import Confidence, Sweep, SweepSpan

__all__ = ["ProfileStore", "Profiler"]

_LOG = logging.getLogger(__name__)
_MOST_TRIES = 3
_RETRY_S = 60.0


class ProfileStore(ProfileWriter, Protocol):
    """The ledger, as far as it concerns profiles."""

    def profile(self, key: str) -> Profile | None:
        """The best known profile for a key."""
        ...

    def profiles_of(self, owner_uid: int) -> tuple[str, ...]:
        """Keys of the profiles of one user, the oldest measurement first."""
        ...

    def forget_profile(self, key: str) -> bool:
        """Drop what is kept under a key."""
        ...

    def set_profile_key(self, job_id: int, key: str) -> None:
        """Remember which profile is that of a job that names none itself."""
        ...


class Profiler:
    """Sees to it that jobs get measured; an audience of the loop. Thread-safe.

    ``acting`` tells whether leases may be changed at all now, ``later`` which jobs have something
    else to find out first; ``numbers`` are those of probes.
    """

    def __init__(
        self,
        settings: ProfilingSettings,
        *,
        leases: LeaseBook,
        store: ProfileStore,
        clock: Clock,
        acting: Callable[[], bool] = lambda: True,
        later: Callable[[ObservedJob], bool] = lambda seen: False,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self._settings, self._leases, self._store = settings, leases, store
        self._clock, self._acting, self._later = clock, acting, later
        self._lock = threading.RLock()
        self._runs: dict[int, Run] = {}
        self._past: dict[int, Past] = {}
        self._refiner = Refiner(leases, store, clock)
        # Above those of a controller before this one.
        self._numbers = numbers or count(int(clock.now_s() * 1000) + 1)

    def reload(self, settings: ProfilingSettings) -> None:
        """Other settings from now on; sweeps that are not wanted any more end."""
        with self._lock:
            self._settings = settings
            if not settings.enabled:
                for run in tuple(self._runs.values()):
                    self._drop(run, "profiling was switched off")

    # Audience of the loop

    def observed(self, observation: Observation) -> None:
        """Slurm has been read: end what cannot go on, begin what can."""
        with self._lock:
            now_s = self._clock.now_s()
            for run in tuple(self._runs.values()):
                self._look_after(run, now_s)
            if self._settings.enabled and self._acting() and observation.enforcement.in_place:
                self._begin_some(observation, now_s)

    def publish(self, snapshot: Snapshot, plan: Plan, took_s: Mapping[str, float]) -> None:
        """A round has been run: see whether jobs are as fast as their profiles say."""
        with self._lock:
            if not self._settings.enabled or not self._acting():
                return
            try:
                changed = self._refiner.look(snapshot)
            except SynergyError as err:
                _LOG.warning("profiles are not refined: %s", err.in_short)
                return
            for job_id in changed:
                past = self._past_of(job_id)
                past.stale, past.settled, past.tries = True, False, 0

    def failed(self, text: str) -> None:
        """The controller cannot work: sweeps end by themselves when nobody answers."""

    # Of others

    def measured(self, job_id: int) -> None:
        """All tasks of the job have answered its probe: take it in and ask for the next."""
        with self._lock:
            run, probe = self._runs.get(job_id), self._leases.probing(job_id)
            if run is None or probe is None or probe.number != run.number:
                return
            answers = self._leases.answers(job_id)
            if not answers:
                return
            try:
                self._take_in(run, answers)
            except SynergyError as err:
                self._drop(run, err.in_short)

    def describe(self, job_id: int) -> Mapping[str, object] | None:
        """How far the job's sweep is, as JSON values; None while it is not measured."""
        with self._lock:
            run = self._runs.get(job_id)
            if run is None:
                return None
            return {
                "key": run.target.key,
                "cpus_per_node": run.cpus,
                "points": len(run.sweep.points),
                "most_points": self._settings.points,
                "since_s": round(self._clock.now_s() - run.began_s, 1),
            }

    # Inside; the lock is held

    def _look_after(self, run: Run, now_s: float) -> None:
        job_id, probe = run.target.job_id, self._leases.probing(run.target.job_id)
        if run.reading:
            # The search is worth keeping without it too, also of a job that has ended.
            if probe is None or probe.number != run.number:
                self._finish(run, unread="it was interrupted")
            elif now_s > run.answer_by_s:
                self._finish(run, unread="its tasks did not answer")
        elif self._leases.incarnation(job_id) != run.target.incarnation:
            self._forget(run)  # it ended, or began anew
        elif self._leases.stopping(job_id) is not None:
            self._drop(run, "the job is being stopped")
        elif probe is None or probe.number != run.number:
            if self._leases.profiling(job_id):
                self._cut(run, "its free cores went to others")
            else:
                self._drop(run, "its launcher is gone")
        elif now_s > run.answer_by_s:
            self._drop(run, "its tasks did not answer")

    def _begin_some(self, observation: Observation, now_s: float) -> None:
        wanted = set(self._leases.measurable_jobs()) - self._runs.keys()
        if not wanted:
            return
        nodes = {node.name: node for node in observation.nodes}
        for seen in observation.jobs:
            job_id = seen.job.job_id
            if job_id not in wanted or seen.phase is not JobPhase.RUNNING or not seen.job.wrapped:
                continue
            past = self._past_of(job_id)
            cold = past.cold_epoch
            if cold is not None and self._leases.epoch(job_id) <= cold:
                continue  # one epoch fills the cache
            if not past.settled and now_s >= past.not_before_s and not self._later(seen):
                try:
                    self._consider(seen, past, nodes, now_s)
                except SynergyError as err:
                    past.settled = True
                    _LOG.warning("job %d is not measured: %s", job_id, err.in_short)
        known = {seen.job.job_id for seen in observation.jobs}
        self._past = {job_id: past for job_id, past in self._past.items() if job_id in known}

    def _past_of(self, job_id: int) -> Past:
        incarnation = self._leases.incarnation(job_id)
        past = self._past.get(job_id)
        if past is None or past.incarnation != incarnation:
            past = self._past[job_id] = Past(incarnation=incarnation or 0)
        return past

    def _consider(
        self, seen: ObservedJob, past: Past, nodes: Mapping[str, Node], now_s: float
    ) -> None:
        """Begin to measure the job, unless it must wait or there is nothing to find out."""
        job_id, budget_s = seen.job.job_id, self._budget_s(seen)
        lease, told = self._leases.lease(job_id), self._leases.profiling(job_id)
        if lease is None or not told:
            return
        owner_uid = self._leases.owner_uid(job_id, past.incarnation)
        key = seen.profile_key or own_key(owner_uid, told[0].program)
        names, gpus = lease.placement.nodes, {one.gpus for _, one in lease.placement.shares}
        hopeless = budget_s < FEWEST_POINTS * LEAST_POINT_S or past.tries >= _MOST_TRIES
        if not key or len(gpus) != 1 or hopeless or is_anothers_own_key(key, owner_uid):
            past.settled = True
            return
        held = [nodes[name] for name in names if name in nodes]
        busy = {name for run in self._runs.values() for name in run.target.nodes}
        if len(held) != len(names) or not busy.isdisjoint(names):
            return
        span = span_of(seen, lease, held, self._leases.free_cores)
        kept = self._store.stored_profile(key)
        if not seen.profile_key and kept is not None:
            self._store.set_profile_key(job_id, key)
        found = self._store.profile(key) or CATALOGUE.get(key)
        known = found is not None and is_known(found, seen.job, lease.placement.gpu_type, span)
        again = past.stale or past.cold_epoch is not None
        if (known and not again) or is_somebody_elses(kept, owner_uid):
            past.settled = True
            return
        if any(run.target.key == key for run in self._runs.values()):
            return  # another job with the same key finds it out for both
        least = least_free(held, span.gpus, self._settings)
        if min(len(self._leases.free_cores(name)) for name in names) < least:
            return
        past.tries += 1
        target = target_of(
            seen, lease, nodes, key=key, owner_uid=owner_uid, incarnation=past.incarnation
        )
        self._begin(target, span, budget_s, lease, now_s)

    def _budget_s(self, seen: ObservedJob) -> float:
        limit_s = seen.job.time_limit_s
        share_s = self._settings.most_share * limit_s if limit_s else self._settings.longest_s
        return min(self._settings.longest_s, share_s)

    def _begin(
        self, target: Target, span: SweepSpan, budget_s: float, lease: Lease, now_s: float
    ) -> None:
        run = Run(
            target=target,
            sweep=Sweep(span=span, most_points=self._settings.points),
            began_s=now_s,
            deadline_s=now_s + budget_s,
            cpus=min(len(lease.cores.get(name, ())) for name in target.nodes),
        )
        self._runs[target.job_id] = run
        _LOG.info(
            "job %d: measured under %r with %d to %d cores a node, for %.0f s at most",
            *(target.job_id, target.key, span.counts[0], span.counts[-1], budget_s),
        )
        self._ask(run)

    def _ask(self, run: Run) -> None:
        """Have the next point measured; without one the sweep is over."""
        cpus, now_s = run.sweep.next_cpus, self._clock.now_s()
        if cpus is None:
            self._read_data(run, now_s)
            return
        if run.deadline_s <= now_s:
            self._cut(run, "it took too long")
            return
        probe = run.next_point(next(self._numbers), cpus, self._settings, now_s)
        if self._leases.probe(run.target.job_id, probe, cpus) is None:
            self._cut(run, "its free cores went to others")

    def _read_data(self, run: Run, now_s: float) -> None:
        """Have some of the data read, with the cores that the job has anyway."""
        lease, read_s = self._leases.lease(run.target.job_id), self._settings.read_s
        if lease is None or read_s <= 0:
            self._finish(run, unread="profiling.read_s is 0" if lease else "the job has ended")
            return
        probe = run.last_reading(next(self._numbers), read_s, now_s)
        cpus = min(len(lease.cores.get(name, ())) for name in run.target.nodes)
        if self._leases.probe(run.target.job_id, probe, cpus) is None:
            self._finish(run, unread="its cores went to others")

    def _take_in(self, run: Run, answers: tuple[Measured, ...]) -> None:
        if run.reading:
            self._finish(run, data_of(answers), unread="its launcher does not read data")
            return
        if not all(answer.steps for answer in answers):
            self._cut(run, f"its tasks could not be measured with {run.cpus} cores")
            return
        run.take_in(answers)
        self._ask(run)

    def _cut(self, run: Run, why: str) -> None:
        """End a sweep early: kept, with low confidence, when it saw enough."""
        if run.cut(why):
            self._finish(run)
        else:
            self._drop(run, why)

    def _finish(self, run: Run, data: DataRead | None = None, *, unread: str = "") -> None:
        """Write down what was found, and give the cores back; ``unread``: why without ``data``."""
        job_id, result = run.target.job_id, run.sweep.result()
        target, told = run.target, self._leases.profiling(job_id)
        try:
            if is_somebody_elses(self._store.stored_profile(target.key), target.owner_uid):
                self._drop(run, f"{target.key!r} has become somebody else's meanwhile")
                return
            profile = kept_profile(
                target,
                result,
                own_mem_mib=sum(one.own_mem_mib for one in told) / len(target.nodes),
                before=self._store.profile(target.key),
                stale=self._past_of(job_id).stale,
                data=data,
            )
            evidence = evidence_for(target, result, self._clock.now_s(), data, unread)
            self._store.save_profile(profile, evidence)
            # Every changed script has a key of its own, and names cost nothing.
            for old in self._store.profiles_of(target.owner_uid)[:-MOST_OF_A_USER]:
                self._store.forget_profile(old)
            if not target.key_is_named:
                self._store.set_profile_key(job_id, target.key)
        except SynergyError as err:
            self._drop(run, err.in_short)
            return
        self._forget(run)
        past, took_s = self._past_of(job_id), self._clock.now_s() - run.began_s
        cold = past.cold_epoch is None and bool(data and data.cached) and held_up_elsewhere(result)
        past.settled, past.stale = result.confidence is Confidence.HIGH and not cold, False
        past.cold_epoch = self._leases.epoch(job_id) if cold else None
        # Were the job to change all the time, it would still not be measured all the time.
        past.not_before_s = self._clock.now_s() + took_s / self._settings.most_share
        _LOG.info(
            "job %d: measured under %r with %d numbers of cores in %.0f s: %d cores a node reach "
            "%.0f samples/s%s",
            job_id,
            run.target.key,
            len(result.points),
            took_s,
            result.knee_cpus,
            result.rate(result.knee_cpus),
            f"; not sure: {result.why}" if result.why else "",
        )

    def _drop(self, run: Run, why: str) -> None:
        self._forget(run)
        past = self._past_of(run.target.job_id)
        past.not_before_s = self._clock.now_s() + _RETRY_S * 2.0**past.tries
        _LOG.info("job %d: not measured to the end: %s", run.target.job_id, why)

    def _forget(self, run: Run) -> None:
        self._runs.pop(run.target.job_id, None)
        self._leases.end_probe(run.target.job_id)
