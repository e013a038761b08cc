"""Reading traces: which job arrived when, on how many GPUs, with how much work.

A trace is named ``FILE``, ``philly:FILE[,from_h=H][,to_h=H][,jobs=N]``, ``sacct:FILE`` or
``sia:FILE,profiles=DIR[,OPTION=VALUE]`` (see ``sia_workload``). A plain FILE is a CSV with the
columns ``job_id, model, arrival_s, gpus`` and ``iterations`` (of one GPU's batch each) or
``duration_s`` (at the GPU-proportional share); Synergy's recorded traces are of this kind. What is
malformed is a ConfigError that names the file, the line and the column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Protocol

from slurm_synergy.core.model import Node
from slurm_synergy.errors import ConfigError
from slurm_synergy.simulator.csv_rows import MOST, Row, read_rows
from slurm_synergy.simulator.truth import SimulatedJob

__all__ = ["Elastic", "Trace", "TraceJob", "parse_options", "read_trace", "with_models"]

_SIZES = (1, 2, 4, 8, 16)
_MINUTES = (10**1.5, 10**4)
_S_PER_H = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """One job of a trace. Exactly one of ``iterations`` and ``duration_s`` is set, or neither in a
    trace whose jobs are elastic.

    ``duration_s`` is the run time at the GPU-proportional share. ``model`` None means that the
    trace does not tell. ``nodes`` None means free to split.
    """

    job_id: int
    arrival_s: float
    gpus: int
    model: str | None = None
    iterations: int | None = None
    duration_s: float | None = None
    nodes: int | None = None
    user: str = "trace"


class Elastic(Protocol):
    """A workload that makes its own jobs for a pool, as how they run depends on where they do."""

    def on(self, nodes: Sequence[Node], ids: Sequence[int]) -> tuple[SimulatedJob, ...]:
        """The jobs with these ids."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Jobs by arrival, and in words what had to be assumed or was left out to get them.

    ``elastic`` makes the jobs to be simulated where they are more than their rows tell.
    """

    jobs: tuple[TraceJob, ...]
    assumptions: tuple[str, ...] = ()
    elastic: Elastic | None = None


def read_trace(name: str) -> Trace:
    """The trace called ``name``. Raises ConfigError for what cannot be read or understood."""
    kind, _, rest = name.partition(":")
    if kind == "philly" and rest:
        file, *options = rest.split(",")
        return _read_philly(
            Path(file), parse_options(",".join(options), ("from_h", "to_h", "jobs"))
        )
    if kind == "sacct" and rest:
        return _read_sacct(Path(rest))
    if kind == "sia" and rest:
        # It needs TraceJob, and measured tables, which need numpy.
        from slurm_synergy.simulator.sia_workload import OPTIONS, read_sia

        file, *options = rest.split(",")
        return read_sia(Path(file), parse_options(",".join(options), OPTIONS))
    if ":" in name and not Path(name).exists():
        raise ConfigError(
            "is no kind of trace that is known, and no file",
            key=name,
            remedy="give FILE, philly:FILE, sacct:FILE or sia:FILE",
        )
    return _read_csv(Path(name))


def parse_options(text: str, known: Sequence[str]) -> dict[str, str]:
    """``key=value,key=value`` as a mapping. Raises ConfigError naming the known keys."""
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in known or key in found:
            raise ConfigError(
                "is not understood",
                key=part,
                remedy=f"give key=value, each once, of {', '.join(known)}",
            )
        found[key] = value
    return found


def _by_arrival(jobs: list[TraceJob], path: Path) -> tuple[TraceJob, ...]:
    if not jobs:
        raise ConfigError(
            "has no job that can be simulated",
            file=str(path),
            remedy="add rows, or choose more of them",
        )
    return tuple(sorted(jobs, key=lambda job: (job.arrival_s, job.job_id)))


# job lists -------------------------------------------------------------------------------------


def _read_csv(path: Path) -> Trace:
    jobs: list[TraceJob] = []
    lines: dict[int, int] = {}
    for row in read_rows(path, ",", ("job_id", "model", "arrival_s", "gpus")):
        job_id = row.integer("job_id", 0)
        if job_id in lines:
            raise row.error("job_id", f"is the id of line {lines[job_id]} already")
        lines[job_id] = row.line
        by_iterations = "iterations" in row.cells
        if not by_iterations and "duration_s" not in row.cells:
            raise ConfigError(
                "has neither a column iterations nor duration_s",
                file=str(path),
                key="line 1",
                remedy="add one of them",
            )
        jobs.append(
            TraceJob(
                job_id=job_id,
                arrival_s=row.number("arrival_s", 0.0),
                gpus=row.integer("gpus", 1),
                model=row.text("model"),
                iterations=row.integer("iterations", 1) if by_iterations else None,
                duration_s=None if by_iterations else row.number("duration_s", 1e-3),
            )
        )
    return Trace(jobs=_by_arrival(jobs, path))


def _read_philly(path: Path, options: Mapping[str, str]) -> Trace:
    """The Philly job list as the paper uses it: plausible run times, sizes up to 16 GPUs."""
    from_h, to_h = (
        _positive(options, key, default) for key, default in (("from_h", 0.0), ("to_h", 1e9))
    )
    most = int(_positive(options, "jobs", 1e9))
    rows = [
        (row.moment("timestamp"), row.number("duration", 0.0), row.integer("num_gpus", 1))
        for row in read_rows(path, ",", ("timestamp", "duration", "num_gpus"))
    ]
    first = min((when for when, _, _ in rows), default=None)
    jobs: list[TraceJob] = []
    for when, duration_s, gpus in sorted(rows):
        hours = (when - first).total_seconds() / _S_PER_H if first else 0.0
        usual = gpus in _SIZES and _MINUTES[0] < duration_s / 60 < _MINUTES[1]
        if usual and from_h <= hours < to_h and len(jobs) < most:
            jobs.append(
                TraceJob(
                    job_id=len(jobs) + 1,
                    arrival_s=(hours - from_h) * _S_PER_H,
                    gpus=gpus,
                    duration_s=duration_s,
                )
            )
    left_out = (
        f"{len(jobs)} of {len(rows)} jobs: those of {', '.join(map(str, _SIZES))} GPUs that ran "
        f"{_MINUTES[0]:.1f} to {_MINUTES[1]:.0f} minutes, hours {from_h:g} to {to_h:g}"
    )
    share = "run times in the trace are taken as those at the GPU-proportional share"
    return Trace(jobs=_by_arrival(jobs, path), assumptions=(left_out, share))


def _positive(options: Mapping[str, str], key: str, default: float) -> float:
    try:
        value = float(options.get(key, default))
    except ValueError:
        value = -1.0
    if not 0 <= value <= MOST:
        raise ConfigError(
            f"is not a number from 0 to {MOST:g}",
            key=key,
            value=options[key],
            remedy=f"give one, or leave {key} out",
        )
    return value


# Slurm's accounting ----------------------------------------------------------------------------

_ELAPSED = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?$")
_GPUS = re.compile(r"(?:^|,)gres/gpu=(\d+)")
_TYPED_GPUS = re.compile(r"(?:^|,)gres/gpu:[^=,]+=(\d+)")
_NODES = re.compile(r"(?:^|,)node=(\d+)")


def _read_sacct(path: Path) -> Trace:
    """``sacct -P -o JobID,User,Submit,Elapsed,AllocTRES`` (more columns do no harm)."""
    found: list[tuple[datetime, float, int, int | None, str]] = []
    steps, no_gpus, never_ran = 0, 0, 0
    for row in read_rows(path, "|", ("JobID", "Submit", "Elapsed", "AllocTRES")):
        if "." in row.text("JobID"):
            steps += 1
            continue
        tres = row.cells.get("AllocTRES") or ""
        elapsed_s = _elapsed_s(row)
        if not elapsed_s or not tres:
            never_ran += 1
        elif not (gpus := _gpus(tres)):
            no_gpus += 1
        else:
            nodes = _NODES.search(tres)
            count = int(nodes.group(1)) if nodes else None
            even = count if count and gpus % count == 0 else None
            user = (row.cells.get("User") or "").strip() or "unknown"
            found.append((row.moment("Submit"), elapsed_s, gpus, even, user))
    if not found and (no_gpus or never_ran):
        raise ConfigError(
            f"has no job that can be simulated: {no_gpus} without gres/gpu in AllocTRES, "
            f"{never_ran} that never ran",
            file=str(path),
            remedy="give the output of sacct for GPU jobs; GPUs are accounted for while "
            "AccountingStorageTRES of slurm.conf has gres/gpu",
        )
    found.sort(key=lambda one: one[0])
    jobs = [
        TraceJob(
            job_id=index,
            arrival_s=(submitted - found[0][0]).total_seconds(),
            gpus=gpus,
            duration_s=elapsed_s,
            nodes=nodes,
            user=user,
        )
        for index, (submitted, elapsed_s, gpus, nodes, user) in enumerate(found, start=1)
    ]
    left_out = (
        f"left out: {steps} steps, {no_gpus} jobs without GPUs, {never_ran} that never ran; jobs "
        "are numbered by submission"
    )
    share = "elapsed times are taken as those at the GPU-proportional share"
    return Trace(jobs=_by_arrival(jobs, path), assumptions=(left_out, share))


def _elapsed_s(row: Row) -> float:
    match = _ELAPSED.match(row.text("Elapsed"))
    if match is None:
        raise row.error("Elapsed", "is not a duration like 1-02:03:04")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24.0 + hours) * 60 + minutes) * 60 + seconds


def _gpus(tres: str) -> int:
    """GPUs of a TRES list; Slurm may list them untyped, by type, or both ways."""
    untyped = _GPUS.search(tres)
    if untyped:
        return int(untyped.group(1))
    return sum(int(count) for count in _TYPED_GPUS.findall(tres))


def with_models(trace: Trace, choose: Callable[[], str], assumption: str) -> Trace:
    """``trace`` with a model for each job that names none, and the assumption stated."""
    if all(job.model for job in trace.jobs):
        return trace
    jobs = tuple(job if job.model else replace(job, model=choose()) for job in trace.jobs)
    return replace(trace, jobs=jobs, assumptions=(*trace.assumptions, assumption))
