"""What a job holds, from an answer about it: by our lease, or as Slurm shows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["holdings"]

_NOTHING_TOLD: Mapping[str, Any] = {"samples_per_s": 0, "data_stall": None}


def holdings(job: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The job's lease; else, as in mode observe, what Slurm gave it; None if it holds nothing."""
    lease: Mapping[str, Any] | None = job["lease"]
    allocated: Mapping[str, Any] | None = job.get("allocated")
    if lease is None and allocated is not None:
        return {**allocated, "stop": None, "progress": _NOTHING_TOLD}
    return lease
