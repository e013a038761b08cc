"""Run the real controller against an embedded cluster, and look at what Slurm made of it."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from forks import Forked, Forks

from slurm_synergy.config import Settings, load_settings
from slurm_synergy.devcluster import DevCluster
from slurm_synergy.slurm.cli_client import CliSlurmClient
from slurm_synergy.slurm.commands import SlurmCommands
from slurm_synergy.slurm.facts import JobFacts

__all__ = ["ControllerProcess", "Slurm", "controller", "slurm"]

ROOT = Path(__file__).resolve().parents[2]

# Each look at a job is a process: with several tests at a time they are to leave them the cores.
_LOOK_AGAIN_S = 0.25

# A script that names the wrapper is admitted as one whose tasks obey leases. These tests need only
# its allocation, so nothing calls it.
WRAPPED = "if false; then synergy-srun true; fi\n"


@functools.cache
def _controllers() -> Forks:
    """Where controllers are forked, as long as this process lives."""
    place = Path(tempfile.mkdtemp(prefix="synergy-controllers-"))
    made = Forks(place, "slurm_synergy.cli.synergyd", "slurm_synergy.controller.daemon")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    atexit.register(made.close)
    return made


class ControllerProcess:
    """``slurm-synergyd`` as a process of its own, with a state directory that outlives it.

    Settings are fast ones for tests; ``settings`` (nested like the file) change them. The process
    is a fork of one that has imported the controller already, or, ``forked`` being False, begins
    like every program.
    """

    forked = True
    entry = ROOT / "sbin" / "slurm-synergyd"

    def __init__(self, cluster: DevCluster, home: Path, **settings: Any) -> None:
        self.cluster, self.home = cluster, home
        self.config = home / "synergy.yaml"
        self.log_path = home / "controller.log"
        self._process: subprocess.Popen[str] | Forked | None = None
        self.configure(**settings)

    def configure(self, **settings: Any) -> None:
        """Write the settings file anew; a running controller needs ``reload``."""
        wanted: dict[str, Any] = {
            "mode": "act",
            "metrics": {"listen": None},
            "cluster": {"controller_name": "test"},
            "slurm": {"conf": str(self.cluster.conf_path)},
            # Without real-1, whose cores are the machine's and few.
            "pool": {"nodes": "v100-[1-4],a100-[1-2]"},
            "scheduling": {
                "policy": "fifo",
                "mechanism": "proportional",
                "round_s": 20.0,
                "poll_s": 0.5,
                "debounce_s": 0.2,
                "start_deadline_s": 20.0,
                "grace_s": 3.0,
                "retry_backoff_s": 2.0,
            },
            "leases": {
                "listen": "127.0.0.1:0",
                "lease_s": 10.0,
                "munge": {"socket": str(self.cluster.munge_socket)},
            },
            "state_dir": str(self.home / "state"),
            "log_level": "debug",
        }
        for section, value in settings.items():
            if isinstance(value, Mapping):
                wanted[section] = {**wanted.get(section, {}), **value}
            else:
                wanted[section] = value
        self.config.write_text(yaml.safe_dump(wanted), encoding="utf-8")

    @property
    def settings(self) -> Settings:
        """The settings as the controller reads them."""
        return load_settings(self.config)

    @property
    def endpoint(self) -> str:
        """Where leases are served."""
        return (self.home / "state" / "endpoint").read_text(encoding="utf-8").strip()

    @property
    def log(self) -> str:
        """Everything that the controller said so far."""
        return self.log_path.read_text(encoding="utf-8") if self.log_path.exists() else ""

    @property
    def journal(self) -> list[dict[str, Any]]:
        """The rounds so far, oldest first."""
        path = self.home / "state" / "journal.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def variables(self) -> dict[str, str]:
        """Variables of its environment beside those of this process."""
        return {}

    def command(self, *options: str) -> list[str]:
        """The command line of the controller, one that is no fork."""
        return [sys.executable, *self._words(*options)]

    def _words(self, *options: str) -> list[str]:
        return [str(self.entry), "--config", str(self.config), *options]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.variables()}

    def start(self, *options: str) -> None:
        """Start it and wait until it serves leases."""
        (self.home / "state" / "endpoint").unlink(missing_ok=True)
        if self.forked:
            self._process = _controllers().start(
                self._words(*options), self._environment(), log=self.log_path
            )
        else:
            with self.log_path.open("a", encoding="utf-8") as log:
                self._process = subprocess.Popen(
                    self.command(*options),
                    env=self._environment(),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
        # Importing it takes a second of a core's time, which a busy machine may stretch a lot.
        deadline_s = time.monotonic() + 90
        while not (self.home / "state" / "endpoint").exists():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                pytest.fail(f"the controller did not start:\n{self.log}")
            time.sleep(0.05)

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run it to its end, as with ``--once``."""
        if not self.forked:
            return subprocess.run(
                self.command(*options), capture_output=True, text=True, timeout=60, check=False
            )
        process = _controllers().start(self._words(*options), self._environment())
        output, errors = process.communicate(60)
        return subprocess.CompletedProcess(process.args, process.wait(), output, errors)

    def reload(self) -> None:
        """Have it read its settings again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    def stop(self) -> int | None:
        """Stop it in good order; its exit status."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        process.send_signal(how)
        try:
            return process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            pytest.fail(f"the controller did not stop:\n{self.log}")


class Slurm:
    """Jobs of a test: submitted to an embedded cluster, looked at, cancelled at the end."""

    def __init__(self, cluster: DevCluster, home: Path) -> None:
        self.cluster, self.home = cluster, home
        self.client = CliSlurmClient(SlurmCommands(slurm_conf=str(cluster.conf_path)))
        self.jobs: list[int] = []

    def submit(
        self,
        *options: str,
        script: str = "sleep 300\n",
        wrapped: bool = True,
        partition: str = "synergy",
    ) -> int:
        """Submit a batch script; its job id."""
        argv = ["sbatch", "--parsable", f"--partition={partition}", f"--output={self.home}/%j.out"]
        text = "#!/bin/bash\n" + (WRAPPED if wrapped else "") + script
        done = self.cluster.run([*argv, *options], input=text, cwd=self.home)
        self.jobs.append(int(done.stdout.split(";")[0]))
        return self.jobs[-1]

    def job(self, job_id: int) -> JobFacts:
        """The job as Slurm shows it now."""
        return self.client.read_job(job_id)

    def wait(
        self, job_id: int, holds: Callable[[JobFacts], bool], *, timeout_s: float = 60.0
    ) -> JobFacts:
        """Poll until ``holds`` is true of the job."""
        deadline_s = time.monotonic() + timeout_s
        while not holds(facts := self.job(job_id)):
            if time.monotonic() > deadline_s:
                pytest.fail(f"not within {timeout_s:g} s; the job is {facts}")
            time.sleep(_LOOK_AGAIN_S)
        return facts

    def running(self, job_id: int, *, timeout_s: float = 60.0) -> JobFacts:
        """Wait until the job runs."""
        return self.wait(job_id, lambda facts: facts.running, timeout_s=timeout_s)

    def output(self, job_id: int) -> str:
        """What the job printed so far."""
        path = self.home / f"{job_id}.out"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def cancel_all(self) -> None:
        """Cancel the jobs of this test and wait until their resources are free."""
        for job_id in self.jobs:
            self.client.cancel(job_id)
        mine = set(self.jobs)
        deadline_s = time.monotonic() + 40
        while any(
            job.job_id in mine and (job.completing or not job.state.finished)
            for job in self.client.read_queue()
        ):
            if time.monotonic() > deadline_s:
                pytest.fail(f"jobs {sorted(mine)} do not end")
            time.sleep(0.1)


@pytest.fixture
def slurm(cluster: DevCluster, tmp_path: Path) -> Iterator[Slurm]:
    """Submit and look at jobs on the shared cluster; they are cancelled after the test."""
    tmp_path.chmod(0o755)
    jobs = Slurm(cluster, tmp_path)
    yield jobs
    jobs.cancel_all()


@pytest.fixture
def controller(
    cluster: DevCluster, slurm: Slurm, tmp_path: Path
) -> Iterator[Callable[..., ControllerProcess]]:
    """A factory: a controller for the shared cluster, not started yet; stopped after the test.

    Its reservation is removed too, so that the next test's controller finds the pool unreserved.
    """
    made: list[ControllerProcess] = []

    def make(**settings: Any) -> ControllerProcess:
        home = tmp_path / f"controller-{len(made)}"
        home.mkdir()
        made.append(ControllerProcess(cluster, home, **settings))
        return made[-1]

    yield make
    for one in made:
        one.stop()
    slurm.cancel_all()
    for one in made:
        slurm.client.delete_reservation(one.settings.reservation_name)
