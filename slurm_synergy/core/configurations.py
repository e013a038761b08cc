"""Which configurations a pool offers, and which of them together certainly fit (Sia, section 3.2).

Within a node a job takes a power of two of GPUs; beyond, whole nodes. With that shape the totals
per GPU type decide whether a set of configurations can be placed, so choosing needs no packing. A
node whose GPUs are no power of two counts as several virtual nodes that are (12 = 8 + 4).

Pieces and requests that are powers of two fit exactly when, for every size s, the requests of at
least s GPUs are no more than what the pieces of at least s hold. ``usage`` has one row for each
size at which that can fail; with equal nodes of a power of two that is one row a type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.model import Configuration, Node

__all__ = ["Capacities", "Usage", "configuration_set", "is_whole", "pieces", "tally", "usage"]


def pieces(gpus: int) -> tuple[int, ...]:
    """Powers of two that add up to ``gpus``, largest first: the virtual nodes of a node."""
    return tuple(1 << bit for bit in range(gpus.bit_length() - 1, -1, -1) if gpus >> bit & 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """A pool as configurations see it.

    ``whole`` counts, by GPU type and GPUs of a node, the nodes of which nothing is taken; ``parts``
    counts, by GPU type and size, the pieces that are left of the others.
    """

    whole: Mapping[tuple[str, int], int] = field(default_factory=dict)
    parts: Mapping[tuple[str, int], int] = field(default_factory=dict)

    @property
    def gpu_types(self) -> tuple[str, ...]:
        """GPU types that have something to give, sorted."""
        return tuple(sorted({kind for kind, _ in (*self.whole, *self.parts)}))

    def node_sizes(self, gpu_type: str) -> dict[int, int]:
        """Free whole nodes of that type by their GPUs."""
        return {size: count for (kind, size), count in self.whole.items() if kind == gpu_type}

    def pieces(self, gpu_type: str) -> dict[int, int]:
        """All pieces of that type, whole nodes taken apart, by size, ascending."""
        found: Counter[int] = Counter()
        for size, count in self.node_sizes(gpu_type).items():
            for one in pieces(size):
                found[one] += count
        for (kind, size), count in self.parts.items():
            if kind == gpu_type:
                found[size] += count
        return dict(sorted(found.items()))

    def gpus(self, gpu_type: str) -> int:
        """GPUs of that type in total."""
        return sum(size * count for size, count in self.pieces(gpu_type).items())


def tally(nodes: Iterable[Node], taken: Mapping[str, int] | None = None) -> Capacities:
    """What ``nodes`` offer when ``taken`` GPUs of each are out of reach (jobs that stay).

    A node that is down offers nothing.
    """
    gone = taken or {}
    whole: Counter[tuple[str, int]] = Counter()
    parts: Counter[tuple[str, int]] = Counter()
    for node in nodes:
        left = node.capacity.gpus - gone.get(node.name, 0)
        if left == node.total.gpus:
            whole[node.gpu_type, left] += 1
        else:
            for size in pieces(max(left, 0)):
                parts[node.gpu_type, size] += 1
    return Capacities(whole=dict(sorted(whole.items())), parts=dict(sorted(parts.items())))


def is_whole(configuration: Configuration) -> bool:
    """Whether it takes nodes as a whole: several, or one whose GPUs are no power of two."""
    return configuration.nodes != 1 or configuration.gpus & (configuration.gpus - 1) != 0


def configuration_set(
    capacities: Capacities, *, most_gpus: int | None = None
) -> tuple[Configuration, ...]:
    """All configurations of the pool, by type, then GPUs, then nodes (algorithms C.1).

    For N nodes of R GPUs each, a power of two, these are N + log2 R. ``most_gpus`` leaves out what
    no job could use.
    """
    found: set[tuple[str, int, int]] = set()
    for kind in capacities.gpu_types:
        largest = max(capacities.pieces(kind))
        found.update((kind, 1 << bit, 1) for bit in range(largest.bit_length()))
        for size, count in capacities.node_sizes(kind).items():
            most = count if most_gpus is None else min(count, most_gpus // size)
            found.update((kind, nodes * size, nodes) for nodes in range(1, most + 1))
    return tuple(
        Configuration(gpus=gpus, nodes=nodes, gpu_type=kind)
        for kind, gpus, nodes in sorted(found)
        if most_gpus is None or gpus <= most_gpus
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What configurations take, and how much there is.

    ``takes`` has shape ``(R, K)``: what configuration k takes in row r; ``limits`` has shape
    ``(R,)``. ``gpu_types`` names the type of each row.
    """

    gpu_types: tuple[str, ...]
    limits: NDArray[np.float64]
    takes: NDArray[np.float64]


def usage(capacities: Capacities, configurations: Sequence[Configuration]) -> Usage:
    """The rows that decide whether a choice among ``configurations`` can be placed."""
    rows: list[tuple[str, float, list[float]]] = []
    for kind in capacities.gpu_types:
        rows.extend(_level_rows(capacities, kind, configurations))
        rows.extend(_node_rows(capacities, kind, configurations))
    return Usage(
        gpu_types=tuple(kind for kind, _, _ in rows),
        limits=np.array([limit for _, limit, _ in rows], dtype=np.float64),
        takes=np.array([takes for _, _, takes in rows], dtype=np.float64).reshape(
            len(rows), len(configurations)
        ),
    )


def _level_rows(
    capacities: Capacities, kind: str, configurations: Sequence[Configuration]
) -> list[tuple[str, float, list[float]]]:
    """GPUs in requests of at least ``level`` against GPUs in pieces of at least that."""
    there = capacities.pieces(kind)
    rows = []
    level = 1
    for size in there:
        limit = sum(one * count for one, count in there.items() if one >= level)
        takes = [_takes(one, level) if one.gpu_type == kind else 0.0 for one in configurations]
        rows.append((kind, float(limit), takes))
        level = 2 * size  # between two sizes the smallest level is the strictest
    return rows


def _takes(configuration: Configuration, level: int) -> float:
    nodes = configuration.nodes or 1
    if is_whole(configuration):
        per_node = pieces(configuration.gpus // nodes)
        return float(nodes * sum(one for one in per_node if one >= level))
    return float(configuration.gpus if configuration.gpus >= level else 0)


def _node_rows(
    capacities: Capacities, kind: str, configurations: Sequence[Configuration]
) -> list[tuple[str, float, list[float]]]:
    """Whole nodes of each size, where the GPUs alone do not bound them."""
    sizes = capacities.node_sizes(kind)
    only = len(sizes) == 1 and not any(one == kind for one, _ in capacities.parts)
    rows = []
    for size, count in sizes.items():
        if only and pieces(size) == (size,):
            continue
        takes = [
            float(one.nodes or 1)
            if one.gpu_type == kind and is_whole(one) and one.gpus == size * (one.nodes or 1)
            else 0.0
            for one in configurations
        ]
        rows.append((kind, float(count), takes))
    return rows
