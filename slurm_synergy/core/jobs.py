"""Jobs as their users asked for them, and the shapes that they may have."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from slurm_synergy.core.scaling import BatchSize
from slurm_synergy.core.values import quick
from slurm_synergy.errors import ModelError

__all__ = ["Ceiling", "Configuration", "Elasticity", "Job"]


class Elasticity(Enum):
    """What may change about a job's GPUs during its life (Sia, SOSP '23, section 3)."""

    RIGID = "rigid"
    STRONG_SCALING = "scale"
    ADAPTIVE = "full"


# Until Python 3.12, looking up a member of an enumeration takes longer than comparing it.
_RIGID = Elasticity.RIGID


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What a job runs on: ``nodes`` nodes with ``gpus`` GPUs in total (Sia, section 3.2).

    ``gpu_type`` None means any type that the job allows; the mechanism then chooses one type.
    ``nodes`` None means any number of nodes (jobs of recorded traces have no node count).
    ``batch`` is the batch size that goes with it, None for the job's own.
    """

    gpus: int
    nodes: int | None = None
    gpu_type: str | None = None
    batch: BatchSize | None = None

    def __post_init__(self) -> None:
        if self.gpus < 1 or (self.nodes is not None and not 1 <= self.nodes <= self.gpus):
            raise ModelError(f"configuration of {self.gpus} GPUs on {self.nodes} nodes")
        if self.nodes is not None and self.gpus % self.nodes:
            raise ModelError(f"{self.gpus} GPUs cannot be split evenly over {self.nodes} nodes")


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """An elastic job was not started on ``refused`` GPUs of a type: it is offered fewer of it.

    ``too_few``: it is offered more of it. ``text`` says why.
    """

    gpu_type: str
    refused: int
    text: str
    too_few: bool = False


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the user asked for. ``job_id`` is Slurm's; it breaks all ties.

    ``gpus`` is the total; ``nodes`` the exact node count (None: free to split), ``gpu_types`` the
    allowed types (empty: any), ``tasks_per_node`` the ranks on each node, ``min_mem_mib_per_node``
    what the processes need on each node besides any cache (promise P7). ``wrapped`` tells whether
    the job runs under synergy-srun: only such a job can be resized in place or preempted.
    ``total_samples`` is the work in samples, if the user or a trace told it. ``array`` is how users
    call a member of a job array (``12_3``), empty for other jobs.

    An elastic job may run on ``min_gpus`` (None: its scale unit) to ``max_gpus`` (None: what it
    asks for) GPUs, in multiples of ``scale_unit``. ``batch`` is the total batch size that it was
    tuned for, which is its least, and the largest allowed; None: it is not known, and never
    changed. ``guaranteed`` jobs are always given some configuration. ``ceilings`` has at most one
    entry of each kind for each GPU type; where some are ``too_few``, ``min_gpus`` is above them.
    """

    job_id: int
    user: str
    submitted_s: float
    gpus: int
    nodes: int | None = 1
    gpu_types: tuple[str, ...] = ()
    tasks_per_node: int = 1
    min_mem_mib_per_node: int = 0
    elasticity: Elasticity = Elasticity.RIGID
    min_gpus: int | None = None
    max_gpus: int | None = None
    scale_unit: int = 1
    batch: tuple[int, int] | None = None
    guaranteed: bool = False
    preemptible: bool = True
    wrapped: bool = True
    total_samples: float | None = None
    time_limit_s: float | None = None
    name: str = ""
    array: str = ""
    ceilings: tuple[Ceiling, ...] = ()

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ModelError(f"job {self.job_id}: asks for {self.gpus} GPUs")
        if self.nodes is not None and (self.nodes < 1 or self.gpus % self.nodes):
            raise ModelError(
                f"job {self.job_id}: {self.gpus} GPUs cannot be split evenly "
                f"over {self.nodes} nodes"
            )
        if self.tasks_per_node < 1 or self.min_mem_mib_per_node < 0:
            raise ModelError(f"job {self.job_id}: tasks or minimum memory out of range")
        if self.elasticity is not _RIGID:
            self._check_elastic()

    def _check_elastic(self) -> None:
        if self.scale_unit < 1 or self.least_gpus < 1 or self.least_gpus > self.most_gpus:
            raise ModelError(
                f"job {self.job_id}: cannot run on {self.least_gpus} to {self.most_gpus} GPUs in "
                f"multiples of {self.scale_unit}"
            )
        if self.batch is not None and not 1 <= self.batch[0] <= self.batch[1]:
            raise ModelError(f"job {self.job_id}: batch sizes {self.batch} are out of order")

    @property
    def least_gpus(self) -> int:
        """The fewest GPUs on which the job may run; those asked for when it is rigid."""
        if self.elasticity is _RIGID:
            return self.gpus
        return self.min_gpus if self.min_gpus is not None else min(self.scale_unit, self.gpus)

    @property
    def most_gpus(self) -> int:
        """The most GPUs on which the job may run; those asked for when it is rigid."""
        if self.elasticity is _RIGID:
            return self.gpus
        return self.max_gpus if self.max_gpus is not None else max(self.gpus, self.least_gpus)

    def most_on(self, gpu_type: str) -> int:
        """The most GPUs of that type that may be offered to the job, 0 and less for none."""
        found = [
            one.refused - 1 for one in self.ceilings if one.gpu_type == gpu_type and not one.too_few
        ]
        return min(self.most_gpus, *found) if found else self.most_gpus

    @property
    def configuration(self) -> Configuration:
        """The one configuration of a rigid job, as the user asked for it."""
        only = self.gpu_types[0] if len(self.gpu_types) == 1 else None
        return Configuration(gpus=self.gpus, nodes=self.nodes, gpu_type=only)
