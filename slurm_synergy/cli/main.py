"""``synergyctl``: exit status 0 done, 1 refused or not reachable, 2 wrong usage or settings.

An error goes to standard error in words, and with ``--json`` as ``{"error": WORDS}`` to standard
output too.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Sequence

import click

import slurm_synergy
from slurm_synergy.cli.advise_cmd import advise
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
    advise,
    top,
    replay_command,
    check_command,
    release_all_command,
    summary,
):
    cli.add_command(_command)


def main(argv: Sequence[str] | None = None) -> None:
    """Run synergyctl and exit."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    text = ""
    try:
        # A command returns nothing; a number is the exit status of --help and the like.
        status = cli.main(args=arguments, prog_name="synergyctl", standalone_mode=False) or 0
    except click.ClickException as err:
        err.show()
        status, text = err.exit_code, err.format_message()
    except click.Abort:
        click.echo("Aborted!", err=True)
        status, text = 1, "aborted"
    except ConfigError as err:
        status, text = 2, str(err)
        click.echo(f"synergyctl: {text}", err=True)
    except SynergyError as err:
        status, text = 1, err.in_short
        click.echo(f"synergyctl: {text}", err=True)
    except BrokenPipeError:  # whoever read our output, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except OSError as err:  # the machine, not a fault of ours: a full disk, a file taken away
        status, text = 1, str(err)
        click.echo(f"synergyctl: {text}", err=True)
    if text and _asks_for_json(arguments):
        click.echo(json.dumps({"error": text}))
    sys.exit(status)


def _asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether --json is among the options: whoever reads JSON finds the error there too."""
    own = itertools.takewhile(lambda argument: argument != "--", arguments)
    return "--json" in own


if __name__ == "__main__":
    main()
