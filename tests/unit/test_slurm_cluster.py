"""The adapter's bookkeeping on a Slurm in memory: what is seen, begun, followed and survived."""

from __future__ import annotations

import itertools
import logging
from dataclasses import replace
from typing import Any

import pytest
from fake_slurm import Crash, FakeSlurm
from slurm_world import MakeWorld, World, make_world, world

from slurm_synergy.cluster import Resize, Start
from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.model import (
    Elasticity,
    Enforcement,
    JobPhase,
    Profile,
    Reason,
    ReasonCode,
)
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import ClusterError, ConfigError, SlurmCommandError
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.round import run_round
from slurm_synergy.slurm.dry_run import DryRun
from slurm_synergy.slurm.facts import GpuForm, Hold, JobState, ReservationFacts

__all__ = ["make_world", "world"]  # fixtures


def test_a_marked_job_is_seen_as_its_owner_asked_for_it(world: World) -> None:
    job_id = world.slurm.submit(
        gpus=2,
        nodes=2,
        tasks=2,
        mem=1000,
        comment="mine synergy:profile=resnet18-imagenet,samples=500,elastic=scale",
    )
    seen = world.seen(job_id)
    job = seen.job
    assert (job.gpus, job.nodes, job.tasks_per_node, job.gpu_types) == (4, 2, 2, ("v100",))
    assert (job.min_mem_mib_per_node, job.total_samples) == (1000, 500.0)
    assert (job.elasticity, job.wrapped, job.preemptible) == (Elasticity.STRONG_SCALING, True, True)
    assert (seen.profile_key, seen.phase, seen.blocked) == (
        "resnet18-imagenet",
        JobPhase.PENDING,
        None,
    )


def test_the_min_mem_hint_goes_before_the_users_mem_and_epochs_become_samples(world: World) -> None:
    job_id = world.slurm.submit(
        mem=9000, comment="synergy:min_mem=2G,epochs=3,profile=resnet18-imagenet"
    )
    job = world.seen(job_id).job
    pipeline = CATALOGUE["resnet18-imagenet"].pipeline
    assert pipeline is not None
    assert job.min_mem_mib_per_node == 2048
    assert job.total_samples == 3.0 * pipeline.samples_per_epoch


def test_a_job_without_a_mark_is_rigid_and_remembered_as_first_seen(world: World) -> None:
    job_id = world.slurm.submit(gpus=2, kind="", marked=False, mem=77)
    first = world.seen(job_id).job
    assert (first.gpus, first.gpu_types, first.wrapped) == (2, (), False)
    world.slurm.change(
        job_id, gpus_asked={"v100": 5}, min_mem_node_mib=99_000, submit_s=900.0, restarts=1
    )
    world.boot()
    assert world.seen(job_id).job == first


def test_a_requeue_does_not_change_a_jobs_place_in_the_queue(world: World) -> None:
    job_id = world.slurm.submit()
    world.cluster.tick()
    world.slurm.change(job_id, submit_s=5000.0, restarts=1)
    world.boot()
    assert world.seen(job_id).job.submitted_s == float(job_id)


@pytest.mark.parametrize("reboot", [False, True], ids=["watched", "away"])
def test_a_job_that_gets_the_id_of_another_inherits_nothing(
    world: World, caplog: pytest.LogCaptureFixture, reboot: bool
) -> None:
    job_id = world.slurm.submit(gpus=4, comment="synergy:elastic=rigid")
    world.step()
    world.cluster.tick()
    assert world.book.job_ids() == (job_id,)
    # slurmctld has lost its state and counts anew: the same user's next job, seconds later.
    del world.slurm.jobs[job_id]
    assert world.slurm.submit(gpus=2, comment="synergy:elastic=rigid") == job_id
    world.slurm.change(job_id, submit_s=995.0)
    if reboot:
        world.boot()
    seen = world.seen(job_id)
    assert (seen.job.submitted_s, seen.job.gpus, seen.phase) == (995.0, 2, JobPhase.PENDING)
    assert world.book.job_ids() == ()
    assert f"job {job_id}: another job had this id" in caplog.text


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"admin_comment": "synergy:v=2,wrapper=yes"}, "version"),
        ({"admin_comment": "synergy:v=1,wrapper=maybe,gpn=1"}, "malformed"),
        ({"comment": "synergy:colour=red"}, "colour"),
        ({"comment": "synergy:min_gpus=4,max_gpus=2"}, "contradict"),
        ({"admin_comment": "", "gpu_form": GpuForm.PER_JOB}, "can be planned"),
        ({"admin_comment": "", "gpus_asked": {"v100": 1, "a100": 1}}, "can be planned"),
        ({"array_job_id": 1, "array_task_id": "1-3"}, "members 1-3 of the array wait"),
        ({"het_job_id": 1}, "heterogeneous"),
        ({"dependency": "afterok:7"}, "afterok:7"),
        ({"eligible_s": 5000.0}, "begins"),
        ({"batch": False}, "sbatch"),
    ],
)
def test_what_cannot_be_planned_waits_with_a_reason(
    world: World, given: dict[str, Any], text: str
) -> None:
    bad, good = world.slurm.submit(**given), world.slurm.submit()
    result = world.round()
    reason = result.plan.waiting[bad]
    assert reason.code is ReasonCode.NOT_OURS
    assert text in reason.text
    assert world.slurm.jobs[bad].held is Hold.ADMIN
    assert world.slurm.jobs[good].priority == 1


def test_slurms_own_delay_after_a_requeue_blocks_nothing(world: World) -> None:
    job_id = world.slurm.submit(eligible_s=5000.0, restarts=1)
    assert world.seen(job_id).blocked is None


def test_nodes_that_are_not_ours_now_have_no_capacity(make_world: MakeWorld) -> None:
    slurm = FakeSlurm(nodes=5)
    slurm.nodes["v100-1"] = replace(slurm.nodes["v100-1"], flags=frozenset({"DRAIN"}))
    slurm.nodes["v100-2"] = replace(slurm.nodes["v100-2"], flags=frozenset({"NOT_RESPONDING"}))
    slurm.foreign["v100-3"] = 1
    slurm.reservations["theirs"] = ReservationFacts(name="theirs", nodes=("v100-4",))
    world = make_world(slurm)
    capacity = {node.name: node.capacity.gpus for node in world.cluster.look().nodes}
    assert capacity == {"v100-1": 0, "v100-2": 0, "v100-3": 0, "v100-4": 0, "v100-5": 8}
    # A node on which others run is not taken before they have ended.
    assert slurm.reservations["synergy"].nodes == ("v100-1", "v100-2", "v100-5")
    del slurm.foreign["v100-3"]
    world.cluster.tick()
    assert slurm.reservations["synergy"].nodes == ("v100-1", "v100-2", "v100-3", "v100-5")
    slurm.foreign["v100-3"] = 1  # an operator's, forced into it
    world.cluster.tick()
    assert "v100-3" in slurm.reservations["synergy"].nodes


def test_our_own_jobs_do_not_make_a_node_foreign(world: World) -> None:
    job_id = world.slurm.submit(gpus=8)
    world.step()
    (node,) = world.slurm.jobs[job_id].node_list
    seen = world.cluster.look()
    assert {one.name: one.capacity.gpus for one in seen.nodes} == {"v100-1": 8, "v100-2": 8}
    assert seen.free[node].gpus == 0
    world.slurm.requeue_hold(job_id)
    # Slurm drops the GPU indices of a job that ends before it frees the GPUs.
    parts = world.slurm.jobs[job_id].allocation
    world.slurm.change(job_id, allocation=tuple(replace(part, gpu_ids=()) for part in parts))
    world.slurm.foreign[node] = 8
    assert {one.capacity.gpus for one in world.cluster.look().nodes} == {8}


def test_a_partition_that_suddenly_has_no_node_changes_nothing(world: World) -> None:
    job_id = world.slurm.submit()
    world.step()
    calls = len(world.slurm.calls)
    world.slurm.nodes = {}
    with pytest.raises(ClusterError, match="no GPU node"):
        world.cluster.tick()
    assert len(world.slurm.calls) == calls
    assert world.book.job_ids() == (job_id,)


def test_a_job_missing_in_one_answer_keeps_its_lease_if_slurm_still_knows_it(world: World) -> None:
    job_id = world.slurm.submit()
    world.step()
    facts = world.slurm.jobs[job_id]
    world.slurm.read_queue = lambda partition=None: ()  # type: ignore[method-assign]
    world.cluster.tick()
    assert world.book.job_ids() == (job_id,)
    del world.slurm.jobs[job_id]
    world.cluster.tick()
    assert world.book.job_ids() == ()
    assert facts.running


def test_shared_asks_for_all_cores_and_requeue_for_the_planned_ones(make_world: MakeWorld) -> None:
    for choice, cores in (("auto", 24), ("requeue", 12)):
        world = make_world(enforcement=choice)
        job_id = world.slurm.submit(gpus=4)
        world.round()
        facts = world.slurm.jobs[job_id]
        assert (facts.min_cpus_node, facts.min_mem_node_mib) == (cores, 250_000)
        lease = world.book.lease(job_id)
        assert lease is not None
        assert len(next(iter(lease.cores.values()))) == 12


def test_a_partition_without_force_is_refused_for_shared(make_world: MakeWorld) -> None:
    slurm = FakeSlurm(oversubscribe=("NO", 1))
    assert make_world(slurm).cluster.enforcement is Enforcement.BORROW
    with pytest.raises(ConfigError, match="OverSubscribe=FORCE"):
        make_world(slurm, enforcement="shared")


def test_who_borrows_asks_slurm_for_his_proportional_share_and_no_more(
    make_world: MakeWorld,
) -> None:
    one = make_world(FakeSlurm(nodes=1, oversubscribe=("NO", 1)))
    jobs = [one.slurm.submit(gpus=2) for _ in range(4)]
    one.round()
    assert {one.slurm.jobs[job_id].min_cpus_node for job_id in jobs} == {6}
    # What is about to start has its cores set aside by Slurm, and no more than that.
    assert one.cluster.look().free["v100-1"].cpus == 0


def test_tasks_get_equal_whole_cores(world: World) -> None:
    job_id = world.slurm.submit(gpus=5, tasks=5)
    world.round()
    facts = world.slurm.jobs[job_id]
    assert (facts.cpus_per_task, facts.min_cpus_node) == (4, 20)


def test_a_job_without_the_wrapper_gets_its_share_and_keeps_its_cores(world: World) -> None:
    plain, other = world.slurm.submit(wrapped=False), world.slurm.submit()
    world.step()
    world.step()
    facts = world.slurm.jobs[plain]
    assert facts.min_cpus_node == 12
    lease = world.book.lease(other)
    assert lease is not None
    (node,) = facts.node_list
    assert lease.placement.nodes == (node,)
    assert set(lease.cores[node]).isdisjoint(facts.allocation[0].cpu_ids)


def test_the_lease_is_durable_before_the_release(world: World, make_world: MakeWorld) -> None:
    world.slurm.submit()
    world.round()
    position = world.slurm.calls.index("release")
    fresh = make_world()
    job_id = fresh.slurm.submit()
    fresh.slurm.break_at = {position + 1: Crash()}
    with pytest.raises(Crash):
        fresh.round()
    assert fresh.slurm.jobs[job_id].priority == 0
    assert fresh.book.job_ids() == (job_id,)


def test_a_start_that_slurm_refuses_is_told_and_tried_again_later(world: World) -> None:
    job_id = world.slurm.submit()
    broken = SlurmCommandError(("scontrol",), 1, "Requested node configuration is not available")
    world.slurm.break_at = {len(world.slurm.calls) + n: broken for n in range(1, 4)}
    (outcome,) = world.round().outcomes
    assert not outcome.done
    assert outcome.reason is not None
    assert "node configuration" in outcome.reason.text
    blocked = world.seen(job_id).blocked
    assert blocked is not None
    assert blocked.code is ReasonCode.START_REFUSED
    world.slurm.break_at = {}
    world.clock.advance(6.0)
    world.step()
    assert world.slurm.jobs[job_id].running


def test_a_job_whose_starts_keep_failing_is_tried_less_and_less_often(world: World) -> None:
    job_id = world.slurm.submit()
    broken = SlurmCommandError(("scontrol",), 1, "Access denied to requested reservation")
    tried_s: list[float] = []
    for _ in range(100):
        calls = len(world.slurm.calls)
        world.slurm.break_at = {calls + n: broken for n in range(1, 4)}
        now_s = world.clock.now_s()
        tried_s += [now_s for one in world.round().outcomes if isinstance(one.action, Start)]
        world.slurm.break_at = {}
        world.clock.advance(1.0)
    gaps = [after - before for before, after in itertools.pairwise(tried_s)]
    assert gaps == [5.0, 10.0, 20.0, 40.0]
    world.clock.advance(100.0)
    world.step()
    assert world.slurm.jobs[job_id].running


def test_a_job_whose_launch_fails_does_not_drain_node_after_node(world: World) -> None:
    job_id = world.slurm.submit()
    tried_s: list[float] = []
    for restarts in range(1, 41):
        now_s = world.clock.now_s()
        world.round()
        world.slurm.schedule()
        world.clock.advance(1.0)
        world.cluster.tick()
        if world.slurm.jobs[job_id].running:
            tried_s.append(now_s)
            world.slurm.change(
                job_id,
                state=JobState.PENDING,
                reason="launch_failed_requeued_held",
                held=Hold.USER,
                priority=0,
                restarts=restarts,
                allocation=(),
                node_list=(),
            )
            world.cluster.tick()
            blocked = world.seen(job_id).blocked
            assert blocked is not None
            assert blocked.code is ReasonCode.START_REFUSED
            assert "launch failed" in blocked.text
    gaps = [after - before for before, after in itertools.pairwise(tried_s)]
    assert gaps == [6.0, 11.0, 21.0]
    world.round()
    assert world.slurm.jobs[job_id].held is Hold.ADMIN
    assert world.book.job_ids() == ()


def test_a_job_that_does_not_start_in_time_is_held_again(world: World) -> None:
    job_id = world.slurm.submit()
    world.round()
    world.slurm.change(job_id, reason="Licenses")
    world.cluster.tick()
    assert world.seen(job_id).phase is JobPhase.STARTING
    world.clock.advance(11.0)
    world.cluster.tick()
    assert world.slurm.jobs[job_id].held is Hold.ADMIN
    world.cluster.tick()
    seen = world.seen(job_id)
    assert world.book.job_ids() == ()
    assert seen.phase is JobPhase.PENDING
    assert seen.blocked is not None
    assert "Licenses" in seen.blocked.text


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_begin_time_moved_during_the_start_takes_the_start_back_at_once(
    world: World, restarts: int
) -> None:
    job_id = world.slurm.submit(restarts=restarts)
    world.round()
    begin_s = world.clock.now_s() + 3600
    world.slurm.change(job_id, eligible_s=begin_s, start_s=begin_s, reason="None")
    world.cluster.tick()
    assert world.slurm.jobs[job_id].held is Hold.ADMIN
    world.cluster.tick()
    assert world.book.job_ids() == ()
    blocked = world.seen(job_id).blocked
    assert blocked is not None
    # After a requeue Slurm has a begin time of its own, so that only the refusal is left.
    words = "its begin time was moved by 3600 s" if restarts else "begins 3600 s from now"
    assert words in blocked.text
    other = world.slurm.submit(gpus=8)
    world.round()
    assert world.slurm.jobs[other].priority == 1


def test_the_clock_of_another_machine_takes_no_start_back(world: World) -> None:
    job_id = world.slurm.submit()
    world.round()
    ahead_s = world.clock.now_s() + 60
    world.slurm.change(job_id, eligible_s=ahead_s, start_s=None)
    world.cluster.tick()
    assert world.slurm.jobs[job_id].priority == 1
    assert world.book.job_ids() == (job_id,)


def test_a_running_job_is_held_and_a_stopped_one_requeued_when_its_time_is_over(
    world: World,
) -> None:
    job_id = world.slurm.submit()
    world.step()
    assert world.slurm.jobs[job_id].held is Hold.ADMIN
    reason = Reason(code=ReasonCode.PREEMPTED, text="test")
    world.book.stop(job_id=job_id, reason=reason, grace_s=3.0)
    world.cluster.tick()
    assert "requeue_hold" not in world.slurm.calls
    world.clock.advance(4.0)
    world.cluster.tick()
    world.cluster.tick()
    assert world.slurm.calls.count("requeue_hold") == 1
    assert world.seen(job_id).phase is JobPhase.ENDING
    assert world.book.job_ids() == (job_id,)
    world.slurm.settle()
    world.cluster.tick()
    assert world.book.job_ids() == ()
    world.step()
    assert world.book.incarnation(job_id) == 1


def test_a_grace_hint_is_obeyed_up_to_an_hour(world: World) -> None:
    job_id = world.slurm.submit(comment="synergy:grace_s=100000", time_limit_s=9e6)
    world.step()
    world.slurm.submit(gpus=8, time_limit_s=60.0)
    world.slurm.submit(gpus=8, time_limit_s=60.0)
    world.round("srtf")
    (stored,) = [one for one in world.ledger.load_leases() if one.lease.job_id == job_id]  # type: ignore[union-attr]
    assert stored.stop_deadline_s == world.clock.now_s() + 3600.0


def test_a_start_on_other_resources_than_planned_is_adopted_as_it_is(world: World) -> None:
    job_id = world.slurm.submit()
    world.round()
    world.slurm.schedule()
    (part,) = world.slurm.jobs[job_id].allocation
    world.slurm.change(job_id, allocation=(replace(part, mem_mib=1234),))
    world.cluster.tick()
    lease = world.book.lease(job_id)
    assert lease is not None
    assert lease.granted[part.node] == Resources(gpus=4, cpus=24, mem_mib=1234)


def test_a_running_job_that_is_not_in_the_ledger_is_adopted(world: World) -> None:
    job_id = world.slurm.submit()
    world.step()
    world.state_dir = world.state_dir.with_name("lost")
    world.boot()
    world.cluster.tick()
    lease = world.book.lease(job_id)
    assert lease is not None
    assert lease.placement.on("v100-1").cpus == 12


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_controller_may_die_at_every_step_of_a_start_and_of_a_stop(
    make_world: MakeWorld, after: bool
) -> None:
    """Promise P4: whatever dies, the job ends up running, on one lease that says where."""
    for number in itertools.count(1):
        world = make_world()
        world.slurm.after = after
        job_id = world.slurm.submit(gpus=8)
        base = len(world.slurm.calls)
        world.slurm.break_at = {base + number: Crash()}
        died = _play(world, job_id)
        facts, lease = world.slurm.jobs[job_id], world.book.lease(job_id)
        assert facts.running, (number, world.slurm.calls)
        assert facts.restarts == 1
        assert facts.held is Hold.ADMIN
        assert lease is not None
        assert lease.placement.nodes == facts.node_list
        assert world.book.incarnation(job_id) == 1
        if not died:
            assert number > 8, "the crash was never reached"
            return


def _play(world: World, job_id: int) -> bool:
    """Start the job, stop it, and let it start again; a dead controller is booted anew."""
    died, told = False, False
    for _ in range(12):
        try:
            world.step()
            facts = world.slurm.jobs[job_id]
            if facts.running and facts.restarts == 0 and not told:
                reason = Reason(code=ReasonCode.PREEMPTED, text="test")
                world.book.stop(job_id=job_id, reason=reason, grace_s=0.5)
                told = True
        except Crash:
            died = True
            world.boot()
    return died


def test_a_finished_job_ends_its_lease(world: World) -> None:
    job_id = world.slurm.submit()
    world.step()
    world.slurm.finish(job_id, JobState.CANCELLED)
    world.cluster.tick()
    assert world.book.job_ids() == ()
    assert [one.job.job_id for one in world.cluster.look().jobs] == []


def test_a_dry_run_touches_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.slurm.submit()
    world.slurm.reservations.clear()
    caplog.set_level(logging.INFO)
    calls, before = len(world.slurm.calls), dict(world.slurm.jobs)
    dry = DryRun(world.cluster)
    dry.prepare()
    dry.tick()
    assert world.ledger is not None
    result = run_round(
        dry, world.ledger, world.clock, POLICIES["fifo"], MECHANISMS["proportional"], 300.0
    )
    assert [outcome.done for outcome in result.outcomes] == [False]
    assert (len(world.slurm.calls), world.slurm.jobs) == (calls, before)
    dry.prepare()
    told = [one.message for one in caplog.records if "reservation" in one.message]
    assert told == ["dry run: would make reservation synergy over v100-[1-2]"]
    world.slurm.reservations["synergy"] = ReservationFacts(name="synergy", nodes=("v100-1",))
    dry.prepare()
    assert "dry run: would move reservation synergy to v100-[1-2]" in caplog.text
    caplog.clear()
    world.slurm.reservations["synergy"] = ReservationFacts(
        name="synergy", nodes=("v100-1", "v100-2")
    )
    dry.prepare()
    assert caplog.text == ""


def test_nodes_of_the_pool_that_cannot_be_scheduled_are_named_once(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    slurm = FakeSlurm(nodes=4)
    slurm.nodes["v100-3"] = replace(slurm.nodes["v100-3"], partitions=("other",))
    slurm.nodes["v100-4"] = replace(slurm.nodes["v100-4"], gpus={})
    world = make_world(slurm, pool={"nodes": "v100-[1-9]"})
    seen = world.cluster.tick()
    assert [node.name for node in seen.nodes] == ["v100-1", "v100-2"]
    (told,) = [one.message for one in caplog.records if one.levelno == logging.WARNING]
    assert told.startswith(
        "pool.nodes = 'v100-[1-9]': not in partition 'synergy': v100-3; without GPUs of one type: "
        "v100-4; Slurm does not know v100-[5-9];"
    )


def test_a_pool_that_is_no_host_list_is_a_wrong_setting(make_world: MakeWorld) -> None:
    with pytest.raises(ConfigError, match=r"pool\.nodes = 'v100-\[1': not a host list"):
        make_world(pool={"nodes": "v100-[1"})


def test_a_slurm_that_does_not_answer_is_not_taken_for_a_lack_of_rights(
    make_world: MakeWorld,
) -> None:
    slurm = FakeSlurm()
    down = SlurmCommandError(("scontrol",), 1, "Connection refused", kind="controller_down")
    slurm.break_at = {1: down}
    with pytest.raises(ClusterError) as caught:
        make_world(slurm)
    assert caught.value.in_short == "Slurm does not answer (Connection refused)"


def test_the_reservation_is_made_repaired_adopted_and_opened_to_owners(world: World) -> None:
    name = world.settings.reservation_name
    world.slurm.submit()
    world.round()
    assert world.slurm.reservations[name].users == ("ann", "root")
    world.slurm.reservations[name] = replace(world.slurm.reservations[name], nodes=("v100-1",))
    world.boot()
    assert world.slurm.reservations[name].nodes == ("v100-1", "v100-2")
    assert world.slurm.reservations[name].users == ("ann", "root")
    assert world.slurm.calls.count("create_reservation") == 1
    del world.slurm.reservations[name]
    world.cluster.prepare()
    assert world.slurm.calls.count("create_reservation") == 2


def test_without_a_reservation_none_is_made_and_reserved_nodes_are_left_alone(
    make_world: MakeWorld,
) -> None:
    slurm = FakeSlurm()
    slurm.nodes["v100-1"] = replace(slurm.nodes["v100-1"], flags=frozenset({"RESERVED"}))
    world = make_world(slurm, pool={"reservation": False})
    job_id = slurm.submit()
    world.step()
    assert slurm.reservations == {}
    assert slurm.jobs[job_id].node_list == ("v100-2",)


def test_a_reservation_that_cannot_be_made_says_what_is_missing(make_world: MakeWorld) -> None:
    slurm = FakeSlurm()
    denied = SlurmCommandError(("scontrol",), 1, "Access/permission denied", kind="permission")
    slurm.break_at = {1: denied}
    with pytest.raises(ClusterError, match=r"operator, or set pool\.reservation: false"):
        make_world(slurm)


def test_a_waiting_job_and_a_node_of_which_nothing_has_changed_stay_the_same_objects(
    world: World,
) -> None:
    plain = world.slurm.submit(gpus=8)
    later = world.slurm.submit(gpus=8, eligible_s=world.clock.now_s() + 60)
    first = world.cluster.look()
    again = world.cluster.look()
    assert [one is other for one, other in zip(again.jobs, first.jobs, strict=True)] == [True] * 2
    assert [one is other for one, other in zip(again.nodes, first.nodes, strict=True)] == [True] * 2
    # Why a job is blocked also depends on the time and on what failed before.
    world.clock.advance(30)
    blocked = world.seen(later).blocked
    assert blocked is not None and "begins 30 s from now" in blocked.text
    world.clock.advance(31)
    assert world.seen(later).blocked is None
    world.slurm.break_at[len(world.slurm.calls) + 2] = ClusterError("no")
    world.round()
    refused = next(one for one in world.cluster.look().jobs if one.blocked)
    assert refused.blocked is not None and refused.blocked.code is ReasonCode.START_REFUSED
    world.clock.advance(6)
    assert world.seen(refused.job.job_id).blocked is None
    world.slurm.change(plain, comment="synergy:samples=70,elastic=scale")
    changed = world.seen(plain).job
    assert changed.total_samples == 70
    assert changed.elasticity is Elasticity.RIGID, "it was not admitted as an elastic one"
    world.slurm.foreign["v100-1"] = 1
    capacity = {node.name: node.capacity.gpus for node in world.cluster.look().nodes}
    assert capacity == {"v100-1": 0, "v100-2": 8}


def test_a_pool_that_gets_another_kind_of_gpu_is_looked_at_anew(world: World) -> None:
    closed = replace(world.slurm.read_partition("synergy"), allow_accounts=("vision",))
    views = world.cluster._views
    views._access = replace(views._access, by_type={"a100": closed})
    waiting = world.slurm.submit(kind="", account="nlp")
    running = world.slurm.submit(comment="synergy:grace_s=7")
    before = world.seen(waiting)
    assert before.job.gpu_types == ()
    world.seen(running)
    new = replace(world.slurm.nodes["v100-1"], name="a100-1", gpus={"a100": 8})
    world.slurm.nodes["a100-1"] = new
    views.on(world.slurm.read_nodes())
    assert world.cluster.grace_s(running) == 7.0, "as known before, until it is looked at again"
    job = world.seen(waiting).job
    assert job.gpu_types == ("v100",), "no a100 for that account"
    del world.slurm.nodes["a100-1"]
    assert world.seen(waiting).job == before.job


def test_what_a_view_lacked_is_taken_in_when_it_comes(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = world.slurm.submit(comment="synergy:epochs=2,profile=mine")
    first = world.seen(job_id)
    assert first.job.total_samples is None and world.seen(job_id) is first
    assert world.ledger is not None
    pipeline = CATALOGUE["resnet18-imagenet"].pipeline
    assert pipeline is not None
    world.ledger.save_profile(Profile(key="mine", pipeline=pipeline))
    assert world.seen(job_id).job.total_samples == 2.0 * pipeline.samples_per_epoch
    wrong = world.slurm.submit(gpu_form=GpuForm.PER_JOB, marked=False)
    for reason in ("Priority", "Resources"):
        world.slurm.change(wrong, reason=reason)
        assert world.seen(wrong).blocked is not None
    assert caplog.text.count(f"job {wrong}: ") == 1
    world.slurm.change(wrong, gpu_form=GpuForm.PER_NODE)
    assert world.seen(wrong).blocked is None
    world.slurm.change(wrong, gpus_asked={"v100": 8})
    world.boot()
    assert world.seen(wrong).job.gpus == 4, "as its owner corrected it"


def test_a_job_that_started_and_waits_again_is_seen_as_what_it_is(world: World) -> None:
    job_id = world.slurm.submit()
    before = world.slurm.jobs[job_id]
    assert world.seen(job_id).phase is JobPhase.PENDING
    world.step()
    assert world.seen(job_id).phase is JobPhase.RUNNING
    # Slurm shows the very record again: a start that was taken back.
    world.book.end(job_id)
    world.slurm.jobs[job_id] = before
    assert world.seen(job_id).phase is JobPhase.PENDING


def test_resizes_together_tell_of_each_what_became_of_it(world: World) -> None:
    jobs = [world.slurm.submit(gpus=4) for _ in range(3)]
    world.step()
    leases = [world.book.lease(job_id) for job_id in jobs]

    def smaller(job_id: int, cpus: int, gpus: int = 4) -> Resize:
        lease = leases[job_id - 1]
        assert lease is not None
        share = replace(lease.placement.shares[0][1], cpus=cpus, gpus=gpus)
        return Resize(
            job_id=job_id,
            placement=replace(lease.placement, shares=((lease.placement.nodes[0], share),)),
        )

    wanted = [smaller(1, 5), smaller(2, 6, gpus=2), smaller(3, 7)]
    del world.slurm.jobs[3]
    world.cluster.look()
    calls = len(world.slurm.calls)
    outcomes = world.cluster.resize_all(wanted, {})
    assert [outcome.action for outcome in outcomes] == wanted
    assert [outcome.done for outcome in outcomes] == [True, False, False]
    assert [outcome.reason and outcome.reason.code for outcome in outcomes] == [
        None,
        ReasonCode.ACTION_FAILED,
        ReasonCode.NOT_OURS,
    ]
    lease = world.book.lease(1)
    assert lease is not None
    assert lease.placement == wanted[0].placement
    assert len(world.slurm.calls) == calls
