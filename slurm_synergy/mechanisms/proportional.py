"""GPU-proportional sharing: the baseline, and what every cluster does today (algorithms B.6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import cast

from slurm_synergy.core.elastic import as_granted
from slurm_synergy.core.model import (
    Decision,
    Elasticity,
    JobStatus,
    Layout,
    Placement,
    Snapshot,
)
from slurm_synergy.core.packing import Request, Requests
from slurm_synergy.core.pipeline import proportional_share
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.room import GpuLayout
from slurm_synergy.core.scaling import BatchSize
from slurm_synergy.core.sequences import alike
from slurm_synergy.core.snapshot import status_of
from slurm_synergy.core.totals import Totals
from slurm_synergy.core.values import maker
from slurm_synergy.mechanisms.placing import (
    build_layout,
    by_size,
    make_parties,
    make_placements,
    pack,
)
from slurm_synergy.mechanisms.sharing import share_out

__all__ = ["PROPORTIONAL", "Proportional"]

_NOTHING = (0, 0, 0)
# Until Python 3.12, looking up a member of an enumeration takes longer than comparing it.
_RIGID = Elasticity.RIGID
_PLACEMENT = maker(Placement)
_ON_ONE_NODE = maker(Placement, checked=False)
_HELD, _ID = attrgetter("held"), attrgetter("job_id")


class Proportional:
    """Each job gets its proportional share of every node it is on.

    It gets less of a resource only where the minimum memory of a neighbour takes it, and then
    never below what keeps its proportional rate.
    """

    name = "proportional"
    reads_progress = False

    def place(self, snapshot: Snapshot, decision: Decision) -> Layout:
        """A placement for each grant."""
        requests = Requests.of_snapshot(snapshot)
        placements = _whole_shares(snapshot, decision, requests)
        if placements is not None:
            return Layout(placements=tuple(placements))
        pool = requests.pool
        parties = make_parties(snapshot, decision, requests, proportional_share)
        packed = pack(requests, decision, [party.request for party in parties])
        layouts = {job_id: layout for job_id, layout in packed.items() if layout is not None}
        placed = by_size([party for party in parties if party.job_id in layouts])
        shared, _ = share_out(snapshot, pool, placed, layouts, even=False)
        return build_layout(make_placements(placed, layouts, shared), decision)


class _Shares:
    """Whole shares that were given before; kept with the nodes, as they depend on no other job."""

    __slots__ = ("_granted", "_layouts", "_placements")

    def __init__(self) -> None:
        # The last requests, where they were put, and what they got.
        self._granted: Sequence[Request] = ()
        self._layouts: Sequence[GpuLayout] = ()
        self._placements: list[Placement] = []

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> _Shares:
        """What there is for the nodes of ``snapshot``."""
        found = snapshot.of_nodes.get(cls)
        if not isinstance(found, cls):
            found = snapshot.of_nodes[cls] = cls()
        return found

    def of(
        self,
        granted: Sequence[Request],
        layouts: Sequence[GpuLayout],
        make: Callable[[int], Placement],
    ) -> list[Placement]:
        """The placement of each request there; ``make`` makes that of one by its number."""
        before, places, given = self._granted, self._layouts, self._placements
        same = min(alike(before, granted), alike(places, layouts))
        known = dict(zip(map(id, before[same:]), range(same, len(before)), strict=True))
        found = given[:same]
        for at in range(same, len(granted)):
            last = known.get(id(granted[at]))
            is_there = last is not None and places[last] is layouts[at]
            found.append(given[last] if is_there and last is not None else make(at))
        self._granted, self._layouts, self._placements = granted, layouts, found
        return found


def _whole_shares(
    snapshot: Snapshot, decision: Decision, requests: Requests
) -> list[Placement] | None:
    """Placements where nobody holds anything yet and each gets its whole share; None elsewhere.

    Nothing has to be shared out then, so a share that was given before is given again.
    """
    statuses, grants = status_of(snapshot), decision.grants
    granted, has_batches = requests.of_grants(grants), False
    if not granted:
        pairs = [(statuses[grant.job_id], grant.configuration) for grant in grants]
        granted = [requests.of(as_granted(snapshot, *pair), pair[1]) for pair in pairs]
        has_batches = any(grant.configuration.batch is not None for grant in grants)
    if any(map(_HELD, granted)):
        return None
    if decision.packing is None:
        layouts = requests.layouts(granted)
    else:
        layouts = list(map(decision.packing.__getitem__, map(_ID, granted)))
    if not all(layouts):
        return None
    there = cast(list[GpuLayout], layouts)

    def make(at: int) -> Placement:
        request, configuration = granted[at], grants[at].configuration
        status = statuses[request.job_id]
        if status.job.elasticity is not _RIGID:
            status = as_granted(snapshot, status, configuration)
        return _whole_share(status, request, requests, there[at], configuration.batch)

    if has_batches:
        placements = list(map(make, range(len(granted))))
    else:
        placements = _Shares.of_snapshot(snapshot).of(granted, there, make)
    used = Totals.of_snapshot(snapshot).by_node(placements)
    for node in snapshot.nodes:
        gpus, cpus, mem_mib = used.get(node.name, _NOTHING)
        most = node.capacity
        if gpus > most.gpus or cpus > most.cpus or mem_mib > most.mem_mib:
            return None
    return placements


def _whole_share(
    status: JobStatus,
    request: Request,
    requests: Requests,
    layout: GpuLayout,
    batch: BatchSize | None,
) -> Placement:
    want, pool = requests.needs(proportional_share).of(status), requests.pool
    floor, kept, shares = request.need, want.kept, []
    for name, gpus in layout[1]:
        kind = pool.kind_of[pool.number[name]]
        key = (Resources, floor, kind, gpus)
        share = kept.get(key)
        if share is None:
            _, cpus, mem_mib = map(max, want.at(kind, gpus), floor.at(kind, gpus))
            share = kept[key] = Resources(gpus=gpus, cpus=cpus, mem_mib=mem_mib)
        shares.append((name, share))
    make = _ON_ONE_NODE if len(shares) == 1 else _PLACEMENT
    return make(job_id=request.job_id, gpu_type=layout[0], shares=tuple(shares), batch=batch)


PROPORTIONAL = Proportional()
"""The mechanism called ``proportional``."""
