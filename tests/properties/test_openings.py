"""What is told to a waiting job's owner holds: asked for as told, the job is placed."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import event, given, settings
from promises import telling
from strategies import snapshots

from slurm_synergy.core.advice import for_waiting
from slurm_synergy.core.decide import Policy, decide
from slurm_synergy.core.explain import explain, in_words
from slurm_synergy.core.model import JobPhase, JobStatus, Plan, ReasonCode, Snapshot
from slurm_synergy.core.openings import Openings
from slurm_synergy.core.snapshot import status_of
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.policies.queue import QueuePolicy, queue_order

FIFO, TUNE = POLICIES["fifo"], MECHANISMS["tune"]
QUEUES = {name: one for name, one in POLICIES.items() if isinstance(one, QueuePolicy)}
ASKING = (ReasonCode.NO_GPUS, ReasonCode.FRAGMENTED, ReasonCode.NO_MEMORY)


def waiting(snapshot: Snapshot, plan: Plan) -> list[JobStatus]:
    """The jobs that wait for room."""
    statuses = status_of(snapshot)
    return [
        statuses[job_id]
        for job_id, reason in plan.waiting.items()
        if reason.code in ASKING and statuses[job_id].phase is JobPhase.PENDING
    ]


def openings(snapshot: Snapshot, plan: Plan, status: JobStatus) -> Openings:
    """With the policy's own word on what it would grant."""

    def grants(changed: Snapshot) -> bool:
        wanted = status.job.job_id
        return any(grant.job_id == wanted for grant in FIFO.choose(changed).grants)

    return Openings(snapshot, plan, status, grants)


def with_job(snapshot: Snapshot, changed: JobStatus) -> Snapshot:
    jobs = [changed if one.job.job_id == changed.job.job_id else one for one in snapshot.jobs]
    return replace(snapshot, jobs=tuple(jobs))


@settings(max_examples=40)
@given(snapshot=snapshots())
def test_a_smaller_request_that_is_told_to_fit_is_placed(snapshot: Snapshot) -> None:
    plan = decide(snapshot, FIFO, TUNE)
    told = [(one, openings(snapshot, plan, one).smaller()) for one in waiting(snapshot, plan)]
    for status, fits in told:
        if fits is None:
            continue
        gpus, nodes = fits
        job = status.job
        event(f"smaller by {job.gpus - gpus}")
        assert gpus < job.gpus
        asked = replace(
            job,
            gpus=gpus,
            nodes=None if job.nodes is None else nodes,
            tasks_per_node=gpus // nodes if job.tasks_per_node > 1 else 1,
        )
        again = decide(with_job(snapshot, replace(status, job=asked)), FIFO, TUNE)
        assert again.placement(job.job_id) is not None


@settings(max_examples=40)
@given(snapshot=snapshots())
def test_the_gpus_of_another_type_that_are_told_to_fit_are_given(snapshot: Snapshot) -> None:
    plan = decide(snapshot, FIFO, TUNE)
    told = [(one, openings(snapshot, plan, one).other_types()) for one in waiting(snapshot, plan)]
    for status, kinds in told:
        for kind in kinds:
            job = replace(status.job, gpu_types=(*status.job.gpu_types, kind))
            again = decide(with_job(snapshot, replace(status, job=job)), FIFO, TUNE)
            assert again.placement(job.job_id) is not None


@settings(max_examples=40)
@given(snapshot=snapshots())
def test_after_the_ends_that_are_told_the_job_is_placed(snapshot: Snapshot) -> None:
    plan = decide(snapshot, FIFO, TUNE)
    order = queue_order(FIFO, snapshot)  # type: ignore[arg-type]
    for status in waiting(snapshot, plan):
        found = openings(snapshot, plan, status)
        gone = found.after_ends()
        me = status.job.job_id
        ahead = set(order[: order.index(me)]) & plan.waiting.keys()
        if not gone or not found.is_granted_after(gone, ahead):
            continue
        event(f"{len(gone)} ends")
        ended = {end.job_id for end in gone}
        left = tuple(one for one in snapshot.jobs if one.job.job_id not in ended | ahead)
        assert decide(replace(snapshot, jobs=left), FIFO, TUNE).placement(me) is not None


@settings(max_examples=12)
@given(snapshot=snapshots())
def test_every_job_of_every_plan_can_be_explained(snapshot: Snapshot) -> None:
    for policy in sorted(POLICIES):
        with telling(policy, "tune"):
            _assert_explained(POLICIES[policy], replace(snapshot))


def _assert_explained(chosen: Policy, snapshot: Snapshot) -> None:
    plan = decide(snapshot, chosen, TUNE)
    order = queue_order(chosen, snapshot) if isinstance(chosen, QueuePolicy) else ()
    for status in snapshot.jobs:
        found = explain(snapshot, plan, status.job.job_id, order=order)
        assert (found.reason is not None) == (status.job.job_id in plan.waiting)
        assert (found.binding is not None) or found.reason is None
        if found.speedup is not None and plan.placement(status.job.job_id):
            assert found.speedup >= 1 - 1e-9
        assert all(in_words(found))
    ranks = [explain(snapshot, plan, one, order=order).rank for one in order]
    assert ranks == list(range(1, len(order) + 1))


def test_some_policies_have_an_order_to_tell() -> None:
    assert {"fifo", "las", "srtf"} <= QUEUES.keys()


@settings(max_examples=20)
@given(snapshot=snapshots())
def test_the_told_order_is_that_in_which_grants_are_given(snapshot: Snapshot) -> None:
    for policy, chosen in QUEUES.items():
        with telling(policy, "tune"):
            shot = replace(snapshot)
            order = queue_order(chosen, shot)
            grants = [grant.job_id for grant in chosen.choose(shot).grants]
            assert [job_id for job_id in order if job_id in grants] == grants


def test_advice_for_what_is_not_ours_names_no_numbers() -> None:
    from builders import job, node, pending
    from builders import snapshot as made

    world = made([node()], [pending(job(1))])
    plan = decide(world, FIFO, TUNE)
    (status,) = world.jobs
    for code in (ReasonCode.DRAINED, ReasonCode.NOT_OURS, ReasonCode.START_REFUSED):
        (text,) = for_waiting(world, plan, status, code)
        assert not any(char.isdigit() for char in text)
