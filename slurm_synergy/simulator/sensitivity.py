"""The models that Synergy's traces name, with their published sensitivity to cores and memory.

Source: the figures of the Synergy artifact (OSDI '22) for one V100 with 3 cores and 62.5 GB as the
proportional share: seconds per iteration at that share, batch size, and the rate relative to it
over cores and memory. Each of its matrices is the smaller of a row over cores and a row over
memory, which is how they are written down here. A GB of the artifact is taken as 1 GiB throughout.
Image and speech models have their data set outside memory at 20.83 GB per GPU and run at a tenth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.model import Profile, ProfileOrigin, SensitivityTable
from slurm_synergy.errors import ModelError

__all__ = ["MEASURED_ON", "MODELS", "TASKS", "TraceModel", "profile_for"]

MEASURED_ON = "v100"
"""The type of GPU that the figures are of."""

_CPUS = (1, 2, 3, 4, 5, 6, 9, 12, 24)
_MEM_MIB = (21_333, 64_000, 128_000, 192_000, 256_000)  # 20.83, 62.5, 125, 187.5, 250 GiB
_LANGUAGE_MIB = 20 * 1024
_UNCACHED = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceModel:
    """One model: its task, samples per iteration on one GPU, and rates in samples/s per GPU."""

    name: str
    task: str
    batch: int
    table: SensitivityTable

    @property
    def top_rate(self) -> float:
        """Samples/s of one GPU with all the cores and memory that it can use."""
        return self.table.rates[-1][-1]


def _model(
    name: str,
    task: str,
    *,
    batch: int,
    iteration_s: float,
    by_cpus: Iterable[float],
    by_mem: Mapping[int, float],
) -> TraceModel:
    base = batch / iteration_s
    columns = tuple(by_mem)
    rates = tuple(tuple(base * min(cpu, by_mem[m]) for m in columns) for cpu in by_cpus)
    table = SensitivityTable(cpus_per_gpu=_CPUS, mem_mib_per_gpu=columns, rates=rates)
    return TraceModel(name=name, task=task, batch=batch, table=table)


def _columns(*relative: float) -> dict[int, float]:
    return dict(zip(_MEM_MIB, (_UNCACHED, *relative), strict=True))


def _image(
    name: str, iteration_s: float, by_cpus: Iterable[float], at_share: float, top: float
) -> TraceModel:
    by_mem = _columns(at_share, top, top, top)
    return _model(name, "image", batch=512, iteration_s=iteration_s, by_cpus=by_cpus, by_mem=by_mem)


def _language(name: str, batch: int, iteration_s: float) -> TraceModel:
    return _model(
        name,
        "language",
        batch=batch,
        iteration_s=iteration_s,
        by_cpus=[1.0] * len(_CPUS),
        by_mem={_LANGUAGE_MIB: 1.0},
    )


def _known() -> tuple[TraceModel, ...]:
    small = (0.3, 0.66, 1.0, 1.25, 1.53, 1.75, 2.0)
    middle = (0.37, 0.72, 1.0, 1.3)
    return (
        _image("alexnet", 0.6, (*small, 2.94, 2.94), 2.0, 2.94),
        _image("shufflenet", 0.615, (*small, 2.89, 2.89), 2.0, 2.89),
        _image("resnet18", 0.64, (*middle, 1.53, 1.75, 2.4, 2.4, 2.4), 2.4, 2.4),
        _image("mobilenet", 0.71, (*middle, 1.49, 1.55, 1.55, 1.55, 1.55), 1.55, 1.55),
        _image("resnet50", 0.78, (0.4, 0.74, 1.0, *[1.15] * 6), 1.15, 1.15),
        _model(
            "m5",
            "speech",
            batch=512,
            iteration_s=0.6,
            by_cpus=(0.3, 0.66, 1.0, 1.2, 1.4, 2.5, 2.5, 2.5, 2.5),
            by_mem=_columns(1.5, 2.0, 2.5, 2.5),
        ),
        _model(
            "deepspeech",
            "speech",
            batch=20,
            iteration_s=0.757,
            by_cpus=(0.3, 0.66, *[1.0] * 7),
            by_mem=_columns(1.0, 1.0, 1.0, 1.0),
        ),
        _language("gnmt", 128, 0.12),
        _language("transformer", 128, 0.67),
        _language("lstm", 20, 0.011),
    )


_BY_NAME = {model.name: model for model in _known()}

MODELS: Mapping[str, TraceModel] = MappingProxyType(
    {**_BY_NAME, "res18": _BY_NAME["resnet18"], "res50": _BY_NAME["resnet50"]}
)
"""Models by name, the short names of the recorded traces included."""

TASKS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        task: tuple(name for name, model in _BY_NAME.items() if model.task == task)
        for task in ("image", "language", "speech")
    }
)
"""Model names by task, in the order of a split such as 20/70/10."""


def profile_for(name: str, gpu_types: Iterable[str], restart_s: float) -> Profile:
    """The profile of a model of this module or of the catalogue, by name.

    A table is of one kind of GPU; the same rates are taken for all of ``gpu_types``. Raises
    ModelError for a name that neither knows.
    """
    model = MODELS.get(name)
    if model is not None:
        return Profile(
            key=model.name,
            gpu_rate_per_gpu=dict.fromkeys(sorted(gpu_types), model.top_rate),
            table=model.table,
            origin=ProfileOrigin.CATALOGUE,
            restart_s=restart_s,
        )
    known = CATALOGUE.get(name)
    if known is None:
        names = ", ".join(sorted({*MODELS, *CATALOGUE}))
        raise ModelError(f"unknown model {name!r}; known are {names}")
    return Profile(
        key=known.key,
        gpu_rate_per_gpu=known.gpu_rate_per_gpu,
        pipeline=known.pipeline,
        origin=known.origin,
        restart_s=restart_s,
    )
