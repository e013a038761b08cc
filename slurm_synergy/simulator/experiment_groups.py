"""Cells of an experiment that differ in their seed only, and how settings are called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from slurm_synergy.simulator.comparison import mean
from slurm_synergy.simulator.experiment import Settings, matches
from slurm_synergy.simulator.experiment_policies import means_something
from slurm_synergy.simulator.outcome import Results, Verdict, label, varying

__all__ = ["WORKLOAD", "average", "groups", "names", "published", "telling"]

WORKLOAD = frozenset(
    {
        *("trace", "part", "load", "split", "sizes", "arrivals", "jobs", "measure", "pipelines"),
        *("cluster", "nodes", "gpu_type", "gpus_per_node", "cpus_per_gpu", "mem_gib"),
        *("restart_s", "checkpoint_s", "profiling_s"),
    }
)
"""Settings that make the jobs and the pool. All others are the scheduler's."""


def groups(cells: Iterable[Settings]) -> dict[Settings, list[Settings]]:
    """The cells by what they are but for their seed, in their order."""
    found: dict[Settings, list[Settings]] = {}
    for cell in cells:
        found.setdefault(cell.model_copy(update={"seed": 0}), []).append(cell)
    return found


def average(results: Results, cells: Sequence[Settings], metric: str) -> float | None:
    """The mean of a metric over cells; None when none has it."""
    values = [results.value(cell, metric) for cell in cells]
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def telling(
    cells: Sequence[Settings],
    keys: Sequence[str] | None = None,
    keep: Sequence[str] = ("policy", "mechanism"),
) -> list[str]:
    """Of the settings ``keys`` (those that vary but for the seed) those that tell cells apart.

    Those that follow from the others are left out, but none of ``keep``.
    """
    left = [key for key in varying(cells) if key != "seed"] if keys is None else list(keys)
    count = _apart(cells, left)
    for key in [key for key in left if key not in keep]:
        rest = [one for one in left if one != key]
        if _apart(cells, rest) == count:
            left = rest
    return left


def _apart(cells: Sequence[Settings], keys: Sequence[str]) -> int:
    """How many kinds of cells there are by these settings."""
    return len({tuple(getattr(cell, key) for key in keys) for cell in cells})


def names(
    cells: Sequence[Settings], *, keys: Sequence[str] | None = None, always: Sequence[str] = ()
) -> dict[Settings, str]:
    """A name for each cell, of the settings ``keys`` (those that tell groups apart).

    Settings that mean nothing to a cell are left out of its name, but those of ``always``.
    """
    chosen = telling(cells) if keys is None else keys
    found = {}
    for cell in cells:
        words = [
            label(key, getattr(cell, key))
            for key in chosen
            if key in always or means_something(cell, key)
        ]
        found[cell] = ", ".join(words) or cell.policy
    return found


def published(
    verdicts: Sequence[Verdict], cells: Sequence[Settings]
) -> Mapping[tuple[Settings, str], Verdict]:
    """Published numbers by group and metric; those against another baseline are left out.

    Of several for the same place the first one counts.
    """
    found: dict[tuple[Settings, str], Verdict] = {}
    for one in verdicts:
        if one.ours is None or one.expected.against is not None:
            continue
        group = next(iter(groups(c for c in cells if matches(c, one.expected.where))))
        found.setdefault((group, one.expected.metric), one)
    return found
