from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from builders import (
    CATALOGUE,
    GIB,
    Harness,
    MemoryCluster,
    job,
    node,
    placement,
    profile,
    quiet,
    res,
)

from slurm_synergy.cluster import (
    Action,
    Hold,
    Observation,
    ObservedJob,
    Outcome,
    Record,
    Renew,
    Resize,
    Start,
    Stop,
)
from slurm_synergy.core.model import (
    Decision,
    Enforcement,
    Job,
    JobPhase,
    JobStatus,
    Layout,
    Lease,
    Profile,
    Reason,
    ReasonCode,
    Snapshot,
)
from slurm_synergy.core.pipeline import fit_to_job
from slurm_synergy.errors import ClusterError, ModelError, PlanError
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.round import Known, build_snapshot, plan_round, run_round

PAIR = [node("v100-1"), node("v100-2")]
STOPPED = Reason(code=ReasonCode.PREEMPTED, text="")


def build(seen: ObservedJob, record: Record | None = None, **more: object) -> JobStatus:
    """The one job of a snapshot built from one observation."""
    shot = build_snapshot(
        Observation(nodes=tuple(PAIR), jobs=(seen,), free={}, **more),
        {seen.job.job_id: record} if record else {},
        round_number=1,
        now_s=5.0,
        round_s=300.0,
        profile_of=CATALOGUE.get,
    )
    (status,) = shot.jobs
    return status


def seen(phase: JobPhase, one: Job | None = None, **more: object) -> ObservedJob:
    more.setdefault(
        "allocated", () if phase is JobPhase.PENDING else (("v100-1", res(4, 24, 300_000)),)
    )
    return ObservedJob(job=one or job(1, 4), phase=phase, **more)


LEASE = Lease(
    job_id=1, generation=7, placement=placement(1, v100_1=res(4, 20, 280_000)), expires_s=9.0
)


# building a snapshot --------------------------------------------------------------------------


def test_a_job_where_we_put_it_keeps_its_lease() -> None:
    status = build(seen(JobPhase.RUNNING), Record(job_id=1, lease=LEASE, done_samples=3.0))
    assert status.phase is JobPhase.RUNNING
    assert status.lease == LEASE
    assert status.done_samples == 3.0


def test_a_job_that_names_no_profile_has_the_one_that_is_remembered_for_it() -> None:
    record = Record(job_id=1, profile_key="resnet18-imagenet")
    assert build(seen(JobPhase.PENDING)).profile.key == ""
    assert build(seen(JobPhase.PENDING), record).profile.key == "resnet18-imagenet"
    named = seen(JobPhase.PENDING, profile_key="alexnet-imagenet")
    assert build(named, record).profile.key == "alexnet-imagenet"


def test_a_running_job_without_a_record_is_taken_at_its_proportional_cores() -> None:
    status = build(seen(JobPhase.RUNNING))
    assert status.lease is not None
    assert status.lease.placement == placement(1, v100_1=res(4, 12, 300_000))
    assert status.lease.granted == {"v100-1": res(4, 24, 300_000)}
    assert status.lease.generation == 0


def test_a_job_that_runs_elsewhere_than_we_remember_is_taken_where_it_runs() -> None:
    moved = (("v100-2", res(4, 24, 100_000)),)
    status = build(seen(JobPhase.RUNNING, allocated=moved), Record(job_id=1, lease=LEASE))
    assert status.lease is not None
    assert status.lease.placement == placement(1, v100_2=res(4, 12, 100_000))


def test_where_cores_are_exclusive_an_unknown_running_job_holds_all_it_was_given() -> None:
    status = build(seen(JobPhase.RUNNING), enforcement=Enforcement.REQUEUE)
    assert status.lease is not None
    assert status.lease.placement.on("v100-1").cpus == 24


def test_an_unwrapped_job_holds_the_cores_that_the_cluster_confines_it_to() -> None:
    plain = job(1, 4, wrapped=False, preemptible=False)
    status = build(seen(JobPhase.RUNNING, plain, cores={"v100-1": (0, 1, 2)}))
    assert status.lease is not None
    assert status.lease.placement.on("v100-1").cpus == 3
    assert status.lease.cores == {"v100-1": (0, 1, 2)}


@pytest.mark.parametrize("phase", [JobPhase.RUNNING, JobPhase.STARTING])
def test_a_job_that_was_told_to_stop_is_stopping(phase: JobPhase) -> None:
    record = Record(job_id=1, lease=LEASE, stopping=STOPPED)
    assert build(seen(phase), record).phase is JobPhase.STOPPING


def test_a_job_that_is_back_in_the_queue_holds_nothing() -> None:
    record = Record(job_id=1, lease=LEASE, stopping=STOPPED)
    status = build(seen(JobPhase.PENDING), record)
    assert status.phase is JobPhase.PENDING and status.lease is None


def test_a_starting_job_that_nobody_knows_the_place_of_is_left_alone() -> None:
    status = build(seen(JobPhase.STARTING, allocated=()))
    assert status.phase is JobPhase.PENDING
    assert status.blocked is not None and "starting" in status.blocked.text


def test_no_place_is_kept_for_a_job_that_ends_by_itself() -> None:
    by_itself = build(seen(JobPhase.ENDING), Record(job_id=1, lease=LEASE))
    by_us = build(seen(JobPhase.ENDING), Record(job_id=1, lease=LEASE, stopping=STOPPED))
    assert by_itself.phase is by_us.phase is JobPhase.ENDING
    assert by_itself.blocked is not None and by_us.blocked is None


def test_a_measured_profile_beats_the_named_one_and_takes_the_users_minimum_memory() -> None:
    one = job(1, 4, min_mem_mib_per_node=7 * GIB)
    named = build(seen(JobPhase.PENDING, one, profile_key="m5-audio"))
    assert named.profile.pipeline is not None
    assert named.profile.key == "m5-audio"
    assert named.profile.pipeline.process_mem_mib == 7 * GIB
    measured = profile()
    found = build(
        seen(JobPhase.PENDING, one, profile_key="m5-audio"), Record(job_id=1, profile=measured)
    )
    assert found.profile.key == "made"
    assert build(seen(JobPhase.PENDING, profile_key="none-such")).profile == Profile()


# playing rounds -------------------------------------------------------------------------------


def test_four_jobs_start_at_once_and_then_all_is_quiet() -> None:
    harness = Harness(PAIR)
    names = ["resnet18-openimages", "m5-audio", "gnmt-wmt16", "transformerxl-wikitext103"]
    for job_id, name in enumerate(names, start=1):
        harness.submit(job(job_id, 4), name)
    first = harness.round()
    assert [type(action) for action in first.actions] == [Start] * 4
    assert harness.running() == [1, 2, 3, 4]
    assert [harness.lease(n).shares[0][1].cpus for n in (1, 2, 3, 4)] == [23, 23, 1, 1]
    assert quiet(harness.round()) and quiet(harness.round())


def test_jobs_that_arrive_one_by_one_end_up_in_pairs_and_trade_cores_in_place() -> None:
    harness = Harness([node()])
    harness.submit(job(1, 4), "resnet18-imagenet")
    harness.round()
    assert harness.lease(1).shares[0][1].cpus == 24
    harness.submit(job(2, 4), "gnmt-wmt16")
    second = harness.round()
    assert [type(action) for action in second.actions] == [Resize, Start]
    assert harness.lease(1).shares[0][1].cpus == 23
    harness.finish(2)
    third = harness.round()
    assert [type(action) for action in third.actions] == [Resize]
    assert harness.lease(1).shares[0][1].cpus == 24


def test_memory_granted_at_the_start_is_given_back_by_one_restart() -> None:
    # Alone, the first is granted nearly all memory; the second then needs 250 GB of it.
    greedy = profile(
        per_core=1000, gpu_rate=300, dataset_mib=450_000, storage_mib_s=10, samples=10_000
    )
    harness = Harness([node()])
    harness.submit(job(1, 4), belief=greedy)
    harness.round()
    assert harness.lease(1).shares[0][1].mem_mib > 400_000
    harness.submit(job(2, 4))
    second = harness.round()
    assert [type(action) for action in second.actions] == [Stop, Hold]
    assert second.deferred[2].code is ReasonCode.GPUS_BUSY
    hold = second.outcomes[-1]
    assert hold.reason == second.deferred[2]
    harness.round()
    assert harness.running() == [1, 2]
    assert harness.cluster.jobs[1].restarts == 1
    assert quiet(harness.round())


def test_a_shorter_job_preempts_under_srtf_and_the_longer_one_comes_back() -> None:
    harness = Harness([node(gpus=4, cpus=12)], "srtf")
    harness.submit(job(1, 4, time_limit_s=36_000))
    harness.round()
    harness.submit(job(2, 4, time_limit_s=600))
    stopped = harness.round_while_stopping()
    assert [type(action) for action in stopped.actions] == [Stop, Hold]
    still = harness.round_while_stopping()
    assert [type(action) for action in still.actions] == [Hold]
    harness.round()
    assert harness.running() == [2]
    harness.finish(2)
    harness.round()
    assert harness.running() == [1]


def test_a_backfilled_job_is_not_stopped_and_started_in_turn() -> None:
    harness = Harness([node(gpus=8)])
    harness.submit(job(1, 6))
    harness.round()
    harness.submit(job(2, 4))  # older than 3, but does not fit beside 1
    harness.submit(job(3, 2))
    for _ in range(4):
        harness.round()
    assert harness.running() == [1, 3]
    assert harness.cluster.jobs[3].restarts == 0


def test_draining_keeps_what_runs_and_starts_nothing() -> None:
    harness = Harness(PAIR)
    harness.submit(job(2, 8))
    harness.round()
    harness.records.drain = True
    harness.submit(job(1, 8))
    found = harness.round()
    assert harness.running() == [2] and found.plan.waiting[1].code is ReasonCode.DRAINED


def test_a_job_stays_on_a_node_that_drains_and_no_other_comes() -> None:
    harness = Harness(PAIR)
    harness.submit(job(1, 4))
    harness.round()
    harness.cluster.nodes = [node("v100-1", usable=False), node("v100-2")]
    harness.submit(job(2, 4))
    found = harness.round()
    assert found.actions == (
        Start(job_id=2, placement=placement(2, v100_2=res(4, 12, 250_000))),
        Renew(job_id=1),
    )


def test_planning_alone_changes_nothing() -> None:
    harness = Harness(PAIR)
    harness.submit(job(1, 4))
    planned = plan_round(
        harness.cluster.observe(),
        harness.records,
        harness.clock,
        harness.policy,
        harness.mechanism,
        round_number=1,
        round_s=300.0,
    )
    assert [type(action) for action in planned.actions] == [Start]
    assert not harness.records.intents and harness.running() == []


def test_intents_are_written_before_anything_is_done() -> None:
    harness = Harness([node()])
    harness.submit(job(1, 4))
    plain = harness.cluster.apply
    known: list[bool] = []

    def apply(action: Action, status: JobStatus) -> Outcome:
        known.append(harness.records.intents[-1][1] == (action,))
        return plain(action, status)

    harness.cluster.apply = apply  # type: ignore[method-assign]
    harness.round()
    assert known == [True]


def test_one_failing_action_does_not_stop_the_others() -> None:
    harness = Harness([node()])
    harness.submit(job(1, 4))
    harness.submit(job(2, 4))
    plain = harness.cluster.apply

    def apply(action: Action, status: JobStatus) -> Outcome:
        if action.job_id == 1:
            raise ClusterError("scontrol: slurm_load_jobs error: no answer")
        return plain(action, status)

    harness.cluster.apply = apply  # type: ignore[method-assign]
    found = harness.round()
    failed, done = found.outcomes
    assert not failed.done and failed.reason is not None
    assert failed.reason.code is ReasonCode.ACTION_FAILED and "scontrol" in failed.reason.text
    assert done.done and harness.running() == [2]


def test_an_unreadable_cluster_changes_nothing() -> None:
    harness = Harness([node()])
    harness.submit(job(1, 4))

    def observe() -> Observation:
        raise ClusterError("no answer")

    harness.cluster.observe = observe  # type: ignore[method-assign]
    with pytest.raises(ClusterError):
        harness.round()
    assert not harness.records.intents


class _Overfull:
    """A broken mechanism: everybody gets the whole of the first node."""

    name = "overfull"

    def place(self, snapshot: Snapshot, decision: Decision) -> Layout:
        good = MECHANISMS["proportional"].place(snapshot, decision)
        whole = snapshot.nodes[0]
        return Layout(
            placements=tuple(
                placement(one.job_id, v100_1=res(one.gpus, whole.total.cpus, 500_000))
                for one in good.placements
            )
        )


def test_a_plan_that_breaks_a_promise_is_not_applied_and_running_jobs_are_renewed() -> None:
    harness = Harness(PAIR)
    harness.submit(job(1, 4))
    harness.submit(job(2, 4))
    harness.round()
    harness.submit(job(3, 4))
    harness.mechanism = _Overfull()
    with pytest.raises(PlanError):
        harness.round()
    assert harness.records.intents[-1][1] == (Renew(job_id=1), Renew(job_id=2))
    assert harness.running() == [1, 2]


def test_the_order_in_which_the_cluster_lists_things_does_not_matter() -> None:
    def shot(step: int) -> Snapshot:
        listed = [seen(JobPhase.PENDING, job(n, 1)) for n in (1, 2, 3)]
        return build_snapshot(
            Observation(nodes=tuple(PAIR[::step]), jobs=tuple(listed[::step]), free={}),
            {},
            round_number=1,
            now_s=5.0,
            round_s=300.0,
            profile_of=CATALOGUE.get,
        )

    assert shot(1) == shot(-1)


class _Together(MemoryCluster):
    """A cluster that resizes together, and notes what it is asked to do."""

    def __init__(self, harness: Harness) -> None:
        super().__init__(nodes=harness.cluster.nodes, enforcement=harness.cluster.enforcement)
        self.asked: list[tuple[str, tuple[int, ...]]] = []
        self.broken = False

    def apply(self, action: Action, status: JobStatus) -> Outcome:
        if not isinstance(action, Renew):
            self.asked.append((type(action).__name__, (action.job_id,)))
        return super().apply(action, status)

    def resize_all(
        self, resizes: Sequence[Resize], statuses: Mapping[int, JobStatus]
    ) -> tuple[Outcome, ...]:
        self.asked.append(("resize_all", tuple(one.job_id for one in resizes)))
        if self.broken:
            raise ClusterError("nothing was written")
        return tuple(super(_Together, self).apply(one, statuses[one.job_id]) for one in resizes)


@pytest.fixture
def crowd() -> tuple[Harness, _Together]:
    """Two hungry jobs with more than their share, on a node each, and a modest one coming."""
    harness = Harness(PAIR, mechanism="tune")
    together = harness.cluster = _Together(harness)
    for number in (1, 2):
        harness.submit(job(number, 4), belief=profile(50.0))
    harness.round()
    for number in (3, 4):
        harness.submit(job(number, 4), belief=profile(50.0))
    together.asked.clear()
    return harness, together


def test_resizes_that_follow_each_other_are_one_step_of_the_cluster(
    crowd: tuple[Harness, _Together],
) -> None:
    harness, together = crowd
    result = harness.round()
    kinds = [type(action) for action in result.actions]
    assert kinds[:4] == [Resize, Resize, Start, Start]
    assert together.asked == [("resize_all", (1, 2)), ("Start", (3,)), ("Start", (4,))]
    assert [outcome.action for outcome in result.outcomes] == list(result.actions)
    assert all(outcome.done for outcome in result.outcomes)


def test_resizes_that_fail_together_fail_each_and_stop_nothing_else(
    crowd: tuple[Harness, _Together],
) -> None:
    harness, together = crowd
    together.broken = True
    outcomes = run_round(
        together, harness.records, harness.clock, harness.policy, harness.mechanism, 300.0
    ).outcomes
    failed = [outcome for outcome in outcomes if not outcome.done]
    assert [outcome.action.job_id for outcome in failed] == [1, 2]
    assert {outcome.reason and outcome.reason.code for outcome in failed} == {
        ReasonCode.ACTION_FAILED
    }
    assert ("Start", (3,)) in together.asked


def test_what_is_known_of_a_waiting_job_holds_as_long_as_all_that_it_was_made_of() -> None:
    waits, known = seen(JobPhase.PENDING, job(1, 4), profile_key="a"), Known()
    beliefs = {"a": profile(50.0)}
    record = Record(job_id=1)

    def status(one: ObservedJob = waits, record: Record | None = record) -> JobStatus:
        shot = build_snapshot(
            Observation(nodes=tuple(PAIR), jobs=(one,), free={}),
            {} if record is None else {1: record},
            round_number=1,
            now_s=5.0,
            round_s=300.0,
            profile_of=beliefs.get,
            known=known,
        )
        return shot.jobs[0]

    first = status()
    assert status() is first
    assert status(replace(waits, held_by_us=True)).held_by_us
    assert status(record=Record(job_id=1, done_samples=5.0)).done_samples == 5.0
    assert status(record=None).done_samples == 0.0
    beliefs["a"] = profile(90.0)
    assert status().profile == fit_to_job(beliefs["a"], waits.job)
    assert status() is status()


def test_a_job_that_is_shown_twice_is_a_contradiction() -> None:
    waits = seen(JobPhase.PENDING, job(1, 4))
    with pytest.raises(ModelError, match="shows a job twice"):
        build_snapshot(
            Observation(nodes=tuple(PAIR), jobs=(waits, waits), free={}),
            {},
            round_number=1,
            now_s=5.0,
            round_s=300.0,
            profile_of=lambda _: None,
        )
