"""The summary of what acting would have changed: lower bounds and estimates that add up."""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from builders import elastic, job, node, pending, placement, profile, res, running, snapshot
from click.testing import CliRunner
from manual_clock import ManualClock

from slurm_synergy.cli.commands import cli
from slurm_synergy.cluster import Action, Renew, Start
from slurm_synergy.controller.daily import DailySummary
from slurm_synergy.controller.rounds import Became, Damage, Round, round_as_line
from slurm_synergy.controller.summary import journal_files, summarise, summary_of, words
from slurm_synergy.core.goodput import ThroughputModel
from slurm_synergy.core.model import JobStatus, Placement, Plan, Reason, ReasonCode
from slurm_synergy.core.scaling import BatchSize, Scaling, TypeSpeed
from slurm_synergy.errors import LedgerError

SHOWN = Reason(code=ReasonCode.ONLY_SHOWN, text="observe: nothing is changed in Slurm")
NODES = [node("v100-1"), node("v100-2")]
WIDE = profile(per_core=100.0, gpu_rate=1000.0)  # 10 cores per GPU keep it busy


def play(
    now_s: float,
    jobs: Sequence[JobStatus],
    placements: Sequence[Placement] = (),
    starts: Sequence[Placement] = (),
    *,
    done: bool = False,
) -> Round:
    """A round that was only shown, unless ``done``."""
    seen = replace(snapshot(NODES, jobs), now_s=now_s, round_s=300.0)
    waits = {
        one.job.job_id: SHOWN
        for one in jobs
        if one.job.job_id not in {planned.job_id for planned in (*placements, *starts)}
    }
    plan = Plan(
        round=1,
        policy="fifo",
        mechanism="tune",
        placements=tuple(sorted((*placements, *starts), key=lambda one: one.job_id)),
        waiting=waits,
    )
    actions: tuple[Action, ...] = tuple(
        Start(job_id=one.job_id, placement=one) for one in starts
    ) or (Renew(job_id=1),)
    outcomes = tuple(
        Became(
            job_id=one.job_id,
            kind=type(one).__name__.lower(),
            done=done,
            reason=None if done else SHOWN,
        )
        for one in actions
    )
    return Round(snapshot=seen, plan=plan, actions=actions, outcomes=outcomes)


def test_a_job_that_slurm_let_wait_counts_as_long_as_it_was_seen_waiting() -> None:
    one, there = job(1, 4), placement(1, v100_1=res(4, 12, 1000))
    elsewhere = placement(1, v100_2=res(4, 12, 1000))
    found = summarise(
        [
            play(0, [pending(one)], starts=[there]),
            play(300, [pending(one)], starts=[there]),
            play(500, [pending(one)], starts=[elsewhere]),
            play(900, [running(one, elsewhere)], [elsewhere]),
        ]
    )
    assert (found.earlier_jobs, found.earlier_s) == (1, 500.0)  # not the 900 that are possible
    assert found.elsewhere_jobs == 1
    assert found.lines[0].planned == ("v100-1",)
    assert (found.rounds, found.shown_rounds, found.jobs) == (4, 4, 1)


def test_a_job_that_slurm_started_at_once_gains_nothing() -> None:
    one, there = job(1, 4), placement(1, v100_1=res(4, 12, 1000))
    found = summarise(
        [
            play(0, [pending(one)], starts=[there]),
            play(100, [running(one, there)], [there]),
        ]
    )
    assert (found.earlier_jobs, found.elsewhere_jobs, found.lines) == (0, 0, ())


def test_other_cpus_are_an_estimate_where_there_is_a_profile() -> None:
    hungry, modest = job(1, 4), job(2, 4)
    now = [placement(n, v100_1=res(4, 12, 1000)) for n in (1, 2)]
    planned = [placement(1, v100_1=res(4, 18, 1000)), placement(2, v100_1=res(4, 6, 1000))]
    statuses = [running(hungry, now[0], WIDE), running(modest, now[1])]
    found = summarise([play(0, statuses, planned), play(360, statuses, planned)])
    # 12 of 18 cores: two thirds of the speed, for 4 GPUs and 360 s.
    assert found.saved_gpu_s == pytest.approx(4 * 360 / 3)
    assert (found.known_gpu_s, found.unknown_gpu_s) == (1440, 1440)
    assert (found.other_cpus_jobs, found.cpus_seen, found.cpus_planned) == (2, 24, 24)
    assert [line.job_id for line in found.lines] == [1, 2]
    text = "\n".join(words(found))
    assert "0.1 GPU-hours less for the same work (saved 0.1, lost 0.0) of 0.4" in text
    assert "0.4 GPU-hours of jobs without a profile" in text
    assert "no forecast" in text


def test_what_slurm_gave_counts_and_not_the_share_of_an_adopted_lease() -> None:
    one = job(1, 4)
    share = placement(1, v100_1=res(4, 12, 1000))
    given = {"v100-1": res(4, 20, 1000)}
    statuses = [running(one, share, WIDE, granted=given)]
    planned = [placement(1, v100_1=res(4, 20, 1000))]
    found = summarise([play(0, statuses, planned), play(100, statuses, planned)])
    assert (found.saved_gpu_s, found.other_cpus_jobs, found.known_gpu_s) == (0.0, 0, 400.0)


def test_what_a_job_would_have_lost_is_told_as_well() -> None:
    one = job(1, 4)
    now, planned = placement(1, v100_1=res(4, 12, 1000)), placement(1, v100_1=res(4, 6, 1000))
    found = summarise([play(0, [running(one, now, WIDE)], [planned])] * 2)
    assert found.lost_gpu_s == 0.0  # no time passed
    later = play(100, [running(one, now, WIDE)], [planned])
    found = summarise([play(0, [running(one, now, WIDE)], [planned]), later])
    assert (found.saved_gpu_s, found.lost_gpu_s) == (0.0, pytest.approx(400.0))


def test_an_elastic_job_counts_with_the_speed_that_was_learned_of_it() -> None:
    """With its batch of now on both sides, whatever batch was planned."""
    speed = TypeSpeed(
        model=ThroughputModel(compute_s=0.0, compute_s_per_sample=0.002), local_most=100
    )
    belief = replace(WIDE, gpu_rate_per_gpu={}, scaling=Scaling(speeds={"v100": speed}))
    now, planned = (
        replace(placement(1, v100_1=res(4, cpus, 1000)), batch=BatchSize(local=size, replicas=4))
        for cpus, size in ((10, 100), (30, 50))
    )
    statuses = [running(elastic(1, 1), now, belief)]
    found = summarise([play(0, statuses, [planned]), play(100, statuses, [planned])])
    # Its four GPUs make 2,000 samples/s; ten cores feed half of that.
    assert found.unknown_gpu_s == 0.0
    assert (found.known_gpu_s, found.saved_gpu_s) == (400.0, pytest.approx(200.0, rel=1e-3))


def test_a_running_job_that_would_have_been_stopped_is_counted_once() -> None:
    one, there = job(1, 4), placement(1, v100_1=res(4, 12, 1000))
    found = summarise([play(float(s), [running(one, there)]) for s in (0, 10, 20)])
    assert (found.stopped_jobs, found.known_gpu_s + found.unknown_gpu_s) == (1, 0)


def test_a_gap_in_the_journal_is_not_taken_for_running_time() -> None:
    one, there = job(1, 4), placement(1, v100_1=res(4, 12, 1000))
    rounds = [play(float(s), [running(one, there)], [there]) for s in (0, 100_000)]
    assert summarise(rounds).unknown_gpu_s == 4 * 600


def test_rounds_that_were_carried_out_are_no_basis_for_what_would_have_been() -> None:
    one, there = job(1, 4), placement(1, v100_1=res(4, 12, 1000))
    found = summarise([play(float(s), [pending(one)], starts=[there], done=True) for s in (0, 9)])
    assert (found.shown_rounds, found.jobs, dict(found.done)) == (0, 0, {"start": 2})
    assert "all carried out (actions: start 2)" in words(found)[0]


def test_nothing_at_all_is_said_as_such() -> None:
    assert words(summarise([])) == ("no round in this time",)
    found = summarise([Damage(line=3, what="cut"), play(0, [pending(job(1, 4))])])
    assert found.damaged_lines == 1
    assert "1 line of the journal cannot be read" in words(found)[-1]


def _journal(state: Path, name: str, *rounds: Round) -> Path:
    state.mkdir(exist_ok=True)
    path = state / name
    path.write_text("".join(round_as_line(one) for one in rounds))
    return path


def test_all_files_are_read_the_oldest_first_and_only_the_time_asked_for(tmp_path: Path) -> None:
    state = tmp_path / "state"
    one, there = job(1, 4), placement(1, v100_1=res(4, 12, 1000))
    for number, name in enumerate(["journal.10.jsonl", "journal.2.jsonl", "journal.jsonl"]):
        _journal(state, name, play(1000.0 * number, [pending(one)], starts=[there]))
    (state / "journal.x.jsonl").write_text("not ours")
    assert [path.name for path in journal_files(state)] == [
        "journal.10.jsonl",
        "journal.2.jsonl",
        "journal.jsonl",
    ]
    assert summary_of(state, since_s=0).earlier_s == 2000.0
    assert summary_of(state, since_s=500).earlier_s == 1000.0
    # A file last written before that time is not even opened.
    (state / "journal.10.jsonl").write_bytes(b"\xff broken")
    os.utime(state / "journal.10.jsonl", (100, 100))
    assert summary_of(state, since_s=500).damaged_lines == 0
    with pytest.raises(LedgerError, match="cannot read the state directory"):
        summary_of(tmp_path / "none", since_s=0)


def test_the_command_prints_words_and_json(tmp_path: Path) -> None:
    import time

    state = tmp_path / "state"
    now_s = time.time()
    one, there = job(17, 4), placement(17, v100_1=res(4, 12, 1000))
    _journal(
        state,
        "journal.jsonl",
        play(now_s - 900, [pending(one)], starts=[there]),
        play(now_s - 300, [pending(one)], starts=[there]),
    )
    config = tmp_path / "synergy.yaml"
    config.write_text(yaml.safe_dump({"state_dir": str(state)}))
    shown = CliRunner().invoke(cli, ["summary", "--config", str(config)])
    assert shown.exit_code == 0, shown.output
    assert "mode of partition synergy: observe" in shown.output
    assert "1 job would have started earlier, by at least 10.0 min in all" in shown.output
    assert ">=10.0 min" in shown.output
    as_json = CliRunner().invoke(cli, ["summary", "--json", "--config", str(config)])
    content = json.loads(as_json.output)
    assert (content["mode"], content["earlier_jobs"], content["lines"][0]["job_id"]) == (
        "observe",
        1,
        17,
    )
    recent = CliRunner().invoke(cli, ["summary", "--hours", "0.1", "--config", str(config)])
    assert "0 jobs would have started earlier" in recent.output


def test_once_a_day_the_summary_is_logged_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    state, clock = tmp_path / "state", ManualClock(20_001 * 86_400.0 - 10)
    one, there = job(1, 4), placement(1, v100_1=res(4, 12, 1000))
    at_s = clock.now_s()
    _journal(
        state,
        "journal.jsonl",
        play(at_s - 600, [pending(one)], starts=[there]),
        play(at_s - 300, [pending(one)], starts=[there]),
    )
    (state / "journal.jsonl").touch()
    os.utime(state / "journal.jsonl", (at_s, at_s))
    (state / "summaries").mkdir()
    for number in range(10, 28):
        for month in ("01", "02"):
            (state / "summaries" / f"2020-{month}-{number}.json").write_text("{}")
    daily = DailySummary(state, clock)
    daily.look()
    assert caplog.records == []
    clock.advance(20)
    daily.look()
    assert daily.wait(60)
    assert "summary:   1 job would have started earlier, by at least 5.0 min" in caplog.text
    files = sorted((state / "summaries").iterdir())
    assert len(files) == 30
    assert json.loads(files[-1].read_text())["earlier_jobs"] == 1
    assert stat.S_IMODE(files[-1].stat().st_mode) == 0o600
    caplog.clear()
    daily.look()
    assert daily.wait(60)
    assert caplog.records == []


def test_a_summary_that_cannot_be_made_is_only_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(86_400.0 * 20_000)
    daily = DailySummary(tmp_path / "none", clock)
    clock.advance(86_400)
    daily.look()
    assert daily.wait(60)
    assert "there is no summary of the day: " in caplog.text
    assert "cannot read the state directory" in caplog.text
