"""Live Slurm as the ``Cluster`` that a round drives.

One reading (one look at the queue, one at the nodes) serves everything until the next: following
what was begun, deciding whether a round is due, and the round itself. Only jobs of the managed
partition are ever looked at or changed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from slurm_synergy.cluster import (
    Action,
    Clock,
    Hold,
    Observation,
    ObservedJob,
    Outcome,
    Record,
    Records,
    Renew,
    Resize,
    Start,
    Stop,
)
from slurm_synergy.config import EnforcementChoice, Settings
from slurm_synergy.core.model import (
    Enforcement,
    Job,
    JobPhase,
    JobStatus,
    Node,
    Placement,
    Reason,
    ReasonCode,
)
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import (
    ClusterError,
    ConfigError,
    LeaseError,
    SlurmCommandError,
    SlurmParseError,
)
from slurm_synergy.slurm import facts as slurm_facts
from slurm_synergy.slurm import hostlist
from slurm_synergy.slurm.ahead import Ahead
from slurm_synergy.slurm.arrays import ArrayPlan, plan_arrays
from slurm_synergy.slurm.client import SlurmClient
from slurm_synergy.slurm.enforcing import choose_enforcement
from slurm_synergy.slurm.facts import (
    JobFacts,
    JobShape,
    JobState,
    NodeFacts,
    ReservationFacts,
)
from slurm_synergy.slurm.follow import Described, Follower, LeaseKeeper, holds_now
from slurm_synergy.slurm.gres_conf import read_gres_conf
from slurm_synergy.slurm.maintenance import MaintenanceGate, ahead_of, end_s, why_not_before
from slurm_synergy.slurm.pool import (
    UNTYPED,
    allocated,
    free_on,
    left_out,
    managed_nodes,
    node_needs,
    node_values,
)
from slurm_synergy.slurm.request import is_held, is_passed_through, waits_on
from slurm_synergy.slurm.reservation import ReservationKeeper, ReservationMemory
from slurm_synergy.slurm.sizing import Demand, need_of
from slurm_synergy.slurm.views import JobViews, RequestMemory
from slurm_synergy.slurm.waiting import tend_waiting

__all__ = ["MAX_GRACE_S", "RequestMemory", "SlurmCluster", "chosen_nodes"]

_LOG = logging.getLogger(__name__)

_REQUEUED = "job_requeued"

MAX_GRACE_S = 3600.0
"""Longest time to checkpoint that a job may claim with its grace_s hint, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    jobs: Mapping[int, JobFacts]
    nodes: Mapping[str, NodeFacts]
    now_s: float


def chosen_nodes(settings: Settings) -> frozenset[str]:
    """The names in pool.nodes; empty for all of the partition. Raises ConfigError."""
    try:
        return frozenset(hostlist.expand(settings.pool.nodes))
    except SlurmParseError as err:
        raise ConfigError(
            f"not a host list: {err.what}",
            key="pool.nodes",
            value=settings.pool.nodes,
            remedy="write it as Slurm does, as in v100-[1-4],a100-1",
        ) from err


class ClusterMemory(RequestMemory, ReservationMemory, Protocol):
    """What must outlive the controller besides the records."""


class SlurmCluster:
    """``Cluster`` on live Slurm. Used by one thread.

    ``tick`` reads Slurm and follows what was begun; ``observe`` gives the observation of the last
    ``tick`` once, so that a round right after it asks Slurm nothing more.
    """

    def __init__(
        self,
        client: SlurmClient,
        settings: Settings,
        leases: LeaseKeeper,
        records: Records,
        memory: ClusterMemory,
        clock: Clock,
    ) -> None:
        self._client, self._settings, self._clock = client, settings, clock
        self._leases, self._records, self._memory = leases, records, memory
        self._views = JobViews(memory, records.profile)
        self._partition = settings.slurm.partition
        self._chosen, self._left_out = chosen_nodes(settings), ""
        self.enforcement = self._read_enforcement()
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
        self._gres = read_gres_conf(settings.slurm.conf)
        self._gate, self._others = MaintenanceGate(), tuple[ReservationFacts, ...]()
        self._follower = Follower(
            client,
            leases,
            start_deadline_s=settings.scheduling.start_deadline_s,
            retry_backoff_s=settings.scheduling.retry_backoff_s,
            describe=self._describe,
            forget=memory.forget_job,
        )
        self._ahead = Ahead(client)
        self._reading: _Reading | None = None
        self._fresh: Observation | None = None
        self._nodes: Mapping[str, Node] = {}
        self._graces: Mapping[int, float] = {}
        self._held: dict[int, tuple[tuple[str, Resources], ...]] = {}
        self._in_use: Mapping[str, Resources] = {}

    def _read_enforcement(self) -> Enforcement:
        try:
            partition = self._client.read_partition(self._partition)
        except SlurmCommandError as err:
            if err.kind != "not_found":
                raise
            raise ConfigError(
                "Slurm has no such partition",
                key="slurm.partition",
                value=self._partition,
                remedy="create it in slurm.conf (see slurm.conf.d/synergy.conf) or name another",
            ) from err
        # What Slurm takes for the limit of a job that has none of its own.
        self._default_limit_s = partition.default_time_s or partition.max_time_s
        choice = self._settings.enforcement
        told = partition.oversubscribe[0] == "FORCE" and choice is not EnforcementChoice.BORROW
        config = None if told else self._client.read_config()
        chosen = choose_enforcement(choice, partition, config)
        _LOG.info("enforcement %s: %s", chosen.enforcement.value, chosen.why)
        return chosen.enforcement

    # Reading

    def observe(self) -> Observation:
        """See ``Cluster``: the observation of the last ``tick`` if it was not used yet."""
        fresh, self._fresh = self._fresh, None
        return fresh if fresh is not None else self._observe(self._records.read())

    def tick(self) -> Observation:
        """Read Slurm, follow what was begun, and observe. Raises ClusterError; then try again."""
        reading = self._read()
        self._see_limits(reading)
        self._follower.follow(reading.jobs, self._records.read(), reading.now_s)
        tend_waiting(self._client, reading.jobs, self._arrays(reading), reading.now_s)
        records = self._records.read()
        self._fresh = self._build(reading, records)
        keeper = self.reservation
        if keeper is not None and keeper.is_due(self._demand(reading, records)):
            self.prepare()
        return self._fresh

    def look(self) -> Observation:
        """Read Slurm and observe; nothing is followed. Raises ClusterError."""
        self._fresh = self._observe(self._records.read())
        return self._fresh

    def _see_limits(self, reading: _Reading) -> None:
        """What may have changed for the jobs that one of Slurm's limits keeps from starting."""
        refusals, partition = self._follower.refusals, None
        if refusals.watches_partition:
            partition = self._client.read_partition(self._partition)
        refusals.see(
            holding=[job_id for job_id, facts in reading.jobs.items() if holds_now(facts)],
            nodes=reading.nodes.values(),
            partition=partition,
        )

    def _arrays(self, reading: _Reading) -> ArrayPlan:
        """Which members of job arrays to split off, and which must not start."""
        gpus = sum(sum(node.gpus.values()) for node in reading.nodes.values())
        ours = [facts for facts in reading.jobs.values() if not is_passed_through(facts)]
        return plan_arrays(ours, pool_gpus=gpus)

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
        return self._graces.get(job_id, 0.0)

    def _grace_s(self, facts: JobFacts) -> float:
        hinted = self._views.view(facts).hints.grace_s
        return min(hinted or self._settings.scheduling.grace_s, MAX_GRACE_S)

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

    def _demand(self, reading: _Reading, records: Mapping[int, Record]) -> Demand:
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
                held=self._in_use,
                coming={name for lease in leased for name in lease.placement.nodes},
            ),
            jobs=tuple(need_of(one.job) for one in waiting),
            least=0 if draining else pool.reserve_least,
            most=pool.reserve_most,
        )

    def _observe(self, records: Mapping[int, Record]) -> Observation:
        return self._build(self._read(), records)

    def _read(self) -> _Reading:
        # The queue first: a job that ends in between must not look like somebody else's.
        queue = self._client.read_queue(self._partition)
        found = self._client.read_nodes()
        self._warn_of_left_out(left_out(found, partition=self._partition, chosen=self._chosen))
        nodes = managed_nodes(found, partition=self._partition, chosen=self._chosen)
        self._reading = _Reading(
            jobs={job.job_id: job for job in queue if job.partition == self._partition},
            nodes={node.name: node for node in nodes},
            now_s=self._clock.now_s(),
        )
        # For the keeper of leases, whom only the shape of a node concerns.
        shapes = node_values(nodes, ours={}, reserved=None, near=self._gres.gpu_sockets)
        self._nodes = {node.name: node for node in shapes}
        return self._reading

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

    def _build(self, reading: _Reading, records: Mapping[int, Record]) -> Observation:
        jobs, starting = [], dict[str, Resources]()
        ours: dict[str, Resources] = {}
        arrays = self._arrays(reading).waiting
        for job_id, facts in sorted(reading.jobs.items()):
            record = records.get(job_id)
            has_lease = record is not None and record.lease is not None
            phase = _phase(facts, has_lease)
            held = self._holdings(facts)
            _add(ours, held)
            if phase is JobPhase.STARTING and not held and record and record.lease:
                lease = record.lease
                _add(starting, tuple(lease.granted.items()) or lease.placement.shares)
            if _is_somebody_elses(facts, phase, held):
                continue
            if phase is not None and (has_lease or phase is JobPhase.PENDING or held):
                seen = self._observed(facts, phase, held, reading.now_s)
                waits = None if seen.blocked else arrays.get(job_id)
                jobs.append(replace(seen, blocked=waits) if waits else seen)
        for node, coming in starting.items():
            ours[node] = ours.get(node, Resources()) + coming
        self._in_use = ours
        self._views.forget_all_but(reading.jobs.keys())
        self._graces = {job_id: self._grace_s(facts) for job_id, facts in reading.jobs.items()}
        self._held = {job_id: self._held[job_id] for job_id in self._held.keys() & reading.jobs}
        reserved = None if self.reservation is None else self.reservation.nodes
        nodes = node_values(reading.nodes.values(), ours=ours, reserved=reserved)
        self._reserve_cores(reading)
        free = {
            node.name: free_on(
                reading.nodes[node.name],
                node,
                starting.get(node.name, Resources()),
                self.enforcement,
            )
            for node in nodes
        }
        planned, nodes = self._gate.pass_through(
            jobs,
            nodes,
            ahead_of(self._others, reading.now_s),
            {name: left.gpus for name, left in free.items()},
            lambda seen: self._ends_s(
                seen.job, _service_gpu_s(records.get(seen.job.job_id)), reading.now_s
            ),
            reading.now_s,
        )
        return Observation(nodes=nodes, jobs=planned, free=free, enforcement=self.enforcement)

    def _ends_s(self, job: Job, service_gpu_s: float, now_s: float) -> float:
        """When a job that starts now has ended at the latest, by its time limit."""
        limit_s = self._default_limit_s if job.time_limit_s is None else job.time_limit_s
        return end_s(now_s, limit_s, service_gpu_s / job.gpus)

    def _holdings(self, facts: JobFacts) -> tuple[tuple[str, Resources], ...]:
        """What the job holds; while it ends, what it held (Slurm drops the GPU indices early)."""
        if not holds_now(facts):
            return ()
        if facts.running:
            self._held[facts.job_id] = allocated(facts)
        return self._held.get(facts.job_id) or tuple(
            (node, share) for node, share in allocated(facts) if share.gpus
        )

    def _observed(
        self,
        facts: JobFacts,
        phase: JobPhase,
        held: tuple[tuple[str, Resources], ...],
        now_s: float,
    ) -> ObservedJob:
        view = self._views.view(facts)
        blocked = None
        if phase is JobPhase.PENDING:
            blocked = view.problem or waits_on(facts, now_s) or self._follower.refusal(facts, now_s)
        elif phase is JobPhase.ENDING and not facts.reason.startswith(_REQUEUED):
            # Slurm's text does not tell whether it comes back: do not plan for it yet.
            strange = ", ".join(sorted(facts.flags)) if facts.state is JobState.UNKNOWN else ""
            text = f"is in a state unknown here ({strange})" if strange else "is ending"
            blocked = Reason(code=ReasonCode.NOT_OURS, text=text)
        types = [part.gpu_type for part in facts.allocation if part.gpu_type]
        return ObservedJob(
            job=view.job,
            phase=phase,
            restarts=facts.restarts,
            started_s=facts.start_s if facts.running else None,
            gpu_type=types[0] if types else (UNTYPED if held else ""),
            allocated=held,
            cores={part.node: part.cpu_ids for part in facts.allocation},
            held_by_us=facts.held is slurm_facts.Hold.ADMIN,
            blocked=blocked,
            profile_key=view.hints.profile or "",
        )

    def _reserve_cores(self, reading: _Reading) -> None:
        """Cores to which Slurm confines jobs without the wrapper are out of the leases' reach."""
        cores: dict[str, set[int]] = {name: set() for name in reading.nodes}
        for facts in reading.jobs.values():
            if facts.running and not self._views.view(facts).job.wrapped:
                for part in facts.allocation:
                    cores.setdefault(part.node, set()).update(part.cpu_ids)
        for node, taken in sorted(cores.items()):
            self._leases.set_reserved(node, tuple(sorted(taken)))

    def _describe(self, facts: JobFacts) -> Described:
        """For the adoption of a running job: its proportional share of what it holds."""
        assert self._reading is not None
        job, shares, kind = self._views.view(facts).job, [], UNTYPED
        for part, (name, held) in zip(facts.allocation, allocated(facts), strict=True):
            node = self._reading.nodes.get(name)
            kind = part.gpu_type or kind
            cpus = held.cpus
            if node is not None and self.enforcement.in_place and job.wrapped:
                cpus = min(cpus, node.cpus_total * held.gpus // sum(node.gpus.values()))
            shares.append((name, Resources(gpus=held.gpus, cpus=cpus, mem_mib=held.mem_mib)))
        placement = Placement(job_id=facts.job_id, gpu_type=kind, shares=tuple(shares))
        return Described(status=JobStatus(job=job), proportional=placement)

    # Changing

    def apply(self, action: Action, status: JobStatus) -> Outcome:
        """See ``Cluster``. Starts and stops are only begun; ``tick`` follows them."""
        facts = self._reading.jobs.get(action.job_id) if self._reading else None
        if facts is None:
            return _not_done(action, ReasonCode.NOT_OURS, "Slurm does not show the job any more")
        try:
            return self._begin(action, status, facts)
        except LeaseError as err:
            return _not_done(action, ReasonCode.ACTION_FAILED, str(err))

    def foresee(self, actions: Sequence[Action], statuses: Mapping[int, JobStatus]) -> None:
        """See ``Foresight``: holds and shapes of pending jobs go to Slurm in one session."""
        jobs = self._reading.jobs if self._reading else {}
        pending = {
            action.job_id: action
            for action in actions
            if isinstance(action, Hold | Start)
            and action.job_id in jobs
            and jobs[action.job_id].pending
        }
        shapes = {
            job_id: self._shape(statuses[job_id].job, action.placement)
            for job_id, action in pending.items()
            if isinstance(action, Start)
        }
        try:
            if self.reservation is not None and shapes:
                self.reservation.admit({jobs[job_id].user for job_id in shapes})
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

    def _begin(self, action: Action, status: JobStatus, facts: JobFacts) -> Outcome:
        match action:
            case Start():
                return self._start(action, status, facts)
            case Stop():
                grace_s = self._grace_s(facts)
                if facts.held is not slurm_facts.Hold.ADMIN:
                    self._client.hold_running(action.job_id)
                self._leases.stop(job_id=action.job_id, reason=action.reason, grace_s=grace_s)
            case Resize():
                self._leases.resize(job_id=action.job_id, placement=action.placement)
            case Hold():
                held = facts.held is slurm_facts.Hold.ADMIN or self._ahead.held(action.job_id)
                if not held:
                    self._client.hold(action.job_id)
            case Renew():
                pass
            case _:
                raise ClusterError(f"unknown action {type(action).__name__}")
        return Outcome(action=action, done=True)

    def _start(self, action: Start, status: JobStatus, facts: JobFacts) -> Outcome:
        if not facts.pending:
            return _not_done(action, ReasonCode.START_REFUSED, f"it is {facts.state.value}")
        now_s, placement = self._clock.now_s(), action.placement
        late = self._too_late_for(status, placement, now_s)
        if late is not None:
            return Outcome(action=action, done=False, reason=late)
        shape = self._shape(status.job, placement)
        granted = {
            name: Resources(
                gpus=shape.gpus_per_node, cpus=shape.cpus_per_node, mem_mib=shape.mem_mib_per_node
            )
            for name in shape.nodes
        }
        try:
            if self.reservation is not None:
                self.reservation.admit((facts.user,))
            if not is_held(facts) and not self._ahead.held(action.job_id):
                self._client.hold(action.job_id)
            prepared = self._ahead.prepared(action.job_id, shape)
            if not prepared:
                self._client.reshape(action.job_id, shape)
            self._limit_run(status, facts)
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
            if self.reservation is not None:
                self.reservation.forget()
            reason = self._follower.refused(action.job_id, str(err), now_s)
            return Outcome(action=action, done=False, reason=reason)
        return Outcome(action=action, done=True)

    def _too_late_for(self, status: JobStatus, placement: Placement, now_s: float) -> Reason | None:
        """Why the job must not start there now: a reservation of others begins too soon.

        Waiting jobs are planned so that this does not occur, but not those that were stopped to
        be moved.
        """
        ahead = ahead_of(self._others, now_s)
        ends_s = self._ends_s(status.job, status.attained_service_gpu_s, now_s)
        found = (ahead[name] for name in placement.nodes if name in ahead)
        return next((why_not_before(one, now_s) for one in found if ends_s > one.start_s), None)

    def _limit_run(self, status: JobStatus, facts: JobFacts) -> None:
        """The time limit is for all runs of a job together, where Slurm's is for each of them."""
        if facts.restarts:
            ran_s = status.attained_service_gpu_s / status.job.gpus
            limit_s = self._views.limit_next_run(facts, ran_s)
            if limit_s is not None:
                self._client.set_time_limit(facts.job_id, limit_s)

    def _shape(self, job: Job, placement: Placement) -> JobShape:
        """What Slurm is asked for. The same for every node, as Slurm cannot ask otherwise."""
        shares = [share for _, share in placement.shares]
        cpus = min(share.cpus for share in shares)
        if self.enforcement is Enforcement.SHARED and job.wrapped:
            # All cores of the nodes: the lease says which of them are the job's.
            assert self._reading is not None
            cpus = min(self._reading.nodes[name].cpus_total for name in placement.nodes)
        elif self.enforcement is Enforcement.BORROW and job.wrapped:
            # No more than its proportional share, so that every job gets its own from Slurm.
            own = (self._nodes[name].proportional(share.gpus) for name, share in placement.shares)
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
            reservation=self.reservation.name if self.reservation else None,
        )


def _is_somebody_elses(
    facts: JobFacts, phase: JobPhase | None, held: tuple[tuple[str, Resources], ...]
) -> bool:
    """A job left to Slurm counts only while it holds GPUs; then it is in the way like any other."""
    holds_gpus = phase is JobPhase.RUNNING and any(share.gpus for _, share in held)
    return is_passed_through(facts) and not holds_gpus


def _phase(facts: JobFacts, has_lease: bool) -> JobPhase | None:
    """The cluster's view of a job; None for one that is over or about to be."""
    if facts.completing or facts.state is JobState.UNKNOWN:
        # A state of a newer Slurm may mean anything: keep what it holds, and touch nothing.
        return None if facts.state.finished else JobPhase.ENDING
    if facts.state.finished:
        return None
    if facts.pending:
        begun = has_lease and not is_held(facts)
        return JobPhase.STARTING if begun else JobPhase.PENDING
    return JobPhase.STARTING if "CONFIGURING" in facts.flags else JobPhase.RUNNING


def _service_gpu_s(record: Record | None) -> float:
    return record.attained_service_gpu_s if record else 0.0


def _add(sums: dict[str, Resources], shares: tuple[tuple[str, Resources], ...]) -> None:
    for node, share in shares:
        sums[node] = sums.get(node, Resources()) + share


def _not_done(action: Action, code: ReasonCode, text: str) -> Outcome:
    return Outcome(action=action, done=False, reason=Reason(code=code, text=text))
