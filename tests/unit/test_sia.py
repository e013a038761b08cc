"""The policy Sia on elastic, rigid and pinned jobs, and what a round makes of its word."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from builders import (
    GIB,
    Harness,
    elastic,
    job,
    node,
    pending,
    placement,
    profile,
    quiet,
    res,
    running,
    scaling,
    snapshot,
)

from slurm_synergy.cluster import Resize, Start, Stop
from slurm_synergy.core.decide import check_plan, decide
from slurm_synergy.core.explain import explain
from slurm_synergy.core.model import (
    Ceiling,
    Configuration,
    Decision,
    Elasticity,
    Enforcement,
    JobStatus,
    Node,
    Plan,
    Profile,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.scaling import BatchSize, Scaling
from slurm_synergy.core.snapshot import inherit
from slurm_synergy.errors import PlanError
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies.sia import SIA


def pool(v100: int = 2, a100: int = 1) -> list[Node]:
    """Nodes of 4 V100 and of 8 A100 GPUs, 4 cores and 60 GiB to each GPU."""
    return [
        *(node(f"v100-{at}", "v100", 4, 16, 240 * GIB) for at in range(v100)),
        *(node(f"a100-{at}", "a100", 8, 32, 480 * GIB) for at in range(a100)),
    ]


def known(belief: Scaling | None = None, **more: Any) -> Profile:
    return replace(Profile(), scaling=belief or scaling(), **more)


def shapes(decision: Decision) -> dict[int, tuple[str | None, int, int | None]]:
    return {
        one.job_id: (one.configuration.gpu_type, one.configuration.gpus, one.configuration.nodes)
        for one in decision.grants
    }


def planned(shot: Snapshot, mechanism: str = "tune") -> Plan:
    plan = decide(shot, SIA, MECHANISMS[mechanism])
    check_plan(shot, plan)
    return plan


def holds(job_id: int, kind: str, gpus: int, name: str, batch: BatchSize | None = None) -> Any:
    where = placement(job_id, kind, **{name: res(gpus, 4 * gpus, 60 * GIB * gpus)})
    return replace(where, batch=batch)


# who gets what ------------------------------------------------------------------------------


def test_a_new_job_starts_on_one_gpu_of_the_faster_type() -> None:
    found = SIA.choose(snapshot(pool(), [pending(elastic(), known())]))
    assert shapes(found) == {1: ("a100", 1, 1)}


def test_a_job_has_at_most_twice_what_it_ever_had() -> None:
    for explored, expected in ((1, 2), (2, 4), (4, 8)):
        belief = known(scaling(explored={"a100": explored}, noise=1e3))
        found = SIA.choose(snapshot(pool(), [pending(elastic(), belief)]))
        assert shapes(found) == {1: ("a100", expected, 1)}


def test_the_least_of_a_job_is_where_it_starts() -> None:
    one = elastic(min_gpus=3, most=8)
    assert shapes(SIA.choose(snapshot(pool(), [pending(one, known())]))) == {1: ("a100", 4, 1)}


def test_a_job_runs_on_multiples_of_its_scale_unit() -> None:
    one = elastic(gpus=4, scale_unit=4, most=8)
    belief = known(scaling(explored={"v100": 4, "a100": 4}, noise=1e3))
    found = SIA.choose(snapshot(pool(), [pending(one, belief)]))
    assert shapes(found) == {1: ("a100", 8, 1)}
    batch = found.grants[0].configuration.batch
    assert batch is not None and batch.replicas == 2


def test_only_allowed_types_are_given() -> None:
    one = elastic(gpu_types=("v100",))
    assert shapes(SIA.choose(snapshot(pool(), [pending(one, known())]))) == {1: ("v100", 1, 1)}


def test_two_jobs_share_out_the_fast_gpus_by_what_they_are_worth() -> None:
    """The job that is hardly faster on an A100 leaves them to the other."""
    fast = known(scaling({"v100": 1.0, "a100": 4.0}, explored={"a100": 4}, noise=1e3))
    slow = known(scaling({"v100": 1.0, "a100": 1.05}, explored={"v100": 2}, noise=1e3))
    shot = snapshot(pool(v100=1), [pending(elastic(1), slow), pending(elastic(2), fast)])
    assert shapes(SIA.choose(shot)) == {1: ("v100", 4, 1), 2: ("a100", 8, 1)}


def test_a_data_bound_job_is_not_sent_to_a_gpu_that_it_cannot_feed() -> None:
    """Both types starve, so the A100 is no better; where data is plentiful it is."""
    belief = profile(per_core=20.0)
    starved = replace(belief, scaling=scaling(), gpu_rate_per_gpu={})
    fed = replace(profile(per_core=2000.0), scaling=scaling(), gpu_rate_per_gpu={})
    jobs = [pending(elastic(1), starved), pending(elastic(2), fed)]
    few = [node("a100-0", "a100", 1, 4, 60 * GIB), node("v100-0", "v100", 1, 4, 60 * GIB)]
    assert shapes(SIA.choose(snapshot(few, jobs))) == {1: ("v100", 1, 1), 2: ("a100", 1, 1)}
    swapped = [pending(elastic(1), fed), pending(elastic(2), starved)]
    assert shapes(SIA.choose(snapshot(few, swapped))) == {1: ("a100", 1, 1), 2: ("v100", 1, 1)}


def test_a_strong_scaling_job_keeps_its_total_batch() -> None:
    one = elastic(elasticity=Elasticity.STRONG_SCALING, batch=(128, 4096))
    belief = known(scaling(explored={"a100": 2}))
    found = SIA.choose(snapshot(pool(), [pending(one, belief)]))
    configuration = found.grants[0].configuration
    assert configuration.gpus > 1
    assert configuration.batch is not None and configuration.batch.total == 128


def test_an_adaptive_job_is_given_a_batch_within_its_range() -> None:
    belief = known(scaling(explored={"a100": 8}, noise=100.0))
    (grant,) = SIA.choose(snapshot(pool(), [pending(elastic(), belief)])).grants
    batch = grant.configuration.batch
    assert batch is not None and batch.replicas == grant.configuration.gpus
    assert 32 < batch.total <= 4096


def test_a_batch_is_kept_unless_another_is_clearly_better() -> None:
    belief = known(scaling(explored={"a100": 8}, noise=100.0))
    fresh = SIA.choose(snapshot(pool(), [pending(elastic(most=8), belief)]))
    best = fresh.grants[0].configuration.batch
    assert best is not None and best.replicas == 8
    for local, kept in ((best.local + 1, True), (4, False)):
        now = replace(best, local=local)
        status = running(elastic(most=8), holds(1, "a100", 8, "a100_0", now), belief)
        (grant,) = SIA.choose(snapshot(pool(), [status])).grants
        assert grant.configuration.batch == (now if kept else best)


def test_an_unknown_speed_gets_the_least_that_the_job_may_have() -> None:
    found = SIA.choose(snapshot(pool(), [pending(elastic(min_gpus=2), Profile())]))
    assert shapes(found)[1][1:] == (2, 1)


def test_rigid_jobs_take_part_in_the_shape_that_they_ask_for() -> None:
    jobs = [
        pending(job(1, 3), profile()),
        pending(job(2, 8, nodes=2), profile()),
        pending(elastic(3), known()),
    ]
    found = SIA.choose(snapshot(pool(), jobs))
    assert shapes(found) == {1: ("a100", 3, 1), 2: ("v100", 8, 2), 3: ("a100", 1, 1)}
    assert found.grants[0].configuration.batch is None


def test_a_rigid_job_of_a_fixed_type_gets_it_or_waits() -> None:
    jobs = [
        running(job(1, 8, gpu_types=("a100",), preemptible=False), holds(1, "a100", 8, "a100_0")),
        pending(job(2, 1, gpu_types=("a100",)), profile()),
    ]
    found = SIA.choose(snapshot(pool(), jobs))
    assert shapes(found) == {1: ("a100", 8, 1)}
    assert found.waiting[2].code is ReasonCode.NO_GPUS


@pytest.mark.parametrize("change", [{"preemptible": False}, {"wrapped": False}])
def test_a_job_that_cannot_be_stopped_keeps_its_gpus(change: dict[str, bool]) -> None:
    belief = known(scaling({"v100": 1.0, "a100": 4.0}, explored={"v100": 4}))
    one = elastic(1, **change)
    status = running(one, holds(1, "v100", 2, "v100_0"), belief)
    shot = snapshot(pool(), [status, pending(elastic(2), belief)])
    assert shapes(SIA.choose(shot))[1] == ("v100", 2, 1)
    assert planned(shot).placement(1) is not None


def test_while_draining_what_runs_keeps_its_shape_and_nothing_starts() -> None:
    belief = known(scaling(explored={"v100": 4}))
    status = running(elastic(1), holds(1, "v100", 2, "v100_0"), belief)
    shot = snapshot(pool(), [status, pending(elastic(2), belief)], draining=True)
    found = SIA.choose(shot)
    assert shapes(found) == {1: ("v100", 2, 1)}
    assert found.waiting[2].code is ReasonCode.DRAINED


def test_a_guaranteed_job_is_served_before_all_others() -> None:
    one = [node("v100-0", "v100", 1, 4, 60 * GIB)]
    quick = known(scaling({"v100": 1.0}))
    jobs = [pending(job(1), quick), pending(job(2, guaranteed=True), Profile())]
    assert shapes(SIA.choose(snapshot(one, jobs))) == {2: ("v100", 1, 1)}


def test_restarts_make_a_job_stay_where_it_is() -> None:
    """The gain of a move shrinks with the restarts so far, until it is none."""
    belief = known(scaling(explored={"v100": 2}, noise=1e3), restart_s=100.0)
    where = holds(1, "v100", 2, "v100_0")
    moved = []
    for restarts in (0, 9):
        one = running(elastic(1, submitted_s=-1000.0), where, belief, restarts=restarts)
        moved.append(shapes(SIA.choose(snapshot(pool(), [one])))[1] != ("v100", 2, 1))
    assert moved == [True, False]


def test_a_restart_that_weighs_more_makes_a_job_stay_sooner() -> None:
    belief = known(scaling(explored={"v100": 2}, noise=1e3), restart_s=100.0)
    one = running(elastic(1, submitted_s=-1000.0), holds(1, "v100", 2, "v100_0"), belief)
    moved = []
    for weight in (0.0, 1.0, 100.0):
        policy = replace(SIA, restart_weight=weight)
        found = policy.choose(snapshot(pool(), [one]))
        moved.append(shapes(found)[1] != ("v100", 2, 1))
        assert found.solver["parameters"] == policy.parameters
    assert moved == [True, True, False]


def test_what_fits_no_node_never_fits_and_what_is_out_of_reach_waits() -> None:
    jobs = [pending(job(1, 9), profile()), pending(job(2, 40, nodes=5), profile())]
    found = SIA.choose(snapshot(pool(), jobs))
    assert {one.code for one in found.waiting.values()} == {ReasonCode.NEVER_FITS}
    down = [node("v100-0", "v100", 4, 16, 240 * GIB, usable=False)]
    away = SIA.choose(snapshot(down, [pending(elastic(), known())]))
    assert away.waiting[1].code is ReasonCode.NO_GPUS


def test_a_waiting_job_is_told_what_it_would_gain_and_what_that_costs() -> None:
    few = [node("v100-0", "v100", 1, 4, 60 * GIB)]
    jobs = [pending(elastic(at), known(scaling({"v100": 1.0}))) for at in (1, 2)]
    (waiting,) = SIA.choose(snapshot(few, jobs)).waiting.values()
    assert waiting.code is ReasonCode.NO_GPUS
    assert "1 v100 GPU would bring it 0.10" in waiting.text


def test_of_equal_jobs_the_first_to_come_is_served_and_not_stopped_for_another() -> None:
    few = [node("v100-0", "v100", 2, 8, 120 * GIB)]
    belief = known(scaling({"v100": 1.0}))
    jobs = [pending(elastic(at, submitted_s=10.0 - at), belief) for at in range(1, 7)]
    assert sorted(shapes(SIA.choose(snapshot(few, jobs)))) == [5, 6]
    jobs[0] = running(jobs[0].job, holds(1, "v100", 1, "v100_0"), belief)
    assert sorted(shapes(SIA.choose(snapshot(few, jobs)))) == [1, 6]


def test_gpus_without_memory_for_the_chosen_job_go_to_another() -> None:
    few = [node("v100-0", "v100", 4, 16, 64 * GIB)]
    hungry = job(1, 2, min_mem_mib_per_node=40 * GIB)
    jobs = [
        pending(hungry, profile()),
        pending(replace(hungry, job_id=2), profile()),
        pending(job(3, 1), profile()),
    ]
    found = SIA.choose(snapshot(few, jobs))
    assert 3 in shapes(found)
    assert len(shapes(found)) == 2
    (waiting,) = found.waiting.values()
    assert waiting.code in (ReasonCode.FRAGMENTED, ReasonCode.NO_GPUS)


def test_the_round_records_objective_bound_and_gap() -> None:
    jobs = [pending(elastic(at), known(scaling(explored={"v100": at}))) for at in range(1, 9)]
    report = planned(snapshot(pool(), jobs)).solver
    assert report["status"] == "optimal"
    assert float(str(report["bound"])) >= float(str(report["objective"])) - 1e-9
    assert 0 <= float(str(report["gap"])) <= 1e-4
    assert set(report["prices"]) == {"a100", "v100"}  # type: ignore[call-overload]


# what a round makes of it -------------------------------------------------------------------


def test_a_placement_carries_batch_and_gets_cores_for_the_speed_of_its_configuration() -> None:
    """The same job asks for more cores on an A100 than on a V100."""
    belief = replace(profile(per_core=60.0), scaling=scaling(noise=100.0), gpu_rate_per_gpu={})
    cores = {}
    for kind in ("v100", "a100"):
        one = [node(f"{kind}-0", kind, 4, 32, 240 * GIB)]
        shot = snapshot(one, [pending(elastic(), belief)])
        (where,) = planned(shot).placements
        assert where.batch is not None
        cores[kind] = where.shares[0][1].cpus
    assert cores["a100"] > cores["v100"]


def test_batches_are_for_the_cores_that_jobs_got() -> None:
    """A frugal job lends cores, so the hungry one has a larger batch than its share feeds."""
    speed = {"scaling": scaling(explored={"v100": 2}, noise=100.0), "gpu_rate_per_gpu": {}}
    hungry, frugal = (replace(profile(per_core=one), **speed) for one in (100.0, 5000.0))
    alone = replace(hungry, pipeline=None)
    jobs = [pending(elastic(1, most=2), hungry), pending(elastic(2, most=2), frugal)]
    shot = snapshot([node("v100-0", "v100", 4, 16, 240 * GIB)], jobs)
    free = snapshot(shot.nodes, [pending(elastic(1, most=2), alone)])
    got = {}
    for mechanism in ("proportional", "tune"):
        first, second = planned(shot, mechanism).placements
        assert first.batch is not None and second.batch is not None
        got[mechanism] = first.shares[0][1].cpus, first.batch.total
        assert second.batch.total == 192
    (best,) = planned(free).placements
    assert best.batch is not None and best.batch.total == 192
    assert got["proportional"] == (8, 54), "the smallest batch that keeps up with its share"
    assert got["tune"][0] > 8 and got["tune"][1] == 192
    # In the round after, with what it holds, nothing is another.
    there = planned(shot).placements
    held = zip(shot.jobs, there, (hungry, frugal), strict=True)
    again = snapshot(shot.nodes, [running(one.job, where, belief) for one, where, belief in held])
    assert planned(again).placements == there


def test_a_job_keeps_its_share_where_its_speed_is_a_guess() -> None:
    """Frugal by its model, which has been seen on two GPUs only: it may be wrong of four."""
    frugal = replace(profile(per_core=10_000.0), gpu_rate_per_gpu={})
    cores = {}
    for gpus in (2, 4):
        belief = replace(frugal, scaling=scaling(explored={"v100": gpus}))
        one = elastic(min_gpus=4, most=4, gpu_types=("v100",))
        (where,) = planned(snapshot(pool(v100=1, a100=0), [pending(one, belief)])).placements
        assert where.gpus == 4
        cores[gpus] = where.shares[0][1].cpus
    assert cores[2] == 16
    assert cores[4] < 16


@pytest.mark.parametrize("mechanism", ["proportional", "tune", "greedy"])
def test_a_plan_of_another_shape_than_asked_for_passes_the_check(mechanism: str) -> None:
    belief = known(scaling(explored={"a100": 8, "v100": 4}))
    jobs = [pending(elastic(at, gpus=3), belief) for at in range(1, 5)]
    plan = planned(snapshot(pool(), jobs), mechanism)
    assert len(plan.placements) == 4
    assert any(one.gpus != 3 for one in plan.placements)


def test_a_plan_beyond_what_the_job_may_have_is_refused() -> None:
    belief = known(scaling(explored={"a100": 8}))
    shot = snapshot(pool(), [pending(elastic(most=2), belief)])
    (where,) = planned(shot).placements
    for wrong in (
        replace(where, shares=(("a100-0", res(4, 16, 240 * GIB)),), batch=None),
        replace(where, batch=BatchSize(local=4096, replicas=where.gpus)),
        replace(where, batch=BatchSize(local=64, replicas=where.gpus + 1)),
    ):
        with pytest.raises(PlanError, match="job 1"):
            check_plan(shot, Plan(round=1, policy="", mechanism="", placements=(wrong,)))


def grown(harness: Harness, belief: Profile, gpus: int) -> None:
    """The job has been measured on its GPUs by now."""
    explored = {"v100": gpus, "a100": gpus}
    assert belief.scaling is not None
    speeds = {
        kind: replace(one, explored_gpus=explored[kind])
        for kind, one in belief.scaling.speeds.items()
    }
    made = replace(belief, scaling=replace(belief.scaling, speeds=speeds))
    harness.records.profiles["job-1"] = made


def test_a_job_grows_by_stop_and_start_and_shrinks_when_others_come() -> None:
    harness = Harness(pool(v100=0), "sia", "tune")
    belief = known(scaling({"a100": 1.0}, noise=1e4), restart_s=1.0)
    harness.submit(elastic(1, most=8), belief=belief)
    sizes = []
    for _ in range(8):
        result = harness.round()
        if harness.running():
            sizes.append(harness.lease(1).gpus)
            grown(harness, belief, harness.lease(1).gpus)
        stops = [one for one in result.actions if isinstance(one, Stop)]
        assert all(one.reason.code is ReasonCode.RESHAPED for one in stops)
    assert sizes[0] == 1 and sizes[-1] == 8
    assert all(after <= 2 * before for before, after in pairwise(sizes))
    assert quiet(harness.results[-1])
    for job_id in range(2, 9):
        harness.submit(elastic(job_id, most=8), belief=belief)
    for _ in range(4):
        harness.round()
    # From 8 to 4 GPUs it loses less than four jobs gain by running at all, from 4 to 2 it does not.
    assert harness.lease(1).gpus == 4 and len(harness.running()) == 5
    assert quiet(harness.results[-1])


@pytest.mark.parametrize("enforcement", Enforcement)
def test_a_batch_alone_changes_in_place(enforcement: Enforcement) -> None:
    harness = Harness(pool(v100=0), "sia", "proportional", enforcement)
    belief = known(scaling({"a100": 1.0}, noise=0.1))
    harness.submit(elastic(1, most=1), belief=belief)
    harness.round()
    before = harness.lease(1)
    harness.records.profiles["job-1"] = known(scaling({"a100": 1.0}, noise=1e4))
    (action,) = harness.round().actions
    assert isinstance(action, Resize)
    after = harness.lease(1)
    assert after.shares == before.shares
    assert before.batch is not None and after.batch is not None
    assert after.batch.total > before.batch.total
    assert quiet(harness.round())


def test_an_elastic_job_under_another_policy_is_what_its_user_asked_for() -> None:
    harness = Harness(pool(), "fifo", "tune")
    harness.submit(elastic(1, gpus=2, gpu_types=("v100",)), belief=known())
    (action,) = harness.round().actions
    assert isinstance(action, Start)
    assert action.placement.gpus == 2 and action.placement.batch is None


def test_rigid_jobs_alone_come_to_the_same_gpus_whatever_is_known_of_scaling() -> None:
    plain = [pending(job(at, at), profile()) for at in (1, 2, 4)]
    told = [
        JobStatus(job=one.job, profile=replace(one.profile, scaling=scaling())) for one in plain
    ]
    first, second = (SIA.choose(snapshot(pool(), jobs)) for jobs in (plain, told))
    assert shapes(first) == shapes(second)
    assert all(one.configuration.batch is None for one in second.grants)


def test_a_configuration_is_a_value_with_its_batch() -> None:
    batch = BatchSize(local=16, replicas=4, accumulation=1)
    assert batch.total == 128
    one = Configuration(gpus=4, nodes=1, gpu_type="a100", batch=batch)
    assert one == replace(one) and one != replace(one, batch=None)


# sizes that were refused --------------------------------------------------------------------


def below(kind: str, refused: int) -> Ceiling:
    return Ceiling(gpu_type=kind, refused=refused, text="beyond its account's limit")


@pytest.mark.parametrize(
    ("ceilings", "expected"),
    [
        ((), ("a100", 8, 1)),
        ((below("a100", 8),), ("a100", 4, 1)),
        ((below("a100", 2),), ("v100", 4, 1)),
        ((below("a100", 1), below("v100", 4)), ("v100", 2, 1)),
        # Nothing of a type, and on the other one the least.
        ((below("a100", 1), below("v100", 2)), ("v100", 1, 1)),
        ((below("a100", 1), below("v100", 1)), None),
    ],
)
def test_a_size_that_was_refused_is_not_offered_and_smaller_ones_are(
    ceilings: tuple[Ceiling, ...], expected: tuple[str, int, int] | None
) -> None:
    belief = known(scaling(explored={"v100": 8, "a100": 8}, noise=1e4))
    shot = snapshot(pool(v100=1), [pending(elastic(ceilings=ceilings), belief)])
    assert shapes(SIA.choose(shot)) == ({1: expected} if expected else {})
    # Also as the next round of a controller that has planned without them.
    before = snapshot(pool(v100=1), [pending(elastic(), belief)])
    SIA.choose(before)
    inherit(before, shot)
    assert shapes(SIA.choose(shot)) == ({1: expected} if expected else {})


def test_what_was_refused_is_explained() -> None:
    belief = known(scaling(explored={"a100": 8}, noise=1e4))
    shot = snapshot(pool(), [pending(elastic(ceilings=(below("a100", 4),)), belief)])
    told = explain(shot, planned(shot), 1).elastic
    assert "fewer than 4 of type a100 (beyond its account's limit)" in told


# between two plans -----------------------------------------------------------------------------


def between(jobs: list[JobStatus], nodes: list[Node] | None = None, **more: Any) -> Snapshot:
    """A round ten seconds after another one; all are planned anew at whole multiples of 300 s."""
    return replace(snapshot(nodes or pool(), jobs), now_s=620.0, previous_s=610.0, **more)


def growing(job_id: int = 1, gpus: int = 2) -> JobStatus:
    """A job that gains by having twice the GPUs that it has."""
    belief = known(scaling(explored={"v100": gpus}, noise=1e3))
    return running(elastic(job_id), holds(job_id, "v100", gpus, "v100_0"), belief)


def test_between_two_plans_a_job_that_runs_stays_and_grows_with_the_next_plan() -> None:
    shot = between([growing()])
    assert shapes(SIA.choose(shot)) == {1: ("v100", 2, 1)}
    assert shapes(SIA.choose(replace(shot, now_s=900.0)))[1][1] == 4
    at_any_time = replace(SIA, moves_between_rounds=True)
    assert shapes(at_any_time.choose(shot))[1][1] == 4


def test_a_job_that_comes_between_two_plans_starts_on_free_gpus_and_moves_nobody() -> None:
    shot = between([growing(), pending(elastic(2), known())])
    assert shapes(SIA.choose(shot)) == {1: ("v100", 2, 1), 2: ("a100", 1, 1)}


def test_where_a_job_would_wait_all_are_planned_anew_at_once() -> None:
    one = [node("v100-0", "v100", 4, 16, 240 * GIB)]
    shot = between([growing(1, 4), pending(elastic(2, guaranteed=True), known())], one)
    found = shapes(SIA.choose(shot))
    assert set(found) == {1, 2} and found[1][1] < 4


def test_a_job_that_fits_nowhere_makes_nobody_move_between_two_plans() -> None:
    shot = between([growing(), pending(job(2, 40, nodes=5), profile())])
    found = SIA.choose(shot)
    assert shapes(found) == {1: ("v100", 2, 1)}
    assert found.waiting[2].code is ReasonCode.NEVER_FITS


def test_what_a_job_must_not_keep_is_no_reason_to_stay() -> None:
    """Its user allows fewer GPUs now."""
    one = growing(1, 4)
    less = replace(one, job=replace(one.job, max_gpus=2))
    assert shapes(SIA.choose(between([less])))[1][1] <= 2


def test_a_job_on_unlike_parts_of_nodes_is_planned_like_any_other() -> None:
    """As its user asked for, under a policy that splits jobs; no configuration is like that."""
    few = [node("v100-0", "v100", 4, 16, 240 * GIB), node("v100-1", "v100", 1, 4, 60 * GIB)]
    parts = {"v100_0": res(4, 16, 240 * GIB), "v100_1": res(1, 4, 60 * GIB)}
    one = running(elastic(1, 5), placement(1, "v100", **parts), known())
    assert set(shapes(SIA.choose(snapshot(few, [one])))) == {1}
