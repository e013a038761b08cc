"""The keeper of leases: cores, generations, stops, tasks, restarts of the controller."""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manual_clock import ManualClock

from slurm_synergy.cluster import StopState
from slurm_synergy.controller.agreement import StopAgreement
from slurm_synergy.controller.learning_points import TrainingReport
from slurm_synergy.controller.leases import Gone, LeaseBook, NotYetKnown, Over, UnknownToken
from slurm_synergy.controller.ledger import JobProgress, Ledger, StoredLease
from slurm_synergy.controller.probes import Probe
from slurm_synergy.controller.tasks import JobTasks, TaskIdentity, TaskReport
from slurm_synergy.core.model import Job, JobStatus, Lease, Node, Placement, Reason, ReasonCode
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import LeaseError, LedgerError, LedgerUnavailable

MOVED = Reason(code=ReasonCode.MOVED, text="elsewhere")
FULL = Resources(gpus=8, cpus=24, mem_mib=800_000)
NODES = {
    name: Node(name=name, gpu_type="v100", total=FULL, capacity=FULL, sockets=2)
    for name in ("n1", "n2")
}


def status(job_id: int, *, wrapped: bool = True, gpus: int = 2) -> JobStatus:
    return JobStatus(
        job=Job(job_id=job_id, user="u", submitted_s=0.0, gpus=gpus, nodes=None, wrapped=wrapped)
    )


def placement(
    job_id: int, cpus: int, *, gpus: int = 2, nodes: tuple[str, ...] = ("n1",)
) -> Placement:
    share = Resources(gpus=gpus, cpus=cpus, mem_mib=cpus * 1000)
    return Placement(job_id=job_id, gpu_type="v100", shares=tuple((n, share) for n in nodes))


def grant(
    book: LeaseBook,
    job_id: int,
    cpus: int,
    *,
    incarnation: int = 0,
    wrapped: bool = True,
    gpus: int = 2,
    nodes: tuple[str, ...] = ("n1",),
    uid: int = 1000,
) -> Lease:
    return book.grant(
        status=status(job_id, wrapped=wrapped, gpus=gpus * len(nodes)),
        owner_uid=uid,
        incarnation=incarnation,
        placement=placement(job_id, cpus, gpus=gpus, nodes=nodes),
        granted={node: Resources(gpus=gpus, cpus=24, mem_mib=150_000) for node in nodes},
    )


def task(
    job_id: int = 1,
    rank: int = 0,
    *,
    ranks: int = 1,
    restart: int = 0,
    step: int = 0,
    node: str = "n1",
) -> TaskIdentity:
    return TaskIdentity(
        job_id=job_id, restart_count=restart, rank=rank, ranks=ranks, node=node, step_id=step
    )


class World:
    """A ledger and a book over it, that can be restarted."""

    def __init__(self, directory: Path, clock: ManualClock) -> None:
        self.directory, self.clock = directory, clock
        self.events: list[int] = []
        self.news: list[int] = []
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(self.directory, clock=self.clock)
        self.book = LeaseBook(
            self.ledger,
            self.clock,
            lease_s=60,
            node_of=NODES.get,
            on_event=self.events.append,
        )
        self.book.subscribe(self.news.extend)

    def restart(self) -> LeaseBook:
        self.ledger.close()
        self.open()
        return self.book


@pytest.fixture
def world(tmp_path: Path, clock: ManualClock) -> Iterator[World]:
    world = World(tmp_path, clock)
    yield world
    world.ledger.close()


def test_a_grant_gives_cores_and_a_floor_of_the_proportional_share(world: World) -> None:
    lease = grant(world.book, 1, 10)
    assert lease.generation == 1
    assert len(lease.cores["n1"]) == 10
    assert len(lease.floor["n1"]) == 6
    assert set(lease.floor["n1"]) <= set(lease.cores["n1"])
    assert lease.expires_s == world.clock.now_s() + 60
    assert world.book.lease(1) == lease
    assert world.ledger.read()[1].lease == lease


def test_granting_the_same_again_changes_nothing(world: World) -> None:
    first = grant(world.book, 1, 10)
    world.news.clear()
    assert grant(world.book, 1, 10) == first
    assert world.news == []


def test_unknown_nodes_and_unknown_jobs_are_refused(world: World) -> None:
    with pytest.raises(LeaseError, match="job 1: not nodes of the pool: elsewhere"):
        grant(world.book, 1, 4, nodes=("elsewhere",))
    for call in (
        lambda: world.book.resize(job_id=1, placement=placement(1, 2)),
        lambda: world.book.stop(job_id=1, reason=MOVED, grace_s=1),
        lambda: world.book.stop_state(1),
    ):
        with pytest.raises(LeaseError, match="job 1 holds no lease"):
            call()
    world.book.end(1)


def test_a_run_that_has_ended_is_told_so_and_a_job_never_known_is_not(world: World) -> None:
    grant(world.book, 1, 10)
    world.book.register(task())
    world.book.end(1)
    with pytest.raises(Over, match="restart 0 of job 1 has ended"):
        world.book.owner_uid(1, 0)
    with pytest.raises(Gone) as unknown:
        world.book.owner_uid(2, 0)
    assert not isinstance(unknown.value, Over)
    grant(world.book, 3, 2)
    world.book.let_go(3)
    with pytest.raises(Gone) as let_go:
        world.book.owner_uid(3, 0)
    assert not isinstance(let_go.value, Over)
    # Started again as the same incarnation: a start that was taken back before it ran.
    grant(world.book, 1, 10)
    assert world.book.owner_uid(1, 0) == 1000


def test_the_view_has_the_time_that_a_stop_would_leave(world: World) -> None:
    world.book = LeaseBook(
        world.ledger, world.clock, lease_s=60, node_of=NODES.get, grace_of={1: 45.0}.__getitem__
    )
    grant(world.book, 1, 10)
    assert world.book.register(task())[1].grace_s == 45.0


def test_a_resize_moves_cores_of_neighbours_with_new_generations(world: World) -> None:
    grant(world.book, 1, 12, gpus=4)
    b = grant(world.book, 2, 12, gpus=4)
    shrunk = world.book.resize(job_id=1, placement=placement(1, 4, gpus=4))
    assert shrunk.generation == 2
    assert world.book.lease(2) == b
    grown = world.book.resize(job_id=2, placement=placement(2, 20, gpus=4))
    assert len(grown.cores["n1"]) == 20
    assert not set(grown.cores["n1"]) & set(shrunk.cores["n1"])
    # B sits on A's floor now; taking it back moves B as well.
    world.news.clear()
    world.book.resize(job_id=2, placement=placement(2, 12, gpus=4))
    back = world.book.resize(job_id=1, placement=placement(1, 12, gpus=4))
    assert set(back.cores["n1"]) == set(back.floor["n1"])
    assert back.floor == shrunk.floor
    assert {1, 2} <= set(world.news)


def test_cores_that_come_free_go_to_a_job_that_was_short(world: World) -> None:
    grant(world.book, 1, 20, gpus=4)
    short = grant(world.book, 2, 12, gpus=4)
    assert len(short.cores["n1"]) == 12  # its floor was taken back from job 1
    first = world.book.lease(1)
    assert first is not None
    assert len(first.cores["n1"]) == 12
    world.book.end(2)
    completed = world.book.lease(1)
    assert completed is not None
    assert len(completed.cores["n1"]) == 20
    assert completed.generation > first.generation


def test_other_gpus_are_not_a_resize(world: World) -> None:
    grant(world.book, 1, 6)
    with pytest.raises(LeaseError, match="GPUs do not change in place"):
        world.book.resize(job_id=1, placement=placement(1, 6, gpus=3))
    with pytest.raises(LeaseError, match="GPUs do not change in place"):
        world.book.resize(job_id=1, placement=placement(1, 6, nodes=("n2",)))


def test_reserved_cores_are_nobodys(world: World) -> None:
    before = grant(world.book, 1, 8)
    world.book.set_reserved("n1", before.floor["n1"][:1])
    after = world.book.lease(1)
    assert after is not None
    assert before.floor["n1"][0] not in (*after.floor["n1"], *after.cores["n1"])
    assert after.generation == before.generation + 1
    world.news.clear()
    world.book.set_reserved("n1", before.floor["n1"][:1])
    assert world.news == []


def test_a_job_without_the_wrapper_gets_no_cores_from_us(world: World) -> None:
    lease = grant(world.book, 1, 6, wrapped=False)
    assert lease.cores == {}
    other = grant(world.book, 2, 18)
    assert len(other.cores["n1"]) == 18


def test_generations_grow_over_leases_and_restarts(world: World) -> None:
    grant(world.book, 1, 6)
    world.book.resize(job_id=1, placement=placement(1, 7))
    world.book.end(1)
    book = world.restart()
    assert grant(book, 1, 6, incarnation=1).generation == 3


def test_leases_and_stops_survive_the_controller(world: World) -> None:
    lease = grant(world.book, 1, 10)
    grant(world.book, 2, 10)
    world.book.stop(job_id=2, reason=MOVED, grace_s=30)
    book = world.restart()
    assert book.lease(1) == lease
    assert book.stopping(2) == MOVED
    assert book.stop_state(2) is StopState.WAITING
    world.clock.advance(31)
    assert book.stop_state(2) is StopState.OVERDUE
    assert grant(book, 1, 10) == lease  # adopting it changes nothing


def test_a_task_registers_and_sees_its_node(world: World) -> None:
    lease = grant(world.book, 1, 10, nodes=("n1", "n2"))
    token, view = world.book.register(task(rank=1, ranks=2, node="n2"))
    assert view.cores == lease.cores["n2"]
    assert view.floor_cores == lease.floor["n2"]
    assert (view.mem_mib, view.node_cores, view.expires_in_s) == (10_000, 24, 60)
    assert view.floor_mem_mib == 150_000  # proportional is 200,000, but Slurm granted less
    assert len(token) >= 32
    assert world.events == [1]
    world.book.register(task(rank=0, ranks=2))
    assert world.events == [1]


def test_tasks_that_contradict_the_lease_are_refused(world: World) -> None:
    grant(world.book, 1, 6, incarnation=1)
    with pytest.raises(Gone, match="holds no lease"):
        world.book.register(task(job_id=9))
    with pytest.raises(Gone, match="restarted since"):
        world.book.register(task(restart=0))
    with pytest.raises(NotYetKnown):
        world.book.register(task(restart=2))
    with pytest.raises(LeaseError, match="nothing on node 'n2'"):
        world.book.register(task(restart=1, node="n2"))
    world.book.register(task(restart=1, ranks=2))
    with pytest.raises(LeaseError, match="has 2 tasks, not 3"):
        world.book.register(task(restart=1, rank=1, ranks=3))
    with pytest.raises(LeaseError, match="out of range"):
        task(rank=2, ranks=2)


def test_a_token_is_good_for_its_own_task_only(world: World) -> None:
    grant(world.book, 1, 6)
    grant(world.book, 2, 6)
    token, _ = world.book.register(task())
    assert world.book.identity(token, 1, 0, 0) == task()
    for job_id, rank, tried in ((2, 0, token), (1, 1, token), (1, 0, "x"), (1, 0, "")):
        with pytest.raises(UnknownToken):
            world.book.identity(tried, job_id, 0, rank)
    newer, _ = world.book.register(task())
    assert newer != token
    with pytest.raises(UnknownToken):
        world.book.identity(token, 1, 0, 0)
    grant(world.book, 1, 6, incarnation=1)
    with pytest.raises(Gone):
        world.book.identity(newer, 1, 0, 0)
    with pytest.raises(UnknownToken):
        world.book.identity(newer, 1, 1, 0)


def test_contact_extends_a_lease_and_silence_does_not(world: World) -> None:
    grant(world.book, 1, 6)
    world.book.register(task())
    world.clock.advance(50)
    world.book.renew(task(), TaskReport())
    lease = world.book.lease(1)
    assert lease is not None
    assert lease.expires_s == world.clock.now_s() + 60
    assert lease.generation == 1
    world.clock.advance(70)
    lease = world.book.lease(1)
    assert lease is not None
    assert lease.expires_s < world.clock.now_s()


def test_progress_reaches_the_ledger_but_not_with_every_call(world: World) -> None:
    grant(world.book, 1, 6)
    world.book.register(task())
    for second in range(12):
        world.clock.advance(1)
        world.book.renew(task(), TaskReport(step=second, samples=100 * second))
    assert world.ledger.read()[1].done_samples == 1000.0
    shown = world.book.snapshot()[1]["progress"]
    assert isinstance(shown, dict)
    assert shown["samples_per_s"] == pytest.approx(100.0)
    world.book.finish(
        task(), exit_code=0, checkpointed=False, report=TaskReport(step=12, samples=1234)
    )
    assert world.ledger.read()[1].done_samples == 1234.0


def test_progress_of_all_jobs_is_one_write(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[list[int]] = []
    save = world.ledger.save_progress

    def noted(told: Iterable[JobProgress]) -> None:
        rows = list(told)
        written.append(sorted(row.job_id for row in rows))
        save(rows)

    monkeypatch.setattr(world.ledger, "save_progress", noted)
    for job_id in (1, 2, 3):
        grant(world.book, job_id, 2)
        world.book.register(task(job_id))
        world.book.renew(task(job_id), TaskReport(step=1, samples=10))
    assert written == [[1]]
    world.clock.advance(6)
    world.book.renew(task(1), TaskReport(step=2, samples=20))
    assert written == [[1], [1, 2, 3]]
    assert [world.ledger.read()[job_id].done_samples for job_id in (1, 2, 3)] == [20, 10, 10]


def test_a_renewal_at_once_waits_for_no_disk_and_nobody(world: World) -> None:
    grant(world.book, 1, 6)
    world.book.register(task())
    assert world.book.renew_at_once(task(), TaskReport(step=1)) is None  # progress is to be saved
    world.book.renew(task(), TaskReport(step=1))
    world.clock.advance(1)
    view = world.book.renew_at_once(task(), TaskReport(step=2))
    assert view is not None
    assert view.generation == 1
    assert world.book.snapshot()[1]["progress"]["step"] == 2  # type: ignore[index]
    told = TaskReport(step=3, training=TrainingReport())
    assert world.book.renew_at_once(task(), told) is None
    probe = world.book.probe(1, Probe(number=1, warmup_steps=1, steps=2, longest_s=9.0), 2)
    assert probe is not None
    assert world.book.renew_at_once(task(), TaskReport(step=3)) is None
    world.book.end_probe(1)
    with ThreadPoolExecutor(1) as other, world.book._lock:
        found = other.submit(world.book.renew_at_once, task(), TaskReport(step=3)).result(60)
    assert found is None
    with pytest.raises(Gone):
        world.book.renew_at_once(task(2), TaskReport())


def test_a_lease_is_renewed_even_when_progress_cannot_be_saved(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    grant(world.book, 1, 6)
    world.book.register(task())

    def full(*_: object, **__: object) -> None:
        raise LedgerError("the disk is full")

    monkeypatch.setattr(world.ledger, "save_progress", full)
    world.clock.advance(50)
    assert world.book.renew(task(), TaskReport(step=1, samples=1)).expires_in_s == 60


def finish(book: LeaseBook, identity: TaskIdentity, *, code: int, saved: bool) -> None:
    book.finish(identity, exit_code=code, checkpointed=saved, report=TaskReport(step=5))


def test_a_stop_is_checkpointed_when_every_rank_has_reported_it(world: World) -> None:
    grant(world.book, 1, 6)
    for rank in (0, 1):
        world.book.register(task(rank=rank, ranks=2))
    world.book.stop(job_id=1, reason=MOVED, grace_s=30)
    view = world.book.renew(task(ranks=2), TaskReport())
    assert (view.stop, view.stop_within_s, view.generation) == (True, 30, 2)
    world.clock.advance(10)
    world.book.stop(job_id=1, reason=MOVED, grace_s=30)  # again: the deadline stays
    assert world.book.view(task(ranks=2)).stop_within_s == 20
    finish(world.book, task(rank=1, ranks=2), code=85, saved=True)
    assert world.book.stop_state(1) is StopState.WAITING
    world.events.clear()
    finish(world.book, task(rank=0, ranks=2), code=85, saved=True)
    assert world.book.stop_state(1) is StopState.CHECKPOINTED
    assert world.events == [1]
    world.clock.advance(100)
    assert world.book.stop_state(1) is StopState.CHECKPOINTED
    assert world.restart().stop_state(1) is StopState.CHECKPOINTED


def test_half_the_reports_before_a_restart_and_half_after_are_one_stop(world: World) -> None:
    grant(world.book, 1, 6)
    for rank in (0, 1):
        world.book.register(task(rank=rank, ranks=2))
    world.book.stop(job_id=1, reason=MOVED, grace_s=30)
    finish(world.book, task(rank=1, ranks=2), code=85, saved=True)
    book = world.restart()
    assert book.stop_state(1) is StopState.WAITING
    book.register(task(rank=0, ranks=2))
    assert book.stop_state(1) is StopState.WAITING
    finish(book, task(rank=0, ranks=2), code=85, saved=True)
    assert book.stop_state(1) is StopState.CHECKPOINTED


@pytest.mark.parametrize(
    ("ends", "state"),
    [
        ([(85, True), (1, False)], StopState.FAILED),
        ([(137, False), (137, False)], StopState.FAILED),
        ([(0, False), (0, False)], StopState.WAITING),  # it ended by itself: nothing to requeue
        ([(0, False)], StopState.WAITING),
    ],
)
def test_other_ends_of_a_stop(world: World, ends: list[tuple[int, bool]], state: StopState) -> None:
    grant(world.book, 1, 6)
    for rank in (0, 1):
        world.book.register(task(rank=rank, ranks=2))
    world.book.stop(job_id=1, reason=MOVED, grace_s=30)
    for rank, (code, saved) in enumerate(ends):
        finish(world.book, task(rank=rank, ranks=2), code=code, saved=saved)
    assert world.book.stop_state(1) is state


def test_earlier_steps_of_a_script_do_not_count(world: World) -> None:
    grant(world.book, 1, 6)
    world.book.register(task(step=0))
    finish(world.book, task(step=0), code=0, saved=False)
    world.book.register(task(step=1))
    world.book.stop(job_id=1, reason=MOVED, grace_s=30)
    finish(world.book, task(step=1), code=85, saved=True)
    assert world.book.stop_state(1) is StopState.CHECKPOINTED


def test_two_steps_at_a_time_must_both_be_saved(world: World) -> None:
    grant(world.book, 1, 6)
    world.book.register(task(step=0))
    world.book.register(task(step=1))
    finish(world.book, task(step=1), code=85, saved=True)
    assert world.book.stop_state(1) is StopState.WAITING
    finish(world.book, task(step=0), code=85, saved=True)
    assert world.book.stop_state(1) is StopState.CHECKPOINTED


def test_ranks_agree_on_one_last_step(world: World) -> None:
    grant(world.book, 1, 6)
    for rank in (0, 1):
        world.book.register(task(rank=rank, ranks=2))
    first, second = task(ranks=2), task(rank=1, ranks=2)
    world.book.renew(second, TaskReport(step=10, proposed_stop_step=11))
    assert world.book.view(first).stop_step == 0  # only rank 0 proposes
    world.news.clear()
    view = world.book.renew(first, TaskReport(step=10, proposed_stop_step=20))
    assert (view.stop_step, view.stop_committed) == (20, False)
    assert world.news == [1]
    world.book.renew(first, TaskReport(step=10, proposed_stop_step=20, accepted_stop_step=20))
    assert not world.book.view(first).stop_committed
    view = world.book.renew(second, TaskReport(step=12, accepted_stop_step=20))
    assert (view.stop_step, view.stop_committed) == (20, True)
    world.book.renew(first, TaskReport(step=10, proposed_stop_step=99))
    assert world.book.view(second).stop_step == 20


def test_a_refused_step_is_replaced_by_one_ahead_of_everybody(world: World) -> None:
    grant(world.book, 1, 6)
    for rank in (0, 1):
        world.book.register(task(rank=rank, ranks=2))
    first, second = task(ranks=2), task(rank=1, ranks=2)
    mine = TaskReport(step=10, step_s=0.5, proposed_stop_step=12, accepted_stop_step=12)
    world.book.renew(first, mine)
    world.book.renew(first, mine)
    theirs = TaskReport(step=14, step_s=0.5, refused_stop_step=12)
    view = world.book.renew(second, theirs)
    assert view.stop_step >= 14 + 5
    assert not view.stop_committed
    offered = view.stop_step
    assert world.book.renew(second, theirs).stop_step == offered  # the old refusal is over
    assert world.book.renew(first, mine).stop_step == offered  # and so is the old proposal
    world.book.renew(first, TaskReport(step=12, accepted_stop_step=offered))
    view = world.book.renew(second, TaskReport(step=15, accepted_stop_step=offered))
    assert (view.stop_step, view.stop_committed) == (offered, True)


def test_a_rank_that_has_ended_does_not_hold_up_the_others() -> None:
    tasks = JobTasks()
    for rank in range(3):
        tasks.register(task(rank=rank, ranks=3))
    tasks.report(task(ranks=3), TaskReport(proposed_stop_step=9), 0.0)
    for rank in (0, 1):
        tasks.report(task(rank=rank, ranks=3), TaskReport(accepted_stop_step=9), 0.0)
    assert tasks.stop_step(0) == (9, False)
    moved = tasks.finish(
        task(rank=2, ranks=3), exit_code=1, checkpointed=False, report=TaskReport()
    )
    assert moved
    assert tasks.stop_step(0) == (9, True)


def test_an_agreement_waits_for_ranks_that_have_not_registered() -> None:
    agreement = StopAgreement(ranks=3)
    agreement.propose(5)
    for rank in (0, 1, 1):
        agreement.accept(rank, 5)
        agreement.settle(())
    assert not agreement.committed
    agreement.accept(2, 4)
    agreement.settle(())
    assert not agreement.committed


def test_the_end_of_a_lease_tells_its_tasks(world: World) -> None:
    grant(world.book, 1, 6)
    world.book.register(task())
    world.news.clear()
    world.book.end(1)
    assert 1 in world.news
    with pytest.raises(Gone):
        world.book.renew(task(), TaskReport())
    assert world.book.lease(1) is None
    assert world.book.job_ids() == ()
    assert world.book.incarnation(1) is None


def test_the_snapshot_is_json_and_complete(world: World) -> None:
    grant(world.book, 1, 10)
    world.book.register(task())
    world.book.stop(job_id=1, reason=MOVED, grace_s=30)
    shown = json.loads(json.dumps(world.book.snapshot(), allow_nan=False))["1"]
    assert shown["nodes"][0]["cpus"] == 10
    assert len(shown["nodes"][0]["floor"]) == 6
    assert shown["stop"] == {
        "code": "moved",
        "text": "elsewhere",
        "state": "waiting",
        "within_s": 30.0,
    }
    assert shown["progress"]["registered"] == 1


def test_all_resizes_of_a_round_are_one_write_that_is_durable_before_anybody_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job_id, node in ((1, "n1"), (2, "n1"), (3, "n2")):
        grant(world.book, job_id, 12, gpus=4, nodes=(node,))
    writes: list[list[int]] = []
    save = world.ledger.save_leases

    def saving(stored: Iterable[StoredLease]) -> None:
        items = list(stored)
        assert world.news == []
        save(items)
        writes.append([one.lease.job_id for one in items])

    monkeypatch.setattr(world.ledger, "save_leases", saving)
    world.news.clear()
    moved = [
        placement(1, 4, gpus=4),
        placement(2, 20, gpus=4),
        placement(3, 20, gpus=4, nodes=("n2",)),
    ]
    assert world.book.resize_all(moved) == {}
    assert [sorted(one) for one in writes] == [[1, 2, 3]]
    assert sorted(world.news) == [1, 2, 3]
    leases = {job_id: world.book.lease(job_id) for job_id in (1, 2, 3)}
    assert {job_id: lease and lease.generation for job_id, lease in leases.items()} == {
        **dict.fromkeys((1, 2, 3), 2)
    }
    book = world.restart()
    assert {job_id: book.lease(job_id) for job_id in (1, 2, 3)} == leases


def test_after_a_restart_a_lease_stands_as_long_as_its_tasks_may_have_been_told(
    world: World,
) -> None:
    grant(world.book, 1, 12)
    world.book.register(task())
    for _ in range(10):  # renewed, which is not written
        world.clock.advance(30.0)
        world.book.view(task())
    book = world.restart()
    (view,) = book.on_node("n1")
    assert view.expires_in_s == 60.0, "else the helper of the node would end it"


def test_who_is_refused_a_resize_does_not_keep_others_from_theirs(world: World) -> None:
    grant(world.book, 1, 12, gpus=4)
    grant(world.book, 2, 12, gpus=4)
    refused = world.book.resize_all(
        [placement(1, 8, gpus=4), placement(2, 6, gpus=2), placement(3, 6), placement(1, 9, gpus=4)]
    )
    assert {job_id: str(err).partition(":")[0] for job_id, err in refused.items()} == {
        2: "job 2",
        3: "job 3 holds no lease",
    }
    first, second = world.book.lease(1), world.book.lease(2)
    assert first is not None and second is not None
    assert (first.generation, len(first.cores["n1"])) == (2, 9)
    assert (second.generation, len(second.cores["n1"])) == (1, 12)


def test_resizes_that_cannot_be_written_change_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [grant(world.book, job_id, 12, gpus=4) for job_id in (1, 2)]
    world.news.clear()

    def full(stored: object) -> None:
        raise LedgerUnavailable("no space")

    with monkeypatch.context() as patched:
        patched.setattr(world.ledger, "save_leases", full)
        with pytest.raises(LedgerUnavailable):
            world.book.resize_all([placement(1, 4, gpus=4), placement(2, 20, gpus=4)])
    assert [world.book.lease(job_id) for job_id in (1, 2)] == before
    assert world.news == []
    assert world.book.resize_all([placement(1, 4, gpus=4), placement(2, 20, gpus=4)]) == {}


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_together_jobs_get_what_they_get_one_by_one(data: st.DataObject) -> None:
    clock = ManualClock()
    with contextlib.ExitStack() as stack:
        # Hypothesis may give an example up in the middle.
        places = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2)]
        worlds = [World(place, clock) for place in places]
        for world in worlds:
            stack.callback(world.ledger.close)
        jobs = {1: ("n1",), 2: ("n1",), 3: ("n1", "n2"), 4: ("n2",)}
        for world in worlds:
            for job_id, nodes in jobs.items():
                grant(world.book, job_id, 6, nodes=nodes)
        for _ in range(data.draw(st.integers(1, 3))):
            left, placements = {"n1": 24, "n2": 24}, []
            for job_id in data.draw(st.permutations(list(jobs))):
                most = min(left[node] for node in jobs[job_id]) - 1
                cpus = data.draw(st.integers(1, max(1, min(most, 12))))
                placements.append(placement(job_id, cpus, nodes=jobs[job_id]))
                for node in jobs[job_id]:
                    left[node] -= cpus
            # As a round does: first who gives cores up.
            placements.sort(key=lambda one: one.shares[0][1].cpus)
            assert worlds[0].book.resize_all(placements) == {}
            for one_by_one in placements:
                worlds[1].book.resize(job_id=one_by_one.job_id, placement=one_by_one)
            for job_id, nodes in jobs.items():
                together, alone = (world.book.lease(job_id) for world in worlds)
                assert together is not None and alone is not None
                assert together.placement == alone.placement
                assert together.floor == alone.floor
                for node in nodes:
                    assert len(together.cores[node]) == len(alone.cores[node])
            for node in ("n1", "n2"):
                leases = [worlds[0].book.lease(job_id) for job_id in jobs if node in jobs[job_id]]
                cores = [core for lease in leases if lease for core in lease.cores[node]]
                assert len(cores) == len(set(cores))


def test_who_must_not_wait_is_told_that_the_book_is_in_use(world: World) -> None:
    grant(world.book, 1, 10)
    token, view = world.book.register(task())
    asked = (world.book.identity, token, 1, 0, 0)
    assert world.book.unless_busy(*asked) == task()
    assert world.book.unless_busy(world.book.view, task()) == view
    with pytest.raises(UnknownToken):
        world.book.unless_busy(world.book.identity, "other", 1, 0, 0)
    found: list[object] = []
    # Somebody writes, and another thread looks meanwhile.
    save = world.ledger.save_leases

    def saving(stored: Iterable[StoredLease]) -> None:
        looking = threading.Thread(target=lambda: found.append(world.book.unless_busy(*asked)))
        looking.start()
        looking.join(60)
        save(stored)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(world.ledger, "save_leases", saving)
        world.book.resize(job_id=1, placement=placement(1, 8))
    assert found == [None]
    assert world.book.unless_busy(*asked) == task()
