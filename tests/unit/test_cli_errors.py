"""What synergyctl says when it cannot do what it was told: to people, and to scripts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from ran import Ran

from slurm_synergy.cli import control
from slurm_synergy.cli.main import cli


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
