"""GREEDY: the whole demand or nothing (algorithms B.7). A baseline.

It shows what goes wrong without TUNE's ladder: once cores or memory are used up, GPUs stay idle and
jobs with large demands starve. DRF and Tetris are the same with another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slurm_synergy.core.model import (
    Decision,
    JobPhase,
    Layout,
    Placement,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.packing import Requests, parts_of
from slurm_synergy.core.room import GpuLayout, Parts, Pool, Room
from slurm_synergy.mechanisms.placing import (
    Party,
    make_parties,
    make_placements,
)
from slurm_synergy.mechanisms.sharing import share_out
from slurm_synergy.mechanisms.tune import full_demand

__all__ = ["GREEDY", "Greedy", "Order", "give_whole_demands"]

Order = Callable[[Snapshot, Pool, Sequence[Party]], Sequence[Party]]
"""In which order the granted jobs are served; they come in the policy's order."""


class Greedy:
    """First fit of whole demands in the order of the policy."""

    name = "greedy"
    may_skip = True
    reads_progress = False

    def place(self, snapshot: Snapshot, decision: Decision) -> Layout:
        """A placement for each grant whose demand is free when its turn comes."""
        return give_whole_demands(snapshot, decision, lambda _snapshot, _pool, parties: parties)


def give_whole_demands(snapshot: Snapshot, decision: Decision, order: Order) -> Layout:
    """Serve the grants in ``order``, each with its whole demand; skip those that do not fit.

    A running job stays where it is if its demand is free there. Jobs that cannot be stopped come
    first, with what they cannot do without.
    """
    requests = Requests.of_snapshot(snapshot)
    pool, room = requests.pool, Room(requests.pool)
    parties = make_parties(snapshot, decision, requests, full_demand)
    layouts: dict[int, GpuLayout] = {}
    for party in parties:
        if party.request.pinned and party.request.held is not None:
            layouts[party.job_id] = party.request.held
            room.take(party.request.held_parts)
    skipped: dict[int, Reason] = {}
    for party in order(snapshot, pool, parties):
        if party.job_id in layouts:
            continue
        found = _place(snapshot, pool, room, party)
        if found is None:
            skipped[party.job_id] = _why(party)
        else:
            layouts[party.job_id], parts = found
            room.take(parts)
    placed = [party for party in parties if party.job_id in layouts]
    shared, _ = share_out(snapshot, pool, placed, layouts)
    return Layout(placements=make_placements(placed, layouts, shared), unplaced=skipped)


def _place(
    snapshot: Snapshot, pool: Pool, room: Room, party: Party
) -> tuple[GpuLayout, Parts] | None:
    """Where the whole demand of the job is free, and what it takes there."""
    request = party.request
    if request.held is not None and party.now is not None and request.may_stay:
        if snapshot.enforcement.in_place:
            here = parts_of(pool, request.held, party.want)
        else:
            here = _at_least(_held_parts(pool, party.now), request.held_parts)
        if room.fits(here):
            return request.held, here
    gpus, nodes, types = request.shape
    layout = room.first(types, party.want, gpus) if nodes in (1, None) else None
    layout = layout or room.find(request.shape, party.want)
    return None if layout is None else (layout, parts_of(pool, layout, party.want))


def _held_parts(pool: Pool, now: Placement) -> Parts:
    return [
        (pool.number[name], (share.gpus, share.cpus, share.mem_mib)) for name, share in now.shares
    ]


def _at_least(parts: Parts, floors: Parts) -> Parts:
    return [
        (number, (gpus, max(cpus, floor[1]), max(mem_mib, floor[2])))
        for (number, (gpus, cpus, mem_mib)), (_, floor) in zip(parts, floors, strict=True)
    ]


def _why(party: Party) -> Reason:
    text = (
        f"{party.request.gpus} GPUs are free for it, but not with all the cores and memory that "
        "it can use, and this mechanism gives no less"
    )
    if party.status.phase is JobPhase.RUNNING:
        return Reason(code=ReasonCode.PREEMPTED, text=f"preempted: {text}")
    return Reason(code=ReasonCode.DEMAND_TAKEN, text=text)


GREEDY = Greedy()
"""The mechanism called ``greedy``."""
