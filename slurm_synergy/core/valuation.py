"""What a configuration is worth to a job, comparably over jobs (Sia, SOSP '23, section 3.4).

Goodput has a unit of its own in every job, so each row of the matrix jobs x configurations is
normalised by its own smallest entry; a change of configuration is discounted by what restarts have
cost so far; a power says how much the fast gain on the slow.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slurm_synergy.errors import ModelError

__all__ = ["IDLE_COST", "gains", "normalise", "restart_factor"]

Floats = NDArray[np.float64]

IDLE_COST = 1.1
"""Lambda: what a job without GPUs costs. With a negative power a job in its weakest configuration
costs at most 1, so running is always better than waiting."""

_LEAST_FACTOR = 1e-2


def normalise(goodput: Floats, least_gpus: Floats) -> Floats:
    """Rows whose smallest entry is the job's least GPU count (algorithms C.7).

    ``goodput`` has shape ``(J, K)``, 0 or NaN where the configuration is not possible: those are
    NaN in the answer. ``least_gpus`` has shape ``(J,)``. A row without any entry stays empty.
    """
    known = np.isfinite(goodput) & (goodput > 0)
    smallest = np.where(known, goodput, np.inf).min(axis=1, initial=np.inf)
    rows: Floats = np.where(known, goodput, np.nan) / smallest[:, None] * least_gpus[:, None]
    return rows


def restart_factor(age_s: Floats, restarts: Floats, restart_s: Floats) -> Floats:
    """Discount of any configuration but the current one, within 0.01..1 (algorithms C.7).

    ``(T - K S) / (T + S)`` with age T, restarts so far K and seconds of one restart S: what would
    have been left of the job's time with one restart more.
    """
    total_s = age_s + restart_s
    safe_s = np.where(total_s > 0, total_s, 1.0)
    factor = np.where(total_s > 0, (age_s - restarts * restart_s) / safe_s, 1.0)
    return np.clip(factor, _LEAST_FACTOR, 1.0)


def gains(
    values: Floats,
    current: NDArray[np.int64],
    factors: Floats,
    *,
    power: float = -0.5,
    idle_cost: float = IDLE_COST,
) -> Floats:
    """What each configuration brings over leaving the job idle, to be maximised in total.

    ``values`` ``(J, K)`` normalised goodput, NaN where not possible; ``current`` ``(J,)`` the
    column that a job holds, or -1; ``factors`` ``(J,)`` discounts of all other columns of jobs that
    hold one (a waiting job is never discounted: it could end up waiting for ever). Answers
    ``(J, K)`` with ``-inf`` where not possible.

    With a negative power the costs ``value ** power`` are minimised, with a positive one the values
    maximised (algorithms C.8). Raises ModelError for a power of zero, which makes all values equal.
    """
    if power == 0:
        raise ModelError("the fairness power must not be 0: every configuration would be worth 1")
    columns = np.arange(values.shape[1])
    moved = (current >= 0)[:, None] & (columns[None, :] != current[:, None])
    discounted = np.where(moved, values * factors[:, None], values)
    powered = discounted**power
    worth = idle_cost - powered if power < 0 else idle_cost + powered
    return np.where(np.isnan(values), -np.inf, worth)
