from __future__ import annotations

import copy
import gc
import pickle
from dataclasses import replace

import pytest
from builders import job, node, pending, placement, profile, res, running, snapshot

from slurm_synergy.core.decide import check_plan, decide
from slurm_synergy.core.model import Decision, Placement, Plan, Reason, ReasonCode, Snapshot
from slurm_synergy.core.snapshot import inherit
from slurm_synergy.errors import PlanError
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES

WAIT = Reason(code=ReasonCode.NO_GPUS, text="no")


def made(*placements: Placement, waiting: dict[int, Reason] | None = None) -> Plan:
    return Plan(round=1, policy="p", mechanism="m", placements=placements, waiting=waiting or {})


def two() -> Snapshot:
    return snapshot([node("v100-1"), node("v100-2")], [pending(job(1, 4)), pending(job(2, 4))])


FAIR_1 = placement(1, v100_1=res(4, 12, 250_000))
FAIR_2 = placement(2, v100_1=res(4, 12, 250_000))


def test_a_fair_plan_passes() -> None:
    check_plan(two(), made(FAIR_1, FAIR_2))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (made(FAIR_1), "neither \\[2\\]"),
        (made(FAIR_1, FAIR_2, waiting={2: WAIT}), "both \\[2\\]"),
        (made(FAIR_1, FAIR_2, waiting={7: WAIT}), "unknown \\[7\\]"),
        (made(FAIR_1, FAIR_1, FAIR_2), "twice"),
        (made(placement(1, v100_1=res(2, 12, 250_000)), FAIR_2), "asked for 4 GPUs"),
        (
            made(placement(1, v100_1=res(2, 12, 250_000), v100_2=res(2, 12, 250_000)), FAIR_2),
            "asked for 4 GPUs on 1 nodes",
        ),
        (made(placement(1, v100_9=res(4, 12, 250_000)), FAIR_2), "not in the pool"),
        (made(replace(FAIR_1, gpu_type="a100"), FAIR_2), "no GPUs of type a100"),
        (made(placement(1, v100_1=res(4, 11, 250_000)), FAIR_2), "less than its share"),
        (made(placement(1, v100_1=res(4, 12, 249_999)), FAIR_2), "less than its share"),
        (made(placement(1, v100_1=res(4, 13, 250_000)), FAIR_2), "overfull"),
        (made(placement(1, v100_1=res(4, 12, 250_001)), FAIR_2), "overfull"),
    ],
)
def test_a_plan_that_breaks_a_promise_is_refused(plan: Plan, words: str) -> None:
    before, now = two(), two()
    with pytest.raises(PlanError, match=words):
        check_plan(now, plan)
    check_plan(before, made(FAIR_1, FAIR_2))
    inherit(now, before)
    with pytest.raises(PlanError, match=words):
        check_plan(now, plan)


def test_what_was_found_good_before_does_not_hide_what_is_wrong_now() -> None:
    before, now = two(), two()
    check_plan(before, made(FAIR_1, FAIR_2))
    inherit(now, before)
    assert now.of_nodes is before.of_nodes
    with pytest.raises(PlanError, match="less than its share"):
        check_plan(now, made(placement(1, v100_1=res(4, 11, 250_000)), FAIR_2))
    with pytest.raises(PlanError, match="overfull"):
        check_plan(now, made(replace(FAIR_1, shares=(("v100-1", res(4, 13, 250_000)),)), FAIR_2))
    more = replace(before.jobs[0], job=replace(before.jobs[0].job, gpus=2))
    changed = replace(now, jobs=(more, now.jobs[1]))
    inherit(changed, before)
    with pytest.raises(PlanError, match="asked for 2 GPUs"):
        check_plan(changed, made(FAIR_1, FAIR_2))


def test_nothing_is_inherited_from_other_nodes() -> None:
    before, now = two(), replace(two(), nodes=two().nodes[:1])
    check_plan(before, made(FAIR_1, FAIR_2))
    inherit(now, before)
    assert not now.of_nodes


def test_a_known_job_may_have_little_if_its_rate_is_kept() -> None:
    shot = snapshot([node()], [pending(job(1, 4), profile(per_core=1000, gpu_rate=250))])
    check_plan(shot, made(placement(1, v100_1=res(4, 1, 0))))


def test_a_known_job_must_not_fall_below_its_proportional_rate() -> None:
    shot = snapshot([node()], [pending(job(1, 4), profile(per_core=100, gpu_rate=300))])
    with pytest.raises(PlanError, match="would run at 1100 samples/s"):
        check_plan(shot, made(placement(1, v100_1=res(4, 11, 0))))


def test_process_memory_is_safe() -> None:
    status = pending(job(1, 4, min_mem_mib_per_node=1000), profile(1000, 250))
    with pytest.raises(PlanError, match="1000 MiB"):
        check_plan(snapshot([node()], [status]), made(placement(1, v100_1=res(4, 4, 999))))


def test_a_type_that_the_job_excludes_is_refused() -> None:
    shot = snapshot([node()], [pending(job(1, 4, gpu_types=("a100",)))])
    with pytest.raises(PlanError, match="may not run"):
        check_plan(shot, made(placement(1, v100_1=res(4, 12, 250_000))))


def test_jobs_that_cannot_be_stopped_must_stay() -> None:
    pool = [node("v100-1"), node("v100-2")]
    shot = snapshot(pool, [running(job(1, 4, preemptible=False), FAIR_1)])
    check_plan(shot, made(FAIR_1))
    with pytest.raises(PlanError, match="cannot be moved"):
        check_plan(shot, made(placement(1, v100_2=res(4, 12, 250_000))))
    with pytest.raises(PlanError, match="cannot be stopped"):
        check_plan(shot, made(waiting={1: WAIT}))


def test_a_job_on_a_node_that_went_down_is_no_violation_but_a_new_one_there_is() -> None:
    pool = [node("v100-1", usable=False)]
    run = running(job(1, 4), FAIR_1)
    check_plan(snapshot(pool, [run]), made(FAIR_1))
    with pytest.raises(PlanError, match="need not be there"):
        check_plan(snapshot(pool, [run, pending(job(2, 4))]), made(FAIR_1, FAIR_2))


def test_a_job_on_a_node_that_left_the_pool_is_kept() -> None:
    run = running(job(1, 4), placement(1, old_7=res(4, 12, 250_000)))
    shot = snapshot([node()], [run])
    for mechanism in MECHANISMS.values():
        plan = decide(shot, POLICIES["fifo"], mechanism)
        check_plan(shot, plan)
        assert plan.placements == (placement(1, old_7=res(4, 12, 250_000)),)


def test_the_plan_names_what_made_it_and_sorts_its_jobs() -> None:
    plan = decide(two(), POLICIES["srtf"], MECHANISMS["tune"])
    assert (plan.policy, plan.mechanism) == ("srtf", "tune")
    assert [one.job_id for one in plan.placements] == [1, 2]


def test_what_is_derived_from_a_snapshot_is_no_part_of_its_value() -> None:
    shot = two()
    decide(shot, POLICIES["fifo"], MECHANISMS["tune"])
    assert shot.derived and shot == two()
    for copied in (replace(shot), pickle.loads(pickle.dumps(shot)), copy.deepcopy(shot)):
        assert copied == shot and not copied.derived
    less = replace(shot, nodes=shot.nodes[:1])
    assert less.usable == {"v100-1"} and less.node("v100-1") is shot.nodes[0]
    assert len(decide(less, POLICIES["fifo"], MECHANISMS["tune"]).placements) == 2


def test_the_report_of_a_solver_is_no_part_of_a_plans_value() -> None:
    assert replace(made(FAIR_1), solver={"ms": 1.0}) == made(FAIR_1)


def test_a_decision_leaves_garbage_collection_as_it_was() -> None:
    class Watching:
        name = "watching"

        def choose(self, snapshot: Snapshot) -> Decision:
            assert not gc.isenabled()
            return POLICIES["fifo"].choose(snapshot)

    assert gc.isenabled()
    decide(two(), Watching(), MECHANISMS["tune"])
    assert gc.isenabled()
    gc.disable()
    try:
        decide(two(), Watching(), MECHANISMS["tune"])
        assert not gc.isenabled()
    finally:
        gc.enable()
