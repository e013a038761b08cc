"""explain, top, replay, check and release-all on a real Slurm."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from accounts import OrdinaryUser
from harness import ControllerProcess, Slurm, controller, slurm
from ran import Ran

from slurm_synergy.config import Settings
from slurm_synergy.devcluster import DevCluster, NodeShape
from slurm_synergy.slurm.checks import slurm_findings
from slurm_synergy.slurm.commands import CommandResult, SlurmCommands
from slurm_synergy.slurm.evidence import NOT_ALLOWED, Evidence, gather
from slurm_synergy.slurm.facts import Hold, JobFacts

__all__ = ["controller", "slurm"]  # fixtures

Factory = Callable[..., ControllerProcess]
REQUEST = (
    *("num_nodes", "num_tasks", "num_cpus", "cpus_per_task", "min_cpus_node", "min_mem_node_mib"),
    *("req_nodes", "reservation", "gpus_asked", "gpu_form", "time_limit_s"),
)


def request_of(facts: JobFacts) -> dict[str, object]:
    return {name: getattr(facts, name) for name in REQUEST}


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    ran = Ran(capsys, *argv, "--json")
    assert ran.status == 0, ran.err
    return json.loads(ran.out)


def test_a_preempted_job_is_explained_replayed_and_given_back(
    controller: Factory,
    slurm: Slurm,
    capsys: pytest.CaptureFixture[str],
    eventually: Callable[..., None],
) -> None:
    daemon = controller(
        scheduling={"policy": "srtf", "mechanism": "tune"}, pool={"nodes": "v100-1"}
    )
    config = ("--config", str(daemon.config))
    hints = "--comment=synergy:profile=resnet18-imagenet,min_mem=20G"
    long = slurm.submit("--gres=gpu:v100:6", "-c3", "--mem=30G", "--time=600", hints)
    as_submitted = request_of(slurm.job(long))
    daemon.start()
    slurm.running(long)
    # A job that will be preempted for nobody, and one that runs without the wrapper.
    bare = slurm.submit("--gres=gpu:2", "--time=500", wrapped=False)
    slurm.running(bare)

    short = slurm.submit("--gres=gpu:v100:4", "--time=30", hints)
    slurm.running(short, timeout_s=40)
    slurm.wait(long, lambda facts: facts.pending and facts.held is Hold.ADMIN)
    eventually(lambda: _waits(capsys, config, long), what="a round after the preemption")
    found = answer(capsys, "explain", str(long), *config)
    assert found["source"] == "controller"
    assert found["explanation"]["binding"] == "gpus"
    assert found["explanation"]["reason"]["code"] == "no_gpus"
    *_, ends = found["explanation"]["changes"]
    assert ends.startswith(f"it fits when job {short} has ended, by its time limit in about 30 min")
    runs = answer(capsys, "explain", str(short), *config)["explanation"]
    assert runs["shares"]["v100-1"]["gpus"] == 4
    assert runs["speedup"] > 1.2
    assert "synergy-srun" in Ran(capsys, "explain", str(bare), *config).out
    assert "name one of" not in Ran(capsys, "explain", "999999", *config).err
    assert Ran(capsys, "explain", "999999", *config).status == 1
    picture = Ran(capsys, "top", "--once", *config).out
    assert " ".join([str(bare)] * 2 + [str(short)] * 4) in picture
    assert "needs 6 GPUs" in picture

    daemon.stop()
    stopped = answer(capsys, "explain", str(long), *config)
    assert stopped["source"] == "journal"
    assert stopped["explanation"]["reason"]["code"] == "no_gpus"
    journal = daemon.home / "state" / "journal.jsonl"
    replayed = Ran(capsys, "replay", str(journal), "--json")
    assert replayed.status == 0, replayed.out
    content = json.loads(replayed.out)
    assert len(content["rounds"]) == len(daemon.journal) >= 3
    assert all(one["actions_compared"] for one in content["rounds"])

    _give_back(slurm, capsys, config, long=long, running=(short, bare), wanted=as_submitted)
    trace = (daemon.home / "state" / "released.jsonl").read_text(encoding="utf-8")
    assert {json.loads(line).get("job_id") for line in trace.splitlines()} == {
        *(None, long, short, bare)
    }


def _waits(capsys: pytest.CaptureFixture[str], config: Sequence[str], job_id: int) -> bool:
    ran = Ran(capsys, "explain", str(job_id), "--json", *config)
    return ran.status == 0 and json.loads(ran.out)["explanation"]["phase"] == "pending"


def _give_back(
    slurm: Slurm,
    capsys: pytest.CaptureFixture[str],
    config: Sequence[str],
    *,
    long: int,
    running: Sequence[int],
    wanted: dict[str, object],
) -> None:
    """release-all, with the controller stopped: shown, done, and done again."""
    held = slurm.job(long)
    before = {job_id: slurm.job(job_id) for job_id in running}
    assert request_of(held) != wanted
    shown = answer(capsys, "release-all", "--dry-run", *config)
    assert {one["job_id"] for one in shown["jobs"]} == {long, *running}
    assert slurm.job(long) == held
    done = answer(capsys, "release-all", "--yes", *config)
    assert done["ok"]
    assert done["reservation_deleted"]
    assert all(one["given"] for one in done["jobs"])
    # An ordinary job: Slurm starts it by itself on other nodes, with what was asked for.
    after = slurm.running(long, timeout_s=30)
    asked = request_of(after) | {"num_nodes": wanted["num_nodes"]}
    assert asked == wanted
    assert after.held is Hold.NONE
    assert {part.mem_mib for part in after.allocation} == {30 * 1024}
    for job_id, facts in before.items():
        now = slurm.job(job_id)
        assert now.running
        assert (now.start_s, now.restarts, now.allocation) == (
            facts.start_s,
            facts.restarts,
            facts.allocation,
        )
        assert (now.held, now.reservation) == (Hold.NONE, None)
    assert not slurm.client.read_reservations()
    again = answer(capsys, "release-all", "--yes", *config)
    assert (again["jobs"], again["reservation_deleted"]) == ([], False)


def test_release_all_is_refused_while_the_controller_runs(
    controller: Factory, slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = controller(pool={"nodes": "v100-2"})
    daemon.start()
    ran = Ran(capsys, "release-all", "--yes", "--config", str(daemon.config))
    assert ran.status == 1
    assert "a controller uses" in ran.err
    assert "stop it first" in ran.err


# check ---------------------------------------------------------------------------------------


def graded(found: Any) -> dict[str, str]:
    return {one["check"]: one["grade"] for one in found["findings"]}


def test_the_embedded_cluster_is_in_good_shape_with_and_without_a_controller(
    controller: Factory, slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon = controller(pool={"nodes": "v100-3"})
    config = ("--config", str(daemon.config))
    without = answer(capsys, "check", *config)
    assert without["ok"]
    grades = graded(without)
    assert {"version", "clock", "select", "munge", "job_submit", "rights", "gres"} <= {
        check for check, grade in grades.items() if grade == "ok"
    }
    # No cgroups hold processes here, and only this machine reaches 127.0.0.1.
    warned = {check for check, grade in grades.items() if grade == "warn"}
    assert warned <= {"proctrack", "names", "task_plugin", "nodes", "disk"}
    assert {"proctrack", "names"} <= warned
    daemon.start()
    endpoint = next(
        one for one in answer(capsys, "check", *config)["findings"] if one["check"] == "endpoint"
    )
    assert endpoint["grade"] == "ok"
    assert daemon.endpoint in endpoint["seen"]


@pytest.fixture
def broken(fresh_cluster: Callable[..., DevCluster]) -> DevCluster:
    """A small cluster with much that does not suit us."""
    shape = NodeShape(nodes="n1", gpus=2, cores=2, mem_mib=1000, gpu_type="v100")
    return fresh_cluster(
        nodes=[shape],
        real_node=False,
        extra_conf=(
            "JobRequeue=0",
            "JobFileAppend=0",
            "RequeueExitHold=85",
            "PrivateData=jobs",
            "MaxJobCount=6",
            "MinJobAge=5",
            "SelectTypeParameters=CR_Core",
            "PartitionName=plain Nodes=ALL State=DOWN OverSubscribe=NO DefMemPerCPU=100",
        ),
    )


def test_what_does_not_suit_us_is_found_with_its_remedy(
    broken: DevCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken.run(
        [
            *("scontrol", "create", "reservation", "reservationname=theirs", "starttime=now"),
            *("duration=infinite", "users=root", "nodes=n1", "flags=ignore_jobs"),
        ]
    )
    for _ in range(5):
        broken.run(["sbatch", "-p", "plain", "--wrap=true", f"--output={tmp_path}/out"])
    settings = {
        "mode": "act",
        "slurm": {"conf": str(broken.conf_path), "partition": "plain"},
        "leases": {"listen": "127.0.0.1:0", "munge": {"socket": str(tmp_path / "no-munge")}},
        "state_dir": str(tmp_path / "state"),
        "enforcement": "shared",
    }
    file = tmp_path / "synergy.yaml"
    file.write_text(yaml.safe_dump(settings))
    ran = Ran(capsys, "check", "--json", "--config", str(file))
    assert ran.status == 1
    content = json.loads(ran.out)
    assert not content["ok"]
    grades = graded(content)
    fails = {
        *("select", "partition", "oversubscribe", "job_submit", "reservations", "munge"),
        "lua_site",
    }
    warns = {
        *("requeue", "requeue_exit", "append", "privacy", "job_count", "job_age", "task_plugin"),
    }
    assert fails <= {check for check, grade in grades.items() if grade == "fail"}
    assert warns <= {check for check, grade in grades.items() if grade == "warn"}
    for one in content["findings"]:
        assert one["grade"] == "ok" or (one["means"] and one["remedy"])
    people = Ran(capsys, "check", "--config", str(file))
    assert people.status == 1
    assert "remedy: set SelectTypeParameters=CR_Core_Memory" in people.out
    broken.slurmctld_stop()
    settings["slurm"] |= {"command_timeout_s": 2.0}  # type: ignore[operator]
    file.write_text(yaml.safe_dump(settings))
    down = graded(json.loads(Ran(capsys, "check", "--json", "--config", str(file)).out))
    assert down["controller"] == "fail"
    assert "select" not in down
    assert down["munge"] == "fail"


@dataclass(frozen=True, slots=True)
class _As:
    """Runs commands as an ordinary user."""

    user: OrdinaryUser
    cluster: DevCluster

    def run(self, argv: Sequence[str], *, timeout_s: float, stdin: str = "") -> CommandResult:
        done = self.user.run(self.cluster, argv, check=False)
        return CommandResult(
            argv=tuple(argv), rc=done.returncode, stdout=done.stdout, stderr=done.stderr
        )


def _evidence(runner: Any) -> Evidence:
    return gather(runner, partition="synergy", timeout_s=30.0, now_s=time.time)


def test_an_ordinary_users_lack_of_rights_is_found_and_nothing_is_changed(
    cluster: DevCluster, as_user: OrdinaryUser
) -> None:
    theirs = _evidence(_As(as_user, cluster))
    assert (theirs.problems, theirs.rights) == ((), NOT_ALLOWED)
    (found,) = (
        one
        for one in slurm_findings(theirs, Settings.model_validate({"mode": "act"}))
        if one.check == "rights"
    )
    assert found.grade.value == "fail"
    ours = _evidence(SlurmCommands(slurm_conf=str(cluster.conf_path)))
    assert ours.rights == ""
    assert ours.refusals is not None
    assert all("slurm-synergy:" in (text or "") for text in ours.refusals)
    # The probes leave nothing behind: no job was submitted, no reservation made.
    assert _evidence(SlurmCommands(slurm_conf=str(cluster.conf_path))).job_count == ours.job_count
