"""What policy and mechanism say of a round, and why jobs wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from slurm_synergy.core.jobs import Configuration
from slurm_synergy.core.leases import Placement
from slurm_synergy.core.values import quick

__all__ = ["Decision", "Grant", "Layout", "Plan", "Reason", "ReasonCode"]


class ReasonCode(Enum):
    """Why a job waits or was moved; stable words for scripts."""

    NO_GPUS = "no_gpus"  # the policy gave the GPUs to jobs ahead in its order
    FRAGMENTED = "fragmented"  # enough GPUs, but not in the shape the job asked for
    NO_MEMORY = "no_memory"  # its minimum memory does not fit beside the others
    DEMAND_TAKEN = "demand_taken"  # a mechanism that gives whole demands or nothing: not free
    NEVER_FITS = "never_fits"  # no node of the pool can hold it even when empty
    GPUS_BUSY = "gpus_busy"  # placed, but the GPUs are still being freed
    START_REFUSED = "start_refused"  # Slurm did not start it; will be planned again
    LIMITED = "limited"  # a limit of Slurm's keeps it from starting; tried again on a change
    PREEMPTED = "preempted"  # the policy prefers other jobs now
    MOVED = "moved"  # same GPUs elsewhere
    RESHAPED = "reshaped"  # more or fewer GPUs, or GPUs of another type
    RESIZED = "resized"  # needs a restart to change its CPU or memory
    DRAINED = "drained"  # the controller is draining: nothing is started
    ACTION_FAILED = "action_failed"  # the cluster failed to do it; will be tried again
    NOT_OURS = "not_ours"  # waits on something that is not ours to decide (dependency, begin time)
    ONLY_SHOWN = "only_shown"  # dry run, observe or advise: it would be done, and is not


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """An expected outcome in words: a code for programs and a sentence for people."""

    code: ReasonCode
    text: str


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The policy's word for one job."""

    job_id: int
    configuration: Configuration


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The policy's word: grants in priority order, and why the others wait.

    ``packing`` tells for each granted job a GPU type and (node, GPUs) pairs where all of them fit
    together, if the policy has looked for that itself; mechanisms start from it. ``solver`` is as
    in ``Plan``. With ``hopes`` batch sizes are for more cores than jobs may get, and are chosen
    anew for those that they got.
    """

    grants: tuple[Grant, ...]
    waiting: Mapping[int, Reason] = field(default_factory=dict)
    packing: Mapping[int, tuple[str, tuple[tuple[str, int], ...]]] | None = None
    solver: Mapping[str, object] = field(default_factory=dict)
    hopes: bool = False


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The mechanism's word: placements, and grants that could not be placed with the reason.

    ``solver`` is as in ``Plan``.
    """

    placements: tuple[Placement, ...]
    unplaced: Mapping[int, Reason] = field(default_factory=dict)
    solver: Mapping[str, object] = field(default_factory=dict)


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What shall be true after this round. ``placements`` sorted by job id.

    ``solver`` is the report of an optimising policy or mechanism (status, gap, milliseconds),
    empty for the others. It tells how the plan came about and is no part of its value.
    """

    round: int
    policy: str
    mechanism: str
    placements: tuple[Placement, ...]
    waiting: Mapping[int, Reason] = field(default_factory=dict)
    solver: Mapping[str, object] = field(default_factory=dict, compare=False)

    def placement(self, job_id: int) -> Placement | None:
        """The placement of ``job_id``, or None when it waits."""
        for placement in self.placements:
            if placement.job_id == job_id:
                return placement
        return None
