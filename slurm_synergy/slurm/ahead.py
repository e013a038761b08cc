"""What a round is about to do, done together: one ``scontrol`` session for all of it.

A round applies its actions one after the other. Holding and reshaping are the part of them that
costs processes, and both are harmless before their turn comes: a job that is held and reshaped
still waits. So they are sent together beforehand, and each action then finds it done; what could
not be done beforehand, the action does itself, or fails by.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from slurm_synergy.errors import ClusterError
from slurm_synergy.slurm.client import SlurmClient
from slurm_synergy.slurm.facts import JobFacts, JobShape

__all__ = ["Ahead"]

_LOG = logging.getLogger(__name__)

# For a single job it saves nothing.
_LEAST = 2


class Ahead:
    """Holds and reshapes that were sent before their actions. Used by one thread."""

    def __init__(self, client: SlurmClient) -> None:
        self._client = client
        self._held: set[int] = set()
        self._made: dict[int, tuple[JobShape, JobFacts | ClusterError]] = {}

    def send(self, holds: Collection[int], shapes: Mapping[int, JobShape]) -> None:
        """Hold ``holds``, then give the jobs of ``shapes`` theirs. Never raises ClusterError."""
        self._held, self._made = set(), {}
        try:
            if len(holds) >= _LEAST:
                self._held = set(holds) - self._client.hold_all(holds).keys()
            wanted = {
                job_id: shape
                for job_id, shape in shapes.items()
                if job_id not in holds or job_id in self._held
            }
            if len(wanted) >= _LEAST:
                results = self._client.prepare_starts(wanted)
                self._made = {job_id: (wanted[job_id], found) for job_id, found in results.items()}
        except ClusterError as err:
            _LOG.debug("not done ahead of the actions: %s", err)

    def held(self, job_id: int) -> bool:
        """Whether the job was held just now."""
        return job_id in self._held

    def prepared(self, job_id: int, shape: JobShape) -> bool:
        """Whether the job has exactly that shape by now; asked for once.

        Raises the ClusterError with which Slurm refused to give it that.
        """
        made = self._made.pop(job_id, None)
        if made is None or made[0] != shape:
            return False
        if isinstance(made[1], ClusterError):
            raise made[1]
        return True
