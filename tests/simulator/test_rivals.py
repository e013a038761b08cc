"""The policies to compare with, on a small trace; and what TunedJobs asks for."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slurm_synergy.core.decide import Policy
from slurm_synergy.core.genetic import Found
from slurm_synergy.core.model import Snapshot
from slurm_synergy.linear import maximise
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES
from slurm_synergy.policies.pollux import POLLUX, Pollux
from slurm_synergy.simulator.measured import Application, StepTable, read_application
from slurm_synergy.simulator.pool import make_nodes
from slurm_synergy.simulator.sia_models import SIA_MODELS
from slurm_synergy.simulator.study import Study, StudyResult, run_study
from slurm_synergy.simulator.traces import Trace, TraceJob
from slurm_synergy.simulator.tuned_jobs import tuned_shapes

_DATA = os.environ.get("SIA_DATA", "")

# Average and largest completion time in hours, and restarts per job.
GOLDEN = {
    "gavel": (1.0458, 2.5011, 2.4167),
    "shockwave": (1.0597, 2.1006, 2.25),
    "themis": (1.1379, 2.3706, 3.0),
}


def small(policy: Policy) -> StudyResult:
    """A dozen jobs of ten minutes to an hour, on two nodes that cannot hold them all."""
    nodes = make_nodes(name="n", count=2, gpu_type="v100", gpus=4, cpus=12, mem_gib=250)
    jobs = tuple(
        TraceJob(
            job_id=at,
            arrival_s=240.0 * at,
            gpus=(1, 4, 2)[at % 3],
            duration_s=600.0 * (1 + at * 5 % 6),
            model="resnet18",
        )
        for at in range(1, 13)
    )
    return run_study(
        Study(
            nodes=tuple(nodes),
            trace=Trace(jobs=jobs),
            policy=policy,
            mechanism=MECHANISMS["proportional"],
            round_s=360.0,
        )
    )


@pytest.mark.parametrize("policy", sorted(GOLDEN))
def test_a_small_trace_is_played_as_ever(policy: str) -> None:
    result = small(POLICIES[policy])
    summary = result.summary
    longest_h = max(one.jct_s for one in result.jobs) / 3600
    found = (summary["avg_jct_s"] / 3600, longest_h, summary["restarts_per_job"])
    assert found == pytest.approx(GOLDEN[policy], rel=0.02), found


def test_pollux_searches_once_a_round_and_not_when_jobs_come_or_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[float] = []
    before = Pollux._search

    def noted(self: Pollux, snapshot: Snapshot, board: Any) -> Found:
        searched.append(snapshot.now_s)
        return before(self, snapshot, board)

    monkeypatch.setattr(Pollux, "_search", noted)
    result = small(replace(POLLUX, population=10, generations=3))
    rounds = [moment.time_s for moment in result.played.moments]
    assert searched[:9] == [240.0, *(360.0 * at for at in range(1, 9))]
    assert len({at_s // 360 for at_s in searched}) == len(searched) < len(rounds)


def made(sync_s: float) -> Application:
    """A job of ten thousand steps whose batches all do equally well."""
    patterns = [(1,), *((4,) * whole + (rest,) * bool(rest) for whole, rest in map(_split, EVEN))]
    rows = {
        tuple(sorted(pattern)): np.array(
            [
                (batch, 0.001 * batch + sync_s * (sum(pattern) > 1), sync_s * (sum(pattern) > 1))
                for batch in (1.0, 8.0, 64.0, 512.0)
            ]
        )
        for pattern in patterns
    }
    return Application(
        name="cifar10",
        steps={"rtx": StepTable(gpu_type="rtx", placements=rows, scale=np.empty((0, 5)))},
        epochs=np.array([10_000.0]),
        batches=(128, 512),
        squares=np.array([[0.0], [0.0]]),
        variances=np.array([[1.0], [1.0]]),
    )


EVEN = range(2, 17, 2)


def _split(gpus: int) -> tuple[int, int]:
    return divmod(gpus, 4)


def test_tuned_jobs_ask_for_what_scales_by_half_to_four_fifths() -> None:
    # A batch of 512 takes .512 s on one GPU, and .512 / k + .02 s on k: 1 / (1 + k / 25.6) of it.
    found = tuned_shapes(made(0.02), SIA_MODELS["cifar10"], "rtx", 4, 16)
    expected = [k for k in EVEN if 0.5 <= 1 / (1 + k / 25.6) <= 0.8]
    assert [(one.gpus, one.batch) for one in found] == [(k, 512) for k in expected]
    assert expected == [8, 10, 12, 14, 16]
    for one in found:
        assert one.efficiency == pytest.approx(1 / (1 + one.gpus / 25.6), rel=0.02)  # whole samples


def test_where_nothing_scales_well_the_nearest_is_asked_for() -> None:
    (one,) = tuned_shapes(made(2.0), SIA_MODELS["cifar10"], "rtx", 4, 16)
    assert one.gpus == 2 and one.efficiency < 0.5


@pytest.mark.skipif(
    not (Path(_DATA) / "profiles").is_dir() if _DATA else True,
    reason="set SIA_DATA to the directory with the Sia artifact's profiles and workloads",
)
def test_tuned_jobs_of_the_artifact() -> None:
    directory = Path(_DATA) / "profiles/deepspeech2"
    model = SIA_MODELS["deepspeech2"]
    found = tuned_shapes(read_application(directory, ["rtx"]), model, "rtx", 8, 16)
    assert [(one.gpus, one.batch) for one in found] == [(2, 80), (4, 160), (6, 320), (8, 320)]
    hours = [one.alone_s / model.slowdown / 3600 for one in found]
    assert hours == pytest.approx([1.718, 1.024, 0.742, 0.594], rel=0.02)


def test_a_solver_for_integers_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(1)
    for _ in range(3):
        answer = maximise(
            rng.random(40),
            rng.integers(1, 9, (5, 40)).astype(float),
            np.full(5, 40.0),
            most=1.0,
            whole=np.ones(40, dtype=bool),
        )
        assert answer.status == "optimal"
    assert capfd.readouterr().out == ""
