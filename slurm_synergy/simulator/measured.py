"""Measured step times and gradient statistics of real training, as the Sia artifact publishes them.

A directory for each application holds, for each GPU type, ``placements-TYPE.csv`` (columns
``placement, local_bsz, step_time, sync_time``) and ``scalability-TYPE.csv`` (``num_nodes,
num_replicas, local_bsz, step_time, sync_time``), and for each total batch size
``validation-BATCH.csv`` (``progress, iteration, metric, grad_sqr, grad_var``), one row per epoch.
Times are in seconds, batch sizes in samples, progress in steps at the initial batch size. The
files are public but not part of this project (docs/reproduction.md tells where they come from).
"""

from __future__ import annotations

import csv
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.core.goodput import GradientStatistics
from slurm_synergy.errors import ConfigError

__all__ = ["Application", "StepTable", "read_application"]

Floats = NDArray[np.float64]
Pattern = tuple[int, ...]

_MOST_NODES = 16  # beyond, the artifact takes the times of sixteen nodes


def canonical(placement: Sequence[int]) -> Pattern:
    """GPUs per node, in the rotation that sorts first: how the tables name a placement."""
    turns = [(*placement[at:], *placement[:at]) for at in range(len(placement))]
    return min(turns)


@cache
def _named(text: str) -> Pattern:
    """The placement whose GPUs per node are the digits of ``text``."""
    return canonical([int(one) for one in text])


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """Step times of one application on GPUs of one type.

    ``placements`` maps GPUs per node to rows (local batch, step s, sync s), batches ascending;
    ``scale`` has rows (nodes, replicas, local batch, step s, sync s).
    """

    gpu_type: str
    placements: Mapping[Pattern, Floats]
    scale: Floats
    _known: dict[tuple[Pattern, int], tuple[float, float] | None] = field(default_factory=dict)

    def step(self, placement: Sequence[int], local_batch: int) -> tuple[float, float] | None:
        """Seconds of a step and of its synchronisation; None where nothing near was measured.

        On a measured placement the times are linear between measured batch sizes; elsewhere
        linear over nodes, replicas and batch size of everything measured (algorithms C.12).
        """
        key = (tuple(placement), local_batch)
        if key not in self._known:
            self._known[key] = self._find(canonical(placement), local_batch)
        return self._known[key]

    def _find(self, pattern: Pattern, local_batch: int) -> tuple[float, float] | None:
        rows = self.placements.get(pattern)
        if rows is not None:
            if not rows[0, 0] <= local_batch <= rows[-1, 0]:
                return None
            step, sync = (float(np.interp(local_batch, rows[:, 0], rows[:, at])) for at in (1, 2))
            return step, sync
        nodes = min(len(pattern), _MOST_NODES)
        found = np.ravel(self._interpolator((nodes, sum(pattern), local_batch)))
        return None if np.isnan(found).any() else (float(found[0]), float(found[1]))

    @cached_property
    def _interpolator(self) -> Any:
        from scipy.interpolate import LinearNDInterpolator

        means: dict[tuple[float, float, float], list[tuple[float, float]]] = defaultdict(list)
        for pattern, rows in self.placements.items():
            for batch, step, sync in rows.tolist():
                means[len(pattern), sum(pattern), batch].append((step, sync))
        for nodes, replicas, batch, step, sync in self.scale.tolist():
            means[nodes, replicas, batch].append((step, sync))
        points = np.array(sorted(means))
        values = np.array([_mean(means[key]) for key in sorted(means)])
        return LinearNDInterpolator(points, values)


@dataclass(frozen=True, kw_only=True)
class Application:
    """One training program as measured.

    ``epochs`` ``(E,)`` is the progress at the end of each epoch, the least over all batch sizes;
    ``batches`` the measured totals, ascending; ``squares`` and ``variances`` ``(B, E)`` the
    gradient statistics at them.
    """

    name: str
    steps: Mapping[str, StepTable]
    epochs: Floats
    batches: tuple[int, ...]
    squares: Floats
    variances: Floats

    @property
    def total_progress(self) -> float:
        """Steps at the initial batch size until the last measured epoch ends."""
        return float(self.epochs[-1])

    def epoch(self, progress: float) -> int:
        """Which epoch, from 0, a progress falls in."""
        at = int(np.searchsorted(self.epochs, progress, side="right"))
        return min(at, len(self.epochs) - 1)

    def statistics(self, epoch: int, batch: float) -> GradientStatistics:
        """Gradient statistics in that epoch, linear between the two nearest batch sizes."""
        if batch <= self.batches[0]:
            low = high = 0
        elif batch >= self.batches[-1]:
            low = high = len(self.batches) - 1
        else:
            high = bisect_right(self.batches, batch)
            low = high - 1
        width = self.batches[high] - self.batches[low]
        part = (batch - self.batches[low]) / width if width else 0.0
        square, variance = (
            float(rows[low, epoch] + part * (rows[high, epoch] - rows[low, epoch]))
            for rows in (self.squares, self.variances)
        )
        return GradientStatistics(square=square, variance=variance)


def read_application(directory: Path, gpu_types: Sequence[str]) -> Application:
    """Read one application's directory. Raises ConfigError naming file, line and column."""
    steps = {}
    for kind in gpu_types:
        if (directory / f"placements-{kind}.csv").exists():
            steps[kind] = _step_table(directory, kind)
    if not steps:
        raise ConfigError(
            f"no placements-TYPE.csv for any of {', '.join(gpu_types)}",
            file=str(directory),
            remedy="name a directory of the published profiles, and GPU types that it has",
        )
    found = {}
    for path in directory.glob("validation-*.csv"):
        batch = path.stem.removeprefix("validation-")
        if not batch.isdigit():
            raise ConfigError(
                "the name must end in a batch size",
                file=str(path),
                remedy="name it like validation-128.csv",
            )
        found[int(batch)] = _columns(path, ("progress", "grad_sqr", "grad_var"))
    if not found:
        raise ConfigError(
            "no validation-BATCH.csv", file=str(directory), remedy="copy the directory whole"
        )
    batches = tuple(sorted(found))
    shortest = min(len(found[one]) for one in batches)
    tables = np.array([found[one][:shortest] for one in batches])
    return Application(
        name=directory.name,
        steps=steps,
        epochs=tables[:, :, 0].min(axis=0),
        batches=batches,
        squares=tables[:, :, 1],
        variances=tables[:, :, 2],
    )


def _step_table(directory: Path, kind: str) -> StepTable:
    path = directory / f"placements-{kind}.csv"
    rows: dict[Pattern, dict[float, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for line, row in _rows(path):
        text = row.get("placement") or ""
        if not text.isdigit() or "0" in text:
            raise _wrong(path, line, "placement", text, "is not GPUs per node, a digit each")
        batch, step, sync = (
            _number(path, line, row, name) for name in ("local_bsz", "step_time", "sync_time")
        )
        rows[_named(text)][batch].append((step, sync))
    placements = {
        pattern: np.array([(batch, *_mean(times)) for batch, times in sorted(by_batch.items())])
        for pattern, by_batch in rows.items()
    }
    scale_path = directory / f"scalability-{kind}.csv"
    columns = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
    scale = _columns(scale_path, columns) if scale_path.exists() else np.empty((0, 5))
    return StepTable(gpu_type=kind, placements=placements, scale=scale)


def _mean(times: Sequence[tuple[float, float]]) -> Sequence[float]:
    """Of several measurements; most were made once."""
    found: Sequence[float] = times[0] if len(times) == 1 else np.mean(times, axis=0).tolist()
    return found


def _rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        return [(reader.line_num, row) for row in reader]


def _columns(path: Path, names: Sequence[str]) -> Floats:
    rows = [[_number(path, line, row, name) for name in names] for line, row in _rows(path)]
    if not rows:
        raise ConfigError("has no rows", file=str(path), remedy="copy the file whole")
    return np.array(rows)


def _number(path: Path, line: int, row: Mapping[str, str], name: str) -> float:
    text = row.get(name)
    if text is None:
        raise _wrong(path, line, name, None, "is missing")
    try:
        value = float(text)
    except ValueError:
        raise _wrong(path, line, name, text, "is not a number") from None
    if not math.isfinite(value):
        raise _wrong(path, line, name, text, "is not a finite number")
    return value


def _wrong(path: Path, line: int, column: str, value: str | None, what: str) -> ConfigError:
    return ConfigError(
        what,
        file=str(path),
        key=f"line {line}, column {column}",
        value=value,
        remedy="correct the row or copy the file anew",
    )
