"""``synergyctl profile``: the profiles that are known, measured or built in."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from slurm_synergy.cli.control import Target, ask, config_option, find_target, options
from slurm_synergy.cli.profile_plot import draw, heat_map, write_png
from slurm_synergy.cli.profile_source import (
    Found,
    check_tells_of_cores,
    find_profile,
    read_document,
    store,
    write_file,
)
from slurm_synergy.cli.tables import print_table
from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.model import PipelineModel, ProfileOrigin
from slurm_synergy.core.wording import duration, printable
from slurm_synergy.errors import ModelError
from slurm_synergy.profiler.documents import from_document, to_document
from slurm_synergy.profiler.evidence import (
    UNTYPED,
    Evidence,
    StoredProfile,
    checked_key,
    on_type,
)

__all__ = ["gpu_types_of", "profile"]

_MIB_PER_GIB = 1024
_SOURCES: Mapping[ProfileOrigin, str] = {
    ProfileOrigin.CATALOGUE: "built in, from published figures",
    ProfileOrigin.MEASURED: "measured",
    ProfileOrigin.DEFAULT: "default",
}


@click.group()
def profile() -> None:
    """The profiles that are known: how fast jobs go with how many cores and how much memory."""


@profile.command("list")
@options
def list_profiles(config: Path | None, as_json: bool) -> None:
    """Show what a job may name with the hint profile=NAME: measured ones and the catalogue.

    Measured are those of the controller's store that you may see. Where none answers, the
    catalogue alone is shown.
    """
    documents, silent = store(config)
    kept = _readable(documents)
    owners = {str(document["key"]): document.get("owner") for document in documents}
    names = {one.profile.key for one in kept}
    built_in = [
        StoredProfile(profile=one) for key, one in sorted(CATALOGUE.items()) if key not in names
    ]
    entries = [_entry(one, owners.get(one.profile.key)) for one in (*kept, *built_in)]
    if as_json:
        click.echo(json.dumps({"profiles": entries}, indent=2))
        return
    kinds = sorted({kind for one in (*kept, *built_in) for kind in one.profile.gpu_rate_per_gpu})
    heads = [head for kind in kinds for head in (f"{kind.upper()} RATE", f"{kind.upper()} CORES")]
    print_table(("PROFILE", *heads, "DATA SET", "SOURCE"), [_row(one, kinds) for one in entries])
    click.echo(
        "RATE: samples/s of one GPU when data is always ready; CORES: how many feed it. The "
        "figures that are built in were published for V100; an A100 is taken as two of them."
    )
    if silent:
        click.echo(f"(without the controller's store: {printable(silent)})", err=True)


def _readable(documents: Sequence[Mapping[str, Any]]) -> list[StoredProfile]:
    """Those that can be read: one that somebody's job has spoilt must not hide the others."""
    found = []
    for document in documents:
        try:
            found.append(from_document(document))
        except ModelError as err:
            text = printable(f"{document.get('key')}: {err}")
            click.echo(f"(left out, as it cannot be read: {text})", err=True)
    return found


@profile.command("show")
@click.argument("name", metavar="KEY|FILE")
@options
def show(name: str, config: Path | None, as_json: bool) -> None:
    """Show one profile: what was measured, and what follows from it."""
    found = find_profile(name, config)
    if as_json:
        click.echo(json.dumps({**to_document(found.stored), "place": found.place}, indent=2))
        return
    for line in _told(found):
        click.echo(printable(line))
    evidence = found.stored.evidence
    if evidence is not None:
        print_table(
            ("CORES", "SAMPLES/S", "STEPS", "WAITING"),
            [
                (
                    str(point.cpus),
                    f"{point.samples_per_s:.5g}",
                    str(point.iterations),
                    "-" if point.wait_share is None else f"{point.wait_share:.0%}",
                )
                for point in sorted(evidence.points, key=lambda one: one.cpus)
            ],
        )


def _told(found: Found) -> list[str]:
    one, evidence = found.stored.profile, found.stored.evidence
    rates = ", ".join(
        f"{rate:.5g} samples/s on {kind}" for kind, rate in sorted(one.gpu_rate_per_gpu.items())
    )
    said = [f"{one.key} (from {found.place})", f"one GPU, data always ready: {rates}"]
    if one.pipeline is not None:
        pipeline = one.pipeline
        points = ", ".join(f"{cpus}: {rate:.5g}" for cpus, rate in pipeline.preprocess)
        said.append(f"loading, samples/s by cores of a node: {points}")
        said.append(_told_memory(pipeline))
    if evidence is not None:
        said.extend(_told_evidence(evidence))
    return said


def _told_memory(pipeline: PipelineModel) -> str:
    processes = f"processes {pipeline.process_mem_mib / _MIB_PER_GIB:.3g} GiB"
    if not pipeline.dataset_mib:
        return (
            f"data set not known: memory beyond the processes' is taken not to matter; {processes}"
        )
    reads = f"{pipeline.storage_mib_s:.4g} MiB/s"
    if pipeline.storage_mib_s == float("inf"):
        reads = "taken not to limit"
    return (
        f"data set {pipeline.dataset_mib / _MIB_PER_GIB:.3g} GiB in "
        f"{pipeline.samples_per_epoch} samples, storage {reads}, {processes}"
    )


def _told_evidence(evidence: Evidence) -> list[str]:
    age = duration(max(time.time() - evidence.measured_s, 0))
    said = [
        f"measured {age} ago on {evidence.gpus} "
        f"GPU{'s' if evidence.gpus != 1 else ''} of type {evidence.gpu_type} with up to "
        f"{evidence.most_cpus} cores: {evidence.source or 'place not known'}",
        f"confidence {evidence.confidence.value}" + (f": {evidence.why}" if evidence.why else ""),
    ]
    return [*said, *([evidence.data] if evidence.data else [])]


@profile.command("export")
@click.argument("name", metavar="KEY|FILE")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File to write.  [default: standard output]",
)
@config_option
def export(name: str, output: Path | None, config: Path | None) -> None:
    """Write a profile as a JSON document that 'profile import' reads."""
    text = json.dumps(to_document(find_profile(name, config).stored), indent=2) + "\n"
    if output is None:
        click.echo(text, nl=False)
    else:
        write_file(output, lambda path: path.write_text(text, encoding="utf-8"))


@profile.command("import")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--gpu-type", help="Type of its GPUs, if it has none.  [default: the only one of the cluster]"
)
@options
def import_(file: Path, gpu_type: str | None, config: Path | None, as_json: bool) -> None:
    """Bring a profile (of synergy-profile, or exported elsewhere) into the controller's store.

    Your own keys may be replaced by you; built-in names and others' keys only by operators.
    """
    given = read_document(file)
    if not gpu_types_of(given):
        raise ModelError(
            f"{file}: samples_per_s_per_gpu: names no GPU type, so nothing can be planned with it: "
            "measure it with synergy-profile"
        )
    target = find_target(config, os.environ)
    typed = _typed(given, target) if gpu_type is None else _of_type(given, gpu_type, target)
    done = ask(target, "import", body=json.dumps(to_document(typed)))
    word = "replaced" if done["replaced"] else "kept"
    if typed != given:
        word += f", for GPUs of type {gpu_types_of(typed)[0]}"
    click.echo(json.dumps(done) if as_json else f"profile {done['key']}: {word}")


def _of_type(stored: StoredProfile, gpu_type: str, target: Target) -> StoredProfile:
    """With the type that was named. Raises ModelError for one that the cluster does not have."""
    typed, kinds = on_type(stored, gpu_type), _kinds(target)
    if kinds and gpu_type not in kinds:
        raise ModelError(
            f"--gpu-type {gpu_type!r}: this cluster has {', '.join(kinds)}; name the one that the "
            "profile was measured on"
        )
    return typed


def _kinds(target: Target) -> list[str]:
    """The GPU types of the cluster, as far as the controller has read it."""
    return sorted({node["gpu_type"] for node in ask(target, "status")["nodes"] if node["gpus"]})


def _typed(stored: StoredProfile, target: Target) -> StoredProfile:
    """With a type that the cluster has. Raises ModelError where it cannot be told which."""
    if stored.evidence is None or stored.evidence.gpu_type != UNTYPED:
        return stored
    kinds = _kinds(target)
    if not kinds or UNTYPED in kinds:
        return stored
    if len(kinds) > 1:
        raise ModelError(
            f"profile {stored.profile.key!r} was measured without --gpu-type, and this cluster has "
            f"{', '.join(kinds)}: import it with --gpu-type and the one that it was measured on"
        )
    return on_type(stored, kinds[0])


@profile.command("forget")
@click.argument("key")
@options
def forget(key: str, config: Path | None, as_json: bool) -> None:
    """Drop a profile from the controller's store: the next job of that key is measured anew."""
    body = checked_key(key)
    done = ask(find_target(config, os.environ), "forget", body=body)
    click.echo(json.dumps(done) if as_json else f"profile {done['key']}: forgotten")


def _shape_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in (
        click.option("--gpu-type", help="GPU type.  [default: the one it was measured on]"),
        click.option("--gpus", type=click.IntRange(min=1), help="GPUs of the job on one node."),
        click.option("--cpus", type=click.IntRange(min=1), help="Most cores to show."),
        click.option("--mem-gib", type=click.IntRange(min=1), help="Most memory to show, GiB."),
    ):
        command = option(command)
    return command


@profile.command("plot")
@click.argument("name", metavar="KEY|FILE")
@_shape_options
@click.option(
    "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write a PNG instead."
)
@config_option
def plot(
    name: str,
    gpu_type: str | None,
    gpus: int | None,
    cpus: int | None,
    mem_gib: int | None,
    output: Path | None,
    config: Path | None,
) -> None:
    """Draw how fast a job is over cores and memory (Synergy's matrix W)."""
    stored = find_profile(name, config).stored
    check_tells_of_cores(stored)
    chart = heat_map(
        stored,
        gpu_type=gpu_types_of(stored)[0] if gpu_type is None else gpu_type,
        gpus=gpus or (stored.evidence.gpus if stored.evidence else 1),
        most_cpus=cpus,
        most_mib=mem_gib * _MIB_PER_GIB if mem_gib else None,
    )
    if output is None:
        draw(chart)
    else:
        write_file(output, lambda path: write_png(chart, path))
        click.echo(f"wrote {output}")


def gpu_types_of(stored: StoredProfile) -> list[str]:
    """The GPU types that a profile knows, the measured one first."""
    first = stored.evidence.gpu_type if stored.evidence else ""
    return sorted(stored.profile.gpu_rate_per_gpu, key=lambda kind: (kind != first, kind))


# -- the table of all ------------------------------------------------------------------------------


def _entry(stored: StoredProfile, owner: object) -> dict[str, Any]:
    one, pipeline, evidence = stored.profile, stored.profile.pipeline, stored.evidence
    gpus = evidence.gpus if evidence else 1
    cores = {
        kind: _cores(pipeline, rate * gpus, gpus)
        for kind, rate in sorted(one.gpu_rate_per_gpu.items())
    }
    return {
        "profile": one.key,
        "samples_per_s_per_gpu": {
            kind: round(rate, 1) for kind, rate in sorted(one.gpu_rate_per_gpu.items())
        },
        "saturating_cores_per_gpu": cores,
        "dataset_mib": round(pipeline.dataset_mib) if pipeline else None,
        "samples_per_epoch": pipeline.samples_per_epoch if pipeline else None,
        "source": _SOURCES[one.origin],
        "confidence": evidence.confidence.value if evidence else None,
        "owner": owner,
    }


def _cores(pipeline: PipelineModel | None, rate: float, gpus: int) -> float | None:
    """Cores per GPU that preprocess ``rate`` samples/s for all; None when no number of cores does.

    A rate that the last point misses by what measuring scatters counts as reached.
    """
    if pipeline is None:
        return None
    for (low, low_rate), (high, high_rate) in pairwise(((0, 0.0), *pipeline.preprocess)):
        if rate <= high_rate * (1 + 1e-9):
            part = (rate - low_rate) / (high_rate - low_rate) if high_rate > low_rate else 0.0
            return round((low + (high - low) * min(part, 1.0)) / gpus, 2)
    return None


def _row(entry: Mapping[str, Any], kinds: list[str]) -> tuple[str, ...]:
    rates, cores = entry["samples_per_s_per_gpu"], entry["saturating_cores_per_gpu"]
    cells = [_number(value.get(kind)) for kind in kinds for value in (rates, cores)]
    source = str(entry["source"])
    if entry["confidence"] is not None:
        source += f", confidence {entry['confidence']}"
    if entry["owner"]:
        source += f", of {entry['owner']}"
    return (str(entry["profile"]), *cells, _size(entry["dataset_mib"]), source)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _size(mib: object) -> str:
    return f"{mib / _MIB_PER_GIB:.3g}G" if isinstance(mib, int) and mib else "-"
