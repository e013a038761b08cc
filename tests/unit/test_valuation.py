"""Normalised goodput, restart discounts, and the gains that the assignment maximises."""

import numpy as np
import pytest

from slurm_synergy.core.assignment import Choices, assign
from slurm_synergy.core.valuation import gains, normalise, restart_factor
from slurm_synergy.errors import ModelError

# Table 1 of the Sia paper: one node of 2 GPUs of type A, one of 4 of type B; its columns are
# (1, 1, A) (1, 2, A) (1, 1, B) (1, 2, B) (1, 4, B).
TAKES = np.array([[1.0, 2, 0, 0, 0], [0, 0, 1, 2, 4]])
LIMITS = np.array([2.0, 4])
PUBLISHED = [[1.0, 1, 2, 3, 4], [2.0, 4, 1, 2, 3]]
SUBMITTED = [[1.0, 1.5, 1.5, 2.5, 3.5], [1.2, 2.1, 1, 1.9, 3.6]]


@pytest.mark.parametrize(
    ("rows", "power", "objective"),
    [(PUBLISHED, 1, 8), (PUBLISHED, -0.5, 1.0), (SUBMITTED, 1, 5.6), (SUBMITTED, -0.5, 1.2246)],
)
def test_the_paper_s_example_is_decided_as_there(
    rows: list[list[float]], power: float, objective: float
) -> None:
    values = normalise(np.array(rows), np.ones(2))
    found = assign(
        Choices(
            gains=gains(values, np.array([-1, -1]), np.ones(2), power=power),
            takes=TAKES,
            limits=LIMITS,
            forced=np.zeros(2, dtype=bool),
        )
    )
    assert found.chosen.tolist() == [4, 1]
    assert sum(values[[0, 1], found.chosen] ** power) == pytest.approx(objective, abs=5e-5)
    assert found.exact


def test_a_row_is_normalised_by_its_smallest_possible_entry() -> None:
    found = normalise(np.array([[2.0, 0, 4, 8]]), np.array([1.0]))
    assert found[0, [0, 2, 3]].tolist() == [1, 2, 4]
    assert np.isnan(found[0, 1])


def test_a_job_that_needs_two_gpus_starts_at_two() -> None:
    assert normalise(np.array([[3.0, 6]]), np.array([2.0])).tolist() == [[2, 4]]


def test_a_row_without_any_entry_stays_empty() -> None:
    assert np.isnan(normalise(np.zeros((1, 3)), np.ones(1))).all()


def test_the_restart_factor_is_that_of_the_specification() -> None:
    found = restart_factor(np.array([600.0]), np.array([2.0]), np.array([100.0]))
    assert found[0] == pytest.approx(0.5714, abs=5e-5)


def test_the_restart_factor_stays_within_its_bounds() -> None:
    found = restart_factor(
        np.array([0.0, 10.0, 0.0]), np.array([0.0, 50.0, 3.0]), np.array([0.0, 100.0, 10.0])
    )
    assert found.tolist() == [1.0, 0.01, 0.01]


def test_only_a_move_of_a_job_that_runs_is_discounted() -> None:
    values = np.array([[1.0, 4], [1, 4]])
    found = gains(values, np.array([0, -1]), np.array([0.25, 0.25]))
    assert found[0].tolist() == pytest.approx([0.1, 0.1])  # the move is worth nothing more
    assert found[1].tolist() == pytest.approx([0.1, 0.6])


def test_a_power_of_zero_is_refused() -> None:
    with pytest.raises(ModelError, match="power"):
        gains(np.ones((1, 1)), np.array([-1]), np.ones(1), power=0)
