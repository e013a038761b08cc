"""The whole chain on a real Slurm: sbatch, controller, leases, wrapper, training program."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, ControllerProcess, Slurm, controller, slurm

from slurm_synergy.devcluster import DevCluster
from slurm_synergy.slurm.facts import JobFacts, JobState

__all__ = ["controller", "slurm"]  # fixtures

Factory = Callable[..., ControllerProcess]

SRUN = ROOT / "wrapper" / "synergy-srun"
FAST = {"round_s": 20.0, "poll_s": 0.3, "debounce_s": 0.2, "grace_s": 60.0}
# Every thread of this program sleeps; it tells its process id and ends when the file appears.
THREADS = """
import os, sys, threading, time
from pathlib import Path
for _ in range(3):
    threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
print("pid", os.getpid(), flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.1)
print("done", flush=True)
"""

needs_two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="trading cores for real needs two of them"
)


def free_port() -> int:
    """A port that a restarted controller can take again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(holds: Callable[[], object], what: str, *, timeout_s: float = 90.0) -> float:
    """Wait for ``holds``; how long it took, in seconds."""
    begun_s = time.monotonic()
    while not holds():
        if time.monotonic() - begun_s > timeout_s:
            pytest.fail(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.05)
    return time.monotonic() - begun_s


def masks(pid: int) -> set[str]:
    """The allowed CPUs of every thread of a process and its children, as /proc lists them."""
    seen = set()
    for process in [pid, *children(pid)]:
        for status in Path(f"/proc/{process}/task").glob("*/status"):
            try:
                text = status.read_text(encoding="utf-8")
            except OSError:
                continue
            seen |= {
                line.split()[1]
                for line in text.splitlines()
                if line.startswith("Cpus_allowed_list")
            }
    return seen


def children(pid: int) -> list[int]:
    """Direct children."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for one in lists for child in one.read_text(encoding="utf-8").split()]


class Job:
    """A job that runs a Python program under the wrapper."""

    def __init__(self, slurm: Slurm, daemon: ControllerProcess) -> None:
        self._slurm, self._daemon = slurm, daemon
        self.job_id = 0

    def submit(self, command: str, *options: str, **env: str) -> Job:
        """Submit ``synergy-srun COMMAND`` with the environment ``env``."""
        exports = {
            "SYNERGY_ENDPOINT": self._daemon.endpoint,
            "SYNERGY_CHECKPOINT_ROOT": str(self._slurm.home / "checkpoints"),
            "OMP_NUM_THREADS": "1",
            **env,
        }
        lines = "".join(f"export {name}='{value}'\n" for name, value in exports.items())
        self.job_id = self._slurm.submit(
            "--open-mode=append", *options, script=f"{lines}{SRUN} {command}\n", wrapped=False
        )
        return self

    @property
    def output(self) -> str:
        """What it printed so far."""
        return self._slurm.output(self.job_id)

    def pid(self) -> int:
        """Process id that the program printed last."""
        until(lambda: "pid " in self.output, f"start of the program:\n{self.output}")
        return int(self.output.split("pid ")[-1].split()[0])

    def wait(self, holds: Callable[[JobFacts], bool], *, timeout_s: float = 60.0) -> JobFacts:
        """Wait for a state of the job."""
        return self._slurm.wait(self.job_id, holds, timeout_s=timeout_s)

    def completed(self, *, timeout_s: float = 60.0) -> JobFacts:
        """Wait for a good end."""
        facts = self.wait(lambda job: job.state.finished, timeout_s=timeout_s)
        assert facts.state is JobState.COMPLETED, self.output
        return facts


@pytest.fixture
def program(slurm: Slurm) -> Path:
    """The sleeping program as a file that jobs can read."""
    path = slurm.home / "threads.py"
    path.write_text(THREADS, encoding="utf-8")
    return path


def real_node(controller: Factory, **leases: Any) -> ControllerProcess:
    """A controller for the node whose cores are the machine's, with FIFO and TUNE."""
    daemon = controller(
        pool={"nodes": "real-1"},
        scheduling={**FAST, "policy": "fifo", "mechanism": "tune"},
        leases={"listen": f"127.0.0.1:{free_port()}", "lease_s": 10.0, **leases},
    )
    daemon.start()
    return daemon


@needs_two_cores
def test_running_jobs_trade_real_cores_in_place(
    controller: Factory, slurm: Slurm, program: Path, cluster: DevCluster
) -> None:
    daemon = real_node(controller)
    cpus = sorted(os.sched_getaffinity(0))
    python = f"python3 {program}"
    hungry = Job(slurm, daemon).submit(
        f"{python} {slurm.home}/end-hungry",
        "--gres=gpu:1",
        "--comment=synergy:profile=resnet18-imagenet,min_mem=100M",
    )
    everything = ",".join(str(cpu) for cpu in cpus)
    as_range = f"{cpus[0]}-{cpus[-1]}" if cpus == list(range(cpus[0], cpus[-1] + 1)) else everything
    pid = hungry.pid()
    until(lambda: masks(pid) == {as_range}, f"all cores: {masks(pid)}\n{hungry.output}")

    modest = Job(slurm, daemon).submit(
        f"{python} {slurm.home}/end-modest",
        "--gres=gpu:1",
        "--comment=synergy:profile=gnmt-wmt16,min_mem=100M",
    )
    other = modest.pid()
    singles = {str(cpu) for cpu in cpus}
    until(lambda: masks(pid) < singles, f"the hungry one gave way: {masks(pid)}")
    until(lambda: masks(other) < singles, f"the new one is pinned: {masks(other)}")
    assert len(masks(pid)) == len(masks(other)) == 1
    assert masks(pid) | masks(other) <= singles
    assert masks(pid) != masks(other)

    (slurm.home / "end-modest").touch()
    modest.completed()
    until(lambda: masks(pid) == {as_range}, f"the cores came back: {masks(pid)}")
    assert hungry.pid() == pid, "it was never restarted"
    (slurm.home / "end-hungry").touch()
    assert hungry.completed().restarts == 0


@needs_two_cores
def test_with_the_controller_gone_jobs_fall_back_to_their_floor_and_finish(
    controller: Factory, slurm: Slurm, program: Path
) -> None:
    daemon = real_node(controller, lease_s=5.0)
    job = Job(slurm, daemon).submit(
        f"python3 {program} {slurm.home}/end",
        "--gres=gpu:1",
        "--comment=synergy:profile=resnet18-imagenet,min_mem=100M",
    )
    pid = job.pid()
    cpus = sorted(os.sched_getaffinity(0))
    until(lambda: "-" in "".join(masks(pid)) or "," in "".join(masks(pid)), "more than its share")
    daemon.kill()
    share = len(cpus) // 2
    until(
        lambda: masks(pid) <= {str(cpu) for cpu in cpus} if share == 1 else len(masks(pid)) == 1,
        f"the floor set: {masks(pid)}",
    )

    daemon.start()
    until(lambda: "-" in "".join(masks(pid)) or "," in "".join(masks(pid)), "adopted again")
    assert job.pid() == pid
    daemon.kill()
    (slurm.home / "end").touch()
    assert job.completed().restarts == 0


def test_a_job_runs_without_any_controller(
    controller: Factory, slurm: Slurm, program: Path, cluster: DevCluster
) -> None:
    (slurm.home / "end").touch()
    script = f"export SYNERGY_ENDPOINT=127.0.0.1:{free_port()}\n{SRUN} python3 {program} end\n"
    job_id = slurm.submit("--gres=gpu:1", script=script, wrapped=False, partition="main")
    slurm.wait(job_id, lambda job: job.state is JobState.COMPLETED, timeout_s=60)
    assert "done" in slurm.output(job_id)


def samples_per_epoch(log_dir: Path) -> dict[int, Counter[int]]:
    """How often each sample was trained on, over all ranks and incarnations."""
    seen: dict[int, Counter[int]] = {}
    for path in log_dir.glob("*-of-*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            seen.setdefault(record["epoch"], Counter()).update(record["samples"])
    return seen


def steps(log_dir: Path) -> list[int]:
    """Steps done per rank."""
    return [len(path.read_text().splitlines()) for path in sorted(log_dir.glob("*-of-*.jsonl"))]


@pytest.mark.parametrize("launch", ["srun", "torchrun"])
@pytest.mark.timeout(240)
def test_ranks_are_stopped_at_one_step_and_repeat_no_sample(
    controller: Factory, slurm: Slurm, torch_python: str, launch: str
) -> None:
    nodes = "v100-[1-2]" if launch == "srun" else "v100-1"
    daemon = controller(pool={"nodes": nodes}, scheduling={**FAST, "policy": "srtf"})
    daemon.start()
    logs = slurm.home / "logs"
    logs.mkdir()
    # Slow until it is stopped: a quarter of a second a step, and 25 ms after that.
    program = f"{ROOT}/tests/jobside/ddp_program.py {logs} 3 0.${{SLURM_RESTART_COUNT:+0}}25"
    if launch == "srun":
        shape, gpus = ["-N2", "--ntasks-per-node=1"], 1
        ranks = "export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS"
        # Rank 0 of the first run is started as a user's would be, the others are forks.
        forks = f"[ $RANK$SLURM_RESTART_COUNT = 0 ] || exec {torch_python} {program}"
        command = f"bash -c '{ranks}; {forks}; exec $PYTHON {program}'"
    else:
        shape, gpus = ["-N1"], 2
        run = "$PYTHON -m torch.distributed.run --nproc-per-node=2 --no-python"
        command = f"{run} {torch_python} {program}"
    job = Job(slurm, daemon).submit(
        command,
        "--time=10:00:00",
        "--mem=1000M",
        f"--gres=gpu:v100:{gpus}",  # more of them are more cores, and so more loader workers
        *shape,
        PYTHON=str(ROOT / ".venv/bin/python"),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
        PYTHONPATH=str(ROOT),
    )
    until(lambda: len(steps(logs)) == 2 and min(steps(logs)) >= 2, job.output, timeout_s=90)

    short = slurm.submit("--time=0:10:00", "--gres=gpu:v100:8", *shape, script="sleep 2\n")
    slurm.running(short, timeout_s=60)
    stopped_at = steps(logs)
    assert len(set(stopped_at)) == 1, "both ranks did the same steps"
    assert 0 < stopped_at[0] < 51

    facts = job.completed(timeout_s=120)
    assert facts.restarts == 1
    seen = samples_per_epoch(logs)
    assert sorted(seen) == [0, 1, 2]
    for counts in seen.values():
        # 101 samples in batches of 2 x 3: the tail of 5 is divided, none is trained on twice.
        assert counts == Counter(range(101))
