"""A small catalogue of model profiles, for jobs that name one (``profile=NAME``).

Where the numbers come from
---------------------------
GPU and CPU figures are the published per-model figures of the Synergy artifact (OSDI '22) for one
V100 with 3 cores and 62.5 GB: seconds per iteration at that share, batch size, and the speed-up at
saturation. With those, ``samples/s per core = batch / iteration_s / 3`` (the tables are linear in
the cores below saturation) and ``samples/s per GPU = batch / iteration_s * speed-up``.

Data set sizes are those of the public sets. The M5 entry is fitted to the artifact's memory columns
(1.5 x at 62.5 GB, 2.0 x at 125 GB, 2.5 x at 187.5 GB): a fixed-hit cache over 312.5 GB read at
500 MB/s with items of 0.49 MB meets all three. ``resnet18-openimages`` takes the ResNet-18
rates with the 645 GB OpenImages set at an assumed mean of 0.2 MB per image.

Language models run at full speed at the artifact's least core count, and the paper's motivating
example (tables 1-3) leaves a 4-GPU language job a single core without slowing it; so one core is
taken to feed 4.4 GPUs. An A100 is taken as twice a V100, a round figure for
mixed-precision training; a measured profile replaces it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from slurm_synergy.core.model import PipelineModel, Profile, ProfileOrigin

__all__ = ["CATALOGUE"]

_A100_PER_V100 = 2.0
_LANGUAGE_GPUS_PER_CORE = 4.4
_CORES_AT_BASE = 3
_LANGUAGE_GPUS_PER_CORE = 4.4
_MOST_CORES = 1024  # preprocessing scales with cores; the GPU or storage is what saturates
_MIB_PER_GB = 1e9 / 2**20
_STORAGE_MIB_S = 500e6 / 2**20  # one SATA SSD


def _profile(
    key: str,
    *,
    batch: int,
    base_iteration_s: float,
    speedup: float,
    dataset_gb: float,
    samples: int,
    process_gib: int,
    per_core: float | None = None,
) -> Profile:
    """One entry; ``per_core`` (samples/s) replaces the rate that follows from 3 cores at base."""
    base_rate = batch / base_iteration_s
    core_rate = per_core if per_core is not None else base_rate / _CORES_AT_BASE
    return Profile(
        key=key,
        gpu_rate_per_gpu=MappingProxyType(
            {"v100": base_rate * speedup, "a100": base_rate * speedup * _A100_PER_V100}
        ),
        pipeline=PipelineModel(
            preprocess=((1, core_rate), (_MOST_CORES, core_rate * _MOST_CORES)),
            dataset_mib=dataset_gb * _MIB_PER_GB,
            samples_per_epoch=samples,
            storage_mib_s=_STORAGE_MIB_S,
            process_mem_mib=process_gib * 1024,
        ),
        origin=ProfileOrigin.CATALOGUE,
        restart_s=30.0,
    )


def _image(key: str, base_iteration_s: float, speedup: float) -> Profile:
    """An ImageNet-1k classifier: 1.28 million images, 140 GB, batch 512."""
    return _profile(
        key,
        batch=512,
        base_iteration_s=base_iteration_s,
        speedup=speedup,
        dataset_gb=140.0,
        samples=1_281_167,
        process_gib=20,
    )


def _language(
    key: str, *, batch: int, base_iteration_s: float, dataset_gb: float, samples: int
) -> Profile:
    return _profile(
        key,
        batch=batch,
        base_iteration_s=base_iteration_s,
        speedup=1.0,
        dataset_gb=dataset_gb,
        samples=samples,
        process_gib=20,
        per_core=_LANGUAGE_GPUS_PER_CORE * batch / base_iteration_s,
    )


def _entries() -> tuple[Profile, ...]:
    return (
        _image("alexnet-imagenet", 0.60, 2.94),
        _image("shufflenet-imagenet", 0.615, 2.89),
        _image("resnet18-imagenet", 0.64, 2.4),
        _image("mobilenet-imagenet", 0.71, 1.55),
        _image("resnet50-imagenet", 0.78, 1.15),
        _profile(
            "resnet18-openimages",
            batch=512,
            base_iteration_s=0.64,
            speedup=2.4,
            dataset_gb=645.0,
            samples=3_225_000,
            process_gib=20,
        ),
        _profile(
            "m5-audio",
            batch=512,
            base_iteration_s=0.60,
            speedup=2.5,
            dataset_gb=312.5,
            samples=640_000,
            process_gib=20,
        ),
        # LibriSpeech: 960 hours, 281 thousand utterances, about 60 GB.
        _profile(
            "deepspeech2-librispeech",
            batch=20,
            base_iteration_s=0.757,
            speedup=1.0,
            dataset_gb=60.0,
            samples=281_241,
            process_gib=20,
        ),
        # WMT16 English-German: 4.5 million sentence pairs.
        _language(
            "gnmt-wmt16", batch=128, base_iteration_s=0.12, dataset_gb=1.3, samples=4_500_000
        ),
        # WikiText-103: 103 million tokens; 128 sequences of 192 tokens per iteration.
        _language(
            "transformerxl-wikitext103",
            batch=128,
            base_iteration_s=0.67,
            dataset_gb=0.55,
            samples=537_000,
        ),
        # WikiText-2: 2.1 million tokens; 20 sequences of 35 tokens per iteration.
        _language(
            "lstm-wikitext2", batch=20, base_iteration_s=0.011, dataset_gb=0.013, samples=60_000
        ),
    )


CATALOGUE: Mapping[str, Profile] = MappingProxyType(
    {profile.key: profile for profile in _entries()}
)
