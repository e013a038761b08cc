"""A job as the packer sees it, and what it takes where it is put."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slurm_synergy.core.model import Grant, Job, Placement, Profile
from slurm_synergy.core.room import GpuLayout, Need, Parts, Shape
from slurm_synergy.core.values import quick

__all__ = ["Asked", "Request", "Step", "Trail", "layout_of", "needs_by"]


def needs_by(job: Job, profile: Profile) -> tuple[object, ...]:
    """All that tells what a job needs as the user has it; keep the profile so that its id stays.

    Written out, as ``attrgetter`` takes twice as long.
    """
    return (
        id(profile),
        job.gpus,
        job.nodes,
        job.gpu_types,
        job.min_mem_mib_per_node,
        job.tasks_per_node,
        job.wrapped,
    )


Step = tuple["Request", GpuLayout, Parts]
"""A job that was added, where it was put, and what it takes there."""

Trail = list[Step]
"""How a packing of jobs that hold nothing began."""


class Asked:
    """What jobs that are alike ask for, the same object for all of them.

    ``kept`` is for whoever computes something that
    follows from what the jobs have in common, under a key of theirs.
    """

    __slots__ = ("kept", "need", "reach", "shape", "size")

    def __init__(self, shape: Shape, need: Need, reach: int) -> None:
        gpus, nodes, _ = shape
        self.shape, self.need, self.reach = shape, need, reach
        self.size = (-(gpus // (nodes or 1)), -gpus, reach)
        self.kept: dict[object, Any] = {}


@quick
@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A job as the packer sees it. Made by ``Requests``; treated as a value.

    ``alike`` is shared by all jobs that are like it, with their ``shape``, their floor ``need`` and
    their ``size``. ``now`` is what the job holds and would like to keep, ``held`` the GPUs of that,
    ``held_parts`` what it takes there, ``may_stay`` whether that still is what it asks for;
    ``pinned`` that it keeps its GPUs in any case, ``frozen`` that it keeps its cores and memory as
    well. ``grant`` is the word of a policy that grants just this, once there is one. ``made_of``
    are the job and the profile of a request that is just what the user asked for. ``size`` sorts
    the largest first, and of one size those first of which ``reach``, the GPUs that such jobs could
    take in the empty pool, is the smallest: they are the hardest to place.
    """

    job_id: int
    alike: Asked
    shape: Shape
    need: Need
    size: tuple[int, int, int]
    now: Placement | None = None
    held: GpuLayout | None = None
    held_parts: Parts
    may_stay: bool = False
    pinned: bool = False
    frozen: bool = False
    grant: Grant | None = None
    made_of: tuple[Job, Profile] | None = None

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
