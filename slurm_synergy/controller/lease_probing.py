"""Profiling leases and what running jobs told of themselves: a part of the book of leases."""

from __future__ import annotations

from slurm_synergy.controller.lease_table import LeaseTable
from slurm_synergy.controller.probes import Measured, Probe, TaskProfiling
from slurm_synergy.profiler.refining import Sums

__all__ = ["ProbingLeases"]


class ProbingLeases(LeaseTable):
    """The table, with probes over its leases; thread-safe."""

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

    def epoch(self, job_id: int) -> int:
        """Epochs of the data that all tasks of the job have behind them; 0 without a lease."""
        with self._lock:
            entry = self._entries.get(job_id)
            return entry.tasks.epoch if entry else 0

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
