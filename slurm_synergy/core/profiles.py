"""What is believed of a job's speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from slurm_synergy.core.scaling import Scaling
from slurm_synergy.core.values import quick
from slurm_synergy.errors import ModelError

__all__ = ["Demand", "PipelineModel", "Profile", "ProfileOrigin", "SensitivityTable"]


class ProfileOrigin(Enum):
    """Where our belief about a job's speed comes from."""

    MEASURED = "measured"
    CATALOGUE = "catalogue"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineModel:
    """Input pipeline of one node of a job (Synergy, OSDI '22, section 3.1).

    ``preprocess`` are measured points (cores on the node, samples/s), cores ascending; between
    points the rate is linear, below the first proportional, above the last flat.
    ``dataset_mib`` is the size of the raw data set, ``samples_per_epoch`` its items,
    ``storage_mib_s`` the bandwidth at which a miss is read, ``process_mem_mib`` what the processes
    need before any cache. ``dataset_mib`` 0 means that fetching never limits.
    """

    preprocess: tuple[tuple[int, float], ...]
    dataset_mib: float = 0.0
    samples_per_epoch: int = 1
    storage_mib_s: float = float("inf")
    process_mem_mib: int = 0

    def __post_init__(self) -> None:
        cores = [c for c, _ in self.preprocess]
        rates = [r for _, r in self.preprocess]
        if not cores or cores[0] < 1 or cores != sorted(set(cores)):
            raise ModelError(f"preprocess points need ascending core counts >= 1: {cores}")
        if any(r <= 0 for r in rates) or rates != sorted(rates):
            raise ModelError(f"preprocess rates must be positive and non-decreasing: {rates}")
        if self.dataset_mib < 0 or self.samples_per_epoch < 1 or self.storage_mib_s <= 0:
            raise ModelError("data set size, samples per epoch or storage bandwidth out of range")


@dataclass(frozen=True, slots=True, kw_only=True)
class SensitivityTable:
    """Synergy's matrix W[c, m], for jobs of which only a published table is known (section 3.1).

    ``rates[c][m]`` are samples/s of one GPU with ``cpus_per_gpu[c]`` cores and
    ``mem_mib_per_gpu[m]`` MiB; both axes ascending, rates non-decreasing along both. Between
    core counts the rate is linear, below the first proportional; memory counts by whole columns,
    and below the first column nothing runs.
    """

    cpus_per_gpu: tuple[int, ...]
    mem_mib_per_gpu: tuple[int, ...]
    rates: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for axis in (self.cpus_per_gpu, self.mem_mib_per_gpu):
            if not axis or axis[0] < 1 or list(axis) != sorted(set(axis)):
                raise ModelError(f"the axes of a table must ascend from 1 or more: {axis}")
        rows, width = len(self.cpus_per_gpu), len(self.mem_mib_per_gpu)
        if len(self.rates) != rows or any(len(row) != width for row in self.rates):
            raise ModelError(f"a table needs {rows} rows of {width} rates")
        for line in (*self.rates, *zip(*self.rates, strict=True)):
            if line[0] <= 0 or list(line) != sorted(line):
                raise ModelError(f"rates must be positive and non-decreasing: {line}")


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What we believe about a job's speed.

    ``gpu_rate_per_gpu`` maps a GPU type to samples/s per GPU when data is always ready. How fast
    data gets ready says either ``pipeline`` or ``table``. With neither, or for a GPU type that is
    not in the map, the speed is unknown: such a job gets its proportional share.
    ``restart_s`` is what stopping and starting again costs. ``scaling`` is how the speed changes
    with the number and type of GPUs and the batch size, for elastic jobs.

    ``confident`` is False for measurements that were cut off or contradict each other, and for an
    elastic job where it has not run yet: such a job never gets less than its proportional share for
    them. ``measured_gpus`` is the GPUs on one node beyond which the pipeline was not seen, as these
    few kept it from showing more (0: no such limit), ``measured_cpus`` the most cores on one node
    that were tried. By ``rate_error``, a part, GPUs may be faster than ``gpu_rate_per_gpu`` says.
    """

    key: str = ""
    gpu_rate_per_gpu: Mapping[str, float] = field(default_factory=dict)
    pipeline: PipelineModel | None = None
    origin: ProfileOrigin = ProfileOrigin.DEFAULT
    sample_count: int = 0
    restart_s: float = 30.0
    table: SensitivityTable | None = None
    scaling: Scaling | None = None
    confident: bool = True
    measured_gpus: int = 0
    measured_cpus: int = 0
    rate_error: float = 0.0

    def __post_init__(self) -> None:
        if any(rate <= 0 for rate in self.gpu_rate_per_gpu.values()):
            raise ModelError(f"profile {self.key!r}: GPU rates must be positive")
        if self.pipeline is not None and self.table is not None:
            raise ModelError(f"profile {self.key!r}: has both a pipeline model and a table")


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Least CPU and memory *on one node* with which a job runs at full speed; derived only."""

    cpus: int
    mem_mib: int
