"""Nodes as columns of a matrix of shares, large ones cut into parts (Pollux as Sia ran it)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.model import JobStatus, Node, Placement

__all__ = ["NodeParts"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class NodeParts:
    """The columns: ``names`` of their nodes, ``capacity`` in GPUs, ``host`` into ``hosts``.

    Nodes of one GPU type stand beside each other; ``kind`` is its number.

    Where all nodes are alike each is one column; otherwise each is cut into parts of ``most`` GPUs,
    so that those are nearly alike. ``taken`` GPUs of each node are out of reach.
    """

    def __init__(self, nodes: Sequence[Node], taken: Mapping[str, int], most: int) -> None:
        unlike = len({(node.gpu_type, node.total.gpus) for node in nodes}) > 1
        names: list[str] = []
        capacity: list[int] = []
        host: list[int] = []
        self.hosts: list[Node] = []
        for node in sorted(nodes, key=lambda one: one.gpu_type):
            left = node.capacity.gpus - taken.get(node.name, 0)
            for gpus in _cut(left, most if unlike else max(left, 1)):
                names.append(node.name)
                capacity.append(gpus)
                host.append(len(self.hosts))
            if left > 0:
                self.hosts.append(node)
        self.names = tuple(names)
        self.capacity = np.array(capacity, dtype=np.int64)
        self.host = np.array(host, dtype=np.int64)
        numbers = {kind: at for at, kind in enumerate(self.kinds)}
        self.kind = np.array([numbers[self.hosts[at].gpu_type] for at in host], dtype=np.int64)

    @property
    def gpus(self) -> int:
        """GPUs in total."""
        return int(self.capacity.sum())

    @property
    def kinds(self) -> list[str]:
        """The GPU types, sorted."""
        return sorted({node.gpu_type for node in self.hosts})

    def allowed(self, jobs: Iterable[JobStatus]) -> Bools:
        """Which columns have GPUs of a type that each job may use."""
        kinds = [self.hosts[at].gpu_type for at in self.host]
        types = [status.job.gpu_types for status in jobs]
        rows = [[not allowed or kind in allowed for kind in kinds] for allowed in types]
        return np.array(rows, dtype=bool).reshape(len(rows), len(kinds))

    def shares(self, placements: Sequence[Placement | None]) -> Ints:
        """Placements as rows; the largest first, each on as few parts of a node as there can be."""
        found = np.zeros((len(placements), len(self.capacity)), dtype=np.int64)
        columns: dict[str, list[int]] = {}
        for column, name in enumerate(self.names):
            columns.setdefault(name, []).append(column)
        pieces = [
            (-share.gpus, row, name)
            for row, one in enumerate(placements)
            for name, share in (one.shares if one is not None else ())
        ]
        free = self.capacity.tolist()
        for gpus, row, name in sorted(pieces):
            left = -gpus
            for column in _fullest_first(columns.get(name, []), free, left):
                given = min(left, free[column])
                found[row, column] += given
                free[column] -= given
                left -= given
        return found

    def by_node(self, row: Ints) -> list[tuple[Node, int]]:
        """The nodes of one row with its GPUs on each."""
        gpus = np.bincount(self.host, weights=row, minlength=len(self.hosts)).astype(int).tolist()
        return [(node, count) for node, count in zip(self.hosts, gpus, strict=True) if count]


def _cut(gpus: int, most: int) -> Iterator[int]:
    while gpus > 0:
        yield min(gpus, most)
        gpus -= most


def _fullest_first(columns: Sequence[int], free: Sequence[int], gpus: int) -> list[int]:
    """The fullest part that takes all of ``gpus`` first; where none does the emptiest first."""
    return sorted(columns, key=lambda at: (free[at] < gpus, abs(free[at] - gpus)))
