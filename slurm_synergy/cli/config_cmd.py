"""``synergyctl config``: print the default settings, or check a file without asking Slurm."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import click

from slurm_synergy.config import (
    ANY_HOST,
    DEFAULT_PATH,
    Settings,
    load_settings,
    parse_address,
    render_default_yaml,
)
from slurm_synergy.errors import ConfigError

__all__ = ["check", "config"]

_COMMANDS = ("squeue", "scontrol", "scancel")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@click.command()
@click.option("--default", "show_default", is_flag=True, help="Print the commented default file.")
@click.option(
    "--check",
    "checked",
    is_flag=False,
    flag_value="",
    default=None,
    metavar="[FILE]",
    help="Check a settings file, as far as that needs no Slurm.",
)
@click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help=f"The settings file to check.  [default: {DEFAULT_PATH}]",
)
def config(show_default: bool, checked: str | None, file: Path | None) -> None:
    """Print the default settings, or check a settings file."""
    if show_default == (checked is not None):
        raise click.UsageError("give one of --default and --check")
    if checked is None:
        if file is not None:
            raise click.UsageError("--config FILE goes with --check")
        click.echo(render_default_yaml(), nl=False)
        return
    if checked and file is not None:
        raise click.UsageError("name one file: --check --config FILE")
    path = file or Path(checked or DEFAULT_PATH)
    settings = load_settings(path)
    notes = check(settings, str(path), os.environ)
    click.echo(f"{path}: valid{': all defaults' if settings == Settings() else ''}")
    for note in notes:
        click.echo(f"note: {note}")


def check(settings: Settings, file: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    """What is worth saying about valid settings. Raises ConfigError, naming ``file``.

    Looks at this machine only: users, files, names of machines. Slurm is not asked.
    """
    from slurm_synergy.controller.auth import operator_uids
    from slurm_synergy.mechanisms import MECHANISMS
    from slurm_synergy.policies import POLICIES
    from slurm_synergy.slurm.terms import chosen_nodes

    _check_choice(file, "policy", settings.scheduling.policy, POLICIES)
    _check_choice(file, "mechanism", settings.scheduling.mechanism, MECHANISMS)
    with _of(file):
        operator_uids(settings.operators)
        chosen_nodes(settings)
    _check_slurm(settings, file, environment)
    return tuple(_check_addresses(settings, file))


@contextmanager
def _of(file: str) -> Iterator[None]:
    """Errors of the controller's own checks, with the name of the file."""
    try:
        yield
    except ConfigError as err:
        raise ConfigError(
            err.what, file=file, key=err.key, value=err.value, remedy=err.remedy
        ) from err


def _check_choice(file: str, key: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ConfigError(
            f"there is no such {key}",
            file=file,
            key=f"scheduling.{key}",
            value=value,
            remedy=f"choose one of {', '.join(sorted(known))}",
        )


def _check_slurm(settings: Settings, file: str, environment: Mapping[str, str]) -> None:
    conf, bin_dir = settings.slurm.conf, settings.slurm.bin_dir
    named = environment.get("SLURM_CONF")
    if conf is not None and not conf.is_file():
        raise ConfigError(
            "there is no such file",
            file=file,
            key="slurm.conf",
            value=str(conf),
            remedy="name this machine's slurm.conf, or null for Slurm's own default",
        )
    if conf is None and named and not Path(named).is_file():
        raise ConfigError(
            f"null means SLURM_CONF, but there is no file {named}",
            file=file,
            key="slurm.conf",
            remedy="correct SLURM_CONF, or name the file here",
        )
    missing = [name for name in _COMMANDS if bin_dir and not os.access(bin_dir / name, os.X_OK)]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)} cannot be run there",
            file=file,
            key="slurm.bin_dir",
            value=str(bin_dir),
            remedy="name the directory with Slurm's commands, or null for PATH",
        )


def _check_addresses(settings: Settings, file: str) -> Iterator[str]:
    leases = settings.leases
    listen_host, listen_port = parse_address(leases.listen)
    _check_host(file, "leases.listen", leases.listen, listen_host)
    called = listen_host
    if leases.advertise is not None:
        called, port = parse_address(leases.advertise)
        _check_host(file, "leases.advertise", leases.advertise, called)
        if port and listen_port and port != listen_port:
            yield (
                f"leases.advertise has port {port}, leases.listen {listen_port}: right only if "
                "something between them forwards it"
            )
    elif listen_host in ANY_HOST:
        called = socket.gethostname()
    if called in _LOOPBACK:
        yield f"only this machine reaches {called}: jobs on other nodes cannot call the controller"


def _check_host(file: str, key: str, value: str, host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as err:
        raise ConfigError(
            f"{host!r} is no machine that is known here",
            file=file,
            key=key,
            value=value,
            remedy="write an address of this machine, or a name that resolves to one",
        ) from err
