"""Sia's workloads (SOSP '23) as traces.

A workload is a CSV with the columns ``name, time`` (seconds from the start), ``application``,
``num_replicas`` (GPUs) and ``batch_size`` (total); what a job costs is not in it. ``profiles`` is
the directory of the artifact's measurements, a directory for each application: how many steps a
training at that batch size takes (``validation-BATCH.csv``, column iteration), and how long a step
takes on that many GPUs of ``gpu_type``, ``per_node`` to a node. That is the baseline in which
nobody chooses: every job is rigid, on its tuned number of GPUs.

With ``elastic=full`` GPUs and batch size are for the scheduler to choose (``sia_jobs``). Then
``rigid`` and ``scale`` are the parts of jobs that are less elastic, ``profiling`` (``oracle``,
``ledger``, ``bootstrap``, ``none``) is what is known of a job on its arrival, and ``pipelines``
(``synergy``, ``dealt``) gives them input pipelines. Rigid jobs ask for what the workload lists,
with ``tuned=TYPE`` for what is good on GPUs of that type (``tuned_jobs``); ``rigid=1`` is the
workload of schedulers that choose neither GPUs nor batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_synergy.errors import ConfigError
from slurm_synergy.simulator.csv_rows import MOST, Row, read_rows
from slurm_synergy.simulator.traces import Trace, TraceJob

__all__ = ["OPTIONS", "SiaJob", "read_sia", "read_workload"]

_RIGID_OPTIONS = ("gpu_type", "per_node")
_ELASTIC_OPTIONS = ("rigid", "scale", "profiling", "pipelines", "tuned")
OPTIONS = ("profiles", "elastic", *_RIGID_OPTIONS, *_ELASTIC_OPTIONS)
"""What can be said of a workload after its name."""

_DEFAULT_TYPE, _DEFAULT_PER_NODE = "aws", 4
_MOST_PASSES = 64
_COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiaJob:
    """One job of a workload; ``line`` is where it stands in its file."""

    name: str
    submitted_s: float
    application: str
    gpus: int
    batch: int
    line: int


def read_workload(path: Path) -> tuple[SiaJob, ...]:
    """The jobs of a workload, in its order. Raises ConfigError naming file, line and column."""
    jobs: list[SiaJob] = []
    lines: dict[str, int] = {}
    for row in read_rows(path, ",", _COLUMNS):
        name = row.text("name")
        if name in lines:
            raise row.error("name", f"is the name of line {lines[name]} already")
        lines[name] = row.line
        jobs.append(_job(row, name))
    if not jobs:
        raise ConfigError("has no job", file=str(path), remedy="name a workload with rows")
    return tuple(jobs)


def _job(row: Row, name: str) -> SiaJob:
    application = row.text("application")
    if "/" in application or application.startswith("."):
        raise row.error("application", "must be the name of a directory of profiles")
    gpus, batch = row.integer("num_replicas", 1), row.integer("batch_size", 1)
    if batch < gpus:
        raise row.error("batch_size", f"is less than a sample for each of {gpus} GPUs")
    return SiaJob(
        name=name,
        submitted_s=row.number("time", 0.0),
        application=application,
        gpus=gpus,
        batch=batch,
        line=row.line,
    )


def read_sia(path: Path, options: Mapping[str, str]) -> Trace:
    """The workload as a trace. Raises ConfigError."""
    jobs = read_workload(path)
    profiles = Path(options["profiles"]) if "profiles" in options else _beside(path)
    if profiles is None:
        raise ConfigError(
            f"tells when {len(jobs)} jobs arrive and on how many GPUs, but not how long they run",
            file=str(path),
            key="--trace",
            remedy="add profiles=DIR, the artifact's directory of measured applications",
        )
    is_elastic = _is_elastic(options)
    for key in _RIGID_OPTIONS if is_elastic else _ELASTIC_OPTIONS:
        if key in options:
            raise ConfigError(
                f"has no meaning for {'elastic' if is_elastic else 'rigid'} jobs",
                key=key,
                value=options[key],
                remedy="remove it" if is_elastic else "add elastic=full",
            )
    if is_elastic:
        from slurm_synergy.simulator.sia_jobs import elastic_trace

        return elastic_trace(jobs, profiles, path, options)
    return _rigid_trace(jobs, profiles, path, options)


def _beside(path: Path) -> Path | None:
    """The directory ``profiles`` beside ``workloads``, as in the artifact; None without one."""
    for above in path.absolute().parents:
        if above.name == "workloads" and (above.parent / "profiles").is_dir():
            return above.parent / "profiles"
    return None


def _is_elastic(options: Mapping[str, str]) -> bool:
    word = options.get("elastic", "rigid")
    if word not in ("full", "rigid"):
        raise ConfigError(
            "is neither full nor rigid", key="elastic", value=word, remedy="give elastic=full"
        )
    return word == "full"


def _rigid_trace(
    jobs: tuple[SiaJob, ...], profiles: Path, path: Path, options: Mapping[str, str]
) -> Trace:
    kind = options.get("gpu_type", _DEFAULT_TYPE)
    per_node = _per_node(options)
    costs = _Costs(profiles, kind, per_node)
    found = [
        TraceJob(
            job_id=index,
            arrival_s=job.submitted_s,
            gpus=job.gpus,
            duration_s=costs.seconds(job, path),
        )
        for index, job in enumerate(jobs, start=1)
    ]
    told = (
        f"every job runs on the GPUs and at the batch size of the workload, {per_node} GPUs to a "
        f"node, as long as the published measurements on GPUs of type {kind} say; this is not Sia"
    )
    ordered = tuple(sorted(found, key=lambda job: (job.arrival_s, job.job_id)))
    return Trace(jobs=ordered, assumptions=(told,))


def _per_node(options: Mapping[str, str]) -> int:
    text = options.get("per_node", str(_DEFAULT_PER_NODE))
    if not text.isdecimal() or not 0 < float(text) <= MOST:
        raise ConfigError(
            "is not a number of GPUs", key="per_node", value=text, remedy="give one like per_node=8"
        )
    return int(text)


class _Costs:
    """Run times from the measurements, each found once."""

    def __init__(self, profiles: Path, gpu_type: str, per_node: int) -> None:
        self._profiles, self._type, self._per_node = profiles, gpu_type, per_node
        self._known: dict[tuple[str, int, int], float] = {}

    def seconds(self, job: SiaJob, path: Path) -> float:
        """How long the job runs. Raises ConfigError when it was not measured."""
        key = (job.application, job.gpus, job.batch)
        if key not in self._known:
            step_s = self._step_s(job)
            if step_s is None:
                raise ConfigError(
                    f"{job.application} was not measured near {job.gpus} GPUs of type {self._type} "
                    f"at a batch size of {job.batch}",
                    file=str(path),
                    key=f"line {job.line}, column num_replicas",
                    value=job.gpus,
                    remedy="choose another gpu_type or per_node, or remove the row",
                )
            self._known[key] = step_s * self._steps(job)
        return self._known[key]

    def _step_s(self, job: SiaJob) -> float | None:
        from slurm_synergy.simulator.measured import read_application

        directory = self._profiles / job.application
        if not directory.is_dir():
            raise ConfigError(
                "is not there",
                file=str(directory),
                remedy="profiles=DIR must have all applications",
            )
        table = read_application(directory, [self._type]).steps[self._type]
        whole, rest = divmod(job.gpus, self._per_node)
        placement = [self._per_node] * whole + ([rest] if rest else [])
        for passes in range(1, _MOST_PASSES + 1):
            step = table.step(placement, max(1, round(job.batch / (job.gpus * passes))))
            if step is not None:
                step_s, sync_s = step
                # Gradients that are accumulated over several passes are synchronised once.
                return step_s + (passes - 1) * (step_s - sync_s)
        return None

    def _steps(self, job: SiaJob) -> float:
        """Steps until the last measured epoch ends, at the job's own batch size."""
        path = self._profiles / job.application / f"validation-{job.batch}.csv"
        last = 0.0
        for row in read_rows(path, ",", ("iteration",)):
            last = row.number("iteration", 1.0)
        if not last:
            raise ConfigError("has no row", file=str(path), remedy="copy the directory whole")
        return last
