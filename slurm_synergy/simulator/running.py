"""A job of a simulated world, and what scheduling costs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_synergy.cluster import ObservedJob
from slurm_synergy.core.model import Lease, Placement, Profile, Reason
from slurm_synergy.core.resources import Resources
from slurm_synergy.simulator.learning import Learning
from slurm_synergy.simulator.pace import Pace
from slurm_synergy.simulator.truth import SimulatedJob

__all__ = ["Costs", "Running"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What scheduling costs a job, in seconds; all zero is the ideal world of the papers.

    ``restart_s`` passes without progress after every start but the first, ``checkpoint_s`` at
    every stop, ``profiling_s`` between arrival and the first chance to run.
    """

    restart_s: float = 0.0
    checkpoint_s: float = 0.0
    profiling_s: float = 0.0


@dataclass(slots=True)
class Running:
    """A job in the world. ``done`` samples are as of ``since_s``; before it nothing advances.

    ``generation``, ``granted_s`` and ``stopping`` are what the scheduler remembers of its lease;
    ``last`` is where it ran last, None when coming back there is a restart all the same.
    """

    spec: SimulatedJob
    arrived_s: float
    job_id: int
    done: float = 0.0
    rate: float = 0.0
    since_s: float = 0.0
    placement: Placement | None = None
    granted: tuple[tuple[str, Resources], ...] = ()
    held_since_s: float = 0.0
    gpu_s: float = 0.0
    started_s: float | None = None
    completed_s: float | None = None
    restarts: int = 0
    stopping_until_s: float | None = None
    version: int = 0
    generation: int = 0
    granted_s: float = 0.0
    lease: Lease | None = None
    stopping: Reason | None = None
    last: Placement | None = None
    queue_area: float = 0.0
    waiting: ObservedJob | None = None
    rated: tuple[Placement | None, float] = (None, 0.0)
    pace: Pace | None = None
    learning: Learning | None = None
    held_s: float = 0.0
    held_by_type_s: Mapping[str, float] = field(default_factory=dict)

    def finish_s(self) -> float:
        """When it ends if nothing changes; infinite while it does not advance."""
        if self.rate <= 0 or self.stopping_until_s is not None:
            return float("inf")
        if self.pace is not None:
            return self.since_s + self.pace.left_s(self.done)
        return self.since_s + max(self.spec.samples - self.done, 0.0) / self.rate

    def progress(self, now_s: float) -> None:
        """Bring ``done`` up to ``now_s``."""
        if now_s > self.since_s:
            if self.pace is None or not self.rate:
                self.done = min(self.done + self.rate * (now_s - self.since_s), self.spec.samples)
            else:
                self.done = self.pace.after(self.done, now_s - self.since_s)
            self.since_s = now_s

    def let_go(self, now_s: float) -> None:
        """Count what it has held, at the moment at which it gives that back."""
        if self.placement is not None:
            span_s = now_s - self.held_since_s
            self.gpu_s += span_s * self.placement.gpus
            self.held_s += span_s
            self.held_by_type_s = self.held_until(now_s)

    def held_until(self, now_s: float) -> Mapping[str, float]:
        """Seconds for which it has held GPUs of each type by then."""
        if self.placement is None:
            return self.held_by_type_s
        kind, before = self.placement.gpu_type, self.held_by_type_s
        return {**before, kind: before.get(kind, 0.0) + now_s - self.held_since_s}

    @property
    def belief(self) -> Profile:
        """What the scheduler believes of it now."""
        return self.spec.belief if self.learning is None else self.learning.belief

    def learn(self) -> None:
        """Let the scheduler know what it shows where it runs; progress is up to date."""
        if self.learning is not None and self.placement is not None and self.rate > 0:
            self.learning.watch(self.placement, self.done)
