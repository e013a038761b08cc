"""The columns of Sia's matrix: configurations of the pool, and odd shapes beside them. Pure.

Of the shapes that users ask for, or jobs hold, each that is no configuration of the pool is a
column too; it counts as the smallest configuration that covers it (algorithms C.8).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.configurations import (
    Capacities,
    Usage,
    configuration_set,
    pieces,
    tally,
    usage,
)
from slurm_synergy.core.model import Configuration, Elasticity, Job, JobStatus, Node
from slurm_synergy.core.snapshot import held

__all__ = ["Columns", "Key", "Offers", "held_key", "scale_limit", "scale_limits", "suits"]

Ints = NDArray[np.int64]

Key = tuple[str, int, int | None]
"""GPU type, GPUs and nodes of a configuration."""

# Until Python 3.12, looking up a member of an enumeration takes longer than comparing it.
_RIGID = Elasticity.RIGID
_MOST_KEPT = 64


def suits(capacities: Capacities, job: Job) -> bool:
    """Whether the pool has a configuration that the job may have, whatever others hold."""
    there = [kind for kind in capacities.gpu_types if not job.gpu_types or kind in job.gpu_types]
    if job.elasticity is not _RIGID:
        return any(capacities.gpus(kind) >= job.least_gpus for kind in there)
    for kind in there:
        cover = _cover(capacities, (kind, job.gpus, job.nodes))
        if cover is not None and _fits_alone(capacities, *cover):
            return True
    return False


def _fits_alone(capacities: Capacities, cover: Configuration, times: int) -> bool:
    made = usage(capacities, (cover,))
    return bool((made.takes[:, 0] * times <= made.limits).all())


def held_key(status: JobStatus) -> Key | None:
    """What the job holds and may keep, as a configuration; None for nothing."""
    now = held(status)
    if now is None:
        return None
    # Nodes with unlike numbers of GPUs are no configuration: the job keeps its GPUs, split anyhow.
    anyhow = _splits(status.job) or len({share.gpus for _, share in now.shares}) > 1
    return now.gpu_type, now.gpus, None if anyhow else len(now.shares)


def _splits(job: Job) -> bool:
    """Whether the job is rigid and may be split over nodes anyhow."""
    return job.nodes is None and job.elasticity is _RIGID


def scale_limit(status: JobStatus) -> int:
    """The most GPUs that the job may have next, of any type, as ``scale_limits``."""
    now, scaling, job = held(status), status.profile.scaling, status.job
    most = min([job.most_gpus, *(job.most_on(one.gpu_type) for one in job.ceilings)])
    known = (job.least_gpus, most, now.gpus if now else 0)
    return int(scale_limits(*known, scaling.explored_gpus if scaling else 0))


def scale_limits(least: Ints | int, most: Ints | int, holds: Ints | int, seen: Ints | int) -> Ints:
    """The most GPUs that jobs may have next: twice what they were measured on (algorithms C.6).

    What a job merely holds does not count: it would be forgotten when the job is stopped to grow.
    """
    return np.asarray(np.minimum(np.maximum(least, np.maximum(holds, 2 * np.asarray(seen))), most))


class Columns:
    """The configurations, by number, and what they take.

    The first ``offered`` are the ``pool`` of configurations in which elastic jobs choose; then come
    the ``odd`` shapes, of rigid jobs or held by others. ``kind``, ``gpus``, ``nodes`` and ``each``
    ``(K,)`` are the number of the GPU type among ``kinds``, the GPUs, and the nodes with the GPUs
    on each of them.
    """

    def __init__(
        self,
        capacities: Capacities,
        kinds: tuple[str, ...],
        pool: tuple[Configuration, ...],
        odd: Iterable[Key],
    ) -> None:
        self.offered = len(pool)
        covers = {key: _cover(capacities, key) for key in sorted(odd, key=_order)}
        fitting = {
            key: cover
            for key, cover in covers.items()
            if cover is not None and _fits_alone(capacities, *cover)
        }
        self.all = pool + tuple(
            Configuration(gpu_type=kind, gpus=gpus, nodes=nodes) for kind, gpus, nodes in fitting
        )
        self.usage = _usage(capacities, pool, list(fitting.values()))
        self.at: dict[Key | None, int] = {_key(one): at for at, one in enumerate(self.all)}
        self.kinds = kinds
        number = {kind: at for at, kind in enumerate(self.kinds)}
        self.kind = np.array([number[one.gpu_type or ""] for one in self.all], dtype=np.int64)
        self.gpus = np.array([one.gpus for one in self.all], dtype=np.int64)
        # A job that may be split is taken to fill the largest pieces.
        sizes = {kind: max(capacities.pieces(kind)) for kind in capacities.gpu_types}
        each = [
            one.gpus // one.nodes if one.nodes else min(one.gpus, sizes[one.gpu_type or ""])
            for one in self.all
        ]
        self.each = np.array(each, dtype=np.int64)
        self.nodes = -(-self.gpus // self.each)
        self.pairs = [(one.gpu_type or "", size) for one, size in zip(self.all, each, strict=True)]


class Offers:
    """The columns for jobs on given nodes: the same object for the same shapes on the same pool."""

    def __init__(self, nodes: Sequence[Node], kinds: tuple[str, ...]) -> None:
        self._nodes, self._kinds = nodes, kinds
        self._pools: dict[object, _Pool] = {}

    def of(
        self,
        jobs: Sequence[JobStatus],
        holds: Sequence[Key | None],
        most_gpus: int | None,
        taken: Mapping[str, int],
    ) -> Columns:
        """The columns for ``jobs``, which hold ``holds``, when ``taken`` GPUs are out of reach.

        ``most_gpus`` is the most that an elastic one of them may have next, None without any.
        """
        key = (most_gpus, tuple(sorted(taken.items())))
        pool = self._pools.get(key)
        if pool is None:
            if len(self._pools) >= _MOST_KEPT:
                self._pools.clear()
            pool = self._pools[key] = _Pool(tally(self._nodes, taken), most_gpus)
        odd = _odd_shapes(pool, jobs, holds)
        found = pool.made.get(odd)
        if found is None:
            if len(pool.made) >= _MOST_KEPT:
                pool.made.clear()
            found = Columns(pool.capacities, self._kinds, pool.configurations, odd)
            pool.made[odd] = found
        return found


class _Pool:
    """What is in reach, the configurations that it offers, and the columns made of them."""

    __slots__ = ("capacities", "configurations", "keys", "made")

    def __init__(self, capacities: Capacities, most_gpus: int | None) -> None:
        self.capacities = capacities
        self.configurations: tuple[Configuration, ...] = ()
        if most_gpus is not None:
            # The smallest that the pool offers may be larger than the smallest that a job allows.
            largest = max((size for _, size in capacities.whole), default=1)
            most = max(most_gpus, largest)
            self.configurations = configuration_set(capacities, most_gpus=most)
        self.keys = {_key(one) for one in self.configurations}
        self.made: dict[frozenset[Key], Columns] = {}


def _key(configuration: Configuration) -> Key:
    return configuration.gpu_type or "", configuration.gpus, configuration.nodes


def _order(key: Key) -> tuple[str, int, int]:
    return key[0], key[1], key[2] or 0


def _odd_shapes(
    pool: _Pool, jobs: Sequence[JobStatus], holds: Sequence[Key | None]
) -> frozenset[Key]:
    """Shapes that rigid jobs ask for, or that elastic ones hold, beside those of the pool."""
    found: set[Key] = set()
    there = pool.capacities.gpu_types
    for status, now in zip(jobs, holds, strict=True):
        job = status.job
        if job.elasticity is _RIGID:
            found.update((kind, job.gpus, job.nodes) for kind in job.gpu_types or there)
        elif now is not None:
            found.add(now)
    return frozenset(key for key in found - pool.keys if key[0] in there)


def _cover(capacities: Capacities, key: Key) -> tuple[Configuration, int] | None:
    """A configuration of the pool, and how many of it, that certainly have room for a shape."""
    kind, gpus, nodes = key
    sizes, largest = capacities.node_sizes(kind), max(capacities.pieces(kind))
    if nodes is None:
        return Configuration(gpu_type=kind, gpus=1, nodes=1), gpus
    each = gpus // nodes
    power = 1 << (each - 1).bit_length()
    if each not in sizes or pieces(each) == (each,):
        if power <= largest:
            return Configuration(gpu_type=kind, gpus=power, nodes=1), nodes
        enough = [size for size in sizes if size >= each]
        if not enough:
            return None
        each = min(enough)
    return Configuration(gpu_type=kind, gpus=each, nodes=1), nodes


def _usage(
    capacities: Capacities,
    pool: tuple[Configuration, ...],
    covers: Sequence[tuple[Configuration, int]],
) -> Usage:
    made = usage(capacities, (*pool, *(one for one, _ in covers)))
    times = np.array([1.0] * len(pool) + [float(count) for _, count in covers])
    return replace(made, takes=made.takes * times[None, :])
