"""The three resources that a job holds on one node."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_synergy.core.values import quick
from slurm_synergy.errors import ModelError

__all__ = ["Resources"]


@quick
@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Resources:
    """GPUs (count), CPU cores (count) and memory (MiB), all integers >= 0.

    Raises :class:`~slurm_synergy.errors.ModelError` for a negative amount, so a subtraction that
    would overdraw a node fails where it happens.
    """

    gpus: int = 0
    cpus: int = 0
    mem_mib: int = 0

    def __post_init__(self) -> None:
        if self.gpus < 0 or self.cpus < 0 or self.mem_mib < 0:
            raise ModelError(
                f"resources must not be negative: gpus={self.gpus} cpus={self.cpus} "
                f"mem_mib={self.mem_mib}"
            )

    def __add__(self, other: Resources) -> Resources:
        return Resources(
            gpus=self.gpus + other.gpus,
            cpus=self.cpus + other.cpus,
            mem_mib=self.mem_mib + other.mem_mib,
        )

    def __sub__(self, other: Resources) -> Resources:
        return Resources(
            gpus=self.gpus - other.gpus,
            cpus=self.cpus - other.cpus,
            mem_mib=self.mem_mib - other.mem_mib,
        )

    def fits_in(self, other: Resources) -> bool:
        """Whether every component is at most the other's."""
        return self.gpus <= other.gpus and self.cpus <= other.cpus and self.mem_mib <= other.mem_mib
