"""Gavel with its policy of most throughput in total (OSDI '20; algorithms D.2).

A linear program says which part of the time each job should have on each GPU type so that the sum
of all jobs' steps per second is largest. Rounds then make these shares real.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.model import Snapshot
from slurm_synergy.linear import maximise
from slurm_synergy.policies.time_shares import Demand, SharedTime, Shares

__all__ = ["GAVEL", "Gavel"]

Floats = NDArray[np.float64]

_DIGITS = 5
_MOST_KNOWN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Gavel(SharedTime):
    """The policy. ``quantum_s`` and ``fills`` are those of every policy that shares time.

    ``normalised`` counts each job's speed relative to that on its slowest type, in place of its
    steps per second, by which jobs with short steps come first.
    """

    name: str = "gavel"
    normalised: bool = False

    def shares(self, demand: Demand) -> Shares:
        """The shares of time with the most steps per second in total.

        Jobs that are alike get equal shares: there is no reason to prefer one, and the program is
        smaller with one variable for all of them.
        """
        speeds = self._speeds(demand)
        rows = np.column_stack([demand.gpus, speeds])
        sorts, which, counts = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
        which = which.reshape(-1)
        key = (sorts.tobytes(), counts.tobytes(), demand.capacity.tobytes())
        known = _Known.of_snapshot(demand.snapshot)
        if key not in known:
            known.keep(key, _most_throughput(sorts, counts.astype(float), demand.capacity))
        parts, report = known[key]
        return Shares(parts=parts[which], report=report)

    def _speeds(self, demand: Demand) -> Floats:
        """Steps per second ``(J, T)``, or speeds relative to the slowest type."""
        rates = demand.rates.rates
        positive = np.where(rates > 0, rates, np.inf).min(axis=1, initial=np.inf)
        relative = rates / np.where(np.isfinite(positive), positive, 1.0)[:, None]
        if self.normalised:
            return relative
        # A job whose batch is not known has no steps to count.
        batches = demand.rates.batches[:, None]
        return np.where(np.isfinite(batches), rates / batches, relative)


class _Known(dict[tuple[bytes, ...], tuple[Floats, Mapping[str, object]]]):
    """Answers by question. They depend on nothing else, so they may outlive a round."""

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> _Known:
        """What is known for the nodes of ``snapshot``."""
        found = snapshot.of_nodes.get(cls)
        if not isinstance(found, cls):
            found = snapshot.of_nodes[cls] = cls()
        return found

    def keep(self, key: tuple[bytes, ...], found: tuple[Floats, Mapping[str, object]]) -> None:
        """Remember an answer, and forget the others when there are many."""
        if len(self) >= _MOST_KNOWN:
            self.clear()
        self[key] = found


def _most_throughput(
    sorts: Floats, counts: Floats, capacity: Floats
) -> tuple[Floats, Mapping[str, object]]:
    """Parts of the time ``(S, T)`` of one job of each sort; ``sorts`` are its GPUs, then speeds."""
    gpus, speeds = sorts[:, 0], sorts[:, 1:]
    kinds = len(capacity)
    once = np.kron(np.eye(len(sorts)), np.ones(kinds))
    there = np.kron(gpus, np.eye(kinds))
    answer = maximise(
        speeds.ravel(),
        np.concatenate([once, there]),
        np.concatenate([counts, capacity]),
        most=np.where(speeds > 0, counts[:, None], 0.0).ravel(),
    )
    found = answer.values if answer.values is not None else np.zeros(speeds.size)
    parts = np.round(found.reshape(speeds.shape) / counts[:, None], _DIGITS)
    return np.clip(parts, 0.0, 1.0), {
        "status": answer.status,
        "objective": answer.objective,
        "jobs": int(counts.sum()),
        "sorts": len(sorts),
    }


GAVEL = Gavel()
"""The policy called ``gavel``."""
