"""Sia's workloads as jobs whose GPUs, and batch sizes, the scheduler may choose (SOSP '23)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from slurm_synergy.core.model import Elasticity, Job, Node, Profile
from slurm_synergy.errors import ConfigError, ModelError
from slurm_synergy.simulator.learning import Learning, Profiling, Taught
from slurm_synergy.simulator.measured import Application, read_application
from slurm_synergy.simulator.pipelines import MEASURED_ON, dealt_cores, pipeline_of
from slurm_synergy.simulator.sia_models import SiaModel, sia_model
from slurm_synergy.simulator.sia_workload import SiaJob
from slurm_synergy.simulator.traces import Trace, TraceJob
from slurm_synergy.simulator.training import Training
from slurm_synergy.simulator.truth import SimulatedJob
from slurm_synergy.simulator.tuned_jobs import MOST_GPUS, TunedShape, tuned_shapes

__all__ = ["LISTED", "ElasticWorkload", "elastic_trace"]

_REGIMES = ("bootstrap", "ledger", "oracle", "none")
_PIPELINES = ("none", "synergy", "dealt")
LISTED = "listed"
"""The word for rigid jobs that ask for what the workload lists."""

_MOST_GPUS = 64
"""The most GPUs that a job of the artifact may have (algorithms C.6)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticWorkload:
    """A workload of which ``rigid`` and ``scale`` (parts of all jobs) are less elastic.

    Of equal parts over the whole list, so that they have all applications alike. ``regime`` is what
    is known of a job on its arrival. With ``pipelines`` jobs need cores to be fed: ``synergy`` as
    many as Synergy's model of their task, ``dealt`` those of its models in the parts of its
    evaluation. Rigid jobs are tuned for GPUs of type ``tuned``; empty: they ask for what the
    workload lists.
    """

    jobs: tuple[SiaJob, ...]
    profiles: Path
    file: str
    rigid: float = 0.0
    scale: float = 0.0
    regime: Profiling = Profiling.BOOTSTRAP
    pipelines: str = "none"
    tuned: str = ""

    def on(self, nodes: Sequence[Node], ids: Sequence[int]) -> tuple[SimulatedJob, ...]:
        """The jobs with these ids (their numbers in the list from 1) for a pool."""
        kinds = tuple(sorted({node.gpu_type for node in nodes}))
        pool_gpus = sum(node.total.gpus for node in nodes)
        per_node = {node.gpu_type: node.total.gpus for node in nodes}
        made = _Maker(self, kinds, min(pool_gpus, _MOST_GPUS), per_node)
        return tuple(made.job(job_id, self.jobs[job_id - 1]) for job_id in sorted(ids))

    def elasticity(self, job_id: int) -> Elasticity:
        """How elastic the job with that number is."""
        if _is_next(job_id, self.rigid):
            return Elasticity.RIGID
        left = 1.0 - self.rigid
        place = job_id - int(job_id * self.rigid)
        if left > 0 and _is_next(place, self.scale / left):
            return Elasticity.STRONG_SCALING
        return Elasticity.ADAPTIVE


def _is_next(number: int, part: float) -> bool:
    """Whether that number, from 1, is one of ``part`` of all, evenly spread."""
    return int(number * part + 1e-9) > int((number - 1) * part + 1e-9)


def elastic_trace(
    jobs: tuple[SiaJob, ...], profiles: Path, path: Path, options: Mapping[str, str]
) -> Trace:
    """The workload as elastic jobs. Raises ConfigError for an option that is out of range."""
    rigid, scale = _part(options, "rigid"), _part(options, "scale")
    if rigid + scale > 1:
        raise ConfigError("are more than all jobs together", key="rigid and scale")
    workload = ElasticWorkload(
        jobs=jobs,
        profiles=profiles,
        file=str(path),
        rigid=rigid,
        scale=scale,
        regime=Profiling(_choice(options, "profiling", _REGIMES)),
        pipelines=_choice(options, "pipelines", _PIPELINES),
        tuned="" if options.get("tuned", LISTED) == LISTED else options["tuned"],
    )
    rows = [
        TraceJob(job_id=at, arrival_s=job.submitted_s, gpus=1, model=job.application)
        for at, job in enumerate(jobs, start=1)
    ]
    told = (
        "step times and gradient statistics are the published measurements, interpolated; what is "
        "measured of a job is free of noise"
    )
    ordered = tuple(sorted(rows, key=lambda job: (job.arrival_s, job.job_id)))
    return Trace(jobs=ordered, assumptions=(told,), elastic=workload)


def _part(options: Mapping[str, str], key: str) -> float:
    text = options.get(key, "0")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError("is not a part, 0 to 1", key=key, value=text)
    return value


def _choice(options: Mapping[str, str], key: str, known: Sequence[str]) -> str:
    word = options.get(key, known[0])
    if word not in known:
        raise ConfigError(
            "is unknown", key=key, value=word, remedy=f"choose one of {', '.join(known)}"
        )
    return word


class _Maker:
    """Makes jobs; those that are alike share what was measured of them."""

    def __init__(
        self,
        workload: ElasticWorkload,
        kinds: tuple[str, ...],
        most_gpus: int,
        per_node: Mapping[str, int],
    ) -> None:
        self._workload, self._kinds, self._most_gpus = workload, kinds, most_gpus
        self._per_node = per_node
        self._trainings: dict[tuple[str, int | None], Training] = {}
        self._dealt = dealt_cores(len(workload.jobs))
        self._applications: dict[str, Application] = {}
        self._shapes: dict[str, tuple[TunedShape, ...]] = {}
        self._taught: dict[str, Taught] = {}

    def job(self, job_id: int, row: SiaJob) -> SimulatedJob:
        """One job. Raises ConfigError when it cannot be simulated."""
        elasticity = self._workload.elasticity(job_id)
        model = sia_model(row.application, self._workload.file, row.line)
        if elasticity is Elasticity.RIGID and self._workload.tuned:
            row = self._tuned(job_id, row, model)
        own = None if elasticity is Elasticity.ADAPTIVE else row.batch
        training = self._training(row, model, own)
        kinds = tuple(
            kind
            for kind in self._kinds
            if kind in training.application.steps and kind in model.local_most
        )
        if not kinds:
            raise ConfigError(
                f"was not measured on GPUs of type {', '.join(self._kinds)}",
                file=self._workload.file,
                key=f"line {row.line}, column application",
                value=row.application,
                remedy="choose a pool with other GPUs, or remove the row",
            )
        pipeline, needs = None, ""
        if self._workload.pipelines == "dealt":
            pipeline = pipeline_of(training, self._dealt[job_id - 1])
            needs = f" {self._dealt[job_id - 1]:g} cores"
        elif self._workload.pipelines == "synergy":
            pipeline = pipeline_of(training)
        key = row.application + needs
        profile = Profile(key=key, restart_s=model.restart_s, pipeline=pipeline)
        if pipeline is not None and elasticity is Elasticity.RIGID:
            rates = self._rates(row.gpus, training, kinds)
            profile = replace(profile, gpu_rate_per_gpu=rates)
        taught = self._taught.setdefault(key, Taught())
        learn = partial(Learning, training, profile, kinds, self._workload.regime, taught)
        return SimulatedJob(
            job=self._asked(job_id, row, elasticity, training, kinds),
            truth=profile,
            belief=profile,
            samples=training.samples,
            iteration_samples=float(own or model.batch[0]),
            share_s=training.alone_s(kinds),
            model=row.application,
            start_s=model.restart_s,
            restart_s=model.restart_s,
            training=training,
            learn=learn,
        )

    def _training(self, row: SiaJob, model: SiaModel, own: int | None) -> Training:
        key = (row.application, own)
        if key not in self._trainings:
            self._trainings[key] = Training(self._application(row.application), model, own)
        return self._trainings[key]

    def _application(self, name: str) -> Application:
        if name not in self._applications:
            directory = self._workload.profiles / name
            if not directory.is_dir():
                raise ConfigError(
                    "is not there",
                    file=str(directory),
                    remedy="profiles=DIR must have all applications",
                )
            kinds = {*self._kinds, MEASURED_ON}
            self._applications[name] = read_application(directory, sorted(kinds))
        return self._applications[name]

    def _rates(self, gpus: int, training: Training, kinds: tuple[str, ...]) -> Mapping[str, float]:
        """Samples/s per GPU of a job that is profiled as it asks to run, on as few nodes as go."""
        rates = {}
        for kind in kinds:
            most = self._per_node[kind]
            pattern = (most,) * (gpus // most) + ((gpus % most,) if gpus % most else ())
            with suppress(ModelError):  # not measured there: not known
                rates[kind] = training.gpu_rate(kind, pattern) / gpus
        return rates

    def _tuned(self, job_id: int, row: SiaJob, model: SiaModel) -> SiaJob:
        """The job as an expert would have asked for it: good requests take turns."""
        kind = self._workload.tuned
        if kind not in self._per_node:
            raise ConfigError(
                "is no GPU type of the pool",
                key="tuned",
                value=kind,
                remedy=f"choose one of {', '.join(self._kinds)}, or {LISTED}",
            )
        if row.application not in self._shapes:
            most = self._most_gpus if len(self._kinds) == 1 else MOST_GPUS
            self._shapes[row.application] = tuned_shapes(
                self._application(row.application), model, kind, self._per_node[kind], most
            )
        shapes = self._shapes[row.application]
        chosen = shapes[job_id % len(shapes)]
        return replace(row, gpus=chosen.gpus, batch=chosen.batch)

    def _asked(
        self,
        job_id: int,
        row: SiaJob,
        elasticity: Elasticity,
        training: Training,
        kinds: tuple[str, ...],
    ) -> Job:
        batch = training.model.batch if training.own_batch is None else (row.batch, row.batch)
        rigid = elasticity is Elasticity.RIGID
        stages = [training.model.stages.get(kind, 1) for kind in kinds]
        most = batch[1] // training.model.local_least * max(stages)
        return Job(
            job_id=job_id,
            user="trace",
            submitted_s=row.submitted_s,
            gpus=row.gpus if rigid else min(stages),
            nodes=None if rigid else 1,
            gpu_types=() if kinds == self._kinds else kinds,
            elasticity=elasticity,
            min_gpus=None if rigid else min(stages),
            max_gpus=None if rigid else min(self._most_gpus, most),
            batch=batch,
            total_samples=training.samples,
            name=row.application,
        )
