"""What the input pipelines of jobs deliver on the proportional shares of nodes. Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.columns import Columns
from slurm_synergy.core.elastic import reshaped
from slurm_synergy.core.model import Configuration, JobStatus, Node, Snapshot
from slurm_synergy.core.pipeline import min_mem_mib, proportional_share, supply_rate
from slurm_synergy.core.resources import Resources

__all__ = ["Supplies"]

Floats = NDArray[np.float64]


class Supplies:
    """Samples/s that shares of nodes deliver to their GPUs, by configuration.

    The shares are proportional ones; with ``lent`` they have all cores of the node but one for each
    GPU of others, which is what these could lend at the most.
    """

    def __init__(self, snapshot: Snapshot, *, lent: bool = False) -> None:
        self._lent = lent
        self._kinds: dict[str, list[Node]] = {}
        for node in {(one.gpu_type, one.total): one for one in snapshot.nodes}.values():
            self._kinds.setdefault(node.gpu_type, []).append(node)
        self._shares: dict[object, list[Resources]] = {}
        self._rows: dict[object, Floats] = {}
        self._configurations: tuple[Configuration, ...] = ()

    def __len__(self) -> int:
        return len(self._rows)

    def turn_to(self, columns: Columns) -> bool:
        """Answer for ``columns`` from now on; whether these are others than before."""
        if columns.all == self._configurations:
            return False
        self._rows.clear()
        self._configurations = columns.all
        return True

    def row(self, status: JobStatus, columns: Columns) -> Floats:
        """What the job's input pipeline delivers in each column ``(K,)``; infinite if unknown.

        The ``columns`` are those that were turned to.
        """
        job, profile = status.job, status.profile
        if (profile.pipeline is None and profile.table is None) or not job.wrapped:
            return np.full(len(columns.all), np.inf)
        asked = job.gpus // (job.nodes or 1)
        sort = (job.min_mem_mib_per_node, min_mem_mib(status), job.tasks_per_node, asked)
        key = (profile.pipeline, profile.table, *sort)
        row = self._rows.get(key)
        if row is None:
            rates = {
                (kind, each): self._rate(status, sort, kind, each)
                for kind, each in set(columns.pairs)
            }
            counts = columns.gpus / columns.each
            row = self._rows[key] = counts * np.array([rates[pair] for pair in columns.pairs])
        return row

    def _rate(self, status: JobStatus, sort: object, kind: str, gpus: int) -> float:
        """On the least of the nodes of that type that have so many GPUs."""
        key = (sort, kind, gpus)
        shares = self._shares.get(key)
        if shares is None:
            shape = Configuration(gpus=gpus, nodes=1, gpu_type=kind)
            there = replace(status, job=reshaped(status.job, shape))
            shares = self._shares[key] = [
                self._share(there, node, gpus)
                for node in self._kinds[kind]
                if node.total.gpus >= gpus
            ]
        profile = status.profile
        return min(
            [supply_rate(profile, gpus, one.cpus, one.mem_mib) for one in shares], default=0.0
        )

    def _share(self, status: JobStatus, node: Node, gpus: int) -> Resources:
        share = proportional_share(status, node, gpus)
        if not self._lent or node.fixed_shares:
            return share
        return replace(share, cpus=max(share.cpus, node.total.cpus - (node.total.gpus - gpus)))
