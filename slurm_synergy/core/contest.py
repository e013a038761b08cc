"""Who competes for GPUs in a round in which a policy deals all of them out anew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from slurm_synergy.core.elastic import objection
from slurm_synergy.core.model import JobStatus, Reason, ReasonCode, Snapshot
from slurm_synergy.core.snapshot import held, is_pinned

__all__ = ["Contest", "arrival", "gpus_of"]

_DRAINED = Reason(code=ReasonCode.DRAINED, text="the controller drains: nothing is started")


def arrival(status: JobStatus) -> tuple[float, int]:
    """The place of a job in the order of submission."""
    return status.job.submitted_s, status.job.job_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """``kept`` jobs keep what they hold, ``waiting`` ones must not start, the others compete.

    ``settled`` are those of the kept ones that would compete if this were not between two plans.
    """

    kept: tuple[JobStatus, ...]
    competing: tuple[JobStatus, ...]
    waiting: Mapping[int, Reason] = field(default_factory=dict)
    settled: tuple[JobStatus, ...] = ()

    @classmethod
    def of(cls, snapshot: Snapshot) -> Contest:
        """The jobs of a snapshot."""
        kept: list[JobStatus] = []
        competing: list[JobStatus] = []
        waiting: dict[int, Reason] = {}
        for status in snapshot.jobs:
            if held(status) is not None:
                stays = snapshot.draining or is_pinned(status, snapshot)
                (kept if stays else competing).append(status)
            elif status.blocked is not None:
                waiting[status.job.job_id] = status.blocked
            elif snapshot.draining:
                waiting[status.job.job_id] = _DRAINED
            else:
                competing.append(status)
        return cls(kept=tuple(kept), competing=tuple(competing), waiting=waiting)

    def between(self) -> Contest:
        """The same between two plans: all that may stay where they are do."""
        settled = tuple(status for status in self.competing if _may_stay(status))
        stays = {status.job.job_id for status in settled}
        return replace(
            self,
            kept=(*self.kept, *settled),
            competing=tuple(one for one in self.competing if one.job.job_id not in stays),
            settled=settled,
        )

    def taken(self) -> dict[str, int]:
        """GPUs that kept jobs hold, by node."""
        return gpus_of(self.kept)


def gpus_of(jobs: Iterable[JobStatus]) -> dict[str, int]:
    """GPUs that jobs hold, by node."""
    found: dict[str, int] = {}
    for status in jobs:
        now = held(status)
        for name, share in now.shares if now else ():
            found[name] = found.get(name, 0) + share.gpus
    return found


def _may_stay(status: JobStatus) -> bool:
    now = held(status)
    return now is not None and objection(status, now) is None
