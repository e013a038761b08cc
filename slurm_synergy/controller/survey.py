"""Batch sizes on arrival: an elastic job that is new on a GPU type tries some on one GPU.

Sia's profiling of new jobs (algorithms C.5), by profiling leases: for some seconds the lease has
one batch size after the other, within what the user allows and the GPU has room for, and the
launcher measures. What follows is told to the learner as if the job had reported it. Nothing of a
survey is written down before its end, so that nothing of it outlives the job or this controller.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from slurm_synergy.cluster import Clock, Observation, ObservedJob
from slurm_synergy.controller.learning import JobTold
from slurm_synergy.controller.learning_points import StepTime, TrainingReport
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.controller.probes import Measured, Probe
from slurm_synergy.core.model import Elasticity, JobPhase, Placement, Plan, Snapshot
from slurm_synergy.core.scaling import BatchSize, shared_out
from slurm_synergy.errors import SynergyError

__all__ = ["Pupil", "Surveyor", "totals_to_try"]

_LOG = logging.getLogger(__name__)
_SIZES = 10
_GPU_S = 20.0  # for all sizes together
_WARMUP_STEPS, _STEPS = 2, 8
# What a launcher measures at least: so many steps, and so long.
_FEWEST_STEPS, _SHORTEST_S = 4, 1.5
_ANSWER_MARGIN_S = 20.0
# So many sizes known are enough for a line through them.
_ENOUGH = 3
# For so long a job that trains is waited for: it may yet say that its program follows the batch.
_PATIENCE_S = 60.0


class Pupil(Protocol):
    """The learner, as far as it concerns surveys."""

    def surveyed(self, told: JobTold) -> None:
        """What was found out about a job's steps."""
        ...

    def local_batches(self, job_id: int, gpu_type: str) -> tuple[int, frozenset[int]] | None:
        """Room for one copy of the model, and the sizes whose time is known; None: not told."""
        ...


def totals_to_try(batch: tuple[int, int], local_most: int, sizes: int = _SIZES) -> tuple[int, ...]:
    """Batches for one GPU from the least on, in geometric steps, the telling ones first.

    Both ends, then the middle of each gap, so that a survey cut short still spans the range. One
    GPU takes two passes of ``local_most`` samples at most, since more of them tell nothing new.
    """
    least, most = batch[0], min(batch[1], 2 * local_most)
    if most <= least:
        return (least,)
    ratio = most / least
    all_totals = sorted({round(least * ratio ** (at / (sizes - 1))) for at in range(sizes)})
    order, gaps = [0, len(all_totals) - 1], [(0, len(all_totals) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if middle > low:
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return tuple(all_totals[at] for at in order)


@dataclass(slots=True)
class _Run:
    job_id: int
    incarnation: int
    owner_uid: int
    placement: Placement
    program: str
    to_try: list[BatchSize]
    cpus: int
    deadline_s: float
    began_s: float
    number: int = 0
    answer_by_s: float = 0.0
    left_out: int = 0
    times: list[StepTime] = field(default_factory=list)


class Surveyor:
    """Has elastic jobs try batch sizes where they are new; an audience of the loop. Thread-safe.

    ``acting`` tells whether leases may be changed at all now; ``numbers`` are those of probes.
    """

    def __init__(
        self,
        *,
        leases: LeaseBook,
        learner: Pupil,
        clock: Clock,
        enabled: bool = True,
        acting: Callable[[], bool] = lambda: True,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self._leases, self._learner, self._clock = leases, learner, clock
        self._enabled, self._acting = enabled, acting
        self._numbers = numbers or count(int(clock.now_s() * 1000) + 1)
        self._lock = threading.RLock()
        self._runs: dict[int, _Run] = {}
        self._seen_s: dict[tuple[int, int], float] = {}
        self._settled: set[tuple[int, int]] = set()

    def reload(self, enabled: bool) -> None:
        """Whether surveys are wanted from now on; those that are not end."""
        with self._lock:
            self._enabled = enabled
            if not enabled:
                for run in tuple(self._runs.values()):
                    self._end(run, "profiling was switched off")

    def comes_first(self, seen: ObservedJob) -> bool:
        """Whether a survey of that job is under way, or will be soon: its cores are for later."""
        with self._lock:
            run = self._run_key(seen)
            return run is not None and run not in self._settled

    # Audience of the loop

    def observed(self, observation: Observation) -> None:
        """Slurm has been read: end what cannot go on, begin what can."""
        with self._lock:
            now_s = self._clock.now_s()
            for run in tuple(self._runs.values()):
                self._look_after(run, now_s)
            if self._enabled and self._acting():
                ready = set(self._leases.measurable_jobs())
                for seen in observation.jobs:
                    run_key = self._run_key(seen)
                    if run_key is None or run_key in self._settled:
                        continue
                    try:
                        self._consider(seen, run_key, seen.job.job_id in ready, now_s)
                    except SynergyError as err:
                        self._settled.add(run_key)
                        _LOG.warning("job %d tries no batches: %s", run_key[0], err.in_short)
            known = {seen.job.job_id for seen in observation.jobs}
            self._settled = {one for one in self._settled if one[0] in known}
            self._seen_s = {one: at for one, at in self._seen_s.items() if one[0] in known}

    def publish(self, snapshot: Snapshot, plan: Plan, took_s: Mapping[str, float]) -> None:
        """A round has been run: nothing to do."""

    def failed(self, text: str) -> None:
        """The controller cannot work: surveys end by themselves when nobody answers."""

    # Of others

    def measured(self, job_id: int) -> None:
        """The job has answered its probe: take it in, and ask for the next."""
        with self._lock:
            run, probe = self._runs.get(job_id), self._leases.probing(job_id)
            if run is None or probe is None or probe.number != run.number:
                return
            answers = self._leases.answers(job_id)
            if answers:
                self._take_in(run, answers)

    def describe(self, job_id: int) -> Mapping[str, object] | None:
        """How far the job's survey is, as JSON values; None while it tries nothing."""
        with self._lock:
            run = self._runs.get(job_id)
            if run is None or not run.to_try:
                return None
            batch = run.to_try[0].total
            return {"batch_size": batch, "tried": len(run.times), "left": len(run.to_try)}

    # Inside; the lock is held

    def _run_key(self, seen: ObservedJob) -> tuple[int, int] | None:
        """Job and incarnation of a job that a survey could be about; else None."""
        job = seen.job
        fits = job.elasticity is Elasticity.ADAPTIVE and job.batch is not None and job.wrapped
        if not (self._enabled and fits and seen.phase is JobPhase.RUNNING):
            return None
        incarnation = self._leases.incarnation(job.job_id)
        lease = self._leases.lease(job.job_id)
        if incarnation is None or lease is None or lease.placement.gpus != job.scale_unit:
            return None
        return job.job_id, incarnation

    def _consider(
        self, seen: ObservedJob, run_key: tuple[int, int], ready: bool, now_s: float
    ) -> None:
        """Begin the survey, unless it must wait or there is nothing to find out."""
        job_id, incarnation = run_key
        if not ready or job_id in self._runs or self._leases.probing(job_id) is not None:
            return  # it has not made a step yet, or is measured
        since_s = self._seen_s.setdefault(run_key, now_s)
        lease, batch = self._leases.lease(job_id), seen.job.batch
        told = self._leases.profiling(job_id)
        if lease is None or batch is None or not told:
            self._give_up_after(run_key, now_s - since_s)
            return
        known = self._learner.local_batches(job_id, lease.placement.gpu_type)
        if known is None:
            self._give_up_after(run_key, now_s - since_s)
            return
        local_most, seen_sizes = known
        to_try = _sizes_to_try(batch, local_most, seen_sizes)
        if not to_try:
            self._settled.add(run_key)
            return
        run = self._runs[job_id] = _Run(
            job_id=job_id,
            incarnation=incarnation,
            owner_uid=self._leases.owner_uid(job_id, incarnation),
            placement=lease.placement,
            program=told[0].program,
            to_try=to_try,
            cpus=min(len(lease.cores.get(name, ())) for name in lease.placement.nodes),
            deadline_s=now_s + _GPU_S / lease.placement.gpus,
            began_s=now_s,
        )
        self._ask(run)

    def _give_up_after(self, run_key: tuple[int, int], waited_s: float) -> None:
        if waited_s > _PATIENCE_S:
            self._settled.add(run_key)  # its program does not follow the batch, or is slow to start

    def _look_after(self, run: _Run, now_s: float) -> None:
        probe = self._leases.probing(run.job_id)
        if self._leases.incarnation(run.job_id) != run.incarnation:
            self._end(run, "the job began anew")
        elif self._leases.stopping(run.job_id) is not None:
            self._end(run, "the job is being stopped")
        elif probe is None or probe.number != run.number:
            self._end(run, "its cores are needed")
        elif now_s > run.answer_by_s:
            self._end(run, "it did not answer")

    def _ask(self, run: _Run) -> None:
        """Have the next size tried that the time allows; without one the survey is over."""
        now_s = self._clock.now_s()
        left_s = run.deadline_s - now_s
        while run.to_try and _takes_s(run, run.to_try[0]) > left_s:
            run.to_try.pop(0)
            run.left_out += 1
        if not run.to_try:
            self._end(run, "they take too long" if run.left_out else "")
            return
        # The first size tells how long the others take; it gets the time that it needs.
        longest_s = max(
            _takes_s(run, run.to_try[0]), left_s / (len(run.to_try) if run.times else 2)
        )
        run.number = next(self._numbers)
        run.answer_by_s = now_s + longest_s + _ANSWER_MARGIN_S
        probe = Probe(
            number=run.number,
            warmup_steps=_WARMUP_STEPS,
            steps=_STEPS,
            longest_s=longest_s,
            batch_size=run.to_try[0].total,
        )
        if self._leases.probe(run.job_id, probe, run.cpus) is None:
            self._end(run, "its cores are needed")

    def _take_in(self, run: _Run, answers: Sequence[Measured]) -> None:
        size = run.to_try.pop(0)
        rates = [one.busy_samples_per_s for one in answers if one.steps]
        if len(rates) < len(answers) or not all(rates):
            run.left_out += 1
        else:
            took_s = size.total / min(rate for rate in rates if rate)
            each_s = took_s / (size.accumulation + 1)
            run.times.append(
                StepTime(
                    local_batch=size.local,
                    replicas=1,
                    accumulation=size.accumulation,
                    steps=min(one.steps for one in answers),
                    gradient_s=each_s,
                    step_s=each_s,
                )
            )
        self._ask(run)

    def _end(self, run: _Run, why: str) -> None:
        """Tell the learner what was found, and give the batch back."""
        job_id = run.job_id
        del self._runs[job_id]
        self._settled.add((job_id, run.incarnation))
        probe = self._leases.probing(job_id)
        if probe is not None and probe.number == run.number:
            self._leases.end_probe(job_id)
        if run.times:
            self._learner.surveyed(
                JobTold(
                    job_id=job_id,
                    owner_uid=run.owner_uid,
                    placement=run.placement,
                    report=TrainingReport(times=tuple(run.times)),
                    program=run.program,
                )
            )
        _LOG.info(
            "job %d: %d batch sizes tried on %s in %.1f GPU-s%s",
            job_id,
            len(run.times),
            run.placement.gpu_type,
            (self._clock.now_s() - run.began_s) * run.placement.gpus,
            f", not all: {why}" if why else "",
        )


def _takes_s(run: _Run, size: BatchSize) -> float:
    """How long it takes at most to measure that size: steps grow at most as their samples do."""
    passes = size.accumulation + 1
    known = [passes * one.step_s * max(1.0, size.local / one.local_batch) for one in run.times]
    steps = _WARMUP_STEPS + _FEWEST_STEPS + 1
    return max(_SHORTEST_S, steps * min(known, default=0.0))


def _sizes_to_try(batch: tuple[int, int], local_most: int, seen: frozenset[int]) -> list[BatchSize]:
    """What one copy shall try; nothing when enough is known, or nothing can be varied."""
    totals = totals_to_try(batch, local_most)
    sizes = [
        shared_out(total, initial=batch[0], replicas=1, local_most=local_most) for total in totals
    ]
    distinct = len({one.local for one in sizes})
    return [] if distinct == 1 or len(seen) >= min(_ENOUGH, distinct) else sizes
