"""A module like pyslurm 25.11.2 that answers with what pyslurm 25.11.2 answered.

What its dump lacks, the layout of running jobs, is put together from the same moment's text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from captures import answer

from slurm_synergy.errors import SlurmCommandError, SlurmParseError
from slurm_synergy.slurm.commands import classify
from slurm_synergy.slurm.facts import JobFacts
from slurm_synergy.slurm.pyslurm_worker import Relay

__all__ = ["FakePyslurm", "InThisProcess", "RPCError"]


class RPCError(Exception):
    """As pyslurm raises it."""


class InThisProcess:
    """pyslurm's process without the process: what goes through its pipes is the same."""

    def __init__(self, module: FakePyslurm) -> None:
        self._module, self._relay = module, Relay(module)
        self.sent = 0
        self.closed = 0

    def ask(self, question: Mapping[str, Any], *, timeout_s: float) -> Any:
        answer = json.dumps(self._relay.answer(json.loads(json.dumps(question))))
        self.sent = len(answer)
        told = json.loads(answer)
        if "broken" in told:
            self.close()
            raise SlurmParseError("pyslurm", told["broken"])
        if "refused" in told:
            said = told["refused"]
            raise SlurmCommandError(("pyslurm",), 1, said, kind=classify(said))
        return told["ok"]

    def close(self) -> None:
        self.closed += 1
        self._relay = Relay(self._module)


class FakePyslurm:
    """The parts of the module that are used. ``failing`` is raised by every call while set."""

    __version__ = "25.11.2"
    RPCError = RPCError

    def __init__(self, layouts: Mapping[int, JobFacts]) -> None:
        dump = json.loads(answer("25.11.2", "pyslurm_jobs").stdout)
        self.jobs = {int(job_id): _job(row, layouts) for job_id, row in dump.items()}
        self.failing: list[str] = []
        self.done: list[tuple[str, int]] = []
        self.Jobs = SimpleNamespace(load=self._load_all)
        self.Job = _JobClass(self)

    def _load_all(self) -> dict[int, Any]:
        self._maybe_fail()
        return self.jobs

    def _maybe_fail(self) -> None:
        if self.failing:
            raise RPCError(self.failing.pop(0))


class _JobClass:
    def __init__(self, module: FakePyslurm) -> None:
        self._module = module

    def load(self, job_id: int) -> Any:
        self._module._maybe_fail()
        if job_id not in self._module.jobs:
            raise RPCError(_message("pyslurm_err_job_invalid"))
        return self._module.jobs[job_id]

    def __call__(self, job_id: int) -> Any:
        def act(what: str) -> None:
            self._module._maybe_fail()
            if job_id not in self._module.jobs and what == "hold":
                raise RPCError(_message("pyslurm_err_hold_invalid"))
            # cancel() of an unknown job raises nothing.
            self._module.done.append((what, job_id))

        return SimpleNamespace(hold=lambda: act("hold"), cancel=lambda: act("cancel"))


def _message(capture: str) -> str:
    return str(json.loads(answer("25.11.2", capture).stdout)["msg"])


def _job(row: Mapping[str, Any], layouts: Mapping[int, JobFacts]) -> Any:
    job = SimpleNamespace(**row)
    job.tres_per_task = row["tres_per_task"] and SimpleNamespace(
        gres={
            name: SimpleNamespace(**each)
            for name, each in row["tres_per_task"].get("gres", {}).items()
        }
    )
    facts = layouts.get(int(row["id"]))
    parts = facts.allocation if facts else ()
    layout = {
        part.node: {
            "cpu_ids": ",".join(map(str, part.cpu_ids)),
            "memory": part.mem_mib,
            "gres": part.gpu_ids
            and {
                f"gpu:{part.gpu_type}": {
                    "count": len(part.gpu_ids),
                    "indexes": ",".join(map(str, part.gpu_ids)),
                }
            },
        }
        for part in parts
    }
    job.get_resource_layout_per_node = lambda: layout
    return job
