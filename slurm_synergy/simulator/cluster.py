"""The simulated world behind the seam of :mod:`slurm_synergy.cluster`.

A :class:`World` holds what is: time, nodes, jobs and their progress. A round sees it through
:class:`SimulatedCluster`, :class:`SimulatedRecords` and :class:`VirtualClock`, as it sees Slurm and
the ledger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_synergy.cluster import Action, Observation, Outcome, Record, Resize, Start, Stop
from slurm_synergy.core.model import JobStatus, Plan, Profile, Reason, ReasonCode, Snapshot
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.sequences import alike
from slurm_synergy.core.values import maker
from slurm_synergy.errors import ClusterError
from slurm_synergy.simulator.running import Costs, Running
from slurm_synergy.simulator.world import World

__all__ = ["Costs", "Running", "SimulatedCluster", "SimulatedRecords", "VirtualClock", "World"]

_OUTCOME = maker(Outcome)


class VirtualClock:
    """The world's time."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now_s(self) -> float:
        """Seconds since the simulation's epoch."""
        return self._world.now_s


class SimulatedCluster:
    """The world as a :class:`~slurm_synergy.cluster.Cluster`."""

    def __init__(self, world: World) -> None:
        self._world = world
        # All that was started the last time, and the outcome of each.
        self._started: tuple[Sequence[Start], list[Outcome]] = ((), [])

    def observe(self) -> Observation:
        """All that has arrived and has not ended."""
        news = self._world.news()
        return Observation(
            nodes=self._world.nodes,
            jobs=tuple(self._world.seen().values()),
            free=self._world.free(),
            news=news,
        )

    def apply(self, action: Action, status: JobStatus) -> Outcome:
        """Carry out one action. Raises ClusterError for what Slurm would refuse."""
        if isinstance(action, Start):
            self._world.start(self._world.jobs[action.job_id], action.placement)
        elif isinstance(action, Resize):
            self._world.resize(self._world.jobs[action.job_id], action.placement)
        elif isinstance(action, Stop):
            self._world.stop(self._world.jobs[action.job_id])
        return Outcome(action=action, done=True)

    def start_all(
        self, starts: Sequence[Start], statuses: Mapping[int, JobStatus]
    ) -> tuple[Outcome, ...]:
        """As ``apply`` of each."""
        if self._world.start_all(starts):
            return tuple(self._done(starts))
        jobs, start, outcomes = self._world.jobs, self._world.start, []
        for action in starts:
            try:
                start(jobs[action.job_id], action.placement)
                outcomes.append(_OUTCOME(action=action, done=True))
            except ClusterError as err:
                reason = Reason(code=ReasonCode.ACTION_FAILED, text=str(err))
                outcomes.append(Outcome(action=action, done=False, reason=reason))
        return tuple(outcomes)

    def _done(self, starts: Sequence[Start]) -> list[Outcome]:
        """That each was carried out; as the last time where it is the very same action."""
        before, outcomes = self._started
        same = alike(before, starts)
        known = dict(zip(map(id, before[same:]), outcomes[same:], strict=True))
        found = outcomes[:same] + [
            known.get(id(action)) or _OUTCOME(action=action, done=True) for action in starts[same:]
        ]
        self._started = starts, found
        return found


class SimulatedRecords:
    """Records in memory: leases and stops; progress is the world's."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._round = 0

    def read(self) -> Mapping[int, Record]:
        """Records by job id."""
        return self._world.records()

    def draining(self) -> bool:
        """Nobody drains a simulation."""
        return False

    def next_round(self) -> int:
        """One more than the last."""
        self._round += 1
        return self._round

    def intend(self, round_number: int, actions: Sequence[Action]) -> None:
        """Nothing can be lost here."""

    def commit(self, round_number: int, outcomes: Sequence[Outcome], snapshot: Snapshot) -> None:
        """Keep leases granted, changed and about to end."""
        self._world.grant(outcome.action for outcome in outcomes if outcome.done)

    def journal(
        self,
        snapshot: Snapshot,
        plan: Plan,
        actions: Sequence[Action],
        outcomes: Sequence[Outcome],
        took_s: Mapping[str, float],
        free: Mapping[str, Resources] | None = None,
    ) -> None:
        """The simulation's own results take the journal's place."""

    def profile(self, key: str) -> Profile | None:
        """Beliefs come with each job's record."""
        return None
