"""The matrix of jobs and configurations: how fast each job would learn on each (Sia, section 3.3).

Rows are the jobs that compete, columns the configurations of the pool; of the other shapes that
users ask for or jobs hold, each is a column too, which counts as the smallest configuration that
covers it. Goodput counts the input pipeline: no GPU is faster than what its node's proportional
share of cores and memory delivers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.allowed import NOTHING, Where
from slurm_synergy.core.batch_curves import Row, best_of, goodput_of, pace_of
from slurm_synergy.core.columns import Columns, scale_limits
from slurm_synergy.core.configurations import Usage
from slurm_synergy.core.facts import Fact, Facts, FactsOf, learner_on
from slurm_synergy.core.model import Configuration, JobStatus, Snapshot

__all__ = ["BATCH_GAIN", "Worth", "learner_on", "worth_of"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

BATCH_GAIN = 1.05
"""A data loader changes its batch only for a clear gain (algorithms C.4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """J jobs and K configurations.

    ``goodput`` ``(J, K)`` is in samples/s of the job, 0 where it cannot or must not run.
    ``replicas`` ``(J, K)`` are the copies of its model there.
    ``least_gpus`` ``(J,)`` are the GPUs of its smallest configuration, ``current`` ``(J,)`` the
    column that it holds, or NOTHING. ``usage`` has the rows that bound a choice. Batches are only
    looked for in the cells that are asked for.
    """

    jobs: tuple[JobStatus, ...]
    configurations: tuple[Configuration, ...]
    usage: Usage
    goodput: Floats
    replicas: Ints
    known: Facts
    least_gpus: Floats
    current: Ints
    _batches: _Batches

    def configuration(self, row: int, column: int) -> Configuration:
        """The configuration of a cell, with its batch size."""
        return self.cells([row], [column])[0]

    def cells(self, rows: Sequence[int], columns: Sequence[int]) -> list[Configuration]:
        """The configurations of cells; equal ones are the same object in all rounds."""
        if not len(rows):
            return []
        at = np.array(rows, dtype=np.int64), np.array(columns, dtype=np.int64)
        local, passes = self._batches.at(*at)
        sizes = self.replicas[at].tolist(), local.tolist(), passes.tolist()
        return [
            self.known.configuration(self.configurations[column], *batch)
            for column, *batch in zip(columns, *sizes, strict=True)
        ]


def worth_of(
    snapshot: Snapshot, jobs: Sequence[JobStatus], taken: Mapping[str, int] | None = None
) -> Worth:
    """The matrix for ``jobs``, when ``taken`` GPUs of each node are out of their reach."""
    known = Facts.of_snapshot(snapshot)
    facts = known.of(snapshot, jobs)
    frame = _Frame.of(snapshot, jobs, taken or {}, known, facts)
    columns = frame.columns
    cells = frame.cells(known, facts)
    return Worth(
        jobs=tuple(jobs),
        configurations=columns.all,
        usage=columns.usage,
        goodput=cells.goodput,
        replicas=frame.replicas,
        known=known,
        least_gpus=cells.least_gpus,
        current=frame.current,
        _batches=_Batches(frame, cells, known, facts, tuple(jobs)),
    )


class _Some:
    """Some cells of the matrix, with what their goodput depends on beside their learners."""

    __slots__ = ("at", "fed", "kinds", "nodes", "replicas", "rows")

    def __init__(self, rows: Ints, at: Ints, columns: Columns, replicas: Ints, fed: Floats) -> None:
        self.rows, self.at = rows, at
        self.kinds, self.nodes = columns.kind[at], columns.nodes[at]
        self.replicas, self.fed = replicas[rows, at], fed[rows, at]

    def part(self, numbers: Ints, fed: Floats) -> _Some:
        """Some of these, each fed by its entry of ``fed``."""
        found = object.__new__(_Some)
        found.rows, found.at = self.rows[numbers], self.at[numbers]
        found.kinds, found.nodes = self.kinds[numbers], self.nodes[numbers]
        found.replicas, found.fed = self.replicas[numbers], fed[numbers]
        return found

    def numbers(self, facts: FactsOf) -> Floats:
        """The learners of these cells."""
        return np.asarray(facts.numbers[self.rows, self.kinds])


class _Frame:
    """All of the matrix but what follows from the noise of gradients, which is new all the time.

    It serves as long as the jobs, what they hold and how fast they are believed to be are the same.
    ``goodput`` has the cells that do not depend on that noise, ``local`` and ``passes`` their
    batches. ``choosing`` are the others, of jobs that may choose their batch; ``chooses``
    ``(J, K)`` tells which these are, and ``fed`` what all cells are fed by the share. ``keeping``
    are those of them where a job holds a batch that it may keep, ``own_pace`` how fast it is with
    that, ``curve_of`` ``(J, K)`` where curves of cells are kept, ``hopes`` whether cores that are
    lent could be of use anywhere. ``unknown`` are cells of which no speed is known.
    """

    def __init__(
        self,
        made_from: object,
        jobs: Sequence[JobStatus],
        taken: Mapping[str, int],
        known: Facts,
        facts: FactsOf,
    ) -> None:
        self.made_from = made_from
        self.curves: Ints | None = None
        self._cells: _Cells | None = None
        self._jobs, self._known, self._facts = jobs, known, facts
        self._limits = scale_limits(
            facts[Fact.LEAST], facts[Fact.MOST], facts[Fact.HELD], facts[Fact.EXPLORED]
        )
        elastic = facts[Fact.IS_RIGID] == 0
        # The smallest that the pool offers may be twice the smallest that a job allows.
        reach = np.maximum(self._limits, 2 * facts[Fact.LEAST])[elastic]
        most = int(reach.max()) if len(reach) else None
        self.columns = known.offers.of(jobs, facts.held, most, taken)
        columns = self.columns
        self.replicas = columns.gpus[None, :] // np.maximum(facts.units[:, columns.kind], 1)
        there = [columns.at.get(key, NOTHING) for key in facts.held]
        self.current = np.array(there, dtype=np.int64)
        cells = (len(jobs), len(columns.all))
        self.goodput = np.zeros(cells)
        self.local = np.zeros(cells, dtype=np.int64)
        self.passes = np.zeros(cells, dtype=np.int64)
        self.curve_of = np.full(cells, NOTHING, dtype=np.int64)
        if self.goodput.size:
            self._fill()
        # What is kept between rounds must not keep their jobs.
        del self._jobs, self._known, self._facts

    @classmethod
    def of(
        cls,
        snapshot: Snapshot,
        jobs: Sequence[JobStatus],
        taken: Mapping[str, int],
        known: Facts,
        facts: FactsOf,
    ) -> _Frame:
        """The frame for ``jobs``: the last one, if that serves."""
        key = known, facts.version, facts.slots.tobytes(), tuple(sorted(taken.items()))
        found = snapshot.of_nodes.get(cls)
        if not isinstance(found, cls) or found.made_from != key:
            found = snapshot.of_nodes[cls] = cls(key, jobs, taken, known, facts)
        return found

    def cells(self, known: Facts, facts: FactsOf) -> _Cells:
        """All cells, with the statistics of ``facts``."""
        if self._cells is None or self._cells.noise != facts.noise:
            self._cells = _Cells(self, known, facts)
        return self._cells

    def _fill(self) -> None:
        columns, facts = self.columns, self._facts
        where = Where(columns, facts, self._jobs, self.current, self._known.most_mib)
        open_, certain = where.cells(self._limits)
        rates = facts.rates[:, columns.kind]
        fed = self._known.fed(facts, self._jobs, columns)
        # Where a share delivers nothing its speed is as good as not known.
        alive = open_ & (fed > 0)
        modelled = alive & np.isfinite(facts.numbers[:, :, Row.COMPUTE])[:, columns.kind]
        linear = alive & ~modelled & np.isfinite(rates)
        whole = rates * columns.gpus[None, :]
        self.goodput[linear] = np.minimum(whole, fed)[linear]
        adaptive = facts[Fact.IS_ADAPTIVE].astype(bool)
        fixed = self._all_of(modelled & ~adaptive[:, None], fed)
        if len(fixed.rows):
            numbers = fixed.numbers(facts)
            found = best_of(numbers, fixed.nodes, fixed.replicas, fixed.fed, 1)
            self.goodput[fixed.rows, fixed.at], *batch = found
            self.local[fixed.rows, fixed.at], self.passes[fixed.rows, fixed.at] = batch
        self.fed, self.chooses = fed, modelled & adaptive[:, None]
        self.choosing = self._all_of(self.chooses, fed)
        self.keeping, kept = self._keeping()
        own, (replicas, local, passes) = self.keeping, kept.T
        self.own_pace = pace_of(own.numbers(facts), own.nodes, replicas, local, passes, own.fed)
        self.hopes = bool((self.chooses & np.isfinite(fed)).any())
        self.owns_batch = facts[Fact.OWNS_BATCH].astype(bool)
        unknown = certain & ~modelled & ~linear
        self.unknown_rows = np.nonzero(unknown.any(axis=1))[0]
        self.unknown = unknown[self.unknown_rows]

    def _all_of(self, cells: Bools, fed: Floats) -> _Some:
        rows, at = np.nonzero(cells)
        return self._some(rows, at, fed)

    def _some(self, rows: Ints, at: Ints, fed: Floats) -> _Some:
        return _Some(rows, at, self.columns, self.replicas, fed)

    def _keeping(self) -> tuple[_Some, Ints]:
        """Cells of jobs whose batches are such that they may still have them, and those batches."""
        facts = self._facts
        rows = np.nonzero((self.current != NOTHING) & (facts[Fact.REPLICAS] > 0))[0]
        rows = rows[self.chooses[rows, self.current[rows]]]
        rows = rows[self._allows(rows, self.current[rows])]
        return self._some(rows, self.current[rows], self.fed), facts.batches[rows]

    def _allows(self, rows: Ints, at: Ints) -> Bools:
        """Whether the batches that jobs have are such that they may still have."""
        kinds = self.columns.kind[at]
        limits = self._facts.numbers[rows, kinds].T
        replicas, local, passes = self._facts.batches[rows].T
        total = local * replicas * (passes + 1)
        found: Bools = replicas == self.replicas[rows, at]
        found &= (limits[Row.LOCAL_LEAST] <= local) & (local <= limits[Row.LOCAL_MOST])
        found &= limits[Row.INITIAL] <= total
        found &= total < limits[Row.LARGEST] + replicas * (passes + 1)
        return found


class _Cells:
    """The cells of the matrix, filled.

    ``which`` ``(J, K)`` are the best candidates of those that choose; ``stays`` ``(J,)`` tells of
    which jobs the batch that they have is as good as the best where they are.
    """

    def __init__(self, frame: _Frame, known: Facts, facts: FactsOf) -> None:
        self.noise = facts.noise
        self.goodput = frame.goodput.copy()
        self.which = np.zeros(self.goodput.shape, dtype=np.int64)
        self.stays = np.zeros(len(self.goodput), dtype=np.bool_)
        self.asked: tuple[tuple[bytes, bytes], tuple[Ints, Ints]] | None = None
        if self.goodput.size:
            self._choose_batches(frame, known, facts)
            self._fill_unknown(frame)
        gpus = frame.columns.gpus[None, :]
        least = np.where(self.goodput > 0, gpus, np.inf).min(axis=1, initial=np.inf)
        self.least_gpus = np.where(np.isfinite(least), least, 1.0)

    def _choose_batches(self, frame: _Frame, known: Facts, facts: FactsOf) -> None:
        """Fill the cells of jobs that choose their batch by the throughput models."""
        some = frame.choosing
        if not len(some.rows):
            return
        numbers, curves = some.numbers(facts), known.curves
        if frame.curves is None:
            slots, all_ = facts.slots[some.rows], frame.columns.all
            frame.curves = curves.find(slots, all_, some.at, numbers, some.nodes, some.replicas)
            frame.curve_of[some.rows, some.at] = frame.curves
        found = curves.tops(frame.curves, numbers, some.nodes, some.replicas, some.fed)
        self.goodput[some.rows, some.at], self.which[some.rows, some.at] = found
        some = frame.keeping
        if len(some.rows):
            now_ = frame.own_pace.goodput(some.numbers(facts))
            stays = now_ * BATCH_GAIN >= self.goodput[some.rows, some.at]
            self.goodput[some.rows[stays], some.at[stays]] = now_[stays]
            self.stays[some.rows] = stays

    def _fill_unknown(self, frame: _Frame) -> None:
        """A speed that is not known is taken as the least that is, and to grow with the GPUs."""
        rows, cells = frame.unknown_rows, frame.unknown
        if not len(rows):
            return
        part, gpus = self.goodput[rows], frame.columns.gpus[None, :]
        least = np.where(part > 0, part, np.inf).min(axis=1)
        least = np.where(np.isfinite(least), least, 1.0)
        fewest = np.where(cells, gpus, np.iinfo(np.int64).max).min(axis=1)
        guess = least[:, None] * gpus / fewest[:, None]
        self.goodput[rows] = np.where(cells, guess, part)


def _with_own(some: _Some, batches: Ints, facts: FactsOf) -> Floats:
    """Goodput of jobs with the ``batches`` that they have."""
    replicas, local, passes = batches.T
    return goodput_of(some.numbers(facts), some.nodes, replicas, local, passes, some.fed)


class _Batches:
    """Batches of single cells: the best for the cores that others may lend, where these help.

    Most cells are never asked for. What a configuration is worth is what it is on the job's share,
    whatever may be lent.
    """

    __slots__ = ("_cells", "_facts", "_frame", "_jobs", "_known")

    def __init__(
        self,
        frame: _Frame,
        cells: _Cells,
        known: Facts,
        facts: FactsOf,
        jobs: tuple[JobStatus, ...],
    ) -> None:
        self._frame, self._cells, self._known = frame, cells, known
        self._facts, self._jobs = facts, jobs

    def at(self, rows: Ints, columns: Ints) -> tuple[Ints, Ints]:
        """Local batch and accumulation of some cells; 0 where the batch is the job's own affair."""
        key = rows.tobytes(), columns.tobytes()
        cells = self._cells
        if cells.asked is None or cells.asked[0] != key:
            cells.asked = key, self._find(rows, columns)
        return cells.asked[1]

    def _find(self, rows: Ints, columns: Ints) -> tuple[Ints, Ints]:
        frame = self._frame
        ours = ~frame.owns_batch[rows]
        local, passes = frame.local[rows, columns] * ours, frame.passes[rows, columns] * ours
        chosen = np.nonzero(ours & frame.chooses[rows, columns])[0]
        if len(chosen):
            local[chosen], passes[chosen] = self._chosen(rows[chosen], columns[chosen])
        return local, passes

    def _chosen(self, rows: Ints, columns: Ints) -> tuple[Ints, Ints]:
        frame, cells, facts = self._frame, self._cells, self._facts
        some = _Some(rows, columns, frame.columns, frame.replicas, frame.fed)
        which = cells.which[rows, columns]
        stays = cells.stays[rows] & (columns == frame.current[rows])
        if frame.hopes:
            self._hope(some, which, stays)
        runs = cells.goodput[rows, columns] > 0
        curves = frame.curve_of[rows, columns]
        found = self._known.curves.batches(curves, some.numbers(facts), some.replicas, which)
        local, passes = (
            np.where(stays, own, one * runs)
            for own, one in zip(facts.batches[rows].T[1:], found, strict=True)
        )
        return local, passes

    def _hope(self, some: _Some, which: Ints, stays: Bools) -> None:
        """Change candidates, and who stays with its batch, where more may be had than the share."""
        frame, facts, curves = self._frame, self._facts, self._known.curves
        lent = self._known.lent(facts, self._jobs, frame.columns, some.rows)
        lent = lent[np.arange(len(some.rows)), some.at]
        more = np.nonzero(lent > some.fed)[0]
        if not len(more):
            return
        some = some.part(more, lent)
        numbers, slots = some.numbers(facts), facts.slots[some.rows]
        at = curves.find(slots, frame.columns.all, some.at, numbers, some.nodes, some.replicas)
        best, which[more] = curves.tops(
            at, numbers, some.nodes, some.replicas, some.fed, question=1
        )
        stays[more] = False
        here = np.nonzero(
            np.isin(some.rows, frame.keeping.rows) & (some.at == frame.current[some.rows])
        )[0]
        if len(here):
            own = some.part(here, some.fed)
            now_ = _with_own(own, facts.batches[own.rows], facts)
            stays[more[here]] = now_ * BATCH_GAIN >= best[here]
