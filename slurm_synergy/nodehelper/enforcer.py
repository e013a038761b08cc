"""One look at this node: every job gets what its lease says, or what Slurm gave it."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from slurm_synergy.jobside.binding import choose_cpus
from slurm_synergy.nodehelper.cgroups import Cpusets, JobPlace, show_cpus
from slurm_synergy.nodehelper.leases import JobLease
from slurm_synergy.nodehelper.memory import MemoryLimits

__all__ = ["Enforcer"]

_LOG = logging.getLogger(__name__)
_MAX_TOLD = 4096


class Enforcer:
    """Changes cpusets and memory limits; with ``keep_memory`` it only gives the latter back."""

    def __init__(
        self, cpusets: Cpusets, memory: MemoryLimits, *, keep_memory: bool = False
    ) -> None:
        self._cpusets, self._memory, self._keep_memory = cpusets, memory, keep_memory
        self._told: set[tuple[int, str]] = set()

    def obey(self, leases: Mapping[int, JobLease]) -> None:
        """Bring the node to ``leases``, which are in force now, by job id.

        What cannot be done for one job is told once, and leaves it with what Slurm gave it.
        """
        places = self._cpusets.jobs()
        trusted = {one: places[one] for one in leases if self._is_ours(places.get(one), leases)}
        wanted = self._cpus(leases, places, trusted)
        held = self._cpusets.held()
        for job_id in held.keys() - wanted.keys():
            self._give_back_cpus(job_id)
        widened = {one for one in wanted if wanted[one] - held.get(one, places[one].cpus)}
        # Who gets narrower goes first, so that no CPU is two jobs' meanwhile.
        for job_id in sorted(wanted, key=lambda one: (one in widened, one)):
            self._confine(places[job_id], wanted[job_id])
        mem_mib = {one: leases[one].mem_mib for one in trusted}
        self._see_to_memory({} if self._keep_memory else mem_mib)

    def give_back(self) -> bool:
        """Leave every job with what Slurm gave it; False when some of it must be tried again."""
        done = self._cpusets.give_all_back()
        return self._memory.give_all_back() and done

    def _is_ours(self, place: JobPlace | None, leases: Mapping[int, JobLease]) -> bool:
        """Whether the lease is of the job that Slurm has here under that number."""
        if place is None:
            return False  # it ended, or Slurm does not confine it
        uid = leases[place.job_id].owner_uid
        if place.uid != uid:
            self._tell(place.job_id, f"its lease names user id {uid}, its cgroup {place.uid}")
        return place.uid == uid

    def _cpus(
        self,
        leases: Mapping[int, JobLease],
        places: Mapping[int, JobPlace],
        trusted: Mapping[int, JobPlace],
    ) -> dict[int, frozenset[int]]:
        """The CPUs of each job whose lease says something about them."""
        machine = self._cpusets.machine() if trusted else frozenset()
        # A lease without cores (no wrapper) leaves its job on those that Slurm gave it.
        strangers = frozenset[int]().union(
            *(
                place.cpus
                for one, place in places.items()
                if one not in trusted or not leases[one].cores
            )
        )
        wanted: dict[int, frozenset[int]] = {}
        for job_id, place in trusted.items():
            lease = leases[job_id]
            if not lease.cores:
                continue
            choice = choose_cpus(lease.cores, machine, lease.node_cores)
            # What Slurm has given to jobs that have no lease is theirs.
            cpus = choice.cpus - (strangers - place.cpus)
            if cpus:
                wanted[job_id] = cpus
            else:
                self._tell(job_id, choice.why or "the cores of its lease are those of other jobs")
        return wanted

    def _confine(self, place: JobPlace, cpus: frozenset[int]) -> None:
        try:
            if self._cpusets.confine(place, cpus):
                _LOG.info(
                    "job %d: CPUs %s; Slurm gave it %s",
                    *(place.job_id, show_cpus(cpus), show_cpus(place.cpus)),
                )
        except (OSError, ValueError) as err:
            self._tell(place.job_id, f"its CPUs cannot be changed: {err}")
            if place.job_id in self._cpusets.held():
                self._give_back_cpus(place.job_id)

    def _give_back_cpus(self, job_id: int) -> None:
        if self._cpusets.give_back(job_id):
            _LOG.info("job %d: back to the CPUs that Slurm gave it", job_id)
        else:
            self._tell(job_id, "not all of it could be given back its CPUs yet")

    def _see_to_memory(self, wanted_mib: Mapping[int, int]) -> None:
        for job_id in self._memory.held() - wanted_mib.keys():
            if self._memory.give_back(job_id):
                _LOG.info("job %d: back to the memory that Slurm gave it", job_id)
        for job_id, mib in wanted_mib.items():
            try:
                if self._memory.set_to(job_id, wanted_mib):
                    _LOG.info("job %d: may use %d MiB", job_id, mib)
            except (OSError, ValueError) as err:
                self._tell(job_id, f"its memory limit cannot be changed: {err}")

    def _tell(self, job_id: int, text: str) -> None:
        if (job_id, text) not in self._told:
            if len(self._told) >= _MAX_TOLD:
                self._told.clear()
            self._told.add((job_id, text))
            _LOG.warning("job %d: %s", job_id, text)
