"""Definitions of experiments: a grid of simulations, what to draw of it, and what is expected.

A definition is a YAML file; ``docs/experiments.md`` shows every key. It is checked as a whole
before anything runs: a wrong key or value is a ConfigError that names its place.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from slurm_synergy.errors import ConfigError
from slurm_synergy.simulator.generate import MOST_JOBS, parse_split
from slurm_synergy.simulator.pool import MOST_NODES

__all__ = [
    "DEFAULT_JOBS",
    "Definition",
    "Expected",
    "Figure",
    "Settings",
    "expand",
    "matches",
    "read_definition",
    "shorten",
]

_MOST = 10**9
_Positive = Annotated[float, Field(gt=0, le=_MOST, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=1, le=_MOST)]
_Cost = Annotated[float, Field(ge=0, le=_MOST, allow_inf_nan=False)]
_VARIABLE = re.compile(r"\$\{(\w+)\}")
_MOST_CELLS = 10_000
_LONGEST_ID = 18
_OF_ELASTIC = ("elastic", "rigid", "scale", "profiling", "pipelines", "tuned")
_PHILLY_LARGEST = 16  # GPUs of the largest jobs that are generated
DEFAULT_JOBS = 1000
"""Jobs of a generated workload that does not say how many."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Settings(_Model):
    """One simulation. Every key may be an axis of the grid; times in seconds.

    Jobs come from ``trace`` (as for ``synergyctl simulate --trace``; relative to the definition)
    or are generated from ``load`` (jobs per hour), ``split``, ``sizes``, ``arrivals``, ``jobs`` and
    ``seed``. ``part`` keeps the first jobs of a trace only; ``{seed}`` and ``{load}`` in its name
    are those settings. The pool is ``nodes`` equal nodes with 3 cores per GPU, or the file
    ``cluster``; ``cpus_per_gpu`` gives either another number of cores.

    With ``elastic`` GPUs and batch sizes of a ``sia:`` trace are for the policy to choose, but for
    the parts ``rigid`` and ``scale`` of its jobs; ``profiling``, ``pipelines`` and ``tuned`` are as
    there. ``fills`` and ``quantum_s``, ``generations``, ``patience``, ``avoid_interference`` and
    ``mixes`` are settings of the rivals' policies that have such.
    ``power`` is the fairness exponent p of Sia and Pollux, each one's own by default;
    ``restart_weight`` is how many times its seconds a restart counts for Sia, and
    ``moves_between_rounds`` whether it plans all anew after each event. Those of Shockwave are
    ``window`` rounds, ``makespan``, ``unfair_power`` (lambda) and ``fair_ratio``.
    """

    policy: str = "fifo"
    mechanism: str = "tune"
    trace: str | None = None
    part: Annotated[float, Field(gt=0, le=1)] = 1.0
    load: _Positive = 9.0
    split: str = "20/70/10"
    sizes: Literal["single", "philly"] = "single"
    arrivals: Literal["poisson", "static"] = "poisson"
    jobs: Annotated[int, Field(ge=1, le=MOST_JOBS)] | None = None
    measure: str | None = None
    seed: int = 1
    cluster: str | None = None
    nodes: Annotated[int, Field(ge=1, le=MOST_NODES)] = 16
    gpu_type: str = "v100"
    gpus_per_node: _Count = 8
    cpus_per_gpu: _Positive | None = None
    mem_gib: _Positive = 500.0
    round_s: Annotated[float, Field(ge=1, le=_MOST, allow_inf_nan=False)] = 300.0
    event_delay_s: _Cost = 1.0
    semantics: Literal["exact", "reference"] = "exact"
    restart_s: _Cost = 0.0
    checkpoint_s: _Cost = 0.0
    profiling_s: _Cost = 0.0
    profile_error: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 0.0
    elastic: bool = False
    rigid: Annotated[float, Field(ge=0, le=1)] = 0.0
    scale: Annotated[float, Field(ge=0, le=1)] = 0.0
    profiling: Literal["bootstrap", "ledger", "oracle", "none"] = "bootstrap"
    pipelines: Literal["none", "synergy", "dealt"] = "none"
    tuned: str = "listed"
    quantum_s: _Positive = 360.0
    fills: bool = True
    generations: _Count = 100
    patience: _Count = 12
    avoid_interference: bool = True
    mixes: bool = False
    power: Annotated[float, Field(ge=-10, le=10)] | None = None
    restart_weight: Annotated[float, Field(ge=0, le=100)] = 2.0
    moves_between_rounds: bool = False
    window: _Count = 5
    makespan: _Cost = 1e-9
    unfair_power: _Cost = 12.0
    fair_ratio: _Positive = 1.0

    @field_validator("power")
    @classmethod
    def _is_no_zero(cls, value: float | None) -> float | None:
        if value == 0:
            raise ValueError("makes all choices equal; give a power above or below 0")
        return value

    @field_validator("split")
    @classmethod
    def _is_split(cls, value: str) -> str:
        try:
            parse_split(value)
        except ConfigError as err:
            raise ValueError(f"{err.what}; {err.remedy}") from None
        return value

    @field_validator("measure", mode="before")
    @classmethod
    def _is_range(cls, value: Any) -> str | None:
        # YAML takes 10:20 for a number of base 60.
        if value is not None and not (isinstance(value, str) and _range(value)):
            raise ValueError('is not a range of job ids; give one like "4000:5000", in quotes')
        return value

    @property
    def trace_name(self) -> str | None:
        """The trace of this very seed and load."""
        if not self.trace:
            return self.trace
        return self.trace.replace("{seed}", str(self.seed)).replace("{load}", f"{self.load:g}")

    def measured(self) -> Sequence[int]:
        """The ids of the jobs that count; empty for all."""
        return _range(self.measure or "")


def _range(text: str) -> Sequence[int]:
    low, _, high = text.partition(":")
    numbers = low.isdecimal() and high.isdecimal() and max(len(low), len(high)) <= _LONGEST_ID
    if numbers and int(low) < int(high):
        return range(int(low), int(high))
    return ()


class Expected(_Model):
    """A published number: ``metric`` of the one cell that ``where`` selects.

    ``relation`` says what counts as met: within ``tolerance`` (a part) of ``value``, or at least or
    at most that. ``against`` replaces the baseline that gains are relative to.
    """

    where: dict[str, Any]
    metric: str
    value: _Positive
    source: str
    relation: Literal["about", "at_least", "at_most"] = "about"
    tolerance: _Cost = 0.10
    against: dict[str, Any] | None = None
    note: str = ""


class Figure(_Model):
    """A chart: ``y`` over ``x`` with a line or bar for each value of ``series``.

    ``x: distribution`` draws how ``y`` (``jct_h``, ``gain`` or ``speedup``) is distributed over
    the jobs. Cells that differ in nothing else but their seed are averaged.
    """

    title: str
    x: str
    y: str
    series: str
    where: dict[str, Any] = Field(default_factory=dict)


_Axis = list[Any] | str | int | float | bool | None
_LIST_OF_AXIS = "list[any]"  # what pydantic calls the first of these


class Definition(_Model):
    """An experiment. ``grids`` are the axes; each is a mapping from settings to values."""

    title: str
    about: str = ""
    source: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)
    grids: Annotated[list[dict[str, _Axis]], Field(min_length=1)]
    baseline: dict[str, Any] = Field(default_factory=lambda: {"mechanism": "proportional"})
    columns: list[str] = Field(default_factory=lambda: ["avg_jct_h", "p99_jct_h", "makespan_h"])
    figures: list[Figure] = Field(default_factory=list)
    expected: list[Expected] = Field(default_factory=list)

    @model_validator(mode="after")
    def _selections_name_settings(self) -> Definition:
        places = [("baseline", self.baseline)]
        places += [(f"figures[{i}].where", one.where) for i, one in enumerate(self.figures)]
        for index, one in enumerate(self.expected):
            places += [(f"expected[{index}].where", one.where)]
            places += [(f"expected[{index}].against", one.against or {})]
        for place, selection in places:
            for key in selection:
                if key not in Settings.model_fields:
                    raise ValueError(f"{place}: {key} is not a setting")
        return self


_KEYS = ", ".join(Definition.model_fields)
_PARTS: Mapping[Any, type[_Model]] = {"figures": Figure, "expected": Expected}

# reading ---------------------------------------------------------------------------------------


def read_definition(path: Path) -> Definition:
    """The definition in ``path``. Raises ConfigError naming the file, the key and the value."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as err:
        raise ConfigError(
            f"cannot be read: {err}", file=str(path), remedy="name a readable YAML file"
        ) from err
    if not isinstance(content, dict):
        raise ConfigError("is no mapping", file=str(path), remedy=f"give {_KEYS}")
    try:
        return Definition(**content)
    except ValidationError as err:
        raise _config_error(err, str(path), "") from err
    except TypeError as err:
        raise ConfigError(
            f"has a key that is no text: {err}", file=str(path), remedy=f"known are {_KEYS}"
        ) from err


def _config_error(
    err: ValidationError, file: str, place: str, chosen: Mapping[str, Any] | None = None
) -> ConfigError:
    """The complaint; of a cell, whose ``place`` is a grid, with what that grid has ``chosen``."""
    # A key that is not known is the likely cause of another that is missing.
    first = min(err.errors(), key=lambda one: one["type"] != "extra_forbidden")
    keys = first["loc"]
    key = place if chosen is None or not keys or keys[0] in chosen else "settings"
    for part in keys:
        if part == _LIST_OF_AXIS:
            first = {**first, "msg": "is neither a value nor a list of values"}
            break
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
    what = first["msg"].removeprefix("Value error, ")
    remedy = "correct it (docs/experiments.md shows every key)"
    if first["type"] == "extra_forbidden":
        model = Settings if place else _PARTS.get(keys[0], Definition)
        remedy = f"known are {', '.join(model.model_fields)}"
        what = "is unknown"
    elif first["type"] == "missing":
        what, remedy = "is missing", "add it (docs/experiments.md shows every key)"
    value = None if first["type"] == "missing" or isinstance(first["input"], dict) else first
    shown = None if value is None else first["input"]
    return ConfigError(what, file=file, key=key, value=shown, remedy=remedy)


def expand(
    definition: Definition, path: Path, environment: Mapping[str, str] | None = None
) -> tuple[Settings, ...]:
    """Every cell of the grids, each once, in order.

    ``path`` is the definition's file: what it names is relative to it, and ``${NAME}`` stands for
    a variable of ``environment`` (the process's by default). Raises ConfigError.
    """
    variables = os.environ if environment is None else environment
    found: dict[Settings, None] = {}
    for index, grid in enumerate(definition.grids):
        axes = _axes(grid, path, f"grids[{index}]")
        for chosen in _combinations(axes):
            cell = _settings(definition.settings, chosen, path, f"grids[{index}]")
            _check_elastic(cell, path, f"grids[{index}]", chosen)
            found[_located(cell, path, variables)] = None
    return tuple(found)


def _axes(grid: Mapping[str, Any], path: Path, place: str) -> dict[str, list[Any]]:
    """The values of each setting of a grid. Raises ConfigError for none, and for too many cells."""
    axes = {key: value if isinstance(value, list) else [value] for key, value in grid.items()}
    for key, values in axes.items():
        if not values:
            raise ConfigError(
                "has no value, so that there is nothing to simulate",
                file=str(path),
                key=f"{place}.{key}",
                remedy=f"give one, or remove {key}",
            )
    if math.prod(map(len, axes.values())) > _MOST_CELLS:
        raise ConfigError(
            f"has more than {_MOST_CELLS} cells",
            file=str(path),
            key=place,
            remedy="give fewer values, or split it over several files",
        )
    return axes


def _check_elastic(cell: Settings, path: Path, place: str, chosen: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting of elastic jobs in a cell that has none."""
    if cell.elastic and (cell.trace or "").startswith("sia:"):
        return
    wanted = "elastic: true" if not cell.elastic else "a trace of the form sia:FILE"
    said = [key for key in _OF_ELASTIC if key != "elastic" or cell.elastic]
    for key in said:
        value = getattr(cell, key)
        if value != Settings.model_fields[key].default:
            shown = ", ".join(f"{name}: {one}" for name, one in chosen.items())
            raise ConfigError(
                f"means nothing in the cell {{{shown}}}, whose jobs are not elastic",
                file=str(path),
                key=f"{place}.{key}",
                value=value,
                remedy=f"add {wanted} to settings or to that grid, or remove {key}",
            )


def _combinations(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _settings(
    common: Mapping[str, Any], chosen: Mapping[str, Any], path: Path, place: str
) -> Settings:
    try:
        return Settings(**{**common, **chosen})
    except ValidationError as err:
        raise _config_error(err, str(path), place, chosen) from err


def _located(cell: Settings, path: Path, variables: Mapping[str, str]) -> Settings:
    """The cell with the files that it names as absolute paths."""
    changes: dict[str, Any] = {}
    for key in ("trace", "cluster"):
        text = getattr(cell, key)
        if text is not None:
            changes[key] = _absolute(_substituted(text, key, path, variables), path)
    return cell.model_copy(update=changes) if changes else cell


def _substituted(text: str, key: str, path: Path, variables: Mapping[str, str]) -> str:
    for name in _VARIABLE.findall(text):
        if name not in variables:
            raise ConfigError(
                f"needs the environment variable {name}, which is not set",
                file=str(path),
                key=key,
                value=text,
                remedy="set it to the directory with the data (docs/reproduction.md)",
            )
    return _VARIABLE.sub(lambda match: variables[match.group(1)], text)


def _absolute(text: str, path: Path) -> str:
    """``kind:FILE,options`` with FILE relative to the definition's directory."""
    kind, colon, rest = text.partition(":")
    if not colon:
        kind, rest = "", text
    file, comma, options = rest.partition(",")
    return f"{kind}{colon}{(path.parent / file).resolve()}{comma}{options}"


def shorten(cell: Settings, scale: float) -> Settings:
    """The cell with ``scale`` times its jobs (at least 10), and as many of them measured.

    A generated workload has as much less load, on as many fewer nodes, so that the pool is as busy
    and the hours that pass are the same. A trace keeps its first jobs, and its pool.
    """
    changes: dict[str, Any] = {}
    if cell.trace is not None:
        changes["part"] = cell.part * scale
    else:
        jobs = cell.jobs or DEFAULT_JOBS
        changes["jobs"] = min(jobs, max(10, round(jobs * scale)))
        if cell.cluster is None:
            largest = _PHILLY_LARGEST if cell.sizes == "philly" else 1
            least = min(cell.nodes, math.ceil(largest / cell.gpus_per_node))
            changes["nodes"] = max(least, round(cell.nodes * scale))
            changes["load"] = cell.load * changes["nodes"] / cell.nodes
    measured = cell.measured()
    if measured:
        low = math.floor(measured[0] * scale)
        high = max(low + 1, math.floor((measured[-1] + 1) * scale))
        changes["measure"] = f"{low}:{high}"
    return cell.model_copy(update=changes)


def matches(cell: Settings, selection: Mapping[str, Any]) -> bool:
    """Whether every setting in ``selection`` has that value; a list is a choice."""
    return all(
        getattr(cell, key) in (value if isinstance(value, list) else [value])
        or _ends_with(getattr(cell, key), value)
        for key, value in selection.items()
    )


def _ends_with(found: Any, wanted: Any) -> bool:
    """A file is selected by its name alone."""
    return isinstance(found, str) and isinstance(wanted, str) and Path(found).name == wanted
