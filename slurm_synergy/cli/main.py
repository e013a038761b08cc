"""``synergyctl``: exit status 0 done, 1 refused or not reachable, 2 wrong usage or settings."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

import slurm_synergy
from slurm_synergy.cli.check_cmd import check_command
from slurm_synergy.cli.config_cmd import config
from slurm_synergy.cli.control import drain, jobs, resume, status
from slurm_synergy.cli.devcluster_cmd import devcluster
from slurm_synergy.cli.experiment_cmd import experiment
from slurm_synergy.cli.explain_cmd import explain
from slurm_synergy.cli.profile_cmd import profile
from slurm_synergy.cli.release_cmd import release_all_command
from slurm_synergy.cli.replay_cmd import replay_command
from slurm_synergy.cli.simulate_cmd import simulate
from slurm_synergy.cli.summary_cmd import summary
from slurm_synergy.cli.top_cmd import top
from slurm_synergy.errors import ConfigError, SynergyError

__all__ = ["cli", "main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(slurm_synergy.__version__, prog_name="synergyctl")
def cli() -> None:
    """Look at and steer slurm-synergy, the scheduler of deep-learning jobs on Slurm."""


for _command in (
    status,
    jobs,
    drain,
    resume,
    config,
    profile,
    devcluster,
    simulate,
    experiment,
    explain,
    top,
    replay_command,
    check_command,
    release_all_command,
    summary,
):
    cli.add_command(_command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run synergyctl and exit."""
    try:
        cli.main(args=None if argv is None else list(argv), prog_name="synergyctl")
    except ConfigError as err:
        click.echo(f"synergyctl: {err}", err=True)
        sys.exit(2)
    except SynergyError as err:
        click.echo(f"synergyctl: {err.in_short}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
