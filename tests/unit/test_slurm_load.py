"""What is asked of slurmctld: counted, kept within its budget, and less while it is busy."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from captures import VERSIONS, answer

from slurm_synergy.errors import SlurmCommandError, SlurmParseError
from slurm_synergy.slurm.budget import READING_LIMIT, CallMeter, RpcBudget, kind_of
from slurm_synergy.slurm.pace import BusyLimits, Pacer, busy_with
from slurm_synergy.slurm.sdiag import DiagFacts, RpcLoad, parse_diag, rpc_mean_s

CALM = DiagFacts(
    since_s=1000.0, server_threads=3, agent_queue=0, agents=0, agent_threads=0, dbd_queue=0
)
LIMITS = BusyLimits()


@pytest.mark.parametrize(
    ("argv", "kind"),
    [
        ("squeue -h -a -t all -O JobId:x", "queue"),
        ("squeue -h -a -t all -j 7 -O JobId:x", "job"),
        ("scontrol -a -d -o show job", "jobs"),
        ("scontrol -a -d -o show job 7", "job"),
        ("scontrol -a -d -o show node", "nodes"),
        ("scontrol -a -o show partition synergy", "partition"),
        ("scontrol -o show reservation", "reservations"),
        ("scontrol show config", "config"),
        ("scontrol ping", "ping"),
        ("scontrol hold 7", "hold"),
        ("scontrol release 7", "release"),
        ("scontrol update JobId=7 NumCPUs=3", "update"),
        ("scontrol create reservation ReservationName=x", "reservation"),
        ("scontrol delete ReservationName=x", "reservation"),
        ("scontrol", "session"),
        ("scancel 7", "cancel"),
        ("sdiag", "diag"),
    ],
)
def test_each_command_has_a_kind(argv: str, kind: str) -> None:
    assert kind_of(argv.split()) == kind


def test_calls_are_counted_by_kind_and_turn() -> None:
    meter = CallMeter()
    for _ in range(2):
        meter.begin_turn()
        meter.count("queue", 0.5, ok=True)
        meter.count("nodes", 0.25, ok=False)
    meter.begin_turn()
    budget = meter.budget()
    assert budget == RpcBudget(
        calls={"queue": 2, "nodes": 2},
        seconds={"queue": 1.0, "nodes": 0.5},
        failed={"nodes": 2},
        last_turn={"queue": 1, "nodes": 1},
        last_turn_s=0.75,
        turns=2,
    )


def test_a_call_that_raises_has_failed() -> None:
    meter = CallMeter()
    with pytest.raises(ZeroDivisionError), meter.call("queue"):
        raise ZeroDivisionError
    assert meter.budget().failed == {"queue": 1}


def test_a_turn_over_the_budget_is_told_once_until_it_is_kept_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    meter = CallMeter()

    def turn(reads: int, changes: int = 0) -> None:
        meter.begin_turn()
        for _ in range(reads):
            meter.count("job", 0.0, ok=True)
        for _ in range(changes):
            meter.count("update", 0.0, ok=True)

    with caplog.at_level(logging.WARNING):
        for reads in (READING_LIMIT, READING_LIMIT + 1, READING_LIMIT + 5):
            turn(reads)
        turn(READING_LIMIT + 1, changes=1)
        meter.begin_turn()
    assert meter.budget().exceeded == 2
    assert [record.message for record in caplog.records] == [
        f"{READING_LIMIT + 1} calls of Slurm to read it once, more than the budget of "
        f"{READING_LIMIT}: job {READING_LIMIT + 1}"
    ]


# sdiag


@pytest.mark.parametrize("version", VERSIONS)
def test_a_busy_slurmctld_is_recognised_in_the_text_of_every_release(version: str) -> None:
    text = answer(version, "sdiag").stdout
    now = parse_diag(text)
    assert busy_with(now, None, 0.1, LIMITS) == ""
    busy = text.replace(f"count:  {now.server_threads}\n", "count:  201\n")
    busy = busy.replace("Agent queue size:     0\n", "Agent queue size:     900\n", 1)
    told = busy_with(parse_diag(busy), None, 0.1, LIMITS)
    assert told == "201 threads serve RPCs, 900 messages wait for nodes"


def test_only_rpcs_since_the_last_look_count() -> None:
    before = replace(CALM, rpcs={"A": RpcLoad(count=1000, total_s=1000.0)})
    now = replace(CALM, rpcs={"A": RpcLoad(count=1100, total_s=1001.0)})
    assert rpc_mean_s(now, before) == (pytest.approx(0.01), 100)
    assert rpc_mean_s(now, None)[0] == pytest.approx(0.91)
    # slurmctld was restarted: its counters began anew.
    again = replace(now, since_s=2000.0, rpcs={"A": RpcLoad(count=30, total_s=30.0)})
    assert rpc_mean_s(again, before) == (1.0, 30)
    assert "1 s on average" in busy_with(again, before, 0.1, LIMITS)
    assert busy_with(now, before, 0.1, LIMITS) == ""
    assert rpc_mean_s(CALM, before) == (0.0, 0)


def test_one_slow_rpc_makes_no_busy_slurmctld_but_a_slow_reading_does() -> None:
    few = replace(CALM, rpcs={"A": RpcLoad(count=1, total_s=60.0)})
    assert busy_with(few, CALM, 0.1, LIMITS) == ""
    assert busy_with(CALM, CALM, 7.5, LIMITS) == "the last reading took 7.5 s"


@pytest.mark.parametrize("gone", ["Server thread count", "Data since", "by message type"])
def test_an_answer_without_what_all_releases_tell_is_refused(gone: str) -> None:
    with pytest.raises(SlurmParseError, match="sdiag"):
        parse_diag(answer("24.11.5", "sdiag").stdout.replace(gone, "x"))


# The pace


class Slurmctld:
    """A load that is set from outside."""

    def __init__(self) -> None:
        self.threads, self.reading_s, self.looks = 3, 0.1, 0
        self.error: SlurmCommandError | None = None

    def diagnose(self) -> DiagFacts:
        self.looks += 1
        if self.error is not None:
            raise self.error
        return replace(CALM, server_threads=self.threads)

    def budget(self) -> RpcBudget:
        return RpcBudget(last_turn_s=self.reading_s)


class Time:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_pacer() -> tuple[Pacer, Slurmctld, Time]:
    slurmctld, clock = Slurmctld(), Time()
    pacer = Pacer(slurmctld, limits=LIMITS, look_every_s=30, longest_s=20.0, clock=clock)
    return pacer, slurmctld, clock


def later(pacer: Pacer, clock: Time, pause_s: float = 2.0) -> float:
    clock.now_s += 31
    return pacer.stretch(pause_s)


def test_pauses_double_up_to_the_longest_and_shrink_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pacer, slurmctld, clock = make_pacer()
    with caplog.at_level(logging.INFO):
        assert pacer.stretch(2.0) == 2.0 and pacer.reason == ""
        slurmctld.threads = 250
        assert [later(pacer, clock) for _ in range(6)] == [4.0, 8.0, 16.0, 20.0, 20.0, 20.0]
        assert pacer.reason == (
            "slurmctld is busy (250 threads serve RPCs): read every 20 s at most"
        )
        slurmctld.threads = 3
        assert [later(pacer, clock) for _ in range(5)] == [16.0, 8.0, 4.0, 2.0, 2.0]
    assert pacer.reason == ""
    told = [(record.levelname, record.message) for record in caplog.records]
    assert told[0] == (
        "WARNING",
        "slurmctld is busy (250 threads serve RPCs): read every 4 s at most",
    )
    assert [level for level, _ in told].count("WARNING") == 1
    assert told[-1][1] == "slurmctld is calm again: read as often as before"


def test_sdiag_itself_is_asked_rarely() -> None:
    pacer, slurmctld, clock = make_pacer()
    for _ in range(20):
        clock.now_s += 2
        pacer.stretch(2.0)
    assert slurmctld.looks == 2


def test_a_load_that_cannot_be_read_changes_nothing() -> None:
    pacer, slurmctld, clock = make_pacer()
    slurmctld.error = SlurmCommandError(("sdiag",), 1, "Access/permission denied")
    assert pacer.stretch(2.0) == 2.0
    slurmctld.error, slurmctld.threads = None, 250
    assert later(pacer, clock) == 4.0
    slurmctld.error = SlurmCommandError(("sdiag",), 1, "Access/permission denied")
    assert later(pacer, clock) == 4.0


def test_a_pause_longer_than_the_longest_is_left_alone() -> None:
    pacer, slurmctld, clock = make_pacer()
    slurmctld.threads = 250
    assert later(pacer, clock, 60.0) == 60.0
