"""GPU-proportional sharing: the baseline, and what every cluster does today (algorithms B.6)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import cast

from slurm_synergy.core.elastic import as_granted
from slurm_synergy.core.model import Decision, JobStatus, Layout, Placement, Snapshot
from slurm_synergy.core.packing import Request, Requests
from slurm_synergy.core.pipeline import proportional_share
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.room import GpuLayout
from slurm_synergy.core.scaling import BatchSize
from slurm_synergy.core.snapshot import status_of
from slurm_synergy.core.totals import Totals
from slurm_synergy.mechanisms.placing import (
    build_layout,
    by_size,
    make_parties,
    make_placements,
    pack,
)
from slurm_synergy.mechanisms.sharing import share_out

__all__ = ["PROPORTIONAL", "Proportional"]

_FORGOTTEN_AT_LEAST = 1000
_NOTHING = (0, 0, 0)
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


_Key = tuple[int, int, BatchSize | None]


class _Shares:
    """Whole shares that were given before; kept with the nodes, as they depend on no other job."""

    def __init__(self) -> None:
        # By the ids of the request and of where it was put, which are kept so that the ids stay.
        self._given: dict[_Key, Placement] = {}
        self._made_of: dict[_Key, tuple[Request, GpuLayout]] = {}

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
        batches: Iterable[BatchSize | None],
        make: Callable[[int], Placement],
    ) -> list[Placement]:
        """The placement of each request there; ``make`` makes that of one by its number."""
        keys = list(zip(map(id, granted), map(id, layouts), batches))  # noqa: B905 - endless batches
        found = list(map(self._given.get, keys))
        new = [at for at, one in enumerate(found) if one is None]
        for at in new:
            found[at] = self._given[keys[at]] = make(at)
            self._made_of[keys[at]] = granted[at], layouts[at]
        if new and len(self._given) > 4 * len(keys) + _FORGOTTEN_AT_LEAST:
            self._given = dict(zip(keys, cast(list[Placement], found), strict=True))
            self._made_of = {key: self._made_of[key] for key in keys}
        return cast(list[Placement], found)


def _whole_shares(
    snapshot: Snapshot, decision: Decision, requests: Requests
) -> list[Placement] | None:
    """Placements where nobody holds anything yet and each gets its whole share; None elsewhere.

    Nothing has to be shared out then, so a share that was given before is given again.
    """
    statuses, grants = status_of(snapshot), decision.grants
    granted = requests.of_grants(grants)
    batches: Iterable[BatchSize | None] = repeat(None)
    if not granted:
        pairs = [(statuses[grant.job_id], grant.configuration) for grant in grants]
        granted = [requests.of(as_granted(snapshot, *pair), pair[1]) for pair in pairs]
        batches = [grant.configuration.batch for grant in grants]
    if any(map(_HELD, granted)):
        return None
    packed = pack(requests, decision, granted)
    layouts = list(map(packed.__getitem__, map(_ID, granted)))
    if not all(layouts):
        return None
    there = cast(list[GpuLayout], layouts)

    def make(at: int) -> Placement:
        request, configuration = granted[at], grants[at].configuration
        status = as_granted(snapshot, statuses[request.job_id], configuration)
        return _whole_share(status, request, requests, there[at], configuration.batch)

    placements = _Shares.of_snapshot(snapshot).of(granted, there, batches, make)
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
    shares = []
    for name, gpus in layout[1]:
        kind = pool.kind_of[pool.number[name]]
        _, cpus, mem_mib = map(max, want.at(kind, gpus), request.need.at(kind, gpus))
        shares.append((name, Resources(gpus=gpus, cpus=cpus, mem_mib=mem_mib)))
    return Placement(job_id=request.job_id, gpu_type=layout[0], shares=tuple(shares), batch=batch)


PROPORTIONAL = Proportional()
"""The mechanism called ``proportional``."""
