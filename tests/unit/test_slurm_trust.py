"""What the client believes: answers that are not whole, not plausible, or not known to us."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from captures import answer
from fake_slurm import FakeSlurm
from test_loop import World
from test_slurm_parse import rows_of

from slurm_synergy.config import Settings
from slurm_synergy.controller.loop import Loop, Parts
from slurm_synergy.core.model import JobPhase
from slurm_synergy.errors import ClusterError, SlurmCommandError, SlurmParseError
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.slurm.cli_client import CliSlurmClient
from slurm_synergy.slurm.commands import CommandResult
from slurm_synergy.slurm.facts import Hold, JobFacts, JobShape, JobState
from slurm_synergy.slurm.reshaping import MIXED, PUT_BACK, reshape_jobs
from slurm_synergy.slurm.states import hold_of, state_of

VERSION = "24.11.5"


class Slurm:
    """squeue and scontrol from the captures of one release, with rows and records to leave out."""

    def __init__(self) -> None:
        self.rows = rows_of(VERSION)
        self.records = answer(VERSION, "scontrol_d_show_job_o").stdout
        self.squeue_stderr = ""
        self.asked: list[tuple[str, ...]] = []
        self.lost_once: list[dict[str, object]] = []

    def run(self, argv: Sequence[str], *, timeout_s: float, stdin: str = "") -> CommandResult:
        self.asked.append(tuple(argv))
        out, err = "", ""
        if "--json" in argv:
            out = answer(VERSION, "squeue_json").stdout
        elif argv[0] == "squeue":
            fields = [field.partition(":") for field in argv[-1].split(",")]
            rows = [row for row in self.rows if row not in self.lost_once]
            self.lost_once = []
            out = "".join(
                "".join(f"{row[name] or '(null)'}{mark}" for name, _, mark in fields) + "\n"
                for row in rows
            )
            err = self.squeue_stderr
        elif "node" in argv:
            out = answer(VERSION, "scontrol_d_show_node_o").stdout
        elif "job" in argv:
            out = self.records
        return CommandResult(argv=tuple(argv), rc=0, stdout=out, stderr=err)

    def names_asked(self) -> list[str]:
        return [argv[0] for argv in self.asked]


def test_a_squeue_answer_that_lost_jobs_is_asked_for_again() -> None:
    slurm = Slurm()
    slurm.lost_once = slurm.rows[:30]
    assert len(CliSlurmClient(slurm).read_queue()) == len(slurm.rows)
    assert slurm.names_asked() == ["squeue", "scontrol", "squeue"]


def test_a_squeue_without_jobs_beside_a_scontrol_with_many_is_no_empty_queue() -> None:
    slurm = Slurm()
    slurm.rows = []
    with pytest.raises(SlurmParseError, match="squeue names no job, but scontrol shows some"):
        CliSlurmClient(slurm).read_queue()


def test_a_scontrol_without_most_jobs_is_an_error_and_not_a_thousand_questions() -> None:
    slurm = Slurm()
    slurm.records = "".join(slurm.records.splitlines(keepends=True)[:3])
    with pytest.raises(SlurmParseError, match=r"no record of \d+ jobs that squeue names"):
        CliSlurmClient(slurm).read_queue()
    assert len(slurm.asked) < 5


def test_a_field_that_squeue_does_not_know_any_more_is_an_error_and_not_an_empty_text() -> None:
    slurm = Slurm()
    slurm.squeue_stderr = answer(VERSION, "err_squeue_bad_O").stderr
    with pytest.raises(SlurmParseError, match="does not know a field any more"):
        CliSlurmClient(slurm).read_queue()


def test_a_job_whose_record_text_hides_is_read_from_json() -> None:
    slurm = Slurm()
    whole = CliSlurmClient(slurm).read_job(7)
    # A next release that puts another key between the name and the owner.
    slurm.records = slurm.records.replace(
        "JobName=resnet50-imagenet UserId=", "JobName=resnet50-imagenet New Key=1 UserId="
    )
    job = CliSlurmClient(slurm).read_job(7)
    assert (job.state, job.gpus_asked, job.allocation) == (
        JobState.RUNNING,
        whole.gpus_asked,
        whole.allocation,
    )
    assert slurm.asked[-1][-1] == "--json"


@pytest.mark.parametrize(
    ("words", "state", "flags"),
    [
        (["PENDING"], JobState.PENDING, set()),
        (["RUNNING", "CONFIGURING"], JobState.RUNNING, {"CONFIGURING"}),
        (["CONFIGURING"], JobState.RUNNING, {"CONFIGURING"}),
        (["CANCELLED", "COMPLETING"], JobState.COMPLETING, {"CANCELLED"}),
        (["PENDING", "COMPLETING"], JobState.COMPLETING, set()),
        (["PENDING", "SPECIAL_EXIT"], JobState.SPECIAL_EXIT, set()),
        (["SPECIAL_EXIT"], JobState.SPECIAL_EXIT, set()),
        (["STOPPED"], JobState.RUNNING, {"STOPPED"}),
        (["REQUEUED"], JobState.COMPLETING, {"REQUEUED"}),
        (["RESV_DEL_HOLD"], JobState.PENDING, {"RESV_DEL_HOLD"}),
        (["EXPEDITING"], JobState.UNKNOWN, {"EXPEDITING"}),
        (["RUNNING", "EXPEDITING"], JobState.RUNNING, {"EXPEDITING"}),
        ([], JobState.UNKNOWN, set()),
    ],
)
def test_words_of_a_state(words: list[str], state: JobState, flags: set[str]) -> None:
    assert state_of(words) == (state, frozenset(flags))


def test_a_hold_is_told_by_priority_and_reason() -> None:
    assert hold_of(5, "JobHeldAdmin") is Hold.NONE
    assert hold_of(0, "JobHeldUser,JobHeldAdmin") is Hold.ADMIN
    assert hold_of(0, "job_requeued_in_held_state") is Hold.USER


def test_a_job_in_an_unknown_state_is_neither_requeued_nor_reshaped() -> None:
    slurm = Slurm()
    for line in slurm.records.splitlines():
        if line.startswith("JobId=7 "):
            slurm.records = slurm.records.replace(
                line, line.replace("JobState=RUNNING", "JobState=EXPEDITING")
            )
    client = CliSlurmClient(slurm)
    assert client.read_job(7).state is JobState.UNKNOWN
    for change in (client.requeue_hold, client.release, client.set_start_now):
        with pytest.raises(SlurmCommandError, match=r"a state unknown here \(EXPEDITING\)"):
            change(7)
    assert all("show" in argv or argv[0] == "squeue" for argv in slurm.asked)


def test_a_job_in_an_unknown_state_keeps_what_it_holds_and_is_left_alone(tmp_path: Path) -> None:
    world = World(tmp_path)
    job_id = world.slurm.submit()
    world.turn(), world.turn(1.0)
    world.slurm.schedule()
    world.turn()
    assert world.slurm.jobs[job_id].state is JobState.RUNNING
    world.slurm.change(job_id, state=JobState.UNKNOWN, flags=frozenset({"EXPEDITING"}))
    world.slurm.submit(gpus=8)
    world.slurm.submit(gpus=8)
    world.slurm.calls.clear()
    observation = world.cluster.tick()
    (seen,) = [one for one in observation.jobs if one.job.job_id == job_id]
    assert seen.phase is JobPhase.ENDING and seen.allocated
    assert seen.blocked and seen.blocked.text == "is in a state unknown here (EXPEDITING)"
    for _ in range(3):
        world.turn(300.0)
    assert world.slurm.jobs[job_id].state is JobState.UNKNOWN
    assert world.ledger.read()[job_id].lease is not None
    world.ledger.close()


# Several jobs at once


def shape(node: str) -> JobShape:
    return JobShape(
        nodes=(node,),
        gpus_per_node=4,
        gpu_type="v100",
        cpus_per_node=8,
        cpus_per_task=8,
        mem_mib_per_node=1000,
    )


@pytest.mark.parametrize(("stuck", "note"), [(False, PUT_BACK), (True, MIXED)])
def test_a_mixture_that_slurm_left_is_put_back_or_told(stuck: bool, note: str) -> None:
    slurm = FakeSlurm()
    jobs = [slurm.submit(), slurm.submit()]
    sent: list[tuple[int, tuple[str, ...]]] = []

    class Client:
        def read_each(self, ids: object) -> dict[int, JobFacts | ClusterError]:
            return {job_id: slurm.jobs[job_id] for job_id in list(ids)}  # type: ignore[call-overload]

        def read_nodes(self) -> object:
            return slurm.read_nodes()

        def read_config(self) -> object:
            raise AssertionError("no type is changed")

        def update_each(self, fields: dict[int, Sequence[str]]) -> dict[int, ClusterError]:
            errors: dict[int, ClusterError] = {}
            for job_id, words in fields.items():
                sent.append((job_id, tuple(words)))
                if "NumCPUs=8" in words and job_id == jobs[0]:
                    slurm.change(job_id, num_cpus=8, cpus_per_task=8)
                    errors[job_id] = SlurmCommandError(("scontrol",), 1, "no", kind="invalid")
                elif "NumCPUs=8" in words:
                    slurm.reshape(job_id, shape("v100-2"))
                    slurm.change(job_id, num_cpus=8)
                elif not stuck and "NumCPUs=1" in words:
                    slurm.change(job_id, num_cpus=1, cpus_per_task=1)
            return errors

    before = replace(slurm.jobs[jobs[0]])
    results = reshape_jobs(
        Client(),  # type: ignore[arg-type]
        {jobs[0]: shape("v100-1"), jobs[1]: shape("v100-2")},
    )
    error = results[jobs[0]]
    assert isinstance(error, SlurmCommandError) and error.kind == "invalid"
    assert str(error).endswith(f"no ({note})")
    assert isinstance(results[jobs[1]], JobFacts)
    assert (slurm.jobs[jobs[0]] == before) is (not stuck)
    assert (jobs[0], ("ReqNodeList=",)) in sent


def test_a_round_holds_and_reshapes_its_starts_together(tmp_path: Path) -> None:
    world = World(tmp_path)
    jobs = [world.slurm.submit(gpus=4) for _ in range(4)]
    world.slurm.calls.clear()
    world.turn()
    together = [call for call in world.slurm.calls if call in ("reshape", "release")]
    assert together == ["reshape"] * 4 + ["release"] * 4
    world.slurm.schedule()
    assert all(world.slurm.jobs[job_id].state is JobState.RUNNING for job_id in jobs)
    world.ledger.close()


def test_a_start_that_could_not_be_prepared_fails_alone(tmp_path: Path) -> None:
    world = World(tmp_path)
    jobs = [world.slurm.submit(gpus=4) for _ in range(3)]
    reshape = world.slurm.reshape

    def refuse(job_id: int, wanted: JobShape) -> JobFacts:
        if job_id == jobs[1]:
            raise SlurmCommandError(("scontrol",), 1, "no", kind="invalid")
        return reshape(job_id, wanted)

    world.slurm.reshape = refuse  # type: ignore[method-assign]
    world.turn()
    assert world.slurm.calls.count("release") == 2 and world.loop.last is not None
    failed = [outcome for outcome in world.loop.last.outcomes if not outcome.done]
    assert [outcome.action.job_id for outcome in failed] == [jobs[1]]
    assert world.slurm.jobs[jobs[1]].held is not Hold.NONE
    world.ledger.close()


# The pace of the loop


class Slow:
    def __init__(self) -> None:
        self.factor = 1.0

    def stretch(self, pause_s: float) -> float:
        return pause_s * self.factor


def test_a_busy_slurmctld_is_not_read_before_its_pause_is_over_even_when_woken(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    pace = Slow()
    settings = Settings()
    parts = Parts(
        cluster=world.cluster,
        policy=POLICIES["fifo"],
        mechanism=MECHANISMS["proportional"],
        scheduling=settings.scheduling,
        pace=pace,
    )
    world.loop = Loop(parts, world.ledger, world.clock, world.view, threading.Event())
    reads = []
    read_queue = world.slurm.read_queue
    world.slurm.read_queue = lambda p=None: reads.append(1) or read_queue(p)  # type: ignore[method-assign,func-returns-value]
    assert world.turn() == 2.0
    reads.clear()
    pace.factor = 8.0
    assert world.turn() == 16.0 and len(reads) == 1
    # Woken after 3 s: not read, and told how long is left.
    assert world.turn(3.0) == 13.0 and len(reads) == 1
    pace.factor = 1.0
    assert world.turn(13.0) == 2.0 and len(reads) == 2
    # A clock that is set back does not make the pause longer.
    pace.factor = 8.0
    world.turn()
    world.clock.advance(-3600.0)
    world.loop.turn()
    assert len(reads) == 4
    world.ledger.close()


def test_status_tells_why_slurm_is_read_rarely(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.view.status()["slow"] is None
    world.view.slow_because = lambda: "slurmctld is busy (250 threads serve RPCs)"
    assert world.view.status()["slow"] == "slurmctld is busy (250 threads serve RPCs)"
    world.ledger.close()
