"""Starts: what Slurm is asked for, in which order, and why a job must not start now."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slurm_synergy.cluster import Action, Clock, Hold, Outcome, Start
from slurm_synergy.core.elastic import as_shaped
from slurm_synergy.core.model import (
    Enforcement,
    Job,
    JobStatus,
    Node,
    Placement,
    Reason,
    ReasonCode,
)
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import ClusterError, LeaseError
from slurm_synergy.slurm import facts as slurm_facts
from slurm_synergy.slurm.ahead import Ahead
from slurm_synergy.slurm.client import SlurmClient
from slurm_synergy.slurm.facts import JobFacts, JobShape, ReservationFacts
from slurm_synergy.slurm.follow import Follower, LeaseKeeper
from slurm_synergy.slurm.maintenance import ahead_of, why_not_before
from slurm_synergy.slurm.observing import Observer, Reading
from slurm_synergy.slurm.pool import UNTYPED
from slurm_synergy.slurm.request import is_held
from slurm_synergy.slurm.reservation import ReservationKeeper
from slurm_synergy.slurm.views import JobViews

__all__ = ["Scene", "Starter"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What starts follow from besides the plan.

    The last reading, the shapes of nodes by name, and what others have reserved.
    """

    reading: Reading
    nodes: Mapping[str, Node]
    others: Sequence[ReservationFacts]


class Starter:
    """Begins starts; the follower sees to the rest. Used by one thread.

    ``reservation`` keeps the nodes for us; None: there is none to be.
    """

    def __init__(
        self,
        client: SlurmClient,
        leases: LeaseKeeper,
        follower: Follower,
        observer: Observer,
        views: JobViews,
        clock: Clock,
        *,
        enforcement: Enforcement,
        reservation: ReservationKeeper | None,
    ) -> None:
        self._client, self._leases, self._clock = client, leases, clock
        self._follower, self._observer, self._views = follower, observer, views
        self._enforcement, self._reservation = enforcement, reservation
        self._ahead = Ahead(client)

    def is_held(self, job_id: int, facts: JobFacts) -> bool:
        """Whether only we can start the job, as read or as done since."""
        return facts.held is slurm_facts.Hold.ADMIN or self._ahead.held(job_id)

    def foresee(
        self, actions: Sequence[Action], statuses: Mapping[int, JobStatus], scene: Scene
    ) -> None:
        """See ``Foresight``: holds and shapes of pending jobs go to Slurm in one session."""
        jobs = scene.reading.jobs
        pending = {
            action.job_id: action
            for action in actions
            if isinstance(action, Hold | Start)
            and action.job_id in jobs
            and jobs[action.job_id].pending
        }
        shapes = {
            job_id: self._shape(statuses[job_id].job, action.placement, scene)
            for job_id, action in pending.items()
            if isinstance(action, Start)
        }
        try:
            if self._reservation is not None and shapes:
                self._reservation.admit({jobs[job_id].user for job_id in shapes})
        except ClusterError as err:
            _LOG.debug("the reservation is not ready ahead of the starts: %s", err)
            shapes = {}
        holds = [
            job_id
            for job_id, action in pending.items()
            if not is_held(jobs[job_id])
            or (isinstance(action, Hold) and jobs[job_id].held is not slurm_facts.Hold.ADMIN)
        ]
        self._ahead.send(holds, shapes)

    def start(self, action: Start, status: JobStatus, facts: JobFacts, scene: Scene) -> Outcome:
        """Have Slurm start a pending job as placed; a refusal is an Outcome."""
        if not facts.pending:
            reason = Reason(code=ReasonCode.START_REFUSED, text=f"it is {facts.state.value}")
            return Outcome(action=action, done=False, reason=reason)
        now_s, placement = self._clock.now_s(), action.placement
        late = self._too_late_for(status, placement, scene.others, now_s)
        if late is not None:
            return Outcome(action=action, done=False, reason=late)
        shape = self._shape(status.job, placement, scene)
        granted = {
            name: Resources(
                gpus=shape.gpus_per_node, cpus=shape.cpus_per_node, mem_mib=shape.mem_mib_per_node
            )
            for name in shape.nodes
        }
        try:
            if self._reservation is not None:
                self._reservation.admit((facts.user,))
            if not is_held(facts) and not self._ahead.held(action.job_id):
                self._client.hold(action.job_id)
            prepared = self._ahead.prepared(action.job_id, shape)
            if not prepared:
                self._client.reshape(action.job_id, shape)
            self._limit_run(status, facts)
            self._views.starts_on(status.job, placement.gpus, status.attained_service_gpu_s)
            if not prepared:
                self._client.set_start_now(action.job_id)
            self._leases.grant(
                status=status,
                owner_uid=facts.uid,
                incarnation=facts.restarts,
                placement=placement,
                granted=granted,
            )
            self._follower.started(facts, now_s)
            self._client.release(action.job_id)
        except (ClusterError, LeaseError) as err:
            # Whatever of it took effect, the next reading shows it.
            if self._reservation is not None:
                self._reservation.forget()
            reason = self._follower.refused(action.job_id, str(err), now_s)
            return Outcome(action=action, done=False, reason=reason)
        return Outcome(action=action, done=True)

    def _too_late_for(
        self,
        status: JobStatus,
        placement: Placement,
        others: Sequence[ReservationFacts],
        now_s: float,
    ) -> Reason | None:
        """Why the job must not start there now: a reservation of others begins too soon.

        Waiting jobs are planned so that this does not occur, but not those that were stopped to
        be moved.
        """
        ahead = ahead_of(others, now_s)
        ends_s = self._observer.ends_s(status.job, status.attained_service_gpu_s, now_s)
        found = (ahead[name] for name in placement.nodes if name in ahead)
        return next((why_not_before(one, now_s) for one in found if ends_s > one.start_s), None)

    def _limit_run(self, status: JobStatus, facts: JobFacts) -> None:
        """The time limit is for all runs of a job together, where Slurm's is for each of them."""
        if facts.restarts:
            ran_s = self._views.ran_s(status.job, status.attained_service_gpu_s)
            limit_s = self._views.limit_next_run(facts, ran_s)
            if limit_s is not None:
                self._client.set_time_limit(facts.job_id, limit_s)

    def _shape(self, job: Job, placement: Placement, scene: Scene) -> JobShape:
        """What Slurm is asked for. The same for every node, as Slurm cannot ask otherwise."""
        job = as_shaped(job, placement)
        shares = [share for _, share in placement.shares]
        cpus = min(share.cpus for share in shares)
        if self._enforcement is Enforcement.SHARED and job.wrapped:
            # All cores of the nodes: the lease says which of them are the job's.
            cpus = min(scene.reading.nodes[name].cpus_total for name in placement.nodes)
        elif self._enforcement is Enforcement.BORROW and job.wrapped:
            # No more than its proportional share, so that every job gets its own from Slurm.
            own = (scene.nodes[name].proportional(share.gpus) for name, share in placement.shares)
            cpus = max(1, min(cpus, *(share.cpus for share in own)))
        per_task = max(1, cpus // job.tasks_per_node)
        return JobShape(
            nodes=placement.nodes,
            gpus_per_node=shares[0].gpus,
            gpu_type=None if placement.gpu_type == UNTYPED else placement.gpu_type,
            cpus_per_node=per_task * job.tasks_per_node,
            cpus_per_task=per_task,
            mem_mib_per_node=max(share.mem_mib for share in shares),
            tasks_per_node=job.tasks_per_node,
            reservation=self._reservation.name if self._reservation else None,
        )
