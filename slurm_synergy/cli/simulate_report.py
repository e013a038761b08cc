"""The HTML report of ``synergyctl simulate``: the same jobs under a baseline, side by side."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import slurm_synergy
from slurm_synergy.errors import ConfigError
from slurm_synergy.simulator.report import About, Case, render
from slurm_synergy.simulator.study import Study, StudyResult

__all__ = ["command_line", "write_report"]


def write_report(
    path: Path, study: Study, result: StudyResult, baseline: StudyResult | None, workload: str
) -> None:
    """Write the report to ``path``. Raises ConfigError when it cannot be written."""
    ours, base = _names(result, baseline)
    about = About(
        workload=workload,
        version=slurm_synergy.__version__,
        command=command_line(sys.argv[1:]),
        settings=_settings(study, result),
    )
    text = render(
        Case(name=ours, mechanism=result.summary["mechanism"], result=result),
        None
        if baseline is None
        else Case(name=base, mechanism=baseline.summary["mechanism"], result=baseline),
        study.nodes,
        about,
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as err:
        raise ConfigError(
            f"cannot be written: {err}",
            file=str(path),
            remedy="name a file in a writable directory",
        ) from err


def command_line(arguments: Sequence[str]) -> str:
    """What was typed, to be typed again."""
    return shlex.join(["synergyctl", *arguments])


def _names(result: StudyResult, baseline: StudyResult | None) -> tuple[str, str]:
    ours = str(result.summary["mechanism"])
    base = str(baseline.summary["mechanism"]) if baseline is not None else ""
    return ours, base


def _settings(study: Study, result: StudyResult) -> tuple[tuple[str, str], ...]:
    costs = study.costs
    free = not (costs.restart_s or costs.checkpoint_s or costs.profiling_s)
    told = (
        "none"
        if free
        else f"{costs.restart_s:g} s per restart, {costs.checkpoint_s:g} s per checkpoint, "
        f"{costs.profiling_s:g} s of profiling per job"
    )
    return (
        ("who runs first (policy)", str(result.summary["policy"])),
        ("jobs that count", str(result.summary["jobs"])),
        ("seconds between rounds", f"{study.round_s:g}"),
        ("time", study.semantics.value),
        ("costs of scheduling", told),
        ("error of the profiles", f"{study.profile_error:.0%}"),
        ("seed", str(study.seed)),
    )
