"""Live Slurm as the ``Cluster`` that a round drives.

One reading (one look at the queue, one at the nodes) serves everything until the next: following
what was begun, deciding whether a round is due, and the round itself. Only jobs of the managed
partition are ever looked at or changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from slurm_synergy.cluster import (
    Action,
    Clock,
    Hold,
    Observation,
    Outcome,
    Record,
    Records,
    Renew,
    Resize,
    Start,
    Stop,
)
from slurm_synergy.config import Settings
from slurm_synergy.core.model import Elasticity, JobPhase, JobStatus, Node, Reason, ReasonCode
from slurm_synergy.errors import ClusterError, LeaseError
from slurm_synergy.slurm import facts as slurm_facts
from slurm_synergy.slurm.client import SlurmClient
from slurm_synergy.slurm.facts import JobFacts, ReservationFacts
from slurm_synergy.slurm.follow import Described, Follower, LeaseKeeper
from slurm_synergy.slurm.gres_conf import read_gres_conf
from slurm_synergy.slurm.limit_watch import LimitWatch
from slurm_synergy.slurm.observing import Observer, Reading
from slurm_synergy.slurm.pool import (
    NodeMemory,
    left_out,
    managed_nodes,
    node_needs,
)
from slurm_synergy.slurm.reservation import ReservationKeeper, ReservationMemory
from slurm_synergy.slurm.sizing import Demand, need_of
from slurm_synergy.slurm.starting import Scene, Starter
from slurm_synergy.slurm.terms import chosen_nodes, read_terms
from slurm_synergy.slurm.views import JobView, JobViews, RequestMemory
from slurm_synergy.slurm.waiting import tend_waiting

__all__ = ["MAX_GRACE_S", "RequestMemory", "SlurmCluster"]

_LOG = logging.getLogger(__name__)

MAX_GRACE_S = 3600.0
"""Longest time to checkpoint that a job may claim with its grace_s hint, in seconds."""


class ClusterMemory(RequestMemory, ReservationMemory, Protocol):
    """What must outlive the controller besides the records."""


class SlurmCluster:
    """``Cluster`` on live Slurm. Used by one thread.

    ``tick`` reads Slurm and follows what was begun; ``observe`` gives the observation of the last
    ``tick`` once, so that a round right after it asks Slurm nothing more. ``leaving``: nothing is
    planned any more, so that neither pool.nodes nor the size of the reservation matters.
    ``helper_silent`` tells of a node by name whether no helper can be counted on there.
    """

    def __init__(
        self,
        client: SlurmClient,
        settings: Settings,
        leases: LeaseKeeper,
        records: Records,
        memory: ClusterMemory,
        clock: Clock,
        *,
        leaving: bool = False,
        helper_silent: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._leaving, self._helper_silent, self._silent = leaving, helper_silent, ""
        self._client, self._settings, self._clock = client, settings, clock
        self._leases, self._records, self._memory = leases, records, memory
        self._partition = settings.slurm.partition
        self._chosen, self._left_out = chosen_nodes(settings), ""
        terms = read_terms(client, settings, leaving=leaving)
        self.enforcement, self.enforcement_why = terms.chosen.enforcement, terms.chosen.why
        self.helped = terms.chosen.helped
        self._views = JobViews(memory, records.profile, terms.access)
        self.reservation: ReservationKeeper | None = None
        if settings.pool.reservation:
            self.reservation = ReservationKeeper(
                client,
                settings.reservation_name,
                self._partition,
                memory,
                clock,
                window_s=settings.pool.reserve_window_s,
                idle_s=settings.pool.reserve_idle_s,
            )
        self._shapes = NodeMemory(read_gres_conf(settings.slurm.conf).gpu_sockets)
        self._others = tuple[ReservationFacts, ...]()
        self._follower = Follower(
            client,
            leases,
            start_deadline_s=settings.scheduling.start_deadline_s,
            retry_backoff_s=settings.scheduling.retry_backoff_s,
            describe=self._describe,
            elastic=lambda facts: self._views.view(facts).job.elasticity is not Elasticity.RIGID,
            forget=memory.forget_job,
        )
        self._limits = LimitWatch(
            client,
            self._partition,
            accounts_every_s=settings.scheduling.retry_backoff_s / 3,
        )
        self._observer = Observer(
            self._views,
            self._follower.refusal,
            self._follower.ceilings,
            enforcement=self.enforcement,
            default_limit_s=terms.default_limit_s,
            fixed=self._fixed,
        )
        self._starter = Starter(
            client,
            leases,
            self._follower,
            self._observer,
            self._views,
            clock,
            enforcement=self.enforcement,
            reservation=self.reservation,
        )
        self._reading: Reading | None = None
        self._fresh: Observation | None = None
        self._nodes: Mapping[str, Node] = {}

    def _fixed(self, node: str) -> bool:
        """Whether only a helper could move the cores of jobs on ``node``, and there is none."""
        return self.helped and self._helper_silent(node)

    # Reading

    def observe(self) -> Observation:
        """See ``Cluster``: the observation of the last ``tick`` if it was not used yet."""
        fresh, self._fresh = self._fresh, None
        return fresh if fresh is not None else self._observe(self._records.read())

    def tick(self) -> Observation:
        """Read Slurm, follow what was begun, and observe. Raises ClusterError; then try again."""
        reading = self._read()
        self._limits.see(self._follower.refusals, self._follower.ceilings, reading)
        self._follower.follow(reading.jobs, self._records.read(), reading.now_s)
        tend_waiting(self._client, reading.jobs, reading.arrays(), reading.now_s)
        records = self._records.read()
        self._fresh = self._build(reading, records)
        keeper = self.reservation
        if (
            keeper is not None
            and not self._leaving
            and keeper.is_due(self._demand(reading, records))
        ):
            self.prepare()
        return self._fresh

    def look(self) -> Observation:
        """Read Slurm and observe; nothing is followed. Raises ClusterError."""
        self._fresh = self._observe(self._records.read())
        return self._fresh

    def facts(self, job_id: int) -> JobFacts | None:
        """The job's record as last read; None when Slurm did not show it."""
        return self._reading.jobs.get(job_id) if self._reading else None

    def last_jobs(self) -> tuple[JobFacts, ...]:
        """All jobs of the partition as last read, by id."""
        return tuple(self._reading.jobs.values()) if self._reading else ()

    def forget_gone(self) -> None:
        """Drop the memory of jobs that hold no lease and are not in the last reading.

        For modes in which nobody follows the jobs to their end. Raises LedgerError.
        """
        if self._reading is None:
            return
        for job_id, record in self._records.read().items():
            if record.lease is None and job_id not in self._reading.jobs:
                self._memory.forget_job(job_id)

    def node(self, name: str) -> Node | None:
        """The shape of a node of the pool as last read, else None. Any thread may ask."""
        return self._nodes.get(name)

    def grace_s(self, job_id: int) -> float:
        """How long a stop would leave the job to checkpoint, in seconds; 0 when it is not known.

        Any thread may ask.
        """
        view = self._views.last(job_id)
        return 0.0 if view is None else self._grace_s(view)

    def _grace_s(self, view: JobView) -> float:
        return min(view.hints.grace_s or self._settings.scheduling.grace_s, MAX_GRACE_S)

    def prepare(self, *, read_only: bool = False) -> None:
        """Before a round: see to it that the reservation covers the nodes that it should.

        What others have reserved is read as well.
        """
        keeper = self.reservation
        reading, records = self._reading or self._read(), self._records.read()
        if keeper is None:
            self._others = self._client.read_reservations()
            return
        before = keeper.nodes
        demand = self._demand(reading, records)
        if read_only:
            keeper.look(demand)
        else:
            keeper.keep(demand)
        if (before, self._others) != (keeper.nodes, keeper.others) and self._fresh is not None:
            self._others = keeper.others
            self._fresh = self._build(reading, records)
        self._others = keeper.others

    def _demand(self, reading: Reading, records: Mapping[int, Record]) -> Demand:
        """What the size of the reservation follows from."""
        pool, seen = self._settings.pool, self._fresh or self._build(reading, records)
        leased = [record.lease for record in records.values() if record.lease is not None]
        sized = pool.reserve_least is not None
        draining = sized and self._records.draining()
        backs_off = (ReasonCode.START_REFUSED, ReasonCode.NOT_OURS)
        waiting = [
            one
            for one in (seen.jobs if sized and not draining else ())
            if one.phase is JobPhase.PENDING
            and not (one.blocked is not None and one.blocked.code in backs_off)
        ]
        waiting.sort(key=lambda one: (one.job.submitted_s, one.job.job_id))
        return Demand(
            nodes=node_needs(
                reading.nodes.values(),
                held=self._observer.in_use,
                coming={name for lease in leased for name in lease.placement.nodes},
            ),
            jobs=tuple(need_of(one.job) for one in waiting),
            least=0 if draining else pool.reserve_least,
            most=pool.reserve_most,
        )

    def _observe(self, records: Mapping[int, Record]) -> Observation:
        return self._build(self._read(), records)

    def _read(self) -> Reading:
        # The queue first: a job that ends in between must not look like somebody else's.
        queue = self._client.read_queue(self._partition)
        found = self._client.read_nodes()
        self._warn_of_left_out(left_out(found, partition=self._partition, chosen=self._chosen))
        chosen = frozenset[str]() if self._leaving else self._chosen
        nodes = managed_nodes(
            found, partition=self._partition, chosen=chosen, insist=not self._leaving
        )
        self._views.on(nodes)
        self._reading = Reading(
            jobs={job.job_id: job for job in queue if job.partition == self._partition},
            nodes={node.name: node for node in nodes},
            now_s=self._clock.now_s(),
        )
        for job_id in self._views.strangers(self._reading.jobs):
            _LOG.warning("job %d: another job had this id; what was known of it is dropped", job_id)
            self._leases.end(job_id)
            self._views.forget(job_id)
        # For the keeper of leases, whom only the shape of a node concerns.
        shapes = self._shapes.values(nodes, ours={}, reserved=None)
        self._nodes = {node.name: node for node in shapes}
        return self._reading

    def _tell_of_silent(self, nodes: Sequence[Node]) -> None:
        silent = ", ".join(node.name for node in nodes if node.fixed_shares)
        if silent and silent != self._silent:
            _LOG.warning(
                "no helper is heard on %s: jobs there keep to the cores that Slurm gave them; see "
                "whether slurm-synergyd --node runs there and reaches this controller",
                silent,
            )
        elif self._silent and not silent:
            _LOG.info("the helpers of all nodes are heard")
        self._silent = silent

    def _warn_of_left_out(self, what: str) -> None:
        # No error: a node may leave slurm.conf, and the others are to be scheduled on.
        if what and what != self._left_out:
            _LOG.warning(
                "pool.nodes = %r: %s; the other nodes are scheduled; correct pool.nodes or "
                "slurm.conf",
                self._settings.pool.nodes,
                what,
            )
        self._left_out = what

    def _build(self, reading: Reading, records: Mapping[int, Record]) -> Observation:
        self._views.meet(reading.jobs)
        reserved = None if self.reservation is None else self.reservation.nodes
        made = self._observer.observation(reading, records, reserved=reserved, others=self._others)
        self._tell_of_silent(made.nodes)
        for node, taken in self._observer.fixed_cores(reading).items():
            self._leases.set_reserved(node, taken)
        return made

    def _describe(self, facts: JobFacts) -> Described:
        assert self._reading is not None
        return self._observer.described(facts, self._reading.nodes)

    # Changing

    def apply(self, action: Action, status: JobStatus) -> Outcome:
        """See ``Cluster``. Starts and stops are only begun; ``tick`` follows them."""
        facts = self._reading.jobs.get(action.job_id) if self._reading else None
        if facts is None:
            return _gone(action)
        try:
            return self._begin(action, status, facts)
        except LeaseError as err:
            return _not_done(action, ReasonCode.ACTION_FAILED, str(err))

    def foresee(self, actions: Sequence[Action], statuses: Mapping[int, JobStatus]) -> None:
        """See ``Foresight``: holds and shapes of pending jobs go to Slurm in one session."""
        if self._reading is not None:
            self._starter.foresee(actions, statuses, self._scene(self._reading))

    def _scene(self, reading: Reading) -> Scene:
        return Scene(reading=reading, nodes=self._nodes, others=self._others)

    def resize_all(
        self, resizes: Sequence[Resize], statuses: Mapping[int, JobStatus]
    ) -> tuple[Outcome, ...]:
        """See ``Together``: Slurm is asked nothing, all of it is a matter of leases."""
        jobs = self._reading.jobs if self._reading else {}
        refused = self._leases.resize_all(
            [action.placement for action in resizes if action.job_id in jobs]
        )
        outcomes = []
        for action in resizes:
            if action.job_id not in jobs:
                outcomes.append(_gone(action))
            elif action.job_id in refused:
                text = str(refused[action.job_id])
                outcomes.append(_not_done(action, ReasonCode.ACTION_FAILED, text))
            else:
                outcomes.append(Outcome(action=action, done=True))
        return tuple(outcomes)

    def _begin(self, action: Action, status: JobStatus, facts: JobFacts) -> Outcome:
        match action:
            case Start():
                assert self._reading is not None
                return self._starter.start(action, status, facts, self._scene(self._reading))
            case Stop():
                grace_s = self._grace_s(self._views.view(facts))
                if facts.held is not slurm_facts.Hold.ADMIN:
                    self._client.hold_running(action.job_id)
                self._leases.stop(job_id=action.job_id, reason=action.reason, grace_s=grace_s)
            case Resize():
                return self.resize_all((action,), {action.job_id: status})[0]
            case Hold():
                if not self._starter.is_held(action.job_id, facts):
                    self._client.hold(action.job_id)
            case Renew():
                pass
            case _:
                raise ClusterError(f"unknown action {type(action).__name__}")
        return Outcome(action=action, done=True)


def _gone(action: Action) -> Outcome:
    return _not_done(action, ReasonCode.NOT_OURS, "Slurm does not show the job any more")


def _not_done(action: Action, code: ReasonCode, text: str) -> Outcome:
    return Outcome(action=action, done=False, reason=Reason(code=code, text=text))
