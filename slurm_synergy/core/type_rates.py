"""How fast jobs run as their users asked for them, by GPU type. Pure.

For policies that choose nothing but who runs when, and on which type: GPUs and batch size of every
job are taken as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.elastic import gpus_per_replica, model_on, reshaped
from slurm_synergy.core.model import (
    Configuration,
    Elasticity,
    Job,
    JobStatus,
    Node,
    Profile,
    Snapshot,
)
from slurm_synergy.core.pipeline import job_rate, proportional_share, supply_rate

__all__ = ["TypeRates", "type_rates"]

Floats = NDArray[np.float64]

_FORGOTTEN_AT_LEAST = 1000
# Until Python 3.12, looking up a member of an enumeration takes longer than comparing it.
_RIGID = Elasticity.RIGID


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRates:
    """J jobs on T GPU types.

    ``rates`` ``(J, T)`` are samples/s of each whole job, 0 where it cannot run even if the type's
    nodes are all up and empty. ``batches`` ``(J,)`` are its samples per step, NaN where not known.
    """

    gpu_types: tuple[str, ...]
    rates: Floats
    batches: Floats


def type_rates(snapshot: Snapshot, jobs: Sequence[JobStatus]) -> TypeRates:
    """The rates of ``jobs`` with their GPU-proportional shares.

    A speed that is not known is taken to be the least that is known of the job, or one sample per
    second.
    """
    known = _Known.of_snapshot(snapshot)
    rows = [known.row(status) for status in jobs]
    shape = (len(jobs), len(known.kinds))
    return TypeRates(
        gpu_types=known.kinds,
        rates=np.array([rates for rates, _ in rows], dtype=float).reshape(shape),
        batches=np.array([batch for _, batch in rows], dtype=float),
    )


class _Known:
    """What outlives a round: the rates of jobs by id, with what they were made from."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._nodes: dict[str, list[Node]] = {}
        for node in snapshot.nodes:
            self._nodes.setdefault(node.gpu_type, []).append(node)
        self.kinds = tuple(sorted(self._nodes))
        self._rows: dict[int, tuple[Job, Profile, tuple[Floats, float]]] = {}

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> _Known:
        """What there is for the nodes of ``snapshot``."""
        found = snapshot.of_nodes.get(cls)
        if not isinstance(found, cls):
            found = snapshot.of_nodes[cls] = cls(snapshot)
        if len(found._rows) > 2 * len(snapshot.jobs) + _FORGOTTEN_AT_LEAST:
            found._rows.clear()
        return found

    def row(self, status: JobStatus) -> tuple[Floats, float]:
        """The job's rates by type, and its batch."""
        kept = self._rows.get(status.job.job_id)
        if kept is None or kept[0] is not status.job or kept[1] is not status.profile:
            kept = (status.job, status.profile, self._row(status))
            self._rows[status.job.job_id] = kept
        return kept[2]

    def _row(self, status: JobStatus) -> tuple[Floats, float]:
        job = status.job
        batch = _own_batch(status)
        rates = np.full(len(self.kinds), np.nan)
        for at, kind in enumerate(self.kinds):
            largest = max(self._nodes[kind], key=lambda node: node.total.gpus)
            if not self._has_room(job, kind):
                rates[at] = 0.0
                continue
            whole, rest = divmod(job.gpus, largest.total.gpus)
            nodes = job.nodes or whole + bool(rest)
            rates[at] = _rate(status, largest, nodes, batch)
        known = rates[np.isfinite(rates) & (rates > 0)]
        rates[np.isnan(rates)] = known.min() if len(known) else 1.0
        return rates, np.nan if batch is None else float(batch)

    def _has_room(self, job: Job, kind: str) -> bool:
        if job.gpu_types and kind not in job.gpu_types:
            return False
        sizes = [node.total.gpus for node in self._nodes[kind]]
        if job.nodes is None:
            return sum(sizes) >= job.gpus
        each = job.gpus // job.nodes
        return sum(size // each for size in sizes) >= job.nodes


def _own_batch(status: JobStatus) -> int | None:
    """Samples of one step with the batch that the job was submitted with."""
    scaling = status.profile.scaling
    if status.job.batch is not None:
        return status.job.batch[0]
    return scaling.own_batch or None if scaling is not None else None


def _rate(status: JobStatus, node: Node, nodes: int, batch: int | None) -> float:
    """Samples/s on ``nodes`` nodes like that one, NaN where not known."""
    job, profile, kind = status.job, status.profile, node.gpu_type
    each = min(-(-job.gpus // nodes), node.total.gpus)
    as_rigid = replace(
        status,
        job=job
        if job.elasticity is _RIGID
        else reshaped(job, Configuration(gpus=job.gpus, nodes=job.nodes, gpu_type=kind)),
    )
    share = proportional_share(as_rigid, node, each)
    modelled = _modelled(status, kind, nodes, batch)
    if modelled is None:
        rate = job_rate(profile, kind, (share,))
        if rate is not None:
            # Where a share delivers nothing the speed is as good as not known.
            return rate / each * job.gpus or np.nan
        plain = profile.gpu_rate_per_gpu.get(kind)
        return np.nan if plain is None else plain * job.gpus
    if profile.pipeline is None and profile.table is None:
        return modelled
    fed = supply_rate(profile, each, share.cpus, share.mem_mib) / each * job.gpus
    return min(modelled, fed) or np.nan


def _modelled(status: JobStatus, kind: str, nodes: int, batch: int | None) -> float | None:
    """As the throughput model says; None where there is none."""
    scaling = status.profile.scaling
    if scaling is None or batch is None:
        return None
    model = model_on(scaling, kind)
    if model is None:
        return None
    replicas = status.job.gpus // gpus_per_replica(status.job, scaling, kind)
    if replicas < 1:
        return 0.0
    passes = -(-batch // (replicas * scaling.speeds[kind].local_most))
    local = max(round(batch / (replicas * passes)), 1)
    return float(model.rate(nodes, replicas, local, passes - 1))
