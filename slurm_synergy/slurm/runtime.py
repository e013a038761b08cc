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

__all__ = ["MINUTE_S", "NO_LIMIT_S", "RunTime", "limit_in_record"]

MINUTE_S = 60.0
NO_LIMIT_S = 365 * 86_400.0
"""What a running job without a limit shows as its limit, in seconds."""


def limit_in_record(limit_s: float | None) -> float | None:
    """A record's limit in seconds; None for none."""
    return None if limit_s is None or limit_s >= NO_LIMIT_S else limit_s


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
