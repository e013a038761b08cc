"""Turning shares of time into rounds (Gavel, OSDI '20, section 5; algorithms D.2). Pure.

A policy says which part of the time a job should have on each GPU type. Each round the pairs of a
job and a type are served in the order of how far behind its share the job is there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Turn", "is_renewal", "quantum_of", "turns"]

Floats = NDArray[np.float64]

Turn = tuple[int, int]
"""A job and a GPU type, by number."""


def turns(
    shares: Floats, received_s: Floats, rates: Floats, arrivals: Sequence[tuple[float, int]]
) -> tuple[Turn, ...]:
    """All pairs at which ``rates`` is not 0, the most urgent first.

    ``shares`` ``(J, T)`` are parts of the time; ``received_s`` ``(J, T)`` is above 0. The priority
    of a pair is its share by what the job has received there. Pairs without a share come last, for
    GPUs that are left over: as the jobs arrived, each on its fastest type first.
    """
    due = shares / received_s
    jobs, kinds = np.nonzero(rates > 0)
    order = sorted(
        zip(jobs.tolist(), kinds.tolist(), strict=True),
        key=lambda pair: (
            -due[pair],
            -shares[pair],
            arrivals[pair[0]],
            -rates[pair],
            pair[1],
        ),
    )
    return tuple(order)


def is_renewal(now_s: float, previous_s: float | None, quantum_s: float) -> bool:
    """Whether leases of ``quantum_s``, aligned to multiples of it, have ended since that time.

    True where the time of the round before is not known.
    """
    if previous_s is None or previous_s >= now_s:
        return True
    return now_s // quantum_s > previous_s // quantum_s


def quantum_of(policy: object, round_s: float) -> float:
    """Seconds between the whole multiples at which a policy plans anew; infinite for most.

    They are a ``round_s`` for one that says ``by_rounds``, else its ``quantum_s`` if it has one.
    """
    if getattr(policy, "by_rounds", False):
        return round_s
    return float(getattr(policy, "quantum_s", math.inf))
