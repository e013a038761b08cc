"""Live Slurm as the ``Cluster`` that a round drives.

One reading (one look at the queue, one at the nodes) serves everything until the next: following
what was begun, deciding whether a round is due, and the round itself. Only jobs of the managed
partition are ever looked at or changed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

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
from slurm_synergy.slurm.client import SlurmClient
from slurm_synergy.slurm.facts import JobFacts, JobShape, NodeFacts, PartitionFacts
from slurm_synergy.slurm.follow import Described, Follower, LeaseKeeper, holds_now
from slurm_synergy.slurm.pool import (
    UNTYPED,
    allocated,
    free_on,
    left_out,
    managed_nodes,
    node_values,
)
from slurm_synergy.slurm.request import is_held, waits_on
from slurm_synergy.slurm.reservation import ReservationKeeper
from slurm_synergy.slurm.views import JobViews, RequestMemory

__all__ = ["MAX_GRACE_S", "RequestMemory", "SlurmCluster", "chosen_nodes", "enforcement_of"]

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


def enforcement_of(settings: Settings, partition: PartitionFacts) -> Enforcement:
    """How CPU shares are made real here. Raises ConfigError when the partition forbids it."""
    shares_cores = partition.oversubscribe[0] == "FORCE"
    choice = settings.enforcement
    if choice is EnforcementChoice.SHARED and not shares_cores:
        raise ConfigError(
            f"partition {partition.name!r} has OverSubscribe={partition.oversubscribe[0]}",
            key="enforcement",
            value=str(choice),
            remedy="set OverSubscribe=FORCE:N in slurm.conf (N: GPUs per node), "
            "or choose enforcement: auto or requeue",
        )
    if choice is EnforcementChoice.REQUEUE or not shares_cores:
        return Enforcement.REQUEUE
    return Enforcement.SHARED


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
        memory: RequestMemory,
        clock: Clock,
    ) -> None:
        self._client, self._settings, self._clock = client, settings, clock
        self._leases, self._records = leases, records
        self._views = JobViews(memory, records.profile)
        self._partition = settings.slurm.partition
        self._chosen, self._left_out = chosen_nodes(settings), ""
        self.enforcement = self._read_enforcement()
        self.reservation = (
            ReservationKeeper(client, settings.reservation_name)
            if settings.pool.reservation
            else None
        )
        self._follower = Follower(
            client,
            leases,
            start_deadline_s=settings.scheduling.start_deadline_s,
            retry_backoff_s=settings.scheduling.retry_backoff_s,
            describe=self._describe,
            forget=memory.forget_job,
        )
        self._reading: _Reading | None = None
        self._fresh: Observation | None = None
        self._nodes: Mapping[str, Node] = {}
        self._held: dict[int, tuple[tuple[str, Resources], ...]] = {}

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
        return enforcement_of(self._settings, partition)

    # Reading

    def observe(self) -> Observation:
        """See ``Cluster``: the observation of the last ``tick`` if it was not used yet."""
        fresh, self._fresh = self._fresh, None
        return fresh if fresh is not None else self._observe(self._records.read())

    def tick(self) -> Observation:
        """Read Slurm, follow what was begun, and observe. Raises ClusterError; then try again."""
        reading = self._read()
        self._follower.follow(reading.jobs, self._records.read(), reading.now_s)
        self._fresh = self._build(reading, self._records.read())
        return self._fresh

    def look(self) -> Observation:
        """Read Slurm and observe; nothing is followed. Raises ClusterError."""
        self._fresh = self._observe(self._records.read())
        return self._fresh

    def node(self, name: str) -> Node | None:
        """The shape of a node of the pool as last read, else None. Any thread may ask."""
        return self._nodes.get(name)

    def prepare(self, *, read_only: bool = False) -> None:
        """Before a round: see to it that the reservation covers the pool."""
        if self.reservation is None:
            return
        if self._reading is None:
            self._read()
        assert self._reading is not None
        if read_only:
            self.reservation.look(self._reading.nodes)
        else:
            self.reservation.ensure(self._reading.nodes, (), reread=True)

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
        self._nodes = {node.name: node for node in node_values(nodes, ours={}, reserved=None)}
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
        for job_id, facts in sorted(reading.jobs.items()):
            record = records.get(job_id)
            has_lease = record is not None and record.lease is not None
            phase = _phase(facts, has_lease)
            held = self._holdings(facts)
            _add(ours, held)
            if phase is JobPhase.STARTING and not held and record and record.lease:
                _add(starting, record.lease.placement.shares)
            if phase is not None and (has_lease or phase is JobPhase.PENDING or held):
                jobs.append(self._observed(facts, phase, held, reading.now_s))
        for node, coming in starting.items():
            ours[node] = ours.get(node, Resources()) + coming
        self._views.forget_all_but(reading.jobs.keys())
        self._held = {job_id: self._held[job_id] for job_id in self._held.keys() & reading.jobs}
        reserved = None if self.reservation is None else self.reservation.nodes
        nodes = node_values(reading.nodes.values(), ours=ours, reserved=reserved)
        self._reserve_cores(reading)
        return Observation(
            nodes=nodes,
            jobs=tuple(jobs),
            free={
                node.name: free_on(
                    reading.nodes[node.name],
                    node,
                    starting.get(node.name, Resources()),
                    self.enforcement,
                )
                for node in nodes
            },
            enforcement=self.enforcement,
        )

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
            blocked = (
                view.problem
                or waits_on(facts, now_s)
                or self._follower.refusal(facts.job_id, now_s)
            )
        elif phase is JobPhase.ENDING and not facts.reason.startswith(_REQUEUED):
            # Slurm's text does not tell whether it comes back: do not plan for it yet.
            blocked = Reason(code=ReasonCode.NOT_OURS, text="is ending")
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

    def _begin(self, action: Action, status: JobStatus, facts: JobFacts) -> Outcome:
        match action:
            case Start():
                return self._start(action, status, facts)
            case Stop():
                grace_s = self._views.view(facts).hints.grace_s or self._settings.scheduling.grace_s
                if facts.held is not slurm_facts.Hold.ADMIN:
                    self._client.hold_running(action.job_id)
                self._leases.stop(
                    job_id=action.job_id, reason=action.reason, grace_s=min(grace_s, MAX_GRACE_S)
                )
            case Resize():
                self._leases.resize(job_id=action.job_id, placement=action.placement)
            case Hold():
                if facts.held is not slurm_facts.Hold.ADMIN:
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
        shape = self._shape(status.job, placement)
        granted = {
            name: Resources(
                gpus=shape.gpus_per_node, cpus=shape.cpus_per_node, mem_mib=shape.mem_mib_per_node
            )
            for name in shape.nodes
        }
        try:
            if self.reservation is not None:
                assert self._reading is not None
                self.reservation.ensure(self._reading.nodes, (facts.user,))
            if not is_held(facts):
                self._client.hold(action.job_id)
            self._client.reshape(action.job_id, shape)
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

    def _shape(self, job: Job, placement: Placement) -> JobShape:
        """What Slurm is asked for. The same for every node, as Slurm cannot ask otherwise."""
        shares = [share for _, share in placement.shares]
        cpus = min(share.cpus for share in shares)
        if self.enforcement.in_place and job.wrapped:
            # All cores of the nodes: the lease says which of them are the job's.
            assert self._reading is not None
            cpus = min(self._reading.nodes[name].cpus_total for name in placement.nodes)
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


def _phase(facts: JobFacts, has_lease: bool) -> JobPhase | None:
    """The cluster's view of a job; None for one that is over or about to be."""
    if facts.completing:
        return None if facts.state.finished else JobPhase.ENDING
    if facts.state.finished:
        return None
    if facts.pending:
        begun = has_lease and not is_held(facts)
        return JobPhase.STARTING if begun else JobPhase.PENDING
    return JobPhase.STARTING if "CONFIGURING" in facts.flags else JobPhase.RUNNING


def _add(sums: dict[str, Resources], shares: tuple[tuple[str, Resources], ...]) -> None:
    for node, share in shares:
        sums[node] = sums.get(node, Resources()) + share


def _not_done(action: Action, code: ReasonCode, text: str) -> Outcome:
    return Outcome(action=action, done=False, reason=Reason(code=code, text=text))
