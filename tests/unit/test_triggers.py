"""When a round is due."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_synergy.cluster import Observation, ObservedJob
from slurm_synergy.controller.triggers import RoundTimer
from slurm_synergy.core.model import Job, JobPhase, Node, Reason, ReasonCode
from slurm_synergy.core.resources import Resources

TOTAL = Resources(gpus=8, cpus=24, mem_mib=1000)
BLOCKED = Reason(code=ReasonCode.NOT_OURS, text="waits")


def job(job_id: int, phase: JobPhase, blocked: Reason | None = None) -> ObservedJob:
    plain = Job(job_id=job_id, user="ann", submitted_s=0.0, gpus=1)
    return ObservedJob(job=plain, phase=phase, blocked=blocked)


def reading(
    jobs: Sequence[ObservedJob] = (),
    capacity: Resources = TOTAL,
    free_gpus: int = 8,
    fixed: bool = False,
) -> Observation:
    node = Node(name="n1", gpu_type="v100", total=TOTAL, capacity=capacity, fixed_shares=fixed)
    return Observation(nodes=(node,), jobs=tuple(jobs), free={"n1": Resources(gpus=free_gpus)})


def timer(*first: ObservedJob, waits_for_free: bool = False) -> RoundTimer:
    """A timer that has run its first round at 0 s, with the jobs that it saw."""
    made = RoundTimer(round_s=300.0, debounce_s=2.0)
    made.note(reading(first), draining=False, now_s=0.0)
    made.done(0.0, waits_for_free=waits_for_free)
    return made


def test_the_first_round_is_due_at_once_and_then_periodically() -> None:
    made = RoundTimer(round_s=300.0, debounce_s=2.0)
    assert made.due(0.0)
    made.done(10.0, waits_for_free=False)
    assert not made.due(309.0)
    assert made.left_s(309.0) == 1.0
    assert made.due(310.0)


def test_a_round_is_due_when_a_policys_quantum_ends() -> None:
    made = RoundTimer(round_s=300.0, debounce_s=2.0, quantum_s=360.0)
    for now_s, due_s in ((10.0, 310.0), (310.0, 360.0), (360.0, 660.0), (660.0, 720.0)):
        made.done(now_s, waits_for_free=False)
        assert made.left_s(now_s) == due_s - now_s
        assert not made.due(due_s - 0.01)
        assert made.due(due_s)


def test_events_bring_a_round_forward_after_the_debounce_time() -> None:
    pending, running = JobPhase.PENDING, JobPhase.RUNNING
    cases = [
        (timer(), reading([job(1, pending)]), "job 1 arrived"),
        (timer(job(1, running)), reading([job(1, pending)]), "job 1 is back in the queue"),
        (timer(job(1, pending, BLOCKED)), reading([job(1, pending)]), "job 1 may be planned"),
        (timer(job(1, running)), reading(), "job 1 ended"),
        (timer(), reading(capacity=Resources()), "node n1 changed"),
        (timer(), reading(fixed=True), "node n1 changed"),
        (timer(waits_for_free=True), reading(free_gpus=4), "resources were freed"),
    ]
    for made, seen, why in cases:
        made.note(seen, draining=False, now_s=10.0)
        assert made.why == (why,)
        assert not made.due(11.9)
        assert made.due(12.0)


def test_later_events_do_not_put_the_round_off() -> None:
    made = timer()
    for number in range(1, 5):
        jobs = [job(job_id, JobPhase.PENDING) for job_id in range(1, number + 1)]
        made.note(reading(jobs), draining=False, now_s=10.0 + number)
    assert made.due(13.0)
    assert len(made.why) == 4


def test_what_a_round_did_itself_is_no_event() -> None:
    pending, starting, running = JobPhase.PENDING, JobPhase.STARTING, JobPhase.RUNNING
    made = timer(job(1, pending))
    for phase in (starting, running, JobPhase.ENDING):
        made.note(reading([job(1, phase)], free_gpus=7), draining=False, now_s=5.0)
        assert not made.due(100.0)


def test_the_end_of_draining_is_an_event_and_its_begin_is_not() -> None:
    made = timer()
    made.note(reading(), draining=True, now_s=1.0)
    assert not made.due(100.0)
    made.note(reading(), draining=False, now_s=2.0)
    assert made.due(4.0)


def test_a_failed_round_is_tried_again_soon() -> None:
    made = timer()
    made.failed(50.0, 5.0)
    assert not made.due(54.0)
    assert made.due(55.0)
