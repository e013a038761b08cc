"""The client on pyslurm against recorded answers of pyslurm 25.11.2, and the guard before it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from captures import answer, names
from fake_pyslurm import FakePyslurm, InThisProcess
from test_slurm_parse import jobs_of, rows_of

from slurm_synergy.errors import ConfigError, SlurmCommandError, SlurmParseError, SlurmTimeout
from slurm_synergy.slurm.commands import CommandResult, classify
from slurm_synergy.slurm.facts import GpuForm, JobFacts
from slurm_synergy.slurm.pyslurm_client import PyslurmClient, open_pyslurm
from slurm_synergy.slurm.pyslurm_process import PyslurmProcess

VERSION = "25.11.2"
# Other words for the same: dependencies and features are put together again, a job without a time
# limit has an end, 25.11 gives the command without its arguments in both.
LOOSE = {"end_s", "start_s", "dependency"}


class Commands:
    """squeue and scontrol of the same cluster, from its captures."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    def run(self, argv: Sequence[str], *, timeout_s: float, stdin: str = "") -> CommandResult:
        self.asked.append(tuple(argv))
        out = ""
        if argv[0] == "squeue":
            fields = [field.partition(":") for field in argv[-1].split(",")]
            out = "".join(
                "".join(f"{row[name] or '(null)'}{mark}" for name, _, mark in fields) + "\n"
                for row in rows_of(VERSION)
            )
        elif argv[1] == "ping":
            out = answer(VERSION, "scontrol_ping").stdout
        elif argv[-1] == "node":
            out = answer(VERSION, "scontrol_d_show_node_o").stdout
        elif "show" in argv:
            out = answer(VERSION, "scontrol_d_show_job_o").stdout
        elif argv[1] == "--version":
            out = "slurm 25.11.2\n"
        return CommandResult(argv=tuple(argv), rc=0, stdout=out, stderr="")


def client_on(module: FakePyslurm, commands: Commands | None = None, **given: Any) -> PyslurmClient:
    return PyslurmClient(commands or Commands(), InThisProcess(module), **given)


@pytest.fixture
def text_jobs() -> dict[int, JobFacts]:
    return jobs_of(VERSION)


def test_the_queue_is_that_of_the_command_line(text_jobs: dict[int, JobFacts]) -> None:
    commands = Commands()
    client = client_on(FakePyslurm(text_jobs), commands)
    jobs = {job.job_id: job for job in client.read_queue()}
    assert jobs.keys() == text_jobs.keys()
    for job_id, job in jobs.items():
        for field in dataclasses.fields(job):
            mine, theirs = getattr(job, field.name), getattr(text_jobs[job_id], field.name)
            if field.name in LOOSE or (field.name, job_id) == ("min_mem_node_mib", 36):
                continue
            assert mine == theirs, (job_id, field.name)
        assert (job.dependency is None) == (text_jobs[job_id].dependency is None)
    assert jobs[29].dependency == text_jobs[29].dependency
    # One command for all jobs whose GPUs pyslurm does not show, one for the threads of cores.
    assert client.budget().calls == {"pyslurm jobs": 1, "queue": 1, "nodes": 1}
    client.read_queue()
    assert client.budget().calls == {"pyslurm jobs": 2, "queue": 2, "nodes": 1}


def test_gpus_that_pyslurm_hides_come_from_the_command_line(text_jobs: dict[int, JobFacts]) -> None:
    module = FakePyslurm(text_jobs)
    assert module.jobs[28].gres_per_node == {} and module.jobs[28].tres_per_task.gres == {}
    client = client_on(module)
    job = client.read_job(28)
    assert (job.gpu_form, job.gpus_asked) == (GpuForm.PER_JOB, {"": 4})
    assert client.read_job(12).gpu_form is GpuForm.PER_TASK


def test_only_jobs_of_the_partition_are_read(text_jobs: dict[int, JobFacts]) -> None:
    client = client_on(FakePyslurm(text_jobs))
    wanted = {job_id for job_id, job in text_jobs.items() if job.partition == "synergy"}
    assert {job.job_id for job in client.read_queue("synergy")} == wanted


def test_a_set_of_cpus_too_long_for_pyslurm_is_read_by_command(
    text_jobs: dict[int, JobFacts],
) -> None:
    module, commands = FakePyslurm(text_jobs), Commands()
    layout = module.jobs[7].get_resource_layout_per_node()
    layout["v100-1"]["cpu_ids"] = ",".join(str(n) for n in range(0, 100, 2))
    job = client_on(module, commands).read_job(7)
    assert job == text_jobs[7]
    assert ("scontrol", "-a", "-d", "-o", "show", "job", "7") in commands.asked


def test_changes_go_through_pyslurm_and_unknown_jobs_are_told(
    text_jobs: dict[int, JobFacts],
) -> None:
    module = FakePyslurm(text_jobs)
    client = client_on(module)
    client.hold(26)
    client.hold_running(7)
    client.cancel(26)
    client.cancel(999_999)
    assert module.done == [("hold", 26), ("hold", 7), ("cancel", 26), ("cancel", 999_999)]
    for call in (client.read_job, client.hold):
        with pytest.raises(SlurmCommandError) as caught:
            call(999_999)
        assert caught.value.kind == "not_found"


def test_a_controller_that_was_missed_is_asked_again_and_one_that_is_down_is_told(
    text_jobs: dict[int, JobFacts],
) -> None:
    module, slept = FakePyslurm(text_jobs), list[float]()
    client = client_on(module, sleep=slept.append)
    down = json.loads(answer(VERSION, "pyslurm_down_jobs_load").stdout)["msg"]
    module.failing = [down]
    assert len(client.read_queue()) == 47 and slept == [0.5]
    module.failing = [down] * 3
    with pytest.raises(SlurmCommandError) as caught:
        client.read_queue()
    assert caught.value.kind == "controller_down"
    assert client.budget().failed == {"pyslurm jobs": 4}


def test_a_job_without_what_pyslurm_showed_is_an_error_and_not_a_guess(
    text_jobs: dict[int, JobFacts],
) -> None:
    module = FakePyslurm(text_jobs)
    del module.jobs[26].priority
    with pytest.raises(SlurmParseError, match="priority"):
        client_on(module).read_queue()


CONTROLLER_DOWN = r"(down|hang|nomunge)_\w+"
KINDS = {
    "err_cancel_nonowner": "permission",
    "err_hold_invalid": "not_found",
    "err_job_invalid": "not_found",
    "err_node_modify_user": "permission",
    "err_release_adminheld": "permission",
    "err_release_nonowner": "permission",
    "err_requeue_pending": "pending",
    "err_reservation_create_user": "permission",
    "err_reservation_delete_in_use": "in_use",
    "err_submit_bad_partition": "not_found",
    "err_update_invalid": "not_found",
    "err_update_running": "not_pending",
}
RAISED = [
    name
    for name in names(VERSION)
    if name.startswith("pyslurm_")
    and '"raised": true' in answer(VERSION, name).stdout
    and "RPCError" in answer(VERSION, name).stdout
]


@pytest.mark.parametrize("name", RAISED)
def test_every_recorded_error_has_the_kind_that_a_command_has(name: str) -> None:
    told = json.loads(answer(VERSION, name).stdout)
    case = name.removeprefix("pyslurm_")
    if case.split("_")[0] in ("down", "hang", "nomunge"):
        assert classify(told["str"]) == "controller_down"
    elif told["errno"] == -1:
        # pyslurm's own texts for what it looked up in vain; we read those by command.
        assert "exist" in told["str"]
    else:
        assert classify(told["str"]) == KINDS[case]


def test_every_capture_of_pyslurm_is_accounted_for() -> None:
    told = {name for name in names(VERSION) if name.startswith("pyslurm_")}
    read = {"pyslurm_jobs", *RAISED}
    # By command: nodes (no GPUs in use there), partitions, reservations, ping, load, config.
    by_command = {f"pyslurm_{n}" for n in ("nodes", "partitions", "reservations", "ping")}
    by_command |= {"pyslurm_diag", "pyslurm_config", "pyslurm_dir", "pyslurm_job_plain"}
    single = {name for name in told if name.startswith(("pyslurm_ok_", "pyslurm_err_"))}
    assert told == read | by_command | single


def test_nodes_show_no_gpus_in_use_in_pyslurm_so_they_are_read_by_command() -> None:
    nodes = json.loads(answer(VERSION, "pyslurm_nodes").stdout)
    assert {name: node["allocated_gres"] for name, node in nodes.items()} == {n: {} for n in nodes}
    client = client_on(FakePyslurm({}))
    assert {node.name for node in client.read_nodes()} == nodes.keys()
    assert client.budget().calls == {"nodes": 1}


# The guard


def fake_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, version: str) -> None:
    package = tmp_path / "pyslurm"
    package.mkdir()
    (package / "__init__.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)


def test_without_pyslurm_the_error_names_the_extra() -> None:
    try:
        importlib.metadata.version("pyslurm")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        pytest.skip("pyslurm is installed here")
    with pytest.raises(ConfigError, match=r"slurm\.client = 'pyslurm': pyslurm is not installed"):
        open_pyslurm(Commands(), None)


def test_another_release_is_refused_before_anything_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "imported"
    fake_package(tmp_path, monkeypatch, f"open({str(marker)!r}, 'w')", "24.5.1")
    with pytest.raises(ConfigError) as caught:
        open_pyslurm(Commands(), None)
    assert "24.5.1 was built for Slurm 24.05, and Slurm 25.11.2 is here" in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize("version", ["25.11+site", "25.11.2+site.3", "25.11rc1"])
def test_a_pyslurm_that_a_site_built_is_taken_for_the_release_in_front(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_package(tmp_path, monkeypatch, "__version__ = '?'; RPCError = OSError", version)
    open_pyslurm(Commands(), None).close()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"24.5{version[5:]}")
    with pytest.raises(ConfigError, match=r"built for Slurm 24\.05, and Slurm 25\.11\.2 is here"):
        open_pyslurm(Commands(), None)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.write(2, b'fatal: no config\\n'); os._exit(1)", "fails: fatal: no config"),
        ("import time; time.sleep(60)", r"more than 1\.5 s"),
    ],
)
def test_an_import_that_would_kill_or_hang_the_process_kills_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    fake_package(tmp_path, monkeypatch, code, VERSION)
    with pytest.raises(ConfigError, match=said) as caught:
        open_pyslurm(Commands(), None, timeout_s=1.5)
    assert "built for Slurm 25.11" in str(caught.value)


def test_a_release_that_suits_is_imported_with_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os; __version__ = os.environ['SLURM_CONF']; print('noise'); RPCError = OSError"
    fake_package(tmp_path, monkeypatch, code, VERSION)
    process = open_pyslurm(Commands(), str(tmp_path / "slurm.conf"))
    assert "pyslurm" not in sys.modules
    assert process.start() == str(tmp_path / "slurm.conf")
    process.close()


# Its process

DYING = r"""
import os, time
__version__ = "25.11.2"
class RPCError(Exception): pass
class Job:
    def __init__(self, job_id): self.job_id = job_id
    def hold(self):
        if self.job_id == 1:
            os.write(2, b"fatal: out of luck\n"); os._exit(1)
        if self.job_id == 2:
            time.sleep(60)
        if self.job_id == 3:
            raise RPCError("Invalid job id specified")
"""


def test_what_ends_or_hangs_in_pyslurm_is_an_error_of_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_package(tmp_path, monkeypatch, DYING, VERSION)
    process = PyslurmProcess()

    def hold(job_id: int, timeout_s: float = 60) -> None:
        process.ask({"do": "hold", "id": job_id}, timeout_s=timeout_s)

    hold(4)
    first = process.pid
    with pytest.raises(SlurmCommandError, match="Invalid job id") as caught:
        hold(3)
    assert caught.value.kind == "not_found" and process.pid == first
    with pytest.raises(SlurmCommandError, match="fatal: out of luck") as caught:
        hold(1)
    assert caught.value.kind == "controller_down" and process.pid is None
    hold(4)
    with pytest.raises(SlurmTimeout):
        hold(2, 0.5)
    hold(4)
    assert process.pid not in (None, first)
    process.close()


# What is told again


def test_a_job_is_told_again_only_when_something_about_it_changed(
    text_jobs: dict[int, JobFacts],
) -> None:
    module = FakePyslurm(text_jobs)
    process = InThisProcess(module)
    client = PyslurmClient(Commands(), process)
    first = {job.job_id: job for job in client.read_queue()}
    whole = process.sent
    module.jobs[26].priority = 17
    del module.jobs[29]
    second = {job.job_id: job for job in client.read_queue()}
    assert process.sent < whole / 10
    assert second.pop(26).priority == 17
    assert second.keys() == first.keys() - {26, 29}
    assert all(job is first[job_id] for job_id, job in second.items())
    # Another process has told nothing yet.
    process.close()
    assert {job.job_id for job in client.read_queue()} == first.keys() - {29}
    # A job that comes back with the old id is a new one.
    module.jobs[29] = module.jobs[26]
    module.jobs[29].id = 29
    assert {job.job_id: job for job in client.read_queue()}[29].priority == 17


class Counted:
    """A job that counts how often each of its values is asked for."""

    def __init__(self, job: Any, asked: Counter[str]) -> None:
        self._job, self._asked = job, asked

    def __getattr__(self, name: str) -> Any:
        self._asked[name] += 1
        return getattr(self._job, name)


def test_values_that_pyslurm_makes_at_each_look_are_asked_for_once(
    text_jobs: dict[int, JobFacts],
) -> None:
    module, asked = FakePyslurm(text_jobs), Counter[str]()
    module.jobs = {job_id: Counted(job, asked) for job_id, job in module.jobs.items()}
    client_on(module).read_queue()
    cheap = {"id", "partition"}
    assert asked["gres_per_node"] == len(text_jobs)
    assert {name for name, count in asked.items() if count > len(text_jobs)} <= cheap


def test_threads_of_cores_are_counted_as_slurm_counts_them(text_jobs: dict[int, JobFacts]) -> None:
    module, commands = FakePyslurm(text_jobs), Commands()
    layout = module.jobs[7].get_resource_layout_per_node()
    (name,) = layout
    layout[name]["cpu_ids"] = "0-1,5"
    client = client_on(module, commands)
    client._threads = {name: 2}
    assert client.read_job(7).allocation[0].cpu_ids == (0, 1, 2, 3, 10, 11)


def test_a_dependency_that_pyslurm_does_not_know_still_is_one(
    text_jobs: dict[int, JobFacts],
) -> None:
    module = FakePyslurm(text_jobs)
    assert module.jobs[29].dependencies
    module.jobs[29].dependencies = {"afterok": [], "singleton": False, "satisfy": "all"}
    assert client_on(module).read_job(29).dependency == "singleton(unfulfilled)"


class NoText:
    """A job one of whose texts is no UTF-8."""

    def __init__(self, job: Any) -> None:
        self._job = job

    def __getattr__(self, name: str) -> Any:
        if name == "comment":
            b"\xff".decode()
        return getattr(self._job, name)


@pytest.mark.parametrize("count", [1, 3])
def test_a_text_that_is_no_text_hides_one_job_and_not_the_queue(
    text_jobs: dict[int, JobFacts], count: int
) -> None:
    module, commands = FakePyslurm(text_jobs), Commands()
    for job_id in (7, 12, 26)[:count]:
        module.jobs[job_id] = NoText(module.jobs[job_id])
    client = client_on(module, commands)
    found = {job.job_id: job for job in client.read_queue()}
    assert found.keys() == text_jobs.keys() and found[7] == text_jobs[7]
    assert client.read_job(7) == text_jobs[7]
