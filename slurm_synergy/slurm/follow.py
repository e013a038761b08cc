"""Follow what was begun: starts until the job runs, stops until it is back in the queue.

Starting and stopping take Slurm seconds, a round must not wait for them. So a round only begins
them, and each later reading of the queue is followed here, one step per job and reading. All state
that matters is in Slurm and in the leases; what is kept here can be lost with the controller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from slurm_synergy.cluster import LeasePort, Record, StopState
from slurm_synergy.core.model import JobStatus, Lease, Placement, Reason
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import (
    ClusterError,
    LeaseError,
    LedgerUnavailable,
    ModelError,
    SlurmCommandError,
)
from slurm_synergy.slurm.ceilings import Ceilings
from slurm_synergy.slurm.client import SlurmClient
from slurm_synergy.slurm.facts import Hold, JobFacts, JobState
from slurm_synergy.slurm.limits import obstacle_of
from slurm_synergy.slurm.pool import allocated
from slurm_synergy.slurm.refusals import Refusals
from slurm_synergy.slurm.request import is_held, is_passed_through

__all__ = ["Attempt", "Described", "Follower", "LeaseKeeper", "ends", "holds_now"]

_LOG = logging.getLogger(__name__)

_CLOCKS_DIFFER_S = 5.0
_LAUNCH_FAILED = "launch_failed_requeued_held"


class LeaseKeeper(LeasePort, Protocol):
    """The keeper of leases as a live cluster uses it."""

    def incarnation(self, job_id: int) -> int | None:
        """The restart count that the job's lease was made for; None without a lease."""
        ...

    def set_reserved(self, node: str, cores: tuple[int, ...]) -> None:
        """Cores that no lease may hand out: Slurm confines a job without the wrapper to them."""
        ...

    def set_gpus(self, job_id: int, gpus: Mapping[str, tuple[int, ...]]) -> None:
        """Which GPUs of each node a started job got: its cores are to be near them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A job that holds resources, with what an adoption needs."""

    status: JobStatus
    proportional: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A start in progress: since when, and of which incarnation."""

    since_s: float
    restarts: int


def holds_now(facts: JobFacts) -> bool:
    """Whether processes of the job may be using its nodes."""
    return not facts.pending and (facts.completing or not facts.state.finished)


def ends(facts: JobFacts | None) -> bool:
    """Whether the job is over for good, its last process included."""
    return facts is None or (facts.state.finished and not facts.completing)


class Follower:
    """One step for each job at each reading. Not thread-safe.

    ``describe`` gives the scheduler's view of a job that holds resources, ``elastic`` tells whether
    a job may be offered other GPUs; ``forget`` drops the records of a job that Slurm does not know
    any more.
    """

    def __init__(
        self,
        client: SlurmClient,
        leases: LeaseKeeper,
        *,
        start_deadline_s: float,
        retry_backoff_s: float,
        describe: Callable[[JobFacts], Described],
        elastic: Callable[[JobFacts], bool] = lambda facts: False,
        forget: Callable[[int], None],
    ) -> None:
        self._client, self._leases = client, leases
        self._describe, self._elastic, self._forget = describe, elastic, forget
        self._start_deadline_s = start_deadline_s
        self._attempts: dict[int, Attempt] = {}
        self._hindered: dict[int, str] = {}
        self.refusals = Refusals(retry_backoff_s)
        """Jobs whose last start failed."""
        self.ceilings = Ceilings(retry_backoff_s)
        """Sizes of elastic jobs that Slurm has refused."""
        self._confirmed: dict[int, int] = {}
        self._complained: set[tuple[int, str]] = set()

    def started(self, facts: JobFacts, now_s: float) -> None:
        """A start was begun for the job as ``facts`` show it."""
        self._attempts[facts.job_id] = Attempt(since_s=now_s, restarts=facts.restarts)
        self._confirmed.pop(facts.job_id, None)
        self._hindered.pop(facts.job_id, None)

    def refused(self, job_id: int, text: str, now_s: float) -> Reason:
        """A start failed: the job is not planned again for a while, each time for twice as long."""
        return self.refusals.add(job_id, text, now_s)

    def refusal(self, facts: JobFacts, now_s: float) -> Reason | None:
        """Why a pending job is not to be planned now, if its last start failed recently."""
        if facts.reason == _LAUNCH_FAILED and not self.refusals.known(facts.job_id):
            # Seen by nobody yet: the controller was away.
            return self._refuse_launch(facts, now_s)
        return self.refusals.why(facts, now_s)

    def _refuse_launch(self, facts: JobFacts, now_s: float) -> Reason:
        # Slurm drains the node for it: trying on at once would drain one after the other.
        text = "its launch failed on a node; sinfo -R and the node's slurmd log tell why"
        _LOG.warning("job %d: %s", facts.job_id, text)
        return self.refused(facts.job_id, text, now_s)

    def follow(
        self, jobs: Mapping[int, JobFacts], records: Mapping[int, Record], now_s: float
    ) -> None:
        """One step for every job. A failure concerns one job: it is logged, the others go on."""
        leased = {job_id for job_id, record in records.items() if record.lease is not None}
        for job_id in sorted(records.keys() | jobs.keys()):
            facts, record = jobs.get(job_id), records.get(job_id)
            lease = record.lease if record else None
            try:
                if lease is None:
                    if facts is None:
                        self._forget_gone(job_id)
                    elif facts.running and (facts.gpus_held or not is_passed_through(facts)):
                        self._adopt(facts)
                elif facts is None or ends(facts):
                    self._end_finished(job_id, facts)
                elif facts.pending:
                    self._follow_start(facts, lease, now_s)
                elif facts.running:
                    self._follow_run(facts, lease, stopping=bool(record and record.stopping))
                elif facts.state is JobState.SUSPENDED and record and record.stopping:
                    # An admin has suspended it: it cannot answer, and its time runs out.
                    self._follow_stop(facts)
            except (ClusterError, LeaseError, LedgerUnavailable, ModelError) as err:
                self._complain(job_id, err)
        self._forget_all_but(jobs.keys() | leased)

    def _is_gone(self, job_id: int) -> bool:
        """Slurm remembers a finished job for minutes: believe a gap only after asking for it."""
        try:
            return ends(self._client.read_job(job_id))
        except SlurmCommandError as err:
            if err.kind != "not_found":
                raise
            return True

    def _forget_gone(self, job_id: int) -> None:
        if self._is_gone(job_id):
            self._forget(job_id)

    def _end_finished(self, job_id: int, facts: JobFacts | None) -> None:
        if facts is None and not self._is_gone(job_id):
            return
        self._leases.end(job_id)
        _LOG.debug("job %d: ended", job_id)

    def _follow_start(self, facts: JobFacts, lease: Lease, now_s: float) -> None:
        job_id = facts.job_id
        if is_held(facts):
            # Requeued, or a start that was taken back: it holds nothing any more.
            if facts.reason == _LAUNCH_FAILED:
                self._refuse_launch(facts, now_s)
            self._leases.end(job_id)
            self._attempts.pop(job_id, None)
            return
        attempt = self._attempts.setdefault(job_id, Attempt(since_s=now_s, restarts=facts.restarts))
        if facts.restarts != attempt.restarts:
            self._client.hold(job_id)
        elif self._is_put_off(facts, now_s) or self._is_hindered(facts, lease, now_s):
            return
        elif now_s - attempt.since_s > self._start_deadline_s:
            text = f"did not start within {self._start_deadline_s:g} s; Slurm says {facts.reason}"
            self._client.hold(job_id)
            self.refused(job_id, text, now_s)
            _LOG.warning("job %d: %s", job_id, text)

    def _is_put_off(self, facts: JobFacts, now_s: float) -> bool:
        """Whether its owner has moved its begin time away; then the start is taken back at once."""
        begin_s = facts.eligible_s or 0.0
        # Right after a start StartTime is unknown, and a begin time ahead is another clock's now.
        if begin_s <= now_s + _CLOCKS_DIFFER_S or (facts.start_s or 0.0) < begin_s:
            return False
        self._client.hold(facts.job_id)
        text = f"its begin time was moved by {begin_s - now_s:.0f} s while it was being started"
        if facts.restarts:
            # What Slurm itself sets after a requeue does not block a job: this must not either.
            self.refused(facts.job_id, text, now_s)
        _LOG.warning("job %d: %s; the start is taken back", facts.job_id, text)
        return True

    def _is_hindered(self, facts: JobFacts, lease: Lease, now_s: float) -> bool:
        """Whether one of Slurm's limits is in the way; then the job is held again at once."""
        job_id, obstacle, placement = facts.job_id, obstacle_of(facts.reason), lease.placement
        # Believed when two readings agree: the word may be from before the release.
        confirmed = self._hindered.get(job_id) == facts.reason
        self._hindered[job_id] = facts.reason
        if obstacle is None or not confirmed:
            return False
        self._client.hold(job_id)
        text, of_size = f"Slurm does not start it: {obstacle.text}", ""
        others_may_do = False
        if (obstacle.of_size or obstacle.of_least) and self._elastic(facts):
            of_size = f"; it had {placement.gpus} GPUs of type {placement.gpu_type}"
            others_may_do = self.ceilings.add(facts, placement, obstacle, text, now_s)
        if not others_may_do:
            # Also where the policy chooses no sizes: it would start the job on the same ones again.
            self.refusals.add(job_id, text, now_s, trigger=obstacle.trigger, facts=facts)
        del self._hindered[job_id]
        _LOG.warning("job %d: %s%s", job_id, text, of_size)
        return True

    def _follow_run(self, facts: JobFacts, lease: Lease, *, stopping: bool) -> None:
        if "CONFIGURING" in facts.flags:
            return
        if self._confirmed.get(facts.job_id) != facts.restarts:
            self._confirm(facts, lease)
        if stopping:
            self._follow_stop(facts)

    def _follow_stop(self, facts: JobFacts) -> None:
        if self._leases.stop_state(facts.job_id) is not StopState.WAITING:
            _LOG.debug("job %d: requeued, held", facts.job_id)
            # It has run: what failed before that does not count any more.
            self.refusals.drop(facts.job_id)
            self._client.requeue_hold(facts.job_id)

    def _confirm(self, facts: JobFacts, lease: Lease) -> None:
        """The job runs: make every requeue land held, and compare with what was planned."""
        job_id, real = facts.job_id, dict(allocated(facts))
        begun = self._attempts.pop(job_id, None)
        if begun is not None and not any(share.gpus for share in real.values()):
            # Right after its own start slurmctld hands out GPUs that it does not know yet: the
            # job has none, and its steps cannot be made.
            _LOG.warning("job %d: Slurm started it without its GPUs: it is started anew", job_id)
            self._client.requeue_hold(job_id)
            return
        self._see_that_it_comes_back_held(facts)
        planned = {node: lease.granted.get(node, share) for node, share in lease.placement.shares}
        incarnation = self._leases.incarnation(job_id)
        if not _same(planned, real):
            _LOG.warning("job %d: planned %s, but Slurm gave %s", job_id, planned, real)
            self._adopt(facts)
        elif incarnation is not None and incarnation != facts.restarts:
            described = self._describe(facts)
            self._grant(facts, described, lease.placement, real)
        self._near_gpus(facts)
        self._confirmed[job_id] = facts.restarts

    def _see_that_it_comes_back_held(self, facts: JobFacts) -> None:
        """A running job that is requeued waits for us; what was left to Slurm waits for Slurm."""
        if facts.held is not Hold.ADMIN and not is_passed_through(facts):
            self._client.hold_running(facts.job_id)

    def _near_gpus(self, facts: JobFacts) -> None:
        gpus = {part.node: part.gpu_ids for part in facts.allocation if part.gpu_ids}
        self._leases.set_gpus(facts.job_id, gpus)

    def _adopt(self, facts: JobFacts) -> None:
        """Give a running job a lease on what it has, at its proportional share of the cores."""
        described = self._describe(facts)
        self._see_that_it_comes_back_held(facts)
        self._grant(facts, described, described.proportional, dict(allocated(facts)))
        self._near_gpus(facts)
        self._confirmed[facts.job_id] = facts.restarts
        _LOG.info("job %d: adopted as it runs", facts.job_id)

    def _grant(
        self,
        facts: JobFacts,
        described: Described,
        placement: Placement,
        granted: Mapping[str, Resources],
    ) -> None:
        self._leases.grant(
            status=described.status,
            owner_uid=facts.uid,
            incarnation=facts.restarts,
            placement=placement,
            granted=granted,
        )

    def _complain(self, job_id: int, err: Exception) -> None:
        level = logging.DEBUG if (job_id, str(err)) in self._complained else logging.WARNING
        self._complained.add((job_id, str(err)))
        _LOG.log(level, "job %d: %s; tried again at the next reading", job_id, err)

    def _forget_all_but(self, known: set[int]) -> None:
        for memory in (self._attempts, self._hindered, self._confirmed):
            for job_id in memory.keys() - known:
                del memory[job_id]
        self.refusals.keep_only(known)
        self.ceilings.keep_only(known)
        self._complained = {entry for entry in self._complained if entry[0] in known}


def _same(planned: Mapping[str, Resources], real: Mapping[str, Resources]) -> bool:
    """Same nodes, GPUs and memory. Cores are compared by the lease, not by Slurm's number."""
    return planned.keys() == real.keys() and all(
        planned[node].gpus == real[node].gpus and planned[node].mem_mib == real[node].mem_mib
        for node in planned
    )
