"""``synergyctl top``: nodes, running jobs and the queue, again and again."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurm_synergy.cli.control import Target, ask, find_target, options
from slurm_synergy.cli.tables import print_table, table_of
from slurm_synergy.cli.top_view import (
    NODE_COLUMNS,
    QUEUE_COLUMNS,
    RUN_COLUMNS,
    Screen,
    screen_of,
)
from slurm_synergy.core.wording import printable
from slurm_synergy.errors import SynergyError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["top"]

_TABLES = (
    ("nodes", NODE_COLUMNS, "no nodes yet"),
    ("running", RUN_COLUMNS, "no job holds a lease"),
    ("queue", QUEUE_COLUMNS, "nobody waits"),
)


@click.command()
@options
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.5, max=3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two pictures.",
)
@click.option("--once", is_flag=True, help="Print one picture and exit.")
def top(config: Path | None, as_json: bool, interval_s: float, once: bool) -> None:
    """Watch nodes, GPUs and cores by job, data stalls, and the queue. Ctrl-C ends it.

    SHARE is the GPU-proportional number of cores, STALL the part of the time in which GPUs wait for
    data. Where the output is no terminal the pictures are plain text. With --json it is one
    picture, as with --once: what status and jobs print.
    """
    target = find_target(config, os.environ)
    if as_json:
        click.echo(json.dumps({"status": ask(target, "status"), **ask(target, "jobs")}, indent=2))
    elif once:
        _print(_picture(target))
    else:
        _watch(target, interval_s)


def _watch(target: Target, interval_s: float) -> None:
    try:
        if sys.stdout.isatty():
            _live(target, interval_s)
        else:
            for screen in _pictures(target, interval_s):
                _print(screen)
                click.echo()
    except KeyboardInterrupt:
        click.echo()


def _picture(target: Target) -> Screen:
    return screen_of(ask(target, "status"), ask(target, "jobs")["jobs"])


def _pictures(target: Target, interval_s: float) -> Iterator[Screen]:
    """Pictures without end. The first failure is raised, later ones are shown: it may come back."""
    last = _picture(target)
    while True:
        yield last
        time.sleep(interval_s)
        try:
            last = _picture(target)
        except SynergyError as err:
            last = Screen(
                headline=f"{time.strftime('%H:%M:%S')}: {err.in_short}; what follows is older",
                nodes=last.nodes,
                running=last.running,
                queue=last.queue,
            )


def _print(screen: Screen) -> None:
    click.echo(printable(screen.headline))
    for name, columns, nothing in _TABLES:
        rows: Sequence[Sequence[str]] = getattr(screen, name)
        click.echo()
        if rows:
            print_table(columns, rows)
        else:
            click.echo(nothing)


def _live(target: Target, interval_s: float) -> None:
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as live:
        for screen in _pictures(target, interval_s):
            width, height = live.console.size
            live.update(_drawn(screen, height, width), refresh=True)


def _drawn(screen: Screen, height: int, width: int) -> RenderableType:
    """The picture for a terminal of that size: the queue's end is cut off, and said so."""
    from rich.console import Group
    from rich.text import Text

    left = height - 2 - 4 * len(_TABLES)
    parts: list[RenderableType] = [Text(printable(screen.headline))]
    for name, columns, nothing in _TABLES:
        rows: Sequence[Sequence[str]] = getattr(screen, name)
        shown = rows[: max(left, 1)]
        left -= len(shown)
        cells = [[printable(cell) for cell in row] for row in shown]
        table = table_of(columns, cells, width) if rows else None
        if table is None or table.box is None:
            parts.append(Text())  # what the other kind of table has above it
        parts.append(table or Text(nothing))
        if len(shown) < len(rows):
            parts.append(Text(f"… and {len(rows) - len(shown)} more ({name})"))
    return Group(*parts)
