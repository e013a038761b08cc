"""Nodes by number and kind, and what jobs need on a node of a kind.

Everything here is plain integers: a decision for thousands of nodes asks millions of times whether
something fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

from slurm_synergy.core.model import JobStatus, Node, Profile
from slurm_synergy.core.resources import Resources

__all__ = ["Amounts", "GpuLayout", "Need", "Needs", "Parts", "Pool", "Shape", "parts_of"]

GpuLayout = tuple[str, tuple[tuple[str, int], ...]]
"""A GPU type and (node, GPUs) pairs in rank order."""

Amounts = tuple[int, int, int]
"""GPUs, cores and MiB."""

Parts = list[tuple[int, Amounts]]
"""What is taken on which node, by number."""

Shape = tuple[int, int | None, tuple[str, ...]]
"""GPUs in total, number of nodes (None: free to split), and allowed GPU types (empty: any)."""

_FORGOTTEN_AT_LEAST = 1000

# Needs by rule and kinds of node, which outlive the nodes themselves: these are new objects
# whenever one of them goes down. Those that were asked for last come last.
_SHARED: dict[tuple[object, ...], Needs] = {}
_MOST_SHARED = 16


class Pool:
    """The nodes of a round by number, in the order of their names, and their kinds.

    Nodes of one kind have the same GPU type and hardware, and shares can change on all or none of
    them, so they mean the same to every job.
    """

    __slots__ = (
        "_breadth",
        "_on_one",
        "_only_kind",
        "kind_of",
        "kinds",
        "nodes",
        "number",
        "signature",
        "types",
        "usable_cpus",
        "usable_gpus",
        "usable_mem_mib",
    )

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = tuple(nodes)
        self.number = {node.name: number for number, node in enumerate(self.nodes)}
        known: dict[tuple[str, Resources, bool], int] = {}
        self.kind_of = [
            known.setdefault((node.gpu_type, node.total, node.fixed_shares), len(known))
            for node in self.nodes
        ]
        self.signature = tuple(known)
        # One node of each kind stands for all of them.
        self.kinds = [self.nodes[self.kind_of.index(kind)] for kind in range(len(known))]
        # What may be used of each node this round.
        capacities = [node.capacity for node in self.nodes]
        self.usable_gpus = [one.gpus for one in capacities]
        self.usable_cpus = [one.cpus for one in capacities]
        self.usable_mem_mib = [one.mem_mib for one in capacities]
        by_type: dict[str, list[int]] = {}
        for kind, node in enumerate(self.kinds):
            by_type.setdefault(node.gpu_type, []).append(kind)
        self.types = tuple((name, tuple(by_type[name])) for name in sorted(by_type))
        # By the number of GPUs, and by node.
        self._on_one: dict[int, list[GpuLayout | None]] = {}
        self._breadth: dict[tuple[str, ...], int] = {(): len(self.types)}
        self._only_kind: dict[tuple[str, ...], int | None] = {}

    def breadth(self, gpu_types: tuple[str, ...]) -> int:
        """How many of the pool's GPU types are among the allowed ones (any when empty)."""
        found = self._breadth.get(gpu_types)
        if found is None:
            found = sum([name in gpu_types for name, _ in self.types])
            self._breadth[gpu_types] = found
        return found

    def only_kind(self, gpu_types: tuple[str, ...]) -> int | None:
        """The kind of all nodes of the allowed types (any when empty); None if they are unlike."""
        try:
            return self._only_kind[gpu_types]
        except KeyError:
            kinds = [own for name, own in self.types if not gpu_types or name in gpu_types]
            one = len(kinds) == 1 and len(kinds[0]) == 1
            found = self._only_kind[gpu_types] = kinds[0][0] if one else None
            return found

    def on_one(self, number: int, gpus: int) -> GpuLayout:
        """``gpus`` GPUs of one node: the same object whenever asked."""
        row = self._on_one.get(gpus)
        if row is None:
            row = self._on_one[gpus] = [None] * len(self.nodes)
        found = row[number]
        if found is None:
            node = self.nodes[number]
            found = row[number] = (node.gpu_type, ((node.name, gpus),))
        return found


class Need:
    """What jobs of one sort need on a kind of node for a number of their GPUs; computed once.

    ``kept`` is for whoever computes something that follows from it, under a key of theirs.
    """

    __slots__ = ("__weakref__", "_compute", "_known", "kept")

    def __init__(self, compute: Callable[[int, int], Amounts]) -> None:
        self._compute = compute
        self._known: dict[tuple[int, int], Amounts] = {}
        self.kept: dict[object, Any] = {}

    def at(self, kind: int, gpus: int) -> Amounts:
        """GPUs, cores and MiB for ``gpus`` GPUs on a node of ``kind``."""
        found = self._known.get((kind, gpus))
        if found is None:
            found = self._known[kind, gpus] = self._compute(kind, gpus)
        return found


class Needs:
    """One ``Need`` for all jobs that ``rule`` treats alike.

    The rules of ``core.pipeline`` look at the profile, the process memory, the tasks per node and
    whether the job follows a lease; thousands of jobs share a few of those. An elastic job has a
    new profile whenever something is learned of it, so what nobody has asked for of late is
    forgotten: ``expect`` tells how much that is.
    """

    __slots__ = ("_before", "_by_object", "_by_value", "_kinds", "_most", "_rule")

    def __init__(self, pool: Pool, rule: Callable[[JobStatus, Node, int], Resources]) -> None:
        self._kinds = pool.kinds
        self._rule = rule
        # Most jobs share the profile object, which is quicker to look up than its value. It is
        # kept beside the need, so that its id stays its own. When there are too many, those that
        # are asked for again return from the dictionary before, and the others go with it.
        self._by_object: dict[tuple[int, int, int, bool], tuple[Profile, Need]] = {}
        self._before: dict[tuple[int, int, int, bool], tuple[Profile, Need]] = {}
        # As long as anybody has it, so that equal jobs have the same.
        self._by_value: WeakValueDictionary[object, Need] = WeakValueDictionary()
        self.expect(0)

    @classmethod
    def shared(cls, pool: Pool, rule: Callable[[JobStatus, Node, int], Resources]) -> Needs:
        """The needs by ``rule`` on nodes of these kinds: the same object whenever asked."""
        key = (rule, pool.signature)
        found = _SHARED.pop(key, None) or cls(pool, rule)
        if len(_SHARED) >= _MOST_SHARED:
            del _SHARED[next(iter(_SHARED))]
        _SHARED[key] = found
        return found

    def expect(self, jobs: int) -> None:
        """There are so many jobs now: little more is kept than what these can ask for."""
        self._most = 2 * jobs + _FORGOTTEN_AT_LEAST

    def of(self, status: JobStatus) -> Need:
        """The need of the job; equal jobs get the same object."""
        job, profile = status.job, status.profile
        key = (id(profile), job.min_mem_mib_per_node, job.tasks_per_node, job.wrapped)
        found = self._by_object.get(key)
        if found is not None:
            return found[1]
        if len(self._by_object) >= self._most:
            self._before, self._by_object = self._by_object, {}
        found = self._before.get(key)
        if found is None:
            found = profile, self._equal(status)
        self._by_object[key] = found
        return found[1]

    def _equal(self, status: JobStatus) -> Need:
        """The need of jobs that are equal to this one."""
        job, profile = status.job, status.profile
        rates = tuple(sorted(profile.gpu_rate_per_gpu.items()))
        belief = (profile.confident, profile.rate_error)
        own = (job.min_mem_mib_per_node, job.tasks_per_node, job.wrapped)
        value = (rates, profile.pipeline, profile.table, *belief, *own)
        need = self._by_value.get(value)
        if need is None:
            need = self._by_value[value] = self.own(status)
        return need

    def own(self, status: JobStatus) -> Need:
        """A need for this job alone, for rules that tell equal jobs apart."""
        rule, kinds = self._rule, self._kinds

        def compute(kind: int, gpus: int) -> Amounts:
            share = rule(status, kinds[kind], gpus)
            return share.gpus, share.cpus, share.mem_mib

        return Need(compute)


def parts_of(pool: Pool, layout: GpuLayout, need: Need) -> Parts:
    """What ``need`` takes on ``layout``; nodes that left the pool are nobody's concern."""
    numbers, kinds = pool.number, pool.kind_of
    if len(layout[1]) == 1:
        ((name, gpus),) = layout[1]
        number = numbers.get(name)
        return [] if number is None else [(number, need.at(kinds[number], gpus))]
    return [
        (numbers[name], need.at(kinds[numbers[name]], gpus))
        for name, gpus in layout[1]
        if name in numbers
    ]
