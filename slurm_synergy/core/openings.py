"""What would let a waiting job start: a smaller request, other GPUs, less memory, or others' ends.

All of it is looked up beside a plan that is made: jobs of the plan are counted with their floors
(promises P1 and P7), as policies count them, and stay where the plan has them.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from slurm_synergy.core.elastic import as_placed
from slurm_synergy.core.model import JobStatus, Node, Placement, Plan, Snapshot
from slurm_synergy.core.pipeline import floor_share, job_rate
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.snapshot import is_frozen, status_of

__all__ = ["End", "Grants", "Openings", "ends"]

Grants = Callable[[Snapshot], bool]
"""Whether a policy would grant a certain job in that snapshot."""

# How many smaller requests are put to the policy at most.
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """When a running job ends, in epoch seconds: as expected from its work, and by its limit.

    Infinite where that is not known.
    """

    job_id: int
    expected_s: float
    latest_s: float

    @property
    def soonest_s(self) -> float:
        """The better guess of the two."""
        return min(self.expected_s, self.latest_s)


def ends(snapshot: Snapshot, plan: Plan) -> tuple[End, ...]:
    """The ends of the jobs that ``plan`` places, the soonest first, those of unknown end last.

    One that is to start now is taken to run from now on.
    """
    statuses, found = status_of(snapshot), []
    for placement in plan.placements:
        status = as_placed(snapshot, statuses[placement.job_id], placement)
        job = status.job
        expected_s = latest_s = math.inf
        shares = [share for _, share in placement.shares]
        rate = job_rate(status.profile, placement.gpu_type, shares)
        if rate and job.total_samples is not None:
            left = max(job.total_samples - status.done_samples, 0.0)
            expected_s = snapshot.now_s + left / rate
        if job.time_limit_s is not None:
            ran_s = status.attained_service_gpu_s / job.gpus
            latest_s = snapshot.now_s + max(job.time_limit_s - ran_s, 0.0)
        found.append(End(job_id=job.job_id, expected_s=expected_s, latest_s=latest_s))
    return tuple(sorted(found, key=lambda end: (end.soonest_s, end.job_id)))


class Openings:
    """Where ``status``, a job that ``plan`` leaves waiting, could be beside the plan's jobs.

    ``grants`` tells whether the policy would grant the job in a changed snapshot. What is looked up
    here is nearly always granted, but a policy walks its queue before anything is placed, so only
    its own word is certain.
    """

    def __init__(
        self, snapshot: Snapshot, plan: Plan, status: JobStatus, grants: Grants = lambda _: True
    ) -> None:
        self._snapshot, self._plan, self._status = snapshot, plan, status
        self._grants = grants
        self._nodes = {node.name: node for node in snapshot.nodes}
        statuses = status_of(snapshot)
        self._taken = {
            placement.job_id: self._floors(
                as_placed(snapshot, statuses[placement.job_id], placement), placement
            )
            for placement in plan.placements
        }
        self._free = {
            node.name: [node.capacity.gpus, node.capacity.cpus, node.capacity.mem_mib]
            for node in snapshot.nodes
        }
        for parts in self._taken.values():
            self._book(self._free, parts, -1)
        self._rooms: dict[str, dict[str, int]] = {}

    def _floors(self, status: JobStatus, placement: Placement) -> Mapping[str, Resources]:
        frozen = is_frozen(status, self._snapshot)
        parts = {}
        for name, share in placement.shares:
            node = self._nodes.get(name)
            if node is None:
                continue
            least = share if frozen else floor_share(status, node, share.gpus)
            parts[name] = Resources(
                gpus=share.gpus,
                cpus=min(least.cpus, share.cpus),
                mem_mib=min(least.mem_mib, share.mem_mib),
            )
        return parts

    @staticmethod
    def _book(free: Mapping[str, list[int]], parts: Mapping[str, Resources], sign: int) -> None:
        for name, part in parts.items():
            row = free[name]
            row[0] += sign * part.gpus
            row[1] += sign * part.cpus
            row[2] += sign * part.mem_mib

    def free_gpus(self) -> Mapping[str, int]:
        """GPUs that the plan leaves free, by node; nodes without any are left out."""
        return {name: row[0] for name, row in sorted(self._free.items()) if row[0] > 0}

    def smaller(self) -> tuple[int, int] | None:
        """The largest smaller request, as (GPUs in all, nodes), that would fit now; else None."""
        left = _TRIES
        for gpus, nodes in self._smaller_shapes():
            changed = _reshaped(self._status, gpus, nodes)
            if left and self._fits(changed, self._free):
                if self._grants(self._with(changed)):
                    return gpus, nodes
                left -= 1
        return None

    def _with(self, changed: JobStatus) -> Snapshot:
        me = changed.job.job_id
        jobs = [changed if one.job.job_id == me else one for one in self._snapshot.jobs]
        return replace(self._snapshot, jobs=tuple(jobs))

    def smaller_at_all(self) -> tuple[int, int] | None:
        """As ``smaller``, in a pool that is empty and has every node up."""
        empty = {
            node.name: [node.total.gpus, node.total.cpus, node.total.mem_mib]
            for node in self._snapshot.nodes
        }
        for gpus, nodes in self._smaller_shapes():
            if self._fits(_reshaped(self._status, gpus, nodes), empty):
                return gpus, nodes
        return None

    def _smaller_shapes(self) -> list[tuple[int, int]]:
        job = self._status.job
        nodes = job.nodes or 1
        each = job.gpus // nodes
        shapes = {(nodes * fewer, nodes) for fewer in range(1, each)}
        shapes |= {(each * fewer, fewer) for fewer in range(1, nodes)}
        return sorted(shapes, key=lambda shape: (-shape[0], shape[1]))

    def other_types(self) -> tuple[str, ...]:
        """GPU types that the job excludes and on which it would fit now."""
        job = self._status.job
        if not job.gpu_types:
            return ()
        known = {node.gpu_type for node in self._snapshot.nodes} - set(job.gpu_types)
        return tuple(kind for kind in sorted(known) if self._fits_on(kind))

    def _fits_on(self, kind: str) -> bool:
        job = self._status.job
        alone = replace(self._status, job=replace(job, gpu_types=(kind,)))
        both = replace(self._status, job=replace(job, gpu_types=(*job.gpu_types, kind)))
        return self._fits(alone, self._free) and self._grants(self._with(both))

    def most_mem_mib(self) -> int | None:
        """MiB per node that the job could have beside its GPUs and cores now; None without GPUs."""
        job = self._status.job
        bare = replace(self._status, job=replace(job, min_mem_mib_per_node=0))
        best: int | None = None
        for _, nodes in self._of_types(job.gpu_types):
            per_node = job.gpus // (job.nodes or 1)
            found = sorted(
                (
                    self._free[node.name][2]
                    for node in nodes
                    if self._free[node.name][0] >= per_node
                    and self._free[node.name][1] >= floor_share(bare, node, per_node).cpus
                ),
                reverse=True,
            )
            count = job.nodes or 1
            if len(found) >= count and (best is None or found[count - 1] > best):
                best = found[count - 1]
        return best

    def after_ends(self) -> tuple[End, ...] | None:
        """The running jobs after whose ends the job would fit, in that order; None if never.

        If the end of a single job is enough, that one alone is named, the soonest of them. None
        is named when the job would fit now.
        """
        if self._places_after(()):
            return ()
        order = ends(self._snapshot, self._plan)
        for end in order:
            if end.soonest_s < math.inf and self._places_after((end,)):
                return (end,)
        # The more jobs have ended the more fits: search for the shortest list that is enough.
        enough = bisect.bisect_left(
            range(1, len(order) + 1),
            True,
            key=lambda count: bool(self._places_after(order[:count])),
        )
        if enough == len(order):
            return None
        gone = order[: enough + 1]
        used = self._places_after(gone)
        return tuple(end for end in gone if used & self._taken[end.job_id].keys())

    def is_granted_after(self, gone: Sequence[End], ahead: Collection[int]) -> bool:
        """Whether the policy grants the job once ``gone`` have ended and nobody waits ahead."""
        left_out = {end.job_id for end in gone} | set(ahead)
        jobs = [one for one in self._snapshot.jobs if one.job.job_id not in left_out]
        return self._grants(replace(self._snapshot, jobs=tuple(jobs)))

    def _places_after(self, gone: Sequence[End]) -> set[str]:
        """Nodes on which the job would fit once those jobs have ended, enough of them; else empty.

        Only the nodes of ended jobs are looked at anew, so a long list of jobs costs little.
        """
        job = self._status.job
        changed = {name for end in gone for name in self._taken[end.job_id]}
        free = {name: list(self._free[name]) for name in changed}
        for end in gone:
            self._book(free, self._taken[end.job_id], 1)
        for kind, nodes in self._of_types(job.gpu_types):
            before = self._room_now(kind, nodes)
            after = {
                node.name: self._room_on(node, free[node.name])
                for node in nodes
                if node.name in changed
            }
            found = before | after
            wanted = job.gpus if job.nodes is None else job.nodes
            if sum(found.values()) >= wanted:
                already = sorted(name for name, room in before.items() if room)
                fresh = sorted(name for name, room in after.items() if room > before[name])
                if job.nodes is not None:
                    already = already[:wanted]
                    fresh = fresh[: wanted - len(already)]
                return {*already, *fresh}
        return set()

    def _room_now(self, kind: str, nodes: Sequence[Node]) -> dict[str, int]:
        if kind not in self._rooms:
            self._rooms[kind] = {
                node.name: self._room_on(node, self._free[node.name]) for node in nodes
            }
        return self._rooms[kind]

    def _room_on(self, node: Node, free: Sequence[int]) -> int:
        """1 where a node's part of the job fits, else 0; of a job free to split, its GPUs there."""
        job = self._status.job
        if job.nodes is None:
            return _most_gpus(self._status, node, free)
        return int(_has(free, self._status, node, job.gpus // job.nodes))

    def _of_types(self, allowed: tuple[str, ...]) -> Iterator[tuple[str, list[Node]]]:
        by_type: dict[str, list[Node]] = {}
        for node in self._snapshot.nodes:
            if not allowed or node.gpu_type in allowed:
                by_type.setdefault(node.gpu_type, []).append(node)
        yield from sorted(by_type.items())

    def _fits(self, status: JobStatus, free: Mapping[str, Sequence[int]]) -> bool:
        """Whether there is a place for the job in ``free``, with its floor on every node."""
        job = status.job
        for _, nodes in self._of_types(job.gpu_types):
            if job.nodes is None:
                given = sum(_most_gpus(status, node, free[node.name]) for node in nodes)
                if given >= job.gpus:
                    return True
                continue
            each = job.gpus // job.nodes
            fitting = [node for node in nodes if _has(free[node.name], status, node, each)]
            if len(fitting) >= job.nodes:
                return True
        return False


def _has(free: Sequence[int], status: JobStatus, node: Node, gpus: int) -> bool:
    if free[0] < gpus or gpus > node.total.gpus:
        return False
    least = floor_share(status, node, gpus)
    return free[1] >= least.cpus and free[2] >= least.mem_mib


def _most_gpus(status: JobStatus, node: Node, free: Sequence[int]) -> int:
    return next((gpus for gpus in range(free[0], 0, -1) if _has(free, status, node, gpus)), 0)


def _reshaped(status: JobStatus, gpus: int, nodes: int) -> JobStatus:
    """The job with another number of GPUs and nodes; one task per GPU stays one per GPU."""
    job = status.job
    per_gpu = job.tasks_per_node > 1
    return replace(
        status,
        job=replace(
            job,
            gpus=gpus,
            nodes=None if job.nodes is None else nodes,
            tasks_per_node=gpus // nodes if per_gpu else job.tasks_per_node,
        ),
    )
