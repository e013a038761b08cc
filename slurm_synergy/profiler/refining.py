"""What a running job's own pace says about its profile: pure.

A sweep sees a minute of a job; afterwards the job itself shows, all day long, how fast it is with
the cores that it has. Small differences are taken over little by little (exponential forgetting); a
large one that stays is another phase of the job, of which one point of the curve does not tell the
others: that is for a new sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slurm_synergy.core.model import Profile
from slurm_synergy.core.pipeline import fetch_rate, job_rate, preprocess_rate
from slurm_synergy.core.resources import Resources

__all__ = ["OTHER_PHASE", "Pace", "Sums", "deviation", "pace_between", "refined"]

OTHER_PHASE = 0.20
"""A pace that differs from the expected one by more than this fraction is not a refinement."""

_WEIGHT = 0.2  # of the newest window against all before it
_LOADER_SETS_PACE = 0.10  # share of waiting from which the loader does
_GPUS_SET_PACE = 0.03  # up to which the GPUs do
_FETCH_MARGIN = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What a task has told by some moment: samples of all ranks, and its seconds."""

    samples: int
    stepped_s: float
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast a whole job was for a while, and which part of the time it waited for data."""

    samples_per_s: float
    wait_share: float


def pace_between(before: Sequence[Sums], now: Sequence[Sums]) -> Pace | None:
    """The pace of a job from the sums of its tasks, in the same order; None where it has none.

    Tasks advance in step: the slowest one's rate and the longest wait are the job's.
    """
    if len(before) != len(now) or not now:
        return None
    rates, shares = [], []
    for first, last in zip(before, now, strict=True):
        waited_s = last.waited_s - first.waited_s
        took_s = last.stepped_s - first.stepped_s + waited_s
        samples = last.samples - first.samples
        if took_s <= 0 or samples <= 0 or waited_s < 0:
            return None  # no steps, or another process
        rates.append(samples / took_s)
        shares.append(min(waited_s / took_s, 1.0))
    return Pace(samples_per_s=min(rates), wait_share=max(shares))


def deviation(
    profile: Profile, pace: Pace, gpu_type: str, shares: Sequence[Resources]
) -> float | None:
    """By which fraction the pace is above (or below) that of the profile; None if unknown.

    A cache fills in an epoch, and begins empty after a restart: up to then every pace from that
    without any cache up to the expected one is as expected.
    """
    expected = job_rate(profile, gpu_type, shares)
    if not expected:
        return None
    least = min(expected, _without_cache(profile, len(shares)))
    return pace.samples_per_s / min(expected, max(pace.samples_per_s, least)) - 1


def _without_cache(profile: Profile, nodes: int) -> float:
    """Samples/s of a job over so many nodes at which its data can be read with nothing cached."""
    if profile.pipeline is None:
        return float("inf")
    return nodes * fetch_rate(profile.pipeline, 0)


def refined(profile: Profile, pace: Pace, gpu_type: str, shares: Sequence[Resources]) -> Profile:
    """The profile moved a little towards what was seen of the part that set the pace.

    Where the loader did, the whole curve moves: what makes a sample dearer does so on every core.
    Where reading did or may have done, or both parts were about even, nothing is learned.
    """
    pipeline = profile.pipeline
    gpu_rate = profile.gpu_rate_per_gpu.get(gpu_type)
    if pipeline is None or gpu_rate is None:
        return profile
    gpus, nodes = sum(share.gpus for share in shares), len(shares)
    cpus, mem_mib = min(one.cpus for one in shares), min(one.mem_mib for one in shares)
    loads = preprocess_rate(pipeline, cpus)
    of_node = pace.samples_per_s / nodes
    loader = 1.0
    if pace.wait_share >= _LOADER_SETS_PACE:
        # A slow pace may be that of a cache which is not full yet.
        cached_mib = mem_mib if of_node > loads else 0
        if fetch_rate(pipeline, cached_mib) < _FETCH_MARGIN * loads:
            return profile
        loader = of_node / loads
    elif pace.wait_share > _GPUS_SET_PACE:
        return profile
    else:
        seen = pace.samples_per_s / (gpu_rate * gpus)
        rates = {**profile.gpu_rate_per_gpu, gpu_type: gpu_rate * _moved(seen)}
        profile = replace(profile, gpu_rate_per_gpu=rates)
        loader = max(1.0, of_node / loads)
    points = tuple((count, rate * _moved(loader)) for count, rate in pipeline.preprocess)
    return replace(profile, pipeline=replace(pipeline, preprocess=points))


def _moved(factor: float) -> float:
    return 1 + _WEIGHT * (factor - 1)
