"""What the tables of the Sia artifact do not tell of its applications (algorithms C.7, C.9, C.12).

GPU types are named as in the artifact: ``aws`` T4, ``rtx`` 2080 Ti, ``dgx-ext`` A100 and ``quad``
Quadro RTX 6000.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from slurm_synergy.errors import ConfigError

__all__ = ["MICRO_BATCHES", "SIA_MODELS", "SiaModel", "sia_model"]


MICRO_BATCHES = 48
"""Micro-batches of one sample that each copy of a pipelined model passes in a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiaModel:
    """One application. Batches in samples, times in seconds.

    ``batch`` is the total that it was tuned for and the largest allowed; ``local_least`` and
    ``local_most`` (by GPU type) bound the samples of one replica in one pass. ``restart_s`` passes
    between getting GPUs and advancing on them. ``slowdown`` is how much longer a step takes than
    the tables say. ``stages`` (by GPU type) is over how many GPUs one copy of the model is split;
    every sample of such a job counts in full, and in a step each copy passes as many micro-batches.
    """

    batch: tuple[int, int]
    local_least: int
    local_most: Mapping[str, int]
    restart_s: float = 30.0
    slowdown: float = 1.0
    stages: Mapping[str, int] = field(default_factory=dict)

    def replicas(self, kind: str, gpus: int) -> int:
        """Copies of the model on that many GPUs."""
        return gpus // self.stages.get(kind, 1)


def _by_type(aws: int, rtx: int, dgx_ext: int, quad: int) -> Mapping[str, int]:
    return MappingProxyType({"aws": aws, "rtx": rtx, "dgx-ext": dgx_ext, "quad": quad})


SIA_MODELS: Mapping[str, SiaModel] = MappingProxyType(
    {
        "cifar10": SiaModel(
            batch=(128, 4096),
            local_least=32,
            local_most=_by_type(1024, 1024, 4096, 2048),
            restart_s=50.0,
            slowdown=1.8,
        ),
        "bert": SiaModel(
            batch=(12, 384),
            local_least=4,
            local_most=_by_type(12, 12, 48, 24),
            restart_s=120.0,
            slowdown=1.2,
        ),
        "deepspeech2": SiaModel(
            batch=(20, 640),
            local_least=10,
            local_most=_by_type(80, 57, 320, 160),
            restart_s=25.0,
            slowdown=1.2,
        ),
        "yolov3": SiaModel(
            batch=(8, 512),
            local_least=4,
            local_most=_by_type(16, 8, 32, 16),
            restart_s=80.0,
            slowdown=1.2,
        ),
        "imagenet": SiaModel(
            batch=(200, 12800),
            local_least=20,
            local_most=_by_type(200, 200, 800, 400),
            restart_s=250.0,
            slowdown=1.2,
        ),
        "gpt_pmp": SiaModel(
            batch=(MICRO_BATCHES, 8 * MICRO_BATCHES),
            local_least=MICRO_BATCHES,
            local_most=MappingProxyType({"rtx": MICRO_BATCHES, "dgx-ext": MICRO_BATCHES}),
            stages=MappingProxyType({"rtx": 8, "dgx-ext": 2}),
        ),
    }
)


def sia_model(name: str, file: str, line: int) -> SiaModel:
    """The application of a row of a workload. Raises ConfigError for one that is not known."""
    if name not in SIA_MODELS:
        raise ConfigError(
            "is an application whose batch sizes are not known",
            file=file,
            key=f"line {line}, column application",
            value=name,
            remedy=f"use one of {', '.join(sorted(SIA_MODELS))}",
        )
    return SIA_MODELS[name]
