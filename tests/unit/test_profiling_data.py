"""What memory brings a measured job: the profile against the cache as it really is."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from slurm_synergy.controller.probes import DataRead
from slurm_synergy.controller.profiling_data import data_facts
from slurm_synergy.core.model import (
    Job,
    JobStatus,
    Node,
    PipelineModel,
    Profile,
    ProfileOrigin,
)
from slurm_synergy.core.pipeline import THETA, floor_share, proportional_share
from slurm_synergy.core.resources import Resources

FULL = Resources(gpus=8, cpus=24, mem_mib=800_000)
NODE = Node(name="n1", gpu_type="v100", total=FULL, capacity=FULL)
GPU_RATE, ITEMS = 600.0, 100_000


def true_rate(mem_mib: float, *, own_mib: float, dataset_mib: float, storage_mib_s: float) -> float:
    """Samples/s from a cache that has nine tenths of the memory less what processes have."""
    cached_mib = min(max(0.9 * mem_mib - own_mib, 0.0), dataset_mib)
    missed_mib = dataset_mib - cached_mib
    reads = ITEMS * storage_mib_s / missed_mib if missed_mib > 0 else math.inf
    return min(GPU_RATE, reads)


@given(
    own_mib=st.floats(200, 60_000),
    dataset_mib=st.floats(1_000, 900_000),
    storage_mib_s=st.floats(1, 20_000),
)
def test_a_floor_by_what_was_measured_is_as_fast_as_the_share(
    own_mib: float, dataset_mib: float, storage_mib_s: float
) -> None:
    share_mib = 100_000
    data = DataRead(
        dataset_mib=dataset_mib, samples=ITEMS, storage_mib_s=storage_mib_s, cached=True
    )
    facts = data_facts(data, own_mem_mib=own_mib, share_mib=share_mib, least_mib=share_mib)
    profile = Profile(
        key="k",
        gpu_rate_per_gpu={"v100": GPU_RATE},
        origin=ProfileOrigin.MEASURED,
        pipeline=PipelineModel(
            preprocess=((1, 10_000.0),),
            dataset_mib=facts.dataset_mib,
            samples_per_epoch=facts.samples_per_epoch,
            storage_mib_s=facts.storage_mib_s,
            process_mem_mib=facts.process_mem_mib,
        ),
    )
    status = JobStatus(
        job=Job(job_id=1, user="u", submitted_s=0.0, gpus=1, nodes=1), profile=profile
    )
    assert proportional_share(status, NODE, 1).mem_mib == share_mib
    least = floor_share(status, NODE, 1).mem_mib
    assert own_mib <= least <= share_mib
    truth = {"own_mib": own_mib, "dataset_mib": dataset_mib, "storage_mib_s": storage_mib_s}
    assert true_rate(least, **truth) >= THETA * true_rate(share_mib, **truth) - 1e-9
