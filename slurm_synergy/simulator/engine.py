"""Playing a workload: the controller's own rounds, one event after the other.

Two ways of playing exist, and both call :func:`slurm_synergy.round.run_round`:

* :func:`play` is exact. Jobs start, are resized, checkpoint and end at the very second. As on a
  live cluster, a round follows every event after a short delay, and comes periodically otherwise;
  leases are kept.
* :func:`play_rounds` has the semantics of Synergy's reference simulator (algorithms B.8): progress
  and completion happen at round ends, in whole iterations, and all leases end there, so that each
  round is planned from an empty pool. The first round is ``event_delay_s`` after the first arrival.

Rounds in which nothing can change are not played: when nothing has happened since the last one, and
the policy's order cannot have changed by itself (:class:`Reordering`). The last plan then holds on.
Only ties between equal demands that the order would break could fall otherwise.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum

from slurm_synergy.cluster import Hold, Renew
from slurm_synergy.core.decide import Mechanism, Policy, begun, reads_progress, uncollected
from slurm_synergy.core.model import Node
from slurm_synergy.core.values import quick
from slurm_synergy.errors import ModelError
from slurm_synergy.round import Known, RoundResult, run_round
from slurm_synergy.simulator.cluster import (
    Costs,
    Running,
    SimulatedCluster,
    SimulatedRecords,
    VirtualClock,
    World,
)
from slurm_synergy.simulator.in_step import InStep
from slurm_synergy.simulator.truth import SimulatedJob, whole_iterations

__all__ = ["Moment", "Outline", "Played", "Reordering", "play", "play_rounds"]

# More rounds than this without time passing between them: plans chase each other.
_MOST_ROUNDS_AT_ONCE = 50

# Searching for cyclic garbage whenever some hundred values were made takes a quarter of the time;
# every 256 rounds, a thirtieth.
_ROUNDS_BETWEEN_COLLECTIONS = 1024
_YOUNG = 1


class Reordering(Enum):
    """When a policy's order of jobs can change."""

    NEVER = "never"  # a new job comes last: first in, first out
    BY_EVENTS = "events"  # those that run only move further ahead of those that wait
    ALWAYS = "always"  # by the passing of time alone


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The state right after a round."""

    time_s: float
    active: int
    waiting: int
    gpus: int
    cpus: int
    mem_mib: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What is played. ``measured`` are the ids whose completion ends it; empty means all jobs.

    ``quantum_s`` is that of a policy which lets jobs compete anew at its multiples only: a round is
    due at each of them, too.
    """

    nodes: tuple[Node, ...]
    jobs: tuple[SimulatedJob, ...]
    policy: Policy
    mechanism: Mechanism
    round_s: float
    reordering: Reordering = Reordering.ALWAYS
    costs: Costs = field(default_factory=Costs)
    event_delay_s: float = 0.0
    measured: Collection[int] = ()
    quantum_s: float = math.inf
    stopwatch: Callable[[], float] = lambda: 0.0


@dataclass(slots=True)
class Played:
    """What happened: the world at the end, how long each round took, and the state after it."""

    world: World
    began_s: float
    round_ms: list[float] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)


class _Player:
    """What both ways of playing share: arrivals, rounds, and the end."""

    def __init__(self, outline: Outline, world: World) -> None:
        self.outline = outline
        arrivals = sorted(outline.jobs, key=lambda one: (one.job.submitted_s, one.job.job_id))
        if not arrivals:
            raise ModelError("there is no job to simulate")
        self._arrivals = arrivals
        self._next = 0
        self.world = world
        self.world.now_s = arrivals[0].job.submitted_s
        self.played = Played(world=self.world, began_s=self.world.now_s)
        self._seam = (
            SimulatedCluster(self.world),
            SimulatedRecords(self.world),
            VirtualClock(self.world),
        )
        self._known = Known()
        self._policy = begun(outline.policy)
        measured = set(outline.measured) or {one.job.job_id for one in arrivals}
        missing = measured - {one.job.job_id for one in arrivals}
        if missing:
            raise ModelError(f"job {min(missing)} is to be measured but not in the trace")
        self._open = measured
        self._seen_finished = 0
        self._learns = any(one.learn is not None for one in arrivals)

    def is_over(self) -> bool:
        """Whether all measured jobs are done."""
        for one in self.world.finished[self._seen_finished :]:
            self._open.discard(one.job_id)
        self._seen_finished = len(self.world.finished)
        return not self._open

    def next_arrival_s(self) -> float:
        """When the next job can be planned for the first time; infinite when there is none."""
        if self._next == len(self._arrivals):
            return math.inf
        return self._arrivals[self._next].job.submitted_s + self.outline.costs.profiling_s

    def admit(self) -> int:
        """Let in who has arrived by now; how many that were."""
        before = self._next
        while self.next_arrival_s() <= self.world.now_s:
            self.world.arrive(self._arrivals[self._next])
            self._next += 1
        return self._next - before

    def arrivals_matter(self) -> bool:
        """Whether a new job could change a plan made without it."""
        return self.outline.reordering is not Reordering.NEVER or self.world.free_gpus > 0

    def time_matters(self) -> bool:
        """Whether a plan could change by the passing of time alone, or by what is learned."""
        if self._learns and self.world.held:
            return True
        if self.outline.reordering is not Reordering.ALWAYS:
            return False
        return len(self.world.held) < len(self.world.jobs)

    def round(self) -> RoundResult:
        """One round of the controller."""
        outline = self.outline
        if len(self.played.round_ms) % _ROUNDS_BETWEEN_COLLECTIONS == 0:
            gc.collect(_YOUNG)  # what lasts, thousands of jobs, is not looked through again
        began_s = outline.stopwatch()
        result = run_round(
            *self._seam, self._policy, outline.mechanism, outline.round_s, known=self._known
        )
        self.played.round_ms.append((outline.stopwatch() - began_s) * 1e3)
        self.world.settle()
        usage, jobs = self.world.usage, self.world.jobs
        self.played.moments.append(
            Moment(
                time_s=self.world.now_s,
                active=len(jobs),
                waiting=len(jobs) - len(self.world.held),
                gpus=usage.gpus,
                cpus=usage.cpus,
                mem_mib=usage.mem_mib,
            )
        )
        return result

    def stuck(self) -> ModelError:
        """The complaint when jobs are left but nothing will ever happen."""
        left = sorted(self.world.jobs)
        what = "run without advancing" if self.world.held else "wait, but are never started"
        return ModelError(
            f"at {self.world.now_s:.0f} s {len(left)} jobs {what}, the first is job {left[0]}; do "
            "its GPUs, nodes and memory fit into the pool, and does its model run with a "
            "proportional share of memory?"
        )


# exact -----------------------------------------------------------------------------------------


def play(outline: Outline) -> Played:
    """Play ``outline`` exactly. Raises ModelError when jobs can never end."""
    with uncollected():
        return _play(_Player(outline, World(nodes=outline.nodes, costs=outline.costs)))


def _play(player: _Player) -> Played:
    outline = player.outline
    timetable = _Timetable()
    due_s, at_once = player.world.now_s, 0
    while not player.is_over():
        next_s = min(player.next_arrival_s(), timetable.next_s(), due_s)
        if next_s == math.inf:
            raise player.stuck()
        at_once = at_once + 1 if next_s <= player.world.now_s else 0
        if at_once > _MOST_ROUNDS_AT_ONCE + len(outline.jobs):
            raise ModelError(f"at {player.world.now_s:.0f} s plans do not come to rest")
        player.world.advance(max(next_s, player.world.now_s))
        news = timetable.happen(player.world)
        matters = player.arrivals_matter()
        if player.admit() and matters:
            news = True
        if news:
            due_s = min(due_s, player.world.now_s + outline.event_delay_s)
        if due_s <= player.world.now_s:
            result = player.round()
            rests = _is_quiet(result) and not player.time_matters()
            due_s = math.inf if rests else _next_round_s(outline, player.world.now_s)
            timetable.note(player.world)
    return player.played


def _next_round_s(outline: Outline, now_s: float) -> float:
    """When the next round is due if nothing happens."""
    quantum_s = outline.quantum_s
    if quantum_s == math.inf:
        return now_s + outline.round_s
    return min(now_s + outline.round_s, (now_s // quantum_s + 1) * quantum_s)


def _is_quiet(result: RoundResult) -> bool:
    changes = any(not isinstance(action, Renew | Hold) for action in result.actions)
    return not changes and not result.deferred


class _Timetable:
    """When running jobs end and stopping ones are out, as far as known."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, Running]] = []

    def note(self, world: World) -> None:
        """Take in the jobs whose future has changed."""
        for one in world.changed:
            stop_s = one.stopping_until_s
            when_s = one.finish_s() if stop_s is None else stop_s
            if one.placement is not None and when_s < math.inf:
                heapq.heappush(self._heap, (when_s, one.job_id, one.version, one))
        world.changed.clear()

    def next_s(self) -> float:
        """When the next thing happens; infinite when nothing will."""
        while self._heap and self._heap[0][2] != self._heap[0][3].version:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def happen(self, world: World) -> bool:
        """Let everything happen that is due; whether anything was."""
        any_news = False
        while self.next_s() <= world.now_s:
            one = heapq.heappop(self._heap)[3]
            if one.stopping_until_s is not None:
                world.release(one)
            else:
                world.complete(one)
            any_news = True
        return any_news


# as the reference ------------------------------------------------------------------------------


def play_rounds(outline: Outline) -> Played:
    """Play ``outline`` as the reference simulator does. Raises ModelError when jobs cannot end."""
    world = InStep(
        nodes=outline.nodes,
        costs=outline.costs,
        tells_progress=reads_progress(outline.policy, outline.mechanism),
    )
    with uncollected():
        return _play_rounds(_Player(outline, world), world)


def _play_rounds(player: _Player, world: InStep) -> Played:
    outline = player.outline
    world.advance(world.now_s + outline.event_delay_s)
    known: dict[tuple[float, float], float] = {}
    while True:
        player.admit()
        player.round()
        world.changed.clear()
        for one in world.begun():
            world.count_from_now(one, _gain(one, outline.round_s, known))
        count = _rounds_until_news(player, world)
        for _ in range(count - 1):
            world.advance(world.now_s + outline.round_s)
            player.admit()
        world.advance(world.now_s + outline.round_s)
        world.end_round(count)
        if player.is_over():
            world.rest()
            return player.played


def _gain(one: Running, round_s: float, known: dict[tuple[float, float], float]) -> float:
    """Samples of a round; ``known`` has those of rates and iterations seen before."""
    key = (one.rate, one.spec.iteration_samples)
    if key not in known:
        gain = known[key] = whole_iterations(one.spec, one.rate, round_s)
        if gain <= 0:
            raise ModelError(
                f"job {one.job_id} does not finish an iteration in a round of {round_s:g} s; use "
                "longer rounds or exact semantics"
            )
    return known[key]


def _rounds_until_news(player: _Player, world: InStep) -> int:
    """How many rounds the plan can be kept: until a job ends, or arrives and matters."""
    if player.time_matters():
        return 1
    counts = []
    if world.held:
        counts.append(max(1, math.ceil(world.rounds_left() - 1e-9)))
    arrival_s = player.next_arrival_s()
    if arrival_s < math.inf and player.arrivals_matter():
        span_s = arrival_s - world.now_s
        counts.append(max(1, math.ceil(span_s / player.outline.round_s)))
    if not counts:
        raise player.stuck()
    return min(counts)
