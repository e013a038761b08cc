"""The controller's word about the jobs of this node, as far as it still stands. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

__all__ = ["JobLease", "Standing"]

_REMEMBERED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLease:
    """What one job may have on this node until ``until_s``, on this machine's monotonic clock.

    ``cores`` are Slurm's core indices (none: leave its cores alone), of ``node_cores`` in all.
    """

    job_id: int
    owner_uid: int
    incarnation: int
    generation: int
    until_s: float
    cores: tuple[int, ...]
    node_cores: int
    mem_mib: int

    @property
    def sequence(self) -> tuple[int, int]:
        """Later words about a job have larger ones."""
        return self.incarnation, self.generation


class Standing:
    """The last word about each job. A word that is older than one heard before never counts."""

    def __init__(self) -> None:
        self._heard: dict[int, JobLease] = {}
        self._in_force: dict[int, JobLease] = {}

    def take(self, leases: Iterable[JobLease]) -> tuple[str, ...]:
        """Replace what stands by ``leases``; what is refused of them, in words.

        Jobs that are not among them hold no lease any more. A refused one holds none either.
        """
        self._in_force, refused = {}, []
        for lease in leases:
            why = self._why_not(lease)
            if why:
                refused.append(f"job {lease.job_id}: {why}")
                continue
            # The last one heard is the last one forgotten.
            self._heard.pop(lease.job_id, None)
            self._heard[lease.job_id] = self._in_force[lease.job_id] = lease
        while len(self._heard) > max(_REMEMBERED, len(self._in_force)):
            del self._heard[next(iter(self._heard))]
        return tuple(refused)

    def _why_not(self, lease: JobLease) -> str:
        if lease.job_id in self._in_force:
            return "named twice"
        known = self._heard.get(lease.job_id)
        if known is None or lease.sequence > known.sequence:
            return ""
        if lease.sequence < known.sequence:
            return (
                f"lease {lease.generation} of restart {lease.incarnation} is older than one "
                f"heard before ({known.generation} of restart {known.incarnation})"
            )
        if replace(lease, until_s=known.until_s) != known:
            return f"lease {lease.generation} says another thing than before"
        return ""

    def in_force(self, now_s: float) -> Mapping[int, JobLease]:
        """What stands now, by job id; ``now_s`` is on the monotonic clock."""
        return {one: lease for one, lease in self._in_force.items() if now_s < lease.until_s}
