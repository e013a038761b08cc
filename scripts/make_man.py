#!/usr/bin/env python3
"""Write the manual pages: make_man.py DIRECTORY

The prose is in docs/man/*.in. Commands, options, keys and their defaults are taken from the
programs themselves, so that a page cannot describe what is not there.
"""

from __future__ import annotations

import argparse
import gzip
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
from pydantic import BaseModel

import slurm_synergy
from slurm_synergy.cli.commands import cli
from slurm_synergy.config import Settings
from slurm_synergy.controller import daemon
from slurm_synergy.jobside import srun
from slurm_synergy.nodehelper import parts as node_parts
from slurm_synergy.profiler import command as profiler

_ROOT = Path(__file__).resolve().parents[1]


def escaped(text: str) -> str:
    """Plain text as roff: no character of it is a request or an escape."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.M)


def _wrapped(text: str) -> str:
    return escaped(" ".join(text.split()))


def commands(group: click.Group, prefix: str = "") -> Iterator[str]:
    """A paragraph for each command of ``group``, those of its groups included."""
    for name, command in sorted(group.commands.items()):
        if command.hidden:
            continue
        if isinstance(command, click.Group):
            yield from commands(command, f"{prefix}{name} ")
            continue
        arguments = " ".join(
            one.make_metavar(click.Context(command))
            for one in command.params
            if isinstance(one, click.Argument)
        )
        title = f"{prefix}{name}" + (f" {arguments}" if arguments else "")
        yield f".SS {escaped(title)}"
        paragraphs = (command.help or "").split("\n\n")
        yield "\n.PP\n".join(_wrapped(text) for text in paragraphs if text.strip())
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                yield from _option(command, option)


def _option(command: click.Command, option: click.Option) -> Iterator[str]:
    record = option.get_help_record(click.Context(command))
    if record is None:
        return
    names, text = record
    yield f".TP\n.B {escaped(names)}\n{_wrapped(text) or 'See above.'}"


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """A paragraph for each key of the settings."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        if isinstance(field.default, BaseModel):
            yield f".SS {escaped(key)}\n{_wrapped(field.description or '')}"
            yield from keys(type(field.default), f"{key}.")
            continue
        default = "null" if field.default is None else str(field.default) or "empty"
        if isinstance(field.default, bool):
            default = default.lower()
        if isinstance(field.default, tuple):
            default = f"[{', '.join(map(str, field.default))}]"
        yield (
            f".TP\n.B {escaped(key)}\n{_wrapped(field.description or '')} "
            f"Default:\n.IR {escaped(default)} ."
        )


def parser_options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A paragraph for each option of a daemon."""
    for action in parser._actions:
        names = ", ".join(action.option_strings)
        takes = bool(action.option_strings) and action.nargs != 0
        word = action.metavar or (action.dest.upper() if takes else "")
        value = f" {word}" if takes else ""
        yield f".TP\n.B {escaped(names + value)}\n{_wrapped(action.help or '')}"


def wrapper_part(title: str) -> Iterator[str]:
    """A paragraph for each entry of that part of the wrapper's help."""
    part = srun.HELP.partition(f"{title}:\n")[2].partition("\n\n")[0]
    for entry in re.split(r"\n(?=  \S)", part):
        name, _, text = entry.strip().partition("  ")
        if "\n" in name:
            name, _, text = entry.strip().partition("\n")
        name, text = " ".join(name.split()), " ".join(text.split())
        yield f".TP\n.B {escaped(name)}\n{escaped(text)}"


def pages(date: str) -> Iterator[tuple[str, str]]:
    """(file name, text) of every page."""
    parts = {
        "DATE": date,
        "VERSION": escaped(slurm_synergy.__version__),
        "COMMANDS": "\n".join(commands(cli)),
        "KEYS": "\n".join(keys(Settings)),
        "FIXED": ", ".join(daemon.NEED_RESTART),
        "DAEMON_OPTIONS": "\n".join(parser_options(daemon.argument_parser())),
        "NODE_OPTIONS": "\n".join(parser_options(node_parts.argument_parser())),
        "PROFILE_DESCRIPTION": _wrapped(profiler.DESCRIPTION),
        "PROFILE_OPTIONS": "\n".join(parser_options(profiler.argument_parser())),
        "SRUN_OPTIONS": "\n".join(wrapper_part("synergy options")),
        "SRUN_ENVIRONMENT": "\n".join(wrapper_part("environment")),
    }
    for source in sorted((_ROOT / "docs" / "man").glob("*.in")):
        text = source.read_text(encoding="utf-8")
        yield source.stem, re.sub(r"@([A-Z_]+)@", lambda found: parts[found[1]], text)


def main(argv: list[str]) -> int:
    """Write the pages below a directory, as man1/, man5/ and man8/, compressed with --gzip."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--gzip", action="store_true", help="compressed, as distributions have them"
    )
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"), help="date of the pages")
    options = parser.parse_args(argv)
    for name, text in pages(options.date):
        directory = options.directory / f"man{name.rpartition('.')[2]}"
        directory.mkdir(parents=True, exist_ok=True)
        if options.gzip:
            (directory / f"{name}.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        else:
            (directory / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
