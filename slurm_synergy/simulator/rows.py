"""Results as tables in files: CSV, or Parquet where the file's name says so."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from types import ModuleType

from slurm_synergy.errors import ConfigError
from slurm_synergy.simulator.engine import Moment
from slurm_synergy.simulator.metrics import JobResult

__all__ = ["check_rows_path", "write_rows"]

_WRITABLE = "name a file in a writable directory"
_PARQUET = (".parquet", ".pq")
_KINDS: dict[str, str] = {"int": "int64", "float": "float64", "str": "string"}


def check_rows_path(path: Path) -> None:
    """Raise ConfigError now if ``path`` names a file that could not be written later."""
    if path.suffix.lower() in _PARQUET:
        _pyarrow(path)
    if not path.parent.is_dir():
        raise ConfigError(
            "is in a directory that does not exist", file=str(path), remedy="create it first"
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError("cannot be written: permission denied", file=str(path), remedy=_WRITABLE)


def write_rows(
    path: Path, kind: type[JobResult | Moment], rows: Iterable[JobResult | Moment]
) -> None:
    """Write ``rows`` under the names of the fields of ``kind``.

    As Parquet if ``path`` ends in ``.parquet`` or ``.pq`` (needs the extra ``report``), else as
    CSV. Raises ConfigError.
    """
    try:
        if path.suffix.lower() in _PARQUET:
            _write_parquet(path, kind, rows)
        else:
            _write_csv(path, kind, rows)
    except OSError as err:
        raise ConfigError(f"cannot be written: {err}", file=str(path), remedy=_WRITABLE) from err


def _write_csv(
    path: Path, kind: type[JobResult | Moment], rows: Iterable[JobResult | Moment]
) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(kind)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def _write_parquet(
    path: Path, kind: type[JobResult | Moment], rows: Iterable[JobResult | Moment]
) -> None:
    pyarrow = _pyarrow(path)
    from pyarrow import parquet

    columns = [(field.name, pyarrow.type_for_alias(_kind(field.type))) for field in fields(kind)]
    values = [asdict(row) for row in rows]
    table = pyarrow.Table.from_pylist(values, schema=pyarrow.schema(columns))
    parquet.write_table(table, path)


def _kind(annotation: object) -> str:
    return _KINDS[str(annotation)]


def _pyarrow(path: Path) -> ModuleType:
    try:
        import pyarrow
    except ImportError as err:
        raise ConfigError(
            "Parquet needs the package pyarrow, which is not installed",
            file=str(path),
            remedy="pip install 'slurm-synergy[report]', or name a .csv file",
        ) from err
    return pyarrow  # type: ignore[no-any-return]
