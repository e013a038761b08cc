"""Who competes for GPUs in a round in which a policy deals all of them out anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_synergy.core.model import JobStatus, Reason, ReasonCode, Snapshot
from slurm_synergy.core.snapshot import held, is_pinned

__all__ = ["Contest", "arrival"]

_DRAINED = Reason(code=ReasonCode.DRAINED, text="the controller drains: nothing is started")


def arrival(status: JobStatus) -> tuple[float, int]:
    """The place of a job in the order of submission."""
    return status.job.submitted_s, status.job.job_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """``kept`` jobs keep what they hold, ``waiting`` ones must not start, the others compete."""

    kept: tuple[JobStatus, ...]
    competing: tuple[JobStatus, ...]
    waiting: Mapping[int, Reason] = field(default_factory=dict)

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

    def taken(self) -> dict[str, int]:
        """GPUs that kept jobs hold, by node."""
        found: dict[str, int] = {}
        for status in self.kept:
            now = held(status)
            for name, share in now.shares if now else ():
                found[name] = found.get(name, 0) + share.gpus
        return found
