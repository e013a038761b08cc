"""What synergyctl says when it cannot do what it was told: to people, and to scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import click
import pytest
from ran import Ran

from slurm_synergy.cli import check_cmd, control, synergyd
from slurm_synergy.cli.commands import cli
from slurm_synergy.cli.main import main


def commands(group: click.Group, *before: str) -> Iterator[tuple[str, ...]]:
    """Every command that has --json."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from commands(command, *before, name)
        elif any("--json" in one.opts for one in command.params):
            yield (*before, name)


@pytest.mark.parametrize("words", [*commands(cli)], ids=" ".join)
def test_with_json_wrong_usage_of_any_command_is_json_too(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(capsys, *words, "--json", "--no-such-option")
    assert ran.status == 2
    ((key, text),) = json.loads(ran.out).items()
    assert key == "error"
    assert "--no-such-option" in text
    assert f"Error: {text}" in ran.err
    assert Ran(capsys, *words, "--no-such-option").out == ""


def test_refusals_and_wrong_settings_are_told_in_both_ways(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SYNERGY_ENDPOINT", raising=False)
    monkeypatch.setattr(control, "DEFAULT_PATH", tmp_path / "none.yaml")
    monkeypatch.setattr(control, "ENDPOINT_FILE", tmp_path / "none")
    ran = Ran(capsys, "jobs", "--json")
    assert ran.status == 2
    (text,) = json.loads(ran.out).values()
    assert text.startswith("the controller's address is not known")
    assert ran.err == f"synergyctl: {text}\n"
    quiet = Ran(capsys, "jobs")
    assert (quiet.status, quiet.out, quiet.err) == (2, "", ran.err)

    not_a_cluster = tmp_path / "full"
    not_a_cluster.mkdir()
    (not_a_cluster / "thesis.tex").touch()
    ran = Ran(capsys, "devcluster", "down", "--json", "--dir", str(not_a_cluster))
    assert ran.status == 1
    assert "left untouched" in json.loads(ran.out)["error"]
    assert "left untouched" in ran.err


def test_what_follows_two_dashes_is_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, "jobs", "--", "--json")
    assert ran.status == 2
    assert ran.out == ""


def test_help_and_version_are_no_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--help", "--version"):
        ran = Ran(capsys, option)
        assert ran.status == 0
        assert "synergyctl" in ran.out
    ran = Ran(capsys, "jobs", "--json", "--help")
    assert ran.status == 0
    assert "error" not in ran.out.splitlines()[-1]


# What comes before a command: loading, closed and full outputs -----------------------------------


def _program(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", code]
    return subprocess.run(argv, text=True, stderr=subprocess.PIPE, timeout=120, **options)  # type: ignore[call-overload, no-any-return]


def test_nothing_of_the_commands_is_loaded_before_one_is_asked_for() -> None:
    done = _program(
        "import sys, slurm_synergy.cli.commands as own\n"
        "heavy = {'numpy', 'pydantic', 'grpc', 'rich', 'yaml'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy or 'jobs' not in own.cli.commands else 0)",
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", [*commands(cli)], ids=" ".join)
def test_commands_go_by_the_names_under_which_they_are_found(words: tuple[str, ...]) -> None:
    command: click.Command = cli
    for word in words:
        assert isinstance(command, click.Group)
        command = command.commands[word]
        assert command.name == word


def test_a_base_installation_says_what_it_lacks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "slurm_synergy.cli.commands")
    monkeypatch.setitem(sys.modules, "click", None)
    ran = Ran(capsys, "jobs", "--json")
    assert ran.status == 1
    (text,) = json.loads(ran.out).values()
    assert "package click is not installed here" in text
    assert "pip install 'slurm-synergy[controller]'" in text
    assert ran.err == f"synergyctl: {text}\n"

    monkeypatch.delitem(sys.modules, "slurm_synergy.controller.daemon", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "slurm_synergy.controller.daemon", _Fails("yaml"))
    assert synergyd.main(["--once"]) == 1
    assert "slurm-synergyd: the Python package yaml is not" in capsys.readouterr().err


class _Fails(ModuleType):
    """A module from which nothing can be imported: for want of a package, or by Ctrl-C."""

    def __init__(self, package: str = "") -> None:
        super().__init__("fails")
        self.package = package

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if not self.package:
            raise KeyboardInterrupt
        raise ModuleNotFoundError(name=self.package)


def test_a_missing_module_of_ours_is_a_fault_and_not_an_installation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fails = _Fails("slurm_synergy.nothing")
    monkeypatch.setitem(sys.modules, "slurm_synergy.cli.commands", fails)
    with pytest.raises(ModuleNotFoundError):
        main(["jobs"])


def test_ctrl_c_while_modules_are_loaded_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "slurm_synergy.cli.commands", _Fails())
    monkeypatch.setitem(sys.modules, "slurm_synergy.controller.daemon", _Fails())
    ran = Ran(capsys, "jobs")
    assert (ran.status, ran.out, ran.err) == (1, "", "\nAborted!\n")
    assert synergyd.main([]) == 1


@pytest.mark.parametrize("argv", [["profile", "list", "--json"], ["--version"]], ids=" ".join)
def test_a_full_disk_behind_standard_output_is_told_once(argv: list[str]) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = _program(f"from slurm_synergy.cli.main import main; main({argv!r})", stdout=full)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()[-1:]
    assert line.startswith("synergyctl: standard output, or a file that was being written: No ")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_closed_outputs_are_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(SystemExit) as ended:
        main(["profile", "show", "gnmt-wmt16"])
    outputs = sys.stdout, sys.stderr
    assert ended.value.code == 0
    for output in outputs:
        assert output is not None
        output.close()


def test_what_a_file_says_does_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "synergy.yaml"
    file.write_text('"\\e[2Jmode": act\n', encoding="utf-8")
    ran = Ran(capsys, "config", "--check", "--config", str(file))
    assert ran.status == 2
    assert "\x1b" not in ran.err
    assert "\\x1b[2Jmode" in ran.err


# Settings that nobody named ----------------------------------------------------------------------


def test_commands_on_the_state_directory_say_that_they_took_the_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = tmp_path / "none.yaml"
    monkeypatch.setenv("SYNERGY_ENDPOINT", "127.0.0.1:1")
    monkeypatch.setenv("SYNERGY_MUNGE_SOCKET", str(tmp_path / "no-munge"))
    monkeypatch.setattr(control, "DEFAULT_PATH", nowhere)
    ran = Ran(capsys, "summary")
    assert f"there is no {nowhere}" in ran.err
    assert "name the controller's settings with --config FILE" in ran.err

    monkeypatch.setattr(check_cmd, "findings", lambda settings, file: ())
    found = json.loads(Ran(capsys, "check", "--json").out)["findings"]
    assert [(one["check"], one["grade"]) for one in found] == [("settings", "warn")]
    assert found[0]["remedy"] == "name the controller's settings with --config FILE"

    settings = tmp_path / "some.yaml"
    settings.write_text(f"state_dir: {tmp_path}/state\n", encoding="utf-8")
    ran = Ran(capsys, "summary", "--config", str(settings))
    assert (ran.status, "--config FILE" in ran.err) == (1, False)
    monkeypatch.setattr(control, "DEFAULT_PATH", settings)
    assert "--config FILE" not in Ran(capsys, "summary").err


def test_giving_jobs_back_leaves_nothing_behind_when_nobody_can_be_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SYNERGY_ENDPOINT", raising=False)
    settings = tmp_path / "some.yaml"
    settings.write_text(
        f"state_dir: {tmp_path}/state\nleases:\n  listen: 127.0.0.1:1\n", encoding="utf-8"
    )
    ran = Ran(capsys, "release-all", "--config", str(settings))
    assert ran.status == 2
    assert "say --yes: there is nobody to ask" in ran.err
    assert not (tmp_path / "state").exists()
