"""The world of the reference semantics: all leases end together, at the ends of rounds.

Most jobs start again at once where they were. Those just go on: what they have done and held is
counted in columns, a row for each, and a job itself is brought up to date when it leaves its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from slurm_synergy.cluster import Action, Record, Start
from slurm_synergy.core.model import Placement
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.sequences import changes
from slurm_synergy.core.values import maker
from slurm_synergy.simulator.running import Running
from slurm_synergy.simulator.world import World

__all__ = ["InStep"]

_RECORD = maker(Record)
_LEAST_ROWS = 64
# A job is done when all but this part of its samples are, which is what sums of floats may lack.
_NEARLY = 1 - 1e-12


class _Columns:
    """Running jobs by row: samples done and those of a round, GPUs, and what was held so far."""

    __slots__ = ("_free", "_row_of", "_table", "jobs")

    # Samples done, all samples, where it counts as done, samples of a round; GPUs; GPU seconds,
    # seconds, and seconds on the type of GPU where it is.
    DONE, SAMPLES, ENOUGH, GAIN, GPUS, GPU_S, HELD_S, TYPE_S = range(8)
    _EMPTY = (0.0, np.inf, np.inf, 1.0, 0.0, 0.0, 0.0, 0.0)

    def __init__(self) -> None:
        self.jobs: list[Running | None] = []
        self._row_of: dict[int, int] = {}
        self._free: list[int] = []
        self._table = np.empty((8, 0))
        self._grow(_LEAST_ROWS)

    def _grow(self, count: int) -> None:
        more = np.repeat(np.array(self._EMPTY)[:, None], count, axis=1)
        self._free += range(len(self.jobs) + count - 1, len(self.jobs) - 1, -1)
        self.jobs += [None] * count
        self._table = np.concatenate([self._table, more], axis=1)

    def add(self, one: Running, placement: Placement, gain: float) -> None:
        """Count for a job from now on."""
        if not self._free:
            self._grow(len(self.jobs))
        row = self._row_of[one.job_id] = self._free.pop()
        self.jobs[row] = one
        samples, type_s = one.spec.samples, one.held_by_type_s.get(placement.gpu_type, 0.0)
        self._table[:, row] = (
            one.done,
            samples,
            samples * _NEARLY,
            gain,
            placement.gpus,
            one.gpu_s,
            one.held_s,
            type_s,
        )

    def remove(self, one: Running) -> None:
        """Bring a job up to date, as of the last ``hold``, and count no more for it."""
        row = self._row_of.pop(one.job_id, None)
        if row is None:
            return
        assert one.placement is not None
        values = self._table[:, row].tolist()
        one.done, one.gpu_s, one.held_s = values[self.DONE], values[self.GPU_S], values[self.HELD_S]
        if one.held_s > 0:
            kind = one.placement.gpu_type
            one.held_by_type_s = {**one.held_by_type_s, kind: values[self.TYPE_S]}
        self.jobs[row] = None
        self._free.append(row)
        self._table[:, row] = self._EMPTY

    def rounds_left(self) -> float:
        """After how many rounds the first of them is done; infinite where there is none."""
        table = self._table
        left = table[self.SAMPLES] - table[self.DONE]
        left /= table[self.GAIN]
        return float(np.minimum.reduce(left))

    def advance(self, count: int) -> list[Running]:
        """``count`` rounds of progress; who is done with that, ascending by id."""
        table = self._table
        table[self.DONE] += count * table[self.GAIN]
        rows = (table[self.DONE] >= table[self.ENOUGH]).nonzero()[0].tolist()
        found = [one for one in map(self.jobs.__getitem__, rows) if one is not None]
        return sorted(found, key=lambda one: one.job_id)

    def hold(self, since_s: float, now_s: float) -> None:
        """All of them have held their places since then."""
        table, span_s = self._table, now_s - since_s
        table[self.GPU_S] += span_s * table[self.GPUS]
        table[self.HELD_S] += span_s
        table[self.TYPE_S] = table[self.TYPE_S] + now_s - since_s

    def accounts(self) -> Iterator[tuple[Running, float, float, float]]:
        """Each job with its samples done, GPU seconds, and seconds on its type of GPU."""
        wanted = self._table[[self.DONE, self.GPU_S, self.TYPE_S]].tolist()
        for one, done, gpu_s, type_s in zip(self.jobs, *wanted, strict=True):
            if one is not None:
                yield one, done, gpu_s, type_s


@dataclass(slots=True)
class InStep(World):
    """A world in which all leases end together, by ``end_round``.

    Unless ``tells_progress``, the scheduler is not told how far jobs are and how often they were
    restarted: for policies and mechanisms that do not ask. After each round of the controller comes
    ``settle``.
    """

    tells_progress: bool = True
    # Whose leases have just ended: their places stay theirs until others are started.
    _parked: dict[int, Running] = field(default_factory=dict)
    # Who was started since, elsewhere than before or with other shares.
    _fresh: list[Running] = field(default_factory=list)
    # The starts of all that were started by the last round.
    _starts: Sequence[Start] = ()
    # Who gave back a place since the round before.
    _left: list[Running] = field(default_factory=list)
    _columns: _Columns = field(default_factory=_Columns)
    _since_s: float = 0.0

    def free(self) -> dict[str, Resources]:
        """As of any world; all of it right after leases have ended."""
        if not self._parked:
            return World.free(self)
        return {node.name: node.capacity for node in self.nodes}

    def advance(self, to_s: float) -> None:
        """Let time pass; who was not started again by now has given back its place."""
        if self._parked:
            self._part_all()
        World.advance(self, to_s)

    def start(self, one: Running, placement: Placement) -> None:
        """Give a pending job its resources."""
        self._part_all()
        World.start(self, one, placement)
        self._fresh.append(one)

    def start_all(self, starts: Sequence[Start]) -> bool:
        """As of any world; who starts where it was just goes on."""
        if self.held:
            self._part_all()
        others, gone = changes(self._starts, starts)
        self._starts = starts
        parked, jobs = self._parked, self.jobs
        left = [action.job_id for action in gone if action.job_id in parked]
        moved = self._movable(left, others)
        self._part([parked[job_id] for job_id in left if job_id not in moved])
        for job_id, one in moved.items():
            self._give_back(one)
            del parked[job_id]
        self._parked, self.held = {}, {**self.held, **parked} if self.held else parked
        if not others or World.start_all(self, others):
            begun = [action.job_id for action in others if action.job_id not in moved]
            self._fresh += [jobs[job_id] for job_id in begun]
            return True
        self._parked = {job_id: self.held.pop(job_id) for job_id in list(parked)}
        self._part_all()
        for one in moved.values():
            self._leave(one)
        return False

    def _movable(self, left: Iterable[int], others: Iterable[Start]) -> dict[int, Running]:
        """Who goes on elsewhere with just the same shares, so that nothing counts anew."""
        parked, leaving, found = self._parked, set(left), {}
        for action in others:
            if action.job_id in leaving:
                one, there = parked[action.job_id], action.placement
                here = one.placement
                if here is not None and one.spec.training is None and _alike(here, there):
                    found[action.job_id] = one
        return found

    def settle(self) -> None:
        """A round of the controller is over: who was not started has given back its place."""
        if self._parked:
            self._part_all()
        for one in self._left:
            if one.placement is None:
                one.last = None  # whoever waits and comes back restarts
        self._left = []
        self._since_s = self.now_s

    def grant(self, actions: Iterable[Action]) -> None:
        """All leases end before anybody asks about them."""

    def begun(self) -> Sequence[Running]:
        """Who was started in this round and does not just go on."""
        return self._fresh

    def count_from_now(self, one: Running, gain: float) -> None:
        """Count for a job that began anew and makes ``gain`` samples a round."""
        assert one.placement is not None
        self._columns.add(one, one.placement, gain)

    def rounds_left(self) -> float:
        """After how many rounds the first of those that run is done."""
        return self._columns.rounds_left()

    def end_round(self, count: int) -> None:
        """Credit ``count`` rounds of progress, complete who is done, and end all leases."""
        now_s, columns = self.now_s, self._columns
        for one in columns.advance(count):
            columns.remove(one)
            one.since_s, one.held_since_s = now_s, self._since_s
            self.complete(one)
        columns.hold(self._since_s, now_s)
        for one in self._fresh:
            self._stale.pop(one.job_id, None)
        if self.tells_progress:
            self._tell()
        self._fresh = []
        self._begun.clear()
        self._parked, self.held = self.held, {}

    def rest(self) -> None:
        """All that runs gives its place back, each job brought up to date."""
        self._part_all()

    def _part_all(self) -> None:
        self._part(list(self._parked.values()))
        self._starts = ()

    def _part(self, several: Iterable[Running]) -> None:
        """Let parked jobs give back their places."""
        for one in several:
            self._give_back(one)
            del self._parked[one.job_id]
            self._leave(one)

    def _give_back(self, one: Running) -> None:
        """What a job has is free."""
        assert one.placement is not None
        self._use(one.placement.shares, -1)
        for name, share in one.granted:
            free = self._free[name]
            free[0] += share.gpus
            free[1] += share.mem_mib

    def _leave(self, one: Running) -> None:
        """A job that has given back its place has none."""
        self._columns.remove(one)
        one.placement, one.granted, one.rate = None, (), 0.0
        one.lease = one.stopping = one.stopping_until_s = None
        one.generation = 0
        one.since_s = one.held_since_s = self.now_s
        one.version += 1
        self._left.append(one)

    def _tell(self) -> None:
        """Let the scheduler know how far jobs are."""
        seen, changed, records = self._seen, self._changed, self._records
        for one, done, gpu_s, type_s in self._columns.accounts():
            placement, job_id = one.placement, one.job_id
            assert placement is not None
            seen[job_id] = changed[job_id] = self._waiting(one)
            records[job_id] = _RECORD(
                job_id=job_id,
                done_samples=done,
                attained_service_gpu_s=gpu_s,
                profile=one.spec.belief if one.learning is None else one.belief,
                held_s={**one.held_by_type_s, placement.gpu_type: type_s},
            )


def _alike(one: Placement, other: Placement) -> bool:
    """Whether a rigid job is as fast with both: the same shares, wherever they are."""
    if one.gpu_type != other.gpu_type or len(one.shares) != len(other.shares):
        return False
    pairs = zip(one.shares, other.shares, strict=True)
    return all([here is there or here == there for (_, here), (_, there) in pairs])  # noqa: C419 - quicker
