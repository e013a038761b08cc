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

__all__ = ["DataFacts", "filled", "held_up_elsewhere", "matrix", "pipeline_of"]

# A pace this far below that of reading everything from storage has other causes.
_SLOW_READS = 0.8


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
    hide what is beyond, and faster GPUs ask for cores instead of being thought full with few. The
    same holds where reading did: it hides what the cores can do with more of the data cached.
    """
    hidden = result.gpu_bound or _reading_did(result, facts)
    shown = _loader_part(result) if hidden else list(result.curve)
    most = result.span.counts[-1]
    last, last_rate = shown[-1]
    if hidden and last < most:
        shown.append((most, last_rate + _last_slope(shown) * (most - last)))
    return PipelineModel(
        preprocess=tuple(shown),
        dataset_mib=facts.dataset_mib,
        samples_per_epoch=facts.samples_per_epoch,
        storage_mib_s=facts.storage_mib_s,
        process_mem_mib=facts.process_mem_mib,
    )


def _loader_part(result: SweepResult) -> list[tuple[int, float]]:
    """The curve up to the point from which more cores bring no more."""
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
        confident=result.confidence is Confidence.HIGH and not held_up_elsewhere(result),
        measured_gpus=result.span.gpus if result.gpu_bound else 0,
        measured_cpus=result.span.counts[-1],
    )


def _reading_did(result: SweepResult, facts: DataFacts) -> bool:
    """Whether reads from storage set the pace at the top: it is not below what these allow."""
    if not facts.dataset_mib or facts.storage_mib_s == float("inf"):
        return False
    reads = facts.samples_per_epoch * facts.storage_mib_s / facts.dataset_mib
    return held_up_elsewhere(result) and result.curve[-1][1] >= _SLOW_READS * reads


def held_up_elsewhere(result: SweepResult) -> bool:
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
