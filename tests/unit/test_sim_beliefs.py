"""What a simulated job is believed to be changes only where something was learned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from slurm_synergy.core.goodput import GradientStatistics, ThroughputModel
from slurm_synergy.core.model import Placement, Profile
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.scaling import BatchSize
from slurm_synergy.simulator.learning import Learning, Profiling
from slurm_synergy.simulator.training import Training

_FITTED = ThroughputModel(compute_s=0.1, compute_s_per_sample=0.01)


def _training() -> tuple[Training, list[object]]:
    """A training of epochs of ten steps, and what was fitted of it."""
    fits: list[object] = []

    def fit(kind: str, observed: object) -> ThroughputModel:
        fits.append((kind, observed))
        return _FITTED

    made = SimpleNamespace(
        application=SimpleNamespace(epoch=lambda progress: int(progress // 10)),
        model=SimpleNamespace(batch=(10, 80), local_least=1, local_most={"k": 40}, stages={}),
        alone=lambda kind: frozenset({((1,), 10)}),
        fit=fit,
        statistics=lambda epoch, total: GradientStatistics(square=1.0, variance=1.0 + epoch),
        pattern=lambda placement: tuple(share.gpus for _, share in placement.shares),
        times=lambda kind, pattern, local: (0.1, 0.2),
    )
    return cast(Training, made), fits


def _on(gpus: int, local: int) -> Placement:
    batch = BatchSize(local=local, replicas=gpus)
    shares = (("n", Resources(gpus=gpus, cpus=1, mem_mib=1)),)
    return Placement(job_id=1, gpu_type="k", shares=shares, batch=batch)


@pytest.mark.parametrize(
    ("gpus", "local", "done", "is_new", "has_speeds"),
    [
        (1, 10, 0.0, True, False),  # one GPU is more than was explored
        (1, 10, 50.0, False, False),
        (1, 10, 150.0, True, True),  # the next epoch: other statistics alone
        (1, 20, 150.0, True, False),  # a batch that was not seen
        (2, 20, 150.0, True, False),
    ],
)
def test_speeds_are_the_same_object_while_only_statistics_are_new(
    gpus: int, local: int, done: float, is_new: bool, has_speeds: bool
) -> None:
    training, fits = _training()
    learning = Learning(training, Profile(), ("k",), Profiling.BOOTSTRAP)
    if done or local > 10:
        learning.watch(_on(1, 10), 0.0)
    before, count = cast(Any, learning.belief), len(fits)
    learning.watch(_on(gpus, local), done)
    after = cast(Any, learning.belief)
    assert (after is not before) == is_new
    assert (after.scaling.speeds is before.scaling.speeds) == (has_speeds or not is_new)
    assert (len(fits) > count) == (is_new and not has_speeds)
    assert after.scaling.statistics.variance == 1.0 + done // 100
