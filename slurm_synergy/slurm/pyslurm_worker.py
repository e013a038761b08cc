"""The process in which pyslurm runs. Run as a script; needs the standard library and pyslurm only.

A line of JSON on standard input is a question, a line of JSON on standard output its answer; the
end of the input is the end of the process. It is a process of its own because Slurm's library

* ends the process it is in when slurm.conf cannot be used, at import and later;
* is called with Python's lock held: while slurmctld is silent, no other thread would run for
  ``MessageTimeout``.

What was told of a job is remembered, and a job is told again only when something about it changed.
"""

from __future__ import annotations

import importlib
import json
import operator
import os
import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["SHOWN", "Relay"]

_PLAIN = (
    "id",
    "user_id",
    "name",
    "state",
    "partition",
    "submit_time",
    "state_reason",
    "array_id",
    "array_task_id",
    "array_tasks_parallel",
    "array_tasks_waiting",
    "heterogeneous_id",
    "heterogeneous_offset",
    "eligible_time",
    "start_time",
    "end_time",
    "time_limit",
    "deadline",
    "requeue_count",
    "reservation",
    "comment",
    "admin_comment",
    "num_nodes",
    "max_nodes",
    "ntasks",
    "ntasks_per_node",
    "cpus_per_task",
    "cpus",
    "min_cpus_per_node",
    "memory_per_cpu",
    "memory_per_node",
    "priority",
    "is_requeueable",
    "dependencies",
    "required_nodes",
    "allocated_nodes",
    "constraints",
    "batch_host",
    "is_batch_job",
    "account",
    "qos",
    "working_directory",
    "command",
    "standard_output",
    "exit_code",
    "exit_code_signal",
    "gres_per_node",
)

SHOWN = (*_PLAIN, "user_name", "gres_per_task", "layout")
"""What is told of a job, in this order: pyslurm's names, and three made here."""

_take = operator.attrgetter(*_PLAIN)
# Of what is taken, what is needed here: each look at a job makes the value anew.
_UID, _NODES, _PER_NODE = map(_PLAIN.index, ("user_id", "allocated_nodes", "gres_per_node"))


class Relay:
    """Answers questions with what pyslurm says. One at a time."""

    def __init__(self, module: Any) -> None:
        self._pyslurm = module
        self._told: dict[int, list[Any]] = {}
        self._fresh = True

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """One of ``ok`` (the result), ``refused`` (Slurm's words) and ``broken`` (ours)."""
        try:
            return {"ok": self._do(question)}
        except self._pyslurm.RPCError as err:
            return {"refused": str(err)}
        except (AttributeError, TypeError, ValueError, KeyError) as err:
            return {"broken": repr(err)}

    def _do(self, question: Mapping[str, Any]) -> Any:
        match question["do"]:
            case "jobs":
                return self._jobs(question["partition"])
            case "job":
                return self._job(question["id"])
            case "hold":
                self._pyslurm.Job(question["id"]).hold()
            case "cancel":
                self._pyslurm.Job(question["id"]).cancel()
            case other:
                raise ValueError(f"nothing is known of {other!r}")
        return None

    def _job(self, job_id: int) -> list[Any] | None:
        """One job; ``None`` when pyslurm cannot show it."""
        try:
            return self._shown(self._pyslurm.Job.load(job_id), {})
        except UnicodeDecodeError:
            return None

    def _jobs(self, partition: str | None) -> dict[str, Any]:
        """``ids`` of the jobs of ``partition``, and of them what ``changed``.

        ``odd`` are those that pyslurm cannot show, as a text of theirs is no UTF-8. Those that are
        ``gone`` are forgotten here. ``fresh``: nothing was told before.
        """
        names: dict[int, str] = {}
        ids, changed, odd, all_ids = [], {}, [], set()
        for job in self._pyslurm.Jobs.load().values():
            job_id = int(job.id)
            all_ids.add(job_id)
            if partition is not None and partition not in job.partition.split(","):
                continue
            ids.append(job_id)
            try:
                shown = self._shown(job, names)
            except UnicodeDecodeError:
                self._told.pop(job_id, None)
                odd.append(job_id)
                continue
            if self._told.get(job_id) != shown:
                changed[job_id] = self._told[job_id] = shown
        gone = sorted(self._told.keys() - all_ids)
        for job_id in gone:
            del self._told[job_id]
        fresh, self._fresh = self._fresh, False
        return {
            "ids": sorted(ids),
            "changed": changed,
            "odd": odd,
            "gone": gone,
            "fresh": fresh,
        }

    def _shown(self, job: Any, names: dict[int, str]) -> list[Any]:
        plain = _take(job)
        uid = int(plain[_UID])
        if uid not in names:
            names[uid] = job.user_name  # looks it up in the system each time
        per_task = None if plain[_PER_NODE] else job.tres_per_task
        layout = job.get_resource_layout_per_node() if plain[_NODES] else None
        return [*plain, names[uid], per_task and _gpus(per_task), layout]


def _gpus(tres: Any) -> dict[str, int]:
    return {
        f"gpu:{each.type}" if each.type else "gpu": each.count
        for each in tres.gres.values()
        if each.name == "gpu" or type(each).__name__ == "GPU"
    }


def main() -> int:
    """Answer until nobody asks any more."""
    # What Slurm's library prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)
    pyslurm = importlib.import_module("pyslurm")
    print(json.dumps({"ok": str(pyslurm.__version__)}), file=answers, flush=True)
    relay = Relay(pyslurm)
    for line in sys.stdin:
        print(json.dumps(relay.answer(json.loads(line))), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
