"""Input pipelines for Sia's applications: the needs of Synergy's models, mapped on them.

Sia's measurements have no input pipeline: data was always ready. Synergy's (OSDI '22) tell how many
cores a GPU of a model needs until it is. Each application takes after a model of its task, so that
it needs as many cores per GPU on the GPU in the middle of the three types; a faster one needs more.
Or the needs are dealt out to the jobs in the parts of Synergy's evaluation, whatever they train.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from slurm_synergy.core.model import PipelineModel
from slurm_synergy.simulator.generate import ModelMix, parse_split
from slurm_synergy.simulator.sensitivity import MODELS
from slurm_synergy.simulator.training import Training

__all__ = ["CORES_PER_GPU", "MEASURED_ON", "dealt_cores", "pipeline_of"]

CORES_PER_GPU: Mapping[str, float] = MappingProxyType(
    {
        "cifar10": 12.0,  # as AlexNet and ShuffleNet
        "imagenet": 9.0,  # as ResNet-18
        "yolov3": 6.0,  # as MobileNet
        "deepspeech2": 3.0,  # as DeepSpeech
        "bert": 1.0,  # as GNMT and Transformer-XL
    }
)
"""Cores per GPU of ``MEASURED_ON`` beyond which a training is no longer slowed by its input."""

MEASURED_ON = "rtx"
"""The GPU type, of medium speed, that the cores are for."""

_MOST_CORES = 256
_SPLIT = "20/70/10"
_ENOUGH = 0.999


def dealt_cores(jobs: int) -> list[float]:
    """Cores per GPU that each of so many jobs needs: of Synergy's models, dealt out 20/70/10."""
    mix = ModelMix(parse_split(_SPLIT))
    return [_saturating(mix.next()) for _ in range(jobs)]


def _saturating(model: str) -> float:
    """The least measured number of cores with which a GPU of the model is as fast as ever."""
    table = MODELS[model].table
    rates = [row[-1] for row in table.rates]
    return next(
        float(cpus)
        for cpus, rate in zip(table.cpus_per_gpu, rates, strict=True)
        if rate >= _ENOUGH * rates[-1]
    )


def pipeline_of(training: Training, cores: float | None = None) -> PipelineModel | None:
    """The pipeline of an application: linear in the cores, and never waiting for storage.

    ``cores`` are those per GPU that it needs; None: as a model of its task does. None where nothing
    is known of one like it: its data is always ready.
    """
    if cores is None:
        cores = CORES_PER_GPU.get(training.application.name)
    if cores is None or MEASURED_ON not in training.application.steps:
        return None
    observed = sorted(training.alone(MEASURED_ON), key=lambda one: one[1])
    copy, local = observed[-1]
    times = training.times(MEASURED_ON, copy, local)
    assert times is not None  # what was observed is known
    per_core = local / times[1] / (sum(copy) * cores)
    return PipelineModel(preprocess=((1, per_core), (_MOST_CORES, _MOST_CORES * per_core)))
