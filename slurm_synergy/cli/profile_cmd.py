"""``synergyctl profile list``: the models whose speed is known, for the hint ``profile=NAME``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise

import click

from slurm_synergy.cli.tables import print_table
from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.model import PipelineModel, Profile, ProfileOrigin

__all__ = ["profile"]

_MIB_PER_GIB = 1024
_SOURCES: Mapping[ProfileOrigin, str] = {
    ProfileOrigin.CATALOGUE: "built in, from published figures",
    ProfileOrigin.MEASURED: "measured",
    ProfileOrigin.DEFAULT: "default",
}


@click.group()
def profile() -> None:
    """The models whose speed is known."""


@profile.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_profiles(as_json: bool) -> None:
    """Show the catalogue: what a job may name with the hint profile=NAME."""
    entries = [_entry(one) for _, one in sorted(CATALOGUE.items())]
    if as_json:
        click.echo(json.dumps({"profiles": entries}, indent=2))
        return
    kinds = sorted({kind for one in CATALOGUE.values() for kind in one.gpu_rate_per_gpu})
    heads = [head for kind in kinds for head in (f"{kind.upper()} RATE", f"{kind.upper()} CORES")]
    print_table(("PROFILE", *heads, "DATA SET", "SOURCE"), [_row(one, kinds) for one in entries])
    click.echo(
        "RATE: samples/s of one GPU when data is always ready; CORES: how many feed it. The "
        "figures that are built in were published for V100; an A100 is taken as two of them."
    )


def _entry(one: Profile) -> dict[str, object]:
    pipeline = one.pipeline
    cores = {kind: _cores(pipeline, rate) for kind, rate in sorted(one.gpu_rate_per_gpu.items())}
    return {
        "profile": one.key,
        "samples_per_s_per_gpu": {
            kind: round(rate, 1) for kind, rate in sorted(one.gpu_rate_per_gpu.items())
        },
        "saturating_cores_per_gpu": cores,
        "dataset_mib": round(pipeline.dataset_mib) if pipeline else None,
        "samples_per_epoch": pipeline.samples_per_epoch if pipeline else None,
        "source": _SOURCES[one.origin],
    }


def _cores(pipeline: PipelineModel | None, rate: float) -> float | None:
    """Cores that preprocess ``rate`` samples/s; None when no number of cores does."""
    if pipeline is None:
        return None
    for (low, low_rate), (high, high_rate) in pairwise(((0, 0.0), *pipeline.preprocess)):
        if rate <= high_rate:
            return round(low + (high - low) * (rate - low_rate) / (high_rate - low_rate), 2)
    return None


def _row(entry: Mapping[str, object], kinds: list[str]) -> tuple[str, ...]:
    rates, cores = entry["samples_per_s_per_gpu"], entry["saturating_cores_per_gpu"]
    assert isinstance(rates, Mapping)
    assert isinstance(cores, Mapping)
    cells = [_number(value.get(kind)) for kind in kinds for value in (rates, cores)]
    return (str(entry["profile"]), *cells, _size(entry["dataset_mib"]), str(entry["source"]))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _size(mib: object) -> str:
    return f"{mib / _MIB_PER_GIB:.3g}G" if isinstance(mib, int) else "-"
