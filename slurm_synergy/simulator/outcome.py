"""What the cells of an experiment came to: numbers by name, expected ones beside them, charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from slurm_synergy.errors import ConfigError
from slurm_synergy.simulator.cells import Outcome
from slurm_synergy.simulator.comparison import ALIKE, mean
from slurm_synergy.simulator.experiment import Definition, Expected, Settings, matches
from slurm_synergy.simulator.experiment_policies import means_something
from slurm_synergy.simulator.metrics import percentile

__all__ = [
    "METRICS",
    "Results",
    "Verdict",
    "check_expected",
    "check_names",
    "interpolated",
    "label",
    "plain",
    "shown",
    "varying",
]

_S_PER_H = 3600.0
_NEED_KEY = frozenset({"pipelines", "profiling", "tuned", "measure"})
SHORT_S = 4 * _S_PER_H
"""Jobs done within this under the baseline are short ones (Synergy's figure 6)."""


@dataclass(frozen=True, slots=True)
class _View:
    """One cell and the baseline that it is compared with."""

    ours: Outcome
    base: Outcome | None

    def jct_h(self, keep: Callable[[float], bool] | None = None) -> list[float]:
        """Completion times; of the jobs whose time under the baseline ``keep`` accepts."""
        return self._times(self.ours, keep)

    def base_jct_h(self, keep: Callable[[float], bool] | None = None) -> list[float]:
        """The same jobs under the baseline."""
        assert self.base is not None
        return self._times(self.base, keep)

    def _times(self, outcome: Outcome, keep: Callable[[float], bool] | None) -> list[float]:
        if keep is None:
            return [one / _S_PER_H for one in outcome.jobs["jct_s"]]
        judge = dict(_by_id(self.base or self.ours, "jct_s"))
        return [one / _S_PER_H for job_id, one in _by_id(outcome, "jct_s") if keep(judge[job_id])]

    def gains(self) -> list[float]:
        """Each job's completion time under the baseline over the one here."""
        assert self.base is not None
        base = dict(_by_id(self.base, "jct_s"))
        return [base[job_id] / one for job_id, one in _by_id(self.ours, "jct_s") if one > 0]


def _by_id(outcome: Outcome, column: str) -> list[tuple[float, float]]:
    return list(zip(outcome.jobs["id"], outcome.jobs[column], strict=True))


def _short(jct_s: float) -> bool:
    return jct_s < SHORT_S


def _long(jct_s: float) -> bool:
    return jct_s >= SHORT_S


def interpolated(values: Sequence[float], fraction: float) -> float:
    """The percentile between elements, as numpy has it and the artifact reports it."""
    ordered = sorted(values)
    at = fraction * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _summary(key: str, unit: float = 1.0) -> Callable[[_View], float]:
    return lambda view: float(view.ours.summary[key]) / unit


def _gain(figure: Callable[[list[float]], float], keep: Any = None) -> Callable[[_View], float]:
    def found(view: _View) -> float:
        ours, base = view.jct_h(keep), view.base_jct_h(keep)
        return figure(base) / figure(ours) if ours and figure(ours) else math.nan

    return found


def _part(view: _View, counts: Callable[[float], bool]) -> float:
    gains = view.gains()
    return sum(map(counts, gains)) / len(gains) if gains else math.nan


def _pooled(view: _View, which: str) -> float:
    return float(view.ours.summary["ftf"].get("pooled", {}).get(which, math.nan))


def _p99(values: Sequence[float]) -> float:
    return percentile(values, 0.99)


METRICS: Mapping[str, tuple[Callable[[_View], float], str]] = MappingProxyType(
    {
        "avg_jct_h": (_summary("avg_jct_s", _S_PER_H), "average completion time, hours"),
        "median_jct_h": (lambda view: percentile(view.jct_h(), 0.5), "median completion time, h"),
        "p99_jct_h": (_summary("p99_jct_s", _S_PER_H), "99th percentile, hours"),
        "p99i_jct_h": (lambda view: interpolated(view.jct_h(), 0.99), "p99 as numpy has it, hours"),
        "max_jct_h": (lambda view: max(view.jct_h()), "longest completion time, hours"),
        "makespan_h": (_summary("makespan_s", _S_PER_H), "makespan, hours"),
        "gpu_util": (_summary("gpu_util"), "GPUs held, part of the pool"),
        "cpu_util": (_summary("cpu_util"), "cores held, part of the pool"),
        "cpu_used": (lambda view: view.ours.cpu_used, "cores of use, part of the pool"),
        "mem_util": (_summary("mem_util"), "memory held, part of the pool"),
        "restarts_per_job": (_summary("restarts_per_job"), "restarts per job"),
        "gpu_hours": (_summary("gpu_hours_per_job"), "GPU hours per job"),
        "contention": (
            lambda view: float(view.ours.summary["contention"]["mean"]),
            "jobs in the system, average over time",
        ),
        "round_ms": (
            lambda view: float(view.ours.summary["round_ms"]["median"]),
            "median time of a round, ms",
        ),
        "round_p95_ms": (
            lambda view: float(view.ours.summary["round_ms"]["p95"]),
            "95th percentile of the time of a round, ms",
        ),
        "worst_ftf": (
            lambda view: float(view.ours.summary["ftf"]["worst"]),
            "worst finish-time fairness of a job",
        ),
        "unfair": (
            lambda view: float(view.ours.summary["ftf"]["unfair_fraction"]),
            "part of the jobs with a finish-time fairness above 1",
        ),
        # Results of earlier releases do not have these two.
        "worst_ftf_pooled": (
            lambda view: _pooled(view, "worst"),
            "worst finish-time fairness by the average time of the GPU types",
        ),
        "unfair_pooled": (
            lambda view: _pooled(view, "unfair_fraction"),
            "part of the jobs above 1 by the average time of the GPU types",
        ),
        "avg_jct_gain": (_gain(mean), "average completion time, baseline over this"),
        "p99_jct_gain": (_gain(_p99), "p99 completion time, baseline over this"),
        "makespan_gain": (
            lambda view: float(_base(view).summary["makespan_s"] / view.ours.summary["makespan_s"]),
            "makespan, baseline over this",
        ),
        "cpu_used_gain": (
            lambda view: view.ours.cpu_used / _base(view).cpu_used,
            "cores of use, this over baseline",
        ),
        "round_ms_ratio": (
            lambda view: float(
                _base(view).summary["round_ms"]["median"] / view.ours.summary["round_ms"]["median"]
            ),
            "time of a round, baseline over this",
        ),
        "best_job_gain": (lambda view: max(view.gains()), "largest gain of a job"),
        "worst_job_gain": (lambda view: min(view.gains()), "least gain of a job"),
        "part_sooner": (
            lambda view: _part(view, lambda gain: gain > 1 + ALIKE),
            "part of the jobs that gain more than 5 %",
        ),
        "part_later": (
            lambda view: _part(view, lambda gain: gain < 1 / (1 + ALIKE)),
            "part of the jobs that lose more than 5 %",
        ),
        "floor_below": (
            lambda view: float(view.ours.summary["floor"]["below"]),
            "shares with which a job was slower than with its proportional one",
        ),
        "floor_worst": (
            lambda view: float(view.ours.summary["floor"]["worst"] or math.nan),
            "least speed of a share, over that of the proportional one",
        ),
        "short_avg_jct_gain": (_gain(mean, _short), "average of the short jobs, gain"),
        "short_p99_jct_gain": (_gain(_p99, _short), "p99 of the short jobs, gain"),
        "long_avg_jct_gain": (_gain(mean, _long), "average of the long jobs, gain"),
        "long_p99_jct_gain": (_gain(_p99, _long), "p99 of the long jobs, gain"),
        "long_p99_jct_h": (
            lambda view: _p99(view.jct_h(_long) or [math.nan]),
            "p99 of the long jobs, hours",
        ),
    }
)
"""What can be asked of a cell, by name: how it is found, and what it is.

Gains are of a baseline's number over this cell's, so that more is better. Short jobs are those done
within four hours under the baseline, long ones the others.
"""

_NEEDS_BASE = frozenset(
    name
    for name in METRICS
    if "gain" in name or name in ("round_ms_ratio", "long_p99_jct_h", "part_sooner", "part_later")
)


def _base(view: _View) -> Outcome:
    assert view.base is not None
    return view.base


def _words(selection: Mapping[str, Any]) -> str:
    """A selection in short."""
    return ", ".join(label(key, value) for key, value in selection.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An expected number and ours; ``ours`` None when its cell was not simulated.

    ``comparable`` is false for a short cut, which is not judged.
    """

    expected: Expected
    ours: float | None
    comparable: bool = True

    @property
    def place(self) -> str:
        """Which cell it is of, and against which baseline if not the usual one."""
        where, other = _words(self.expected.where), _words(self.expected.against or {})
        return f"{where} against {other}" if other else where

    @property
    def ratio(self) -> float | None:
        """Ours over the expected one."""
        return None if self.ours is None else self.ours / self.expected.value

    @property
    def met(self) -> bool | None:
        """Whether it is as expected; None when unknown."""
        ratio, slack = self.ratio, self.expected.tolerance
        if ratio is None or not self.comparable:
            return None
        if self.expected.relation == "at_least":
            return ratio >= 1 - slack
        if self.expected.relation == "at_most":
            return ratio <= 1 + slack
        return 1 - slack <= ratio <= 1 + slack


def check_names(definition: Definition, distributions: Sequence[str], file: str) -> None:
    """Raise ConfigError for a metric or an axis that does not exist, with those that do."""
    asked = [(f"columns[{i}]", name) for i, name in enumerate(definition.columns)]
    asked += [(f"expected[{i}].metric", one.metric) for i, one in enumerate(definition.expected)]
    for index, figure in enumerate(definition.figures):
        place = f"figures[{index}]"
        axes = [("series", figure.series)]
        if figure.x == "distribution":
            _must_be(figure.y, distributions, file, f"{place}.y")
        else:
            axes.append(("x", figure.x))
            asked.append((f"{place}.y", figure.y))
        for key, name in axes:
            _must_be(name, tuple(Settings.model_fields), file, f"{place}.{key}")
    for place, name in asked:
        _must_be(name, tuple(METRICS), file, place)


def check_expected(definition: Definition, cells: Sequence[Settings], file: str) -> None:
    """Raise ConfigError for an expected number that is not of exactly one of ``cells``."""
    for index, one in enumerate(definition.expected):
        if not _alike(cells, index, one, file):
            raise ConfigError(
                "selects no cell",
                file=file,
                key=f"expected[{index}].where",
                value=one.where,
                remedy="name values that the grids have",
            )


def _alike(cells: Sequence[Settings], index: int, expected: Expected, file: str) -> list[Settings]:
    """The cells that an expected number is of, which differ in their seed only."""
    chosen = [cell for cell in cells if matches(cell, expected.where)]
    if len({cell.model_copy(update={"seed": 0}) for cell in chosen}) > 1:
        raise ConfigError(
            f"selects {len(chosen)} cells that differ in more than their seed",
            file=file,
            key=f"expected[{index}].where",
            value=expected.where,
            remedy="name more settings",
        )
    return chosen


def _must_be(name: str, known: Sequence[str], file: str, place: str) -> None:
    if name not in known:
        raise ConfigError(
            "is unknown",
            file=file,
            key=place,
            value=name,
            remedy=f"choose one of {', '.join(known)}",
        )


class Results:
    """The outcomes of an experiment, as far as they are there."""

    def __init__(self, definition: Definition, outcomes: Mapping[Settings, Outcome]) -> None:
        self.definition = definition
        self.outcomes = outcomes

    def value(
        self, cell: Settings, metric: str, against: Mapping[str, Any] | None = None
    ) -> float | None:
        """A number of a cell; None when it, or the baseline that it needs, is not there."""
        if cell not in self.outcomes:
            return None
        base = self._baseline(cell, against) if metric in _NEEDS_BASE else None
        if metric in _NEEDS_BASE and base is None:
            return None
        value = METRICS[metric][0](_View(self.outcomes[cell], base))
        return value if math.isfinite(value) else None

    def gains(self, cell: Settings) -> list[float]:
        """The gain of every job over the baseline; empty without one."""
        base = self._baseline(cell, None)
        return [] if base is None else _View(self.outcomes[cell], base).gains()

    def _baseline(self, cell: Settings, against: Mapping[str, Any] | None) -> Outcome | None:
        changes = against or self.definition.baseline
        return self.outcomes.get(cell.model_copy(update=dict(changes)))

    def rows(self) -> list[dict[str, Any]]:
        """One row per cell: what varies, None where it means nothing, then the columns."""
        differ = {*varying(tuple(self.outcomes)), "mechanism"}
        keys = [key for key in Settings.model_fields if key in differ]
        return [
            {
                **{
                    key: shown(getattr(cell, key)) if means_something(cell, key) else None
                    for key in keys
                },
                **{name: self.value(cell, name) for name in self.definition.columns},
            }
            for cell in self.outcomes
        ]

    def verdicts(self, comparable: bool = True) -> list[Verdict]:
        """Every expected number beside ours. Raises ConfigError for one that names no one cell."""
        return [
            self._verdict(index, one, comparable)
            for index, one in enumerate(self.definition.expected)
        ]

    def _verdict(self, index: int, expected: Expected, comparable: bool) -> Verdict:
        chosen = _alike(tuple(self.outcomes), index, expected, "")
        values = [self.value(cell, expected.metric, expected.against) for cell in chosen]
        known = [value for value in values if value is not None]
        return Verdict(
            expected=expected, ours=mean(known) if known else None, comparable=comparable
        )


def label(key: str, value: Any) -> str:
    """A setting in short: most texts speak for themselves, all else needs its key."""
    if isinstance(value, str) and key not in _NEED_KEY:
        return str(shown(value))
    if isinstance(value, list):
        return " or ".join(label(key, one) for one in value)
    unit = " s" if key.endswith("_s") else ""
    return f"{key.removesuffix('_s').replace('_', ' ')} {plain(value)}{unit}"


def plain(value: Any) -> str:
    """The value of a setting as people write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "by default"
    return f"{value:g}" if isinstance(value, float) else str(shown(value))


def shown(value: Any) -> Any:
    """A setting as it is shown: of a file its name alone, and of several its directory's too."""
    if isinstance(value, str) and "/" in value and Path(value.partition(",")[0]).suffix:
        *_, directory, name = value.partition(",")[0].split("/")
        return f"{directory}/{name}" if "{" in name else name
    return value


def varying(cells: Sequence[Settings]) -> list[str]:
    """The settings in which the cells differ, in the order of their declaration."""
    return [key for key in Settings.model_fields if len({getattr(cell, key) for cell in cells}) > 1]
