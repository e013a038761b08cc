"""Settings of single policies, as sections of the settings file; see ``config``.

Each section has the name of its policy, and its keys are fields of the policy with the same
defaults; a test keeps both equal.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

__all__ = [
    "Flag",
    "GavelSettings",
    "PolluxSettings",
    "Seconds",
    "Section",
    "ShockwaveSettings",
    "SiaSettings",
    "ThemisSettings",
]

Seconds = Annotated[float, Field(strict=True, gt=0, le=31_536_000, allow_inf_nan=False)]
"""A duration in seconds: more than 0, at most a year."""

Flag = Annotated[bool, Field(strict=True)]

_Quantum = Annotated[float, Field(strict=True, ge=1, le=86_400, allow_inf_nan=False)]
_Gap = Annotated[float, Field(strict=True, ge=1e-9, le=0.5)]
_Power = Annotated[float, Field(strict=True, ge=-10, le=10, allow_inf_nan=False)]

_QUANTUM = (
    "How long a job keeps what it was granted before all jobs compete anew, in seconds (1 to "
    "86400); counted from whole multiples of it. A stop and a start should be short beside it."
)
_FILLS = (
    "Whether GPUs that become free within a quantum are given to waiting jobs; false leaves them "
    "idle until it ends."
)


class Section(BaseModel):
    """A part of the settings file: frozen, and without keys that are not known."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    @model_validator(mode="before")
    @classmethod
    def _all_commented_out_means_defaults(cls, value: object) -> object:
        return {} if value is None else value


def _not_zero(value: float, instead: str) -> float:
    if value == 0:
        raise PydanticCustomError(
            "no_power",
            "must not be 0, where all gains count the same; use {instead}",
            {"instead": instead},
        )
    return value


class SiaSettings(Section):
    """What the policy sia weighs; see section 3.4 of its paper."""

    power: _Power = Field(
        default=-0.5,
        description="Fairness: the exponent p of each job's gain (-10 to 10, not 0). Below 0 those "
        "that gain least count most; the nearer to 0 or above it, the more the total counts.",
    )
    idle_cost: Annotated[float, Field(strict=True, ge=0, le=1000, allow_inf_nan=False)] = Field(
        default=1.1,
        description="Lambda: what it counts, beside the gains of the others, to leave a job "
        "without GPUs (0 to 1000).",
    )
    most_factor: Annotated[float, Field(strict=True, ge=0.01, lt=1)] = Field(
        default=0.999,
        description="Restart factor: the most that a move counts of the same gain in place (0.01 "
        "to less than 1). It falls by itself with each restart that a job has had, the more the "
        "longer its restarts take.",
    )
    restart_weight: Annotated[float, Field(strict=True, ge=0, le=100, allow_inf_nan=False)] = Field(
        default=2.0,
        description="How many times the seconds that it takes a restart counts (0 to 100). The "
        "more, the fewer restarts and the later jobs end; 1 is as published.",
    )
    moves_between_rounds: Flag = Field(
        default=False,
        description="Whether each event (a job came, ended, stopped) may move running jobs. "
        "Otherwise all are planned anew once in each round_s, and in between jobs that run are "
        "moved only where another one would wait.",
    )
    gap: _Gap = Field(
        default=1e-4,
        description="The solver stops when the choice is proven to be this near to the best one "
        "(relative, 1e-9 to 0.5); its work is bounded whatever it reaches.",
    )

    @field_validator("power")
    @classmethod
    def _is_not_zero(cls, value: float) -> float:
        return _not_zero(value, "-0.5")


class GavelSettings(Section):
    """The policy gavel: shares of time with the most throughput in total."""

    quantum_s: _Quantum = Field(default=360.0, description=_QUANTUM)
    normalised: Flag = Field(
        default=False,
        description="Whether a job's speed counts relative to that on its slowest GPU type. "
        "Otherwise its steps per second count, by which jobs with short steps come first.",
    )
    fills: Flag = Field(default=True, description=_FILLS)


class ThemisSettings(Section):
    """The policy themis: the least worst ratio to an equal part of the cluster."""

    quantum_s: _Quantum = Field(default=360.0, description=_QUANTUM)
    fills: Flag = Field(default=True, description=_FILLS)


class ShockwaveSettings(Section):
    """The policy shockwave: the rounds of a window planned together."""

    quantum_s: _Quantum = Field(default=360.0, description=_QUANTUM)
    rounds: Annotated[int, Field(strict=True, ge=1, le=60)] = Field(
        default=5, description="How many quanta are planned together (count, 1 to 60)."
    )
    makespan: Annotated[float, Field(strict=True, ge=0, le=1000, allow_inf_nan=False)] = Field(
        default=1e-9,
        description="k: what a second of the last job's end counts beside what is done (0 to "
        "1000).",
    )
    power: Annotated[float, Field(strict=True, ge=0, le=100, allow_inf_nan=False)] = Field(
        default=12.0,
        description="Lambda: how much more a job weighs that is treated unfairly, as an exponent "
        "(0 to 100).",
    )
    most_ratio: Annotated[float, Field(strict=True, ge=0.01, le=1000, allow_inf_nan=False)] = Field(
        default=1.0,
        description="From which ratio to a fair finish on a job counts as treated unfairly (0.01 "
        "to 1000).",
    )
    gap: _Gap = Field(
        default=1e-3,
        description="The solver stops when the choice is proven to be this near to the best one "
        "(relative, 1e-9 to 0.5).",
    )
    limit_s: Annotated[float, Field(strict=True, ge=0.1, le=120, allow_inf_nan=False)] = Field(
        default=15.0,
        description="And after so long at the latest, in seconds of each of its two programs (0.1 "
        "to 120), with the best choice that it has then.",
    )
    fills: Flag = Field(default=True, description=_FILLS)


class PolluxSettings(Section):
    """The policy pollux: all GPUs dealt out anew by a genetic search."""

    power: _Power = Field(
        default=-1.0,
        description="Fairness: the exponent p of each job's speedup (-10 to 10, not 0).",
    )
    restart_s: Annotated[float, Field(strict=True, ge=0, le=86_400, allow_inf_nan=False)] = Field(
        default=30.0,
        description="Delta: what a restart is taken to cost, whatever the job, in seconds (0 to "
        "86400).",
    )
    population: Annotated[int, Field(strict=True, ge=2, le=1000)] = Field(
        default=100, description="Members of a search (count, 2 to 1000)."
    )
    generations: Annotated[int, Field(strict=True, ge=1, le=10_000)] = Field(
        default=100, description="Generations of a search at most (count, 1 to 10000)."
    )
    patience: Annotated[int, Field(strict=True, ge=1, le=10_000)] = Field(
        default=12,
        description="It ends after so many generations without a fitter member (count, 1 to "
        "10000); before, where there are fewer jobs, after as many as there are jobs and 8 at "
        "least.",
    )
    part_gpus: Annotated[int, Field(strict=True, ge=1, le=64)] = Field(
        default=4,
        description="Where nodes are unlike, each counts as nodes of so many GPUs (count, 1 to "
        "64).",
    )
    most_nodes: Annotated[int, Field(strict=True, ge=1, le=10_000)] = Field(
        default=16, description="Of these a job has so many at most (count, 1 to 10000)."
    )
    avoid_interference: Flag = Field(
        default=True,
        description="Whether no two jobs that are on several nodes may share one of them.",
    )
    mixes: Flag = Field(
        default=False,
        description="Whether the search believes in shares of several GPU types, of which a job "
        "then gets one, as in Sia's study.",
    )
    seed: Annotated[int, Field(strict=True, ge=0, le=4_294_967_295)] = Field(
        default=0, description="Seed of its random numbers (0 to 4294967295)."
    )

    @field_validator("power")
    @classmethod
    def _is_not_zero(cls, value: float) -> float:
        return _not_zero(value, "-1")
