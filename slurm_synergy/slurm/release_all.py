"""Give everything back to Slurm: every managed job becomes an ordinary one, the reservation goes.

Waiting jobs get their owners' requests back and are released, running ones run on, without the
hold that would catch them at a requeue. Everything is idempotent, so an interrupted release is
simply repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from slurm_synergy.core.wording import counted
from slurm_synergy.errors import ClusterError, ModelError, SlurmCommandError
from slurm_synergy.slurm.client import SlurmClient
from slurm_synergy.slurm.facts import Hold, JobFacts
from slurm_synergy.slurm.original import (
    WHOLE_MEMORY,
    default_memory,
    fields_to_give_back,
    is_reshaped,
)
from slurm_synergy.slurm.request import Request, is_held, read_mark
from slurm_synergy.slurm.runtime import RunTime

__all__ = [
    "GivenBack",
    "GivenJob",
    "Remembers",
    "original_request",
    "plan_release",
    "release_all",
    "to_give_back",
]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenJob:
    """One job: ``fields`` of the update before its hold is taken off, and what came of it.

    ``waits`` is False for a job that runs. ``request_known`` tells whether its owner's request is
    known; if not, only our node list and reservation are taken back. ``start_now``: Slurm's delay
    after a requeue (two minutes) is dropped. Neither ``given`` nor ``error``: not tried yet, or the
    job has ended meanwhile.
    """

    job_id: int
    user: str
    waits: bool
    fields: tuple[str, ...]
    request_known: bool
    start_now: bool = False
    given: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenBack:
    """What was done: jobs by id, whether a reservation was deleted, and what is left to do."""

    released: tuple[int, ...] = ()
    running: tuple[int, ...] = ()
    reservation: str = ""
    failed: tuple[tuple[int, str], ...] = ()

    @property
    def in_words(self) -> str:
        """One sentence for people."""
        released = counted(len(self.released), "waiting job")
        words = f"{released} released, {counted(len(self.running), 'running job')} kept"
        if self.reservation:
            words += f", reservation {self.reservation} deleted"
        if self.failed:
            words += f", not given back: {len(self.failed)}"
        return words


class Remembers(Protocol):
    """The part of a ``RequestMemory`` that is needed here."""

    def request(self, job_id: int) -> Mapping[str, object] | None:
        """What was remembered for the job, or None."""
        ...


def original_request(facts: JobFacts, memory: Remembers) -> Request | None:
    """What the owner asked for, by the job's mark or else as first seen; None when not known.

    Its time limit is that over all runs, which restarts have cut down in the record.
    """
    try:
        remembered = memory.request(facts.job_id) or {}
        request = read_mark(facts.admin_comment)
        if request is None:
            shape = remembered.get("shape")
            if not isinstance(shape, dict):
                return None
            request = Request.from_json(shape)
    except ModelError:
        return None
    whole_s = RunTime.from_memory(remembered).whole_s(facts.time_limit_s)
    return replace(request, time_limit_s=whole_s)


def to_give_back(
    jobs: Iterable[JobFacts], reservation: str, begun: Collection[int] = ()
) -> tuple[JobFacts, ...]:
    """Those of a partition's jobs that are held, or in ``reservation``, for us.

    ``begun`` are jobs with a lease: one that waits and names nodes was released by us for a start
    that has not come, and without a reservation nothing else tells. Those
    that end are not among them: what is sent to a job that is being requeued gets lost.
    """
    return tuple(
        facts
        for facts in jobs
        if not facts.state.finished
        and not facts.completing
        and (_ours(facts, reservation) or _is_starting(facts, begun))
    )


def _is_starting(facts: JobFacts, begun: Collection[int]) -> bool:
    return facts.job_id in begun and facts.pending and bool(facts.req_nodes)


def _ours(facts: JobFacts, reservation: str) -> bool:
    if reservation and facts.reservation == reservation:
        return True
    # A hold of its owner's own is not ours: job_submit.lua marks what it holds.
    marked = "synergy:v=" in facts.admin_comment
    return facts.held is Hold.ADMIN or (is_held(facts) and marked)


def release_all(
    client: SlurmClient,
    partition: str,
    reservation: str,
    request_of: Callable[[JobFacts], Request | None],
    tell: Callable[[GivenJob], None] = lambda one: None,
    begun: Collection[int] = (),
) -> GivenBack:
    """Give back every job of ``partition`` and delete ``reservation`` (empty: there is none).

    ``begun`` are the jobs with a lease. ``tell`` is called with each job when it is done. A job
    that Slurm refuses to change is named in the result. Raises ClusterError when Slurm cannot be
    read or does not answer.
    """
    done: list[GivenJob] = []
    for one in plan_release(client, partition, reservation, request_of, begun):
        done.append(_give_back(client, one))
        tell(done[-1])
    return GivenBack(
        released=tuple(one.job_id for one in done if one.waits and one.given),
        running=tuple(one.job_id for one in done if not one.waits and one.given),
        reservation=_delete(client, reservation),
        failed=tuple((one.job_id, one.error) for one in done if one.error),
    )


def plan_release(
    client: SlurmClient,
    partition: str,
    reservation: str,
    request_of: Callable[[JobFacts], Request | None],
    begun: Collection[int] = (),
) -> tuple[GivenJob, ...]:
    """The jobs to give back, with what is to be sent for each; nothing is changed."""
    found = [
        facts
        for facts in to_give_back(client.read_queue(partition), reservation, begun)
        if facts.partition == partition
    ]
    memory = WHOLE_MEMORY
    if any(is_reshaped(facts, reservation) for facts in found):
        memory = default_memory(client.read_partition(partition), client.read_config())
    return tuple(
        GivenJob(
            job_id=facts.job_id,
            user=facts.user,
            waits=facts.pending,
            fields=tuple(fields_to_give_back(facts, request_of(facts), reservation, memory)),
            request_known=request_of(facts) is not None,
            start_now=facts.pending and facts.restarts > 0,
        )
        for facts in found
    )


def _give_back(client: SlurmClient, one: GivenJob) -> GivenJob:
    try:
        if one.start_now:
            # While it is still held: this waits out the moment in which Slurm would lose the job.
            client.set_start_now(one.job_id)
        client.give_back(one.job_id, one.fields)
    except SlurmCommandError as err:
        if err.kind == "controller_down":
            raise
        if err.kind in ("not_found", "finished"):
            return one
        _LOG.warning("job %d is not given back: %s", one.job_id, err.in_short)
        return replace(one, error=err.in_short)
    return replace(one, given=True)


def _delete(client: SlurmClient, reservation: str) -> str:
    """The name when it was there and is deleted."""
    if not reservation or all(one.name != reservation for one in client.read_reservations()):
        return ""
    try:
        client.delete_reservation(reservation)
    except SlurmCommandError as err:
        raise ClusterError(
            f"reservation {reservation!r} cannot be deleted: {err.in_short}; jobs that use it are "
            "shown by: squeue -a -O JobID,Reservation"
        ) from err
    return reservation
