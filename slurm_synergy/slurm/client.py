"""The protocol of a Slurm client: everything that slurm-synergy ever asks of Slurm.

Reads return facts or raise a ``ClusterError``; an answer that Slurm could not give is never an
empty tuple. Changes are idempotent: repeating one that took effect does nothing and succeeds.
A refused change raises ``SlurmCommandError`` whose ``kind`` says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from slurm_synergy.errors import ClusterError
from slurm_synergy.slurm.accounting import AccountingFacts
from slurm_synergy.slurm.facts import (
    ConfigFacts,
    JobFacts,
    JobShape,
    NodeFacts,
    PartitionFacts,
    PingFacts,
    ReservationFacts,
)

__all__ = ["SlurmClient"]


class SlurmClient(Protocol):
    """Read and change a Slurm cluster. All methods raise ``ClusterError`` on failure."""

    def read_queue(self, partition: str | None = None) -> tuple[JobFacts, ...]:
        """All jobs that Slurm remembers, recently finished ones too, in order of their id.

        With ``partition`` only jobs that asked for it (also as one of several).
        """

    def read_job(self, job_id: int) -> JobFacts:
        """One job; ``kind == "not_found"`` when Slurm does not remember it (any more)."""

    def read_nodes(self) -> tuple[NodeFacts, ...]:
        """All nodes, in order of their names as Slurm prints them."""

    def read_partition(self, name: str) -> PartitionFacts:
        """One partition; ``kind == "not_found"`` when there is none of that name."""

    def read_accounting(self, accounts: Iterable[str]) -> AccountingFacts:
        """The limits of these accounts and of every QOS, and what is in use of them.

        Nothing where Slurm keeps no accounts.
        """

    def read_reservations(self) -> tuple[ReservationFacts, ...]:
        """All reservations; an empty tuple only when Slurm said that there are none."""

    def read_config(self) -> ConfigFacts:
        """The running controller's configuration."""

    def ping(self) -> PingFacts:
        """Which controllers answer. Does not raise for a controller that is down."""

    def hold(self, job_id: int) -> None:
        """Hold a pending job as admin: its owner cannot release it. A held job stays held."""

    def hold_running(self, job_id: int) -> None:
        """Hold a running job: it runs on, and whatever requeues it lands it held."""

    def hold_all(self, job_ids: Iterable[int]) -> Mapping[int, ClusterError]:
        """Hold pending jobs as admin, in one go; those that were refused, with the reason."""

    def release(self, job_id: int) -> None:
        """Let a held job start. ``kind == "not_pending"`` while it is still completing.

        Slurm would accept that release and forget the hold, so it is refused here.
        """

    def reshape(self, job_id: int, shape: JobShape) -> JobFacts:
        """Make a pending job ask for exactly ``shape``; returns the job as read back.

        Raises ``SlurmReadBackError`` naming the fields that differ afterwards.
        """

    def prepare_starts(
        self, shapes: Mapping[int, JobShape]
    ) -> Mapping[int, JobFacts | ClusterError]:
        """``reshape`` and ``set_start_now`` for several jobs, in one go; they stay held.

        For each job what was read back, or why it does not have its shape. Raises ClusterError
        when nothing was changed.
        """

    def set_start_now(self, job_id: int) -> None:
        """Drop the delay after a requeue. ``kind == "not_pending"`` while still completing."""

    def set_time_limit(self, job_id: int, limit_s: float) -> None:
        """Set the time limit of a job's next (or present) run, rounded up to whole minutes."""

    def split(self, job_id: int, tasks: Sequence[int]) -> None:
        """Give these members of a held array records and ids of their own, held as admin.

        ``job_id`` is the array's. A member that has a record already is only held.
        """

    def requeue_hold(self, job_id: int) -> None:
        """End a running job and put it back into the queue, held. Pending jobs get held only."""

    def cancel(self, job_id: int) -> None:
        """Cancel a job. A finished or forgotten job is no error."""

    def set_comment(self, job_id: int, comment: str) -> None:
        """Replace the job's comment. Line breaks are refused."""

    def set_admin_comment(self, job_id: int, comment: str) -> None:
        """Replace the job's admin comment, which its owner cannot change."""

    def give_back(self, job_id: int, fields: Sequence[str]) -> None:
        """Update a job with ``fields`` (see ``slurm.original``) and take our hold off it.

        For pending and running jobs; the latter are no longer held by their next requeue.
        """

    def create_reservation(
        self,
        name: str,
        nodes: Sequence[str],
        users: Sequence[str],
        window_s: float | None = None,
    ) -> None:
        """Reserve whole nodes from now on for ``window_s`` seconds (None: without end).

        Jobs in it run on when it ends. An equal one that exists is success. ``kind == "overlap"``
        when a node is in somebody else's.
        """

    def renew_reservation(self, name: str, window_s: float | None = None) -> None:
        """Have it end ``window_s`` seconds from now (None: a year), whole minutes."""

    def update_reservation_nodes(self, name: str, nodes: Sequence[str]) -> None:
        """Give the reservation exactly these nodes (at least one)."""

    def update_reservation_users(self, name: str, users: Sequence[str]) -> None:
        """Give the reservation exactly these users: only their jobs may start in it."""

    def delete_reservation(self, name: str) -> None:
        """Delete it; one that does not exist is no error. ``kind == "in_use"`` while jobs use it.

        Jobs that merely wait with this reservation count as users.
        """
