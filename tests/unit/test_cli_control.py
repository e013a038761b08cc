"""synergyctl against a real lease service: output, exit status, and where it finds the address."""

from __future__ import annotations

import io
import json
import math
import os
import pwd
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from ran import Ran
from service_world import ServiceWorld

from slurm_synergy.cli import control
from slurm_synergy.cli.tables import print_table, table_of
from slurm_synergy.config import render_default_yaml
from slurm_synergy.controller.tasks import TaskIdentity, TaskReport
from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.model import Lease, Plan, Reason, ReasonCode
from slurm_synergy.core.pipeline import preprocess_rate
from slurm_synergy.errors import ConfigError

UID = os.getuid()
WAITS = Reason(code=ReasonCode.NO_GPUS, text="all 8 GPUs [bold]are[/] taken")


@pytest.fixture
def world(
    tmp_path: Path, munge_socket: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServiceWorld]:
    world = ServiceWorld(tmp_path / "state", munge_socket, operators=frozenset({UID}))
    monkeypatch.setenv("SYNERGY_ENDPOINT", world.server.endpoint)
    monkeypatch.setenv("SYNERGY_MUNGE_SOCKET", str(munge_socket))
    yield world
    world.close()


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SYNERGY_ENDPOINT", raising=False)
    monkeypatch.setattr(control, "DEFAULT_PATH", tmp_path / "none.yaml")
    monkeypatch.setattr(control, "ENDPOINT_FILE", tmp_path / "none")


def filled(world: ServiceWorld) -> None:
    lease = world.grant(1, 10, uid=UID)
    plan = Plan(
        round=3, policy="srtf", mechanism="tune", placements=(lease.placement,), waiting={2: WAITS}
    )
    me = pwd.getpwuid(UID).pw_name
    world.publish((world.status(1, lease=lease, user=me), world.status(2, user=me)), plan)


def test_status_for_people_and_for_scripts(
    world: ServiceWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Ran(capsys, "status").out.endswith("no round yet\n")
    filled(world)
    shown = Ran(capsys, "status")
    assert shown.status == 0
    assert "policy srtf, mechanism tune, enforcement shared" in shown.out
    assert "round 3, 0 s ago" in shown.out
    assert "round 3, 0 s ago, took 0.020 s" in shown.out
    assert "jobs: 1 pending, 1 running (Slurm read 0 s ago)" in shown.out
    assert "n1    v100  2/8   10/24  49/781G  up" in shown.out
    line = "policy srtf: 2 of 2 jobs tell no length: they come last; users give the hint samples=N"
    assert line in shown.out
    content = json.loads(Ran(capsys, "status", "--json").out)
    assert content["round"] == 3
    assert content["jobs"]["running"] == 1
    assert [one["assumed"] for one in content["missing_inputs"]] == ["they come last"]
    shown_jobs = json.loads(Ran(capsys, "jobs", "--json").out)["jobs"]
    assert list(shown_jobs[0]["held_s"]) == ["v100"]
    assert shown_jobs[1]["held_s"] == {}


def test_status_tells_why_cores_move_as_they_do(
    world: ServiceWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(world)
    assert "enforcement shared:" not in Ran(capsys, "status").out
    world.view.enforced_because = lambda: "partition 'synergy' has OverSubscribe=FORCE"
    line = "enforcement shared: partition 'synergy' has OverSubscribe=FORCE"
    assert line in Ran(capsys, "status").out.splitlines()
    content = json.loads(Ran(capsys, "status", "--json").out)
    assert content["enforcement_reason"] == "partition 'synergy' has OverSubscribe=FORCE"


def test_a_name_of_any_length_widens_no_table(
    world: ServiceWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    me, name = pwd.getpwuid(UID).pw_name, "x" * 899 + "\n"
    long_one = world.status(2, user=me)
    long_one = replace(long_one, job=replace(long_one.job, name=name))
    plan = Plan(round=3, policy="srtf", mechanism="tune", placements=(), waiting={2: WAITS})
    world.publish((world.status(1, user=me), long_one), plan)
    shown = Ran(capsys, "jobs").out.splitlines()
    assert max(map(len, shown)) < 160
    assert shown[2].split()[2] == "x" * 31 + "…"
    assert "x" * 31 + "…" in Ran(capsys, "top", "--once").out
    content = json.loads(Ran(capsys, "jobs", "--json").out)
    assert [job["name"] for job in content["jobs"]] == ["job-1", name]


def test_jobs_tell_where_they_run_or_why_they_wait(
    world: ServiceWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Ran(capsys, "jobs").out == "no jobs\n"
    filled(world)
    header, running, waiting = Ran(capsys, "jobs").out.splitlines()
    assert header.split()[:4] == ["JOBID", "USER", "NAME", "PHASE"]
    assert running.split()[3:8] == ["running", "2", "10", "49G", "n1"]
    assert waiting.endswith(WAITS.text)
    content = json.loads(Ran(capsys, "jobs", "--json").out)
    assert [job["phase"] for job in content["jobs"]] == ["running", "pending"]
    assert content["jobs"][1]["reason"]["code"] == "no_gpus"


def test_a_job_without_a_lease_of_ours_shows_what_slurm_gave_it(
    world: ServiceWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    placed = world.placement(1, 10)
    seen = Lease(job_id=1, generation=1, placement=placed, expires_s=0.0)
    me = pwd.getpwuid(UID).pw_name
    plan = Plan(round=3, policy="srtf", mechanism="tune", placements=(placed,), waiting={2: WAITS})
    world.publish((world.status(1, lease=seen, user=me), world.status(2, user=me)), plan)
    _, running, waiting = Ran(capsys, "jobs").out.splitlines()
    assert running.split()[3:10] == ["running", "2", "10", "49G", "n1", "-", "-"]
    assert waiting.split()[3:8] == ["pending", "2", "-", "-", "-"]
    shown = json.loads(Ran(capsys, "jobs", "--json").out)["jobs"]
    assert [job["lease"] for job in shown] == [None, None]
    assert [bool(job["allocated"]) for job in shown] == [True, False]
    assert "1:10" in Ran(capsys, "top", "--once").out


def test_the_share_of_waiting_for_data_is_shown_where_the_program_tells_it(
    world: ServiceWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(world)

    def stall() -> str:
        header, running, waiting = Ran(capsys, "jobs").out.splitlines()
        at = header.split().index("STALL")
        assert waiting.split()[at] == "-"
        return running.split()[at]

    assert stall() == "-"
    task = TaskIdentity(job_id=1, restart_count=0, rank=0, ranks=1, node="n1")
    world.book.register(task)
    world.book.renew(task, TaskReport(step=5))
    assert stall() == "-"
    world.book.renew(task, TaskReport(step=9, stepped_s=3.0, waited_s=1.0))
    assert stall() == "25%"
    (job, _) = json.loads(Ran(capsys, "jobs", "--json").out)["jobs"]
    assert job["lease"]["progress"]["data_stall"] == 0.25
    assert " 25% " in Ran(capsys, "top", "--once").out


def test_names_neither_steer_the_terminal_nor_fake_rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("\x1b]0;pwn\x07\x1b[31m", "two\n7  root  fake", "caf\u00e9 \u202ex", "tab\t\x9b1m")
    for terminal in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda shown=terminal: shown)
        print_table(("JOBID", "NAME"), [("1", name) for name in names])
        shown = capsys.readouterr().out
        for seen in (r"\x1b]0;pwn\x07\x1b[31m", r"two\n7  root  fake", r"tab\t\x9b1m"):
            assert seen in shown
        assert "caf\u00e9 \\u202ex" in shown
        # The head of a table that is drawn is bold.
        assert not set(shown.partition("NAME")[2].partition("\n")[2]) & set("\x07\x1b\x9b\t\u202e")
        assert len([line for line in shown.splitlines() if "fake" in line]) == 1


def test_what_happened_since_the_round_is_shown(
    world: ServiceWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(world)
    world.grant(2, 4, uid=UID)
    world.book.stop(job_id=1, reason=WAITS, grace_s=60.0)
    content = json.loads(Ran(capsys, "jobs", "--json").out)
    assert [job["phase"] for job in content["jobs"]] == ["stopping", "starting"]
    assert content["jobs"][1]["reason"] is None
    status = json.loads(Ran(capsys, "status", "--json").out)
    (node,) = status["nodes"]
    assert (node["gpus_used"], node["cpus_used"], node["mem_mib_used"]) == (4, 14, 100_000)
    assert (status["jobs"]["starting"], status["jobs"]["pending"]) == (1, 0)
    assert status["round"] == 3
    world.observe(())
    assert Ran(capsys, "jobs").out == "no jobs\n"


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_a_narrow_terminal_folds_and_leaves_nothing_out(width: int) -> None:
    from rich.console import Console

    columns = ("JOBID", "NAME", "NODES", "REASON")
    waits = "needs 6 GPUs (v100); jobs ahead of it leave 2"
    rows = [("1234567", "language-transformerxl", "v100-1,v100-2,a100-1", waits), ("8", *"abc")]
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(table_of(columns, rows, width))
    text = console.export_text()
    lines = [line.rstrip() for line in text.splitlines() if line.strip(" ─")]
    assert max(map(len, lines)) <= width
    assert "…" not in text
    assert sum(word in ("1234567", "8") for line in lines for word in line.split()[:1]) == 2
    for letters in (waits, "language-transformerxl"):
        assert not Counter(letters.replace(" ", "")) - Counter(text)
    # Only words are folded while there is room for the rest.
    assert any("language-transformerxl" in line for line in lines) == (width >= 80)
    assert (len(lines) == 3) == (width >= 120)


def test_trouble_leads_the_status(world: ServiceWorld, capsys: pytest.CaptureFixture[str]) -> None:
    world.view.failed("Slurm does not answer (why); will be tried again")
    world.view.named("hal")
    first, *_ = Ran(capsys, "status").out.splitlines()
    assert first == "trouble: Slurm does not answer (why); will be tried again"
    assert json.loads(Ran(capsys, "status", "--json").out)["cluster"] == "hal"


def test_a_hint_that_names_an_unknown_profile_is_told_to_its_owner(
    world: ServiceWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "profile 'nosuchmodel' is not in the catalogue: proportional share"
    me = pwd.getpwuid(UID).pw_name
    world.observe((world.status(1, user=me),), profile_key="nosuchmodel")
    assert Ran(capsys, "jobs").out.splitlines()[1].endswith(f"  {note}")
    (job,) = json.loads(Ran(capsys, "jobs", "--json").out)["jobs"]
    assert (job["profile"], job["note"]) == ("nosuchmodel", note)
    world.observe((world.status(1, user=me),), profile_key="resnet18-imagenet")
    (job,) = json.loads(Ran(capsys, "jobs", "--json").out)["jobs"]
    assert (job["profile"], job["note"]) == ("resnet18-imagenet", None)
    (job,) = world.view.jobs(viewer_uid=UID + 4242, operators=())
    assert {"profile", "note"}.isdisjoint(job)


def test_the_catalogue_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Ran(capsys, "profile", "list").out.splitlines()
    (shown,) = (line for line in lines if line.startswith("resnet18-imagenet "))
    assert shown.split()[1:6] == ["3840", "14.4", "1920", "7.2", "130G"]
    profiles = json.loads(Ran(capsys, "profile", "list", "--json").out)["profiles"]
    assert [one["profile"] for one in profiles] == sorted(CATALOGUE)
    for one in profiles:
        for kind, cores in one["saturating_cores_per_gpu"].items():
            pipeline = CATALOGUE[one["profile"]].pipeline
            assert pipeline is not None
            most = preprocess_rate(pipeline, math.ceil(cores))
            assert most * 1.001 >= one["samples_per_s_per_gpu"][kind] > 0
            assert preprocess_rate(pipeline, math.ceil(cores) - 1) < most


def test_drain_and_resume_reach_the_ledger(
    world: ServiceWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Ran(capsys, "drain").out.startswith("draining")
    assert world.ledger.draining()
    assert "controller synergy: draining" in Ran(capsys, "status").out
    assert json.loads(Ran(capsys, "resume", "--json").out) == {"draining": False}
    assert not world.ledger.draining()


def test_a_refusal_is_exit_status_1_and_says_why(
    tmp_path: Path,
    munge_socket: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    world = ServiceWorld(tmp_path, munge_socket, operators=frozenset({UID + 1}))
    try:
        monkeypatch.setenv("SYNERGY_ENDPOINT", world.server.endpoint)
        monkeypatch.setenv("SYNERGY_MUNGE_SOCKET", str(munge_socket))
        ran = Ran(capsys, "drain", "--json")
        assert ran.status == 1
        assert "drain is for operators" in ran.err
        assert ran.err == f"synergyctl: {json.loads(ran.out)['error']}\n"
    finally:
        world.close()


def test_an_unreachable_controller_is_exit_status_1(
    munge_socket: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SYNERGY_ENDPOINT", "127.0.0.1:1")
    monkeypatch.setenv("SYNERGY_MUNGE_SOCKET", str(munge_socket))
    ran = Ran(capsys, "status")
    assert ran.status == 1
    assert "no answer from the controller at 127.0.0.1:1 (from SYNERGY_ENDPOINT)" in ran.err
    assert "is slurm-synergyd running there?" in ran.err


def test_without_munged_the_remedy_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SYNERGY_ENDPOINT", "127.0.0.1:1")
    monkeypatch.setenv("SYNERGY_MUNGE_SOCKET", str(tmp_path / "none"))
    ran = Ran(capsys, "status")
    assert ran.status == 1
    assert "is munged running" in ran.err


@pytest.mark.usefixtures("nothing_known")
def test_wrong_usage_and_settings_are_exit_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Ran(capsys, "status", "--jsno").status == 2
    assert Ran(capsys, "nonsense").status == 2
    unknown = Ran(capsys, "status")
    assert unknown.status == 2
    assert "set SYNERGY_ENDPOINT=HOST:PORT" in unknown.err
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("scheduling: {polcy: fifo}")
    ran = Ran(capsys, "status", "--config", str(wrong))
    assert (ran.status, "did you mean 'policy'" in ran.err) == (2, True)


@pytest.mark.usefixtures("nothing_known")
def test_the_address_is_found_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    settings = tmp_path / "s.yaml"
    settings.write_text(
        f"state_dir: {state}\nleases: {{listen: '0.0.0.0:0', munge: {{socket: /run/m}}}}\n"
    )
    with pytest.raises(ConfigError, match="port 0 tells no address"):
        control.find_target(settings, {})
    (state / "endpoint").write_text("head:5\n")
    target = control.find_target(settings, {"SYNERGY_ENDPOINT": "other:1"})
    assert (target.endpoint, target.munge_socket) == ("head:5", Path("/run/m"))
    assert control.find_target(None, {"SYNERGY_ENDPOINT": "other:1"}).endpoint == "other:1"
    file = tmp_path / "endpoint"
    file.write_text("# the controller\nhead:6\n")
    monkeypatch.setattr(control, "ENDPOINT_FILE", file)
    assert control.find_target(None, {}).endpoint == "head:6"
    monkeypatch.setattr(control, "DEFAULT_PATH", settings)
    assert control.find_target(None, {}).endpoint == "head:5"
    settings.write_text("state_dir: /nowhere\nleases: {advertise: 'head:7', listen: ':::0'}\n")
    with pytest.raises(ConfigError, match=r"leases\.listen"):
        control.find_target(settings, {})
    settings.write_text("state_dir: /nowhere\nleases: {advertise: 'head:7'}\n")
    assert control.find_target(settings, {}).endpoint == "head:7"
    settings.write_text("state_dir: /nowhere\n")
    assert control.find_target(settings, {}).endpoint == "localhost:7737"
    with pytest.raises(ConfigError, match="SYNERGY_ENDPOINT: 'nonsense' is not HOST:PORT"):
        control.find_target(None, {"SYNERGY_ENDPOINT": "nonsense"})


def test_settings_are_printed_and_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Ran(capsys, "config", "--default").out == render_default_yaml()
    file = tmp_path / "s.yaml"
    file.write_text(render_default_yaml())
    for argv in (("--check", "--config", str(file)), ("--config", str(file), "--check")):
        assert Ran(capsys, "config", *argv).out == f"{file}: valid: all defaults\n"
    file.write_text("")
    assert Ran(capsys, "config", "--check", str(file)).out == f"{file}: valid: all defaults\n"
    file.write_text("log_level: debug")
    assert Ran(capsys, "config", "--check", str(file)).out == f"{file}: valid\n"
    file.write_text("scheduling: {policy: magic}")
    ran = Ran(capsys, "config", "--check", str(file))
    assert ran.status == 2
    assert "scheduling.policy = 'magic': there is no such policy; choose one of fifo" in ran.err
    for argv in (
        (),
        ("--config", str(file)),
        ("--default", "--check"),
        ("--default", "--config", str(file)),
        ("--check", str(file), "--config", str(file)),
        ("--check", "--config", str(tmp_path / "none")),
    ):
        assert Ran(capsys, "config", *argv).status == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("operators: [nobody-of-that-name]", "operators = 'nobody-of-that-name': there is no"),
        ("slurm: {conf: /nowhere/slurm.conf}", "slurm.conf = '/nowhere/slurm.conf': there is no"),
        ("slurm: {bin_dir: /nowhere}", "slurm.bin_dir = '/nowhere': squeue, scontrol, scancel"),
        ("leases: {listen: '300.1.2.3:7737'}", "leases.listen = '300.1.2.3:7737': '300.1.2.3'"),
        ("leases: {advertise: '0.0.0.0:7737'}", "nobody can call that address"),
        ("leases: {advertise: '[::]:7737'}", "nobody can call that address"),
        ("pool: {nodes: 'v100-[1'}", "pool.nodes = 'v100-[1': not a host list"),
        ("scheduling: {mechanism: magic}", "scheduling.mechanism = 'magic'"),
    ],
)
def test_a_check_finds_what_can_be_found_without_slurm(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    told: str,
) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    file = tmp_path / "s.yaml"
    file.write_text(text)
    ran = Ran(capsys, "config", "--check", "--config", str(file))
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"synergyctl: {file}: ")
    assert told in ran.err


def test_a_check_notes_what_only_this_machine_could_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    file = tmp_path / "s.yaml"
    file.write_text("leases: {listen: '127.0.0.1:7737'}")
    assert (
        "note: only this machine reaches 127.0.0.1"
        in Ran(capsys, "config", "--check", str(file)).out
    )
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    ran = Ran(capsys, "config", "--check", str(file))
    assert (ran.status, "no file /nowhere/slurm.conf" in ran.err) == (2, True)


def test_devcluster_is_one_of_the_commands() -> None:
    from slurm_synergy.cli.commands import cli

    shown = CliRunner().invoke(cli, ["--help"])
    assert shown.exit_code == 0
    for command in ("status", "jobs", "drain", "resume", "config", "profile", "devcluster"):
        assert command in shown.output
