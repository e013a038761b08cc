"""Free resources of a pool while a plan is being made, and the search for a place in them.

Nodes of one kind (GPU type and hardware) are indexed by their free GPUs, so a search looks only at
nodes that have enough.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from slurm_synergy.core.kinds import (
    Amounts,
    GpuLayout,
    Need,
    Needs,
    Parts,
    Pool,
    Shape,
    parts_of,
)

__all__ = ["Amounts", "GpuLayout", "Need", "Needs", "Parts", "Pool", "Room", "Shape", "parts_of"]

_ONE_AT_BEST = (None, 1)
"""Numbers of nodes that let a job be on a single one."""


_FEW = 8
"""The buckets are made anew where more than one of so many nodes has changed."""


class Room:
    """What is free on each node; may go below zero for jobs that stay in any case.

    At first that is ``start`` by node, or all that may be used this round.
    """

    __slots__ = (
        "_buckets",
        "_cpus",
        "_failed",
        "_free_of_kind",
        "_gpus",
        "_mem_mib",
        "_stale",
        "pool",
    )

    def __init__(self, pool: Pool, start: Iterable[Amounts] | None = None) -> None:
        self.pool = pool
        if start is None:
            self._gpus, self._cpus = pool.usable_gpus[:], pool.usable_cpus[:]
            self._mem_mib = pool.usable_mem_mib[:]
        else:
            rows = list(start)
            self._gpus = [row[0] for row in rows]
            self._cpus = [row[1] for row in rows]
            self._mem_mib = [row[2] for row in rows]
        self._free_of_kind = [0] * len(pool.kinds)
        for kind, gpus in zip(pool.kind_of, self._gpus, strict=True):
            self._free_of_kind[kind] += gpus
        # By kind and number of free GPUs: (cores, MiB, number), ascending. Made when first needed.
        self._buckets: list[list[list[tuple[int, int, int]]]] | None = None
        # By number: what nodes had that were changed since they came into their buckets.
        self._stale: dict[int, Amounts] = {}
        # What was not found once is not found again before something is given back.
        self._failed: set[tuple[Shape, Need]] = set()

    def copy(self) -> Room:
        """An independent copy."""
        other = object.__new__(Room)
        other.pool = self.pool
        other._gpus, other._cpus = self._gpus[:], self._cpus[:]
        other._mem_mib, other._free_of_kind = self._mem_mib[:], self._free_of_kind[:]
        other._buckets, other._stale = None, {}
        other._failed = set()
        return other

    def free(self, number: int) -> Amounts:
        """Free GPUs, cores and MiB of a node."""
        return self._gpus[number], self._cpus[number], self._mem_mib[number]

    def free_gpus(self, gpu_types: tuple[str, ...] = ()) -> int:
        """Free GPUs of the allowed type (any when empty) that has most of them free."""
        free = self._free_of_kind
        if len(self.pool.types) == 1 and not gpu_types:
            return free[0] if len(free) == 1 else sum(free)
        return max(
            [
                sum([free[kind] for kind in kinds])
                for gpu_type, kinds in self.pool.types
                if not gpu_types or gpu_type in gpu_types
            ],
            default=0,
        )

    def fits(self, parts: Parts) -> bool:
        """Whether all of ``parts``, on different nodes, is free."""
        for number, (gpus, cpus, mem_mib) in parts:
            if (
                self._gpus[number] < gpus
                or self._cpus[number] < cpus
                or self._mem_mib[number] < mem_mib
            ):
                return False
        return True

    def take(self, parts: Parts) -> None:
        """Book ``parts``."""
        for number, (gpus, cpus, mem_mib) in parts:
            free = self._gpus[number]
            if free > 0:  # else it is in no bucket, nor counted
                if self._buckets is not None and number not in self._stale:
                    self._stale[number] = free, self._cpus[number], self._mem_mib[number]
                self._free_of_kind[self.pool.kind_of[number]] -= gpus if gpus < free else free
            self._gpus[number] = free - gpus
            self._cpus[number] -= cpus
            self._mem_mib[number] -= mem_mib

    def take_if_free(self, parts: Parts) -> bool:
        """``take`` if it ``fits``; whether it did."""
        if len(parts) != 1:  # few jobs
            fits = self.fits(parts)
            if fits:
                self.take(parts)
            return fits
        number, (gpus, cpus, mem_mib) = parts[0]
        free, has_cpus, has_mib = self._gpus[number], self._cpus[number], self._mem_mib[number]
        if free < gpus or has_cpus < cpus or has_mib < mem_mib:
            return False
        if self._buckets is not None and number not in self._stale:
            self._stale[number] = free, has_cpus, has_mib
        self._free_of_kind[self.pool.kind_of[number]] -= gpus
        self._gpus[number], self._cpus[number] = free - gpus, has_cpus - cpus
        self._mem_mib[number] = has_mib - mem_mib
        return True

    def take_while_free(self, several: Iterable[Parts]) -> int:
        """``take_if_free`` of the parts of one job after the other, until one fails: how many."""
        all_gpus, all_cpus, all_mem_mib = self._gpus, self._cpus, self._mem_mib
        free_of_kind, kind_of = self._free_of_kind, self.pool.kind_of
        stale = None if self._buckets is None else self._stale
        count = 0
        for parts in several:
            if len(parts) != 1:  # few jobs
                if not self.take_if_free(parts):
                    break
                count += 1
                continue
            number, (gpus, cpus, mem_mib) = parts[0]
            free, has_cpus, has_mib = all_gpus[number], all_cpus[number], all_mem_mib[number]
            if free < gpus or has_cpus < cpus or has_mib < mem_mib:
                break
            if stale is not None and number not in stale:
                stale[number] = free, has_cpus, has_mib
            free_of_kind[kind_of[number]] -= gpus
            all_gpus[number], all_cpus[number] = free - gpus, has_cpus - cpus
            all_mem_mib[number] = has_mib - mem_mib
            count += 1
        return count

    def take_all(self, several: Iterable[Parts]) -> None:
        """Book the parts of several jobs."""
        if self._buckets is not None:
            for parts in several:
                self.take(parts)
            return
        all_gpus, all_cpus, all_mem_mib = self._gpus, self._cpus, self._mem_mib
        for parts in several:
            for number, (gpus, cpus, mem_mib) in parts:
                all_gpus[number] -= gpus
                all_cpus[number] -= cpus
                all_mem_mib[number] -= mem_mib
        self._count_kinds()

    def book(self, shape: Shape, need: Need) -> tuple[GpuLayout, Parts] | None:
        """``find`` and ``take`` at once: where the job goes and what it takes there, or None."""
        if self._failed and (shape, need) in self._failed:
            return None
        gpus, nodes, allowed = shape
        kind = self.pool.only_kind(allowed) if nodes in _ONE_AT_BEST else None
        if kind is None:
            layout = self.find(shape, need)
        else:
            if self._free_of_kind[kind] >= gpus:
                needs = need.at(kind, gpus)
                number = self._pop(kind, needs)
                if number is not None:
                    return self.pool.on_one(number, gpus), [(number, needs)]
            layout = self._spread(kind, shape, need)
        if layout is None:
            return None
        parts = parts_of(self.pool, layout, need)
        self.take(parts)
        return layout, parts

    def _pop(self, kind: int, needs: Amounts) -> int | None:
        """``_tightest``, and what is needed taken there."""
        gpus, cpus, mem_mib = needs
        buckets = self._index()[kind]
        for free in range(gpus, len(buckets)):
            bucket = buckets[free]
            if not bucket:
                continue
            for at in range(bisect_left(bucket, (cpus,)), len(bucket)):
                if bucket[at][1] >= mem_mib:
                    has_cpus, has_mib, number = bucket.pop(at)
                    left = self._gpus[number] = free - gpus
                    self._cpus[number] = has_cpus - cpus
                    self._mem_mib[number] = has_mib - mem_mib
                    self._free_of_kind[kind] -= gpus
                    if left:
                        insort(buckets[left], (has_cpus - cpus, has_mib - mem_mib, number))
                    return number
        return None

    def book_all(self, shape: Shape, need: Need, count: int) -> list[tuple[GpuLayout, Parts]]:
        """``book`` for ``count`` jobs that are alike, one after the other, until one fails.

        Whoever goes to the tightest node makes it tighter still, so the next one goes there as
        well, as long as that has what it needs: one look at each node is enough for all.
        """
        found: list[tuple[GpuLayout, Parts]] = []
        gpus, nodes, allowed = shape
        kind = self.pool.only_kind(allowed) if nodes in _ONE_AT_BEST else None
        if count > 1 and kind is not None and (shape, need) not in self._failed:
            needs = need.at(kind, gpus)
            buckets = self._index()[kind]
            most = min(count, self._free_of_kind[kind] // gpus)
            for free in range(gpus, len(buckets)):
                bucket = buckets[free]
                at = bisect_left(bucket, (needs[1],)) if bucket else 0
                while at < len(bucket) and len(found) < most:
                    if bucket[at][1] < needs[2]:
                        at += 1
                        continue
                    entry = bucket.pop(at)
                    times = min(_times(free, entry, needs), most - len(found))
                    self._put_back(kind, entry, free - times * gpus, times, needs)
                    one = self.pool.on_one(entry[2], gpus), [(entry[2], needs)]
                    found += [one] * times
        while len(found) < count:
            more = self.book(shape, need)
            if more is None:
                break
            found.append(more)
        return found

    def _put_back(
        self, kind: int, entry: tuple[int, int, int], left: int, times: int, needs: Amounts
    ) -> None:
        """A node out of its bucket again, less ``times`` what was needed: ``left`` GPUs."""
        gpus, cpus, mem_mib = needs
        number = entry[2]
        now = (entry[0] - times * cpus, entry[1] - times * mem_mib, number)
        self._gpus[number], self._cpus[number], self._mem_mib[number] = left, now[0], now[1]
        self._free_of_kind[kind] -= times * gpus
        if left:
            assert self._buckets is not None
            insort(self._buckets[kind][left], now)

    def _count_kinds(self) -> None:
        """Free GPUs by kind of node, anew."""
        free = [0] * len(self.pool.kinds)
        for kind, gpus in zip(self.pool.kind_of, self._gpus, strict=True):
            free[kind] += gpus if gpus > 0 else 0
        self._free_of_kind = free

    def give(self, parts: Parts) -> None:
        """Undo ``take``."""
        self._failed.clear()
        for number, (gpus, cpus, mem_mib) in parts:
            if self._buckets is not None:
                self._stale.setdefault(number, self.free(number))
            before = self._gpus[number]
            after = self._gpus[number] = before + gpus
            self._cpus[number] += cpus
            self._mem_mib[number] += mem_mib
            more = (after if after > 0 else 0) - (before if before > 0 else 0)
            self._free_of_kind[self.pool.kind_of[number]] += more

    def _index(self) -> list[list[list[tuple[int, int, int]]]]:
        if self._stale:
            self._file_again()
        if self._buckets is None:
            self._buckets = [
                [[] for _ in range(sample.total.gpus + 1)] for sample in self.pool.kinds
            ]
            rows = zip(self.pool.kind_of, self._gpus, self._cpus, self._mem_mib, strict=True)
            for number, (kind, gpus, cpus, mem_mib) in enumerate(rows):
                if gpus > 0:
                    self._buckets[kind][gpus].append((cpus, mem_mib, number))
            for buckets in self._buckets:
                for bucket in buckets:
                    bucket.sort()
        return self._buckets

    def _file_again(self) -> None:
        """Put those nodes into the right buckets that were changed."""
        stale, buckets = self._stale, self._buckets
        self._stale = {}
        if buckets is None or len(stale) > len(self._gpus) // _FEW:
            self._buckets = None
            return
        for number, (before, cpus, mem_mib) in stale.items():
            its = buckets[self.pool.kind_of[number]]
            if before > 0:
                bucket = its[before]
                del bucket[bisect_left(bucket, (cpus, mem_mib, number))]
            after, cpus, mem_mib = self.free(number)
            if after > 0:
                insort(its[after], (cpus, mem_mib, number))

    def fitting(self, kinds: Iterable[int], need: Need, gpus: int) -> Iterator[int]:
        """Nodes with ``gpus`` free GPUs and what they need, those with the least left first.

        Compared by GPUs, then cores, then memory, then name. Do not change the room meanwhile.
        """
        found = [self._fitting(kind, need.at(kind, gpus)) for kind in kinds]
        ordered = found[0] if len(found) == 1 else heapq.merge(*found)
        return (entry[3] for entry in ordered)

    def _fitting(self, kind: int, need: Amounts) -> Iterator[tuple[int, int, int, int]]:
        gpus, cpus, mem_mib = need
        buckets = self._index()[kind]
        for free in range(gpus, len(buckets)):
            bucket = buckets[free]
            for at in range(bisect_left(bucket, (cpus,)), len(bucket)) if bucket else ():
                entry = bucket[at]
                if entry[1] >= mem_mib:
                    yield free, *entry

    def _tightest(self, kind: int, need: Amounts) -> int | None:
        """The first of ``_fitting``."""
        gpus, cpus, mem_mib = need
        for bucket in self._index()[kind][gpus:]:
            for at in range(bisect_left(bucket, (cpus,)), len(bucket)) if bucket else ():
                entry = bucket[at]
                if entry[1] >= mem_mib:
                    return entry[2]
        return None

    def first(self, gpu_types: tuple[str, ...], need: Need, gpus: int) -> GpuLayout | None:
        """The first node by name of an allowed type with ``gpus`` free GPUs and what they need."""
        for number, free in enumerate(self._gpus):
            if free < gpus:
                continue
            node = self.pool.nodes[number]
            if gpu_types and node.gpu_type not in gpu_types:
                continue
            if self.fits([(number, need.at(self.pool.kind_of[number], gpus))]):
                return node.gpu_type, ((node.name, gpus),)
        return None

    def find(self, shape: Shape, need: Need) -> GpuLayout | None:
        """Best-fitting GPUs for a job of ``shape``; None when there are none.

        One GPU type per job, the fewest nodes (exactly as many as the shape says, if it does), and
        among those the nodes with the least left.
        """
        if self._failed and (shape, need) in self._failed:
            return None
        gpus, nodes, allowed = shape
        kind = self.pool.only_kind(allowed) if nodes in _ONE_AT_BEST else None
        if kind is not None:  # most jobs of most pools
            if self._free_of_kind[kind] >= gpus:
                number = self._tightest(kind, need.at(kind, gpus))
                if number is not None:
                    return self.pool.on_one(number, gpus)
            return self._spread(kind, shape, need)
        found: list[tuple[str, list[tuple[int, int]]]] = []
        for gpu_type, kinds in self.pool.types:
            if allowed and gpu_type not in allowed:
                continue
            if sum([self._free_of_kind[kind] for kind in kinds]) < gpus:
                continue
            parts = self._even(gpus, nodes or 1, kinds, need)
            if not parts and nodes is None:
                parts = self._split(gpus, kinds, need)
            if parts:
                found.append((gpu_type, parts))
        if not found:
            self._failed.add((shape, need))
            return None
        best = min(found, key=self._score) if len(found) > 1 else found[0]
        return self._layout(*best)

    def _spread(self, kind: int, shape: Shape, need: Need) -> GpuLayout | None:
        """``find`` of a job for which no single node of its only kind has room."""
        gpus, nodes, _ = shape
        if nodes is None and self._free_of_kind[kind] >= gpus:
            parts = self._split(gpus, (kind,), need)
            if parts:
                return self._layout(self.pool.kinds[kind].gpu_type, parts)
        self._failed.add((shape, need))
        return None

    def _layout(self, gpu_type: str, parts: Sequence[tuple[int, int]]) -> GpuLayout:
        if len(parts) == 1:
            return self.pool.on_one(*parts[0])
        names = self.pool.nodes
        return gpu_type, tuple([(names[number].name, each) for number, each in parts])

    def _score(self, found: tuple[str, list[tuple[int, int]]]) -> tuple[int, list[Amounts], str]:
        gpu_type, parts = found
        return len(parts), sorted(self.free(number) for number, _ in parts), gpu_type

    def _even(
        self, gpus: int, count: int, kinds: Sequence[int], need: Need
    ) -> list[tuple[int, int]]:
        """The ``count`` tightest nodes with ``gpus / count`` GPUs each; empty if fewer."""
        each = gpus // count
        if count == 1 and len(kinds) == 1:
            number = self._tightest(kinds[0], need.at(kinds[0], each))
            return [] if number is None else [(number, each)]
        found = list(islice(self.fitting(kinds, need, each), count))
        if len(found) < count:
            return []
        if count > 1:
            found.sort()
        return [(number, each) for number in found]

    def _split(self, gpus: int, kinds: Sequence[int], need: Need) -> list[tuple[int, int]]:
        """Fewest nodes that jointly have ``gpus`` GPUs: the emptiest first, the last best fit."""
        parts: dict[int, int] = {}
        rest = gpus
        for number, most in self._emptiest(gpus, kinds, need):
            if rest <= most:
                tightest = self.fitting(kinds, need, rest)
                last = next((one for one in tightest if one not in parts), number)
                parts[last] = rest
                return sorted(parts.items())
            parts[number] = most
            rest -= most
        return []

    def _emptiest(self, gpus: int, kinds: Sequence[int], need: Need) -> Iterator[tuple[int, int]]:
        """Nodes with the most GPUs that each can give with what they need, largest first."""
        seen: set[int] = set()
        most = max(self.pool.kinds[kind].total.gpus for kind in kinds)
        for count in range(min(gpus, most), 0, -1):
            for number in self.fitting(kinds, need, count):
                if number not in seen:
                    seen.add(number)
                    yield number, count


def _times(free: int, entry: tuple[int, int, int], needs: Amounts) -> int:
    """How often a node that has the needs once has them with ``free`` GPUs."""
    gpus, cpus, mem_mib = needs
    times = free // gpus
    if cpus > 0:
        times = min(times, entry[0] // cpus)
    return min(times, entry[1] // mem_mib) if mem_mib > 0 else times
