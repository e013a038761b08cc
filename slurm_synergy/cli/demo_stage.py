"""What the demonstration stands on: an embedded cluster, a controller of its own, plain sbatch.

Everything here is the real thing, started as a site would start it; only the machine is small.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from slurm_synergy.cli.control import Target, ask
from slurm_synergy.devcluster import DevCluster, NodeShape
from slurm_synergy.errors import DemoError
from slurm_synergy.slurm.cli_client import CliSlurmClient
from slurm_synergy.slurm.commands import SlurmCommands
from slurm_synergy.slurm.facts import JobFacts

__all__ = [
    "MOTIVATING_NODES",
    "RESUME_NODES",
    "SHAPES",
    "Controller",
    "Stage",
    "last_json_line",
    "tail",
]

SHAPES: tuple[NodeShape, ...] = (
    NodeShape(nodes="v100-[1-2]", gpus=8, cores=24, mem_mib=500_000, gpu_type="v100", sockets=2),
    # Two small machines that are not even alike: the resumed job gets another worker count.
    NodeShape(nodes="small-1", gpus=1, cores=2, mem_mib=16_000, gpu_type="p100"),
    NodeShape(nodes="small-2", gpus=1, cores=3, mem_mib=16_000, gpu_type="p100"),
)
MOTIVATING_NODES = "v100-[1-2]"
RESUME_NODES = "small-[1-2]"

_ROOT = Path(__file__).resolve().parents[2]
_CONTROLLER_READY_S = 30.0
_CONTROLLER_STOP_S = 15.0
_TAIL_LINES = 25
_TAIL_BYTES = 64 * 1024


def tail(path: Path, lines: int = _TAIL_LINES) -> str:
    """The last lines of a text file; a note when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError as err:
        return f"({err.strerror})"
    return "\n".join(text.splitlines()[-lines:])


def last_json_line(path: Path) -> dict[str, object]:
    """The last whole line of ``path`` that is a JSON object; empty when there is none yet."""
    for line in reversed(tail(path).splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    return found
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Controller:
    """A running slurm-synergyd: where jobs reach it, its log, its process."""

    endpoint: str
    config: Path
    log: Path
    process: subprocess.Popen[bytes]

    def check(self) -> None:
        """Raises DemoError, with the log's end, when the controller has ended."""
        status = self.process.poll()
        if status is not None:
            raise DemoError(
                f"the controller ended with exit status {status}; its log ends:\n{tail(self.log)}"
            )


class Stage:
    """A working directory with the examples in it, and an embedded cluster."""

    def __init__(self, work: Path, cluster: DevCluster) -> None:
        self.work = work
        self.cluster = cluster
        self.client = CliSlurmClient(
            SlurmCommands(
                slurm_conf=str(cluster.conf_path), environment={"PATH": self._path_of_commands()}
            )
        )

    @staticmethod
    def _path_of_commands() -> str:
        return f"{os.environ.get('PATH', os.defpath)}:/usr/bin:/usr/sbin:/usr/local/bin"

    def directory(self, name: str) -> Path:
        """A fresh directory below the working directory, with a copy of the examples."""
        source = _ROOT / "examples"
        if not (source / "emulated_train.py").is_file():
            raise DemoError(
                f"{source} is not there; run the demonstration from a checkout with `make demo`"
            )
        made = self.work / name
        made.mkdir()
        shutil.copytree(source, made / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        return made

    @contextlib.contextmanager
    def controller(
        self, directory: Path, *, policy: str, mechanism: str, nodes: str
    ) -> Iterator[Controller]:
        """Run slurm-synergyd over ``nodes`` (a host list) until the end of the block."""
        state = directory / "controller"
        state.mkdir(mode=0o700)
        config, log = directory / "synergy.yaml", directory / "controller.log"
        config.write_text(yaml.safe_dump(self._settings(state, policy, mechanism, nodes)))
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*_daemon_command(), "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment(),
                cwd=directory,
                start_new_session=True,  # Ctrl-C is ours to pass on, after the jobs ended
            )
        try:
            yield self._await_controller(process, state, config, log)
        finally:
            _end(process)
            # The next act's controller has a ledger of its own: what this one made is not its own.
            argv = ["scontrol", "delete", "reservationname=synergy"]
            self.cluster.run(argv, check=False)

    def _settings(self, state: Path, policy: str, mechanism: str, nodes: str) -> dict[str, object]:
        return {
            "mode": "act",
            "metrics": {"listen": None},
            "slurm": {"conf": str(self.cluster.conf_path)},
            "pool": {"nodes": nodes},
            # Quick rounds suit jobs of a minute; a site's jobs of days keep the defaults.
            "scheduling": {
                "policy": policy,
                "mechanism": mechanism,
                "round_s": 30.0,
                "poll_s": 0.5,
                "debounce_s": 0.5,
                "grace_s": 30.0,
            },
            "leases": {
                "listen": "127.0.0.1:0",
                "advertise": None,
                "munge": {"socket": str(self.cluster.munge_socket)},
            },
            # Jobs of a minute are over before they are measured.
            "profiling": {"enabled": False},
            "operators": [os.geteuid()],
            "state_dir": str(state),
        }

    def _await_controller(
        self, process: subprocess.Popen[bytes], state: Path, config: Path, log: Path
    ) -> Controller:
        place = state / "endpoint"
        deadline_s = time.monotonic() + _CONTROLLER_READY_S
        while True:
            endpoint = _first_line(place)
            running = Controller(endpoint=endpoint, config=config, log=log, process=process)
            running.check()
            if endpoint:
                return running
            if time.monotonic() > deadline_s:
                raise DemoError(
                    f"the controller is not ready after {_CONTROLLER_READY_S:g} s; "
                    f"its log ends:\n{tail(log)}"
                )
            time.sleep(0.1)

    def _environment(self) -> dict[str, str]:
        kept = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM_", "SBATCH_", "SRUN_", "SYNERGY_"))
        }
        return {**kept, **self.cluster.env, "PATH": self._job_path()}

    def _job_path(self) -> str:
        # What `source .venv/bin/activate` gives a user, and the wrapper of this checkout.
        scripts = sysconfig.get_path("scripts")
        return f"{_ROOT / 'wrapper'}:{scripts}:{self._path_of_commands()}"

    def submit(
        self,
        controller: Controller,
        directory: Path,
        *arguments: str,
        env: Mapping[str, str] | None = None,
    ) -> JobFacts:
        """``sbatch ARGUMENTS`` in ``directory``, as a user would; the job as Slurm has it.

        Raises DemoError with what sbatch said when it refuses.
        """
        argv = ["sbatch", "--parsable", *arguments]
        done = self.cluster.run(
            argv,
            check=False,
            cwd=directory,
            env={
                "PATH": self._job_path(),
                "SYNERGY_ENDPOINT": controller.endpoint,
                **(env or {}),
            },
        )
        if done.returncode != 0:
            raise DemoError(f"{' '.join(argv)} was refused:\n{done.stderr.strip()}")
        return self.client.read_job(int(done.stdout.split(";")[0]))

    def jobs(self, job_ids: Sequence[int]) -> dict[int, JobFacts]:
        """The jobs as Slurm has them now."""
        wanted = set(job_ids)
        return {job.job_id: job for job in self.client.read_queue() if job.job_id in wanted}

    def cancel(self, job_ids: Sequence[int]) -> None:
        """Cancel what still runs of these jobs."""
        for job_id in job_ids:
            self.client.cancel(job_id)

    def leases(self, controller: Controller) -> dict[int, tuple[int, int]]:
        """Cores and memory in MiB (over all nodes) that each job's lease gives it now.

        The same question as ``synergyctl jobs --json``.
        """
        target = Target(
            endpoint=controller.endpoint,
            source=str(controller.config),
            munge_socket=self.cluster.munge_socket,
        )
        return {
            job["job_id"]: (
                sum(node["cpus"] for node in job["lease"]["nodes"]),
                sum(node["mem_mib"] for node in job["lease"]["nodes"]),
            )
            for job in ask(target, "jobs")["jobs"]
            if job["lease"]
        }


def _daemon_command() -> list[str]:
    stub = _ROOT / "sbin" / "slurm-synergyd"
    if stub.is_file():
        return [sys.executable, str(stub)]
    return [sys.executable, "-m", "slurm_synergy.controller.daemon"]


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_CONTROLLER_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
