"""synergy-srun in real jobs: transparent, clean after a reshape, pinned, stopped and continued."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobside.fake_controller import FakeController, until

from slurm_synergy.devcluster import DevCluster
from slurm_synergy.jobside import srun

ROOT = Path(__file__).resolve().parents[2]
WRAPPER = ROOT / "wrapper" / "synergy-srun"
Submit = Callable[..., "Job"]


class Job:
    """A batch job whose script ends up in ``out``."""

    def __init__(self, cluster: DevCluster, job_id: str, out: Path) -> None:
        self.cluster, self.id, self.out = cluster, job_id, out

    def fact(self, key: str) -> str:
        shown = self.cluster.run(["scontrol", "show", "job", "-o", self.id]).stdout
        return shown.partition(f"{key}=")[2].split()[0]

    def text(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    def wait_for(self, text: str, timeout_s: float = 90) -> str:
        until(lambda: text in self.text(), timeout_s=timeout_s, what=f"{text!r} in the output")
        return self.text()

    def start_again(self) -> None:
        """Start a requeued job without the usual two minutes of waiting."""
        until(lambda: self.fact("JobState") == "PENDING", what="requeued")
        # slurmd refuses a job that starts in the second in which it was killed, and fails it.
        time.sleep(1.1)
        self.cluster.run(["scontrol", "update", f"jobid={self.id}", "StartTime=now"])

    def wait(self, timeout_s: float = 60) -> str:
        ended = ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT")
        until(lambda: self.fact("JobState") in ended, timeout_s=timeout_s, what="end of job")
        return self.text()


@pytest.fixture
def submit(cluster: DevCluster, tmp_path: Path) -> Iterator[Submit]:
    jobs: list[Job] = []

    def send(script: str, *options: str) -> Job:
        out = tmp_path / f"out.{len(jobs)}"
        text = f"#!/bin/bash\nW={WRAPPER}\n{script}\n"
        done = cluster.run(
            ["sbatch", "--parsable", "-p", "main", "--mem=100", "--open-mode=append",
             "-o", str(out), *options],
            input=text,
            cwd=tmp_path,
        )  # fmt: skip
        job = Job(cluster, done.stdout.strip().partition(";")[0], out)
        jobs.append(job)
        return job

    yield send
    for job in jobs:
        cluster.run(["scancel", "-s", "KILL", job.id], check=False)
        cluster.run(["scancel", job.id], check=False)
    # The next test may want the node for itself.
    mine = {job.id for job in jobs}
    until(
        lambda: mine.isdisjoint(cluster.run(["squeue", "-h", "-o", "%A"]).stdout.split()),
        timeout_s=90,
        what="the end of the jobs",
    )


@pytest.fixture
def controller() -> Iterator[FakeController]:
    made = FakeController(cores=[0], floor_cores=[0], node_cores=24)
    yield made
    made.stop()


def test_status_input_and_output_pass_through(submit: Submit) -> None:
    text = submit(
        "echo hello | $W sh -c 'cat; echo to-stderr >&2; exit 7'; echo status $?\n"
        "$W no-such-command; echo status $?\n"
        "$W -n1 sh -c 'kill -SEGV $$'; echo status $?\n"
        "$W --synergy-no-inject sh -c 'echo path=$PYTHONPATH'",
        "-c2",
    ).wait()
    lines = text.splitlines()
    assert "hello" in lines
    assert "to-stderr" in lines
    assert [line for line in lines if line.startswith("status")] == [
        "status 7",
        "status 127",
        "status 139",
    ]
    assert "path=" in lines


SHOW = (
    "$W sh -c 'echo task $SLURM_PROCID/$SLURM_NTASKS on $SLURMD_NODENAME "
    "gpus=$CUDA_VISIBLE_DEVICES cpus=$SYNERGY_LEASE_CPUS'"
)


@pytest.mark.parametrize(
    ("submitted", "update", "seen"),
    [
        pytest.param(
            ["--gpus-per-node=1"],
            "NumNodes=1-1 NumTasks=1 NumCPUs=24 CPUsPerTask=24 MinCPUsNode=24 "
            "TresPerNode=gres:gpu:2 ReqNodeList=v100-1",
            ["task 0/1 on v100-1 gpus=0,1 cpus=24"],
            id="more GPUs and all cores",
        ),
        pytest.param(
            ["--gres=gpu:1", "-N2", "--ntasks-per-node=1"],
            "NumNodes=1-1 NumTasks=1 NumCPUs=24 CPUsPerTask=24 MinCPUsNode=24 "
            "TresPerNode=gres:gpu:4 ReqNodeList=v100-2",
            ["task 0/1 on v100-2 gpus=0,1,2,3 cpus=24"],
            id="two nodes to one",
        ),
        pytest.param(
            ["--gres=gpu:2", "-n4"],
            "NumNodes=2-2 NumTasks=2 NumCPUs=128 CPUsPerTask=64 MinCPUsNode=64 "
            "TresPerNode=gres:gpu:1 ReqNodeList=a100-1,a100-2",
            ["task 0/2 on a100-1 gpus=0 cpus=64", "task 1/2 on a100-2 gpus=0 cpus=64"],
            id="four tasks to two nodes",
        ),
        pytest.param(
            ["--gres=gpu:2", "-N1", "--ntasks-per-node=2", "-c2"],
            "NumNodes=1-1 NumTasks=2 NumCPUs=24 CPUsPerTask=12 MinCPUsNode=24 "
            "TresPerNode=gres:gpu:2 ReqNodeList=v100-3",
            ["task 0/2 on v100-3 gpus=0,1 cpus=12", "task 1/2 on v100-3 gpus=0,1 cpus=12"],
            id="one task per GPU",
        ),
    ],
)
def test_a_job_reshaped_before_its_start_uses_all_of_its_new_shape(
    cluster: DevCluster, submit: Submit, submitted: list[str], update: str, seen: list[str]
) -> None:
    job = submit(SHOW, "-H", *submitted)
    cluster.run(["scontrol", "update", f"jobid={job.id}", *update.split()])
    cluster.run(["scontrol", "release", job.id])
    lines = job.wait().splitlines()
    assert sorted(line for line in lines if line.startswith("task")) == seen
    assert not any("error" in line.lower() for line in lines)


def test_what_the_user_chose_is_not_overwritten(submit: Submit) -> None:
    text = submit(
        "export OMP_NUM_THREADS=5 MASTER_PORT=99\n"
        "$W -n1 -c3 --kill-on-bad-exit=0 env\n"
        "$W -n3 sh -c 'echo rank $SLURM_PROCID'",
        "-n2", "-c2", "-N1", "-w", "v100-4",
    ).wait()  # fmt: skip
    assert "OMP_NUM_THREADS=5\n" in text
    assert "MASTER_PORT=99\n" in text
    assert "SLURM_CPUS_PER_TASK=3\n" in text
    assert {f"rank {rank}" for rank in range(3)} <= set(text.splitlines())


def test_a_signal_to_the_step_arrives_exactly_once(cluster: DevCluster, submit: Submit) -> None:
    job = submit(
        "$W bash -c 'trap \"echo got\" USR1; echo ready; for i in {1..40}; do sleep 0.1; done'"
    )
    job.wait_for("ready")
    cluster.run(["scancel", "-s", "USR1", job.id])
    assert job.wait().splitlines().count("got") == 1


def test_a_signal_to_the_wrapper_reaches_the_command(submit: Submit) -> None:
    text = submit(
        "$W bash -c 'trap \"echo got; exit 4\" USR2; > ready; while :; do sleep 0.1; done' &\n"
        "until [ -e ready ]; do sleep 0.1; done; kill -USR2 %1; wait %1; echo status $?"
    ).wait()
    assert text.splitlines().count("got") == 1
    assert "status 4" in text


@pytest.mark.parametrize("how", ["", "exec "])
def test_a_requeue_leaves_the_program_time_to_save(
    cluster: DevCluster, submit: Submit, how: str
) -> None:
    job = submit(
        '[ -n "$SLURM_RESTART_COUNT" ] && { echo again; exit; }\n'
        f'{how}$W bash -c \'trap "echo term; sleep 2; echo saved; exit 3" TERM; echo ready; '
        "while :; do sleep 0.1; done'"
    )
    job.wait_for("ready")
    cluster.run(["scontrol", "requeue", job.id])
    text = job.wait_for("saved")
    assert text.splitlines().count("term") == 1
    job.start_again()
    job.wait_for("again")


def test_every_thread_on_real_cores_follows_the_lease(
    cluster: DevCluster, submit: Submit, controller: FakeController, tmp_path: Path
) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("moving between CPUs needs two of them")
    controller.grant(node_cores=len(cpus), cores=[0])
    program = tmp_path / "program.py"
    program.write_text(
        "import os, subprocess, threading, time\n"
        "for _ in range(3): threading.Thread(target=time.sleep, args=(90,), daemon=True).start()\n"
        "subprocess.Popen(['sh', '-c', 'sleep 90 & wait'])\n"
        "print('pid', os.getpid(), os.getppid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    job = submit(
        f"SYNERGY_ENDPOINT={controller.endpoint} $W python3 {program}",
        "-w", "real-1", "-n1", f"-c{len(cpus)}",
    )  # fmt: skip
    found = until(lambda: re.search(r"^pid (\d+) (\d+)", job.text(), re.M), timeout_s=90)
    launcher = int(found[2])

    def allowed() -> dict[int, str]:
        masks = {}
        todo = [launcher]
        for pid in todo:
            for thread in Path(f"/proc/{pid}/task").iterdir():
                try:
                    status = (thread / "status").read_text()
                    todo += map(int, (thread / "children").read_text().split())
                except (FileNotFoundError, ProcessLookupError):
                    continue
                masks[int(thread.name)] = re.search(r"Cpus_allowed_list:\s*(\S+)", status)[1]  # type: ignore[index]
        return masks

    assert len(allowed()) >= 7
    assert set(allowed().values()) == {str(cpus[0])}
    controller.grant(cores=[1])
    until(lambda: set(allowed().values()) == {str(cpus[1])}, what="moved")
    # Our munged signed the registration for exactly this call.
    request = controller.registered[0]
    decoded = cluster.run(["unmunge", "-S", str(cluster.munge_socket)], input=request.credential)
    assert f"synergy-register:{job.id}:0:0:{request.nonce}" in decoded.stdout
    assert re.search(rf"^UID:.*\({os.geteuid()}\)", decoded.stdout, re.M)
    assert list(request.os_cpus) == cpus


STOPPED_ONCE = (
    "import os, sys, time, pathlib\n"
    "from slurm_synergy.jobside.board import Board, Report\n"
    "board = Board.attach(pathlib.Path(os.environ['SYNERGY_BOARD']))\n"
    "if os.path.exists('checkpoint'):\n"
    "    print('finished from', open('checkpoint').read(), flush=True); sys.exit(0)\n"
    "board.write_report(Report(step=1, heartbeat_monotonic_s=time.monotonic()))\n"
    "print('training', flush=True)\n"
    "while not board.read_lease().stop: time.sleep(0.02)\n"
    "time.sleep(float(os.environ['SLURM_PROCID']))\n"
    "open('checkpoint', 'w').write('step 2')\n"
    "board.write_report(Report(step=2, heartbeat_monotonic_s=1.0, checkpoint_done=True))\n"
    "sys.exit(85)\n"
)


def _stoppable(tmp_path: Path, endpoint: str) -> str:
    (tmp_path / "train.py").write_text(STOPPED_ONCE)
    return (
        f"cd {tmp_path}; export SYNERGY_ENDPOINT={endpoint} PYTHONPATH={ROOT}\n"
        "$W $N python3 train.py; echo status $?; echo script went on"
    )


def test_after_a_stop_the_script_waits_for_the_requeue(
    cluster: DevCluster, submit: Submit, controller: FakeController, tmp_path: Path
) -> None:
    job = submit(_stoppable(tmp_path, controller.endpoint))
    job.wait_for("training")
    controller.grant(stop=True, stop_within_s=60)
    until(lambda: controller.finished, timeout_s=20, what="report of the end")
    assert (controller.finished[0].exit_code, controller.finished[0].checkpointed) == (85, True)
    time.sleep(1.5)
    assert "status" not in job.text()
    controller.grant(stop=False)
    cluster.run(["scontrol", "requeue", job.id])
    job.start_again()
    text = job.wait()
    assert job.fact("Restarts") == "1"
    assert "finished from step 2" in text
    assert text.splitlines().count("script went on") == 1
    assert controller.registered[-1].task.restart_count == 1


def test_when_no_requeue_comes_the_command_continues_in_place(
    submit: Submit, controller: FakeController, tmp_path: Path
) -> None:
    script = "export SYNERGY_REQUEUE_WAIT_S=1\n" + _stoppable(tmp_path, controller.endpoint)
    job = submit(script)
    job.wait_for("training")
    controller.grant(stop=True, stop_within_s=60)
    job.wait_for("continuing here from the checkpoint")
    text = job.wait()
    assert "finished from step 2" in text
    assert "status 0" in text
    assert job.fact("Restarts") == "0"


def test_ranks_that_stop_one_after_the_other_do_not_kill_each_other(
    cluster: DevCluster, submit: Submit, controller: FakeController, tmp_path: Path
) -> None:
    job = submit("N=-n3\n" + _stoppable(tmp_path, controller.endpoint), "-n3")
    until(lambda: job.text().count("training") == 3, timeout_s=30, what="three ranks")
    controller.grant(stop=True, stop_within_s=60)
    until(lambda: len(controller.finished) == 3, timeout_s=20, what="three reports")
    assert all(end.checkpointed and end.exit_code == 85 for end in controller.finished)
    cluster.run(["scontrol", "requeuehold", job.id])
    until(lambda: job.fact("JobState") == "PENDING", timeout_s=10, what="requeued quickly")
    assert "status" not in job.text()


def test_the_option_table_agrees_with_the_installed_srun(cluster: DevCluster) -> None:
    help_text = cluster.run(["srun", "--help"]).stdout
    names = set(re.findall(r"--([a-z][a-z0-9-]+)", help_text)) - {"help"}
    shorts = set(re.findall(r"^\s+-([A-Za-z])\b", help_text, re.M)) - {"h"}
    assert len(names) > 80
    assert len(shorts) > 30

    def complaint(*words: str) -> str:
        return cluster.run(["srun", *words], check=False).stderr

    # The table serves all releases: --power lost its argument in 24.11.
    for name in sorted(names - {"power"}):
        needs = "requires an argument" in complaint(f"--{name}")
        assert (name in srun._LONG_WITH_ARGUMENT) == needs, name
    for short in sorted(shorts - set("VHZ")):
        needs = "requires an argument" in complaint(f"-{short}")
        assert (short in srun._SHORT_WITH_ARGUMENT) == needs, short


def test_outside_a_job_the_command_runs_directly(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")}
    done = subprocess.run(
        [str(WRAPPER), "-n4", "sh", "-c", "cat; exit 9"],
        input="in\n", capture_output=True, text=True, env=env, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (9, "in\n")
    assert "not inside a Slurm job: running sh directly, ignoring -n4" in done.stderr
