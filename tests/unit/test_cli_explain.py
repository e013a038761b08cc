"""synergyctl explain and top against a real lease service, and explain from a journal alone."""

from __future__ import annotations

import io
import json
import os
import pwd
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ran import Ran
from service_world import NODE, ServiceWorld

from slurm_synergy.cli import control, top_cmd
from slurm_synergy.cli.top_view import screen_of
from slurm_synergy.core.model import JobStatus, Plan, Reason, ReasonCode, Snapshot
from slurm_synergy.errors import NoControllerError

UID = os.getuid()
ME = pwd.getpwuid(UID).pw_name
WAITS = Reason(code=ReasonCode.NO_GPUS, text="needs 2 GPUs (any type); jobs ahead of it leave 0")


@pytest.fixture
def world(
    tmp_path: Path, munge_socket: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServiceWorld]:
    world = ServiceWorld(tmp_path / "state", munge_socket, operators=frozenset({UID + 1}))
    monkeypatch.setenv("SYNERGY_ENDPOINT", world.server.endpoint)
    monkeypatch.setenv("SYNERGY_MUNGE_SOCKET", str(munge_socket))
    yield world
    world.close()


def filled(world: ServiceWorld, *, waiting: str = ME) -> None:
    """Job 1 of this user runs, job 2 of ``waiting`` waits; the round is in the journal."""
    lease = world.grant(1, 10, uid=UID)
    statuses = (
        world.status(1, lease=lease, user=ME),
        world.status(2, user=waiting),
    )
    plan = Plan(
        round=3, policy="fifo", mechanism="tune", placements=(lease.placement,), waiting={2: WAITS}
    )
    world.publish(statuses, plan)
    world.ledger.journal(_snapshot(statuses), plan, (), (), {"total": 0.1})


def _snapshot(statuses: tuple[JobStatus, ...]) -> Snapshot:
    return Snapshot(round=3, now_s=time.time(), round_s=300.0, nodes=(NODE,), jobs=statuses)


def test_a_waiting_job_is_explained_by_the_controller(
    world: ServiceWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "there was no round yet" in Ran(capsys, "explain", "2").err
    filled(world)
    shown = Ran(capsys, "explain", "2")
    assert shown.status == 0
    assert shown.out.splitlines() == [
        f"job 2 of {ME} waits: {WAITS.text}",
        "rank: 2 of 2 by policy fifo; 0 waiting ahead of it",
        "bound by: GPUs",
        "what would change it: a request of 1 GPU would fit now",
        "what would change it: there is room for it by now: the next round may start it",
        "(round 3, 0 s ago)",
    ]
    content = json.loads(Ran(capsys, "explain", "2", "--json").out)
    assert (content["source"], content["round"], content["private"]) == ("controller", 3, True)
    assert content["explanation"]["reason"]["code"] == "no_gpus"
    assert content["explanation"]["binding"] == "gpus"


def test_what_happened_since_the_round_is_told(
    world: ServiceWorld, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    filled(world)
    world.grant(2, 4, uid=UID)
    assert "since that round: now starting, until then pending" in Ran(capsys, "explain", "2").out
    world.observe((world.status(7, user=ME),))
    ran = Ran(capsys, "explain", "7")
    assert ran.status == 1
    assert "job 7 came after round 3: the next round plans it" in ran.err
    for job, told in (("99", "job 99 is not among the 2 jobs"), ("x", "'x' is no job id")):
        ran = Ran(capsys, "explain", job)
        assert (ran.status, ran.out) == (1, "")
        assert ran.err.startswith(f"synergyctl: {told}")
    assert caplog.text == "", "a question is no reason for a line in the controller's log"
    assert "at most 32 characters" in Ran(capsys, "explain", "9" * 40).err


def test_others_may_ask_but_do_not_see_what_follows_from_hints(
    world: ServiceWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(world, waiting="somebody-else")
    content = json.loads(Ran(capsys, "explain", "2", "--json").out)
    assert content["private"] is False
    assert content["explanation"]["changes"] == []
    assert content["explanation"]["reason"]["text"] == WAITS.text
    assert json.loads(Ran(capsys, "explain", "1", "--json").out)["private"] is True
    found = world.view.explain("2", viewer_uid=UID + 1, operators={UID + 1})
    assert found["private"] is True


def test_with_the_controller_stopped_the_journal_answers_and_says_so(
    world: ServiceWorld,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled(world)
    settings = tmp_path / "synergy.yaml"
    settings.write_text(f"state_dir: {tmp_path / 'state'}\nleases: {{listen: '127.0.0.1:0'}}\n")
    monkeypatch.delenv("SYNERGY_ENDPOINT")
    told = "(the controller does not answer: this is its round 3, 0 s ago)"
    shown = Ran(capsys, "explain", "2", "--config", str(settings))
    assert shown.out.splitlines()[-1] == told
    settings.write_text(f"state_dir: {tmp_path / 'state'}\nleases: {{listen: '127.0.0.1:1'}}\n")
    content = json.loads(Ran(capsys, "explain", "2", "--json", "--config", str(settings)).out)
    assert (content["source"], content["phase_now"]) == ("journal", None)
    unknown = Ran(capsys, "explain", "5", "--config", str(settings))
    assert unknown.status == 1
    assert "job 5 is not among the 2 jobs of round 3" in unknown.err
    assert "no answer from the controller" in unknown.err


def test_without_controller_and_journal_both_are_told(
    tmp_path: Path,
    munge_socket: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SYNERGY_MUNGE_SOCKET", str(munge_socket))
    settings = tmp_path / "synergy.yaml"
    settings.write_text(f"state_dir: {tmp_path / 'none'}\nleases: {{listen: '127.0.0.1:1'}}\n")
    ran = Ran(capsys, "explain", "2", "--config", str(settings))
    assert ran.status == 1
    assert "is slurm-synergyd running there?" in ran.err
    assert f"there is no journal in {tmp_path / 'none'} either" in ran.err


# top -----------------------------------------------------------------------------------------


def _steady(job: dict[str, object]) -> dict[str, object]:
    grows = dict.fromkeys(("attained_service_gpu_s", "held_s", "lease"))
    return {**job, **grows, "leased": job["lease"] is not None}


def test_one_picture_of_nodes_jobs_and_queue(
    world: ServiceWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Ran(capsys, "top", "--once")
    assert "no nodes yet" in first.out
    filled(world)
    shown = Ran(capsys, "top", "--once").out.splitlines()
    assert shown[0].startswith("synergy: srtf, tune; round 3 ")
    assert shown[0].endswith("1 pending, 1 running")
    assert shown[2].split() == [
        *("NODE", "TYPE", "GPUS", "BY", "JOB", "CORES", "BY", "JOB", "CORES", "FREE"),
        *("GIB", "FREE"),
    ]
    assert shown[3].split() == [
        *("n1", "v100", "1", "1", ".", ".", ".", ".", ".", ".", "1:10", "14/24", "732/781")
    ]
    running = shown[6].split()
    # SHARE is the proportional one: 2 of 8 GPUs of 24 cores.
    assert running[:8] == ["1", ME, "job-1", "running", "2", "10", "6", "49"]
    assert shown[9].split()[:5] == ["2", ME, "job-2", "2", "0"]
    assert shown[9].endswith(WAITS.text)
    content = json.loads(Ran(capsys, "top", "--once", "--json").out)
    # The same records; some of their numbers grow with time.
    shown_alone = json.loads(Ran(capsys, "jobs", "--json").out)["jobs"]
    assert [_steady(job) for job in content["jobs"]] == [_steady(job) for job in shown_alone]
    assert set(content["status"]) == documented("status") and set(content) == {"status", "jobs"}
    assert json.loads(Ran(capsys, "top", "--json").out)["status"]["round"] == 3


def test_stalls_and_what_is_told_of_a_job(world: ServiceWorld) -> None:
    filled(world)
    status, jobs = world.view.status(), world.view.jobs(viewer_uid=UID, operators=())
    (job, _) = jobs
    lease = job["lease"]
    assert isinstance(lease, dict)
    busy = {**lease, "progress": {**lease["progress"], "data_stall": 0.254}}
    busy["stop"] = {"text": "the policy prefers others"}
    screen = screen_of(
        {**status, "draining": True, "trouble": "no Slurm"}, [{**job, "lease": busy}]
    )
    assert screen.headline.endswith("DRAINING; TROUBLE: no Slurm")
    assert screen.running[0][-2:] == ("25%", "the policy prefers others")
    assert screen.queue == ()


@pytest.mark.parametrize(
    ("mode", "dry_run", "words"),
    [
        ("act", False, "the next round plans it"),
        ("observe", False, "mode observe: Slurm alone starts it"),
        ("advise", False, "mode advise: Slurm alone starts it"),
        ("act", True, "dry run: Slurm alone starts it"),
    ],
)
def test_where_nothing_is_acted_on_no_round_starts_a_job(
    world: ServiceWorld, mode: str, dry_run: bool, words: str
) -> None:
    filled(world)
    status, jobs = world.view.status(), world.view.jobs(viewer_uid=UID, operators=())
    waiting = {**jobs[1], "reason": None}
    screen = screen_of({**status, "mode": mode, "dry_run": dry_run}, [waiting])
    assert [row[-1] for row in screen.queue] == [words]


def test_a_lost_controller_ends_the_first_picture_and_marks_later_ones(
    world: ServiceWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(world)
    asked = top_cmd._picture
    calls: list[int] = []

    def failing(target: control.Target) -> object:
        calls.append(len(calls))
        if len(calls) == 2:
            raise NoControllerError("no answer")
        if len(calls) == 3:
            raise KeyboardInterrupt
        return asked(target)

    monkeypatch.setattr(top_cmd, "_picture", failing)
    shown = Ran(capsys, "top", "--interval", "0.5")
    assert shown.status == 0
    assert "no answer; what follows is older" in shown.out
    assert shown.out.count("job-1") == 2
    monkeypatch.setenv("SYNERGY_ENDPOINT", "127.0.0.1:1")
    monkeypatch.setattr(top_cmd, "_picture", asked)
    assert Ran(capsys, "top").status == 1
    assert Ran(capsys, "top", "--interval", "0").status == 2


def test_a_terminal_gets_as_much_of_the_queue_as_fits(world: ServiceWorld) -> None:
    from rich.console import Console

    filled(world)
    status, (_, waits) = world.view.status(), world.view.jobs(viewer_uid=UID, operators=())
    crowd = [{**waits, "job_id": number, "name": "[red]x\x1b]0;y\n"} for number in range(100, 160)]
    console = Console(width=120, height=40, record=True, file=io.StringIO())
    console.print(top_cmd._drawn(screen_of(status, crowd), 40, 160))
    text = console.export_text()
    assert "… and 35 more (queue)" in text
    assert "[red]x" in text and "\x1b]0;" not in text
    assert len(text.splitlines()) <= 40


def documented(section: str) -> set[str]:
    """The keys in the table of a section of docs/json-output.md."""
    page = (Path(__file__).parents[2] / "docs" / "json-output.md").read_text(encoding="utf-8")
    (body,) = (part for part in page.split("\n## ")[1:] if part.startswith(f"{section}\n"))
    rows = [line for line in body.splitlines() if line.startswith("| `")]
    return {key for row in rows for key in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_every_key_of_the_json_output_is_documented_and_the_other_way_round(
    world: ServiceWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(world)
    world.book.stop(job_id=1, reason=WAITS, grace_s=60.0)
    status = json.loads(Ran(capsys, "status", "--json").out)
    job, waits = json.loads(Ran(capsys, "jobs", "--json").out)["jobs"]
    answer = json.loads(Ran(capsys, "explain", "1", "--json").out)
    found = {
        "status": status,
        "nodes": status["nodes"][0],
        "jobs": job,
        "reason": waits["reason"],
        "lease": job["lease"],
        "lease.nodes": job["lease"]["nodes"][0],
        "lease.stop": job["lease"]["stop"],
        "lease.progress": job["lease"]["progress"],
        "explain": answer,
        "explain.explanation": answer["explanation"],
    }
    page = (Path(__file__).parents[2] / "docs" / "json-output.md").read_text(encoding="utf-8")
    assert ", ".join(code.value for code in ReasonCode) in page
    for section, value in found.items():
        assert set(value) == documented(section), f"docs/json-output.md, section {section}"
