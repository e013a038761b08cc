"""From Slurm's node records to the nodes that a round plans on. Pure.

A node's cores are counted as Slurm counts CPUs. A node that runs jobs of others, or that somebody
else has reserved, has no capacity: a job of a partition that does not share cores and one of ours
cannot run side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from slurm_synergy.core.model import Enforcement, Node
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.wording import counted
from slurm_synergy.errors import ClusterError
from slurm_synergy.slurm import hostlist
from slurm_synergy.slurm.facts import JobFacts, NodeFacts
from slurm_synergy.slurm.sizing import NodeNeed

__all__ = [
    "UNTYPED",
    "NodeMemory",
    "allocated",
    "free_on",
    "gpu_type_of",
    "left_out",
    "managed_nodes",
    "node_needs",
    "node_values",
]

UNTYPED = "gpu"
"""The GPU type of nodes whose gres.conf names none."""

_NOTHING = Resources()


def managed_nodes(
    facts: Sequence[NodeFacts],
    *,
    partition: str,
    chosen: frozenset[str],
    insist: bool = True,
) -> tuple[NodeFacts, ...]:
    """The partition's nodes that have GPUs, or those of them in ``chosen`` when it is not empty.

    Raises ClusterError when there is none and ``insist``: an answer that would end every job's
    plan is not believed.
    """
    inside = [node for node in facts if partition in node.partitions]
    kept = [node for node in inside if not chosen or node.name in chosen]
    kept = [node for node in kept if gpu_type_of(node) is not None]
    if not kept and insist:
        which = f" among {hostlist.compress(sorted(chosen))}" if chosen else ""
        raise ClusterError(
            f"Slurm shows no GPU node of partition {partition!r}{which} "
            f"({counted(len(facts), 'node')} in all, {len(inside)} in the partition)"
        )
    return tuple(sorted(kept, key=lambda node: node.name))


def left_out(facts: Sequence[NodeFacts], *, partition: str, chosen: frozenset[str]) -> str:
    """Which nodes of ``chosen`` cannot be scheduled, and why, in words; empty when all can."""
    known = {node.name: node for node in facts}
    causes: dict[str, list[str]] = {}
    for name in sorted(chosen):
        node = known.get(name)
        if node is None:
            causes.setdefault("Slurm does not know", []).append(name)
        elif partition not in node.partitions:
            causes.setdefault(f"not in partition {partition!r}:", []).append(name)
        elif gpu_type_of(node) is None:
            causes.setdefault("without GPUs of one type:", []).append(name)
    return "; ".join(f"{cause} {hostlist.compress(names)}" for cause, names in causes.items())


def gpu_type_of(facts: NodeFacts) -> str | None:
    """The node's GPU type; None for nodes without GPUs and for those with several types."""
    types = [kind for kind, count in facts.gpus.items() if count > 0]
    return (types[0] or UNTYPED) if len(types) == 1 else None


def allocated(facts: JobFacts) -> tuple[tuple[str, Resources], ...]:
    """What a started job holds, node by node in rank order."""
    return tuple(
        (
            part.node,
            Resources(gpus=len(part.gpu_ids), cpus=len(part.cpu_ids), mem_mib=part.mem_mib),
        )
        for part in facts.allocation
    )


def _total(facts: NodeFacts) -> Resources:
    return Resources(
        gpus=sum(facts.gpus.values()), cpus=facts.cpus_total, mem_mib=facts.real_memory_mib
    )


def _used(facts: NodeFacts) -> Resources:
    return Resources(
        gpus=sum(facts.gpus_used.values()), cpus=facts.cpus_alloc, mem_mib=facts.alloc_mem_mib
    )


def runs_others(facts: NodeFacts, ours: Resources) -> bool:
    """Whether more is in use on the node than our jobs hold there."""
    used = _used(facts)
    if ours == Resources():
        return used != Resources()
    return used.gpus > ours.gpus or used.mem_mib > ours.mem_mib


def node_values(
    facts: Iterable[NodeFacts],
    *,
    ours: Mapping[str, Resources],
    reserved: Collection[str] | None,
    near: Callable[[NodeFacts], tuple[int, ...]] = lambda node: (),
) -> tuple[Node, ...]:
    """The nodes of the round. ``ours`` is what our jobs hold per node.

    ``reserved`` are the nodes of our reservation, None when the controller keeps none; ``near``
    tells the socket of each GPU.
    """
    return NodeMemory(near).values(facts, ours=ours, reserved=reserved)


class NodeMemory:
    """``node_values`` time after time: what was made of the same facts is the same object.

    ``fixed`` tells of a node by name whether jobs have fixed shares there.
    """

    def __init__(
        self,
        near: Callable[[NodeFacts], tuple[int, ...]] = lambda node: (),
        fixed: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._near, self._fixed = near, fixed
        self._known: dict[str, tuple[NodeFacts, tuple[Resources, bool, bool], Node]] = {}

    def values(
        self,
        facts: Iterable[NodeFacts],
        *,
        ours: Mapping[str, Resources],
        reserved: Collection[str] | None,
    ) -> tuple[Node, ...]:
        """See ``node_values``."""
        before, self._known = self._known, {}
        for node in facts:
            mine = not node.reserved if reserved is None else node.name in reserved
            terms = (ours.get(node.name, _NOTHING), mine, self._fixed(node.name))
            known = before.get(node.name)
            if known is None or not _is(known[0], node) or known[1] != terms:
                known = (node, terms, self._value(node, *terms))
            self._known[node.name] = known
        return tuple(known[2] for known in self._known.values())

    def _value(self, node: NodeFacts, held: Resources, mine: bool, fixed: bool) -> Node:
        total, ours_alone = _total(node), not runs_others(node, held)
        return Node(
            name=node.name,
            gpu_type=gpu_type_of(node) or UNTYPED,
            total=total,
            capacity=total if node.usable and mine and ours_alone else _NOTHING,
            sockets=max(1, node.sockets),
            threads_per_core=max(1, node.threads_per_core),
            gpu_sockets=self._near(node),
            fixed_shares=fixed,
        )


def _is(one: NodeFacts, other: NodeFacts) -> bool:
    return one is other or one == other


def node_needs(
    facts: Iterable[NodeFacts], *, held: Mapping[str, Resources], coming: Collection[str]
) -> tuple[NodeNeed, ...]:
    """The nodes as the size of the reservation depends on them.

    ``held`` is what our jobs hold or are about to, ``coming`` the nodes that a lease names.
    """
    return tuple(
        NodeNeed(
            name=node.name,
            gpu_type=gpu_type_of(node) or UNTYPED,
            gpus=sum(node.gpus.values()),
            held=held.get(node.name, Resources()).gpus,
            ours=node.name in coming or held.get(node.name, Resources()) != Resources(),
            busy=runs_others(node, held.get(node.name, Resources())),
            usable=node.usable,
        )
        for node in facts
    )


def free_on(facts: NodeFacts, node: Node, coming: Resources, enforcement: Enforcement) -> Resources:
    """What a new job could have now: not used, and not promised to a job that is starting."""
    if node.capacity == Resources():
        return Resources()
    used = _used(facts)
    cpus = node.capacity.cpus
    if enforcement is not Enforcement.SHARED:
        cpus = max(0, cpus - used.cpus - coming.cpus)
    return Resources(
        gpus=max(0, node.capacity.gpus - used.gpus - coming.gpus),
        cpus=cpus,
        mem_mib=max(0, node.capacity.mem_mib - used.mem_mib - coming.mem_mib),
    )
