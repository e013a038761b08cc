"""The recorded traces of the Synergy artifact, against what its own simulator made of them.

The traces are public but not ours to ship: SYNERGY_DATA names the directory that has
``static_100jobs.csv``, ``dynamic_100jobs.csv``, ``derived_9jph_single_gpu.csv`` and
``model_throughput.json``. Where it is not set these tests are skipped and say so.

The values are of runs of the artifact's simulator: average and 99th percentile of JCT (numpy's
interpolated percentile, as there) and makespan, in hours. PROPORTIONAL, and GREEDY under FIFO, must
agree within 3 %. TUNE must not be worse than 3 %; it may be better, since the artifact's TUNE takes
nodes first-fit and puts its victims back to their whole proportional share.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.simulator.pool import make_nodes
from slurm_synergy.simulator.sensitivity import MODELS
from slurm_synergy.simulator.study import Semantics, Study, StudyResult, run_study
from slurm_synergy.simulator.traces import read_trace

_DATA = os.environ.get("SYNERGY_DATA", "")

needs_data = pytest.mark.skipif(
    not (Path(_DATA) / "static_100jobs.csv").is_file() if _DATA else True,
    reason="set SYNERGY_DATA to the directory with the Synergy artifact's recorded traces",
)

GOLDEN = [
    ("static_100jobs", "fifo", "proportional", (5.6311, 12.9403, 15.2503)),
    ("static_100jobs", "srtf", "proportional", (4.4119, 13.0936, 14.0836)),
    ("dynamic_100jobs", "fifo", "proportional", (4.6226, 12.4282, 16.75)),
    ("dynamic_100jobs", "srtf", "proportional", (3.9067, 14.1915, 19.5)),
    ("static_100jobs", "las", "proportional", (5.6253, 11.1694, 11.4169)),
    ("static_100jobs", "ftf_ascending", "proportional", (7.9828, 9.7503, 9.7503)),
    ("static_100jobs", "fifo", "greedy", (5.4944, 11.7561, 12.3336)),
    ("dynamic_100jobs", "fifo", "greedy", (3.8817, 10.4065, 15.25)),
    ("static_100jobs", "las", "tune", (5.1711, 10.4194, 10.6669)),
    ("static_100jobs", "ftf_ascending", "tune", (7.7778, 9.4169, 9.4169)),
    ("static_100jobs", "fifo", "tune", (5.0828, 10.5878, 11.0003)),
    ("static_100jobs", "srtf", "tune", (4.1069, 12.3394, 12.9169)),
    ("dynamic_100jobs", "fifo", "tune", (3.6751, 9.5774, 14.8333)),
    ("dynamic_100jobs", "srtf", "tune", (3.1884, 10.2678, 13.25)),
]


def simulate(trace: str, policy: str, mechanism: str, nodes: int, **more: object) -> StudyResult:
    """A run with the artifact's nodes and semantics."""
    return run_study(
        Study(
            nodes=tuple(
                make_nodes(name="n", count=nodes, gpu_type="v100", gpus=8, cpus=24, mem_gib=500)
            ),
            trace=read_trace(str(Path(_DATA) / f"{trace}.csv")),
            policy=POLICIES[policy],
            mechanism=MECHANISMS[mechanism],
            semantics=Semantics.REFERENCE,
            stopwatch=time.perf_counter,
            **more,  # type: ignore[arg-type]
        )
    )


def hours(result: StudyResult) -> tuple[float, float, float]:
    """Average, 99th percentile, makespan."""
    jcts_h = [one.jct_s / 3600 for one in result.jobs]
    return (
        float(np.mean(jcts_h)),
        float(np.percentile(jcts_h, 99)),
        result.summary["makespan_s"] / 3600,
    )


@needs_data
@pytest.mark.parametrize(("trace", "policy", "mechanism", "reference"), GOLDEN)
def test_recorded_traces_agree_with_the_reference(
    trace: str, policy: str, mechanism: str, reference: tuple[float, float, float]
) -> None:
    ours = hours(simulate(trace, policy, mechanism, nodes=4))
    if mechanism != "tune":
        assert ours == pytest.approx(reference, rel=0.03)
    else:
        for mine, theirs in zip(ours, reference, strict=True):
            assert mine <= theirs * 1.03


@needs_data
def test_our_table_is_the_published_one() -> None:
    published = json.loads((Path(_DATA) / "model_throughput.json").read_text())["cpu_gpu_ratio_3"]
    memory_gb = (20.83, 62.5, 125.0, 187.5, 250.0)
    for name in ("alexnet", "shufflenet", "res18", "mobilenet", "res50", "m5", "deepspeech",
                 "gnmt", "transformer", "lstm"):  # fmt: skip
        theirs, ours = published[f"{name}_1"], MODELS[name]
        base = ours.batch / theirs["fair_iteration_seconds"]
        assert ours.batch == theirs["batch_size"]
        assert ours.top_rate / base == pytest.approx(theirs["best_speedup"])
        for row, cpus in enumerate(ours.table.cpus_per_gpu):
            for column, mem_gb in enumerate(memory_gb):
                at = sum(mib <= mem_gb * 1024 + 4 for mib in ours.table.mem_mib_per_gpu) - 1
                assert ours.table.rates[row][at] / base == pytest.approx(
                    theirs["relative_throughput"][row][column]
                ), f"{name}: {cpus} cores, {mem_gb} GB"
