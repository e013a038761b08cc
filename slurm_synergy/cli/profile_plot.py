"""Synergy's matrix W as a heat map: in the terminal, and as PNG by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from slurm_synergy.core.model import Profile
from slurm_synergy.errors import ConfigError
from slurm_synergy.profiler.evidence import StoredProfile
from slurm_synergy.profiler.filling import matrix

__all__ = ["HeatMap", "draw", "heat_map", "write_png"]

_MIB_PER_GIB = 1024
_MOST_ROWS = 24
_COLUMNS = 10
_CPUS_PER_GPU = 16
# From slow to fast; readable with black text, and by people who cannot tell red from green.
_COLOURS = ((254, 240, 217), (253, 204, 138), (252, 141, 89), (158, 202, 225), (107, 174, 214))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """W over cores (rows) and memory in MiB (columns) on ``gpus`` GPUs of one type, samples/s."""

    key: str
    gpu_type: str
    gpus: int
    cpus: tuple[int, ...]
    mem_mib: tuple[int, ...]
    rates: tuple[tuple[float, ...], ...]

    @property
    def top(self) -> float:
        """The largest of the rates."""
        return max(map(max, self.rates))


def heat_map(
    stored: StoredProfile, *, gpu_type: str, gpus: int, most_cpus: int | None, most_mib: int | None
) -> HeatMap:
    """W of a profile on a grid.

    Raises ModelError where the GPU type is not known, ConfigError for memory in which the job
    cannot run.
    """
    profile, evidence = stored.profile, stored.evidence
    most = most_cpus or (evidence.most_cpus if evidence else _CPUS_PER_GPU * gpus)
    every = math.ceil(most / _MOST_ROWS)
    cpus = sorted({*range(every, most + 1, every), 1, most})
    mem_mib = _memory_axis(profile, most_mib)
    rates = matrix(profile, gpu_type, gpus=gpus, cpus=cpus, mem_mib=mem_mib)
    return HeatMap(
        key=profile.key,
        gpu_type=gpu_type,
        gpus=gpus,
        cpus=tuple(cpus),
        mem_mib=tuple(mem_mib),
        rates=rates,
    )


def _memory_axis(profile: Profile, most_mib: int | None) -> list[int]:
    """From what the processes need up to a cache of the whole data set, whole GiB."""
    if profile.table is not None:
        return list(profile.table.mem_mib_per_gpu)
    assert profile.pipeline is not None
    need = profile.pipeline.process_mem_mib
    if most_mib is not None and most_mib < need:
        raise ConfigError(
            f"is less than the {need / _MIB_PER_GIB:.3g} GiB that its processes need",
            key="--mem-gib",
            value=most_mib // _MIB_PER_GIB,
            remedy="name more, or leave it out for all that can matter",
        )
    whole = most_mib or math.ceil(need + profile.pipeline.dataset_mib)
    steps = [need + (whole - need) * i / _COLUMNS for i in range(_COLUMNS + 1)]
    return sorted({max(math.ceil(mib / _MIB_PER_GIB), 1) * _MIB_PER_GIB for mib in steps})


def draw(chart: HeatMap) -> None:
    """Print the map: the share of the top rate in each cell, coloured on a terminal."""
    click.echo(_title(chart))
    click.echo("cores \\ GiB" + "".join(f"{mib / _MIB_PER_GIB:>7.0f}" for mib in chart.mem_mib))
    for cpus, row in reversed(list(zip(chart.cpus, chart.rates, strict=True))):
        cells = "".join(_cell(rate / chart.top) for rate in row)
        click.echo(f"{cpus:>11}{cells}")


def _cell(share: float) -> str:
    colour = _COLOURS[min(int(share * len(_COLOURS)), len(_COLOURS) - 1)]
    return click.style(f"{share:>6.0%} ", fg="black", bg=colour)


def _title(chart: HeatMap) -> str:
    gpus = f"{chart.gpus} GPU{'s' if chart.gpus != 1 else ''} of type {chart.gpu_type}"
    return f"{chart.key} on {gpus}: 100% = {chart.top:.5g} samples/s"


def write_png(chart: HeatMap, path: Path) -> None:
    """Draw the map into ``path``. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as err:
        raise ConfigError(
            "PNG needs the package matplotlib, which is not installed",
            file=str(path),
            remedy="pip install 'slurm-synergy[report]', or leave --output away for the terminal",
        ) from err
    figure = Figure(figsize=(6.8, 4.6), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(chart.rates, origin="lower", aspect="auto", cmap="cividis", vmin=0)
    _ticks(axes.set_xticks, [f"{mib / _MIB_PER_GIB:.0f}" for mib in chart.mem_mib])
    _ticks(axes.set_yticks, [str(cpus) for cpus in chart.cpus])
    axes.set(xlabel="memory (GiB)", ylabel="cores", title=_title(chart))
    figure.colorbar(image, label="samples/s")
    figure.savefig(path, format="png", metadata={"Software": "slurm-synergy"})


def _ticks(place: object, labels: Sequence[str]) -> None:
    assert callable(place)
    place(range(len(labels)), labels)
