"""A job as the packer sees it, and what it takes where it is put."""

from __future__ import annotations

from dataclasses import dataclass

from slurm_synergy.core.model import Grant, Job, Placement, Profile
from slurm_synergy.core.room import GpuLayout, Need, Parts, Shape
from slurm_synergy.core.values import quick

__all__ = ["Request", "Step", "Trail", "layout_of"]

Step = tuple["Request", GpuLayout, Parts]
"""A job that was added, where it was put, and what it takes there."""

Trail = list[Step]
"""How a packing of jobs that hold nothing began."""


@quick
@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A job as the packer sees it. Made by ``Requests``; treated as a value.

    ``need`` is its floor. ``held`` is what the job holds and would like to keep, ``held_parts``
    what it takes there, ``may_stay`` whether that still is what it asks for; ``pinned`` that it
    keeps its GPUs in any case, ``frozen`` that it keeps its cores and memory as well. ``grant`` is
    the word of a policy that grants just this, once there is one. ``reach`` counts the GPUs that
    such jobs could take in the empty pool: the fewer, the harder it is to place. ``made_of`` are
    the job and the profile of a request that is just what the user asked for. ``size``, which
    follows from the others, sorts the largest first, and of one size those first that are the
    hardest to place.
    """

    job_id: int
    shape: Shape
    need: Need
    held: GpuLayout | None = None
    held_parts: Parts
    may_stay: bool = False
    pinned: bool = False
    frozen: bool = False
    grant: Grant | None = None
    reach: int = 0
    made_of: tuple[Job, Profile] | None = None
    size: tuple[int, int, int] = (0, 0, 0)

    def __post_init__(self) -> None:
        gpus, nodes, _ = self.shape
        self.size = (-(gpus // (nodes or 1)), -gpus, self.reach)

    @property
    def gpus(self) -> int:
        """GPUs in total."""
        return self.shape[0]


def layout_of(placement: Placement) -> GpuLayout:
    """The GPU part of a placement, in rank order."""
    if len(placement.shares) == 1:  # most jobs; a list takes twice as long
        ((name, share),) = placement.shares
        return placement.gpu_type, ((name, share.gpus),)
    return placement.gpu_type, tuple([(name, share.gpus) for name, share in placement.shares])
