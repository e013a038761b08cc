"""From a sweep over cores to a profile, and to Synergy's whole matrix W[c, m].

Memory is never measured (OSDI '22, section 3.1): a cache that never evicts hits the same share of
a data set in every epoch, so what a memory budget brings follows from the sizes of the items and
the bandwidth of the storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from slurm_synergy.core.model import PipelineModel, Profile, ProfileOrigin
from slurm_synergy.core.pipeline import job_rate
from slurm_synergy.core.resources import Resources
from slurm_synergy.errors import ModelError
from slurm_synergy.profiler.sweep import PLATEAU, Confidence, SweepResult

__all__ = ["DataFacts", "filled", "matrix", "pipeline_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """What is known of a job's data on one node; the defaults mean that reading never limits.

    ``dataset_mib`` is the size of the raw items, ``samples_per_epoch`` their number,
    ``storage_mib_s`` the bandwidth of reads that no cache serves, ``process_mem_mib`` what the
    processes need besides any cache. Raises ModelError for numbers that cannot be.
    """

    dataset_mib: float = 0.0
    samples_per_epoch: int = 1
    storage_mib_s: float = float("inf")
    process_mem_mib: int = 0

    def __post_init__(self) -> None:
        if not (self.dataset_mib >= 0 and self.storage_mib_s > 0 and self.process_mem_mib >= 0):
            raise ModelError(f"sizes and bandwidth of a data set must be positive: {self}")
        if self.samples_per_epoch < 1:
            raise ModelError(f"a data set has one sample or more, not {self.samples_per_epoch}")


def pipeline_of(result: SweepResult, facts: DataFacts) -> PipelineModel:
    """The input pipeline that a sweep has shown.

    Where the GPUs set the pace, how much faster the loader would be cannot be seen. From there on
    it is taken to grow as it did before, at most in proportion to the cores: the job's own GPUs
    hide what is beyond, and faster GPUs ask for cores instead of being thought full with few.
    """
    shown = _loader_part(result)
    most = result.span.counts[-1]
    last, last_rate = shown[-1]
    if result.gpu_bound and last < most:
        shown.append((most, last_rate + _last_slope(shown) * (most - last)))
    return PipelineModel(
        preprocess=tuple(shown),
        dataset_mib=facts.dataset_mib,
        samples_per_epoch=facts.samples_per_epoch,
        storage_mib_s=facts.storage_mib_s,
        process_mem_mib=facts.process_mem_mib,
    )


def _loader_part(result: SweepResult) -> list[tuple[int, float]]:
    """The curve up to the point at which the GPUs set the pace; all of it where they never do."""
    if not result.gpu_bound:
        return list(result.curve)
    top = result.curve[-1][1]
    shown: list[tuple[int, float]] = []
    for cpus, rate in result.curve:
        if rate >= PLATEAU * top:
            shown.append((cpus, max(rate, shown[-1][1] if shown else rate)))
            break
        shown.append((cpus, rate))
    return shown


def _last_slope(shown: Sequence[tuple[int, float]]) -> float:
    """Samples/s that one more core is taken to add: as before, at most in proportion."""
    last, last_rate = shown[-1]
    each = last_rate / last
    slopes = [(b_rate - a_rate) / (b - a) for (a, a_rate), (b, b_rate) in pairwise(shown)]
    return min(each, slopes[-1]) if slopes else each


def filled(
    result: SweepResult, *, key: str, gpu_type: str, facts: DataFacts | None = None
) -> Profile:
    """The profile under ``key`` of a job that was measured on GPUs of one type.

    Raises ModelError for a key or type that is empty.
    """
    if not key or not gpu_type:
        raise ModelError(f"a profile needs a key and a GPU type, got {key!r} and {gpu_type!r}")
    return Profile(
        key=key,
        gpu_rate_per_gpu={gpu_type: result.gpu_samples_per_s / result.span.gpus},
        pipeline=pipeline_of(result, facts or DataFacts()),
        origin=ProfileOrigin.MEASURED,
        sample_count=result.iterations,
        confident=result.confidence is Confidence.HIGH and not _held_up_elsewhere(result),
        measured_gpus=result.span.gpus if result.gpu_bound else 0,
        measured_cpus=result.span.counts[-1],
    )


def _held_up_elsewhere(result: SweepResult) -> bool:
    """Whether data was waited for at the top although fewer cores had brought as much.

    Then neither cores nor GPUs set the pace but, say, reads of data that will be cached later.
    """
    return not result.gpu_bound and result.knee_cpus < result.span.counts[-1]


def matrix(
    profile: Profile, gpu_type: str, *, gpus: int, cpus: Sequence[int], mem_mib: Sequence[int]
) -> tuple[tuple[float, ...], ...]:
    """W in samples/s, shape ``(len(cpus), len(mem_mib))``, of a job on ``gpus`` GPUs of one node.

    Raises ModelError when the profile does not know that GPU type.
    """
    rows = []
    for count in cpus:
        row = [
            job_rate(profile, gpu_type, (Resources(gpus=gpus, cpus=count, mem_mib=mib),))
            for mib in mem_mib
        ]
        if None in row:
            known = ", ".join(sorted(profile.gpu_rate_per_gpu)) or "none"
            raise ModelError(
                f"profile {profile.key!r} knows no GPU type {gpu_type!r}, only {known}"
            )
        rows.append(tuple(rate for rate in row if rate is not None))
    return tuple(rows)
