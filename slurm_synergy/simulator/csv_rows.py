"""Rows of a text table with their places, so that every complaint can name file, line, column."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from slurm_synergy.errors import ConfigError

__all__ = ["MOST", "Row", "read_rows"]

MOST = 1e12
"""No number of a trace is larger: 30,000 years in seconds, which floats still tell apart."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row with its place, so that every complaint can name it."""

    file: str
    line: int
    cells: Mapping[str, str | None]

    def error(
        self, column: str, what: str, remedy: str = "correct the row or remove it"
    ) -> ConfigError:
        """The complaint about a cell, to be raised."""
        value = self.cells.get(column)
        return ConfigError(
            what,
            file=self.file,
            key=f"line {self.line}, column {column}",
            value=value,
            remedy=remedy,
        )

    def text(self, column: str) -> str:
        """The cell, not empty. Raises ConfigError, as do the others."""
        value = self.cells.get(column)
        if value is None or not value.strip():
            raise self.error(column, "is missing")
        return value.strip()

    def number(self, column: str, least: float) -> float:
        """The cell as a number of at least ``least`` and at most ``MOST``."""
        try:
            value = float(self.text(column))
        except ValueError:
            raise self.error(column, "is not a number") from None
        if not least <= value:
            raise self.error(column, f"must be a number of at least {least:g}")
        if value > MOST:
            raise self.error(column, f"must be a number of at most {MOST:g}")
        return value

    def integer(self, column: str, least: int) -> int:
        """The cell as a whole number of at least ``least``."""
        value = self.number(column, least)
        if value != int(value):
            raise self.error(column, "must be a whole number")
        return int(value)

    def moment(self, column: str) -> datetime:
        """The cell as a date and time, its zone dropped."""
        try:
            return datetime.fromisoformat(self.text(column)).replace(tzinfo=None)
        except ValueError:
            raise self.error(column, "is not a date and time like 2024-05-01T12:00:00") from None


def read_rows(path: Path, delimiter: str, needed: Sequence[str]) -> Iterator[Row]:
    """The rows under the names in the first line. Raises ConfigError; ``needed`` must be there."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, delimiter=delimiter, restkey="(surplus)")
            columns = reader.fieldnames or ()
            _check_columns(columns, needed, path)
            for cells in reader:
                row = Row(str(path), reader.line_num, cells)
                if "(surplus)" in cells:
                    raise row.error("(surplus)", f"the row has more than {len(columns)} cells")
                yield row
    except (OSError, UnicodeDecodeError, csv.Error) as err:
        raise ConfigError(
            f"cannot be read: {err}", file=str(path), remedy="name a readable text file"
        ) from err


def _check_columns(columns: Sequence[str], needed: Sequence[str], path: Path) -> None:
    def refused(what: str, remedy: str) -> ConfigError:
        return ConfigError(what, file=str(path), key="line 1", remedy=remedy)

    if not columns:
        raise refused("the file is empty", f"its first line must name {', '.join(needed)}")
    missing = [name for name in needed if name not in columns]
    if missing:
        raise refused(
            f"has no column {', '.join(missing)}",
            f"the first line must name the columns; it names {', '.join(columns)}",
        )
    twice = sorted({name for name in needed if columns.count(name) > 1})
    if twice:
        raise refused(f"has more than one column {', '.join(twice)}", "rename or remove one")
