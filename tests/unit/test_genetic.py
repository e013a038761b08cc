"""The genetic search: what members are worth, how they are repaired, and what it finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from slurm_synergy.core.genetic import search
from slurm_synergy.core.members import Problem, fitness, members_of, realloc_factor, true_at
from slurm_synergy.core.populations import Memory, Past
from slurm_synergy.core.repair import repair
from slurm_synergy.core.variation import children, mutate


def problem(jobs: int = 2, nodes: int = 2, gpus: int = 4, **more: Any) -> Problem:
    """Jobs that scale perfectly on a node and half as well over several, from nothing."""
    sizes = np.arange(nodes * gpus + 1, dtype=float)
    rates = np.stack([sizes, sizes / 2])
    made: dict[str, Any] = {
        "speedups": np.stack([rates] * jobs),
        "outputs": np.stack([rates] * jobs),
        "discounts": np.ones(jobs),
        "current": np.zeros((jobs, nodes), dtype=np.int64),
        "least": np.ones(jobs, dtype=np.int64),
        "most": np.full(jobs, 64, dtype=np.int64),
        "allowed": np.ones((jobs, nodes), dtype=bool),
        "even": np.zeros(jobs, dtype=bool),
        "capacity": np.full(nodes, gpus, dtype=np.int64),
        "hosts": np.arange(nodes),
        "kinds": np.zeros(nodes, dtype=np.int64),
        "ranks": np.zeros((jobs, 2), dtype=np.int64),
    }
    return Problem(**{**made, **more})


def members(*rows: list[list[int]]) -> NDArray[np.int16]:
    """Members as they are written down, jobs by nodes, as one population."""
    return members_of(*(np.array(one) for one in rows))


def repaired(given: Problem, rows: list[list[int]], seed: int = 1) -> list[list[int]]:
    made = repair(given, members(rows), np.random.default_rng(seed))
    found: list[list[int]] = made[:, :, 0].T.tolist()
    return found


# worth ----------------------------------------------------------------------------------------


def test_the_realloc_factor_is_what_is_left_of_a_jobs_time_after_one_more_restart() -> None:
    ages_s, restarts = np.array([600.0, 600.0, 0.0, 50.0]), np.array([2.0, 0.0, 0.0, 4.0])
    found = realloc_factor(ages_s, restarts, 100.0)
    # (600 - 200) / 700, 600 / 700, new, and more spent on restarts than it is old.
    assert found == pytest.approx([0.5714, 0.8571, 0.0, 0.0], abs=1e-4)


@pytest.mark.parametrize(
    ("power", "expected"),
    [
        (-1.0, 2 / (1 / 2.001 + 1 / 4.001)),
        (1.0, 3.001),
        (-2.0, ((2.001**-2 + 4.001**-2) / 2) ** -0.5),
    ],
)
def test_fitness_is_the_power_mean_of_the_speedups(power: float, expected: float) -> None:
    given = problem(power=power)
    fit, use = fitness(given, members([[2, 0], [0, 4]]))
    assert fit == pytest.approx([expected])
    assert use == pytest.approx([6 / 8])


def test_gpus_of_several_nodes_count_as_such() -> None:
    """Jobs over two nodes are half as fast here: 4 GPUs are worth 2."""
    fit, _ = fitness(problem(power=1.0), members([[2, 2], [0, 0]], [[4, 0], [0, 0]]))
    assert fit == pytest.approx([1.001, 2.001])


def test_only_what_differs_from_the_current_allocation_is_discounted() -> None:
    now = np.array([[2, 0], [0, 2]])
    given = problem(power=1.0, current=now, discounts=np.array([0.5, 0.25]))
    fit, _ = fitness(given, members([[2, 0], [0, 2]], [[3, 0], [0, 2]], [[0, 2], [2, 0]]))
    assert fit == pytest.approx([2.001, (1.5 + 2) / 2 + 1e-3, (1 + 0.5) / 2 + 1e-3])


def test_gpus_of_another_part_of_the_same_host_are_no_other_allocation() -> None:
    now = np.array([[2, 0], [0, 2]])
    given = problem(power=1.0, current=now, discounts=np.zeros(2), hosts=np.array([0, 0]))
    fit, _ = fitness(given, members([[0, 2], [2, 0]]))
    assert fit == pytest.approx([2.001])


def test_a_job_without_gpus_costs_more_than_any_speed_gains() -> None:
    fit, _ = fitness(problem(), members([[1, 0], [1, 0]], [[4, 4], [0, 0]]))
    assert fit[0] > 100 * fit[1]


# repair ---------------------------------------------------------------------------------------


def test_nothing_stays_where_a_job_must_not_be() -> None:
    given = problem(allowed=np.array([[True, False], [True, True]]))
    assert repaired(given, [[1, 2], [1, 1]]) == [[1, 0], [1, 1]]


def test_only_the_first_job_over_several_nodes_keeps_its_part_of_a_node() -> None:
    given = problem(jobs=3)
    rows = [[1, 1], [1, 2], [2, 0]]
    assert repaired(given, rows) == [[1, 1], [0, 0], [2, 0]]
    freely = problem(jobs=3, avoid_interference=False)
    assert repaired(freely, rows) == rows


def test_a_job_has_at_most_its_most_gpus_from_nodes_in_random_order() -> None:
    given = problem(most=np.array([3, 64]))
    found = [repaired(given, [[3, 3], [0, 1]], seed) for seed in range(20)]
    assert {tuple(rows[0]) for rows in found} == {(3, 0), (0, 3)}
    assert all(rows[1] == [0, 1] for rows in found)


def test_a_job_is_on_at_most_so_many_nodes() -> None:
    given = problem(jobs=1, nodes=3, most_nodes=2)
    assert repaired(given, [[1, 2, 3]]) == [[1, 2, 0]]


def test_earlier_jobs_keep_the_gpus_of_an_overfull_node() -> None:
    given = problem(jobs=3)
    assert repaired(given, [[3, 0], [3, 0], [1, 4]]) == [[3, 0], [1, 0], [0, 4]]


def test_a_jobs_most_is_cut_before_a_nodes_gpus_are_shared_out() -> None:
    """The other way round the second job would have nothing, and the first still too much."""
    given = problem(most=np.array([2, 64]))
    assert repaired(given, [[4, 0], [4, 0]]) == [[2, 0], [2, 0]]


def test_an_even_job_has_as_many_gpus_on_each_host_as_gives_it_most() -> None:
    given = problem(jobs=1, nodes=4, even=np.array([True]))
    assert repaired(given, [[4, 3, 0, 0]]) == [[3, 3, 0, 0]]
    assert repaired(given, [[1, 4, 1, 0]]) == [[0, 4, 0, 0]]
    assert repaired(given, [[4, 4, 3, 0]]) == [[3, 3, 3, 0]]
    assert repaired(given, [[2, 1, 0, 0]]) == [[2, 0, 0, 0]]  # as many on fewer
    halves = problem(jobs=1, nodes=4, even=np.array([True]), hosts=np.array([0, 0, 1, 1]))
    assert repaired(halves, [[4, 2, 4, 1]]) == [[4, 1, 4, 1]]
    assert repaired(halves, [[1, 4, 0, 0]]) == [[1, 4, 0, 0]]


def test_a_job_keeps_the_kind_of_which_it_has_most() -> None:
    given = problem(jobs=2, nodes=3, kinds=np.array([0, 0, 1]), ranks=np.array([[0, 1], [1, 0]]))
    assert repaired(given, [[2, 1, 2], [0, 2, 1]]) == [[2, 1, 0], [0, 2, 0]]
    # Of equally many each keeps what it prefers.
    assert repaired(given, [[2, 0, 2], [1, 1, 2]]) == [[2, 0, 0], [0, 0, 2]]
    mixed = problem(nodes=3, kinds=np.array([0, 0, 1]), one_kind=False)
    assert repaired(mixed, [[2, 1, 2], [0, 0, 0]]) == [[2, 1, 2], [0, 0, 0]]


def test_gpus_of_one_kind_are_not_cut_to_be_as_many_as_those_of_another() -> None:
    """Only one kind will be used; which it is depends on how many there are of each."""
    given = problem(
        jobs=1,
        nodes=5,
        even=np.array([True]),
        hosts=np.array([0, 1, 2, 2, 3]),
        kinds=np.array([0, 0, 1, 1, 1]),
        one_kind=False,
    )
    assert repaired(given, [[2, 3, 4, 4, 0]]) == [[2, 2, 4, 4, 0]]
    assert repaired(given, [[1, 0, 4, 1, 3]]) == [[1, 0, 3, 0, 3]]


def test_a_job_with_less_than_its_least_has_nothing() -> None:
    given = problem(least=np.array([3, 1]))
    assert repaired(given, [[1, 1], [0, 1]]) == [[0, 0], [0, 1]]


def test_the_least_is_looked_at_last() -> None:
    """What the second job loses to the first one leaves it below its least."""
    given = problem(least=np.array([1, 3]))
    assert repaired(given, [[2, 0], [3, 0]]) == [[2, 0], [0, 0]]


def test_whatever_is_mutated_is_repaired_into_what_can_be_run() -> None:
    rng = np.random.default_rng(3)
    given = problem(
        jobs=5,
        nodes=4,
        most=np.array([1, 2, 4, 8, 16]),
        least=np.array([1, 2, 1, 3, 1]),
        even=np.array([True, True, False, True, True]),
        hosts=np.array([0, 0, 1, 1]),
    )
    states = np.zeros((4, 5, 60), dtype=np.int16)
    for _ in range(30):
        states = repair(given, mutate(given, states, rng), rng)
        totals = states.sum(axis=0)
        assert (states >= 0).all() and (states.sum(axis=1) <= 4).all()
        assert (totals <= given.most[:, None]).all()
        assert ((totals == 0) | (totals >= given.least[:, None])).all()
        by_host = states[0::2] + states[1::2]
        unlike = (by_host > 0).all(axis=0) & (by_host[0] != by_host[1])
        assert not unlike[given.even].any()
    assert totals.any()


# new members ----------------------------------------------------------------------------------


def test_a_child_has_the_first_rows_of_one_parent_and_the_last_of_another() -> None:
    parents = members_of(*(np.full((6, 2), at) for at in range(50)))
    made = children(parents, np.random.default_rng(2))
    assert made.shape == parents.shape
    whole = 0
    for rows in made[0].T:
        assert (np.diff(rows) != 0).sum() <= 1
        whole += len(set(rows.tolist())) == 1
    assert 0 < whole < 50
    assert made.mean() < 20  # the better ones, who stand first, are drawn more often


def test_rows_grow_only_where_there_is_room_and_where_they_may() -> None:
    """Rows are reset, emptied, or grow; a node that is full or forbidden gives nothing more."""
    now = np.array([[4, 0, 0], [0, 1, 0]])
    given = problem(
        nodes=3, current=now, allowed=np.array([[True, True, True], [True, True, False]])
    )
    made = mutate(given, members_of(*[now] * 4000), np.random.default_rng(1))
    assert np.bincount(made[0, 0])[[0, 4]].sum() > 3900
    assert not made[0, 1, made[0, 0] == 4].any() and made[0, 1].any()
    assert set(made[1, 1].tolist()) == {0, 1, 2, 3, 4}
    assert made[2, 0].any() and not made[2, 1].any()


def test_a_job_that_may_be_on_a_third_of_the_nodes_grows_nearly_as_often() -> None:
    """Of both, about as many members have more than now, and in some of them both have."""
    now = np.zeros((2, 6), dtype=np.int64)
    given = problem(nodes=6, current=now, allowed=np.array([[False] * 4 + [True] * 2, [True] * 6]))
    made = mutate(given, members_of(*[now] * 3000), np.random.default_rng(2))
    grown = made.any(axis=0)
    few, all_of_them = grown.sum(axis=1).tolist()
    assert 0.8 * all_of_them < few < 1.1 * all_of_them
    assert 400 < all_of_them < 1500 and grown.all(axis=0).any()


def test_true_marks_are_told_row_by_row() -> None:
    marks = np.array([[False, True, False], [True, False, True]])
    rows, columns = true_at(marks)
    assert (rows.tolist(), columns.tolist()) == ([0, 1, 1], [1, 0, 2])
    assert [one.tolist() for one in true_at(np.zeros((0, 3), dtype=bool))] == [[], []]


# the search -----------------------------------------------------------------------------------


def test_the_search_finds_the_best_of_a_small_problem() -> None:
    """Two nodes of 4 and two jobs that are slow over both: one node for each."""
    found = search(problem(), np.random.default_rng(0), population=40, generations=60)
    assert sorted(found.best.tolist()) == [[0, 4], [4, 0]]
    assert found.fitness == pytest.approx(4.001) and found.before < 0.002


def test_jobs_of_which_one_scales_badly_get_unequal_shares() -> None:
    given = problem(nodes=1, gpus=8)
    flat = np.minimum(given.speedups, 1.0)
    speedups = np.stack([given.speedups[0], flat[1]])
    found = search(
        problem(nodes=1, gpus=8, speedups=speedups, outputs=speedups), np.random.default_rng(0)
    )
    assert found.best.sum(axis=1).tolist() == [7, 1]


def test_the_same_seed_finds_the_same_and_another_one_searches_elsewhere() -> None:
    given = problem(jobs=6, nodes=3)
    runs = [
        search(given, np.random.default_rng(seed), population=20, generations=3)
        for seed in (5, 5, 6)
    ]
    assert runs[0].best.tolist() == runs[1].best.tolist()
    assert (runs[0].population == runs[1].population).all()
    assert runs[0].population.tolist() != runs[2].population.tolist()


def test_what_is_as_good_as_anything_is_kept() -> None:
    given = problem(current=np.array([[0, 4], [4, 0]]), discounts=np.full(2, 0.99))
    found = search(given, np.random.default_rng(0))
    assert found.best.tolist() == [[0, 4], [4, 0]]
    assert found.fitness == found.before


def test_a_search_begins_where_the_last_one_ended() -> None:
    given = problem(jobs=8, nodes=4, power=1.0)
    first = search(given, np.random.default_rng(0), generations=30)
    blank = search(given, np.random.default_rng(1), generations=0)
    warm = search(given, np.random.default_rng(1), generations=0, start=first.population)
    assert blank.fitness < first.fitness
    assert warm.fitness == pytest.approx(first.fitness)


def test_a_search_without_luck_ends_early() -> None:
    given = problem(current=np.array([[0, 4], [4, 0]]), discounts=np.full(2, 0.99))
    assert search(given, np.random.default_rng(0), patience=7).generations == 7
    assert search(given, np.random.default_rng(0), generations=5).generations == 5


def test_a_population_is_handed_on_without_jobs_that_are_gone() -> None:
    past = Past(job_ids=(3, 5, 9), columns=("a", "b"), population=members([[1, 0], [2, 0], [3, 0]]))
    found = past.rows_of((9, 4, 3), ("a", "b"))
    assert found is not None
    assert found[:, :, 0].T.tolist() == [[3, 0], [0, 0], [1, 0]]
    assert past.rows_of((9, 4, 3), ("a", "c")) is None


def test_a_round_that_is_decided_twice_begins_where_it_did_the_first_time() -> None:
    one, two = (Past(job_ids=(1,), columns=("a",), population=members([[at]])) for at in range(2))
    memory = Memory()
    assert memory.before(1) is None
    memory.ended = one
    assert memory.before(1) is None
    assert memory.before(2) is one
    memory.ended = two
    assert memory.before(2) is one
    assert memory.before(3) is two
