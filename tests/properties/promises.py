"""What every plan must keep, as checks of one plan: shared by the tests of all policies."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from hypothesis import event

from slurm_synergy.cluster import Resize, Start, Stop
from slurm_synergy.core.model import Decision, Layout, Placement, Plan, Snapshot
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.snapshot import is_pinned
from slurm_synergy.reconcile import reconcile

__all__ = ["check_actions", "check_all_placed", "check_idle_gpus", "shuffled", "telling"]


@contextmanager
def telling(*names: str) -> Iterator[None]:
    """A check that fails inside tells for which policy and mechanism it did.

    To make a random pool costs ten times what a plan for it costs, so each is tried with all.
    """
    try:
        yield
    except Exception as err:
        err.add_note(f"with {' and '.join(names)}")
        raise


def check_all_placed(decision: Decision, layout: Layout) -> None:
    """Exactly the granted jobs are placed, on as many GPUs as were granted."""
    assert not layout.unplaced
    assert sorted(one.job_id for one in layout.placements) == sorted(
        grant.job_id for grant in decision.grants
    )
    granted = {grant.job_id: grant.configuration.gpus for grant in decision.grants}
    assert all(one.gpus == granted[one.job_id] for one in layout.placements)


def shuffled(snapshot: Snapshot, seed: int) -> Snapshot:
    """Equal to ``snapshot``, with every mapping in it filled in another order."""
    rng = random.Random(seed)

    def mixed(mapping: dict[str, object]) -> dict[str, object]:
        items = list(mapping.items())
        rng.shuffle(items)
        return dict(items)

    statuses = []
    for status in snapshot.jobs:
        rates = mixed(dict(status.profile.gpu_rate_per_gpu))
        lease = status.lease
        if lease is not None:
            lease = replace(lease, granted=mixed(dict(lease.granted)))
        statuses.append(
            replace(status, profile=replace(status.profile, gpu_rate_per_gpu=rates), lease=lease)
        )
    return replace(snapshot, jobs=tuple(statuses))


def check_idle_gpus(snapshot: Snapshot, plan: Plan) -> None:
    """No job that asks for a single GPU waits beside one that it could use."""
    used = {node.name: 0 for node in snapshot.nodes}
    memory = dict.fromkeys(used, 0)
    cores = dict.fromkeys(used, 0)
    for placement in plan.placements:
        for name, share in placement.shares:
            used[name] += share.gpus
            memory[name] += share.mem_mib
            cores[name] += share.cpus
    for status in snapshot.jobs:
        job = status.job
        if job.job_id not in plan.waiting or job.gpus > 1 or status.blocked:
            continue
        for node in snapshot.nodes:
            share = node.proportional(1)
            need = max(share.mem_mib, job.min_mem_mib_per_node, 4096)
            allowed = not job.gpu_types or node.gpu_type in job.gpu_types
            idle = (
                node.capacity.gpus > used[node.name]
                and node.capacity.mem_mib >= memory[node.name] + need
                and node.capacity.cpus >= cores[node.name] + max(share.cpus, 1)
            )
            assert not (allowed and idle), f"job {job.job_id} waits beside idle {node.name}"


def check_actions(snapshot: Snapshot, plan: Plan) -> None:
    """Actions never promise the same GPU, core or memory twice, and stop no pinned job."""
    free = _free(snapshot)
    actions = reconcile(snapshot, plan, free).actions
    statuses = {status.job.job_id: status for status in snapshot.jobs}
    leased = {
        job_id: status.lease.placement
        for job_id, status in statuses.items()
        if status.lease is not None
    }
    assert len({action.job_id for action in actions}) == len(actions)
    for action in actions:
        if isinstance(action, Stop):
            assert not is_pinned(statuses[action.job_id], snapshot)
        if isinstance(action, Start | Resize):
            leased[action.job_id] = action.placement
            event(type(action).__name__)
            _assert_fits(snapshot, leased)
        if isinstance(action, Start):
            for name, share in action.placement.shares:
                assert share.gpus <= free[name].gpus
                assert share.mem_mib <= free[name].mem_mib
                free[name] = Resources(
                    gpus=free[name].gpus - share.gpus,
                    cpus=free[name].cpus,
                    mem_mib=free[name].mem_mib - share.mem_mib,
                )


def _free(snapshot: Snapshot) -> dict[str, Resources]:
    free = {}
    for node in snapshot.nodes:
        held = Resources()
        for status in snapshot.jobs:
            if status.lease is not None:
                held = held + status.lease.placement.on(node.name)
        free[node.name] = node.total - held if node.capacity.gpus else Resources()
    return free


def _assert_fits(snapshot: Snapshot, leased: dict[int, Placement]) -> None:
    for node in snapshot.nodes:
        total = Resources()
        for placement in leased.values():
            total = total + placement.on(node.name)
        assert total.gpus <= node.total.gpus and total.cpus <= node.total.cpus
