"""Admission on a real slurmctld: what is held, refused, vetoed, and left alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jobside.fake_controller import until

from slurm_synergy.devcluster import DevCluster, NodeShape

if TYPE_CHECKING:
    from accounts import OrdinaryUser

ONE_NODE = (NodeShape(nodes="n1", gpus=4, cores=8, mem_mib=64_000, gpu_type="v100"),)
SCRIPT = "#!/bin/bash\nsynergy-srun -n1 python train.py\n"


class Submitter:
    """Submits as one ordinary user and remembers what to cancel."""

    def __init__(self, cluster: DevCluster, user: OrdinaryUser) -> None:
        self.cluster, self.user = cluster, user
        self.jobs: list[str] = []

    def run(self, *argv: str, **given: object) -> subprocess.CompletedProcess[str]:
        return self.user.run(self.cluster, argv, check=False, **given)

    def sbatch(self, *options: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
        done = self.run("sbatch", "--parsable", "-o", "/dev/null", *options, input=script)
        if done.returncode == 0:
            self.jobs.append(done.stdout.strip())
        return done

    def job(self, *options: str, script: str = SCRIPT) -> str:
        done = self.sbatch(*options, script=script)
        assert done.returncode == 0, done.stderr
        return self.jobs[-1]

    def fields(self, job: str) -> dict[str, str]:
        shown = self.cluster.run(["scontrol", "show", "job", "-o", job]).stdout
        return dict(item.split("=", 1) for item in shown.split() if "=" in item)


@pytest.fixture
def owner(cluster: DevCluster, as_user: OrdinaryUser) -> Iterator[Submitter]:
    submitter = Submitter(cluster, as_user)
    yield submitter
    if submitter.jobs:
        cluster.run(["scancel", *submitter.jobs])


MANAGED = ("-p", "synergy", "--gres=gpu:v100:2")


def test_a_managed_job_is_held_marked_and_requeueable(owner: Submitter) -> None:
    job = owner.job(
        *MANAGED, "-N2", "--ntasks-per-node=1", "-c3", "--mem=4G", "--no-requeue",
        "--comment=mine synergy:profile=resnet18-imagenet,max_gpus=8",
    )  # fmt: skip
    fields = owner.fields(job)
    assert fields["JobState"] == "PENDING"
    assert fields["Priority"] == "0"
    assert fields["Reason"] == "JobHeldUser"
    assert fields["Requeue"] == "1"
    assert fields["AdminComment"] == (
        "synergy:v=1,wrapper=yes,gpn=2,type=v100,nodes=2,tpn=1,cpt=3,mem=4096,limit=0"
    )
    assert fields["NumNodes"] == "2-2"


def test_a_job_without_the_wrapper_is_admitted_and_says_so(owner: Submitter) -> None:
    job = owner.job(*MANAGED, script="#!/bin/bash\n# no synergy-srun here\nsrun python t.py\n")
    assert "wrapper=no" in owner.fields(job)["AdminComment"]
    assert owner.fields(job)["Priority"] == "0"


def test_a_job_without_environment_is_admitted(owner: Submitter) -> None:
    job = owner.job(*MANAGED, "--export=NONE")
    assert owner.fields(job)["Priority"] == "0"


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("-p", "synergy"), "must ask for GPUs; use --gres=gpu:N"),
        (("-p", "synergy", "--gres=gpu:9"), "at most 8 per node"),
        (("-p", "synergy", "--gres=gpu:t4:1"), "known types: v100, a100"),
        (("-p", "synergy", "--gres=gpu:a100:8", "-N3"), "at most 2 nodes"),
        (("-p", "synergy,main", "--gres=gpu:1"), "name one: -p synergy"),
        ((*MANAGED, "--comment=synergy:gpus=4"), "known hints: batch, ckpt_dir,"),
        ((*MANAGED, "--comment=synergy:min_mem=lots"), "write min_mem=20G"),
        ((*MANAGED, "--comment=Synergy:max_gpus=4"), "write synergy:max_gpus=4"),
        ((*MANAGED, "--comment=synergy:max_gpus=4, min_mem=2G"), "without spaces"),
        ((*MANAGED, "--hold"), "submit without --hold, or use --begin=TIME"),
        ((*MANAGED, "--mem=900G"), "ask for at most 500000M"),
        ((*MANAGED, "--mem-per-cpu=100G", "-c6"), "600G of memory per node"),
        ((*MANAGED, "--comment=synergy:min_mem=900G"), "ask for at most 500000M"),
        ((*MANAGED, "-c999"), "ask for at most 24"),
        (("-p", "synergy", "--gres=gpu:1", "-n2", "-N1"), "1 GPU per node; use --ntasks-per"),
        ((*MANAGED, "--array=0-3", "--mem=900G"), "ask for at most 500000M"),
    ],
)
def test_what_cannot_be_planned_is_refused_at_sbatch_with_the_remedy(
    owner: Submitter, options: tuple[str, ...], what: str
) -> None:
    done = owner.sbatch(*options)
    assert done.returncode != 0
    assert what in done.stderr
    assert "slurm-synergy: " in done.stderr


def test_interactive_jobs_are_refused_in_the_managed_partition(owner: Submitter) -> None:
    done = owner.run("srun", *MANAGED, "true", timeout_s=30.0)
    assert done.returncode != 0
    assert "use sbatch" in done.stderr


def test_heterogeneous_jobs_are_refused(owner: Submitter) -> None:
    done = owner.sbatch(*MANAGED, ":", *MANAGED)
    assert done.returncode != 0
    assert "heterogeneous" in done.stderr


CHANGES = [
    ("NumCPUs=4",), ("NumCPUs=4", "CPUsPerTask=4", "MinCPUsNode=4"), ("MinMemoryNode=9000",),
    ("MinMemoryCPU=9000",), ("NumNodes=2-2",), ("NumTasks=2",), ("TresPerNode=gres:gpu:v100:1",),
    ("TresPerJob=gres:gpu:1",), ("Gres=gpu:v100:1",), ("Features=v100",), ("ReqNodeList=v100-1",),
    ("ExcNodeList=v100-1",), ("Partition=main",), ("Priority=1000",), ("Priority=0",),
    ("Priority=4294967295",), ("Nice=5",), ("Requeue=0",),
    ("OverSubscribe=yes",), ("TimeLimit=600",), ("TimeLimit=UNLIMITED",),
    ("AdminComment=mine",), ("Comment=synergy:bogus=1",),
]  # fmt: skip


def test_the_owner_cannot_hold_release_or_reshape_and_nothing_changes(owner: Submitter) -> None:
    job = owner.job(*MANAGED, "--mem=1G", "-c2", "-t", "60")
    before = owner.fields(job)
    for command in ("release", "hold", "uhold"):
        assert owner.run("scontrol", command, job).returncode != 0, command
    for change in CHANGES:
        done = owner.run("scontrol", "update", f"JobId={job}", *change)
        assert done.returncode != 0, change
        after = owner.fields(job)
        assert after == {**before, "LastSchedEval": after["LastSchedEval"]}, change


def test_moving_the_job_away_first_does_not_help(owner: Submitter) -> None:
    job = owner.job(*MANAGED)
    assert owner.run("scontrol", "update", f"JobId={job}", "Partition=main").returncode != 0
    # Even when somebody with the right did it, the mark keeps the job ours. Just after a refused
    # change, 24.11 may call the job busy ("Resource temporarily unavailable", measured).
    moved = ["scontrol", "update", f"JobId={job}", "Partition=main"]
    until(lambda: owner.cluster.run(moved, check=False).returncode == 0, what="moved by root")
    assert owner.run("scontrol", "release", job).returncode != 0
    assert owner.fields(job)["Priority"] == "0"


def test_the_owner_may_cancel_rename_rehint_shorten_and_delay(owner: Submitter) -> None:
    job = owner.job(*MANAGED, "-t", "60", "--begin=now+1hour")
    for change in ("Name=renamed", "Comment=synergy:max_gpus=4", "TimeLimit=30",
                   "StartTime=now+2hours"):  # fmt: skip
        done = owner.run("scontrol", "update", f"JobId={job}", change)
        assert done.returncode == 0, (change, done.stderr)
    fields = owner.fields(job)
    assert (fields["JobName"], fields["TimeLimit"]) == ("renamed", "00:30:00")
    assert fields["Comment"] == "synergy:max_gpus=4"
    assert owner.run("scancel", job).returncode == 0
    assert owner.fields(job)["JobState"] == "CANCELLED"


def test_the_owner_of_an_array_may_change_its_limit_and_no_member(owner: Submitter) -> None:
    array = owner.job(*MANAGED, "--array=0-5%2", "--mem=1G")
    done = owner.run("scontrol", "update", f"JobId={array}", "ArrayTaskThrottle=4")
    assert done.returncode == 0, done.stderr
    assert owner.fields(array)["ArrayTaskThrottle"] == "4"
    for command in (("release", f"{array}_0"), ("update", f"JobId={array}_1", "NumCPUs=3")):
        assert owner.run("scontrol", *command).returncode != 0, command
    shown = owner.cluster.run(["scontrol", "show", "job", "-o", array]).stdout.splitlines()
    assert all(" Priority=0 " in line and " NumCPUs=1 " in line for line in shown)


def test_root_can_reshape_and_release(owner: Submitter, eventually: Callable[..., None]) -> None:
    job = owner.job(*MANAGED, script="#!/bin/bash\nsleep 60 # synergy-srun\n")
    run = owner.cluster.run
    run(["scontrol", "update", f"JobId={job}", "NumCPUs=24", "CPUsPerTask=24", "MinCPUsNode=24",
         "MinMemoryNode=1000", "ReqNodeList=v100-2"])  # fmt: skip
    run(["scontrol", "release", job])
    eventually(lambda: owner.fields(job)["JobState"] == "RUNNING", what="job runs")
    assert owner.fields(job)["NodeList"] == "v100-2"


def test_jobs_of_other_partitions_are_untouched(
    owner: Submitter, eventually: Callable[..., None]
) -> None:
    job = owner.job(
        "-p", "main", "--gpus=1", "--mem=100", "--no-requeue", "--comment=synergy:rubbish",
        script="#!/bin/bash\ntrue\n",
    )  # fmt: skip
    eventually(lambda: owner.fields(job)["JobState"] == "COMPLETED", what="job completed")
    fields = owner.fields(job)
    assert "AdminComment" not in fields
    assert fields["Requeue"] == "0"
    held = owner.job("-H", "--mem=100")
    assert owner.run("scontrol", "update", f"JobId={held}", "Nice=5", "NumCPUs=2").returncode == 0
    done = owner.run("scontrol", "update", f"JobId={held}", "Partition=synergy")
    assert done.returncode != 0
    assert owner.fields(held)["Partition"] == "main"


def test_the_endpoint_of_the_site_reaches_the_job(
    fresh_cluster: Callable[..., DevCluster], tmp_path: Path, eventually: Callable[..., None]
) -> None:
    cluster = fresh_cluster(nodes=ONE_NODE, real_node=False, site={"endpoint": "127.0.0.1:7311"})
    for number, given in enumerate(({}, {"SYNERGY_ENDPOINT": "mine:1"})):
        out = tmp_path / str(number)
        script = "#!/bin/bash\necho $SYNERGY_ENDPOINT\n"
        done = cluster.run(
            ["sbatch", "--parsable", "-p", "synergy", "--gres=gpu:1", "--mem=10", "-o", str(out)],
            input=script, env=given,
        )  # fmt: skip
        cluster.run(["scontrol", "release", done.stdout.strip()])
        wanted = given.get("SYNERGY_ENDPOINT", "127.0.0.1:7311") + "\n"
        eventually(lambda out=out, wanted=wanted: out.exists() and out.read_text() == wanted)


def test_the_hinted_checkpoint_directory_reaches_the_job(
    cluster: DevCluster, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    for number, given in enumerate(({}, {"SYNERGY_CHECKPOINT_DIR": "/mine"})):
        out = tmp_path / str(number)
        done = cluster.run(
            ["sbatch", "--parsable", "-p", "synergy", "--gres=gpu:v100:1", "--mem=10",
             "-o", str(out), "--comment=synergy:ckpt_dir=/scratch/me/run1"],
            input="#!/bin/bash\necho $SYNERGY_CHECKPOINT_DIR\n", env=given,
        )  # fmt: skip
        cluster.run(["scontrol", "release", done.stdout.strip()])
        wanted = given.get("SYNERGY_CHECKPOINT_DIR", "/scratch/me/run1") + "\n"
        eventually(lambda out=out, wanted=wanted: out.exists() and out.read_text() == wanted)


def test_the_owners_requeue_puts_a_running_job_back_into_the_held_queue(
    owner: Submitter, eventually: Callable[..., None]
) -> None:
    run = owner.cluster.run
    for command in ("requeue", "requeuehold"):
        job = owner.job(*MANAGED, "--mem=10", script="#!/bin/bash\nsleep 60 # synergy-srun\n")
        run(["scontrol", "release", job])
        eventually(lambda job=job: owner.fields(job)["JobState"] == "RUNNING", what="job runs")
        # As the controller does with every job that runs.
        run(["scontrol", "hold", job])
        done = owner.run("scontrol", command, job)
        assert done.returncode == 0, done.stderr
        eventually(lambda job=job: owner.fields(job)["JobState"] == "PENDING", what="requeued")
        assert owner.fields(job)["Priority"] == "0"
        assert owner.run("scontrol", "release", job).returncode != 0


def test_broken_settings_refuse_managed_jobs_and_pass_others(
    fresh_cluster: Callable[..., DevCluster],
) -> None:
    cluster = fresh_cluster(nodes=ONE_NODE, real_node=False)
    etc = cluster.conf_path.parent
    (etc / "synergy_site.lua").write_text("return { partition = \n")
    # slurmctld loads the script anew when its time stamp changes.
    stamp = os.stat(etc / "job_submit.lua").st_mtime + 10
    os.utime(etc / "job_submit.lua", (stamp, stamp))
    submit = ["sbatch", "--gres=gpu:1", "--mem=10", "-o", "/dev/null"]
    refused = cluster.run([*submit, "-p", "synergy"], input=SCRIPT, check=False)
    assert refused.returncode != 0
    assert "settings are broken" in refused.stderr
    assert cluster.run([*submit, "-p", "main"], input=SCRIPT).returncode == 0
    assert "synergy" not in cluster.run(["squeue", "-h", "-o", "%P"]).stdout
    assert cluster.is_up()


def test_a_run_time_error_inside_slurm_fails_closed(
    fresh_cluster: Callable[..., DevCluster],
) -> None:
    cluster = fresh_cluster(nodes=ONE_NODE, real_node=False)
    script = cluster.conf_path.parent / "job_submit.lua"
    text = script.read_text()
    broken = text.replace("  check_kind(job)\n", '  error("injected")\n')
    assert broken != text
    script.write_text(broken)
    stamp = os.stat(script).st_mtime + 10
    os.utime(script, (stamp, stamp))
    submit = ["sbatch", "--gres=gpu:1", "--mem=10", "-o", "/dev/null"]
    refused = cluster.run([*submit, "-p", "synergy"], input=SCRIPT, check=False)
    assert refused.returncode != 0
    assert "internal error" in refused.stderr
    assert "injected" in cluster.log("slurmctld")
    assert cluster.run(["squeue", "-h"]).stdout == ""
