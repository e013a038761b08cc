"""Modes: what may be written in each, the advice in comments, and the way from one to another."""

from __future__ import annotations

import inspect
import logging
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from builders import placement, res
from fake_slurm import FakeSlurm
from hypothesis import given
from hypothesis import strategies as st
from manual_clock import ManualClock

from slurm_synergy.cluster import Action, Hold, Renew, Resize, Start, Stop, Together
from slurm_synergy.config import Mode, Settings, parse_settings
from slurm_synergy.controller.figures import Figures
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.controller.loop import Loop, Parts
from slurm_synergy.controller.mode_parts import InMode, ModeWiring
from slurm_synergy.controller.modes import Changeover
from slurm_synergy.controller.status import StatusView
from slurm_synergy.core.model import Job, JobStatus, Reason, ReasonCode
from slurm_synergy.errors import ClusterError, SlurmCommandError
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.slurm.client import SlurmClient
from slurm_synergy.slurm.facts import Hold as HeldBy
from slurm_synergy.slurm.facts import JobState
from slurm_synergy.slurm.modes import advice_for, read_only, with_advice
from slurm_synergy.slurm.original import fields_to_give_back
from slurm_synergy.slurm.release_all import original_request
from slurm_synergy.slurm.request import Request

REASON = Reason(code=ReasonCode.PREEMPTED, text="others first")
SHARE = {"v100-1": res(4, 12, 1000)}


class World:
    """A loop over a Slurm in memory, of which modes may change."""

    def __init__(self, state_dir: Path, slurm: FakeSlurm | None = None) -> None:
        self.slurm, self.clock = slurm or FakeSlurm(), ManualClock()
        self.ledger = Ledger(state_dir, clock=self.clock)
        self.reading: InMode | None = None
        self.book = LeaseBook(self.ledger, self.clock, lease_s=60.0, node_of=self._node_of)
        self.figures = Figures(self.book, self.clock)
        self.wiring = ModeWiring(self.slurm, self.book, self.ledger, self.clock, self.figures)
        self.loop: Loop | None = None

    def _node_of(self, name: str) -> object:
        assert self.reading is not None
        return next((one.node(name) for one in self.reading.reading if one.node(name)), None)

    def set_mode(self, mode: str, **more: object) -> None:
        settings = Settings.model_validate(
            {"mode": mode, "scheduling": {"start_deadline_s": 10.0, "debounce_s": 0}} | more
        )
        self.reading = made = self.wiring.in_mode(settings)
        parts = Parts(
            cluster=made.cluster,
            policy=POLICIES["fifo"],
            mechanism=MECHANISMS["proportional"],
            scheduling=settings.scheduling,
            shown=made.shown,
            watchers=(self.figures.round_done, *made.watchers),
        )
        if self.loop is None:
            view = StatusView(settings, ledger=self.ledger, leases=self.book, clock=self.clock)
            self.loop = Loop(parts, self.ledger, self.clock, view, threading.Event())
        else:
            self.loop.replace(parts)

    def turn(self, count: int = 1) -> None:
        assert self.loop is not None
        for _ in range(count):
            self.loop.turn()
            self.slurm.schedule()
            self.clock.advance(2.0)
            self.slurm.settle()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    one = World(tmp_path / "state")
    yield one
    one.ledger.close()


def test_a_fresh_installation_observes() -> None:
    assert Settings().mode is Mode.OBSERVE
    assert parse_settings("mode: act").mode is Mode.ACT


def test_only_what_is_known_to_read_can_be_called_on_a_read_only_client() -> None:
    slurm = FakeSlurm()
    slurm.submit()
    guarded = read_only(slurm, "observe")
    reads = {"read_queue", "read_job", "read_nodes", "read_partition", "read_reservations"}
    reads |= {"read_config", "read_accounting", "ping", "budget", "diagnose"}
    methods = {
        name
        for name, _ in inspect.getmembers(SlurmClient, inspect.isfunction)
        if not name.startswith("_")
    }
    assert len(methods - reads) >= 15
    before = dict(slurm.jobs)
    for name in sorted(methods - reads):
        with pytest.raises(ClusterError, match=f"{name}.*mode observe"):
            getattr(guarded, name)(1, "x")
    assert slurm.jobs == before
    assert slurm.calls == []
    assert [facts.job_id for facts in guarded.read_queue("synergy")] == [1]
    advising = read_only(slurm, "advise", ("set_admin_comment",))
    advising.set_admin_comment(1, "x")
    assert slurm.jobs[1].admin_comment == "x"


_TEXT = st.text(st.characters(min_codepoint=32, max_codepoint=126, exclude_characters="{}"))


@given(before=_TEXT, after=_TEXT, first=_TEXT.filter(bool), second=_TEXT.filter(bool))
def test_advice_is_replaced_in_place_and_leaves_the_rest_alone(
    before: str, after: str, first: str, second: str
) -> None:
    others = " ".join(part for part in (before.strip(), after.strip()) if part)
    comment = with_advice(before.strip(), first)
    comment = f"{comment} {after.strip()}".strip()
    changed = with_advice(comment, second)
    assert changed == comment.replace(f"{{{first}}}", f"{{{second}}}", 1)
    assert with_advice(changed, second) == changed
    assert with_advice(changed, "") == others


def test_braces_in_advice_cannot_end_the_section() -> None:
    comment = with_advice("mine", "would start on a{1}} now")
    assert comment == "mine synergy-advice{would start on a(1)) now}"
    assert with_advice(comment, "") == "mine"


@pytest.mark.parametrize(
    ("action", "waits", "text"),
    [
        (
            Start(job_id=1, placement=placement(1, **SHARE)),
            None,
            "would start now on v100-1: 4 GPUs, 12 CPUs, 1000 MiB",
        ),
        (
            Resize(job_id=1, placement=placement(1, a1=res(4, 6, 9), a2=res(4, 6, 9))),
            None,
            "would now have a1+a2: 4 GPUs, 6 CPUs, 9 MiB each",
        ),
        (Stop(job_id=1, reason=REASON), None, "would be stopped now (preempted)"),
        (Hold(job_id=1), REASON, "would wait (preempted)"),
        (Renew(job_id=1), None, "would run on as it does"),
    ],
)
def test_advice_says_what_would_be_done(action: Action, waits: Reason | None, text: str) -> None:
    assert advice_for(action, waits) == text


def test_observing_calls_nothing_that_changes_slurm(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job_id = world.slurm.submit(held=HeldBy.NONE, priority=5)
    before = dict(world.slurm.jobs)
    world.set_mode("observe")
    world.turn(3)
    assert world.slurm.calls == []
    assert world.slurm.jobs == before
    assert caplog.text.count(f"observe: would start job {job_id} on v100-1") == 1
    assert "observe: would start 1, stop 0" in caplog.text
    assert world.ledger.mode() == "observe"
    assert world.figures.totals().actions["start", "only_shown"] >= 1


def test_observing_forgets_jobs_that_slurm_forgot(world: World) -> None:
    job_id = world.slurm.submit(marked=False)
    world.set_mode("observe")
    world.turn()
    assert world.ledger.request(job_id) is not None
    del world.slurm.jobs[job_id]
    world.clock.advance(400.0)
    world.turn(2)
    world.clock.advance(400.0)
    world.turn(2)
    assert world.ledger.request(job_id) is None


def test_held_jobs_that_nobody_will_start_are_pointed_out_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.slurm.submit()
    world.set_mode("observe")
    world.turn(3)
    assert caplog.text.count("1 waiting job is held, and in this mode nobody starts them") == 1


def test_advice_is_written_when_it_changes_and_not_to_finished_jobs(world: World) -> None:
    job_id = world.slurm.submit(held=HeldBy.NONE, priority=5)
    mark = world.slurm.jobs[job_id].admin_comment
    world.set_mode("advise")
    world.turn()
    advised = world.slurm.jobs[job_id].admin_comment
    assert advised.startswith(f"{mark} synergy-advice{{would start now on v100-1: 4 GPUs")
    assert world.figures.totals().advice == 1
    world.clock.advance(400.0)
    world.turn()
    assert world.figures.totals().advice == 1
    world.slurm.finish(job_id, JobState.COMPLETED)
    world.slurm.change(job_id, admin_comment=f"{advised} summed up at its end")
    world.set_mode("observe")
    world.turn()
    assert world.slurm.jobs[job_id].admin_comment == f"{advised} summed up at its end"
    assert world.slurm.calls == []


def test_a_comment_that_cannot_be_written_stops_nothing(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (world.slurm.submit(held=HeldBy.NONE, priority=5) for _ in "12")
    write = world.slurm.set_admin_comment

    def refuse(job_id: int, comment: str) -> None:
        if job_id == first:
            raise SlurmCommandError(("scontrol",), 1, "no", kind="denied")
        write(job_id, comment)

    monkeypatch.setattr(world.slurm, "set_admin_comment", refuse)
    world.set_mode("advise")
    world.turn()
    assert f"job {first}: its AdminComment cannot be written" in caplog.text
    assert "synergy-advice" in world.slurm.jobs[second].admin_comment


def test_leaving_act_waits_for_what_was_begun_and_then_gives_everything_back(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world.set_mode("act")
    running, stopping, waiting = (world.slurm.submit(gpus=8) for _ in "123")
    world.turn(3)
    assert [world.slurm.jobs[one].running for one in (running, stopping, waiting)] == [
        True,
        True,
        False,
    ]
    world.book.stop(job_id=stopping, reason=REASON, grace_s=5.0)
    world.set_mode("observe")
    world.turn()
    assert world.ledger.mode() == "act"
    assert f"leaving mode act for observe: job {stopping} (stopping) first" in caplog.text
    assert isinstance(world.reading and world.reading.cluster, Changeover)
    world.turn(8)
    assert world.ledger.mode() == "observe"
    jobs = world.slurm.jobs
    assert [jobs[one].held for one in (running, stopping, waiting)] == [HeldBy.NONE] * 3
    assert [jobs[one].reservation for one in (running, stopping, waiting)] == [None] * 3
    assert (jobs[running].running, jobs[stopping].restarts) == (True, 1)
    assert world.slurm.reservations == {}
    assert world.book.job_ids() == ()
    assert "mode observe: 2 waiting jobs released, 1 running job kept" in caplog.text
    calls = len(world.slurm.calls)
    world.turn(3)
    assert len(world.slurm.calls) == calls


def test_giving_back_that_fails_is_tried_again_and_nothing_is_done_meanwhile(world: World) -> None:
    world.set_mode("act")
    job_id = world.slurm.submit()
    world.turn(3)
    assert world.slurm.jobs[job_id].running
    world.set_mode("observe")
    calls = len(world.slurm.calls)
    world.slurm.break_at[calls + 1] = SlurmCommandError(("x",), 1, "down", kind="controller_down")
    world.turn()
    assert world.ledger.mode() == "act"
    assert world.loop is not None and world.loop.error is not None
    world.turn(3)
    assert (world.ledger.mode(), world.loop.error) == ("observe", None)
    assert world.slurm.jobs[job_id].held is HeldBy.NONE


@pytest.mark.parametrize("mode", ["act", "advise"])
def test_a_mode_is_left_although_the_pool_has_no_node_any_more(world: World, mode: str) -> None:
    world.set_mode(mode)
    running, waiting = world.slurm.submit(gpus=8), world.slurm.submit(gpus=8, nodes=2)
    world.turn(3)
    assert world.slurm.jobs[running].running is (mode == "act")
    world.set_mode("observe", pool={"nodes": "elsewhere-1"})
    world.turn(3)
    assert world.ledger.mode() == "observe"
    assert "synergy-advice" not in world.slurm.jobs[waiting].admin_comment
    if mode == "act":
        assert [world.slurm.jobs[one].held for one in (running, waiting)] == [HeldBy.NONE] * 2
        assert world.slurm.reservations == {}
        assert world.book.job_ids() == ()
    assert world.loop is not None and world.loop.error is not None
    assert "no GPU node of partition 'synergy' among elsewhere-1" in world.loop.error


def test_a_ledger_of_a_release_without_modes_has_acted(world: World) -> None:
    world.set_mode("act")
    job_id = world.slurm.submit()
    world.turn(3)
    world.ledger.set_mode("")
    world.set_mode("observe")
    world.turn(2)
    assert world.slurm.jobs[job_id].held is HeldBy.NONE


@pytest.mark.parametrize("way", ["observe act observe act", "advise act advise observe act"])
def test_modes_go_back_and_forth_without_a_restart_of_a_job(world: World, way: str) -> None:
    job_id = world.slurm.submit(held=HeldBy.NONE, priority=5, req_nodes=("v100-1",))
    world.slurm.schedule()
    for mode in way.split():
        world.set_mode(mode)
        world.turn(3)
        facts = world.slurm.jobs[job_id]
        assert (facts.running, facts.restarts) == (True, 0)
        assert (facts.held is HeldBy.ADMIN) == (mode == "act")
        assert ("synergy-advice" in facts.admin_comment) == (mode == "advise")


REQUEST = Request(
    wrapped=True,
    gpus_per_node=4,
    gpu_type="",
    nodes=2,
    tasks_per_node=2,
    cpus_per_task=3,
    mem_mib_per_node=700,
)


def test_the_fields_to_give_back_are_the_owners_request() -> None:
    slurm = FakeSlurm()
    job = slurm.jobs[slurm.submit(gpus=4, kind="", nodes=2)]
    assert fields_to_give_back(job, REQUEST, "synergy") == []  # it was never started
    slurm.change(1, reservation="synergy", req_nodes=("v100-1", "v100-2"))
    fields = fields_to_give_back(slurm.jobs[1], REQUEST, "synergy")
    assert fields == [
        "ReqNodeList=",
        "ReservationName=",
        "NumNodes=2-2",
        "NumTasks=4",
        "NumCPUs=12",
        "CPUsPerTask=3",
        "MinCPUsNode=6",
        "MinMemoryNode=700",
        "TresPerNode=gres:gpu:4",
    ]
    slurm.change(1, state=JobState.RUNNING)
    assert fields_to_give_back(slurm.jobs[1], REQUEST, "synergy") == ["ReservationName="]
    slurm.change(1, reservation="maintenance")
    assert fields_to_give_back(slurm.jobs[1], REQUEST, "synergy") == []
    slurm.change(1, state=JobState.PENDING, reservation="synergy")
    assert fields_to_give_back(slurm.jobs[1], None, "synergy") == [
        "ReqNodeList=",
        "ReservationName=",
    ]


def test_the_original_request_is_that_of_the_mark_or_of_the_first_sight(world: World) -> None:
    marked, unmarked = world.slurm.submit(gpus=3), world.slurm.submit(gpus=5, marked=False)
    world.set_mode("observe")
    world.turn()
    found = [original_request(world.slurm.jobs[one], world.ledger) for one in (marked, unmarked)]
    assert [one.gpus_per_node for one in found if one] == [3, 5]
    world.slurm.change(marked, admin_comment="synergy:v=1,broken")
    assert original_request(world.slurm.jobs[marked], world.ledger) is None


def test_every_mode_and_no_other_can_be_set(world: World) -> None:
    text = (Path(__file__).parents[2] / "etc" / "synergy.yaml").read_text()
    found = re.search(r"^mode: (\w+)$", text, re.M)
    assert found is not None
    assert found[1] == "observe"
    for mode in Mode:
        world.set_mode(mode.value)
        assert world.reading is not None
        assert world.reading.shown == ("" if mode is Mode.ACT else mode.value)


def test_resizes_go_together_once_the_old_mode_is_left(world: World) -> None:
    world.set_mode("advise")
    job_id = world.slurm.submit()
    world.turn()
    world.set_mode("act")
    changing = world.reading and world.reading.cluster
    assert isinstance(changing, Changeover) and isinstance(changing, Together)
    resize = Resize(job_id=job_id, placement=placement(job_id, v100_1=res(4, 6, 1000)))
    world.turn(3)
    assert changing.left
    lease = world.book.lease(job_id)
    assert lease is not None
    share = replace(lease.placement.shares[0][1], cpus=5)
    wanted = replace(lease.placement, shares=((lease.placement.nodes[0], share),))
    (outcome,) = changing.resize_all((replace(resize, placement=wanted),), {})
    assert outcome.done
    assert world.book.lease(job_id).placement == wanted  # type: ignore[union-attr]


def test_while_a_mode_is_left_and_where_nothing_is_done_no_resize_is(world: World) -> None:
    world.set_mode("act")
    job_id = world.slurm.submit()
    world.turn(3)
    lease = world.book.lease(job_id)
    assert lease is not None
    world.book.stop(job_id=job_id, reason=REASON, grace_s=60.0)
    world.set_mode("observe")
    changing = world.reading and world.reading.cluster
    assert isinstance(changing, Changeover)
    status = JobStatus(job=Job(job_id=job_id, user="ann", submitted_s=0.0, gpus=4))
    for left in (False, True):
        assert changing.left is left
        resize = Resize(job_id=job_id, placement=lease.placement)
        (outcome,) = changing.resize_all((resize,), {job_id: status})
        assert outcome.reason is not None
        assert (outcome.done, outcome.reason.code) == (False, ReasonCode.ONLY_SHOWN)
        world.clock.advance(61.0)
        world.turn(8)
