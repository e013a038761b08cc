"""The search over core counts of Synergy's optimistic profiling (OSDI '22, section 3.1): pure.

A job's speed is measured at few core counts, with its data cached, and known at all of them. The
search is a value that says what to measure next and takes the answer; it has no clock and does no
I/O, so that a launcher, a command outside Slurm and a test drive the same code::

    sweep = Sweep(span=SweepSpan(gpus=4, most_cpus=48, proportional_cpus=12))
    while (cpus := sweep.next_cpus) is not None:
        sweep = sweep.fed(Measurement(cpus=cpus, samples_per_s=measure(cpus), iterations=50))
    result = sweep.result()

It begins at the top, then takes one core per GPU (where it ends when the GPUs are kept busy even
so) and the proportional share, which is always measured. From then on it divides the interval in
which the speed is least known. What is known there follows from two facts: more cores never make
a job slower, and no core adds more than the cores before it did on average. Between two measured
points this leaves an upper and a lower bound; where they lie within the threshold of 10 %, nothing
is measured, and their middle is at most 5 % off. Points that are left find the knee: the fewest
cores within 3 % of the top speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise

from slurm_synergy.errors import ModelError

__all__ = [
    "MOST_POINTS",
    "PLATEAU",
    "THRESHOLD",
    "Confidence",
    "Measurement",
    "Sweep",
    "SweepResult",
    "SweepSpan",
]

THRESHOLD = 0.10
"""A gain below this fraction is not worth a measurement."""

MOST_POINTS = 8
"""Core counts that one sweep measures at most."""

PLATEAU = 0.97
"""From this fraction of the top speed on, more cores are taken to bring nothing."""

# Measured rates scatter by a few per cent: a smaller excess over proportional growth proves
# nothing against "no core adds more than those before it".
_SCATTER = 0.05
# What a slope between two points is allowed to be off at either end, for the same reason.
_OFF = 0.02
# The foot of a curve, where a training process shares its only core with the loader, is divided
# further while it spans at least this factor; finer, a straight line is good enough.
_WIDE = 4
# Below this share of a step a wait is what handing over a batch costs, not a slow loader.
_BUSY_WAIT_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSpan:
    """What one sweep may measure on one node.

    ``gpus`` of the job there, ``most_cpus`` it can be given, ``proportional_cpus`` its GPU-
    proportional share, ``step`` cores at a time (those of all tasks of the node; 0: as many as
    GPUs). Counts are cores. Raises ModelError when nothing can be measured.
    """

    gpus: int
    most_cpus: int
    proportional_cpus: int
    step: int = 0

    def __post_init__(self) -> None:
        if min(self.gpus, self.most_cpus, self.proportional_cpus) < 1 or self.step < 0:
            raise ModelError(
                f"a sweep over {self.most_cpus} cores for {self.gpus} GPUs, proportional "
                f"{self.proportional_cpus}, step {self.step}: the first three are at least 1"
            )

    @property
    def counts(self) -> tuple[int, ...]:
        """The core counts that may be measured, ascending: one core per GPU up to the top."""
        least = min(self.gpus, self.most_cpus)
        step = min(self.step or self.gpus, self.most_cpus)
        rising = set(range(least, self.most_cpus + 1, step))
        return tuple(sorted(rising | {self.proportional}))

    @property
    def proportional(self) -> int:
        """The proportional share as far as it can be had."""
        return min(self.proportional_cpus, self.most_cpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What ``iterations`` steps with ``cpus`` cores came to, on one node.

    ``samples_per_s`` of all the job's GPUs there. ``wait_share`` is the part of a step that went
    into waiting for data, ``busy_samples_per_s`` what the rate would be without these waits; None
    where the job does not tell. Raises ModelError for a rate that is not positive and finite.
    """

    cpus: int
    samples_per_s: float
    iterations: int
    wait_share: float | None = None
    busy_samples_per_s: float | None = None

    def __post_init__(self) -> None:
        rates = (self.samples_per_s, self.busy_samples_per_s or self.samples_per_s)
        if self.cpus < 1 or self.iterations < 1:
            raise ModelError(f"a measurement of {self.iterations} steps on {self.cpus} cores")
        if not all(0 < rate < math.inf for rate in rates):
            raise ModelError(f"{self.cpus} cores measured at {rates} samples/s: must be positive")
        if self.wait_share is not None and not 0 <= self.wait_share <= 1:
            raise ModelError(f"a share of waiting of {self.wait_share}: must be in 0..1")


class Confidence(Enum):
    """How far a measured profile can be trusted."""

    HIGH = "high"  # the search went to its end: cells within 5 % but for the scatter of the job
    LOW = "low"  # it was cut off, or its points contradict each other


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepResult:
    """What a sweep found.

    ``curve`` holds (cores, samples/s) of the whole job on the node, ascending, linear in between;
    ``points`` the measurements behind it in the order they were made. ``gpu_samples_per_s`` is
    what the GPUs reach when data is always ready, ``gpu_bound`` whether that was seen (else it is
    computed from the time between waits, or a lower bound where the job tells no waits);
    ``knee_cpus`` the fewest cores within 3 % of the top. ``doubt`` is the largest fraction by
    which bounds still differ, ``why`` says in words why confidence is low.
    """

    span: SweepSpan
    points: tuple[Measurement, ...]
    curve: tuple[tuple[int, float], ...]
    gpu_samples_per_s: float
    gpu_bound: bool
    knee_cpus: int
    doubt: float
    confidence: Confidence
    why: str = ""

    @property
    def iterations(self) -> int:
        """Steps that were measured in all."""
        return sum(point.iterations for point in self.points)

    def rate(self, cpus: int) -> float:
        """Samples/s at ``cpus`` cores with the data cached; proportional below the curve."""
        return _on_curve(self.curve, cpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The state of one search; ``fed`` and ``cut`` return the next state.

    ``stopped`` is why it was cut off early; empty: it was not.
    """

    span: SweepSpan
    points: tuple[Measurement, ...] = ()
    stopped: str = ""
    most_points: int = MOST_POINTS
    threshold: float = THRESHOLD

    @property
    def done(self) -> bool:
        """Nothing is left to measure."""
        return self.next_cpus is None

    @property
    def next_cpus(self) -> int | None:
        """The core count to measure next; None when the search is over."""
        if self.stopped:
            return None
        known = {point.cpus for point in self.points}
        counts = self.span.counts
        opening = [counts[-1], counts[0], self.span.proportional]
        for cpus in opening:
            if cpus not in known:
                return cpus
        if len(known) >= max(self.most_points, len(set(opening))):
            return None
        rates = _rising(self.points)
        if rates[0][1] >= PLATEAU * rates[-1][1]:
            return None  # one core per GPU keeps the GPUs as busy as all cores do
        doubtful = _most_doubtful(rates, counts)
        if doubtful is not None and doubtful[1] > self.threshold:
            return doubtful[0]
        return _beside_knee(self.points, rates, counts)

    def fed(self, point: Measurement) -> Sweep:
        """The search after ``point`` was measured; a second one at a core count replaces the first.

        Raises ModelError for a core count outside the span.
        """
        if not self.span.counts[0] <= point.cpus <= self.span.counts[-1]:
            raise ModelError(f"{point.cpus} cores are outside the sweep over {self.span.counts}")
        others = tuple(old for old in self.points if old.cpus != point.cpus)
        return replace(self, points=(*others, point))

    def cut(self, why: str) -> Sweep:
        """The search given up; what was measured so far counts, with low confidence."""
        return self if self.done else replace(self, stopped=why)

    def result(self) -> SweepResult:
        """What is known now. Raises ModelError before the first measurement."""
        if not self.points:
            raise ModelError(f"a sweep without measurements has no result: {self.stopped}")
        rates = _rising(self.points)
        top = rates[-1][1]
        counts = self.span.counts
        doubtful = _most_doubtful(rates, counts)
        curve = _curve(rates, counts)
        gpu_rate, gpu_bound = _gpu_rate(self.points, rates)
        why = self.stopped or _contradiction(self.points, rates) or self._unclear(doubtful)
        return SweepResult(
            span=self.span,
            points=self.points,
            curve=curve,
            gpu_samples_per_s=gpu_rate,
            gpu_bound=gpu_bound,
            knee_cpus=_knee(curve, counts, PLATEAU * top),
            doubt=doubtful[1] if doubtful else 0.0,
            confidence=Confidence.LOW if why else Confidence.HIGH,
            why=why,
        )

    def _unclear(self, doubtful: tuple[int, float] | None) -> str:
        """Why the points are too few; empty when they are not."""
        if doubtful is None or doubtful[1] <= 2 * self.threshold:
            return ""
        return f"{len(self.points)} points leave {doubtful[1]:.0%} of doubt at {doubtful[0]} cores"


def _rising(points: Sequence[Measurement]) -> list[tuple[int, float]]:
    """The points by cores, rates made non-decreasing: neighbours that fall are averaged."""
    blocks: list[tuple[list[int], float]] = []
    for point in sorted(points, key=lambda one: one.cpus):
        counts, rate = [point.cpus], point.samples_per_s
        while blocks and blocks[-1][1] > rate:
            before, before_rate = blocks.pop()
            rate = (rate * len(counts) + before_rate * len(before)) / (len(counts) + len(before))
            counts = before + counts
        blocks.append((counts, rate))
    return [(cpus, rate) for counts, rate in blocks for cpus in counts]


@dataclass(frozen=True, slots=True)
class _Gap:
    """What lies between two neighbouring measured points, and what is known of it.

    ``before`` and ``after`` are the samples/s that one more core adds at most, by the points on
    the left and at least, by those on the right.
    """

    low: tuple[int, float]
    high: tuple[int, float]
    before: float
    after: float
    between: tuple[int, ...]

    @property
    def grows_faster(self) -> bool:
        """Whether cores between the points add more than those before: bounds do not hold."""
        return _grows_faster(self.low, self.high)

    def bounds(self, cpus: int) -> tuple[float, float]:
        """Least and most samples/s at ``cpus``."""
        (a, a_rate), (b, b_rate) = self.low, self.high
        least = a_rate + (b_rate - a_rate) * (cpus - a) / (b - a)
        most = min(a_rate + self.before * (cpus - a), b_rate - self.after * (b - cpus))
        return least, max(least, most)

    def most_doubtful(self) -> tuple[int, float]:
        """The core count of which least is known, and the fraction by which bounds differ."""
        if self.grows_faster:
            middle = math.sqrt(self.low[0] * self.high[0])
            at = min(self.between, key=lambda cpus: abs(cpus - middle))
            wide = self.high[0] >= _WIDE * self.low[0]
            return at, self.high[1] / self.low[1] - 1 if wide else 0.0
        doubts = {
            cpus: most / least - 1 for cpus in self.between for least, most in [self.bounds(cpus)]
        }
        return max(doubts.items(), key=lambda item: item[1])


def _grows_faster(low: tuple[int, float], high: tuple[int, float]) -> bool:
    return high[1] * low[0] > (1 + _SCATTER) * low[1] * high[0]


def _gaps(rates: Sequence[tuple[int, float]], counts: Sequence[int]) -> list[_Gap]:
    """The gaps in which something is unmeasured, from few cores to many."""
    gaps = []
    for i, (low, high) in enumerate(pairwise(rates)):
        between = tuple(cpus for cpus in counts if low[0] < cpus < high[0])
        if not between:
            continue
        before = low[1] / low[0]
        if i > 0:
            left = _slope(rates[i - 1], low, _OFF)
            before = left if _grows_faster(rates[i - 1], low) else min(before, left)
        after = 0.0
        if i + 2 < len(rates):
            after = max(0.0, _slope(high, rates[i + 2], -_OFF))
        gaps.append(_Gap(low, high, before, after, between))
    return gaps


def _slope(low: tuple[int, float], high: tuple[int, float], off: float) -> float:
    """Samples/s that a core adds between two points whose rates are ``off`` wrong."""
    return (high[1] * (1 + off) - low[1] * (1 - off)) / (high[0] - low[0])


def _most_doubtful(
    rates: Sequence[tuple[int, float]], counts: Sequence[int]
) -> tuple[int, float] | None:
    """The unmeasured core count of which least is known, and by what fraction bounds differ."""
    doubtful = [gap.most_doubtful() for gap in _gaps(rates, counts)]
    return max(doubtful, key=lambda item: item[1], default=None)


def _beside_knee(
    points: Sequence[Measurement], rates: Sequence[tuple[int, float]], counts: Sequence[int]
) -> int | None:
    """What to measure to know the knee to one step; None when it is known."""
    target = PLATEAU * rates[-1][1]
    above = min(cpus for cpus, rate in rates if rate >= target)
    below = max(cpus for cpus, rate in rates if rate < target)
    between = [cpus for cpus in counts if below < cpus < above]
    if not between:
        return None
    if points[-1].cpus == above and len(points) > 3:
        return between[len(between) // 2]  # the last guess was too high: halve
    guess = _knee(_curve(rates, counts), counts, target)
    return max([cpus for cpus in between if cpus < guess], default=between[0])


def _curve(
    rates: Sequence[tuple[int, float]], counts: Sequence[int]
) -> tuple[tuple[int, float], ...]:
    """The measured points and, where bounds leave room, the middle of the widest place."""
    middles = []
    for gap in _gaps(rates, counts):
        if not gap.grows_faster:
            least, most = gap.bounds(at := gap.most_doubtful()[0])
            if most > least * (1 + 1e-9):
                middles.append((at, math.sqrt(least * most)))
    return tuple(sorted([*rates, *middles]))


def _on_curve(curve: Sequence[tuple[int, float]], cpus: int) -> float:
    first_cpus, first_rate = curve[0]
    if cpus <= first_cpus:
        return first_rate * max(cpus, 0) / first_cpus
    for (a, a_rate), (b, b_rate) in pairwise(curve):
        if cpus <= b:
            return a_rate + (b_rate - a_rate) * (cpus - a) / (b - a)
    return curve[-1][1]


def _knee(curve: Sequence[tuple[int, float]], counts: Sequence[int], target: float) -> int:
    """Fewest cores of ``counts`` that reach ``target`` samples/s on the curve."""
    return next((cpus for cpus in counts if _on_curve(curve, cpus) >= target), counts[-1])


def _gpu_rate(
    points: Sequence[Measurement], rates: Sequence[tuple[int, float]]
) -> tuple[float, bool]:
    """Samples/s when data is always ready, and whether that was seen rather than computed."""
    top_cpus, top_rate = rates[-1]
    top = max(points, key=lambda point: point.cpus)
    if top.wait_share is not None and top.busy_samples_per_s is not None:
        if top.wait_share > _BUSY_WAIT_SHARE:
            return max(top_rate, top.busy_samples_per_s), False
        return top_rate, True
    flat = any(rate >= PLATEAU * top_rate for cpus, rate in rates if cpus < top_cpus)
    return top_rate, flat


def _contradiction(points: Sequence[Measurement], rates: Sequence[tuple[int, float]]) -> str:
    """Why the points cannot all be right: fewer cores were much faster; empty when they can."""
    smooth = dict(rates)
    worst = max(points, key=lambda point: abs(point.samples_per_s / smooth[point.cpus] - 1))
    off = worst.samples_per_s / smooth[worst.cpus] - 1
    if abs(off) <= THRESHOLD:
        return ""
    return (
        f"{worst.cpus} cores were {abs(off):.0%} {'faster' if off > 0 else 'slower'} than fits the "
        "other points: something else slowed or sped up the job"
    )
