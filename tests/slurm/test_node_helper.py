"""The helper on a node (``slurm-synergyd --node``) on a real Slurm that confines jobs to cores."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from harness import ROOT, ControllerProcess, Slurm
from test_end_to_end import FAST, THREADS, Job, free_port, masks, needs_two_cores, until

from slurm_synergy.devcluster import DevCluster
from slurm_synergy.devcluster.confinement import choose_task_plugin
from slurm_synergy.devcluster.programs import hardware
from slurm_synergy.devcluster.shapes import real_shape

# Cpusets are named after it, and this machine may have more than one test run.
NODE = f"helped-{os.getpid()}"
OURS = Path(f"/sys/fs/cgroup/cpuset/slurm-synergy_{NODE}")
HUNGRY = "--comment=synergy:profile=resnet18-imagenet,min_mem=100M"
MODEST = "--comment=synergy:profile=gnmt-wmt16,min_mem=100M"


class Helper:
    """``slurm-synergyd --node`` as a process of its own."""

    def __init__(self, cluster: DevCluster, daemon: ControllerProcess, home: Path) -> None:
        self.log_path = home / "helper.log"
        self._argv = [
            *(sys.executable, str(ROOT / "sbin" / "slurm-synergyd"), "--node", "--debug"),
            *("--endpoint", daemon.endpoint, "--node-name", NODE, "--controller-user", "root"),
            *("--munge-socket", str(cluster.munge_socket), "--run-dir", str(home / "run")),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8")

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(self._argv, stdout=log, stderr=log)
        until(lambda: "helper of node" in self.log, f"the helper starts:\n{self.log}")

    def guard(self) -> int:
        """The process id of its guard."""
        assert self._process is not None
        found = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        return int(found.split()[0])

    def pause(self) -> None:
        """It does nothing more until it is ended."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def end(self, how: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(how)
        code, self._process = self._process.wait(90), None
        return code

    def give_back(self) -> int:
        """What an admin, or systemd after a helper's death, runs."""
        return subprocess.run([*self._argv, "--give-back"], check=False, timeout=90).returncode

    def stop(self) -> None:
        if self._process is not None:
            self.end(signal.SIGTERM)
        self.give_back()


class Site:
    """A cluster whose one node confines jobs to their cores, a controller, and the helper."""

    def __init__(self, cluster: DevCluster, home: Path) -> None:
        self.slurm = Slurm(cluster, home)
        self.cpus = sorted(os.sched_getaffinity(0))
        self.both = f"{self.cpus[0]}-{self.cpus[-1]}"
        self.daemon = ControllerProcess(
            cluster,
            home,
            enforcement="auto",
            pool={"nodes": NODE, "node_helpers": True},
            scheduling={**FAST, "policy": "fifo", "mechanism": "tune"},
            leases={"listen": f"127.0.0.1:{free_port()}", "lease_s": 6.0},
        )
        self.daemon.start()
        self.helper = Helper(cluster, self.daemon, home)
        program = home / "threads.py"
        program.write_text(THREADS, encoding="utf-8")
        self._program = f"python3 {program} {home}"

    def submit(self, name: str, hints: str) -> Job:
        """A job that runs until ``end(name)``."""
        return Job(self.slurm, self.daemon).submit(
            f"{self._program}/end-{name}", "--gres=gpu:1", hints
        )

    def end(self, name: str, job: Job) -> None:
        (self.slurm.home / f"end-{name}").touch()
        assert job.completed(timeout_s=90).restarts == 0

    def slurms(self, job: Job) -> str:
        """The CPUs that Slurm confines a job to."""
        place = Path(f"/sys/fs/cgroup/cpuset/slurm_{NODE}/uid_{os.getuid()}/job_{job.job_id}")
        return (place / "cpuset.cpus").read_text().strip()

    def planned(self, job: Job) -> int:
        """The cores that the newest plan gives a job."""
        plan = self.daemon.journal[-1]["plan"]
        shares = [one["shares"] for one in plan["placements"] if one["job_id"] == job.job_id]
        return sum(share["cpus"] for one in shares for share in dict(one).values())

    def close(self) -> None:
        self.daemon.stop()
        self.slurm.cancel_all()
        self.helper.stop()


def cpuset(pid: int) -> str:
    """The cpuset that a process is in."""
    text = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")
    found = re.search(r":cpuset:(.*)", text)
    assert found is not None
    return found[1]


@pytest.fixture
def site(fresh_cluster: Callable[..., DevCluster], tmp_path: Path) -> Iterator[Site]:
    why_not = choose_task_plugin()[1]
    if why_not:
        pytest.skip(why_not)
    shape = replace(real_shape(hardware()), nodes=NODE)
    cluster = fresh_cluster(nodes=[shape], real_node=False, constrain_cores=True)
    cluster.run(["scontrol", "update", "PartitionName=synergy", "OverSubscribe=NO"])
    tmp_path.chmod(0o755)
    made = Site(cluster, tmp_path)
    yield made
    made.close()


@needs_two_cores
def test_confined_jobs_get_cores_beyond_their_allocation_and_lose_them_again(site: Site) -> None:
    assert "enforcement borrow: partition 'synergy' has OverSubscribe=NO, but" in site.daemon.log
    hungry = site.submit("hungry", HUNGRY)
    pid = hungry.pid()
    given = site.slurms(hungry)
    assert given in map(str, site.cpus)
    assert masks(pid) == {given}, "without the helper it cannot leave what Slurm gave it"

    site.helper.start()
    until(lambda: masks(pid) == {site.both}, f"it got more: {masks(pid)}\n{site.helper.log}")
    assert site.slurms(hungry) == given, "Slurm's own cgroup is untouched"
    # Slurm writes the job's cpuset anew for a step, which must not meet a wider one.
    step = ["srun", f"--jobid={hungry.job_id}", "--overlap", "-n1", "true"]
    assert site.slurm.cluster.run(step, timeout_s=90).returncode == 0

    modest = site.submit("modest", MODEST)
    other = modest.pid()
    until(
        lambda: len(masks(pid) | masks(other)) == 2 and len(masks(pid)) == len(masks(other)) == 1,
        f"each has its own: {masks(pid)}, {masks(other)}\n{site.helper.log}",
    )
    site.end("modest", modest)
    until(lambda: masks(pid) == {site.both}, f"the cores came back: {masks(pid)}")
    site.daemon.kill()
    until(
        lambda: masks(pid) == {given} and cpuset(pid).startswith(f"/slurm_{NODE}/"),
        f"what Slurm gave it: {masks(pid)}\n{site.helper.log}",
    )
    site.end("hungry", hungry)
    until(lambda: not list(OURS.glob("uid_*")), "nothing is left of the job")


@needs_two_cores
def test_a_helper_that_ends_however_leaves_jobs_with_what_slurm_gave_them(site: Site) -> None:
    job = site.submit("job", HUNGRY)
    pid, given = job.pid(), site.slurms(job)

    def widened() -> bool:
        return masks(pid) == {site.both}

    def back() -> bool:
        return masks(pid) == {given} and cpuset(pid).startswith(f"/slurm_{NODE}/")

    site.helper.start()
    until(widened, f"it got more: {masks(pid)}\n{site.helper.log}")
    assert site.helper.end(signal.SIGKILL) == -signal.SIGKILL
    until(back, f"the guard gave back: {masks(pid)}\n{site.helper.log}")
    # The controller notices, and plans with what the job has without a helper.
    until(lambda: "no helper is heard on" in site.daemon.log, site.daemon.log)
    until(lambda: site.planned(job) == 1, f"it is not counted on:\n{site.daemon.log}")
    assert site.slurm.job(job.job_id).running

    site.helper.start()
    until(widened, f"once more: {masks(pid)}\n{site.helper.log}")
    assert "the helpers of all nodes are heard" in site.daemon.log
    assert site.planned(job) == len(site.cpus)
    # With its guard too nobody is left to do it: what it had is the lease and no more.
    guard = site.helper.guard()
    site.helper.pause()  # it would start another one
    os.kill(guard, signal.SIGKILL)
    assert site.helper.end(signal.SIGKILL) == -signal.SIGKILL
    assert cpuset(pid).startswith(f"/{OURS.name}/")
    assert site.helper.give_back() == 0
    assert back(), f"given back by hand: {masks(pid)}, {cpuset(pid)}"
    assert not OURS.exists()

    site.helper.start()
    until(widened, f"once more: {masks(pid)}\n{site.helper.log}")
    assert site.helper.end(signal.SIGTERM) == 0
    assert back(), f"given back at the end: {masks(pid)}, {cpuset(pid)}"
    site.end("job", job)
