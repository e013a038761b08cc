"""The time limit that a user meant, over all runs of a job. Pure.

Slurm gives a requeued job its whole limit again. Here a limit is for the job: at each restart the
record's TimeLimit is set to what is left. So that a person's change of the record keeps its meaning
(more or less time for this run), what is remembered is not the limit but the time that the runs
before used up: limit = time used before + the limit in the record.

Two commands cannot be made one. What is about to be set is therefore remembered first, beside what
held before; which of both is true, the record itself tells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

__all__ = ["MINUTE_S", "NO_LIMIT_S", "RunTime", "Served", "limit_in_record"]

MINUTE_S = 60.0
NO_LIMIT_S = 365 * 86_400.0
"""What a running job without a limit shows as its limit, in seconds."""


def limit_in_record(limit_s: float | None) -> float | None:
    """A record's limit in seconds; None for none."""
    return None if limit_s is None or limit_s >= NO_LIMIT_S else limit_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """For how long an elastic job ran, which its service in GPU-seconds alone does not tell.

    ``ran_s`` seconds of runs had brought it ``service_gpu_s`` when a run on ``gpus`` GPUs began,
    which has not ended since or is the last one. Remembered before each start; a start that came to
    nothing has brought no service, so that what it remembered does no harm.
    """

    ran_s: float = 0.0
    service_gpu_s: float = 0.0
    gpus: int

    @classmethod
    def from_memory(cls, memory: Mapping[str, object], gpus: int) -> Served:
        """What ``to_memory`` left; without anything all of it was on ``gpus`` GPUs."""
        value = memory.get("served")
        if not isinstance(value, Mapping):
            return cls(gpus=gpus)
        return cls(
            ran_s=float(value["ran_s"]),
            service_gpu_s=float(value["service_gpu_s"]),
            gpus=int(value["gpus"]),
        )

    def to_memory(self) -> Mapping[str, object]:
        """As JSON for ``from_memory``."""
        return asdict(self)

    def ran_until_s(self, service_gpu_s: float) -> float:
        """Seconds of all runs, when their service is ``service_gpu_s`` by now."""
        return self.ran_s + max(0.0, service_gpu_s - self.service_gpu_s) / self.gpus

    def restart(self, service_gpu_s: float, gpus: int) -> Served:
        """What to remember for a run on ``gpus`` GPUs that begins with that service."""
        ran_s = self.ran_until_s(service_gpu_s)
        return Served(ran_s=ran_s, service_gpu_s=service_gpu_s, gpus=gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    """How much of a job's limit its earlier runs have used up, in seconds.

    ``used_s`` goes with the limit that was last set; as long as the record still shows
    ``before_limit_s``, that change was not made and ``before_used_s`` holds.
    """

    used_s: float = 0.0
    before_used_s: float = 0.0
    before_limit_s: float | None = None

    @classmethod
    def from_memory(cls, memory: Mapping[str, object]) -> RunTime:
        """What ``to_memory`` left; nothing used when there is nothing."""
        value = memory.get("run_time")
        if not isinstance(value, Mapping):
            return cls()
        before = value.get("before_limit_s")
        return cls(
            used_s=float(value.get("used_s", 0.0)),
            before_used_s=float(value.get("before_used_s", 0.0)),
            before_limit_s=None if before is None else float(before),
        )

    def to_memory(self) -> Mapping[str, object]:
        """As JSON for ``from_memory``."""
        return asdict(self)

    def whole_s(self, record_limit_s: float | None) -> float | None:
        """The limit over all runs, None for none; ``record_limit_s`` is what the record shows."""
        limit_s = limit_in_record(record_limit_s)
        if limit_s is None:
            return None
        return limit_s + (self.before_used_s if limit_s == self.before_limit_s else self.used_s)

    def restart(
        self, record_limit_s: float | None, ran_s: float
    ) -> tuple[RunTime, float] | tuple[None, None]:
        """What to remember and the limit to set for a run after ``ran_s`` seconds of others.

        Nothing of both when the record is right as it is. At least a minute is left: a job whose
        time is over is ended by Slurm, as it would have been without restarts.
        """
        limit_s, whole_s = limit_in_record(record_limit_s), self.whole_s(record_limit_s)
        if limit_s is None or whole_s is None:
            return None, None
        left_s = MINUTE_S * max(1, math.ceil((whole_s - ran_s) / MINUTE_S))
        if left_s == limit_s:
            return None, None
        next_one = RunTime(
            used_s=whole_s - left_s, before_used_s=whole_s - limit_s, before_limit_s=limit_s
        )
        return next_one, left_s
