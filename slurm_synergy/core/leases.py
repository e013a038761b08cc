"""Where jobs run and with what, and their right to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_synergy.core.resources import Resources
from slurm_synergy.core.scaling import BatchSize
from slurm_synergy.core.values import quick
from slurm_synergy.errors import ModelError

__all__ = ["Lease", "Placement"]


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a job runs and with what, node by node, in rank order.

    ``batch`` is the batch size that it runs with, None for its own.
    """

    job_id: int
    gpu_type: str
    shares: tuple[tuple[str, Resources], ...]
    batch: BatchSize | None = None

    def __post_init__(self) -> None:
        names = [name for name, _ in self.shares]
        if not names or len(set(names)) != len(names):
            raise ModelError(f"job {self.job_id}: placement needs distinct nodes, got {names}")
        if any(share.gpus < 1 for _, share in self.shares):
            raise ModelError(f"job {self.job_id}: every node of a placement holds a GPU")

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node names in rank order."""
        return tuple(name for name, _ in self.shares)

    @property
    def gpus(self) -> int:
        """GPUs in total."""
        if len(self.shares) == 1:  # most jobs; a generator takes three times as long
            return self.shares[0][1].gpus
        return sum(share.gpus for _, share in self.shares)

    @property
    def gpu_layout(self) -> tuple[tuple[str, int], ...]:
        """(node, GPUs) pairs by node name: what cannot change without a restart."""
        return tuple(sorted((name, share.gpus) for name, share in self.shares))

    def on(self, node: str) -> Resources:
        """The share on ``node``; all zero where the job is not."""
        return dict(self.shares).get(node, Resources())


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right of a job to hold a placement until ``expires_s`` (epoch seconds).

    ``generation`` grows with every change. ``cores`` are the core indices per node that are the
    job's now, ``floor`` those that it falls back to when the controller is silent (promises P1,
    P5). ``granted`` is what Slurm allocated per node: memory can grow in place up to it.
    """

    job_id: int
    generation: int
    placement: Placement
    expires_s: float
    cores: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    floor: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    granted: Mapping[str, Resources] = field(default_factory=dict)
