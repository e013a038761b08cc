"""One round's decision, a pure function from a snapshot to a plan, and the check of promises."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from slurm_synergy.core.model import (
    Decision,
    JobStatus,
    Layout,
    Node,
    Placement,
    Plan,
    Snapshot,
)
from slurm_synergy.core.pipeline import job_rate, min_mem_mib, proportional_share
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.snapshot import held, is_pinned, status_of
from slurm_synergy.errors import PlanError

__all__ = ["Mechanism", "Policy", "check_plan", "decide"]

# Rates are products and quotients of floats; equal shares may differ in the last digits.
_RATE_TOLERANCE = 1e-9


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


def decide(snapshot: Snapshot, policy: Policy, mechanism: Mechanism) -> Plan:
    """The plan of this round: the same for the same snapshot, whoever asks and when."""
    with _uncollected():
        decision = policy.choose(snapshot)
        layout = mechanism.place(snapshot, decision)
    waiting = {**decision.waiting, **layout.unplaced}
    return Plan(
        round=snapshot.round,
        policy=policy.name,
        mechanism=mechanism.name,
        placements=tuple(sorted(layout.placements, key=lambda one: one.job_id)),
        waiting={job_id: waiting[job_id] for job_id in sorted(waiting)},
        solver=layout.solver,
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """No search for cyclic garbage meanwhile.

    A decision for thousands of nodes makes a hundred thousand values and hardly any cycle; looking
    for some again and again takes a third of its time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def check_plan(snapshot: Snapshot, plan: Plan) -> None:
    """Raise PlanError unless ``plan`` keeps what we promise.

    Every job exactly once placed or waiting with a reason; every placement in the shape that was
    asked for, on nodes of one GPU type, with at least the process memory (P7) and the
    GPU-proportional rate (P1); pinned jobs where they are; no node over its capacity.
    """
    statuses = status_of(snapshot)
    nodes = {node.name: node for node in snapshot.nodes}
    _check_partition(statuses, plan)
    for placement in plan.placements:
        status = statuses[placement.job_id]
        if is_pinned(status, snapshot):
            _check_stays(status, placement)
        else:
            _check_shape(status, placement, nodes)
            _check_floor(status, placement, nodes)
    _check_capacity(snapshot, plan, statuses)
    for job_id, status in statuses.items():
        if job_id in plan.waiting and is_pinned(status, snapshot):
            raise PlanError(f"job {job_id} cannot be stopped, but the plan lets it wait")


def _check_partition(statuses: Mapping[int, JobStatus], plan: Plan) -> None:
    placed = [placement.job_id for placement in plan.placements]
    if len(set(placed)) != len(placed):
        raise PlanError(f"a job is placed twice: {placed}")
    both = sorted(set(placed) & set(plan.waiting))
    missing = sorted(set(statuses) - set(placed) - set(plan.waiting))
    unknown = sorted((set(placed) | set(plan.waiting)) - set(statuses))
    if both or missing or unknown:
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


def _check_floor(status: JobStatus, placement: Placement, nodes: Mapping[str, Node]) -> None:
    job_id = placement.job_id
    need_mib = min_mem_mib(status)
    floors = [
        proportional_share(status, nodes[name], share.gpus) for name, share in placement.shares
    ]
    shares = [share for _, share in placement.shares]
    if any(share.mem_mib < need_mib for share in shares):
        raise PlanError(f"job {job_id} gets less than the {need_mib} MiB that its processes need")
    rate = job_rate(status.profile, placement.gpu_type, shares)
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


def _check_capacity(snapshot: Snapshot, plan: Plan, statuses: Mapping[int, JobStatus]) -> None:
    used: dict[str, Resources] = {}
    movable: dict[str, list[int]] = {}
    for placement in plan.placements:
        for name, share in placement.shares:
            used[name] = used.get(name, Resources()) + share
            if not is_pinned(statuses[placement.job_id], snapshot):
                movable.setdefault(name, []).append(placement.job_id)
    for node in snapshot.nodes:
        total = used.get(node.name, Resources())
        # A node may shrink under jobs that cannot leave it; nothing else may be put there then.
        if not total.fits_in(node.capacity) and movable.get(node.name):
            raise PlanError(
                f"node {node.name} is overfull: {total} of {node.capacity}, "
                f"with jobs {movable[node.name]} that need not be there"
            )
