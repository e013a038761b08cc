"""synergyctl against a real lease service: output, exit status, and where it finds the address."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from service_world import ServiceWorld

from slurm_synergy.cli import control
from slurm_synergy.cli.main import main
from slurm_synergy.config import render_default_yaml
from slurm_synergy.core.model import Plan, Reason, ReasonCode
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


class Ran:
    """What a call of synergyctl printed and its exit status."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *argv: str) -> None:
        with pytest.raises(SystemExit) as ended:
            main(argv)
        self.status = ended.value.code or 0
        self.out, self.err = capsys.readouterr()


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
    assert "jobs: 1 pending, 1 running" in shown.out
    assert "n1    v100  2/8   10/24  49/781G  up" in shown.out
    content = json.loads(Ran(capsys, "status", "--json").out)
    assert content["round"] == 3
    assert content["jobs"]["running"] == 1


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
        assert (ran.status, ran.out) == (1, "")
        assert "drain is for operators" in ran.err
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
    assert Ran(capsys, "config", "--check", str(file)).out == f"{file}: valid\n"
    file.write_text("scheduling: {policy: magic}")
    ran = Ran(capsys, "config", "--check", str(file))
    assert ran.status == 2
    assert "scheduling.policy = 'magic': there is no such policy; choose one of fifo" in ran.err
    assert Ran(capsys, "config").status == 2


def test_devcluster_is_one_of_the_commands() -> None:
    from slurm_synergy.cli.main import cli

    shown = CliRunner().invoke(cli, ["--help"])
    assert shown.exit_code == 0
    for command in ("status", "jobs", "drain", "resume", "config", "devcluster"):
        assert command in shown.output
