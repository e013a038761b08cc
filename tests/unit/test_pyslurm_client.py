"""The client on pyslurm against recorded answers of pyslurm 25.11.2, and the guard before it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from captures import answer, names
from fake_pyslurm import FakePyslurm
from test_slurm_parse import jobs_of, rows_of

from slurm_synergy.errors import ConfigError, SlurmCommandError, SlurmParseError
from slurm_synergy.slurm import pyslurm_client
from slurm_synergy.slurm.commands import CommandResult, classify
from slurm_synergy.slurm.facts import GpuForm, JobFacts
from slurm_synergy.slurm.pyslurm_client import PyslurmClient, import_pyslurm
from slurm_synergy.slurm.pyslurm_facts import job_facts

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
        elif "show" in argv:
            out = answer(VERSION, "scontrol_d_show_job_o").stdout
        elif argv[1] == "--version":
            out = "slurm 25.11.2\n"
        return CommandResult(argv=tuple(argv), rc=0, stdout=out, stderr="")


@pytest.fixture
def text_jobs() -> dict[int, JobFacts]:
    return jobs_of(VERSION)


def test_the_queue_is_that_of_the_command_line(text_jobs: dict[int, JobFacts]) -> None:
    commands = Commands()
    client = PyslurmClient(commands, FakePyslurm(text_jobs))
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
    # One command for all jobs whose GPUs pyslurm does not show; none for each.
    assert [argv[0] for argv in commands.asked] == ["squeue"]
    assert client.budget().calls == {"pyslurm jobs": 1, "queue": 1}


def test_gpus_that_pyslurm_hides_come_from_the_command_line(text_jobs: dict[int, JobFacts]) -> None:
    module = FakePyslurm(text_jobs)
    hidden = job_facts(module.jobs[28])
    assert (hidden.gpu_form, hidden.gpus_asked) == (GpuForm.NONE, {})
    client = PyslurmClient(Commands(), module)
    job = client.read_job(28)
    assert (job.gpu_form, job.gpus_asked) == (GpuForm.PER_JOB, {"": 4})
    assert client.read_job(12).gpu_form is GpuForm.PER_TASK


def test_only_jobs_of_the_partition_are_read(text_jobs: dict[int, JobFacts]) -> None:
    client = PyslurmClient(Commands(), FakePyslurm(text_jobs))
    wanted = {job_id for job_id, job in text_jobs.items() if job.partition == "synergy"}
    assert {job.job_id for job in client.read_queue("synergy")} == wanted


def test_a_set_of_cpus_too_long_for_pyslurm_is_read_by_command(
    text_jobs: dict[int, JobFacts],
) -> None:
    module, commands = FakePyslurm(text_jobs), Commands()
    layout = module.jobs[7].get_resource_layout_per_node()
    layout["v100-1"]["cpu_ids"] = ",".join(str(n) for n in range(0, 100, 2))
    job = PyslurmClient(commands, module).read_job(7)
    assert job == text_jobs[7]
    assert ("scontrol", "-a", "-d", "-o", "show", "job", "7") in commands.asked


def test_changes_go_through_pyslurm_and_unknown_jobs_are_told(
    text_jobs: dict[int, JobFacts],
) -> None:
    module = FakePyslurm(text_jobs)
    client = PyslurmClient(Commands(), module)
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
    client = PyslurmClient(Commands(), module, sleep=slept.append)
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
        PyslurmClient(Commands(), module).read_queue()


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
    assert PyslurmClient.read_nodes is pyslurm_client.CliSlurmClient.read_nodes


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
        import_pyslurm(Commands(), None)


def test_another_release_is_refused_before_anything_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "imported"
    fake_package(tmp_path, monkeypatch, f"open({str(marker)!r}, 'w')", "24.5.1")
    with pytest.raises(ConfigError) as caught:
        import_pyslurm(Commands(), None)
    assert "24.5.1 was built for Slurm 24.05, and Slurm 25.11.2 is here" in str(caught.value)
    assert not marker.exists()


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
        import_pyslurm(Commands(), None, timeout_s=1.5)
    assert "built for Slurm 25.11" in str(caught.value)


def test_a_release_that_suits_is_imported_with_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_package(
        tmp_path, monkeypatch, "import os; __version__ = os.environ['SLURM_CONF']", VERSION
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SLURM_CONF", "")
    conf = tmp_path / "slurm.conf"
    conf.touch(stat.S_IRUSR)
    assert import_pyslurm(Commands(), str(conf)).__version__ == str(conf)
    monkeypatch.delitem(__import__("sys").modules, "pyslurm")
