"""synergyctl replay: journals decided again, differences and damage told, exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ran import Ran
from test_rounds import played

from slurm_synergy.controller.rounds import round_as_line


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Three rounds of srtf and tune."""
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(map(round_as_line, played())))
    return path


def test_the_same_decisions_are_exit_status_0(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(capsys, "replay", str(journal))
    assert ran.status == 0
    first, second, third = ran.out.splitlines()
    assert first == "round 1 (srtf, tune; 2 jobs): the same"
    assert second == "round 2 (srtf, tune; 3 jobs): the same (its actions cannot be compared)"
    one = Ran(capsys, "replay", str(journal), "--round", "3")
    assert (one.status, one.out) == (0, f"{third}\n")
    content = json.loads(Ran(capsys, "replay", str(journal), "--json").out)
    assert [entry["round"] for entry in content["rounds"]] == [1, 2, 3]
    assert content["rounds"][0]["placed"] == 2
    assert content["rounds"][0]["actions_compared"] is True
    assert content["damaged"] == []


def test_another_policy_or_mechanism_differs_and_is_exit_status_1(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(capsys, "replay", str(journal), "--round", "1", "--mechanism", "proportional")
    assert ran.status == 1
    head, names, *jobs = ran.out.splitlines()
    assert head == "round 1 (srtf, proportional; 2 jobs): differs"
    assert names == "  mechanism: then tune, now proportional"
    assert any(text.startswith("  job 1: then placed on") for text in jobs)
    content = json.loads(
        Ran(capsys, "replay", str(journal), "--policy", "fifo", "--json", "--round", "1").out
    )
    assert content["rounds"][0]["differences"][0] == "policy: then srtf, now fifo"


def test_damage_is_named_by_its_line_and_is_exit_status_1(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text(
        lines[0] + lines[1][:300] + "\n" + lines[2].replace('"version":2', '"version":7')
    )
    ran = Ran(capsys, "replay", str(journal))
    assert ran.status == 1
    assert ran.out == "round 1 (srtf, tune; 2 jobs): the same\n"
    torn, newer = ran.err.splitlines()
    assert torn.startswith(f"{journal}: line 2: not JSON")
    assert newer.startswith(f"{journal}: line 3: a record of version 7; this release reads 1 to 2")
    content = json.loads(Ran(capsys, "replay", str(journal), "--json").out)
    assert [entry["line"] for entry in content["damaged"]] == [2, 3]
    missing = Ran(capsys, "replay", str(journal), "--round", "2")
    assert missing.status == 2
    assert "has no readable round 2" in missing.err
    assert "line 2: not JSON" in missing.err


def test_wrong_names_and_files_are_told(
    journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = Ran(capsys, "replay", str(journal), "--policy", "magic")
    assert ran.status == 2
    assert "there is no policy 'magic'; give --policy with one of" in ran.err
    text = journal.read_text().replace('"policy":"srtf"', '"policy":"gone"')
    journal.write_text(text)
    assert "'gone' (it made that round) any more" in Ran(capsys, "replay", str(journal)).err
    assert Ran(capsys, "replay", str(tmp_path / "none")).status == 1
    (tmp_path / "empty").write_text("")
    ran = Ran(capsys, "replay", str(tmp_path / "empty"))
    assert (ran.status, ran.out) == (0, f"{tmp_path / 'empty'}: no rounds\n")
