"""Leases and what else of jobs is kept over a restart, as values and as rows of the ledger."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurm_synergy.cluster import Action
from slurm_synergy.controller.codec import encode
from slurm_synergy.core.model import Lease, Reason

__all__ = ["JobProgress", "OpenIntent", "StoredLease", "lease_row"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLease:
    """A lease with what its keeper must not forget over a restart.

    ``wrapped`` tells whether the job runs under our wrapper, so that we choose its cores.
    ``stop_deadline_s`` (epoch) and ``stopping`` are set while a stop is in progress. ``finished``
    are the reports of tasks that ended, as JSON objects.
    """

    lease: Lease
    owner_uid: int
    incarnation: int
    wrapped: bool = True
    stopping: Reason | None = None
    stop_deadline_s: float | None = None
    finished: tuple[Mapping[str, object], ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """How far a job is: samples and steps since it began, and its speed now."""

    job_id: int
    done_samples: float
    samples_per_s: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenIntent:
    """An action that was about to be done when the controller died."""

    round_number: int
    action: Action


def lease_row(item: StoredLease, now_s: float) -> tuple[object, ...]:
    """The columns of a lease, in the order in which the ledger writes them."""
    lease, stopping = item.lease, item.stopping
    return (
        lease.job_id,
        lease.generation,
        json.dumps(encode(lease)),
        item.owner_uid,
        item.incarnation,
        item.wrapped,
        now_s,
        json.dumps(encode(stopping)) if stopping else None,
        item.stop_deadline_s,
        json.dumps([dict(report) for report in item.finished]),
    )
