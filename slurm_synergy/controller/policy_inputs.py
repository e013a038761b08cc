"""What policies need to know of jobs, and what they take for it where nobody told. Pure.

Every policy decides without any of it; this tells where that is a guess.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from slurm_synergy.core.model import Elasticity, JobStatus, Snapshot
from slurm_synergy.core.wording import counted

__all__ = ["NEEDS_SCIPY", "MissingInput", "missing_inputs"]

NEEDS_SCIPY = frozenset({"gavel", "themis", "shockwave"})
"""Policies that solve linear or integer programs by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingInput:
    """``what`` is not known of how many jobs, what is ``assumed`` in its place, the ``remedy``."""

    what: str
    assumed: str
    remedy: str


_Check = Callable[[Sequence[JobStatus], Snapshot], MissingInput | None]


def missing_inputs(policy: str, snapshot: Snapshot) -> tuple[MissingInput, ...]:
    """What the policy of that name misses of the jobs of ``snapshot``.

    Empty when all is known, without jobs, and for a policy that needs nothing.
    """
    jobs = snapshot.jobs
    found = [check(jobs, snapshot) for check in _CHECKS.get(policy, ())]
    return tuple(one for one in found if one is not None)


def _lengths(assumed: str, *, by_speed: bool = False) -> _Check:
    """Of policies that need to know how long jobs are.

    ``by_speed``: a number of samples tells nothing without a speed.
    """

    def is_known(status: JobStatus) -> bool:
        job, profile = status.job, status.profile
        if job.time_limit_s is not None:
            return True
        return job.total_samples is not None and bool(profile.gpu_rate_per_gpu or not by_speed)

    def check(jobs: Sequence[JobStatus], snapshot: Snapshot) -> MissingInput | None:
        unknown = sum(not is_known(one) for one in jobs)
        if not unknown:
            return None
        tell = "tells" if unknown == 1 else "tell"
        hints = "the hint samples=N and a profile" if by_speed else "the hint samples=N"
        return MissingInput(
            what=f"{unknown} of {counted(len(jobs), 'job')} {tell} no length",
            assumed=assumed,
            remedy=f"users give {hints}, or a time limit",
        )

    return check


def _speeds(jobs: Sequence[JobStatus], snapshot: Snapshot) -> MissingInput | None:
    """Of policies that choose the GPU type by the job's speed there."""
    kinds = {node.gpu_type for node in snapshot.nodes}
    unknown = sum(bool(_unknown_types(one, kinds)) for one in jobs)
    if not unknown:
        return None
    where = "on every GPU type that it may use" if len(kinds) > 1 else "here"
    return MissingInput(
        what=f"the speed of {unknown} of {counted(len(jobs), 'job')} is not known {where}",
        assumed="it is taken to be the least that is known of the job, or one sample per second",
        remedy="users name a profile that was measured there ('synergyctl profile list', "
        "synergy-profile)",
    )


def _unknown_types(status: JobStatus, kinds: set[str]) -> set[str]:
    """GPU types of the pool that the job may use and on which its speed is not known."""
    profile, allowed = status.profile, set(status.job.gpu_types) or kinds
    known = {kind for kind, rate in profile.gpu_rate_per_gpu.items() if rate > 0}
    if profile.scaling is not None:
        known |= profile.scaling.speeds.keys()
    return (allowed & kinds) - known


def _elastic(rigid: str, untold: str) -> _Check:
    """Of policies that choose how many GPUs a job gets."""

    def check(jobs: Sequence[JobStatus], snapshot: Snapshot) -> MissingInput | None:
        elastic = [one for one in jobs if one.job.elasticity is not Elasticity.RIGID]
        if jobs and not elastic:
            return MissingInput(
                what=f"none of {counted(len(jobs), 'job')} is elastic",
                assumed=rigid,
                remedy="users give the hint elastic=scale or elastic=full",
            )
        silent = sum(
            one.profile.scaling is None or not one.profile.scaling.speeds for one in elastic
        )
        if not silent:
            return None
        have = "has" if silent == 1 else "have"
        told = f"{silent} of {counted(len(elastic), 'elastic job')} {have} not told how long"
        return MissingInput(
            what=f"{told} steps take",
            assumed=untold,
            remedy="that ends when they run under synergy-srun and report their steps",
        )

    return check


_BY_SLOWDOWN = "their slowdown so far stands for their fairness"
_HALF_DONE = "they are taken to be half done"
_CHECKS: Mapping[str, tuple[_Check, ...]] = MappingProxyType(
    {
        "srtf": (_lengths("they come last", by_speed=True),),
        "ftf": (_lengths(_BY_SLOWDOWN, by_speed=True),),
        "ftf_ascending": (_lengths(_BY_SLOWDOWN, by_speed=True),),
        "gavel": (_speeds,),
        "themis": (_lengths(_HALF_DONE), _speeds),
        "shockwave": (_lengths(_HALF_DONE), _speeds),
        "pollux": (
            _elastic(
                "pollux only decides who runs where",
                "they get no more GPUs than they hold or must have at least",
            ),
        ),
        "sia": (
            _elastic(
                "sia only decides who runs on which GPU type",
                "they get no more GPUs than they hold or must have at least",
            ),
        ),
    }
)
