"""The commands of ``synergyctl``, and what becomes of their errors.

A command's module is loaded when the command is asked for: nobody waits for those of the others.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence

import click

import slurm_synergy
from slurm_synergy.core.wording import printable
from slurm_synergy.errors import ConfigError, SynergyError

__all__ = ["cli", "run"]


class _Commands(Mapping[str, click.Command]):
    """Commands by name, each imported from ``module:attribute`` when it is first looked up."""

    def __init__(self, places: Mapping[str, str]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> click.Command:
        module, _, attribute = self._places[name].partition(":")
        command: click.Command = getattr(
            importlib.import_module(f"slurm_synergy.cli.{module}"), attribute
        )
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


_COMMANDS = _Commands(
    {
        "advise": "advise_cmd:advise",
        "check": "check_cmd:check_command",
        "config": "config_cmd:config",
        "devcluster": "devcluster_cmd:devcluster",
        "drain": "control:drain",
        "experiment": "experiment_cmd:experiment",
        "explain": "explain_cmd:explain",
        "jobs": "control:jobs",
        "profile": "profile_cmd:profile",
        "release-all": "release_cmd:release_all_command",
        "replay": "replay_cmd:replay_command",
        "resume": "control:resume",
        "simulate": "simulate_cmd:simulate",
        "status": "control:status",
        "summary": "summary_cmd:summary",
        "top": "top_cmd:top",
    }
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, commands=_COMMANDS)
@click.version_option(slurm_synergy.__version__, prog_name="synergyctl")
def cli() -> None:
    """Look at and steer slurm-synergy, the scheduler of deep-learning jobs on Slurm."""


def run(arguments: Sequence[str]) -> tuple[int, str]:
    """The exit status, and the words that went to standard error (empty: it was done)."""
    try:
        # A command returns nothing; a number is the exit status of --help and the like.
        status = cli.main(args=list(arguments), prog_name="synergyctl", standalone_mode=False)
    except click.ClickException as err:
        err.show()
        return err.exit_code, err.format_message()
    except click.Abort:
        click.echo("Aborted!", err=True)
        return 1, "aborted"
    except ConfigError as err:
        return 2, _told(str(err))
    except SynergyError as err:
        return 1, _told(err.in_short)
    except BrokenPipeError:  # whoever read our output, such as head, has enough
        _give_up_output()
        return 1, ""
    except OSError as err:  # the machine, not a fault of ours: a full disk, a file taken away
        return 1, _told(_of_machine(err))
    return status or 0, ""


def _told(text: str) -> str:
    """Say it on standard error. Of a file's content no character steers the terminal."""
    click.echo(f"synergyctl: {printable(text, keep=chr(10))}", err=True)
    return text


def _of_machine(error: OSError) -> str:
    """The error in words, with its place as far as it is known."""
    if error.filename is not None or error.strerror is None:
        return str(error)
    return f"standard output, or a file that was being written: {error.strerror}"


def _give_up_output() -> None:
    """Let nothing try to write there again, as Python does at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
