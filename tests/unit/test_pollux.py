"""The rival Pollux: what its search is told, and what becomes of what it finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import (
    GIB,
    elastic,
    job,
    node,
    pending,
    placement,
    res,
    running,
    scaling,
    snapshot,
)

from slurm_synergy.core.batching import with_batches
from slurm_synergy.core.decide import begun, check_plan, decide
from slurm_synergy.core.model import (
    Configuration,
    Decision,
    Grant,
    JobPhase,
    Node,
    Plan,
    Profile,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.node_parts import NodeParts
from slurm_synergy.core.one_speed import OneSpeed, Reach, one_learner, relative
from slurm_synergy.core.room import GpuLayout
from slurm_synergy.core.scaling import BatchSize, Scaling
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES, policy_of_plan
from slurm_synergy.policies.pollux import POLLUX, Pollux
from slurm_synergy.policies.pollux_grants import shaped


def pool(v100: int = 2, a100: int = 1) -> list[Node]:
    """Nodes of 4 V100 and of 8 A100 GPUs, 4 cores and 60 GiB to each GPU."""
    return [
        *(node(f"v100-{at}", "v100", 4, 16, 240 * GIB) for at in range(v100)),
        *(node(f"a100-{at}", "a100", 8, 32, 480 * GIB) for at in range(a100)),
    ]


def known(belief: Scaling | None = None, **more: Any) -> Profile:
    return replace(Profile(), scaling=belief or scaling(), **more)


def seen(gpus: int, noise: float = 1e3, sync_s: float = 0.0001) -> Profile:
    """A job that learns fast with large batches, and ran on that many V100 before."""
    return known(scaling(explored={"v100": gpus}, noise=noise, sync_s=sync_s))


def holds(job_id: int, kind: str, gpus: int, name: str, batch: BatchSize | None = None) -> Any:
    where = placement(job_id, kind, **{name: res(gpus, 4 * gpus, 60 * GIB * gpus)})
    return replace(where, batch=batch)


def gpus(decision: Decision) -> dict[int, int]:
    return {one.job_id: one.configuration.gpus for one in decision.grants}


def planned(shot: Snapshot, policy: Pollux = POLLUX) -> Plan:
    plan = decide(shot, policy, MECHANISMS["tune"])
    check_plan(shot, plan)
    return plan


def rates_of(shot: Snapshot, most: int = 16, fair: int = 1, size: int = 4) -> list[Any]:
    reach = Reach(most=most, fair=fair, size=size, total=16)
    return OneSpeed.of_snapshot(shot).rates([(status, reach) for status in shot.jobs])


# what the search is told ----------------------------------------------------------------------


def test_unlike_nodes_are_cut_into_parts_of_four_gpus_and_like_ones_are_not() -> None:
    unlike = NodeParts(snapshot(pool(), []).nodes, {"a100-0": 2}, 4)
    assert unlike.names == ("a100-0", "a100-0", "v100-0", "v100-1")
    assert unlike.capacity.tolist() == [4, 2, 4, 4] and unlike.host.tolist() == [0, 0, 1, 2]
    alike = NodeParts(snapshot(pool(v100=0, a100=2), []).nodes, {}, 4)
    assert alike.capacity.tolist() == [8, 8] and alike.host.tolist() == [0, 1]


def test_what_jobs_hold_is_put_on_as_few_parts_as_there_can_be() -> None:
    parts = NodeParts(snapshot(pool(v100=1), []).nodes, {}, 4)
    held = [holds(at, "a100", count, "a100-0") for at, count in ((1, 1), (2, 4), (3, 3))]
    assert parts.shares([*held, None]).tolist() == [[0, 1, 0], [4, 0, 0], [0, 3, 0], [0, 0, 0]]
    assert parts.shares([holds(1, "a100", 6, "a100-0")]).tolist() == [[4, 2, 0]]
    assert parts.by_node(np.array([4, 1, 2])) == [(parts.hosts[0], 5), (parts.hosts[1], 2)]


def test_speed_is_relative_to_a_fair_share() -> None:
    rates = np.array([[0.0, 10, 18, 24, 28], [0.0, 0, 16, 21, 24]])
    assert relative(rates, 2, 4)[0].tolist() == pytest.approx([0, 10 / 18, 1, 24 / 18, 28 / 18])
    # A fair share that is larger than a node is one of several.
    assert relative(rates, 3, 2)[1, 3] == pytest.approx(1.0)
    # One on which the job cannot run is replaced by the best below it.
    assert relative(np.array([[0.0, 10, 0], [0.0, 0, 0]]), 2, 4)[0, 1] == pytest.approx(1.0)


def test_a_job_has_one_speed_whatever_the_type() -> None:
    """That of the type where it ran on most GPUs, or of the first by name."""
    status = pending(elastic(), known(scaling(explored={"v100": 4})))
    learner = one_learner(status)
    assert learner is not None and learner.model == status.profile.scaling.speeds["v100"].model  # type: ignore[union-attr]
    fresh = one_learner(pending(elastic(), known()))
    assert fresh is not None and fresh.model == scaling().speeds["a100"].model


def test_a_job_that_is_split_is_as_fast_as_its_whole_copies() -> None:
    whole, split = seen(4).scaling, seen(4).scaling
    assert whole is not None and split is not None
    speeds = {kind: replace(one, gpus_per_replica=4) for kind, one in split.speeds.items()}
    told = known(replace(split, speeds=speeds))
    shot = snapshot(pool(), [pending(elastic(1, most=4), known(whole)), pending(elastic(2), told)])
    first, second = rates_of(shot, size=8)
    assert not second[:, :4].any() and second[0, 4] == second[0, 7] == first[0, 1] > 0
    assert second[0, 8] > second[0, 7]


def test_scaling_that_is_not_known_is_perfect() -> None:
    shot = snapshot(pool(), [pending(elastic()), pending(job(2, 2))])
    for rates in rates_of(shot):
        assert rates[:, 16].tolist() == [16.0, 16.0]
    status = pending(elastic(most=8), seen(4, sync_s=0.5))
    (rates,) = rates_of(snapshot(pool(), [status]))
    assert rates[0, 4] < 4 * rates[0, 1] and rates[1, 4] < rates[0, 4]
    assert not rates[:, 9:].any()  # more than the job may have


def test_speeds_are_asked_for_where_a_job_may_get_to_only() -> None:
    """On its fair share too, by which they are measured; once as long as nothing changes."""
    shot = snapshot(pool(), [pending(elastic(1, most=8), seen(4)), pending(elastic(2), seen(4))])
    whole, _ = rates_of(shot)
    near, _ = rates_of(shot, most=2, fair=6)
    assert near[:, [1, 2, 6]].tolist() == whole[:, [1, 2, 6]].tolist()
    assert near.any(axis=0).nonzero()[0].tolist() == [1, 2, 6]
    # More than the job may have: the best on fewer counts, wherever that is.
    assert rates_of(shot, most=2, fair=9)[0].tolist() == whole.tolist()
    speed = OneSpeed.of_snapshot(shot)
    reach = Reach(most=2, fair=2, size=4, total=16)
    asked = [(status, reach) for status in shot.jobs]
    first, second = asked
    kept = speed.rates([first])[0]
    assert speed.rates([second, first])[1] is kept
    assert speed.rates([(first[0], replace(reach, most=3))])[0] is not kept


# who gets what --------------------------------------------------------------------------------


def test_a_new_job_starts_on_one_gpu_and_may_double_what_it_had() -> None:
    for explored, expected in ((0, 1), (1, 2), (2, 4)):
        found = POLLUX.choose(snapshot(pool(), [pending(elastic(), seen(explored))]))
        assert gpus(found) == {1: expected}


def test_gpus_go_to_jobs_that_scale() -> None:
    """Of one node: the job whose gradient is not noisy gains nothing by a second GPU."""
    good, bad = pending(elastic(1), seen(8)), pending(elastic(2), seen(8, noise=0.0, sync_s=0.5))
    assert gpus(POLLUX.choose(snapshot(pool(v100=1, a100=0), [good, bad]))) == {1: 3, 2: 1}


def test_every_job_gets_something_before_any_gets_more() -> None:
    jobs = [pending(elastic(at), seen(8)) for at in range(1, 5)]
    assert gpus(POLLUX.choose(snapshot(pool(v100=1, a100=0), jobs))) == dict.fromkeys(
        range(1, 5), 1
    )


def test_jobs_with_less_service_come_first_when_gpus_are_few() -> None:
    jobs = [
        pending(elastic(at), seen(1), attained_service_gpu_s=service)
        for at, service in ((1, 900.0), (2, 0.0), (3, 300.0))
    ]
    found = POLLUX.choose(snapshot([node(gpus=2, cpus=8, mem_mib=120 * GIB)], jobs))
    assert set(gpus(found)) == {2, 3}
    assert found.waiting[1].code is ReasonCode.NO_GPUS


def test_a_share_of_several_types_is_reduced_to_that_with_most_gpus() -> None:
    nodes, status = {one.name: one for one in pool()}, pending(elastic(), known())

    def reduced(**counts: int) -> Any:
        parts = [(nodes[name.replace("_", "-")], count) for name, count in counts.items()]
        found = shaped(status, parts)
        return found.layout if found is not None else None

    assert reduced(a100_0=3, v100_0=4) == ("v100", (("v100-0", 4),))
    # Of equally many those on which the job is faster.
    assert reduced(a100_0=8, v100_0=4, v100_1=4) == ("a100", (("a100-0", 8),))
    assert reduced(v100_0=4, v100_1=4) == ("v100", (("v100-0", 4), ("v100-1", 4)))
    # No more on a node than on the others.
    assert reduced(v100_0=2, v100_1=1) == ("v100", (("v100-0", 1), ("v100-1", 1)))


def test_the_batch_is_for_the_type_that_the_job_is_on() -> None:
    belief = known(scaling(noise=1e3, local=(1, 64)))
    status = pending(elastic(), belief)
    on = [Configuration(gpus=2, nodes=1, gpu_type=kind) for kind in ("v100", "a100")]
    found = with_batches([(status, one) for one in on])
    assert all(one.batch is not None and one.batch.replicas == 2 for one in found)
    rigid = job(2, 2)
    assert with_batches([(pending(rigid, belief), on[0])]) == [on[0]]


@pytest.mark.parametrize(("least", "per_gpu"), [(1, 2), (10, 10)])
def test_a_job_begins_with_a_small_batch_on_a_type_of_which_nothing_is_known(
    least: int, per_gpu: int
) -> None:
    belief = known(scaling({"v100": 1.0}, explored={"v100": 4}, noise=1e3, local=(least, 64)))
    status = pending(elastic(batch=(16, 1024)), belief)
    (there,) = planned(snapshot(pool(v100=0, a100=1), [status])).placements
    assert (there.gpu_type, there.gpus) == ("a100", 8)
    assert there.batch == BatchSize(local=per_gpu, replicas=8)


def test_a_batch_is_kept_unless_another_is_clearly_better() -> None:
    plain = Configuration(gpus=2, nodes=1, gpu_type="v100")
    best = with_batches([(pending(elastic(), seen(2)), plain)])[0].batch
    assert best is not None
    near = replace(best, local=best.local - 1)
    for own, expected in ((near, near), (replace(best, local=16), best)):
        status = running(elastic(), holds(1, "v100", 2, "v100-0", own), seen(2))
        assert with_batches([(status, plain)])[0].batch == expected


def test_a_running_job_is_not_moved_for_nothing() -> None:
    status = running(
        elastic(most=2), holds(1, "v100", 2, "v100-1"), seen(2), attained_service_gpu_s=1e4
    )
    shot = replace(snapshot(pool(v100=3, a100=0), [status]), now_s=1e5)
    (one,) = planned(shot).placements
    assert one.nodes == ("v100-1",)


def test_what_a_restart_costs_keeps_jobs_where_they_are() -> None:
    """A job of a minute that had two restarts must not double; an old one may."""
    for age_s, expected in ((61.0, 2), (1e5, 4)):
        status = running(
            elastic(submitted_s=0.0), holds(1, "v100", 2, "v100-0"), seen(2), restarts=2
        )
        shot = replace(snapshot(pool(v100=1, a100=0), [status]), now_s=age_s)
        found = POLLUX.choose(shot)
        assert gpus(found) == {1: expected}


def test_rigid_jobs_get_just_what_they_ask_for() -> None:
    jobs = [
        pending(job(1, 2)),
        pending(job(2, 4, nodes=2, gpu_types=("v100",))),
        pending(job(3, 8, gpu_types=("a100",))),
    ]
    plan = planned(snapshot(pool(), jobs))
    found = {one.job_id: sorted(share.gpus for _, share in one.shares) for one in plan.placements}
    assert found == {1: [2], 2: [2, 2], 3: [8]}


def test_a_job_that_cannot_be_stopped_keeps_what_it_holds() -> None:
    fixed = running(elastic(1), holds(1, "v100", 4, "v100-0"), seen(1), phase=JobPhase.STARTING)
    plan = planned(snapshot(pool(v100=1, a100=0), [fixed, pending(elastic(2), seen(1))]))
    (one,) = plan.placements
    assert one.job_id == 1 and plan.waiting[2].code is ReasonCode.NO_GPUS


def test_a_job_larger_than_the_pool_never_fits() -> None:
    found = POLLUX.choose(snapshot(pool(), [pending(job(1, 16))]))
    assert found.waiting[1].code is ReasonCode.NEVER_FITS


# its state ------------------------------------------------------------------------------------


def test_the_seed_decides_and_nothing_is_remembered_without_being_begun() -> None:
    jobs = [pending(elastic(at), seen(4)) for at in range(1, 7)]
    shot = snapshot(pool(), jobs)
    short = replace(POLLUX, population=10, generations=2)
    assert short.choose(shot) == short.choose(replace(shot))
    others = [replace(short, seed=seed).choose(shot) for seed in range(6)]
    assert any(one != others[0] for one in others)


def test_a_run_begins_with_an_empty_memory_of_its_own() -> None:
    jobs = [pending(elastic(at), seen(4)) for at in range(1, 7)]
    shots = [replace(snapshot(pool(), jobs), round=at) for at in range(3)]
    runs = []
    for _ in range(2):
        policy = begun(replace(POLLUX, population=10, generations=2))
        runs.append([policy.choose(shot) for shot in shots])
        assert runs[-1][-1] == policy.choose(replace(shots[-1]))  # asked once more
    assert runs[0] == runs[1]
    assert runs[0][0] == replace(POLLUX, population=10, generations=2).choose(shots[0])
    assert begun(POLICIES["fifo"]) is POLICIES["fifo"]


def test_later_rounds_of_a_run_search_on() -> None:
    jobs = [pending(elastic(at), seen(4)) for at in range(1, 7)]
    policy = replace(POLLUX, generations=3)
    warm, found = policy.begun(), []
    for at in range(8):
        found.append(_worth(warm, replace(snapshot(pool(), jobs), round=at)))
    assert found == sorted(found)
    cold = _worth(policy, replace(snapshot(pool(), jobs), round=7))
    assert found[-1] > cold


def running_as(grant: Grant, layout: GpuLayout) -> Any:
    """A job that has what it was granted."""
    kind, there = layout
    shares: Any = {name: res(gpus, 4 * gpus, 60 * GIB * gpus) for name, gpus in there}
    where = replace(placement(grant.job_id, kind, **shares), batch=grant.configuration.batch)
    return running(elastic(grant.job_id), where, seen(grant.configuration.gpus))


def test_between_its_searches_a_run_starts_what_was_decided_and_moves_nobody() -> None:
    waiting = [pending(elastic(at), seen(4)) for at in (1, 2, 3)]
    policy = replace(POLLUX, population=10, generations=2).begun()
    first = policy.choose(snapshot(pool(), waiting))
    one, *_ = first.grants
    there = first.packing or {}
    # The first one runs, though it could be on more; the second one is gone; others arrive.
    new = [pending(elastic(at), seen(1)) for at in (4, 5)]
    jobs = [running_as(one, there[1]), waiting[2], *new]
    later = replace(snapshot(pool(), jobs), round=2, now_s=299.0, previous_s=1.0)
    found = policy.choose(later)
    assert (first.solver["status"], found.solver["status"]) == ("feasible", "kept")
    assert found.packing is not None and found.packing.items() >= {(1, there[1]), (3, there[3])}
    assert gpus(found)[4] == gpus(found)[5] == 2, "a search would let them have no more"
    assert found == policy.choose(later)
    planned(later, policy)
    # A search is due with the next multiple of a round, and always without a memory.
    due = replace(later, round=3, now_s=300.0, previous_s=299.0)
    assert policy.choose(due).solver["status"] == "feasible"
    assert POLLUX.choose(later).solver["status"] == "feasible"


def test_between_searches_a_job_whose_node_is_down_starts_elsewhere() -> None:
    nodes, belief = pool(v100=2, a100=0), seen(1)
    policy = replace(POLLUX, population=10, generations=2).begun()
    first = policy.choose(snapshot(nodes, [pending(elastic(1), belief)]))
    ((name, count),) = (first.packing or {})[1][1]
    (other,) = {one.name for one in nodes} - {name}
    down = [replace(one, capacity=res()) if one.name == name else one for one in nodes]
    later = replace(snapshot(down, [pending(elastic(1), belief)]), now_s=9.0, previous_s=1.0)
    assert policy.choose(later).packing == {1: ("v100", ((other, count),))}


def _worth(policy: Pollux, shot: Snapshot) -> float:
    return float(policy.choose(shot).solver["objective"])  # type: ignore[arg-type]


def test_the_settings_are_in_the_plan() -> None:
    odd = replace(POLLUX, power=-2.0, generations=4, avoid_interference=False)
    plan = planned(snapshot(pool(), [pending(elastic(), known())]), odd)
    assert policy_of_plan(plan) == odd
    assert policy_of_plan(replace(plan, solver={})) == POLLUX
