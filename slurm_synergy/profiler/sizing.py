"""How much of its speed a job reaches with fewer cores: right-sizing from a profile."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from slurm_synergy.core.model import Profile
from slurm_synergy.core.pipeline import job_rate
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import ModelError

__all__ = ["NodeShape", "Size", "sizes"]

_FULL = 0.97
_LESS = 0.90
_MEM_STEP_MIB = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeShape:
    """A kind of node that a job may run on: its GPU type, GPUs, cores and memory."""

    gpu_type: str
    gpus: int
    cpus: int
    mem_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A request for one node and the share of the job's full speed there that it reaches."""

    cpus: int
    mem_mib: int
    samples_per_s: float
    of_full: float


def sizes(profile: Profile, shape: NodeShape, gpus: int) -> tuple[Size, ...]:
    """The least requests on ``shape`` for full speed (97 %) and, where smaller, for 90 % of it.

    Full speed is what all of the node would give. Memory is the least, in whole GiB, at which that
    many cores bring what they can. Raises ModelError where the profile does not know the GPU type,
    or the job needs more GPUs than the node has.
    """
    if gpus > shape.gpus:
        raise ModelError(f"{gpus} GPUs are more than the {shape.gpus} of such a node")
    at = _Speed(profile, shape, gpus)
    most = at.rate(shape.cpus, shape.mem_mib)
    found = [at.least_for(share * most, most) for share in (_FULL, _LESS)]
    return tuple(found[:1] if found[1].cpus >= found[0].cpus else found)


@dataclass(frozen=True, slots=True)
class _Speed:
    """How fast a job is on one node of a shape."""

    profile: Profile
    shape: NodeShape
    gpus: int

    def rate(self, cpus: int, mem_mib: int) -> float:
        """Samples/s of the whole job. Raises ModelError for a GPU type that is not known."""
        share = Resources(gpus=self.gpus, cpus=cpus, mem_mib=mem_mib)
        rate = job_rate(self.profile, self.shape.gpu_type, (share,))
        if rate is None:
            known = ", ".join(sorted(self.profile.gpu_rate_per_gpu)) or "none"
            raise ModelError(
                f"profile {self.profile.key!r} does not know GPUs of type "
                f"{self.shape.gpu_type!r}; known: {known}"
            )
        return rate

    def least_for(self, target: float, most: float) -> Size:
        """Fewest cores for ``target`` samples/s, then least memory with these."""
        shape = self.shape
        all_cpus = range(1, shape.cpus + 1)
        at = bisect_left(all_cpus, target, key=lambda cpus: self.rate(cpus, shape.mem_mib))
        cpus = all_cpus[min(at, shape.cpus - 1)]
        reached = min(target, self.rate(cpus, shape.mem_mib))
        needed = self.profile.pipeline.process_mem_mib if self.profile.pipeline else 0
        steps = range(min(max(needed, 1), shape.mem_mib), shape.mem_mib, _MEM_STEP_MIB)
        at = bisect_left(steps, reached, key=lambda mib: self.rate(cpus, mib))
        mem_mib = steps[at] if at < len(steps) else shape.mem_mib
        mem_mib = min(math.ceil(mem_mib / _MEM_STEP_MIB) * _MEM_STEP_MIB, shape.mem_mib)
        rate = self.rate(cpus, mem_mib)
        return Size(cpus=cpus, mem_mib=mem_mib, samples_per_s=rate, of_full=rate / most)
