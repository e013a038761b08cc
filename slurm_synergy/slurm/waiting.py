"""Waiting jobs that need something done although nothing is planned for them.

Members of arrays are split off, and jobs past their deadline are handed to Slurm. A failure
concerns one job: it is logged, and tried again at the next reading.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

from slurm_synergy.errors import ClusterError
from slurm_synergy.slurm.arrays import ArrayPlan
from slurm_synergy.slurm.client import SlurmClient
from slurm_synergy.slurm.facts import JobFacts
from slurm_synergy.slurm.request import is_overdue

__all__ = ["tend_waiting"]

_LOG = logging.getLogger(__name__)


def tend_waiting(
    client: SlurmClient, jobs: Mapping[int, JobFacts], arrays: ArrayPlan, now_s: float
) -> None:
    """One step for all jobs of a reading taken at ``now_s`` (epoch seconds)."""
    for array_id, tasks in sorted(arrays.split.items()):
        _try(f"array {array_id}", partial(client.split, array_id, tasks))
    for job_id, facts in sorted(jobs.items()):
        if is_overdue(facts, now_s) and not facts.array_pending:
            # Slurm looks at deadlines when it tries to start a job, so not while it is held.
            _LOG.info("job %d: its deadline has passed; released for Slurm to end it", job_id)
            _try(f"job {job_id}", partial(client.release, job_id))


def _try(what: str, change: Callable[[], None]) -> None:
    try:
        change()
    except ClusterError as err:
        _LOG.warning("%s: %s; tried again at the next reading", what, err)
