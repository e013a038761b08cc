"""A site to break things at: an embedded Slurm, a controller, and jobs that leave evidence."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from fault_checks import Findings, read_log, verify
from harness import ROOT, ControllerProcess, Slurm

from slurm_synergy.devcluster import DevCluster, NodeShape
from slurm_synergy.errors import ClusterError
from slurm_synergy.slurm.facts import JobFacts, JobState

__all__ = ["FAULT_CONF", "FAULT_NODES", "Site", "SmallDisk", "Trainee", "until"]

HERE = Path(__file__).resolve().parent
FAULT_NODES = (
    NodeShape(nodes="n-[1-3]", gpus=4, cores=8, mem_mib=64_000, gpu_type="v100", sockets=1),
)
# Shorter than a site's, so that a case takes seconds: after how long a silent node is lost, and
# how long after SIGTERM what is left of a job is killed.
FAULT_CONF = ("SlurmdTimeout=15", "KillWait=4", "MinJobAge=600")
_PATIENCE = 3.0
_SCHEDULING = {
    "policy": "srtf",
    "mechanism": "proportional",
    "round_s": 5.0,
    "poll_s": 0.4,
    "debounce_s": 0.2,
    "start_deadline_s": 20.0,
    "grace_s": 20.0,
    "retry_backoff_s": 1.0,
}


def until(holds: Callable[[], object], *what: object, timeout_s: float = 40.0) -> None:
    """Poll until ``holds``; fails with ``what`` (made into text only then).

    ``timeout_s`` is ample for a machine of one's own; a shared one gets some times more.
    """
    timeout_s *= _PATIENCE
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline_s:
            pytest.fail(f"not within {timeout_s:g} s: {' '.join(map(str, what))}")
        time.sleep(0.2)


class FaultyController(ControllerProcess):
    """A controller that may have a fault point, and whose state directory may be elsewhere."""

    fault = ""
    fault_runs: Sequence[str] = ()
    script: Path | None = None
    """Decisions come from this file, see ``scripted_daemon.py``; None: from the policy."""

    @property
    def entry(self) -> Path:
        """See ``ControllerProcess``."""
        if self.script is not None:
            return HERE.parent / "scripted_daemon.py"
        return HERE / "faulty_daemon.py" if self.fault else ControllerProcess.entry

    def variables(self) -> dict[str, str]:
        """See ``ControllerProcess``."""
        found = {}
        if self.fault or self.script is not None:
            found["SLURM_CONF"] = str(self.cluster.conf_path)
        if self.fault:
            found["SYNERGY_FAULT_AT"] = self.fault
        if self.script is not None:
            found["SYNERGY_SCRIPT"] = str(self.script)
        if self.fault_runs:
            found["SYNERGY_FAULT_RUNS"] = json.dumps(list(self.fault_runs))
        return found

    def died(self) -> int | None:
        """The exit status if it has ended by itself."""
        return self._process.poll() if self._process else None


class Trainee:
    """One job that runs ``fault_program``."""

    def __init__(self, site: Site, home: Path) -> None:
        self._site, self.home = site, home
        self.job_id = 0

    @property
    def facts(self) -> JobFacts:
        """The job as Slurm shows it now."""
        return self._site.slurm.job(self.job_id)

    @property
    def over(self) -> bool:
        """Whether it has ended for good, its last process included."""
        facts = self.facts
        return facts.state.finished and not facts.completing

    @property
    def output(self) -> str:
        """What the job printed."""
        return self._site.slurm.output(self.job_id)

    def events(self, kind: str = "", rank: int = 0) -> list[dict[str, Any]]:
        """What its log has so far, or only the events of one kind."""
        path = self.home / f"rank-{rank}.log"
        found = read_log(path) if path.exists() else []
        return [event for event in found if not kind or event["event"] == kind]

    @property
    def starts(self) -> int:
        """How often the program was started."""
        return len(self.events("start"))

    @property
    def pid(self) -> int:
        """The program's process id now."""
        return int(self.events("start")[-1]["pid"])

    @property
    def node(self) -> str:
        """The node of the newest start."""
        return str(self.events("start")[-1]["node"])

    def steps(self) -> int:
        """Steps that are noted, repetitions included."""
        return len(self.events("step"))

    def training(self, *, starts: int = 1, saves: int = 1, timeout_s: float = 60.0) -> Trainee:
        """Wait until it trains in its ``starts``-th run, with ``saves`` checkpoints in that run."""

        def reached() -> bool:
            events = self.events()
            begun = [at for at, event in enumerate(events) if event["event"] == "start"]
            if len(begun) < starts:
                return False
            run = events[begun[starts - 1] :]
            kinds = [event["event"] for event in run]
            return kinds.count("saved") >= saves and "step" in kinds

        until(reached, f"job {self.job_id} trains (run {starts})", self, timeout_s=timeout_s)
        return self

    def goes_on(self, *, timeout_s: float = 30.0) -> Trainee:
        """Wait for two more steps."""
        before = self.steps()
        until(lambda: self.steps() >= before + 2, "it goes on with", self, timeout_s=timeout_s)
        return self

    def finish(self) -> Trainee:
        """Let it come to its end."""
        (self.home / "finish").touch()
        return self

    def __str__(self) -> str:
        try:
            facts: object = self.facts
        except ClusterError as err:
            facts = err
        tail = "\n".join(map(str, self.events()[-8:]))
        daemon = self._site.daemon.log[-3000:]
        return (
            f"job {self.job_id}: {facts}\nits log:\n{tail}\nit printed:\n{self.output[-1500:]}\n"
            f"the controller said:\n{daemon}"
        )


class Site:
    """One case's world; ``close`` takes away what the case has left on the shared cluster."""

    def __init__(self, cluster: DevCluster, home: Path, record: Callable[[str, object], None]):
        self.cluster, self.home, self._record = cluster, home, record
        home.chmod(0o755)
        self.slurm = Slurm(cluster, home)
        self.jobs: list[Trainee] = []
        self._tries = 0
        self.port = _free_port()
        self._broke_s = 0.0
        state = home / "controller"
        state.mkdir()
        self.daemon = FaultyController(cluster, state)

    # -- the controller ---------------------------------------------------------------------------

    def start(self, *, fault: str = "", run: Sequence[str] = (), **settings: Any) -> None:
        """Start the controller, on the same port each time; ``settings`` as in the file.

        At its fault point it dies, or else runs the command ``run``.
        """
        scheduling = {**_SCHEDULING, **settings.pop("scheduling", {})}
        leases = {"listen": f"127.0.0.1:{self.port}", "lease_s": 6.0, **settings.pop("leases", {})}
        pool = {"nodes": "n-[1-3]", **settings.pop("pool", {})}
        self.daemon.configure(scheduling=scheduling, leases=leases, pool=pool, **settings)
        self.daemon.fault, self.daemon.fault_runs = fault, run
        self.daemon.start()

    def restart(self) -> None:
        """Start it again with the settings it has, without a fault point."""
        self.daemon.fault = ""
        self.daemon.start()

    def await_death(self, *, timeout_s: float = 40.0) -> None:
        """Wait until the controller has met its fault point; recovery counts from here."""
        until(
            lambda: self.daemon.died() is not None,
            f"the controller dies at {self.daemon.fault}",
            *self.jobs,
            timeout_s=timeout_s,
        )
        assert self.daemon.died() == -signal.SIGKILL, self.daemon.log
        self.daemon.kill()
        self.broken()

    def logged(self, text: str, *, timeout_s: float = 30.0) -> None:
        """Wait until the controller has said ``text``."""
        until(
            lambda: text in self.daemon.log,
            f"the controller says {text!r}",
            *self.jobs,
            timeout_s=timeout_s,
        )

    # -- jobs -------------------------------------------------------------------------------------

    def train(
        self,
        *options: str,
        gpus: int = 4,
        time_limit: str = "5:00:00",
        ranks: int = 1,
        endpoint: str = "",
        env: Mapping[str, str] | None = None,
        wrapper: str = "",
    ) -> Trainee:
        """Submit one job; ``env`` for the program, ``endpoint`` in place of the controller's."""
        # Never the place of an earlier try: Slurm may have taken a job whose sbatch failed.
        self._tries += 1
        home = self.home / f"job-{self._tries}"
        home.mkdir()
        job = Trainee(self, home)
        exports = {
            "SYNERGY_ENDPOINT": endpoint or f"127.0.0.1:{self.port}",
            "SYNERGY_MUNGE_SOCKET": str(self.cluster.munge_socket),
            "SYNERGY_CHECKPOINT_DIR": str(home / "checkpoints"),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        lines = "".join(f"export {name}='{value}'\n" for name, value in exports.items())
        program = f"{sys.executable} {HERE / 'fault_program.py'} {home}"
        if ranks > 1:
            program = f"bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS exec {program}'"
        job.job_id = self.slurm.submit(
            f"--gres=gpu:{gpus}",
            f"--time={time_limit}",
            f"--ntasks-per-node={ranks}",
            "--mem=2000M",
            "--open-mode=append",
            *options,
            script=f"{lines}{wrapper or ROOT / 'wrapper' / 'synergy-srun'} {program}\n",
            wrapped=False,
        )
        self.jobs.append(job)
        return job

    # -- the verdict ------------------------------------------------------------------------------

    def broken(self) -> None:
        """What is broken is broken from now on: recovery is counted from here."""
        self._broke_s = time.monotonic()

    def recovered(self) -> None:
        """Everything is as it should be again."""
        if self._broke_s:
            self._record("recovery_s", round(time.monotonic() - self._broke_s, 1))
            self._broke_s = 0.0

    def complete(self, *jobs: Trainee, lost_saves: int = 0, timeout_s: float = 60.0) -> None:
        """Let the jobs come to their end, and judge their logs."""
        for job in jobs or self.jobs:
            job.finish()
        for job in jobs or self.jobs:
            until(
                lambda job=job: job.over,
                f"end of job {job.job_id}:",
                job,
                timeout_s=timeout_s,
            )
            assert job.facts.state is JobState.COMPLETED, str(job)
            assert self.judge(job, lost_saves=lost_saves).ended, str(job)
        self.recovered()

    def judge(self, job: Trainee, *, lost_saves: int = 0) -> Findings:
        """Check everything that the job's log can prove."""
        try:
            return verify(job.events(), lost_saves=lost_saves)
        except AssertionError as err:
            pytest.fail(f"job {job.job_id}: {err}\n{job}")

    def close(self) -> None:
        """Stop the controller, end the jobs, give nodes and reservation back."""
        try:
            if self.daemon.died() is None:
                self.daemon.stop()
            else:
                self.daemon.kill()
        finally:
            self.slurm.cancel_all()
            for job in self.jobs:
                for start in job.events("start"):
                    _end_stray(int(start["pid"]), job.home)
            for name in self.cluster.node_names:
                argv = ["scontrol", "update", f"nodename={name}", "state=resume"]
                self.cluster.run(argv, check=False)
            self.slurm.client.delete_reservation("synergy-test")
            until(self._all_idle, "all nodes are idle again")

    def _all_idle(self) -> bool:
        done = self.cluster.run(["sinfo", "-h", "-N", "-o", "%T"], check=False)
        return set(done.stdout.split()) == {"idle"}


def _end_stray(pid: int, home: Path) -> None:
    """End a program of ours that its job has left behind; ``home`` is in its command line."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return
    if str(home) in words:
        os.kill(pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class SmallDisk:
    """A file system of a few MiB of its own at ``place``; needs root."""

    def __init__(self, place: Path, mib: int = 2) -> None:
        self.place = place
        place.mkdir(parents=True, exist_ok=True)
        argv = ["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=0755", "tmpfs", str(place)]
        if os.geteuid() or subprocess.run(argv, capture_output=True, check=False).returncode:
            pytest.skip("a small file system can be mounted by root only")

    def fill(self) -> None:
        """Leave no byte free."""
        with (self.place / "filler").open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(b"\0" * 4096)
            except OSError:
                pass

    def free(self) -> None:
        """Give the space back."""
        (self.place / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount it."""
        subprocess.run(["umount", "-l", str(self.place)], check=True)
        shutil.rmtree(self.place, ignore_errors=True)
