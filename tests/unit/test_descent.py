"""The descent of the throughput model's loss: right slopes, and no other start leads lower."""

import numpy as np
import pytest
from scipy.optimize import approx_fprime, minimize

from slurm_synergy.profiler.descent import GAMMA, Loss, descend

LOWER = np.array([1e-8] * 6 + [1.0])
UPPER = np.array([np.inf] * 6 + [10.0])
START = np.array([0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001])


def _loss(seed: int) -> Loss:
    """Of measurements that no model fits: the times are off by up to a fifth."""
    rng = np.random.default_rng(seed)
    shapes = [(1, 1), (1, 2), (1, 4), (2, 8), (3, 12), (3, 24)]
    rows = np.array([(nodes, many, batch) for nodes, many in shapes for batch in (8, 32, 128)])
    nodes, replicas, batch = rows.T
    gradient_s = (0.05 + 0.002 * batch) * rng.uniform(0.8, 1.2, len(rows))
    over_s = np.where(replicas > 1, 0.02 * nodes + 0.003 * replicas, 1e-8)
    step_s = (gradient_s + over_s) * rng.uniform(0.8, 1.2, len(rows))
    return Loss(nodes, replicas, batch, gradient_s, step_s)


def test_the_slopes_are_those_of_the_loss() -> None:
    loss = _loss(1)
    values = np.array([0.07, 0.003, 0.05, 0.006, 0.03, 0.002, 1.7])
    found, _ = loss.slopes(values, loss.at(values), True)
    wanted = approx_fprime(values, lambda at: loss.at(at).loss, 1e-7)
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("seed", range(2))
def test_no_other_start_leads_lower(seed: int) -> None:
    loss = _loss(seed)
    least = loss.at(descend(loss, LOWER, UPPER, START)).loss
    rng = np.random.default_rng(seed)
    for _ in range(3):
        start = np.append(10 ** rng.uniform(-3, -0.5, GAMMA), rng.uniform(1, 5))
        other = minimize(
            lambda at: loss.at(at).loss,
            start,
            jac=lambda at: loss.slopes(at, loss.at(at), True)[0],
            method="L-BFGS-B",
            bounds=list(zip(LOWER, UPPER, strict=True)),
            options={"maxiter": 100},
        )
        assert least <= other.fun + 1e-4
    assert least < loss.at(START).loss


def test_what_is_fixed_stays() -> None:
    lower, upper, start = LOWER.copy(), UPPER.copy(), START.copy()
    lower[0] = upper[0] = start[0] = 0.04
    found = descend(_loss(2), lower, upper, start)
    assert found[0] == 0.04
    assert ((found >= lower) & (found <= upper)).all()
