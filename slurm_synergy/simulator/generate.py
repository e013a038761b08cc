"""Making traces as the Synergy paper does: models by a task split, run times as in Philly.

Source: Synergy, OSDI '22, section 5.1, and its artifact (algorithms B.12). The random numbers are
Python's and not the artifact's, so the jobs are alike in distribution but not one by one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from slurm_synergy.errors import ConfigError
from slurm_synergy.simulator.csv_rows import MOST
from slurm_synergy.simulator.sensitivity import TASKS
from slurm_synergy.simulator.traces import Trace, TraceJob, parse_options

__all__ = ["MOST_JOBS", "ModelMix", "generate", "parse_split"]

MOST_JOBS = 10_000_000
"""Jobs of a generated workload: more would not fit into memory."""

_LOADS = (1e-6, 1e6)  # jobs per hour: one in a century, and hundreds in a second
_KEYS = ("load", "split", "gpus", "jobs", "seed", "arrivals")
# Jobs of the public Philly list that ran 10^1.5 to 10^4 minutes, by GPUs; larger ones are dropped.
_PHILLY_GPUS: Mapping[int, int] = {1: 28_808, 2: 300, 4: 1_271, 8: 1_168, 16: 128}
_SHORT_FRACTION = 0.8
_SHORT_EXPONENTS, _LONG_EXPONENTS = (1.5, 3.0), (3.0, 4.0)


def parse_split(text: str) -> tuple[float, ...]:
    """``20/70/10``: parts of image, language and speech jobs. Raises ConfigError."""
    try:
        parts = tuple(float(part) for part in text.split("/"))
    except ValueError:
        parts = ()
    if len(parts) != len(TASKS) or min(parts) < 0 or not 0 < sum(parts) < math.inf:
        raise ConfigError(
            "is not a split of tasks", key="split", value=text, remedy="give one like 20/70/10"
        )
    return tuple(part / sum(parts) for part in parts)


class ModelMix:
    """Deals out models: the task that lags its share most, within a task one after another."""

    def __init__(self, split: Sequence[float]) -> None:
        self._share = dict(zip(TASKS, split, strict=True))
        self._count = dict.fromkeys(TASKS, 0)

    def next(self) -> str:
        """The model of the next job."""
        coming = sum(self._count.values()) + 1
        task = max(TASKS, key=lambda one: self._share[one] * coming - self._count[one])
        names = TASKS[task]
        name = names[self._count[task] % len(names)]
        self._count[task] += 1
        return name


def generate(text: str, default_seed: int) -> Trace:
    """The trace of ``philly-derived:load=9,split=20/70/10,gpus=single,jobs=6000,seed=1``.

    ``load`` is in jobs per hour, ``gpus`` ``single`` or ``philly``, ``arrivals`` ``poisson`` or
    ``static`` (all at once). Raises ConfigError for what it does not understand.
    """
    kind, _, rest = text.partition(":")
    if kind != "philly-derived":
        raise ConfigError(
            "is no generator", key="--generate", value=text, remedy="the only one is philly-derived"
        )
    options = parse_options(rest, _KEYS)
    load = _number(options, "load", 9.0, *_LOADS)
    count = _whole(options, "jobs", 1000, 1, MOST_JOBS)
    seed = _whole(options, "seed", default_seed, -MOST, MOST)
    sizes = _choice(options, "gpus", ("single", "philly"))
    arrivals = _choice(options, "arrivals", ("poisson", "static"))
    mix = ModelMix(parse_split(options.get("split", "20/70/10")))
    rng = random.Random(seed)
    arrival_s, jobs = 0.0, []
    for job_id in range(count):
        if arrivals == "poisson":
            arrival_s += math.ceil(rng.expovariate(load) * 3600)
        jobs.append(
            TraceJob(
                job_id=job_id,
                arrival_s=arrival_s,
                gpus=_gpus(rng) if sizes == "philly" else 1,
                model=mix.next(),
                duration_s=_duration_s(rng),
            )
        )
    return Trace(jobs=tuple(jobs))


def _gpus(rng: random.Random) -> int:
    return rng.choices(tuple(_PHILLY_GPUS), tuple(_PHILLY_GPUS.values()))[0]


def _duration_s(rng: random.Random) -> float:
    low, high = _SHORT_EXPONENTS if rng.random() < _SHORT_FRACTION else _LONG_EXPONENTS
    return 60.0 * 10 ** rng.uniform(low, high)


def _number(
    options: Mapping[str, str], key: str, default: float, least: float, most: float
) -> float:
    try:
        value = float(options.get(key, default))
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise ConfigError(
            f"is not a number from {least:g} to {most:g}",
            key=f"--generate {key}",
            value=options.get(key, default),
            remedy=f"give one, or leave {key} out",
        )
    return value


def _whole(options: Mapping[str, str], key: str, default: int, least: float, most: float) -> int:
    value = _number(options, key, default, least, most)
    if value != int(value):
        raise ConfigError(
            "is not a whole number",
            key=f"--generate {key}",
            value=options[key],
            remedy=f"give {int(value)}, for example",
        )
    return int(value)


def _choice(options: Mapping[str, str], key: str, known: Sequence[str]) -> str:
    value = options.get(key, known[0])
    if value not in known:
        raise ConfigError(
            "is not understood", key=key, value=value, remedy=f"choose one of {', '.join(known)}"
        )
    return value
