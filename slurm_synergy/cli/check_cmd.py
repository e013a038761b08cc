"""``synergyctl check``: do this Slurm and this machine suit slurm-synergy? Nothing is changed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurm_synergy.cli.control import local_settings, options, without_settings
from slurm_synergy.config import Mode, Settings
from slurm_synergy.controller.codec import encode
from slurm_synergy.errors import ConfigError
from slurm_synergy.slurm.findings import Finding, Grade, fail, warn

if TYPE_CHECKING:
    from slurm_synergy.slurm.evidence import Evidence

__all__ = ["check_command", "findings", "telling"]

_COLOURS = {Grade.OK: "green", Grade.WARN: "yellow", Grade.FAIL: "red"}


@click.command(name="check")
@options
def check_command(config: Path | None, as_json: bool) -> None:
    """Check whether this Slurm and this machine suit slurm-synergy.

    Run it where the controller runs, as its user; the controller itself is not needed. Every
    finding is ok, warn (it works, but not as well as it could) or fail, with its remedy. Exit
    status: 0 nothing fails, 1 something does.
    """
    settings = local_settings(config)
    found = [*_assumed(config), *findings(settings, str(config or ""))]
    counts = {grade: sum(one.grade is grade for one in found) for grade in Grade}
    if as_json:
        content = {"ok": not counts[Grade.FAIL], "findings": encode(found)}
        click.echo(json.dumps(content, indent=2))
    else:
        _tell(found)
        click.echo(", ".join(f"{count} {grade.value}" for grade, count in counts.items()))
    if counts[Grade.FAIL]:
        raise SystemExit(1)


def _assumed(config: Path | None) -> Sequence[Finding]:
    """That nobody's settings are checked, if so."""
    if not (remark := without_settings(config)):
        return ()
    what, _, remedy = remark.partition(": ")
    means = "what follows may not hold for a controller with settings of its own"
    return (warn("settings", what, means, remedy),)


def findings(settings: Settings, file: str) -> Sequence[Finding]:
    """Everything that can be found out from here."""
    from slurm_synergy.cli.config_cmd import check as check_settings
    from slurm_synergy.cli.helper_checks import helper_findings
    from slurm_synergy.cli.machine_checks import machine_findings
    from slurm_synergy.cli.policy_checks import policy_findings
    from slurm_synergy.slurm.checks import slurm_findings
    from slurm_synergy.slurm.commands import SlurmCommands
    from slurm_synergy.slurm.evidence import gather

    found: list[Finding] = []
    try:
        check_settings(settings, file, os.environ)
    except ConfigError as err:
        what = f"{err.key} = {err.value!r}: {err.what}"
        found.append(fail("settings", what, "the controller would not start", err.remedy))
    slurm = settings.slurm
    runner = SlurmCommands(
        slurm_conf=str(slurm.conf) if slurm.conf else None,
        bin_dir=str(slurm.bin_dir) if slurm.bin_dir else None,
    )
    evidence = gather(
        runner,
        partition=slurm.partition,
        timeout_s=slurm.command_timeout_s,
        now_s=time.time,
    )
    acts = settings.mode is Mode.ACT
    found += slurm_findings(telling(evidence, acts=acts), settings, acts=acts)
    slurm_conf = evidence.config.raw.get("SLURM_CONF", "") if evidence.config else ""
    found += machine_findings(settings, os.environ, slurm_conf=slurm_conf, acts=acts)
    found += helper_findings(settings)
    found += policy_findings(settings)
    return found


def telling(evidence: Evidence, *, acts: bool) -> Evidence:
    """The evidence without refusals that say nothing: only where jobs are held do any come."""
    if acts or all("slurm-synergy:" in (text or "") for text in evidence.refusals or ()):
        return evidence
    return replace(evidence, refusals=None)


def _tell(found: Sequence[Finding]) -> None:
    width = max(len(one.check) for one in found)
    for one in found:
        grade = click.style(f"{one.grade.value:4}", fg=_COLOURS[one.grade])
        click.echo(f"{grade}  {one.check:{width}}  {one.seen}")
        if one.grade is not Grade.OK:
            click.echo(f"      {'':{width}}  means: {one.means}")
            click.echo(f"      {'':{width}}  remedy: {one.remedy}")
