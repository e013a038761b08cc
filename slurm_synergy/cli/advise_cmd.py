"""``synergyctl advise``: how much a job should ask for, from its profile."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from slurm_synergy.cli.control import ask, find_target, options
from slurm_synergy.cli.profile_cmd import gpu_types_of
from slurm_synergy.cli.profile_source import Found, check_tells_of_cores, find_profile
from slurm_synergy.core.wording import printable
from slurm_synergy.errors import ConfigError, LeaseError, ModelError
from slurm_synergy.profiler.evidence import UNTYPED, StoredProfile
from slurm_synergy.profiler.sizing import NodeShape, Size, sizes
from slurm_synergy.profiler.sweep import Confidence

__all__ = ["advise"]

_MIB_PER_GIB = 1024
_CPUS_PER_GPU = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Advice:
    """What is advised for one GPU type; ``problem`` says why nothing is."""

    shape: NodeShape
    sizes: tuple[Size, ...] = ()
    problem: str = ""


@click.command()
@click.argument("name", metavar="JOB|KEY|FILE")
@click.option("--gpus", type=click.IntRange(min=1), help="GPUs on one node.  [default: as known]")
@options
def advise(name: str, gpus: int | None, config: Path | None, as_json: bool) -> None:
    """Say how many cores and how much memory bring a job to its speed, as #SBATCH lines.

    JOB is the id of a queued or running job whose profile is known; or name a profile. The nodes
    are those of the controller; without one, the machine that the profile was measured on.
    """
    is_job = re.fullmatch(r"[0-9]+(_[0-9]+)?", name) is not None
    key, of_job = _of_job(name, config) if is_job else (name, None)
    found = find_profile(key, config)
    check_tells_of_cores(found.stored)
    wanted = gpus or of_job or (found.stored.evidence.gpus if found.stored.evidence else 1)
    advice = [_advised(found.stored, shape, wanted) for shape in _shapes(found.stored, config)]
    if all(one.problem for one in advice):
        raise ModelError(
            f"profile {found.stored.profile.key!r}, {wanted} GPUs on a node: "
            + "; ".join(f"{one.shape.gpu_type}: {one.problem}" for one in advice)
            + "; give fewer with --gpus, per node"
        )
    if as_json:
        click.echo(json.dumps(_as_json(found, wanted, advice), indent=2))
        return
    click.echo(f"profile {found.stored.profile.key}, from {printable(found.place)}")
    for one in advice:
        for line in _told(found.stored, one, wanted):
            click.echo(printable(line))


def _of_job(job: str, config: Path | None) -> tuple[str, int]:
    """The profile key of a job and its GPUs on a node. Raises ModelError when there is none."""
    for one in ask(find_target(config, os.environ), "jobs")["jobs"]:
        if job not in (str(one["job_id"]), one.get("array")):
            continue
        if not one.get("profile"):
            raise ModelError(
                f"the profile of job {job} is not known: it names none, was not measured yet, or "
                "is not yours to see; name a profile ('synergyctl profile list')"
            )
        nodes = one["lease"]["nodes"] if one["lease"] else []
        per_node = max((len(node.get("gpu_ids", ())) for node in nodes), default=0)
        return str(one["profile"]), per_node or int(one["gpus"])
    raise ModelError(
        f"the controller knows no job {job}: name a queued or running one ('synergyctl jobs'), or "
        "a profile ('synergyctl profile list')"
    )


def _shapes(stored: StoredProfile, config: Path | None) -> list[NodeShape]:
    """The kinds of nodes with GPUs that the profile knows, largest per GPU type."""
    known = gpu_types_of(stored)
    try:
        nodes = ask(find_target(config, os.environ), "status")["nodes"]
    except (ConfigError, LeaseError):
        if config is not None:
            raise
        nodes = []
    found: dict[str, NodeShape] = {}
    for node in nodes:
        shape = NodeShape(
            gpu_type=node["gpu_type"],
            gpus=node["gpus"],
            cpus=node["cpus"],
            mem_mib=node["mem_mib"],
        )
        before = found.get(shape.gpu_type)
        if shape.gpu_type in known and (before is None or shape.cpus > before.cpus):
            found[shape.gpu_type] = shape
    return [found.get(kind) or _as_measured(stored, kind) for kind in known]


def _as_measured(stored: StoredProfile, gpu_type: str) -> NodeShape:
    """A node like the one that was measured on, or one that limits nothing."""
    evidence, pipeline = stored.evidence, stored.profile.pipeline
    whole = (pipeline.dataset_mib + pipeline.process_mem_mib) if pipeline else 0.0
    mem_gib = max(int(whole / _MIB_PER_GIB) + 2, 4)
    return NodeShape(
        gpu_type=gpu_type,
        gpus=max(evidence.gpus if evidence else 8, 8),
        cpus=evidence.most_cpus if evidence else 8 * _CPUS_PER_GPU,
        mem_mib=mem_gib * _MIB_PER_GIB,
    )


def _advised(stored: StoredProfile, shape: NodeShape, gpus: int) -> _Advice:
    try:
        return _Advice(shape=shape, sizes=sizes(stored.profile, shape, gpus))
    except ModelError as err:
        return _Advice(shape=shape, problem=str(err))


def _told(stored: StoredProfile, advice: _Advice, gpus: int) -> list[str]:
    kind = advice.shape.gpu_type
    count = f"{gpus} GPU{'s' if gpus != 1 else ''}"
    if advice.problem:
        return ["", f"# {kind}, {count}: {advice.problem}"]
    best, *less = advice.sizes
    verb = "reaches" if best.cpus == 1 else "reach"
    words = f"{_cores(best.cpus)} {verb} {best.of_full:.0%} of your speed "
    words += f"({best.samples_per_s:.5g} samples/s)"
    words += "".join(
        f", {one.cpus} {'reaches' if one.cpus == 1 else 'reach'} {one.of_full:.0%}" for one in less
    )
    lines = [
        "",
        f"# {kind}, {count}: {words}",
        *_sbatch(kind, gpus, best),
    ]
    if stored.evidence is not None and stored.evidence.confidence is Confidence.LOW:
        lines.append(f"# confidence is low: {stored.evidence.why}")
    return lines


def _cores(count: int) -> str:
    return f"{count} core{'s' if count != 1 else ''}"


def _sbatch(kind: str, gpus: int, size: Size) -> list[str]:
    return [
        "#SBATCH --gres=gpu:" + (f"{gpus}" if kind == UNTYPED else f"{kind}:{gpus}"),
        f"#SBATCH --cpus-per-task={size.cpus}",
        f"#SBATCH --mem={size.mem_mib // _MIB_PER_GIB}G"
        if size.mem_mib % _MIB_PER_GIB == 0
        else f"#SBATCH --mem={size.mem_mib}M",
    ]


def _as_json(found: Found, gpus: int, advice: Sequence[_Advice]) -> Mapping[str, Any]:
    return {
        "profile": found.stored.profile.key,
        "place": found.place,
        "gpus": gpus,
        "advice": [
            {
                "gpu_type": one.shape.gpu_type,
                "problem": one.problem or None,
                "sizes": [
                    {
                        "cpus": size.cpus,
                        "mem_mib": size.mem_mib,
                        "samples_per_s": round(size.samples_per_s, 3),
                        "of_full": round(size.of_full, 4),
                        "sbatch": _sbatch(one.shape.gpu_type, gpus, size),
                    }
                    for size in one.sizes
                ],
            }
            for one in advice
        ],
    }
