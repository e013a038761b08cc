"""One round's decision, a pure function from a snapshot to a plan, and the check of promises."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence, Set
from operator import attrgetter
from typing import Protocol

from slurm_synergy.core.elastic import as_placed, objection
from slurm_synergy.core.fitting import fitted
from slurm_synergy.core.model import (
    Decision,
    Elasticity,
    Job,
    JobStatus,
    Layout,
    Node,
    Placement,
    Plan,
    Profile,
    Snapshot,
)
from slurm_synergy.core.pipeline import job_rate, min_mem_mib, proportional_share
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.snapshot import Ascending, Stamp, Standing, held, is_pinned, standing
from slurm_synergy.core.totals import Totals, Turn
from slurm_synergy.errors import PlanError

__all__ = ["Mechanism", "Policy", "begun", "check_plan", "decide", "reads_progress", "uncollected"]

# Rates are products and quotients of floats; equal shares may differ in the last digits.
_RATE_TOLERANCE = 1e-9

_ID = attrgetter("job_id")
_FORGOTTEN_AT_LEAST = 1000
_NOTHING = (0, 0, 0)
# Until Python 3.12, looking up a member of an enumeration takes longer than comparing it.
_RIGID = Elasticity.RIGID


class Policy(Protocol):
    """Says who runs. Keeps nothing between rounds."""

    @property
    def name(self) -> str:
        """The name that selects this policy."""
        ...

    def choose(self, snapshot: Snapshot) -> Decision:
        """Grants in priority order, and why the other jobs wait."""
        ...


class Mechanism(Protocol):
    """Says where, and with how much CPU and memory. Keeps nothing between rounds.

    It places every job that the policy granted (promise P2). A baseline that leaves jobs out says
    so by an attribute ``may_skip`` that is true; such a job waits with the mechanism's reason.
    """

    @property
    def name(self) -> str:
        """The name that selects this mechanism."""
        ...

    def place(self, snapshot: Snapshot, decision: Decision) -> Layout:
        """A placement for each grant; what cannot be placed is in ``unplaced`` with the reason."""
        ...


def begun(policy: Policy) -> Policy:
    """The policy for one simulation: one that remembers (``begun``) has a memory of its own."""
    begin: Callable[[], Policy] | None = getattr(policy, "begun", None)
    return policy if begin is None else begin()


def reads_progress(policy: Policy, mechanism: Mechanism) -> bool:
    """Whether a decision depends on what jobs have done and had so far.

    So on ``done_samples``, ``attained_service_gpu_s``, ``held_s`` or ``restarts`` of jobs that hold
    nothing. One that does not says so by an attribute ``reads_progress`` that is false.
    """
    return any(getattr(one, "reads_progress", True) for one in (policy, mechanism))


def decide(snapshot: Snapshot, policy: Policy, mechanism: Mechanism) -> Plan:
    """The plan of this round: the same for the same snapshot, whoever asks and when."""
    with uncollected():
        return _decide(snapshot, policy, mechanism)


def _decide(snapshot: Snapshot, policy: Policy, mechanism: Mechanism) -> Plan:
    decision = policy.choose(snapshot)
    layout = mechanism.place(snapshot, decision)
    if decision.hopes:
        layout = fitted(snapshot, layout)
    waiting = {**decision.waiting, **layout.unplaced} if layout.unplaced else decision.waiting
    if Ascending.of_snapshot(snapshot, waiting) is None:
        ids = sorted(waiting)
        if ids != list(waiting):
            waiting = dict(zip(ids, map(waiting.__getitem__, ids), strict=True))
    return Plan(
        round=snapshot.round,
        policy=policy.name,
        mechanism=mechanism.name,
        placements=tuple(sorted(layout.placements, key=_ID)),
        waiting=waiting,
        solver={**decision.solver, **layout.solver} if decision.solver else layout.solver,
    )


class uncollected:
    """No search for cyclic garbage meanwhile.

    A decision for thousands of nodes makes a hundred thousand values and hardly any cycle; looking
    for some again and again takes a third of its time.
    """

    __slots__ = ("_was_enabled",)

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._was_enabled:
            gc.enable()


def check_plan(snapshot: Snapshot, plan: Plan) -> None:
    """Raise PlanError unless ``plan`` keeps what we promise.

    Every job exactly once placed or waiting with a reason; every placement in the shape that was
    asked for (an elastic job's in one that it may have), on nodes of one GPU type, with at least
    the process memory (P7) and the GPU-proportional rate (P1); pinned jobs where they are; no node
    over its capacity.
    """
    jobs = standing(snapshot)
    checked = _Checked.of_snapshot(snapshot)
    turn = Totals.of_snapshot(snapshot).turn(plan.placements)
    if turn is None:
        ids = [placement.job_id for placement in plan.placements]
        raise PlanError(f"a job is placed twice: {ids}")
    checked.partition(snapshot, jobs, plan, turn)
    pinned = {
        status.job.job_id
        for status in jobs.holding  # what holds nothing is not pinned
        if is_pinned(status, snapshot)
    }
    for placement in plan.placements if pinned else ():
        if placement.job_id in pinned:
            _check_stays(jobs.by_id[placement.job_id], placement)
    for status, placement in checked.new(jobs, plan.placements, turn):
        if placement.job_id in pinned:
            continue
        why_not = objection(status, placement)
        if why_not is not None:
            raise PlanError(
                f"job {placement.job_id} is placed on {placement.gpu_layout}: {why_not}"
            )
        sort = checked.sort(status, placement)
        if sort is None or sort not in checked.sorts:
            there = as_placed(snapshot, status, placement)
            _check_shape(there, placement, checked.nodes)
            _check_floor(there, placement, checked)
            if sort is not None:
                checked.sorts[sort] = status.profile
        checked.keep(status, placement)
    if not pinned:
        checked.found_good(jobs, turn)
    _check_capacity(snapshot, plan, pinned)
    for job_id in sorted(pinned):
        if job_id in plan.waiting:
            raise PlanError(f"job {job_id} cannot be stopped, but the plan lets it wait")


class _Checked:
    """Placements that were found to keep what we promise to one job, and its floors.

    That depends on the job, its profile, the placement and the nodes alone, so the answer holds as
    long as these are the very same.
    """

    __slots__ = ("_floors", "_parted", "_stamp", "_turned", "nodes", "placements", "sorts")

    def __init__(self, snapshot: Snapshot) -> None:
        self.nodes = {node.name: node for node in snapshot.nodes}
        # By the id of the placement, which is kept so that its id stays its own; with the job and
        # the profile for which it is good.
        self.placements: dict[int, tuple[Job, Profile, Placement]] = {}
        self._floors: dict[object, tuple[Profile, Resources, float | None]] = {}
        # What was found good for jobs that are alike; profiles are kept so that their ids stay.
        self.sorts: dict[object, Profile] = {}
        # The jobs of the last plan of which every placement was looked at, and these placements.
        self._stamp: Stamp | None = None
        self._turned: Stamp | None = None
        # The jobs of the last plan that was found to place each, or to let it wait.
        self._parted: Stamp | None = None

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> _Checked:
        """What was checked on the nodes of ``snapshot``."""
        found = snapshot.of_nodes.get(cls)
        if not isinstance(found, cls):
            found = snapshot.of_nodes[cls] = cls(snapshot)
        most = 2 * len(snapshot.jobs) + _FORGOTTEN_AT_LEAST
        if len(found.placements) > most:
            found.placements.clear()
            found._stamp = None
        # Both keep profiles, of which there is a new one whenever something is learned of a job.
        if len(found._floors) > most:
            found._floors.clear()
        if len(found.sorts) > most:
            found.sorts.clear()
        return found

    def sort(self, status: JobStatus, placement: Placement) -> object:
        """All that shape and floor depend on, of a rigid job on one node; None of any other."""
        job, shares = status.job, placement.shares
        node = self.nodes.get(shares[0][0])
        if len(shares) > 1 or job.elasticity is not _RIGID or node is None:
            return None
        share, total = shares[0][1], node.total
        return (
            id(status.profile),
            job.gpus,
            job.nodes,
            job.gpu_types,
            job.min_mem_mib_per_node,
            job.tasks_per_node,
            job.wrapped,
            placement.gpu_type,
            node.gpu_type,
            (total.gpus, total.cpus, total.mem_mib),
            (share.gpus, share.cpus, share.mem_mib),
        )

    def partition(self, snapshot: Snapshot, jobs: Standing, plan: Plan, turn: Turn) -> None:
        """Raise PlanError unless each job is placed or waits.

        If only jobs that were there waited a round ago, it is those that wait since, and those that
        are gone, of which one could wait without being there.
        """
        of, changes = Ascending.of_snapshot(snapshot, plan.waiting), jobs.changes
        new: Set[int] = plan.waiting.keys()
        before, self._parted = self._parted, None
        follows = of is not None and of.earlier is before is not None
        if of is not None and follows and changes is not None and changes.earlier is before:
            new = {*of.entered, *plan.waiting.keys() & changes.gone}
        _check_partition(jobs.by_id, turn.by_job.keys(), plan.waiting.keys(), new)
        self._parted = None if of is None else jobs.stamp

    def new(
        self, jobs: Standing, placements: Sequence[Placement], turn: Turn
    ) -> list[tuple[JobStatus, Placement]]:
        """Those of ``placements`` that were not found good before, with the job of each."""
        changes, statuses, suspects = jobs.changes, jobs.by_id, placements
        since = turn.since(self._turned)
        if changes is not None and changes.earlier is self._stamp and since is not None:
            placed, again = turn.by_job, {one.job_id for one in since[0]}
            again.update([job_id for job_id in changes.renewed if job_id in placed])
            suspects = [placed[job_id] for job_id in sorted(again)]
        return [
            (statuses[placement.job_id], placement)
            for placement in suspects
            if not self._is_good(statuses[placement.job_id], placement)
        ]

    def _is_good(self, status: JobStatus, placement: Placement) -> bool:
        good = self.placements.get(id(placement))
        return good is not None and good[0] is status.job and good[1] is status.profile

    def found_good(self, jobs: Standing, turn: Turn) -> None:
        """All these placements were found good, or kept from then."""
        self._stamp, self._turned = jobs.stamp, turn.stamp

    def keep(self, status: JobStatus, placement: Placement) -> None:
        """Remember that ``placement`` was found good."""
        self.placements[id(placement)] = (status.job, status.profile, placement)

    def floor(self, status: JobStatus, name: str, gpus: int) -> Resources:
        """The proportional share of ``gpus`` GPUs on a node."""
        return self._floor(status, name, gpus)[1]

    def floor_rate(self, status: JobStatus, name: str, gpus: int) -> float | None:
        """The rate of a job that has just its proportional share of one node."""
        return self._floor(status, name, gpus)[2]

    def _floor(
        self, status: JobStatus, name: str, gpus: int
    ) -> tuple[Profile, Resources, float | None]:
        profile, job, node = status.profile, status.job, self.nodes[name]
        key = (
            id(profile),
            node.gpu_type,
            node.total.gpus,
            node.total.cpus,
            node.total.mem_mib,
            gpus,
            job.min_mem_mib_per_node,
            job.tasks_per_node,
        )
        found = self._floors.get(key)
        if found is None:
            share = proportional_share(status, node, gpus)
            rate = job_rate(profile, node.gpu_type, (share,))
            # The profile is kept so that its id stays its own.
            found = self._floors[key] = (profile, share, rate)
        return found


def _check_partition(
    statuses: Mapping[int, JobStatus], placed: Set[int], waiting: Set[int], new: Set[int]
) -> None:
    """``new`` are those of the waiting jobs of which it is not known that they are there."""
    known = statuses.keys() >= placed and statuses.keys() >= new
    if known and waiting.isdisjoint(placed) and len(placed) + len(waiting) == len(statuses):
        return
    both = sorted(placed & waiting)
    missing = sorted(statuses.keys() - placed - waiting)
    unknown = sorted((placed | waiting) - statuses.keys())
    raise PlanError(
        f"each job must be placed or wait: both {both}, neither {missing}, unknown {unknown}"
    )


def _check_stays(status: JobStatus, placement: Placement) -> None:
    now = held(status)
    if now is None or placement.gpu_layout != now.gpu_layout:
        raise PlanError(
            f"job {placement.job_id} cannot be moved, but is placed on {placement.gpu_layout}"
        )


def _check_shape(status: JobStatus, placement: Placement, nodes: Mapping[str, Node]) -> None:
    job = status.job
    per_node = {share.gpus for _, share in placement.shares}
    even = job.nodes is None or (len(placement.shares) == job.nodes and len(per_node) == 1)
    if placement.gpus != job.gpus or not even:
        raise PlanError(
            f"job {job.job_id} asked for {job.gpus} GPUs on {job.nodes or 'any'} nodes, "
            f"is placed on {placement.gpu_layout}"
        )
    for name in placement.nodes:
        node = nodes.get(name)
        if node is None:
            raise PlanError(f"job {job.job_id} is placed on {name}, which is not in the pool")
        if node.gpu_type != placement.gpu_type:
            raise PlanError(f"job {job.job_id}: {name} has no GPUs of type {placement.gpu_type}")
    if job.gpu_types and placement.gpu_type not in job.gpu_types:
        raise PlanError(f"job {job.job_id} may not run on GPUs of type {placement.gpu_type}")


def _check_floor(status: JobStatus, placement: Placement, checked: _Checked) -> None:
    job_id = placement.job_id
    need_mib = min_mem_mib(status)
    shares = [share for _, share in placement.shares]
    if any([share.mem_mib < need_mib for share in shares]):  # noqa: C419 - quicker
        raise PlanError(f"job {job_id} gets less than the {need_mib} MiB that its processes need")
    floors = [checked.floor(status, name, share.gpus) for name, share in placement.shares]
    if shares == floors:
        return
    rate = job_rate(status.profile, placement.gpu_type, shares)
    if len(floors) == 1:
        least = checked.floor_rate(status, placement.shares[0][0], shares[0].gpus)
    else:
        least = job_rate(status.profile, placement.gpu_type, floors)
    if rate is None or least is None or not status.job.wrapped:
        for share, floor in zip(shares, floors, strict=True):
            if share.cpus < floor.cpus or share.mem_mib < floor.mem_mib:
                raise PlanError(f"job {job_id} gets {share}, less than its share {floor}")
    elif rate < least * (1 - _RATE_TOLERANCE):
        raise PlanError(
            f"job {job_id} would run at {rate:g} samples/s, "
            f"with its GPU-proportional share at {least:g}"
        )


def _check_capacity(snapshot: Snapshot, plan: Plan, pinned: Set[int]) -> None:
    used = Totals.of_snapshot(snapshot).by_node(plan.placements)
    for node in snapshot.nodes:
        gpus, cpus, mem_mib = used.get(node.name, _NOTHING)
        most = node.capacity
        if gpus <= most.gpus and cpus <= most.cpus and mem_mib <= most.mem_mib:
            continue
        movable = [
            placement.job_id
            for placement in plan.placements
            if placement.job_id not in pinned and node.name in placement.nodes
        ]
        # A node may shrink under jobs that cannot leave it; nothing else may be put there then.
        if movable:
            total = Resources(gpus=gpus, cpus=cpus, mem_mib=mem_mib)
            raise PlanError(
                f"node {node.name} is overfull: {total} of {most}, "
                f"with jobs {movable} that need not be there"
            )
