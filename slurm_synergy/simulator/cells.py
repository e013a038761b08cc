"""Results of an experiment's cells on disk: one file each, durable, named by what made it.

A file's name is a hash over the cell's settings, the content of the files that it reads and the
code that simulates. So a killed experiment goes on where it was, and a changed trace, setting or
program is simulated again. A file that is damaged is named and replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import slurm_synergy
from slurm_synergy.errors import ConfigError
from slurm_synergy.simulator.experiment import Settings

__all__ = ["Cell", "Damaged", "Outcome", "code_version", "load", "store"]

FORMAT = 1
_KEY_LENGTH = 20
# What cannot change a result: how it is shown, stored and asked for.
_SHOWS = ("charts", "svg", "raster", "markup", "page", "rows", "cells", "comparison")
_SHOWS_PREFIX = ("report", "experiment", "outcome")
_DECIDES = ("core", "policies", "mechanisms", "simulator")
_DECIDES_FILES = ("round.py", "reconcile.py", "cluster.py", "milp.py")


class Damaged(Exception):
    """A result's file is not what was written; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One simulation of an experiment and the name of its result."""

    settings: Settings
    key: str

    @staticmethod
    def of(settings: Settings, code: str) -> Cell:
        """The cell of ``settings`` under this code. Raises ConfigError for unreadable files."""
        content = {
            "format": FORMAT,
            "settings": settings.model_dump(exclude={"trace", "cluster"}),
            "trace": _digest_of(settings.trace_name),
            "cluster": _digest_of(settings.cluster),
            "code": code,
        }
        return Cell(settings=settings, key=_hash(content))

    def path(self, directory: Path) -> Path:
        """Where its result lies."""
        return directory / "cells" / f"{self.key}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a cell came to. ``jobs`` are columns of equal length: id, jct_s, run_s, speedup."""

    summary: Mapping[str, Any]
    jobs: Mapping[str, list[float]]
    cpu_used: float
    assumptions: tuple[str, ...] = ()


def code_version() -> str:
    """A hash over the source that decides what a simulation comes to."""
    root = Path(slurm_synergy.__file__).parent
    files = [root / name for name in _DECIDES_FILES]
    for part in _DECIDES:
        files += sorted((root / part).glob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        shown = file.parent.name == "simulator" and (
            file.stem in _SHOWS or file.stem.startswith(_SHOWS_PREFIX)
        )
        if not shown:
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:_KEY_LENGTH]


def _digest_of(name: str | None) -> str | None:
    """The kind, content and options of a file such as ``philly:FILE,jobs=5``."""
    if name is None:
        return None
    kind, colon, rest = name.partition(":")
    file, _, options = (rest if colon else name).partition(",")
    try:
        digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError as err:
        raise ConfigError(
            f"cannot be read: {err}", file=file, remedy="name a readable file"
        ) from err
    return f"{kind if colon else ''}:{digest}:{options}"


def _hash(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_KEY_LENGTH]


def store(cell: Cell, outcome: Outcome, directory: Path) -> None:
    """Write the result so that it is there whole or not at all. Raises ConfigError."""
    body = {
        "format": FORMAT,
        "key": cell.key,
        "settings": cell.settings.model_dump(),
        "summary": dict(outcome.summary),
        "cpu_used": outcome.cpu_used,
        "assumptions": list(outcome.assumptions),
        "jobs": dict(outcome.jobs),
    }
    text = json.dumps({**body, "sha256": _hash(body)})
    path = cell.path(directory)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
        _sync(path.parent)
    except OSError as err:
        raise ConfigError(
            f"cannot be written: {err}",
            file=str(path),
            remedy="free the disk, or use another --out",
        ) from err


def _sync(directory: Path) -> None:
    number = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def load(cell: Cell, directory: Path) -> Outcome | None:
    """The result, or None when there is none yet. Raises Damaged for a file that is not whole."""
    path = cell.path(directory)
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as err:
        raise Damaged(f"{path}: cannot be read: {err}") from err
    if not isinstance(body, dict) or body.pop("sha256", None) != _hash(body):
        raise Damaged(f"{path}: the content does not match its checksum")
    if body.get("key") != cell.key or body.get("format") != FORMAT:
        raise Damaged(f"{path}: is the result of something else")
    return Outcome(
        summary=body["summary"],
        jobs=body["jobs"],
        cpu_used=body["cpu_used"],
        assumptions=tuple(body["assumptions"]),
    )
