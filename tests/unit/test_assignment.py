"""Choosing a configuration for every job: feasible, bounded, and exact where that is cheap."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_synergy.core import sweep
from slurm_synergy.core.assignment import IDLE, Assignment, Choices, assign
from slurm_synergy.errors import ModelError


@st.composite
def programs(draw: st.DrawFn) -> Choices:
    """Small programs, of which every choice can be tried."""
    jobs, columns, rows = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    gains = rng.uniform(-0.3, 1.0, (jobs, columns)).round(draw(st.sampled_from([1, 6])))
    gains[rng.random((jobs, columns)) < 0.2] = -np.inf
    return Choices(
        gains=gains,
        takes=rng.integers(0, 5, (rows, columns)).astype(float),
        limits=rng.integers(0, 8, rows).astype(float),
        forced=rng.random(jobs) < draw(st.sampled_from([0, 0.4])),
    )


def _used(choices: Choices, chosen: np.ndarray) -> np.ndarray:
    taken = chosen[chosen != IDLE]
    return choices.takes[:, taken].sum(axis=1)


def _best(choices: Choices) -> tuple[int, float]:
    """The most forced jobs that can be served at once, and the best objective with as many."""
    jobs, columns = choices.gains.shape
    best = (-1, -np.inf)
    for combination in product(range(-1, columns), repeat=jobs):
        chosen = np.array(combination)
        taken = chosen != IDLE
        worth = choices.gains[np.nonzero(taken)[0], chosen[taken]].sum()
        if np.isfinite(worth) and (_used(choices, chosen) <= choices.limits).all():
            best = max(best, (int((taken & choices.forced).sum()), float(worth)))
    return best


def _check(choices: Choices, found: Assignment) -> None:
    taken = found.chosen != IDLE
    assert (_used(choices, found.chosen) <= choices.limits).all()
    worth = choices.gains[np.nonzero(taken)[0], found.chosen[taken]]
    assert np.isfinite(worth).all()
    assert found.objective == pytest.approx(worth.sum())
    assert found.feasible == bool((taken | ~choices.forced).all())


@given(programs())
def test_the_answer_fits_and_is_the_best_of_all(choices: Choices) -> None:
    found = assign(choices, gap=0.0)
    _check(choices, found)
    served, best = _best(choices)
    if served == choices.forced.sum():
        assert found.bound >= best - 1e-9
        if found.feasible:
            assert found.objective <= best + 1e-9
        if found.exact and found.feasible:
            assert found.objective == pytest.approx(best, abs=1e-6)
    if not choices.forced.any():
        assert found.exact
        assert found.objective == pytest.approx(best, abs=1e-6)


@given(programs())
def test_few_choices_are_decided_as_many_are(choices: Choices) -> None:
    few = assign(choices, gap=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "_MOST_STATES", -1)
        many = assign(choices, gap=0.0)
    assert few.chosen.tolist() == many.chosen.tolist()


@given(programs(), st.randoms(use_true_random=False))
def test_the_same_program_gets_the_same_answer(choices: Choices, _: object) -> None:
    first, second = assign(choices), assign(choices)
    assert first.chosen.tolist() == second.chosen.tolist()
    assert first.prices.tolist() == second.prices.tolist()


def _pool(jobs: int, nodes: tuple[int, ...], seed: int) -> Choices:
    """Jobs of unlike speed-ups on types of 4, 8 and 8 GPUs a node, as Sia's policy poses it."""
    rng = np.random.default_rng(seed)
    columns = [
        (kind, gpus)
        for kind, size in enumerate((4, 8, 8))
        for gpus in (*(1 << bit for bit in range(size.bit_length())), 2 * size, 3 * size)
    ]
    gpus = np.array([each for _, each in columns])
    takes = np.array([[each * (kind == row) for kind, each in columns] for row in range(3)], float)
    speed = rng.uniform(1, 3, (jobs, 3))[:, [kind for kind, _ in columns]]
    values = speed * gpus ** rng.uniform(0.2, 1, (jobs, 1))
    most = rng.choice([1, 2, 4, 8, 24], (jobs, 1))
    cost = (values / values.min(axis=1, keepdims=True)) ** -0.5
    return Choices(
        gains=np.where(gpus[None, :] > most, -np.inf, 1.1 - cost),
        takes=takes,
        limits=np.array(
            [count * size for count, size in zip(nodes, (4, 8, 8), strict=True)], float
        ),
        forced=np.zeros(jobs, dtype=bool),
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("jobs", [8, 30, 90])
def test_a_pool_of_64_gpus_is_decided_within_a_ten_thousandth(jobs: int, seed: int) -> None:
    choices = _pool(jobs, (6, 3, 2), seed)
    found = assign(choices)
    _check(choices, found)
    assert found.exact
    assert found.gap <= 1e-4


def test_a_large_pool_is_certified_within_a_thousandth() -> None:
    choices = _pool(600, (96, 48, 32), 1)
    found = assign(choices)
    _check(choices, found)
    assert found.gap <= 1e-3
    assert (found.prices >= 0).all()


def test_forced_jobs_come_before_all_others() -> None:
    choices = Choices(
        gains=np.array([[1.0], [1.0], [-0.5]]),
        takes=np.array([[1.0]]),
        limits=np.array([2.0]),
        forced=np.array([False, False, True]),
    )
    found = assign(choices)
    assert found.chosen[2] == 0
    assert found.feasible


def test_forced_jobs_that_do_not_fit_are_said_to_be_left_out() -> None:
    choices = Choices(
        gains=np.ones((2, 1)),
        takes=np.array([[1.0]]),
        limits=np.array([1.0]),
        forced=np.array([True, True]),
    )
    found = assign(choices)
    assert not found.feasible
    assert (found.chosen != IDLE).sum() == 1


def test_no_job_and_no_configuration_is_no_error() -> None:
    empty = Choices(
        gains=np.empty((0, 0)),
        takes=np.empty((0, 0)),
        limits=np.empty(0),
        forced=np.empty(0, dtype=bool),
    )
    assert assign(empty).objective == 0
    idle = Choices(
        gains=np.empty((2, 0)),
        takes=np.empty((1, 0)),
        limits=np.array([3.0]),
        forced=np.zeros(2, dtype=bool),
    )
    assert assign(idle).chosen.tolist() == [IDLE, IDLE]


def test_gains_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ModelError, match="gains"):
        Choices(
            gains=np.array([[np.nan]]),
            takes=np.array([[1.0]]),
            limits=np.array([1.0]),
            forced=np.zeros(1, dtype=bool),
        )


def test_a_choice_that_is_as_good_as_any_is_kept() -> None:
    """Three equal jobs and two GPUs: those that have them keep them."""
    choices = Choices(
        gains=np.ones((3, 1)),
        takes=np.array([[1.0]]),
        limits=np.array([2.0]),
        forced=np.zeros(3, dtype=bool),
    )
    for start in ([0, 0, IDLE], [IDLE, 0, 0], [0, IDLE, 0]):
        assert assign(choices, start=np.array(start)).chosen.tolist() == start
    # It is completed where there is room, and ignored where it does not fit.
    assert (assign(choices, start=np.array([IDLE, 0, IDLE])).chosen != IDLE).sum() == 2
    assert (assign(choices, start=np.zeros(3, dtype=np.int64)).chosen != IDLE).sum() == 2


@given(programs(), st.integers(0, 5))
def test_a_start_never_makes_the_answer_worse(choices: Choices, column: int) -> None:
    jobs, columns = choices.gains.shape
    start = np.full(jobs, column if column < columns else IDLE)
    plain, kept = assign(choices, gap=0.0), assign(choices, gap=0.0, start=start)
    _check(choices, kept)
    assert kept.objective >= plain.objective - 1e-6


def test_a_start_that_serves_a_forced_job_is_not_given_up_for_more_gain() -> None:
    """Two GPUs: the forced job needs both and loses by it, the others would gain from one each."""
    choices = Choices(
        gains=np.array([[-np.inf, -0.5], [1.0, -np.inf], [1.0, -np.inf]]),
        takes=np.array([[1.0, 2.0]]),
        limits=np.array([2.0]),
        forced=np.array([True, False, False]),
    )
    found = assign(choices, start=np.array([1, IDLE, IDLE]))
    assert found.feasible
    assert found.chosen.tolist() == [1, IDLE, IDLE]
