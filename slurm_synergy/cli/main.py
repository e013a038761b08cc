"""``synergyctl``: exit status 0 done, 1 refused or not reachable, 2 wrong usage or settings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click

import slurm_synergy
from slurm_synergy.cli.control import drain, jobs, resume, status
from slurm_synergy.cli.devcluster_cmd import devcluster
from slurm_synergy.config import DEFAULT_PATH, load_settings, render_default_yaml
from slurm_synergy.errors import ConfigError, SynergyError

__all__ = ["cli", "main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(slurm_synergy.__version__, prog_name="synergyctl")
def cli() -> None:
    """Look at and steer slurm-synergy, the scheduler of deep-learning jobs on Slurm."""


@cli.command()
@click.option("--default", "show_default", is_flag=True, help="Print the commented default file.")
@click.option(
    "--check",
    "check_path",
    type=click.Path(path_type=Path, dir_okay=False),
    is_flag=False,
    flag_value=str(DEFAULT_PATH),
    default=None,
    metavar="[FILE]",
    help=f"Check a settings file.  [default: {DEFAULT_PATH}]",
)
def config(show_default: bool, check_path: Path | None) -> None:
    """Print the default settings, or check a settings file."""
    if show_default == (check_path is not None):
        raise click.UsageError("give one of --default and --check")
    if check_path is None:
        click.echo(render_default_yaml(), nl=False)
        return
    path = Path(check_path)
    settings = load_settings(path)
    _check_choice(path, "policy", settings.scheduling.policy, _policies())
    _check_choice(path, "mechanism", settings.scheduling.mechanism, _mechanisms())
    click.echo(f"{path}: valid")


def _policies() -> Sequence[str]:
    from slurm_synergy.policies import POLICIES

    return sorted(POLICIES)


def _mechanisms() -> Sequence[str]:
    from slurm_synergy.mechanisms import MECHANISMS

    return sorted(MECHANISMS)


def _check_choice(path: Path, key: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(
            f"there is no such {key}",
            file=str(path),
            key=f"scheduling.{key}",
            value=value,
            remedy=f"choose one of {', '.join(known)}",
        )


for _command in (status, jobs, drain, resume, devcluster):
    cli.add_command(_command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run synergyctl and exit."""
    try:
        cli.main(args=None if argv is None else list(argv), prog_name="synergyctl")
    except ConfigError as err:
        click.echo(f"synergyctl: {err}", err=True)
        sys.exit(2)
    except SynergyError as err:
        click.echo(f"synergyctl: {err}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
