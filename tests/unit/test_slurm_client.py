"""The client's own decisions, with the commands replaced: retries, races, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from slurm_synergy.errors import ModelError, SlurmCommandError, SlurmParseError, SlurmTimeout
from slurm_synergy.slurm.cli_client import CliSlurmClient
from slurm_synergy.slurm.commands import CommandResult, SlurmCommands
from slurm_synergy.slurm.facts import JobShape
from slurm_synergy.slurm.fields import parse_time_s

FIXTURES = Path(__file__).parent.parent / "fixtures" / "slurm"
DOWN = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
Answer = tuple[int, str, str] | Exception


class FakeRunner:
    """Answers from a function of the command line and records what was asked."""

    def __init__(self, answer: Callable[[Sequence[str]], Answer]) -> None:
        self.answer, self.asked = answer, list[tuple[str, ...]]()

    def run(self, argv: Sequence[str], *, timeout_s: float, stdin: str = "") -> CommandResult:
        self.asked.append(tuple(argv))
        found = self.answer(argv)
        if isinstance(found, Exception):
            raise found
        rc, stdout, stderr = found
        return CommandResult(argv=tuple(argv), rc=rc, stdout=stdout, stderr=stderr)


def client_of(runner: FakeRunner, slept: list[float] | None = None) -> CliSlurmClient:
    naps = slept if slept is not None else []
    return CliSlurmClient(runner, sleep=naps.append, retry_delay_s=0.25)


def test_a_command_that_missed_a_living_controller_is_repeated() -> None:
    answers: list[Answer] = [(1, "", DOWN), SlurmTimeout(("scontrol",), 30.0), (0, "", "")]

    def answer(argv: Sequence[str]) -> Answer:
        if argv[1] == "ping":
            return 0, "Slurmctld(primary) at head is UP\n", ""
        return answers.pop(0)

    slept: list[float] = []
    runner = FakeRunner(answer)
    client_of(runner, slept).hold(7)
    assert [argv[1] for argv in runner.asked] == ["hold", "ping", "hold", "ping", "hold"]
    assert slept == [0.25, 0.25]


def test_tries_are_bounded() -> None:
    def answer(argv: Sequence[str]) -> Answer:
        if argv[1] == "ping":
            return 0, "Slurmctld(primary) at head is UP\n", ""
        return 1, "", DOWN

    runner = FakeRunner(answer)
    with pytest.raises(SlurmCommandError):
        client_of(runner).hold(7)
    assert [argv[1] for argv in runner.asked].count("hold") == 3


def test_with_the_controller_down_nothing_is_repeated() -> None:
    def answer(argv: Sequence[str]) -> Answer:
        if argv[1] == "ping":
            return 1, "Slurmctld(primary) at head is DOWN\n", ""
        return 1, "", DOWN

    runner = FakeRunner(answer)
    with pytest.raises(SlurmCommandError) as caught:
        client_of(runner).read_nodes()
    assert caught.value.kind == "controller_down" and len(runner.asked) == 2


def test_other_errors_are_not_repeated() -> None:
    runner = FakeRunner(lambda argv: (1, "", "Invalid job id specified for job 7"))
    with pytest.raises(SlurmCommandError):
        client_of(runner).hold(7)
    assert len(runner.asked) == 1


def test_members_of_an_array_that_are_over_do_not_make_a_change_of_the_rest_fail() -> None:
    said = "4_0,2-4,401-498: No error\n4_1: Job has already finished\n"
    client_of(FakeRunner(lambda argv: (1, "", said))).hold(4)
    mixed = "4_0: No error\n4_1: Access/permission denied\n"
    for refused in ("4_1: Job has already finished\n", "Job has already finished\n", mixed, ""):
        runner = FakeRunner(lambda argv, text=refused: (1, "", text))  # type: ignore[misc]
        with pytest.raises(SlurmCommandError):
            client_of(runner).hold(4)


def test_an_empty_answer_with_status_zero_is_an_error_and_not_an_empty_queue() -> None:
    with pytest.raises(SlurmParseError):
        client_of(FakeRunner(lambda argv: (0, "", ""))).read_queue()


def test_a_queue_without_jobs_is_empty_only_when_slurm_says_so() -> None:
    def answer(argv: Sequence[str]) -> Answer:
        return (0, "", "") if argv[0] == "squeue" else (0, "No jobs in the system\n", "")

    assert client_of(FakeRunner(answer)).read_queue() == ()


@pytest.mark.parametrize(
    ("restarts", "age_s", "nap_s"), [(1, 0.2, 1.3), (1, 60.0, 0.0), (0, 0, None)]
)
def test_a_job_requeued_in_this_second_is_not_started_in_it(
    restarts: int, age_s: float, nap_s: float | None
) -> None:
    text = (FIXTURES / "22.05.8" / "scontrol_d_show_job_o.out").read_text("utf-8")
    record = next(line for line in text.splitlines() if line.startswith("JobId=21 "))
    record = record.replace("Restarts=1", f"Restarts={restarts}")
    record = record.replace("JobName=resnet152-cifar UserId=alice(2001)", "JobName=a UserId=r(0)")

    def answer(argv: Sequence[str]) -> Answer:
        if argv[0] == "squeue":
            return 0, queue_row(argv, 21), ""
        return 0, f"{record}\n" if "show" in argv else "", ""

    submitted = parse_time_s(record.partition("SubmitTime=")[2].split()[0], "SubmitTime")
    assert submitted is not None
    now_s, slept = submitted + age_s, list[float]()
    runner = FakeRunner(answer)
    client = CliSlurmClient(runner, sleep=slept.append, clock=lambda: now_s)
    client.set_start_now(21)
    assert slept == ([] if nap_s is None else [pytest.approx(nap_s)])
    assert runner.asked[-1] == ("scontrol", "update", "JobId=21", "StartTime=now")


def queue_row(argv: Sequence[str], job_id: int) -> str:
    fields = argv[-1].split(",")
    mark = fields[0].partition(":")[2]
    values = {"JobId": str(job_id), "UserId": "0", "Partition": "synergy", "Name": "a"}
    return "".join(f"{values.get(f.partition(':')[0], '(null)')}{mark}" for f in fields) + "\n"


def test_a_job_that_one_of_the_two_readings_lacks_is_asked_for_alone() -> None:
    def answer(argv: Sequence[str]) -> Answer:
        if argv[0] == "squeue":
            return 0, queue_row(argv, 7), ""
        if argv[-1] == "7":
            return 1, "", "slurm_load_jobs error: Invalid job id specified"
        return 0, "No jobs in the system\n", ""

    runner = FakeRunner(answer)
    assert client_of(runner).read_queue("synergy") == ()
    assert runner.asked[-1][-1] == "7"

    def fails(argv: Sequence[str]) -> Answer:
        return (1, "", DOWN) if argv[-1] == "7" or argv[1] == "ping" else answer(argv)

    with pytest.raises(SlurmCommandError):
        client_of(FakeRunner(fails)).read_queue("synergy")


@pytest.mark.parametrize("nodes", [(), ("n1", "n1")])
def test_a_shape_without_or_with_doubled_nodes_is_refused(nodes: tuple[str, ...]) -> None:
    with pytest.raises(ModelError, match="nodes"):
        JobShape(
            nodes=nodes,
            gpus_per_node=1,
            gpu_type=None,
            cpus_per_node=2,
            mem_mib_per_node=1,
            cpus_per_task=2,
        )


def test_tasks_that_do_not_fit_into_the_cpus_are_refused() -> None:
    with pytest.raises(ModelError, match="do not fit"):
        JobShape(
            nodes=("n1",),
            gpus_per_node=1,
            gpu_type=None,
            cpus_per_node=4,
            mem_mib_per_node=1,
            tasks_per_node=3,
            cpus_per_task=2,
        )


def test_a_reservation_never_gets_an_empty_node_list_or_a_name_with_fields_in_it() -> None:
    runner = FakeRunner(lambda argv: (0, "", ""))
    client = client_of(runner)
    with pytest.raises(ValueError, match="at least one"):
        client.update_reservation_nodes("pool", [])
    with pytest.raises(ValueError, match="not a name"):
        client.delete_reservation("pool Nodes=ALL")
    assert runner.asked == []


def test_commands_run_with_plain_texts_utc_and_no_slurm_variables_of_the_caller() -> None:
    environment = {"PATH": "/usr/bin:/bin", "SQUEUE_FORMAT": "%i", "SLURM_TIME_FORMAT": "%s"}
    commands = SlurmCommands(slurm_conf="/x/slurm.conf", environment=environment)
    shown = commands.run(("env",), timeout_s=10).check().stdout.split()
    assert set(shown) >= {"LC_ALL=C", "TZ=UTC", "SLURM_CONF=/x/slurm.conf"}
    assert not [item for item in shown if item.startswith(("SQUEUE_FORMAT", "SLURM_TIME"))]


def test_a_command_that_hangs_is_ended_and_reported() -> None:
    with pytest.raises(SlurmTimeout, match=r"no answer within 0\.2 s"):
        SlurmCommands().run(("sleep", "60"), timeout_s=0.2)


def test_a_missing_command_says_where_it_was_looked_for() -> None:
    with pytest.raises(SlurmCommandError, match="not in /nowhere") as caught:
        SlurmCommands(bin_dir="/nowhere").run(("squeue",), timeout_s=1)
    assert caught.value.kind == "not_installed"


def test_a_command_runs_without_files_in_memory_and_tells_when_it_cannot_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object, **__: object) -> int:
        raise PermissionError(13, "noexec")

    monkeypatch.setattr(os, "memfd_create", refused)
    assert SlurmCommands().run(("echo", "a"), timeout_s=20).stdout == "a\n"
    monkeypatch.setattr(subprocess, "Popen", refused)
    open_before = os.listdir("/proc/self/fd")
    with pytest.raises(SlurmCommandError, match=r"cannot be started: .*noexec"):
        SlurmCommands().run(("echo", "a"), timeout_s=20)
    assert os.listdir("/proc/self/fd") == open_before


def test_bytes_that_are_not_utf8_survive() -> None:
    code = "import os,sys; os.write(1, b'\\xff='); sys.stdout.write(sys.stdin.read())"
    done = SlurmCommands().run((sys.executable, "-c", code), timeout_s=20, stdin="é\udcfe")
    assert done.stdout == "\udcff=é\udcfe"


class BesideRunner(FakeRunner):
    """One that can begin a command: its answer is that of the moment when it began."""

    def begin(self, argv: Sequence[str], *, timeout_s: float) -> Callable[[], CommandResult]:
        self.asked.append(("begin", *argv))
        rc, stdout, stderr = self.answer(argv)  # type: ignore[misc]
        return lambda: CommandResult(argv=tuple(argv), rc=rc, stdout=stdout, stderr=stderr)


def test_a_queue_is_read_by_two_commands_at_once_and_each_counts() -> None:
    runner = BesideRunner(lambda argv: (0, "No jobs in the system\n" * ("show" in argv), ""))
    client = client_of(runner)
    for _ in range(2):
        assert client.read_queue() == ()
        assert [argv[0] for argv in runner.asked] == ["begin", "squeue"]
        runner.asked.clear()
    assert client.budget().last_turn == {"queue": 1, "jobs": 1}


def test_what_was_begun_before_squeue_had_to_be_repeated_is_no_reading_of_now() -> None:
    squeue: list[Answer] = [(1, "", DOWN), (0, "", "")]
    shown: list[Answer] = [(0, "JobId=1 JobName=old\n", ""), (0, "No jobs in the system\n", "")]

    def answer(argv: Sequence[str]) -> Answer:
        if argv[1] == "ping":
            return 0, "Slurmctld(primary) at head is UP\n", ""
        return (squeue if argv[0] == "squeue" else shown).pop(0)

    runner = BesideRunner(answer)
    assert client_of(runner).read_queue() == ()
    assert [argv[0] for argv in runner.asked] == [
        "begin",
        "squeue",
        "scontrol",
        "squeue",
        "scontrol",
    ]


def test_what_members_of_arrays_are_called_is_forgotten_with_them() -> None:
    client = client_of(
        FakeRunner(lambda argv: (0, "No jobs in the system\n" * ("show" in argv), ""))
    )
    client._addresses.update({8: "7_1", 9: "7_2"})
    assert client.read_queue() == () and client._addresses == {}


def test_a_begun_command_that_missed_the_controller_is_repeated() -> None:
    shown: list[Answer] = [(1, "", DOWN), (0, "No jobs in the system\n", "")]

    def answer(argv: Sequence[str]) -> Answer:
        if argv[1] == "ping":
            return 0, "Slurmctld(primary) at head is UP\n", ""
        return (0, "", "") if argv[0] == "squeue" else shown.pop(0)

    runner = BesideRunner(answer)
    assert client_of(runner).read_queue() == () and not shown


def test_commands_that_are_begun_run_beside_each_other_and_megabytes_come_whole() -> None:
    """Each of the two waits for the other to have begun."""
    script = "import pathlib, sys, time\nmine, other = map(pathlib.Path, sys.argv[1:])\n"
    script += "mine.touch()\nend = time.monotonic() + 60\n"
    script += "while not other.exists() and time.monotonic() < end: time.sleep(0.01)\n"
    script += "print(('a\\r\\n' * 500_000) * other.exists(), end='')\n"
    commands = SlurmCommands(bin_dir=str(Path(sys.executable).parent))
    with tempfile.TemporaryDirectory() as place:
        one, other = (str(Path(place) / name) for name in "ab")
        program = Path(sys.executable).name
        begun = commands.begin((program, "-c", script, one, other), timeout_s=90)
        # Nobody who ends waits for it.
        assert [each.daemon for each in threading.enumerate() if each.name == program] == [True]
        found = commands.run((program, "-c", script, other, one), timeout_s=90)
        assert found.check().stdout == begun().check().stdout == "a\n" * 500_000
    with pytest.raises(SlurmCommandError, match="not in"):
        commands.begin(("no-such-command",), timeout_s=5)()
