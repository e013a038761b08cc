"""Packing of GPU requests onto nodes: can these jobs run together, and where.

Only GPUs are distributed here. Cores and memory count with what promises P1 and P7 make
indispensable, so that a set of jobs that packs can also be given its proportional rates, whatever
the mechanism does with the rest. Policies ask whether a set packs, mechanisms where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_synergy.core.model import Configuration, JobStatus, Node, Placement, Snapshot
from slurm_synergy.core.pipeline import floor_share
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.snapshot import held, is_frozen, is_pinned

__all__ = [
    "GpuLayout",
    "Need",
    "Packer",
    "Request",
    "Room",
    "find_layout",
    "layout_of",
    "make_request",
    "memoised",
    "pack_gpus",
]

GpuLayout = tuple[str, tuple[tuple[str, int], ...]]
"""A GPU type and (node, GPUs) pairs in rank order."""

Need = Callable[[Node, int], Resources]
"""What a job needs on a node for a number of its GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A job as the packer sees it.

    ``nodes`` None means free to split. ``held`` is what the job holds and would like to keep;
    ``pinned`` that it keeps it in any case, then ``shares`` is what it takes there.
    """

    job_id: int
    gpus: int
    nodes: int | None
    gpu_types: tuple[str, ...]
    need: Need
    held: GpuLayout | None = None
    pinned: bool = False
    shares: tuple[tuple[str, Resources], ...] = ()


def layout_of(placement: Placement) -> GpuLayout:
    """The GPU part of a placement, in rank order."""
    return placement.gpu_type, tuple((name, share.gpus) for name, share in placement.shares)


def memoised(need: Need) -> Need:
    """``need`` computed once per kind of node: it depends on GPU type and hardware only."""
    known: dict[tuple[str, Resources, int], Resources] = {}

    def remember(node: Node, gpus: int) -> Resources:
        key = (node.gpu_type, node.total, gpus)
        if key not in known:
            known[key] = need(node, gpus)
        return known[key]

    return remember


def make_request(
    status: JobStatus, snapshot: Snapshot, configuration: Configuration | None = None
) -> Request:
    """The request of a job for ``configuration`` (as the user asked for it when None)."""
    wanted = configuration or status.job.configuration
    now = held(status)
    pinned = is_pinned(status, snapshot)
    types = (wanted.gpu_type,) if wanted.gpu_type else status.job.gpu_types
    return Request(
        job_id=status.job.job_id,
        gpus=wanted.gpus,
        nodes=wanted.nodes,
        gpu_types=types,
        need=memoised(lambda node, gpus: floor_share(status, node, gpus)),
        held=layout_of(now) if now else None,
        pinned=pinned,
        shares=_pinned_shares(status, snapshot, now) if now and pinned else (),
    )


def _pinned_shares(
    status: JobStatus, snapshot: Snapshot, now: Placement
) -> tuple[tuple[str, Resources], ...]:
    """What a pinned job cannot do without: all it holds when frozen, else its floor.

    The floor is cut to what it holds: that fits where it is, and a floor that has grown since (a
    better profile) must not make the pool look overfull.
    """
    if is_frozen(status, snapshot):
        return now.shares
    by_name = {node.name: node for node in snapshot.nodes}
    return tuple(
        (name, _smaller(floor_share(status, by_name[name], share.gpus), share))
        for name, share in now.shares
    )


def _smaller(one: Resources, other: Resources) -> Resources:
    return Resources(
        gpus=other.gpus,
        cpus=min(one.cpus, other.cpus),
        mem_mib=min(one.mem_mib, other.mem_mib),
    )


class Room:
    """What is free on each node while a plan is being made; may go below zero for pinned jobs."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._free = {
            node.name: (node.capacity.gpus, node.capacity.cpus, node.capacity.mem_mib)
            for node in nodes
        }

    def copy(self) -> Room:
        """An independent copy."""
        other = Room(())
        other._free = dict(self._free)
        return other

    def free(self, node: str) -> tuple[int, int, int]:
        """Free GPUs, cores and MiB of ``node``; zero for a node that left the pool."""
        return self._free.get(node, (0, 0, 0))

    def fits(self, node: str, need: Resources) -> bool:
        """Whether ``need`` is free on ``node``."""
        gpus, cpus, mem_mib = self.free(node)
        return need.gpus <= gpus and need.cpus <= cpus and need.mem_mib <= mem_mib

    def take(self, shares: Iterable[tuple[str, Resources]]) -> None:
        """Book ``shares``; what lies on nodes that left the pool is nobody's concern."""
        for name, share in shares:
            if name in self._free:
                gpus, cpus, mem_mib = self._free[name]
                self._free[name] = (
                    gpus - share.gpus,
                    cpus - share.cpus,
                    mem_mib - share.mem_mib,
                )

    def give(self, shares: Iterable[tuple[str, Resources]]) -> None:
        """Undo ``take``."""
        for name, share in shares:
            if name in self._free:
                gpus, cpus, mem_mib = self._free[name]
                self._free[name] = (
                    gpus + share.gpus,
                    cpus + share.cpus,
                    mem_mib + share.mem_mib,
                )


def find_layout(
    request: Request, nodes: Sequence[Node], room: Room, need: Need | None = None
) -> GpuLayout | None:
    """Best-fitting GPUs for ``request`` in ``room``; None when there are none.

    One GPU type per job, the fewest nodes (exactly ``request.nodes`` when given), and among those
    the nodes with the least left, by GPUs, then cores, then memory, then name. ``need`` replaces
    the request's own.
    """
    wants = need or request.need
    best: tuple[tuple[object, ...], GpuLayout] | None = None
    for gpu_type in sorted({node.gpu_type for node in nodes}):
        if request.gpu_types and gpu_type not in request.gpu_types:
            continue
        typed = [node for node in nodes if node.gpu_type == gpu_type]
        if request.nodes is not None:
            parts = _even(request.gpus, request.nodes, typed, room, wants)
        else:
            parts = _even(request.gpus, 1, typed, room, wants) or _split(
                request.gpus, typed, room, wants
            )
        if parts:
            score = (len(parts), sorted(room.free(name) for name, _ in parts), gpu_type)
            if best is None or score < best[0]:
                best = (score, (gpu_type, parts))
    return best[1] if best else None


def _even(
    gpus: int, count: int, nodes: Sequence[Node], room: Room, need: Need
) -> tuple[tuple[str, int], ...]:
    """The ``count`` tightest nodes with ``gpus / count`` GPUs each; empty when there are fewer."""
    each = gpus // count
    fitting = [
        node.name
        for node in nodes
        if room.free(node.name)[0] >= each and room.fits(node.name, need(node, each))
    ]
    if len(fitting) < count:
        return ()
    tightest = sorted(fitting, key=lambda name: (room.free(name), name))[:count]
    return tuple((name, each) for name in sorted(tightest))


def _split(gpus: int, nodes: Sequence[Node], room: Room, need: Need) -> tuple[tuple[str, int], ...]:
    """Fewest nodes that jointly have ``gpus`` GPUs: the emptiest first, the last one best fit."""
    usable = {node.name: most for node in nodes if (most := _most(node, gpus, room, need))}
    by_name = {node.name: node for node in nodes}
    emptiest = sorted(usable, key=lambda name: (-usable[name], room.free(name), name))
    parts: list[tuple[str, int]] = []
    rest = gpus
    for name in emptiest:
        if rest <= usable[name]:
            last = [
                other
                for other in usable
                if other not in dict(parts)
                and usable[other] >= rest
                and room.fits(other, need(by_name[other], rest))
            ]
            if last:
                parts.append((min(last, key=lambda one: (room.free(one), one)), rest))
                return tuple(sorted(parts))
        take = min(usable[name], rest)
        parts.append((name, take))
        rest -= take
        if not rest:
            return tuple(sorted(parts))
    return ()


def _most(node: Node, gpus: int, room: Room, need: Need) -> int:
    """Most GPUs, up to ``gpus``, that ``node`` can give with what they need."""
    for count in range(min(gpus, room.free(node.name)[0]), 0, -1):
        if room.fits(node.name, need(node, count)):
            return count
    return 0


class Packer:
    """Adds jobs one by one in priority order and keeps a feasible layout of all added.

    A job that is added may take the GPUs of running jobs that come after it, but it does not move
    those before it: migration costs a restart, and only a job of higher priority is worth it.
    """

    def __init__(self, nodes: Sequence[Node], requests: Sequence[Request]) -> None:
        self._nodes = nodes
        self._by_name = {node.name: node for node in nodes}
        self._room = Room(nodes)
        self._added: dict[int, Request] = {}
        self._layouts: dict[int, GpuLayout] = {}
        # Claims of running jobs whose turn has not come: avoided if there is another way.
        self._claims = {
            request.job_id: self._shares(request, request.held)
            for request in requests
            if request.held is not None and not request.pinned
        }

    def layout(self, job_id: int) -> GpuLayout | None:
        """Where ``job_id`` was put, or None."""
        return self._layouts.get(job_id)

    def free_gpus(self, gpu_types: tuple[str, ...]) -> int:
        """Free GPUs of the allowed type (any when empty) that has most of them free."""
        by_type: dict[str, int] = {}
        for node in self._nodes:
            if not gpu_types or node.gpu_type in gpu_types:
                free = max(self._room.free(node.name)[0], 0)
                by_type[node.gpu_type] = by_type.get(node.gpu_type, 0) + free
        return max(by_type.values(), default=0)

    def fits_gpus_only(self, request: Request) -> bool:
        """Whether the request would fit if cores and memory did not matter."""
        bare = replace(request, need=lambda node, gpus: Resources(gpus=gpus))
        room = self._room.copy()
        return find_layout(bare, self._nodes, room) is not None

    def add(self, request: Request) -> bool:
        """Add the request; False, and nothing changed, when it cannot be packed."""
        self._claims.pop(request.job_id, None)
        if request.pinned and request.held is not None:
            self._keep(request, request.held)
            return True
        layout = self._own(request) or self._elsewhere(request)
        if layout is not None:
            self._keep(request, layout)
            return True
        if self.free_gpus(request.gpu_types) < request.gpus:
            return False
        return self._repack(request)

    def _shares(self, request: Request, layout: GpuLayout) -> list[tuple[str, Resources]]:
        if request.pinned:
            return list(request.shares)
        return [
            (name, request.need(self._by_name[name], gpus))
            for name, gpus in layout[1]
            if name in self._by_name
        ]

    def _keep(self, request: Request, layout: GpuLayout) -> None:
        self._room.take(self._shares(request, layout))
        self._added[request.job_id] = request
        self._layouts[request.job_id] = layout

    def _own(self, request: Request) -> GpuLayout | None:
        """What the request holds, if nobody before it took it and it still has the right shape."""
        if request.held is None or not _has_shape(request, request.held):
            return None
        shares = self._shares(request, request.held)
        whole = len(shares) == len(request.held[1])
        fits = whole and all(self._room.fits(name, share) for name, share in shares)
        return request.held if fits else None

    def _elsewhere(self, request: Request) -> GpuLayout | None:
        """Free GPUs, preferably such as no running job behind this one claims."""
        unclaimed = self._room.copy()
        for shares in self._claims.values():
            unclaimed.take(shares)
        return find_layout(request, self._nodes, unclaimed) or find_layout(
            request, self._nodes, self._room
        )

    def _repack(self, request: Request) -> bool:
        """Find room by rearranging the added jobs that do not sit where they already run."""
        stay = {
            job_id for job_id, other in self._added.items() if self._layouts[job_id] == other.held
        }
        packed = _pack_around(self._nodes, [*self._added.values(), request], stay)
        if packed is None:
            return False
        self._added[request.job_id] = request
        self._layouts = packed
        self._room = Room(self._nodes)
        for job_id, layout in packed.items():
            self._room.take(self._shares(self._added[job_id], layout))
        return True


def _has_shape(request: Request, layout: GpuLayout) -> bool:
    gpu_type, parts = layout
    if request.gpu_types and gpu_type not in request.gpu_types:
        return False
    if sum(gpus for _, gpus in parts) != request.gpus:
        return False
    return request.nodes is None or len(parts) == request.nodes


def _pack_around(
    nodes: Sequence[Node], requests: Sequence[Request], stay: set[int]
) -> dict[int, GpuLayout] | None:
    """All requests, those in ``stay`` where they are, the others largest first; None if not all."""
    room = Room(nodes)
    by_name = {node.name: node for node in nodes}
    packed: dict[int, GpuLayout] = {}
    moving: list[tuple[tuple[int, int, int], Request]] = []
    for rank, request in enumerate(requests):
        if request.held is not None and (request.pinned or request.job_id in stay):
            shares = request.shares or [
                (name, request.need(by_name[name], gpus)) for name, gpus in request.held[1]
            ]
            room.take(shares)
            packed[request.job_id] = request.held
        else:
            per_node = request.gpus // (request.nodes or 1)
            moving.append(((-per_node, -request.gpus, rank), request))
    for _, request in sorted(moving, key=lambda item: item[0]):
        layout = find_layout(request, nodes, room)
        if layout is None:
            return None
        room.take((name, request.need(by_name[name], gpus)) for name, gpus in layout[1])
        packed[request.job_id] = layout
    return packed


def _can_stay(nodes: Sequence[Node], requests: Sequence[Request]) -> set[int]:
    """Running jobs that all fit where they are, taken in priority order."""
    packer = Packer(nodes, [])
    staying: set[int] = set()
    for request in sorted(requests, key=lambda one: not one.pinned):
        if request.held is None:
            continue
        if request.pinned or packer._own(request) is not None:
            packer._keep(request, request.held)
            staying.add(request.job_id)
    return staying


def pack_gpus(nodes: Sequence[Node], requests: Sequence[Request]) -> Mapping[int, GpuLayout | None]:
    """Where each request goes, in priority order; None for those that cannot be packed.

    Jobs that hold GPUs stay where they are if all others can be packed around them; otherwise jobs
    are added in priority order, and running ones move for those before them. If even that leaves
    one out, all that can be moved are packed anew, largest first.
    """
    packed = _pack_around(nodes, requests, _can_stay(nodes, requests))
    if packed is not None:
        return packed
    packer = Packer(nodes, requests)
    added = sum(packer.add(request) for request in requests)
    anew = _pack_around(nodes, requests, set()) if added < len(requests) else None
    return anew or {request.job_id: packer.layout(request.job_id) for request in requests}
