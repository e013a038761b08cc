"""Finish-time fairness of elastic jobs against cases worked out by hand (Sia, equation 6).

The made application takes (0.02 + 0.001 b) s for a pass of b samples on a T4 (``aws``) and half of
that on an RTX (``rtx``), and 0.01 s to synchronise within a node; training is 1.8 times slower than
its tables. With a batch of 384, three times the initial one, steps are worth 1.8, 2.45, 2.83, 2.95
and 2.99 steps in its five epochs of 600: it needs 600 / 1.8 + ... = 1,194 steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_synergy.core.model import Node
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies.sia import SIA
from slurm_synergy.simulator.isolated import Isolation
from slurm_synergy.simulator.measured import read_application
from slurm_synergy.simulator.pool import make_nodes
from slurm_synergy.simulator.sia_jobs import ElasticWorkload
from slurm_synergy.simulator.sia_models import SIA_MODELS
from slurm_synergy.simulator.sia_workload import read_workload
from slurm_synergy.simulator.study import Study, run_study
from slurm_synergy.simulator.traces import Trace, TraceJob
from slurm_synergy.simulator.training import Training

BATCH = 384
STEPS = 600 * sum(1 / (1 + noise) * (1 + noise / 3) for noise in (2, 8, 32, 128, 512))
RESTART_S = 50.0
# Seconds alone: on one GPU, and on two and three with half and a third of the batch each.
T4_S = {
    1: RESTART_S + STEPS * 1.8 * 0.404,
    2: RESTART_S + STEPS * 1.8 * (0.212 + 0.01),
    3: RESTART_S + STEPS * 1.8 * (0.148 + 0.01),
}
RTX_S = {
    1: RESTART_S + STEPS * 1.8 * 0.404 / 2,
    2: RESTART_S + STEPS * 1.8 * (0.212 / 2 + 0.01),
    3: RESTART_S + STEPS * 1.8 * (0.148 / 2 + 0.01),
}


def _tables(directory: Path) -> Path:
    (directory / "cifar10").mkdir()
    for kind, speed in (("aws", 1), ("rtx", 2)):
        rows = ["placement,local_bsz,step_time,sync_time"]
        for gpus in (1, 2, 3, 4):
            sync_s = 0.01 if gpus > 1 else 0.0
            for batch in (32, 128, 512, 1024):
                step_s = (0.02 + 0.001 * batch) / speed + sync_s
                rows.append(f"{gpus},{batch},{step_s},{sync_s}")
        (directory / "cifar10" / f"placements-{kind}.csv").write_text("\n".join(rows) + "\n")
    rows = ["progress,iteration,metric,grad_sqr,grad_var"]
    rows += [f"{600 * at},{at},0.5,1.0,{2 * 4 ** (at - 1)}" for at in range(1, 6)]
    for batch in (128, 4096):
        path = directory / "cifar10" / f"validation-{batch}.csv"
        path.write_text("\n".join(rows) + "\n")
    return directory


def _pool() -> tuple[Node, ...]:
    """Eight T4 and four RTX."""
    sizes = {"gpus": 4, "cpus": 12, "mem_gib": 100}
    return (
        *make_nodes(name="t4", count=2, gpu_type="aws", **sizes),
        *make_nodes(name="rtx", count=1, gpu_type="rtx", **sizes),
    )


def _averaged(t4: float, rtx: float) -> float:
    return (8 * t4 + 4 * rtx) / 12


@pytest.fixture
def training(tmp_path: Path) -> Training:
    application = read_application(_tables(tmp_path) / "cifar10", ["aws", "rtx"])
    return Training(application, SIA_MODELS["cifar10"], BATCH)


@pytest.mark.parametrize(
    ("part", "most", "rigid", "t4_s", "rtx_s"),
    [
        (1.0, 4, False, T4_S[1], RTX_S[1]),
        (0.5, 4, False, 2 * T4_S[1], 2 * RTX_S[1]),  # in turns with another job
        (1.5, 4, False, (T4_S[1] + T4_S[2]) / 2, (RTX_S[1] + RTX_S[2]) / 2),
        (2.25, 4, False, 0.75 * T4_S[2] + 0.25 * T4_S[3], 0.75 * RTX_S[2] + 0.25 * RTX_S[3]),
        (12.0, 2, False, T4_S[2], RTX_S[2]),  # more than it may have does not count
        (4.0, 3, True, T4_S[3], RTX_S[3]),
        (2.0, 3, True, 1.5 * T4_S[3], 1.5 * RTX_S[3]),  # three or none
    ],
)
def test_the_time_alone_on_a_part_of_the_pool(
    training: Training, part: float, most: int, rigid: bool, t4_s: float, rtx_s: float
) -> None:
    found = Isolation(_pool()).alone_s(training, part, most, rigid=rigid)
    assert found.ratio(1000.0) == pytest.approx(_averaged(1000 / t4_s, 1000 / rtx_s), rel=5e-3)
    assert found.pooled(1000.0) == pytest.approx(1000 / _averaged(t4_s, rtx_s), rel=5e-3)


def test_two_rigid_jobs_at_once(tmp_path: Path) -> None:
    """Each of them has its three GPUs, so their part, half of the pool, is more than they use."""
    path = tmp_path / "workload.csv"
    rows = [f"job-{at},0,cifar10,3,{BATCH}" for at in (1, 2)]
    path.write_text("name,time,application,num_replicas,batch_size\n" + "\n".join(rows) + "\n")
    workload = ElasticWorkload(
        jobs=read_workload(path), profiles=_tables(tmp_path), file=str(path), rigid=1.0
    )
    jobs = tuple(TraceJob(job_id=at, arrival_s=0.0, gpus=1, model="cifar10") for at in (1, 2))
    result = run_study(
        Study(
            nodes=_pool(),
            trace=Trace(jobs=jobs, elastic=workload),
            policy=SIA,
            mechanism=MECHANISMS["proportional"],
            round_s=60.0,
            event_delay_s=0.0,
        )
    )
    fast, slow = sorted(result.jobs, key=lambda one: one.jct_s)
    assert fast.jct_s == pytest.approx(RTX_S[3], rel=1e-3)
    for one in (fast, slow):
        expected = _averaged(one.jct_s / T4_S[3], one.jct_s / RTX_S[3])
        assert one.ftf == pytest.approx(expected, rel=5e-3)
        pooled = one.jct_s / _averaged(T4_S[3], RTX_S[3])
        assert one.ftf_pooled == pytest.approx(pooled, rel=5e-3)
    assert result.summary["ftf"]["worst"] == slow.ftf
    assert result.summary["ftf"]["pooled"]["worst"] == slow.ftf_pooled
    assert result.summary["ftf"]["unfair_fraction"] == (fast.ftf > 1) / 2 + (slow.ftf > 1) / 2
