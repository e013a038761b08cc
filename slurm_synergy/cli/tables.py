"""Tables for people: drawn on a terminal, plain aligned columns elsewhere.

Job names and hints are any bytes that a user likes. What would steer a terminal, or fake a row by a
line break, is shown as an escape.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from slurm_synergy.core.wording import printable

__all__ = ["print_table"]


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print ``rows`` under ``columns``; nothing is cut off where the output is not a terminal."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _draw(columns, rows)
        return
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for cells in (columns, *rows):
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        click.echo("  ".join(padded).rstrip())


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=box.SIMPLE_HEAD)
    for row in rows:
        # Text, not str: a job's name must not be read as markup.
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
