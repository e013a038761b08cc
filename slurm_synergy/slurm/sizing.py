"""Which nodes the controller's reservation should cover now: those in use, and those needed. Pure.

Never a node on which somebody else's job runs, nor one in somebody else's reservation. Without a
least number everything else of the pool is covered. With one, the reservation follows the demand:
the nodes on which our jobs run, as many more as the waiting jobs' GPUs need, and the least.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from slurm_synergy.core.model import Elasticity, Job

__all__ = ["Demand", "JobNeed", "NodeNeed", "need_of", "needed_nodes", "sized"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNeed:
    """A waiting job's GPUs: ``pieces`` times ``gpus`` of one of ``gpu_types`` (empty: any).

    ``apart`` tells that each piece is on a node of its own.
    """

    pieces: int
    gpus: int
    apart: bool
    gpu_types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNeed:
    """A node of the pool: its GPUs, how many of them our jobs hold, and what speaks against it.

    ``busy`` tells that others run there, ``usable`` that a job could be started there; ``ours``
    that a job of ours is there or about to be, which keeps the node.
    """

    name: str
    gpu_type: str
    gpus: int
    held: int
    ours: bool
    busy: bool
    usable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What the size of the reservation follows from; nodes by name, jobs as submitted.

    ``least`` None means the whole pool, ``most`` None no bound (both count nodes).
    """

    nodes: tuple[NodeNeed, ...]
    jobs: tuple[JobNeed, ...]
    least: int | None
    most: int | None


def need_of(job: Job) -> JobNeed:
    """What a waiting job could use: the most of an elastic one, else what it asks for."""
    most = max(job.gpus, job.max_gpus or 0)
    if job.elasticity is not Elasticity.RIGID and most > job.gpus:
        each = max(1, job.scale_unit)
        pieces, apart = -(-most // each), False
    elif job.nodes is None:
        each, pieces, apart = 1, job.gpus, False
    else:
        each, pieces, apart = job.gpus // job.nodes, job.nodes, True
    return JobNeed(pieces=pieces, gpus=each, apart=apart, gpu_types=job.gpu_types)


def needed_nodes(
    demand: Demand, *, reserved: Collection[str], taken: Collection[str]
) -> frozenset[str]:
    """The nodes that jobs of ours hold or need, within the bounds; with ``least`` None, all.

    ``reserved`` are the nodes that are ours now, ``taken`` those in reservations of others.
    """
    nodes = [
        node
        for node in demand.nodes
        if node.name not in taken and (node.name in reserved or not node.busy)
    ]
    # What is in use stays, what is ours goes before what would have to be taken.
    nodes.sort(key=lambda node: (not node.ours, node.name not in reserved, node.name))
    most = len(nodes) if demand.most is None else demand.most
    if demand.least is None:
        return _bounded(nodes, most)
    chosen = {node.name: node for node in nodes if node.ours}
    free = {node.name: node.gpus - node.held for node in nodes if node.usable}
    usable = [node for node in nodes if node.usable]
    failed: set[JobNeed] = set()
    for job in demand.jobs:
        # What does not fit once does not fit later: nothing is given back meanwhile.
        if job not in failed and not _serve(job, usable, chosen, free, most):
            failed.add(job)
    for node in nodes:
        if len(chosen) >= min(demand.least, most):
            break
        chosen.setdefault(node.name, node)
    return frozenset(chosen)


def _bounded(nodes: list[NodeNeed], most: int) -> frozenset[str]:
    held = sum(node.ours for node in nodes)
    return frozenset(node.name for node in nodes[: max(held, most)])


def _serve(
    job: JobNeed,
    nodes: list[NodeNeed],
    chosen: dict[str, NodeNeed],
    free: dict[str, int],
    most: int,
) -> bool:
    """Book ``job`` on chosen nodes, and on more of them where needed; whether all of it fits.

    One whose pieces belong on different nodes is booked as a whole or not at all.
    """
    left, booked = job.pieces, dict[str, int]()
    room = most - len(chosen)
    allowed = [node for node in nodes if not job.gpu_types or node.gpu_type in job.gpu_types]
    for inside in (True, False):
        for node in allowed:
            if (node.name in chosen) is not inside or left == 0:
                continue
            fitting = free[node.name] // job.gpus
            count = min(left, fitting, 1 if job.apart else fitting)
            if count == 0 or (not inside and room <= 0):
                continue
            room -= not inside
            booked[node.name] = count * job.gpus
            left -= count
    if left and job.apart:
        return False
    for node in allowed:
        if node.name in booked:
            chosen[node.name] = node
            free[node.name] -= booked[node.name]
    return left == 0


def sized(
    demand: Demand,
    *,
    reserved: Collection[str],
    taken: Collection[str],
    idle_for_s: Callable[[str], float],
    idle_s: float,
) -> tuple[frozenset[str], frozenset[str]]:
    """The nodes to cover, and those of them that are needed.

    A reserved node that is not needed stays until ``idle_for_s`` of it has reached ``idle_s``, as
    long as the upper bound allows.
    """
    needed = needed_nodes(demand, reserved=reserved, taken=taken)
    most = len(demand.nodes) if demand.most is None else demand.most
    pool: Mapping[str, NodeNeed] = {node.name: node for node in demand.nodes}
    idle = sorted(
        name
        for name in set(reserved) - needed
        if name in pool and name not in taken and idle_for_s(name) < idle_s
    )
    return needed | frozenset(idle[: max(0, most - len(needed))]), needed
