"""``synergyctl summary``: what acting would have changed, from the journal on this machine."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import click

from slurm_synergy.cli.control import local_settings, options, without_settings
from slurm_synergy.cli.tables import print_table
from slurm_synergy.controller.summary import JobLine, summary_of, words
from slurm_synergy.errors import LedgerError

__all__ = ["summary"]

_JOBS_SHOWN = 15


@click.command()
@click.option(
    "--hours",
    type=click.FloatRange(min=0, min_open=True, max=24 * 366),
    default=24.0,
    show_default=True,
    help="How far to look back.",
)
@options
def summary(hours: float, config: Path | None, as_json: bool) -> None:
    """Say what acting would have changed while decisions were only shown.

    Reads the journal in the state directory, so it is for the controller's user or root, on the
    controller's machine; the daemon need not run. Estimates are marked as such.
    """
    settings = local_settings(config)
    remark = without_settings(config)
    try:
        found = summary_of(settings.state_dir, since_s=time.time() - hours * 3600)
    except LedgerError as err:
        raise LedgerError(f"{err}; {remark}" if remark else str(err)) from err
    if remark:
        click.echo(f"synergyctl: {remark}", err=True)
    if as_json:
        content = {**asdict(found), "mode": settings.mode.value, "words": list(words(found))}
        click.echo(json.dumps(content, indent=2))
        return
    click.echo(f"mode of partition {settings.slurm.partition}: {settings.mode.value}")
    for line in words(found):
        click.echo(line)
    if found.shown_rounds and found.lines:
        print_table(
            ("JOBID", "USER", "EARLIER", "CPUS", "NODES", "STOPPED", "GPU-HOURS"),
            [_row(line) for line in found.lines[:_JOBS_SHOWN]],
        )


def _row(line: JobLine) -> tuple[str, ...]:
    cpus = f"{line.cpus_seen}->{line.cpus_planned}" if line.other_cpus else "-"
    nodes = f"{','.join(line.seen)}->{','.join(line.planned)}" if line.elsewhere else "-"
    return (
        str(line.job_id),
        line.user,
        f">={line.earlier_s / 60:.1f} min" if line.earlier_s else "-",
        cpus,
        nodes,
        "yes" if line.stopped else "-",
        f"{line.saved_gpu_s / 3600:+.2f}" if line.saved_gpu_s else "-",
    )
