"""An elastic job of which everything is known, and what it would tell of itself."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_synergy.controller.learning_points import StepTime, TrainingReport
from slurm_synergy.core.goodput import ThroughputModel
from slurm_synergy.core.model import Placement
from slurm_synergy.core.resources import Resources

TRUTH = ThroughputModel(
    compute_s=0.02,
    compute_s_per_sample=0.003,
    node_sync_s=0.03,
    node_sync_s_per_replica=0.002,
    network_sync_s=0.09,
    network_sync_s_per_replica=0.006,
    overlap=1.6,
)


def place(gpus: int, *, nodes: int = 1, kind: str = "v100", job_id: int = 1) -> Placement:
    """GPUs spread evenly over nodes of that type."""
    share = Resources(gpus=gpus // nodes, cpus=3 * gpus // nodes, mem_mib=50_000)
    names = [f"{kind}-{number}" for number in range(1, nodes + 1)]
    return Placement(job_id=job_id, gpu_type=kind, shares=tuple((one, share) for one in names))


def told(
    shape: tuple[int, int],
    batches: Sequence[int],
    *,
    truth: ThroughputModel = TRUTH,
    slower: float = 1.0,
    accumulation: int = 0,
) -> TrainingReport:
    """The report of a job on (nodes, GPUs) that takes these numbers of samples in a pass."""
    nodes, gpus = shape
    return TrainingReport(
        times=tuple(
            StepTime(
                local_batch=batch,
                replicas=gpus,
                steps=50,
                gradient_s=slower * float(truth.gradient_s(batch)),
                step_s=slower * float(truth.iteration_s(nodes, gpus, batch)),
                accumulation=accumulation,
            )
            for batch in batches
        )
    )
