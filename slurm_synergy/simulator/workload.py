"""From the jobs of a trace to jobs that can be simulated on a pool."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.model import Job, JobStatus, Node, Profile
from slurm_synergy.core.pipeline import reference_rate
from slurm_synergy.errors import ConfigError, ModelError
from slurm_synergy.simulator.sensitivity import MODELS, profile_for
from slurm_synergy.simulator.traces import Trace, TraceJob
from slurm_synergy.simulator.truth import SimulatedJob, distort

__all__ = ["make_workload"]


def make_workload(
    trace: Trace,
    nodes: Sequence[Node],
    *,
    restart_s: float = 0.0,
    profile_error: float = 0.0,
    seed: int = 0,
) -> tuple[SimulatedJob, ...]:
    """The jobs of ``trace`` by arrival, with the work that its iterations or run times mean here.

    ``restart_s`` is what the scheduler believes that a restart costs, ``profile_error`` by how
    much its beliefs about the input pipeline may be off (0.1: by up to 10 %). Raises ConfigError
    for a model that is not known, and for a job that can never run on the pool.
    """
    rng = random.Random(seed)
    gpu_types = {node.gpu_type for node in nodes}
    profiles: dict[str, Profile] = {}
    rates: dict[object, float | None] = {}
    found = []
    for row in trace.jobs:
        name = row.model or ""
        if name not in profiles:
            try:
                profiles[name] = profile_for(name, gpu_types, restart_s)
            except ModelError as err:
                raise ConfigError(str(err), key=f"job {row.job_id}: model", value=name) from err
        truth = profiles[name]
        belief = distort(truth, profile_error, rng) if profile_error else truth
        found.append(_job(row, truth, belief, nodes, rates))
    return tuple(found)


def _job(
    row: TraceJob,
    truth: Profile,
    belief: Profile,
    nodes: Sequence[Node],
    rates: dict[object, float | None],
) -> SimulatedJob:
    """``rates`` are those at a proportional share that are known, by model and shape."""
    model = MODELS.get(row.model or "")
    job = Job(
        job_id=row.job_id,
        user=row.user,
        submitted_s=row.arrival_s,
        gpus=row.gpus,
        nodes=row.nodes,
        name=row.model or "",
    )
    sort = row.model, row.gpus, row.nodes
    if sort not in rates:
        gpus = sum(node.total.gpus for node in nodes)
        fits = row.gpus <= gpus and (row.nodes or 1) <= len(nodes)
        rates[sort] = reference_rate(JobStatus(job=job, profile=truth), nodes) if fits else None
    rate = rates[sort]
    if not rate:
        raise ConfigError(
            f"{row.gpus} GPUs on {row.nodes or 'any number of'} nodes with data for {row.model} "
            "are more than the pool has at a proportional share",
            key=f"job {row.job_id}",
            remedy="remove the job or use larger nodes",
        )
    iteration = float((model.batch if model else 1) * row.gpus)
    if row.iterations is not None:
        if model is None and row.model in CATALOGUE:
            raise ConfigError(
                f"the samples of an iteration of {row.model} are not known",
                key=f"job {row.job_id}: iterations",
                remedy="give duration_s instead",
            )
        samples = row.iterations * iteration
    else:
        assert row.duration_s is not None
        samples = row.duration_s * rate
    return SimulatedJob(
        job=replace(job, total_samples=samples),
        truth=truth,
        belief=belief,
        samples=samples,
        iteration_samples=iteration,
        share_s=samples / rate,
        model=row.model or "",
    )
