"""Running the cells of an experiment as an array of Slurm jobs, by submitit.

The array's tasks write their results into the experiment's directory, which must be on storage
that the nodes share. Whether a task is over is read from its result, from what submitit left, and
from the queue: that needs no accounting.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slurm_synergy.cli.experiment_run import Done, work
from slurm_synergy.errors import ConfigError, SynergyError
from slurm_synergy.simulator.cells import Cell, Damaged, load

__all__ = ["parse_options", "slurm"]

_POLL_S = 2.0
_VANISHED_S = 60.0
_COMMAND_S = 60.0
_MOST = 1e9
_DEFAULTS: Mapping[str, Any] = {"timeout_min": 240, "mem_gb": 2, "cpus_per_task": 1}
_WHOLE = ("timeout_min", "cpus_per_task", "mem_gb")


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """``KEY=VALUE`` as submitit's parameters. Raises ConfigError."""
    found = dict(_DEFAULTS)
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(
                "is not KEY=VALUE", key="--slurm-option", value=text, remedy="e.g. partition=cpu"
            )
        if key in _WHOLE:
            if not value.isdecimal() or not 0 < float(value) <= _MOST:
                raise ConfigError(
                    "is not a whole number above 0",
                    key=f"--slurm-option {key}",
                    value=value,
                    remedy=f"e.g. {key}={_DEFAULTS[key]}",
                )
            found[key] = int(value)
        else:
            found[key if key.startswith("slurm_") else f"slurm_{key}"] = value
    return found


def slurm(
    cells: Sequence[Cell], directory: Path, at_once: int, options: Mapping[str, Any]
) -> Iterator[Done]:
    """The cells as one job array, ``at_once`` tasks at a time. Raises SynergyError.

    Tasks that still run when the caller stops are cancelled.
    """
    executor = _executor(directory, {**options, "slurm_array_parallelism": at_once})
    try:
        with executor.batch():
            jobs = [executor.submit(work, cell, directory) for cell in cells]
    except Exception as err:  # submitit raises its own errors, and subprocess's
        raise SynergyError(f"Slurm did not take the jobs: {err}") from err
    waiting = dict(zip(cells, jobs, strict=True))
    gone_since: dict[Cell, float] = {}
    try:
        while waiting:
            queue = _queue()
            for cell in list(waiting):
                done = _look(cell, waiting[cell], directory, queue, gone_since)
                if done is not None:
                    del waiting[cell]
                    yield done
            if waiting:
                time.sleep(_POLL_S)
    finally:
        for job in waiting.values():
            job.cancel(check=False)


def _executor(directory: Path, parameters: Mapping[str, Any]) -> Any:
    try:
        import submitit
    except ImportError as err:
        raise ConfigError(
            "needs the package submitit, which is not installed",
            key="--slurm",
            remedy="pip install 'slurm-synergy[sweep]', or leave --slurm out",
        ) from err
    try:
        executor = submitit.AutoExecutor(folder=directory / "slurm" / "%j", cluster="slurm")
        executor.update_parameters(slurm_job_name="synergy-experiment", **parameters)
    except (RuntimeError, TypeError, ValueError, NameError) as err:
        raise ConfigError(f"cannot be used: {err}", key="--slurm") from err
    return executor


def _look(
    cell: Cell,
    job: Any,
    directory: Path,
    queue: frozenset[str] | None,
    gone_since: dict[Cell, float],
) -> Done | None:
    """The cell's end, or None while it may still come to one."""
    try:
        if load(cell, directory) is not None:
            return Done(cell=cell)
    except Damaged as err:
        return Done(cell=cell, error=str(err))
    if job.paths.result_pickle.exists():
        return Done(cell=cell, error=_result(job))
    if queue is None or job.job_id in queue:
        gone_since.pop(cell, None)
        return None
    if time.monotonic() - gone_since.setdefault(cell, time.monotonic()) < _VANISHED_S:
        return None  # shared storage shows files late
    return Done(cell=cell, error=f"its job {job.job_id} ended without a result: {job.paths.stderr}")


def _result(job: Any) -> str:
    """What a task returned or raised."""
    try:
        return str(job.result()) or "its result is not in the directory: is it on shared storage?"
    except Exception as err:  # noqa: BLE001 - whatever the task raised
        return str(err)


def _queue() -> frozenset[str] | None:
    """The ids of the tasks that are in the queue, ``ARRAY_TASK``; None when Slurm is silent."""
    argv = ["squeue", "--me", "--noheader", "--array", "--format=%i|%F_%K"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_COMMAND_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return frozenset(name for line in done.stdout.splitlines() for name in line.split("|"))
