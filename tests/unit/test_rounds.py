"""Rounds of the past: read back from journals, decided again, and compared in words."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from builders import Harness, job, node, profile

from slurm_synergy.cluster import Outcome, Stop
from slurm_synergy.controller import rounds
from slurm_synergy.controller.codec import encode
from slurm_synergy.controller.explaining import explain_round
from slurm_synergy.controller.journal import Journal
from slurm_synergy.controller.replaying import replay
from slurm_synergy.controller.rounds import (
    JOURNAL_VERSION,
    Became,
    Damage,
    Round,
    RoundTexts,
    last_round,
    read_rounds,
    round_as_line,
)
from slurm_synergy.core.model import Job, Reason, ReasonCode
from slurm_synergy.errors import LedgerError
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES


def played(rounds: int = 3) -> list[Round]:
    """Rounds of jobs that come, run and are preempted."""
    harness = Harness([node(), node("v100-2")], "srtf", "tune")
    harness.submit(job(1, 8, total_samples=9e6), belief=profile(50.0))
    harness.submit(job(2, 8, total_samples=8e6), belief=profile(5000.0))
    found = []
    for number in range(rounds):
        if number == 1:
            harness.submit(job(3, 4, total_samples=1e3), belief=profile(5000.0))
        free = harness.cluster.free()
        result = harness.round()
        found.append(
            Round(
                snapshot=result.snapshot,
                plan=result.plan,
                actions=result.actions,
                outcomes=tuple(Became.of(outcome) for outcome in result.outcomes),
                took_s=dict(result.took_s),
                free=free if number == 0 else None,
                code="1",
            )
        )
    return found


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines))
    return path


def test_a_round_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    rounds = played()
    path = write(tmp_path / "journal.jsonl", *map(round_as_line, rounds))
    assert list(read_rounds(path)) == rounds
    assert last_round(tmp_path) == rounds[-1]


def test_records_of_the_first_version_are_read(tmp_path: Path) -> None:
    (record,) = played(1)
    data = json.loads(round_as_line(record))
    data["version"] = 1
    del data["free"]
    path = write(tmp_path / "old.jsonl", json.dumps(data) + "\n")
    assert list(read_rounds(path)) == [replace(record, free=None, version=1)]
    policy, mechanism = POLICIES["srtf"], MECHANISMS["tune"]
    (old,) = (one for one in read_rounds(path) if isinstance(one, Round))
    assert not replay(old, policy, mechanism).differences
    assert not replay(old, policy, mechanism).actions_compared
    assert replay(record, policy, mechanism).actions_compared


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda line: line[: len(line) // 2] + "\n", "not JSON"),
        (lambda line: line.replace(f'"version":{JOURNAL_VERSION}', '"version":99'), "version 99"),
        (lambda line: line.replace('"snapshot"', '"snapshoot"'), "not a whole record: KeyError"),
        (lambda line: line.replace('"gpus":8', '"gpus":-8'), "not a valid Snapshot"),
        (lambda line: "[]\n", "has no version"),
        (lambda line: line.replace('"kind":"start"', '"kind":"explode"', 1), "explode"),
    ],
)
def test_a_damaged_record_is_named_by_its_line_and_the_others_are_read(
    tmp_path: Path, spoil: object, told: str
) -> None:
    first, second, third = map(round_as_line, played())
    path = write(tmp_path / "journal.jsonl", spoil(first), "\n", second, third)  # type: ignore[operator]
    damage, *others = read_rounds(path)
    assert isinstance(damage, Damage)
    assert damage.line == 1
    assert told in damage.what
    assert len(others) == 2


def test_the_newest_whole_round_is_found_behind_a_torn_line_and_in_the_file_before(
    tmp_path: Path,
) -> None:
    rounds = played()
    lines = [round_as_line(one) for one in rounds]
    write(tmp_path / "journal.jsonl", lines[0], lines[1], lines[2][:200])
    assert last_round(tmp_path) == rounds[1]
    write(tmp_path / "journal.1.jsonl", lines[0])
    write(tmp_path / "journal.jsonl", "")
    assert last_round(tmp_path) == rounds[0]
    assert last_round(tmp_path / "none") is None
    with pytest.raises(LedgerError, match="cannot read the journal"):
        list(read_rounds(tmp_path / "none"))


def test_a_long_file_is_read_from_its_end(tmp_path: Path) -> None:
    (record,) = played(1)
    line = round_as_line(record)
    count = 3 * (1 << 20) // len(line) + 3
    path = write(tmp_path / "journal.jsonl", *[line] * count)
    assert path.stat().st_size > 3 << 20
    assert last_round(tmp_path) == record


def test_a_torn_last_line_does_not_take_the_next_round_with_it(tmp_path: Path) -> None:
    first, second, third = played()
    path = write(tmp_path / "journal.jsonl", round_as_line(first), round_as_line(second)[:-300])
    journal = Journal(tmp_path, max_mib=1, keep=1)
    journal.append(third.snapshot, third.plan, third.actions, (), {}, third.free)
    found = list(read_rounds(path))
    assert [type(one) for one in found] == [Round, Damage, Round]
    assert isinstance(found[2], Round) and found[2].snapshot == third.snapshot
    assert last_round(tmp_path) == found[2]


def test_the_journal_knows_its_last_round_over_a_restart(tmp_path: Path) -> None:
    (record,) = played(1)
    reason = Reason(code=ReasonCode.GPUS_BUSY, text="not yet")
    outcomes = [Outcome(action=one, done=False, reason=reason) for one in record.actions]
    journal = Journal(tmp_path, max_mib=1, keep=1)
    assert journal.last() is None
    journal.append(record.snapshot, record.plan, record.actions, outcomes, {}, record.free)
    again = Journal(tmp_path, max_mib=1, keep=1).last()
    assert again is not None
    assert again == journal.last()
    assert set(again.reasons.values()) == {reason}
    shown = Reason(code=ReasonCode.ONLY_SHOWN, text="dry run")
    outcomes = [
        Became(job_id=1, kind="start", done=False, reason=shown),
        Became(job_id=2, kind="renew", done=False, reason=shown),
    ]
    assert replace(record, outcomes=tuple(outcomes)).reasons == {1: shown}


def test_the_same_code_decides_the_same_again() -> None:
    for record in played():
        again = replay(record, POLICIES["srtf"], MECHANISMS["tune"])
        assert again.differences == ()
        assert again.plan == record.plan


def test_differences_are_told_job_by_job() -> None:
    record = played()[0]
    again = replay(record, POLICIES["fifo"], MECHANISMS["proportional"])
    assert again.differences[:2] == (
        "policy: then srtf, now fifo",
        "mechanism: then tune, now proportional",
    )
    (told,) = (text for text in again.differences if text.startswith("job 1: then placed"))
    assert "cores" in told
    assert "; now placed on v100-" in told
    assert any("action start" in text for text in again.differences)
    # A record that somebody changed: the present code does not decide so.
    moved = replace(record.plan, placements=record.plan.placements[:1])
    (lost,) = replay(
        replace(record, plan=moved, free=None), POLICIES["srtf"], MECHANISMS["tune"]
    ).differences
    assert lost.startswith("job 2: then nothing; now placed on")


def test_why_a_job_was_stopped_is_explained_from_the_record() -> None:
    stopped = [one for record in played() for one in record.actions if isinstance(one, Stop)]
    assert stopped
    record = next(one for one in played() if any(isinstance(act, Stop) for act in one.actions))
    found = explain_round(record, str(stopped[0].job_id))
    assert found.reason is not None
    assert found.rank is not None
    assert found.summary.startswith("is being stopped: ")


def test_a_line_is_the_same_whether_texts_are_taken_over_or_not() -> None:
    texts = RoundTexts()
    for record in played(4):
        again = replace(record, took_s={"total": 1.0})
        for one in (record, again):
            line = round_as_line(one, texts)
            assert line == round_as_line(one)
            assert json.loads(line)["snapshot"] == json.loads(
                json.dumps(encode(one.snapshot), allow_nan=False)
            )


def test_what_rounds_leave_that_never_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where intents cannot be written: a full disk."""
    monkeypatch.setattr(rounds, "_MOST_VALUES", 3)
    texts = RoundTexts()
    several = [Reason(code=ReasonCode.NO_GPUS, text=str(number)) for number in range(20)]
    for _ in range(2):
        assert [json.loads(texts.of(one)) for one in several] == list(map(encode, several))
    assert len(texts._values) + len(texts._values_before) <= 6


def test_a_job_that_has_not_changed_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, texts = played(1)[0], RoundTexts()
    round_as_line(first, texts)
    written: list[object] = []
    monkeypatch.setattr(rounds, "encode", lambda value: written.append(value) or encode(value))
    changed = replace(first.snapshot.jobs[0], restarts=7)
    line = round_as_line(
        replace(first, snapshot=replace(first.snapshot, jobs=(changed, *first.snapshot.jobs[1:]))),
        texts,
    )
    told = [one for one in written if isinstance(one, Job)]
    assert told == [changed.job]
    assert json.loads(line)["snapshot"]["jobs"][0]["restarts"] == 7
