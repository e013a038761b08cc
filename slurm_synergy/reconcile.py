"""From what is and what shall be to what is done now. Pure.

A plan may need several rounds to become true: a moved job is stopped now and started once its new
GPUs are free. Nothing here promises the same core, GPU or MiB twice at any moment in between.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter

from slurm_synergy.cluster import Action, Hold, Renew, Resize, Start, Stop
from slurm_synergy.core.elastic import as_placed
from slurm_synergy.core.model import (
    Enforcement,
    JobPhase,
    JobStatus,
    Placement,
    Plan,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.pipeline import (
    job_rate,
    min_mem_mib,
    proportional_rate,
    proportional_share,
)
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.snapshot import Stamp, is_pinned, standing
from slurm_synergy.core.totals import Totals, Turn
from slurm_synergy.core.values import maker, quick
from slurm_synergy.settling import granted_mib, settle, takes_cores

__all__ = ["Reconciled", "reconcile"]

_ID = attrgetter("job_id")
_NOTHING = (0, 0, 0)
_START = maker(Start)


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """Actions in the order in which to carry them out.

    ``deferred`` names the jobs that the plan places but that cannot start yet, with the reason;
    they are among the Holds.
    """

    actions: tuple[Action, ...]
    deferred: Mapping[int, Reason] = field(default_factory=dict)


def reconcile(snapshot: Snapshot, plan: Plan, free: Mapping[str, Resources]) -> Reconciled:
    """Actions that bring the cluster closer to ``plan``.

    ``free`` is what the cluster itself would give a new job per node now. Order: stops, resizes
    that give up cores, starts, resizes that take cores, renewals, holds. A job that is held by us
    already gets a Hold only with the reason why it cannot start yet.
    """
    if not standing(snapshot).holding and snapshot.enforcement is Enforcement.SHARED:
        starts = _starts_at_once(snapshot, plan, free)
        if starts is not None:
            unheld = standing(snapshot).unheld
            holds = _holds(snapshot, set(map(_ID, starts))) if unheld else ()
            return Reconciled(actions=(*starts, *holds))
    run = _Round(snapshot, plan, free)
    for status in standing(snapshot).holding:
        if status.phase is JobPhase.RUNNING:
            run.settle_running(status)
    stops = run.stop_count
    run.settle_pending_jobs()
    if run.stop_count > stops:
        # A job stopped for its memory keeps its cores a little longer: starts are chosen anew.
        run.settle_pending_jobs()
    run.grow()
    return run.result()


def _holds(snapshot: Snapshot, placed: Container[int]) -> list[Hold]:
    """For those that are not ``placed``, hold nothing, and are not shown as held by us."""
    return [Hold(job_id=one) for one in standing(snapshot).unheld if one not in placed]


def _starts_at_once(
    snapshot: Snapshot, plan: Plan, free: Mapping[str, Resources]
) -> list[Start] | None:
    """All that the plan places, by id, where nobody holds anything and there is enough for all.

    Then each finds what it needs, whatever the order. None where there is not.
    """
    totals = Totals.of_snapshot(snapshot)
    for name, (gpus, cpus, mem_mib) in totals.by_node(plan.placements).items():
        there = free.get(name)
        if there is None or gpus > there.gpus or mem_mib > there.mem_mib:
            return None
        node = snapshot.node(name)
        if cpus > (node.capacity if node.capacity.gpus else node.total).cpus:
            return None
    turn = totals.turn(plan.placements)
    return None if turn is None else _Starts.of_snapshot(snapshot).of(turn)


class _Starts:
    """The starts of the last round; kept with the nodes, so that they need not be made again."""

    __slots__ = ("_made", "_turned")

    def __init__(self) -> None:
        # By job, mostly ascending, and the placements for which they were made.
        self._made: dict[int, Start] = {}
        self._turned: Stamp | None = None

    @classmethod
    def of_snapshot(cls, snapshot: Snapshot) -> _Starts:
        """What there is for the nodes of ``snapshot``."""
        found = snapshot.of_nodes.get(cls)
        if not isinstance(found, cls):
            found = snapshot.of_nodes[cls] = cls()
        return found

    def of(self, turn: Turn) -> list[Start]:
        """The start of each placement, by id."""
        since, made = turn.since(self._turned), self._made
        new: Iterable[Placement] = turn.by_job.values()
        if since is None:
            made.clear()
        else:
            new = since[0]
            for placement in since[1]:
                if placement.job_id not in turn.by_job:
                    del made[placement.job_id]
        for placement in new:
            made[placement.job_id] = _START(job_id=placement.job_id, placement=placement)
        self._turned = turn.stamp
        return list(map(made.__getitem__, sorted(made)))


class _Round:
    """The bookkeeping of one reconciliation."""

    def __init__(self, snapshot: Snapshot, plan: Plan, free: Mapping[str, Resources]) -> None:
        self._snapshot = snapshot
        self._plan = {placement.job_id: placement for placement in plan.placements}
        self._waiting = plan.waiting
        self._shares_cores = snapshot.enforcement is Enforcement.SHARED
        self._nodes = {node.name: node for node in snapshot.nodes}
        self._jobs = standing(snapshot)
        self._statuses = self._jobs.by_id
        self._observed_free = free
        # GPUs, CPUs and MiB free on each node.
        self._free: dict[str, list[int]] = {}
        self._cores: dict[str, int] = {}
        self._stops: dict[int, Stop] = {}
        self._shrinks: dict[int, Resize] = {}
        self._starts: list[Start] = []
        self._grows: dict[int, Resize] = {}
        self._renews: dict[int, Renew] = {}
        self._holds: list[Hold] = []
        self._deferred: dict[int, Reason] = {}

    @property
    def stop_count(self) -> int:
        """Stops so far."""
        return len(self._stops)

    def result(self) -> Reconciled:
        """All actions in order."""
        groups: tuple[Iterable[Action], ...] = (
            self._stops.values(),
            self._shrinks.values(),
            self._starts,
            self._grows.values(),
            self._renews.values(),
            self._holds,
        )
        actions: list[Action] = []
        for group in groups:
            actions += sorted(group, key=_ID)
        return Reconciled(
            actions=tuple(actions),
            deferred={job: self._deferred[job] for job in sorted(self._deferred)},
        )

    # running jobs ----------------------------------------------------------------------------

    def settle_running(self, status: JobStatus) -> None:
        """Stop, resize or renew one running job."""
        job_id = status.job.job_id
        action = settle(self._snapshot, status, self._plan.get(job_id), self._waiting.get(job_id))
        if isinstance(action, Stop):
            self._stops[job_id] = action
        elif isinstance(action, Renew):
            self._renews[job_id] = action
        elif takes_cores(status, action.placement):
            self._grows[job_id] = action
        else:
            self._shrinks[job_id] = action

    def _stop(self, job_id: int, code: ReasonCode, text: str) -> None:
        self._renews.pop(job_id, None)
        self._shrinks.pop(job_id, None)
        self._grows.pop(job_id, None)
        self._stops[job_id] = Stop(job_id=job_id, reason=Reason(code=code, text=text))

    # cores -----------------------------------------------------------------------------------

    def _book_cores(self) -> None:
        """Cores free on each node after the shrinks: what stopping jobs hold is not free yet."""
        self._cores = {name: node.total.cpus for name, node in self._nodes.items()}
        for node in self._nodes.values():
            if node.capacity.gpus:
                self._cores[node.name] = node.capacity.cpus
        for status in self._jobs.holding:
            assert status.lease is not None
            shrunk = self._shrinks.get(status.job.job_id)
            self._take_cores(shrunk.placement if shrunk else status.lease.placement)

    def _take_cores(self, placement: Placement, sign: int = 1) -> None:
        for name, share in placement.shares:
            self._cores[name] = self._cores.get(name, 0) - sign * share.cpus

    def _cores_fit(self, placement: Placement) -> bool:
        return all(share.cpus <= self._cores.get(name, 0) for name, share in placement.shares)

    def grow(self) -> None:
        """Let resizes that take cores happen where the cores are free by now."""
        for job_id, resize in list(self._grows.items()):
            lease = self._statuses[job_id].lease
            assert lease is not None
            self._take_cores(lease.placement, -1)
            if self._cores_fit(resize.placement):
                self._take_cores(resize.placement)
            else:
                self._take_cores(lease.placement)
                del self._grows[job_id]
                self._renews[job_id] = Renew(job_id=job_id)

    # pending jobs ----------------------------------------------------------------------------

    def settle_pending_jobs(self) -> None:
        """Start or hold every pending job, from what is free before any of them starts."""
        self._free = {
            name: [free.gpus, free.cpus, free.mem_mib] for name, free in self._observed_free.items()
        }
        self._starts, self._deferred = [], {}
        self._holds = _holds(self._snapshot, self._plan)
        self._book_cores()
        for job_id, planned in self._plan.items():
            status = self._statuses[job_id]
            if status.lease is None and not self._start_if_free(planned):
                self._settle_planned(status, planned)

    def _start_if_free(self, planned: Placement) -> bool:
        """Start a job if all that it shall have is free; whether it was."""
        free, cores = self._free, self._cores
        for name, share in planned.shares:
            gpus, cpus, mem_mib = free.get(name, _NOTHING)
            if share.gpus > gpus or share.mem_mib > mem_mib:
                return False
            if share.cpus > cores.get(name, 0):
                return False
            if not self._shares_cores and self._asked_cpus(name, share) > cpus:
                return False
        self._start(planned)
        return True

    def _settle_planned(self, status: JobStatus, planned: Placement) -> None:
        """Start a pending job that the plan places with less memory if it must be, or hold it."""
        busy = self._busy(planned)
        if busy is None:
            fitted = self._fit_memory(status, planned)
            if fitted is not None:
                self._start(fitted)
                return
            self._make_memory(planned)
            busy = "GPUs are free, but their nodes' memory is still granted to others"
        self._holds.append(Hold(job_id=status.job.job_id))
        self._deferred[status.job.job_id] = Reason(code=ReasonCode.GPUS_BUSY, text=busy)

    def _busy(self, planned: Placement) -> str | None:
        """What of GPUs and cores is not free yet, in words."""
        for name, share in planned.shares:
            gpus, cpus, _ = self._free.get(name, _NOTHING)
            if share.gpus > gpus:
                return f"placed on {name}, where {gpus} of {share.gpus} GPUs are free so far"
            if not self._shares_cores:
                asked = self._asked_cpus(name, share)
                if asked > cpus:
                    return f"placed on {name}, where {cpus} of {asked} CPUs are free so far"
            if share.cpus > self._cores.get(name, 0):
                return f"placed on {name}, where a stopping job still holds cores"
        return None

    def _asked_cpus(self, name: str, share: Resources) -> int:
        """CPUs that the cluster has to set aside for the job alone, where it does so."""
        if self._snapshot.enforcement is Enforcement.REQUEUE:
            return share.cpus
        return min(share.cpus, self._nodes[name].proportional(share.gpus).cpus)

    def _fit_memory(self, status: JobStatus, planned: Placement) -> Placement | None:
        """``planned`` with no more memory than is free, unless that costs rate or safety."""
        shares = tuple(
            (name, replace(share, mem_mib=min(share.mem_mib, self._free[name][2])))
            for name, share in planned.shares
        )
        parts = [(self._nodes[name], share.gpus) for name, share in shares]
        status = as_placed(self._snapshot, status, planned)
        if any(share.mem_mib < min_mem_mib(status) for _, share in shares):
            return None
        rate = job_rate(status.profile, planned.gpu_type, [share for _, share in shares])
        least = proportional_rate(status, parts)
        if rate is None or least is None or not status.job.wrapped:
            floors = [proportional_share(status, node, gpus) for node, gpus in parts]
            pairs = zip(shares, floors, strict=True)
            keeps = all(share.mem_mib >= floor.mem_mib for (_, share), floor in pairs)
        else:
            keeps = rate >= least
        return replace(planned, shares=shares) if keeps else None

    def _start(self, placement: Placement) -> None:
        cores = self._cores
        for name, share in placement.shares:
            free, cpus = self._free[name], share.cpus
            free[0] -= share.gpus
            free[1] = free[1] - cpus if free[1] > cpus else 0
            free[2] -= share.mem_mib
            cores[name] = cores.get(name, 0) - cpus
        self._starts.append(_START(job_id=placement.job_id, placement=placement))

    def _make_memory(self, planned: Placement) -> None:
        """Restart running jobs that were granted more memory than they are to keep.

        The cluster keeps what it granted at a job's start, although the lease gave it back.
        """
        for name, share in planned.shares:
            lack = share.mem_mib - self._free[name][2] - self._coming(name)
            excess = sorted(self._excess(name), reverse=True)
            if lack > sum(mib for mib, _ in excess):
                continue
            for mib, job_id in excess:
                if lack <= 0:
                    break
                lack -= mib
                self._stop(
                    job_id,
                    ReasonCode.RESIZED,
                    f"restarts to give back {mib} MiB on {name} that job {planned.job_id} needs",
                )

    def _coming(self, node: str) -> int:
        """MiB that jobs on their way out will free on ``node``."""
        leaving = (JobPhase.STOPPING, JobPhase.ENDING)
        coming = 0
        for status in self._jobs.holding:
            job_id = status.job.job_id
            if status.lease is None or node not in status.lease.placement.nodes:
                continue
            if status.phase in leaving or job_id in self._stops:
                again = self._plan.get(job_id)
                coming += granted_mib(status, node) - (again.on(node).mem_mib if again else 0)
        return coming

    def _excess(self, node: str) -> list[tuple[int, int]]:
        """(MiB granted beyond the plan, job id) of the jobs that may be restarted for it."""
        found = []
        for status in self._jobs.holding:
            job_id = status.job.job_id
            planned = self._plan.get(job_id)
            if (
                status.phase is not JobPhase.RUNNING
                or planned is None
                or job_id in self._stops
                or is_pinned(status, self._snapshot)
                or status.lease is None
                or node not in status.lease.placement.nodes
            ):
                continue
            mib = granted_mib(status, node) - planned.on(node).mem_mib
            if mib > 0:
                found.append((mib, job_id))
        return found
