"""How many of the cores that jobs hold they can use: Synergy's figure 10 draws both."""

from __future__ import annotations

from typing import Any

from slurm_synergy.core.decide import Mechanism
from slurm_synergy.core.elastic import as_placed
from slurm_synergy.core.model import Decision, JobStatus, Layout, Placement, Profile, Snapshot
from slurm_synergy.core.pipeline import job_rate
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.snapshot import status_of

__all__ = ["Recorder"]

_EQUAL = 1 - 1e-9


class Recorder:
    """A mechanism that does what ``mechanism`` does, and sums up the cores that are of use.

    A core is of use when the job would be slower without it, by its profile. What a round placed
    is taken to hold until the next round.
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self._mechanism = mechanism
        # Profiles are kept with what was found, so that no other can get the same id.
        self._known: dict[object, tuple[Profile, int]] = {}
        self._since_s: float | None = None
        self._used = 0
        self.core_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mechanism, name)

    @property
    def name(self) -> str:
        """The mechanism's name."""
        return self._mechanism.name

    def place(self, snapshot: Snapshot, decision: Decision) -> Layout:
        """The mechanism's layout."""
        layout = self._mechanism.place(snapshot, decision)
        self.until(snapshot.now_s)
        jobs = status_of(snapshot)
        self._used = sum(
            self._cores(as_placed(snapshot, jobs[one.job_id], one), one)
            for one in layout.placements
        )
        return layout

    def until(self, now_s: float) -> float:
        """Core seconds of use up to ``now_s``."""
        if self._since_s is not None:
            self.core_s += self._used * (now_s - self._since_s)
        self._since_s = now_s
        return self.core_s

    def _cores(self, status: JobStatus, placement: Placement) -> int:
        profile = status.profile
        if profile is None:
            return sum(share.cpus for _, share in placement.shares)
        shares = tuple(share for _, share in placement.shares)
        key = (id(profile), placement.gpu_type, shares)
        if key not in self._known:
            self._known[key] = profile, _of_use(profile, placement.gpu_type, shares)
        return self._known[key][1]


def _of_use(profile: Profile, gpu_type: str, shares: tuple[Resources, ...]) -> int:
    """The fewest cores, taken from all nodes alike, with which the job is as fast."""
    rate = job_rate(profile, gpu_type, list(shares))
    held = sum(share.cpus for share in shares)
    if not rate:
        return held
    low, high = 0, 64  # in 64ths of what is held
    while high - low > 1:
        middle = (low + high) // 2
        fewer = [_with(share, -(-share.cpus * middle // 64)) for share in shares]
        if (job_rate(profile, gpu_type, fewer) or 0.0) >= rate * _EQUAL:
            high = middle
        else:
            low = middle
    return sum(-(-share.cpus * high // 64) for share in shares)


def _with(share: Resources, cpus: int) -> Resources:
    return Resources(gpus=share.gpus, cpus=cpus, mem_mib=share.mem_mib)
