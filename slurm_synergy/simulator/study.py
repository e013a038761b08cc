"""One simulation from its ingredients: pool, trace, policy and mechanism, and how to play it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Any

from slurm_synergy.core.decide import Mechanism, Policy
from slurm_synergy.core.model import Node
from slurm_synergy.core.rounds_of_time import quantum_of
from slurm_synergy.errors import ConfigError
from slurm_synergy.simulator.cluster import Costs
from slurm_synergy.simulator.engine import Outline, Played, Reordering, play, play_rounds
from slurm_synergy.simulator.generate import ModelMix, parse_split
from slurm_synergy.simulator.metrics import JobResult, job_results, summarise
from slurm_synergy.simulator.sensitivity import MEASURED_ON, MODELS
from slurm_synergy.simulator.traces import Elastic, Trace, with_models
from slurm_synergy.simulator.truth import SimulatedJob
from slurm_synergy.simulator.workload import make_workload

__all__ = ["Semantics", "Study", "StudyResult", "run_study"]

_REORDERING: Mapping[str, Reordering] = MappingProxyType(
    {"fifo": Reordering.NEVER, "srtf": Reordering.BY_EVENTS}
)
"""Policies whose order is known to keep by itself; any other may change at any time."""


class Semantics(Enum):
    """How time passes; see :mod:`slurm_synergy.simulator.engine`."""

    EXACT = "exact"
    REFERENCE = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """What to simulate. Times in seconds.

    ``split`` are the parts of image, language and speech models for jobs whose trace names none;
    ``measured`` the ids of the jobs that count, and whose completion ends the simulation (empty:
    all). ``profile_error`` 0.1 means that beliefs are off by up to 10 %, at random by ``seed``.
    ``stopwatch`` gives seconds of real time.
    """

    nodes: tuple[Node, ...]
    trace: Trace
    policy: Policy
    mechanism: Mechanism
    round_s: float = 300.0
    event_delay_s: float = 1.0
    semantics: Semantics = Semantics.EXACT
    costs: Costs = field(default_factory=Costs)
    split: str = "20/70/10"
    measured: Collection[int] = ()
    profile_error: float = 0.0
    seed: int = 0
    stopwatch: Callable[[], float] = lambda: 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyResult:
    """What came out: the summary (architecture section 9), each measured job, the course of it.

    ``assumptions`` are what the trace did not tell, in words.
    """

    summary: Mapping[str, Any]
    jobs: tuple[JobResult, ...]
    played: Played
    assumptions: tuple[str, ...] = ()


def run_study(study: Study) -> StudyResult:
    """Simulate. Raises ConfigError or ModelError for a workload that cannot run on the pool."""
    began_s = study.stopwatch()
    _check_measured(study)
    trace = _complete(study)
    believed_s = study.costs.restart_s + study.costs.checkpoint_s
    if trace.elastic is not None:
        jobs = _elastic_jobs(study, trace, trace.elastic)
    else:
        jobs = make_workload(
            trace,
            study.nodes,
            restart_s=believed_s,
            profile_error=study.profile_error,
            seed=study.seed,
        )
    outline = Outline(
        nodes=study.nodes,
        jobs=jobs,
        policy=study.policy,
        mechanism=study.mechanism,
        round_s=study.round_s,
        reordering=_REORDERING.get(study.policy.name, Reordering.ALWAYS),
        costs=study.costs,
        event_delay_s=study.event_delay_s,
        measured=study.measured,
        quantum_s=quantum_of(study.policy, study.round_s),
        stopwatch=study.stopwatch,
    )
    played = (play if study.semantics is Semantics.EXACT else play_rounds)(outline)
    results = job_results(played, study.measured)
    summary = summarise(
        played,
        results,
        policy=study.policy.name,
        mechanism=study.mechanism.name,
        wall_s=study.stopwatch() - began_s,
    )
    return StudyResult(
        summary=summary, jobs=tuple(results), played=played, assumptions=trace.assumptions
    )


def _check_measured(study: Study) -> None:
    """Raise ConfigError when jobs are to be measured that the trace does not have."""
    if not study.measured:
        return
    ids = {job.job_id for job in study.trace.jobs}
    missing = next((one for one in study.measured if one not in ids), None)
    if missing is None:
        return
    there = f"its {len(ids)} jobs have ids from {min(ids)} to {max(ids)}" if ids else "it has none"
    raise ConfigError(
        f"job {missing} is to be measured but not in the trace: {there}",
        key="measure",
        remedy="choose among those, or leave it out to measure all jobs",
    )


def _elastic_jobs(study: Study, trace: Trace, workload: Elastic) -> tuple[SimulatedJob, ...]:
    if study.semantics is not Semantics.EXACT:
        raise ConfigError(
            "cannot be simulated with Synergy's reference semantics",
            key="elastic jobs",
            remedy="use exact semantics",
        )
    if study.profile_error:
        raise ConfigError(
            "are measured without error",
            key="elastic jobs",
            remedy="leave the profile error out",
        )
    return workload.on(study.nodes, [job.job_id for job in trace.jobs])


def _complete(study: Study) -> Trace:
    """The trace with a model for every job, and all that had to be assumed for this pool."""
    mix = ModelMix(parse_split(study.split))
    trace = with_models(
        study.trace,
        mix.next,
        f"the trace names no models: they are dealt out {study.split} (image/language/speech)",
    )
    others = sorted({node.gpu_type for node in study.nodes} - {MEASURED_ON})
    if others and any(job.model in MODELS for job in trace.jobs):
        text = f"GPUs of type {', '.join(others)} are taken to be as fast as a {MEASURED_ON}"
        trace = replace(trace, assumptions=(*trace.assumptions, text))
    return trace
