"""Exact prices of small programs: nobody finds a lower bound, wherever the search begins."""

import numpy as np
import pytest

from slurm_synergy.core.relaxation import relaxed_prices
from slurm_synergy.core.smoothing import smoothed_prices

IDLE = 4


def _program(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Six jobs, of which some are alike, on two types of GPU and in pieces of two sizes."""
    rng = np.random.default_rng(seed)
    gains = rng.uniform(0.1, 1.0, (6, IDLE + 1)).round(rng.integers(1, 7))
    gains[rng.random(gains.shape) < 0.2] = -np.inf
    gains[1] = gains[0]
    gains[:, IDLE] = 0.0
    takes = np.array([[1, 2, 0, 0, 0], [0, 0, 1, 4, 0], [0, 0, 0, 4, 0]], dtype=float)
    limits = np.array([rng.integers(0, 6), rng.integers(0, 9), 4], dtype=float)
    gains[:, :IDLE][:, (takes[:, :IDLE] > limits[:, None]).any(axis=0)] = -np.inf
    return gains, takes, limits


def _bound(prices: np.ndarray, gains: np.ndarray, takes: np.ndarray, limits: np.ndarray) -> float:
    return float((gains - prices @ takes).max(axis=1).sum() + prices @ limits)


@pytest.mark.parametrize("seed", range(40))
def test_no_prices_near_or_far_give_a_lower_bound(seed: int) -> None:
    program, rng = _program(seed), np.random.default_rng(seed)
    prices = relaxed_prices(*program, np.full(len(program[0]), IDLE))
    assert (prices >= 0).all()
    bound = _bound(prices, *program)
    assert bound <= _bound(smoothed_prices(*program), *program) + 1e-9
    # The bound is convex, so what is lowest nearby is lowest of all.
    for size in (1e-4, 1e-2, 1.0):
        for step in rng.normal(0, size, (50, len(prices))):
            assert _bound(np.maximum(prices + step, 0.0), *program) >= bound - 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_does_not_depend_on_where_the_search_begins(seed: int) -> None:
    program = _program(seed)
    gains, takes, limits = program
    expected = _bound(relaxed_prices(*program, np.full(len(gains), IDLE)), *program)
    keys, left = np.full(len(gains), IDLE), limits.copy()
    for job, row in enumerate(gains):  # as much as fits, whatever it is worth
        for column in np.nonzero(np.isfinite(row))[0].tolist():
            if (takes[:, column] <= left).all():
                keys[job] = column
                left -= takes[:, column]
                break
    begun = keys.copy()
    assert _bound(relaxed_prices(*program, keys), *program) == pytest.approx(expected, abs=1e-9)
    assert keys.tolist() == begun.tolist()


def test_a_price_is_what_one_more_would_bring() -> None:
    """Three jobs that gain 3, 2 and 1 from a GPU, of which there are none to three."""
    gains, takes = np.array([[3.0, 0.0], [2.0, 0.0], [1.0, 0.0]]), np.array([[1.0, 0.0]])
    for gpus, price in ((0, 3.0), (1, 2.0), (2, 1.0), (3, 0.0)):
        limits = np.array([float(gpus)])
        assert relaxed_prices(gains, takes, limits, np.full(3, 1)).tolist() == [price]
