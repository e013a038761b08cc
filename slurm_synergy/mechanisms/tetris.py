"""Tetris with Synergy's demands (SIGCOMM '14; algorithms B.9). A baseline.

``tetris`` serves the jobs with the least remaining work first, as Synergy's reference simulator
does: remaining time times the demanded fractions of the pool. ``tetris_align`` is the original
idea: machine by machine, the job whose demand aligns best with what is free there, less a term for
its remaining work.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from slurm_synergy.core.model import Decision, Layout, Snapshot
from slurm_synergy.core.remaining import rates, remaining_s
from slurm_synergy.core.room import Pool, Room
from slurm_synergy.mechanisms.drf import fractions
from slurm_synergy.mechanisms.greedy import give_whole_demands
from slurm_synergy.mechanisms.placing import Party

__all__ = ["TETRIS", "TETRIS_ALIGN", "Tetris"]


class Tetris:
    """Whole demands, in Tetris' order."""

    may_skip = True

    def __init__(self, name: str, *, align: bool) -> None:
        self.name = name
        self._order = _by_alignment if align else _least_work_first

    def place(self, snapshot: Snapshot, decision: Decision) -> Layout:
        """A placement for each grant whose demand is free when its turn comes."""
        return give_whole_demands(snapshot, decision, self._order)


def _work(snapshot: Snapshot, pool: Pool, parties: Sequence[Party]) -> dict[int, float]:
    """Remaining time of each job times the fractions of the pool that it demands."""
    rate_of = rates(snapshot)
    shares = fractions(pool, parties)
    return {
        party.job_id: remaining_s(party.status, rate_of) * sum(shares[party.job_id])
        for party in parties
    }


def _least_work_first(snapshot: Snapshot, pool: Pool, parties: Sequence[Party]) -> list[Party]:
    work = _work(snapshot, pool, parties)
    return sorted(parties, key=lambda party: (work[party.job_id], party.rank))


def _by_alignment(snapshot: Snapshot, pool: Pool, parties: Sequence[Party]) -> list[Party]:
    """Fill the machines one after the other; what needs several machines comes last.

    Costs jobs times machines times jobs per machine: meant for pools of some hundred nodes.
    """
    dear = _dearness(_work(snapshot, pool, parties))
    room = Room(pool)
    left = [party for party in parties if not party.request.pinned]
    for party in parties:
        if party.request.pinned:
            room.take(party.request.held_parts)
    chosen: list[Party] = []
    for number in range(len(pool.nodes)):
        while (best := _best_for(pool, room, number, left, dear)) is not None:
            room.take([(number, best.want.at(pool.kind_of[number], best.request.gpus))])
            left.remove(best)
            chosen.append(best)
    return [*chosen, *left]


def _dearness(work: Mapping[int, float]) -> dict[int, float]:
    """Remaining work of each job as a multiple of the average; unknown work as the largest."""
    finite = [each for each in work.values() if math.isfinite(each)]
    average = sum(finite) / len(finite) if finite else 0.0
    if average <= 0:
        return dict.fromkeys(work, 0.0)
    return {job_id: min(each, max(finite)) / average for job_id, each in work.items()}


def _best_for(
    pool: Pool, room: Room, number: int, parties: Sequence[Party], dear: Mapping[int, float]
) -> Party | None:
    """The job that one machine should take next; None when none fits there.

    Tetris weighs remaining work by the ratio of the averages of alignment and work, over the jobs
    that fit.
    """
    node, kind = pool.nodes[number], pool.kind_of[number]
    whole = (node.total.gpus, max(node.total.cpus, 1), max(node.total.mem_mib, 1))
    free = room.free(number)
    fitting: list[tuple[Party, float]] = []
    for party in parties:
        gpus, nodes, types = party.request.shape
        if gpus > free[0] or nodes not in (1, None) or (types and node.gpu_type not in types):
            continue
        need = party.want.at(kind, gpus)
        if room.fits([(number, need)]):
            aligned = sum(need[each] / whole[each] * free[each] / whole[each] for each in range(3))
            fitting.append((party, aligned))
    if not fitting:
        return None
    average = sum(aligned for _, aligned in fitting) / len(fitting)
    score = {party.job_id: aligned - average * dear[party.job_id] for party, aligned in fitting}
    return max((party for party, _ in fitting), key=lambda one: (score[one.job_id], -one.rank))


TETRIS = Tetris("tetris", align=False)
"""The reference's key: least remaining work first."""

TETRIS_ALIGN = Tetris("tetris_align", align=True)
"""The original's score: alignment of demand and what is free, less remaining work."""
