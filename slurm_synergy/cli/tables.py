"""Tables for people: drawn on a terminal, plain aligned columns elsewhere.

Job names and hints are any bytes that a user likes. What would steer a terminal, or fake a row by a
line break, is shown as an escape.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from slurm_synergy.core.wording import printable

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["print_table", "table_of"]

# Characters: between two columns where there is room, and of a column of words that is folded.
_ROOMY_GAP = 3
_LEAST_WORDS = 16


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
    from rich.console import Console

    console = Console()
    console.print(table_of(columns, rows, console.width))


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Table:
    """The table for a terminal of that width. Printable cells are expected.

    Where it does not fit the last column (words) is folded, then the line and the wide gaps go,
    then all columns are folded but the first (a job's id, a node's name). No character is left out.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    fixed, count = sum(widths[:-1]), len(widths)
    roomy = fixed + _ROOMY_GAP * count + min(widths[-1], 2 * _LEAST_WORDS) <= width
    words = roomy or fixed + count + min(widths[-1], _LEAST_WORDS) <= width
    table = Table(box=box.SIMPLE_HEAD if roomy else None, padding=(0, 1) if roomy else (0, 1, 0, 0))
    for place, name in enumerate(columns):
        whole = place == 0 or (words and place < len(columns) - 1)
        least = widths[place] if whole else None
        table.add_column(name, no_wrap=whole, min_width=least, overflow="fold")
    for row in rows:
        # Text, not str: a job's name must not be read as markup.
        table.add_row(*(Text(cell) for cell in row))
    return table
