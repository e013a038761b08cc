"""Sia: the GPU type and number for every job, all at once (SOSP '23; algorithms part C).

Each round is one assignment of configurations to jobs, in which a job gains by how much faster it
learns there than on its smallest one, with less for those that are fast already, and less for a
move the more restarts have cost it. What is chosen is then placed with as few moves as possible.
Cores and memory are left to the mechanism.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slurm_synergy.core.assignment import IDLE, Assignment, Choices, Ints, assign
from slurm_synergy.core.columns import suits
from slurm_synergy.core.configurations import Capacities, tally
from slurm_synergy.core.contest import Contest, arrival, gpus_of
from slurm_synergy.core.elastic import Shapes, configuration_of
from slurm_synergy.core.market import Choice, Market, amount
from slurm_synergy.core.model import (
    Configuration,
    Decision,
    Elasticity,
    Grant,
    JobPhase,
    JobStatus,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.packing import Request, Requests, parts_of
from slurm_synergy.core.placer import Placed, place_configurations
from slurm_synergy.core.room import GpuLayout, Room
from slurm_synergy.core.rounds_of_time import is_renewal
from slurm_synergy.core.snapshot import held
from slurm_synergy.core.valuation import IDLE_COST, Floats, gains, normalise, restart_factor
from slurm_synergy.core.worth import Worth, worth_of

__all__ = ["SIA", "Offer", "Sia"]

# What standing in the queue counts for: it decides between jobs that gain the same.
_TIE = 1e-6
_PARAMETERS = (
    "power",
    "idle_cost",
    "most_factor",
    "restart_weight",
    "moves_between_rounds",
    "gap",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One round's matrix and what was chosen; ``gains`` is over being idle."""

    worth: Worth
    gains: Floats
    found: Assignment

    def price(self, column: int) -> float:
        """What the other jobs would gain with the GPUs of a configuration, at the margin."""
        return float(self.found.prices @ self.worth.usage.takes[:, column])

    def prices(self) -> dict[str, float]:
        """What one GPU of each type is worth at the margin."""
        prices: dict[str, float] = {}
        for kind, price in zip(self.worth.usage.gpu_types, self.found.prices, strict=True):
            # The first row of a type counts every GPU, those after it only larger pieces.
            prices.setdefault(kind, round(float(price), 6))
        return prices


@dataclass(frozen=True, slots=True, kw_only=True)
class Sia:
    """The policy. ``power`` is the fairness exponent p, ``idle_cost`` lambda, ``gap`` how near to
    the best choice is near enough, relative. ``most_factor`` is what a move counts at most of the
    same gain in place: it must be below 1, or jobs could change places for ever. A restart counts
    as ``restart_weight`` times the seconds that it takes; 1 is the paper's. All jobs are planned
    anew once in each ``round_s``; unless ``moves_between_rounds``, the rounds between these, after
    an event, move jobs only where another one would wait otherwise (ADR 065)."""

    name: str = "sia"
    power: float = -0.5
    idle_cost: float = IDLE_COST
    gap: float = 1e-4
    most_factor: float = 0.999
    restart_weight: float = 2.0
    moves_between_rounds: bool = False

    @property
    def by_rounds(self) -> bool:
        """Whether plans are made at whole multiples of ``round_s``, as the others are."""
        return not self.moves_between_rounds

    @property
    def parameters(self) -> Mapping[str, float]:
        """The settings of the policy, by name."""
        return {name: getattr(self, name) for name in _PARAMETERS}

    def as_reported(self, report: Mapping[str, object]) -> Sia:
        """The policy with the settings that a plan's solver report names."""
        said = report.get("parameters")
        if not isinstance(said, Mapping):
            return self
        changes: dict[str, Any] = {
            name: type(getattr(self, name))(said[name]) for name in _PARAMETERS if name in said
        }
        return replace(self, **changes)

    def choose(self, snapshot: Snapshot) -> Decision:
        """A configuration for each job that gets one."""
        decided = self._round(snapshot).decision
        return replace(decided, solver={**decided.solver, "parameters": self.parameters})

    def _round(self, snapshot: Snapshot) -> _Round:
        """The round with everybody who runs where they are, or with all planned anew."""
        everybody = Contest.of(snapshot)
        if not self.moves_between_rounds and not is_renewal(
            snapshot.now_s, snapshot.previous_s, snapshot.round_s
        ):
            between = everybody.between()
            must_run = _must_run(snapshot, between)
            if sum(status.job.least_gpus for status in must_run) <= _free_gpus(snapshot, between):
                round_ = _Round(self, snapshot, between)
                if round_.runs_all((*must_run, *between.settled)):
                    return round_
        return _Round(self, snapshot, everybody)

    def offer(
        self, snapshot: Snapshot, jobs: Sequence[JobStatus], kept: Iterable[JobStatus] = ()
    ) -> Offer:
        """The best choice for ``jobs`` when ``kept`` ones keep what they hold."""
        worth = worth_of(snapshot, jobs, gpus_of(kept))
        brings = self._gains(snapshot, worth)
        found = assign(
            Choices(
                gains=brings,
                takes=worth.usage.takes,
                limits=worth.usage.limits,
                forced=np.array([status.job.guaranteed for status in jobs], dtype=bool),
            ),
            gap=self.gap,
            start=_as_now(worth, brings),
        )
        return Offer(worth=worth, gains=brings, found=found)

    def market(self, snapshot: Snapshot, job_id: int) -> Market | None:
        """What was offered to a job in that round; None if it did not compete."""
        round_ = self._round(snapshot)
        if any(status.job.job_id == job_id for status in round_.contest.settled):
            # It was not asked in that round; what it could have is known all the same.
            everybody = Contest.of(snapshot)
            offer = self.offer(snapshot, everybody.competing, everybody.kept)
            between, chosen = True, offer.worth.current
        else:
            offer, between = round_.offer, False
            chosen = offer.found.chosen
        ids = [status.job.job_id for status in offer.worth.jobs]
        if job_id not in ids:
            return None
        row = ids.index(job_id)
        goodput = offer.worth.goodput[row]
        open_ = np.nonzero(np.isfinite(offer.gains[row]))[0].tolist()
        least = min((goodput[column] for column in open_), default=1.0)
        choices = {}
        for column in open_:
            one = offer.worth.configurations[column]
            choices[column] = Choice(
                gpu_type=one.gpu_type or "",
                gpus=one.gpus,
                nodes=one.nodes,
                speedup=float(goodput[column] / least),
                gain=float(offer.gains[row, column]),
                price=offer.price(column),
            )
        return Market(
            choices=tuple(choices.values()),
            prices=offer.prices(),
            chosen=choices.get(int(chosen[row])),
            between=between,
        )

    def _gains(self, snapshot: Snapshot, worth: Worth) -> Floats:
        jobs = worth.jobs
        factors = restart_factor(
            np.array([max(snapshot.now_s - one.job.submitted_s, 0.0) for one in jobs], dtype=float),
            np.array([one.restarts for one in jobs], dtype=float),
            self.restart_weight * np.array([one.profile.restart_s for one in jobs], dtype=float),
        )
        found = gains(
            normalise(worth.goodput, worth.least_gpus),
            worth.current,
            np.minimum(factors, self.most_factor),
            power=self.power,
            idle_cost=self.idle_cost,
        )
        return found + _TIE * _standing(jobs)[:, None]


def _standing(jobs: Sequence[JobStatus]) -> Floats:
    """From 0 to 1 ``(J,)``: 1 for those that hold something, the others less the later they came.

    It decides between equals only.
    """
    waits = [row for row, status in enumerate(jobs) if held(status) is None]
    waits.sort(key=lambda row: arrival(jobs[row]))
    found = np.ones(len(jobs))
    found[waits] = 1.0 - (1.0 + np.arange(len(waits))) / (1.0 + len(waits))
    return found


def _as_now(worth: Worth, brings: Floats) -> Ints | None:
    """Each job on the column that it holds, if it may stay there."""
    if not brings.size:
        return None
    here = brings[np.arange(len(brings)), worth.current]  # the last column where it holds none
    return np.where((worth.current >= 0) & np.isfinite(here), worth.current, IDLE)


def _must_run(snapshot: Snapshot, contest: Contest) -> list[JobStatus]:
    """Those that compete and would fit into the pool if it were empty."""
    capacities = tally(snapshot.nodes)
    return [status for status in contest.competing if suits(capacities, status.job)]


def _free_gpus(snapshot: Snapshot, contest: Contest) -> int:
    taken = contest.taken()
    return sum(max(one.capacity.gpus - taken.get(one.name, 0), 0) for one in snapshot.nodes)


class _Round:
    """From what was chosen to grants that certainly fit together."""

    def __init__(self, policy: Sia, snapshot: Snapshot, contest: Contest) -> None:
        self._snapshot, self.contest = snapshot, contest
        self.offer = policy.offer(snapshot, contest.competing, contest.kept)
        self._requests, self._shapes = Requests.of_snapshot(snapshot), Shapes.of_snapshot(snapshot)
        self._granted: list[tuple[JobStatus, Grant]] = []
        self._layouts: dict[int, GpuLayout] = {}
        self.decision = self._decide()

    def runs_all(self, jobs: Iterable[JobStatus]) -> bool:
        """Whether each of the jobs was placed."""
        return all(status.job.job_id in self._layouts for status in jobs)

    def _decide(self) -> Decision:
        wanted = [(status, _as_held(status)) for status in self.contest.kept]
        chosen = self.offer.found.chosen
        rows = np.nonzero(chosen != IDLE)[0].tolist()
        cells = self.offer.worth.cells(rows, chosen[rows].tolist())
        competing = self.contest.competing
        wanted += [(competing[row], cell) for row, cell in zip(rows, cells, strict=True)]
        wanted.sort(key=lambda pair: arrival(pair[0]))
        asked = [self._request(status, configuration) for status, configuration in wanted]
        placed = place_configurations(self._requests.pool, asked)
        for status, configuration in wanted:
            layout = placed.layouts.get(status.job.job_id)
            if layout is not None:
                self._grant(status, configuration, layout)
        self._fill(placed.room)
        self._granted.sort(key=lambda pair: arrival(pair[0]))
        return Decision(
            grants=tuple(grant for _, grant in self._granted),
            waiting=self._waiting(placed),
            packing=self._layouts,
            solver=self._report(),
            hopes=True,
        )

    def _request(self, status: JobStatus, configuration: Configuration) -> Request:
        shape, phase = self._shapes.of(status, configuration), status.phase
        if shape is None:
            return self._requests.of(status, configuration)
        now = held(status)
        if shape.asked is not None and shape.asked[0] is now and shape.asked[1] is phase:
            return self._requests.again(shape.asked[2])
        request = self._requests.of(shape.granted(status), configuration)
        shape.asked = now, phase, request
        return request

    def _grant(self, status: JobStatus, configuration: Configuration, layout: GpuLayout) -> None:
        job_id = status.job.job_id
        self._layouts[job_id] = layout
        self._granted.append((status, Grant(job_id=job_id, configuration=configuration)))

    # what is left ----------------------------------------------------------------------------

    def _fill(self, room: Room) -> None:
        """Give GPUs that are left, for want of memory or in odd numbers, to jobs without any.

        Those that hold some come first, then the others as they came, each on the least that it
        may have.
        """
        rows = [
            row
            for row, status in enumerate(self.contest.competing)
            if status.job.job_id not in self._layouts
        ]
        rows.sort(key=lambda row: (self.contest.competing[row].lease is None, *self._arrived(row)))
        for row in rows:
            if not room.free_gpus():
                return
            status = self.contest.competing[row]
            if room.free_gpus(status.job.gpu_types) < status.job.least_gpus:
                continue
            for configuration in self._modest(row):
                request = self._request(status, configuration)
                layout = _place_in(room, request)
                if layout is not None:
                    room.take(parts_of(self._requests.pool, layout, request.need))
                    self._grant(status, replace(configuration, gpu_type=layout[0]), layout)
                    break

    def _arrived(self, row: int) -> tuple[float, int]:
        return arrival(self.contest.competing[row])

    def _modest(self, row: int) -> list[Configuration]:
        """What the job holds, then its smallest configuration of each type, the best first."""
        worth, brings = self.offer.worth, self.offer.gains[row]
        open_ = np.nonzero(np.isfinite(brings))[0].tolist()
        current = int(worth.current[row])
        smallest: dict[str | None, int] = {}
        for column in open_:
            kind = worth.configurations[column].gpu_type
            if kind not in smallest or self._gpus(column) < self._gpus(smallest[kind]):
                smallest[kind] = column
        order = sorted(smallest.values(), key=lambda column: (-brings[column], column))
        first = [current] if current in open_ else []
        return [worth.configuration(row, column) for column in dict.fromkeys(first + order)]

    def _gpus(self, column: int) -> int:
        return self.offer.worth.configurations[column].gpus

    # words -----------------------------------------------------------------------------------

    def _waiting(self, placed: Placed) -> dict[int, Reason]:
        waiting = dict(self.contest.waiting)
        if len(self._layouts) == len(self.contest.competing) + len(self.contest.kept):
            return waiting
        unplaced, words = set(placed.unplaced), _Words(self._snapshot, self.offer)
        for row, status in enumerate(self.contest.competing):
            job_id = status.job.job_id
            if job_id in self._layouts:
                continue
            reason = words.unplaced(status) if job_id in unplaced else words.idle(row)
            if status.phase is JobPhase.RUNNING:
                reason = Reason(code=ReasonCode.PREEMPTED, text=f"preempted: {reason.text}")
            waiting[job_id] = reason
        return waiting

    def _report(self) -> dict[str, object]:
        found, worth = self.offer.found, self.offer.worth
        return {
            "status": "optimal" if found.exact else "feasible",
            "objective": found.objective,
            "bound": found.bound,
            "gap": found.gap,
            "jobs": len(worth.jobs),
            "configurations": len(worth.configurations),
            "prices": self.offer.prices(),
        }


def _as_held(status: JobStatus) -> Configuration:
    """The configuration that a job keeps."""
    now = held(status)
    if now is None or status.job.elasticity is Elasticity.RIGID:
        return status.job.configuration
    return configuration_of(now) or status.job.configuration


def _place_in(room: Room, request: Request) -> GpuLayout | None:
    """Where there is room for a job, at best where it is."""
    if request.held is not None and request.may_stay and room.fits(request.held_parts):
        return request.held
    return room.find(request.shape, request.need)


class _Words:
    """Why jobs wait, one value for each case."""

    def __init__(self, snapshot: Snapshot, offer: Offer) -> None:
        self._snapshot, self.offer = snapshot, offer
        self._prices = offer.found.prices @ offer.worth.usage.takes
        # Of each job the configuration that it would gain most from, the price paid.
        surplus = offer.gains - self._prices
        self._best = np.argmax(surplus, axis=1).tolist() if surplus.size else []
        self._whole: Capacities | None = None

    def idle(self, row: int) -> Reason:
        """The reason of a job for which no configuration was chosen."""
        worth = self.offer.worth
        best = self._best[row] if self._best else IDLE
        brings = float(self.offer.gains[row, best]) if self._best else -np.inf
        if not np.isfinite(brings):
            return self._nothing_on_offer(worth.jobs[row])
        one = worth.configurations[best]
        return Reason(
            code=ReasonCode.NO_GPUS,
            text=f"{amount(one.gpus, one.gpu_type or '', one.nodes)} would bring it "
            f"{brings:.2f}, and {'is' if one.gpus == 1 else 'are'} worth "
            f"{self._prices[best]:.2f} to other jobs",
        )

    def unplaced(self, status: JobStatus) -> Reason:
        """The reason of one that was chosen, and found no place."""
        return Reason(
            code=ReasonCode.FRAGMENTED,
            text="the GPUs chosen for it are not free together with the memory and cores that it "
            "needs at least",
        )

    def _nothing_on_offer(self, status: JobStatus) -> Reason:
        if self._whole is None:
            self._whole = tally(replace(one, capacity=one.total) for one in self._snapshot.nodes)
        job = status.job
        kinds = " or ".join(job.gpu_types) if job.gpu_types else "any type"
        if not suits(self._whole, job):
            return Reason(
                code=ReasonCode.NEVER_FITS,
                text=f"{job.least_gpus} GPUs ({kinds}) on {job.nodes or 'any number of'} nodes do "
                "not fit into the pool even when it is empty",
            )
        if job.ceilings:
            return Reason(code=ReasonCode.LIMITED, text=job.ceilings[0].text)
        return Reason(
            code=ReasonCode.NO_GPUS,
            text=f"needs {job.least_gpus} GPUs ({kinds}) in a shape that is out of reach: nodes "
            "are down, or held by jobs that cannot be stopped",
        )


SIA = Sia()
"""The policy called ``sia``."""
