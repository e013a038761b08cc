"""An elastic training on the embedded Slurm: a scripted controller, a job, and what they left."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, ControllerProcess, Slurm

from slurm_synergy.cli.control import Target, ask
from slurm_synergy.devcluster import DevCluster
from slurm_synergy.slurm.facts import JobFacts, JobState

__all__ = ["SRUN", "ElasticJob", "ScriptedController", "Step", "until"]

SAMPLES, BATCH, EPOCHS = 1320, 12, 2
STEPS = EPOCHS * SAMPLES // BATCH
PROGRAM = ROOT / "examples" / "train_distributed.py"
SRUN = ROOT / "wrapper" / "synergy-srun"


def until(
    holds: Callable[[], object], what: Callable[[], str], *, timeout_s: float = 180.0
) -> None:
    """Poll until ``holds``; fails with ``what`` it makes then."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline_s:
            pytest.fail(f"not within {timeout_s:g} s: {what()}")
        time.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Step:
    """One configuration of the script."""

    gpu_type: str
    gpus: int
    nodes: int = 1
    batch: tuple[int, int, int] | None = None

    def as_json(self) -> dict[str, object]:
        """As the scripted policy reads it."""
        said: dict[str, object] = {
            "gpu_type": self.gpu_type,
            "gpus": self.gpus,
            "nodes": self.nodes,
        }
        return said | ({"batch": list(self.batch)} if self.batch else {})


class ScriptedController(ControllerProcess):
    """The controller with the policy ``scripted``, on one port over restarts."""

    entry = Path(__file__).with_name("scripted_daemon.py")

    def __init__(self, cluster: DevCluster, home: Path, **settings: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        scheduling = {"policy": "scripted", "mechanism": "proportional", "round_s": 2.0}
        scheduling |= {"poll_s": 0.3, "debounce_s": 0.1, "grace_s": 90.0, "retry_backoff_s": 1.0}
        scheduling |= {"start_deadline_s": 60.0, **settings.pop("scheduling", {})}
        leases = {"listen": f"127.0.0.1:{port}", "lease_s": 15.0}
        super().__init__(cluster, home, scheduling=scheduling, leases=leases, **settings)
        self.script = home / "script.json"
        self.script.write_text("{}", encoding="utf-8")
        self.fault = ""

    def say(self, **steps: Step) -> None:
        """From now on these jobs, by name, shall run on that."""
        text = json.dumps({name: step.as_json() for name, step in steps.items()})
        fresh = self.script.with_suffix(".new")
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(self.script)

    def shown(self, job_id: int) -> dict[str, Any]:
        """The job as ``synergyctl jobs`` shows it."""
        socket_path = self.cluster.munge_socket
        target = Target(endpoint=self.endpoint, source="test", munge_socket=socket_path)
        return next(job for job in ask(target, "jobs")["jobs"] if job["job_id"] == job_id)

    def variables(self) -> dict[str, str]:
        """See ``ControllerProcess``."""
        fault = {"SYNERGY_FAULT_AT": self.fault} if self.fault else {}
        return {"SYNERGY_SCRIPT": str(self.script), **fault}

    def died(self) -> bool:
        """Whether it has ended by itself."""
        return self._process is not None and self._process.poll() is not None


class ElasticJob:
    """A DistributedDataParallel training whose GPUs change, and its log."""

    def __init__(
        self, slurm: Slurm, daemon: ControllerProcess, python: str, name: str = "elastic"
    ) -> None:
        self._slurm, self._daemon, self._python, self.name = slurm, daemon, python, name
        self.out = slurm.home / f"{name}.jsonl"
        self.checkpoints = slurm.home / f"{name}-checkpoints"
        self.job_id = 0

    def submit(
        self,
        *options: str,
        hints: str = "elastic=scale,max_gpus=8",
        program: Sequence[object] = (),
    ) -> ElasticJob:
        """Submit it, as a job of one GPU unless ``options`` say else; or another ``program``."""
        exports = {
            "SYNERGY_ENDPOINT": self._daemon.endpoint,
            "SYNERGY_MUNGE_SOCKET": str(self._daemon.cluster.munge_socket),
            "SYNERGY_CHECKPOINT_DIR": str(self.checkpoints),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        lines = "".join(f"export {key}='{value}'\n" for key, value in exports.items())
        words = [PROGRAM, f"--samples={SAMPLES}", f"--batch-size={BATCH}", f"--epochs={EPOCHS}"]
        words += ["--workers=0", "--step-seconds=0.1", f"--out={self.out}"]
        words = " ".join(map(str, program or words))
        self.job_id = self._slurm.submit(
            f"--job-name={self.name}",
            "--gres=gpu:1",
            "--mem=4000M",
            "--open-mode=append",
            f"--comment=synergy:{hints},grace_s=90",
            *options,
            script=f"{lines}{SRUN} {self._python} {words}\n",
            wrapped=False,
        )
        return self

    @property
    def facts(self) -> JobFacts:
        """The job as Slurm shows it now."""
        return self._slurm.job(self.job_id)

    def lines(self) -> list[dict[str, Any]]:
        """What the ranks wrote so far, one entry a step; a line being written is left out."""
        if not self.out.exists():
            return []
        text = self.out.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def published(self) -> list[str]:
        """The complete checkpoints, oldest first."""
        if not self.checkpoints.is_dir():
            return []
        names = os.listdir(self.checkpoints)
        return sorted(name for name in names if re.fullmatch(r"step-\d+", name))

    def trains_on(self, step: Step, *, run: int, steps: int = 3) -> ElasticJob:
        """Wait until its ``run``-th run trains on that, with a rank for each GPU."""

        def reached() -> bool:
            if self.facts.state.finished:
                pytest.fail(f"it ended before it ran on {step}: {self}")
            lines = [line for line in self.lines() if line["run"] == run]
            return len(lines) >= steps and {line["ranks"] for line in lines} == {step.gpus}

        until(reached, lambda: f"run {run} on {step}: {self}")
        facts = self.facts
        held = {part.gpu_type for part in facts.allocation}
        assert held == {step.gpu_type}, str(self)
        assert len(facts.allocation) == step.nodes, str(self)
        assert sum(len(part.gpu_ids) for part in facts.allocation) == step.gpus, str(self)
        return self

    def ends_well(self) -> ElasticJob:
        """Wait for its end."""
        until(lambda: self.facts.state.finished, lambda: f"its end: {self}")
        assert self.facts.state is JobState.COMPLETED, str(self)
        return self

    def worlds(self) -> list[int]:
        """The number of ranks of each run, in order."""
        found: dict[int, int] = {}
        for line in self.lines():
            found[line["run"]] = line["ranks"]
        return [found[run] for run in sorted(found)]

    def check_nothing_lost(self, samples: int = SAMPLES, steps: int | None = STEPS) -> None:
        """Every step once and in order, so every stop left a checkpoint; every sample once.

        ``steps`` None: as many as there are.
        """
        lines = self.lines()
        assert [line["step"] for line in lines] == list(range(1, (steps or len(lines)) + 1)), str(
            self
        )
        for epoch in range(lines[-1]["epoch"] + 1):
            seen = [i for line in lines if line["epoch"] == epoch for i in line["samples"]]
            assert sorted(seen) == list(range(samples)), str(self)

    def __str__(self) -> str:
        last = [{k: v for k, v in line.items() if k != "samples"} for line in self.lines()[-3:]]
        return (
            f"job {self.job_id}: {self.facts}\nlast steps: {last}\nit printed:\n"
            f"{self._slurm.output(self.job_id)[-3000:]}\nthe controller said:\n"
            f"{self._daemon.log[-4000:]}"
        )
