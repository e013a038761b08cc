"""Two simulations of the same jobs side by side: who gains, who loses, and where the time went."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from slurm_synergy.core.model import Node
from slurm_synergy.errors import ModelError
from slurm_synergy.simulator.engine import Moment
from slurm_synergy.simulator.metrics import JobResult

__all__ = [
    "ALIKE",
    "Group",
    "Pair",
    "averaged",
    "cumulative",
    "groups",
    "mean",
    "pairs",
    "tally",
    "utilisation",
]

ALIKE = 0.05
"""Jobs whose completion time changes by less than this part count as unchanged."""

_MOST_BINS = 160


def mean(values: Sequence[float]) -> float:
    """The average; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One job in both simulations."""

    ours: JobResult
    base: JobResult

    @property
    def gain(self) -> float:
        """How many times sooner it is done than in the baseline; below 1 it is later."""
        if self.ours.jct_s <= 0:
            return 1.0
        return self.base.jct_s / self.ours.jct_s


def pairs(ours: Sequence[JobResult], base: Sequence[JobResult]) -> tuple[Pair, ...]:
    """The jobs of both, by gain, the largest first. Raises ModelError if they are not the same."""
    by_id = {one.job_id: one for one in base}
    if by_id.keys() != {one.job_id for one in ours}:
        raise ModelError("the two simulations are not of the same jobs")
    found = [Pair(ours=one, base=by_id[one.job_id]) for one in ours]
    return tuple(sorted(found, key=lambda one: (-one.gain, one.ours.job_id)))


def tally(found: Sequence[Pair]) -> tuple[int, int, int]:
    """How many jobs are done sooner, about as soon, and later."""
    sooner = sum(one.gain > 1 + ALIKE for one in found)
    later = sum(one.gain < 1 / (1 + ALIKE) for one in found)
    return sooner, len(found) - sooner - later, later


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Jobs that have something in common; averages in seconds."""

    name: str
    jobs: int
    ours_s: float
    base_s: float
    queue_s: float
    base_queue_s: float

    @property
    def gain(self) -> float:
        """How many times better the average completion time is."""
        return self.base_s / self.ours_s if self.ours_s > 0 else 1.0


def groups(found: Sequence[Pair], key: Callable[[JobResult], str]) -> tuple[Group, ...]:
    """Averages of the jobs with the same ``key``, the group with most jobs first."""
    members: dict[str, list[Pair]] = {}
    for one in found:
        members.setdefault(key(one.ours), []).append(one)
    made = [
        Group(
            name=name,
            jobs=len(those),
            ours_s=mean([one.ours.jct_s for one in those]),
            base_s=mean([one.base.jct_s for one in those]),
            queue_s=mean([one.ours.queue_s for one in those]),
            base_queue_s=mean([one.base.queue_s for one in those]),
        )
        for name, those in members.items()
    ]
    return tuple(sorted(made, key=lambda one: (-one.jobs, one.name)))


def cumulative(values: Sequence[float], most: int = 300) -> tuple[tuple[float, float], ...]:
    """The part of ``values`` that is at most x, over x; no more than about ``most`` points."""
    ordered = sorted(values)
    count = len(ordered)
    if not count:
        return ()
    every = max(1, count // most)
    picked = sorted({*range(every - 1, count, every), 0, count - 1})
    return tuple((ordered[index], (index + 1) / count) for index in picked)


def utilisation(
    moments: Sequence[Moment], nodes: Sequence[Node], end_s: float, held: str
) -> tuple[tuple[float, float], ...]:
    """The part of the pool that leases hold, averaged over equal spans of time.

    ``held`` is ``gpus``, ``cpus`` or ``mem_mib``. Points are (middle of the span in seconds since
    the first round, part).
    """
    total = sum(getattr(node.total, held) for node in nodes)
    levels = [getattr(one, held) / total for one in moments]
    return averaged([one.time_s for one in moments], levels, end_s)


def averaged(
    times_s: Sequence[float], levels: Sequence[float], end_s: float
) -> tuple[tuple[float, float], ...]:
    """A staircase, level ``i`` from ``times_s[i]`` on, as averages over equal spans."""
    if not times_s or end_s <= times_s[0]:
        return ()
    areas = [0.0]
    for index in range(1, len(times_s)):
        areas.append(areas[-1] + levels[index - 1] * (times_s[index] - times_s[index - 1]))
    bins = min(_MOST_BINS, max(20, len(times_s)))
    width_s = (end_s - times_s[0]) / bins

    def area_until(when_s: float) -> float:
        index = bisect_right(times_s, when_s) - 1
        return areas[index] + levels[index] * (when_s - times_s[index])

    edges = [area_until(times_s[0] + index * width_s) for index in range(bins + 1)]
    return tuple(
        ((index + 0.5) * width_s, max(high - low, 0.0) / width_s)
        for index, (low, high) in enumerate(pairwise(edges))
    )
