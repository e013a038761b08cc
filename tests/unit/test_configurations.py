"""The configurations of a pool, and that the rows of usage decide whether a choice fits."""

from itertools import combinations_with_replacement

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slurm_synergy.core.configurations import (
    Capacities,
    configuration_set,
    is_whole,
    pieces,
    tally,
    usage,
)
from slurm_synergy.core.model import Configuration, Node
from slurm_synergy.core.resources import Resources


def _node(name: str, gpus: int, kind: str = "a", *, up: bool = True) -> Node:
    total = Resources(gpus=gpus, cpus=4 * gpus, mem_mib=1000 * gpus)
    return Node(name=name, gpu_type=kind, total=total, capacity=total if up else Resources())


def _shapes(configurations: tuple[Configuration, ...]) -> list[tuple[int | None, int]]:
    return [(one.nodes, one.gpus) for one in configurations]


def test_three_nodes_of_eight_offer_powers_of_two_and_whole_nodes() -> None:
    found = configuration_set(tally([_node(f"n{at}", 8) for at in range(3)]))
    assert _shapes(found) == [(1, 1), (1, 2), (1, 4), (1, 8), (2, 16), (3, 24)]


def test_a_node_of_twelve_counts_as_eight_and_four() -> None:
    assert pieces(12) == (8, 4)
    found = configuration_set(tally([_node("n0", 12), _node("n1", 12)]))
    assert _shapes(found) == [(1, 1), (1, 2), (1, 4), (1, 8), (1, 12), (2, 24)]


def test_a_node_that_is_down_offers_nothing() -> None:
    assert configuration_set(tally([_node("n0", 4, up=False)])) == ()


def test_a_node_in_use_offers_its_free_gpus_but_not_itself() -> None:
    capacities = tally([_node("n0", 8), _node("n1", 8)], {"n0": 3})
    assert capacities.whole == {("a", 8): 1}
    assert capacities.parts == {("a", 4): 1, ("a", 1): 1}
    assert (2, 16) not in _shapes(configuration_set(capacities))


def test_types_are_kept_apart() -> None:
    pool = [_node("n0", 4, "v100"), _node("n1", 8, "a100")]
    found = usage(tally(pool), configuration_set(tally(pool)))
    assert found.gpu_types == ("a100", "v100")
    assert found.limits.tolist() == [8, 4]


def _packs(sizes: list[int], chosen: list[Configuration]) -> bool:
    """Whether the requests can be placed: whole nodes first, then by trying every way."""
    free = sorted(sizes)
    for one in chosen:
        if is_whole(one):
            nodes = one.nodes or 1
            size = one.gpus // nodes
            if free.count(size) < nodes:
                return False
            for _ in range(nodes):
                free.remove(size)
    singles = sorted((one.gpus for one in chosen if not is_whole(one)), reverse=True)

    def fill(at: int, left: tuple[int, ...]) -> bool:
        if at == len(singles):
            return True
        for index in range(len(left)):
            if left[index] >= singles[at] and left[index] not in left[:index]:
                rest = (*left[:index], left[index] - singles[at], *left[index + 1 :])
                if fill(at + 1, rest):
                    return True
        return False

    return fill(0, tuple(free))


@given(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=3))
def test_a_choice_fits_exactly_when_no_row_is_overfull(sizes: list[int]) -> None:
    capacities = tally([_node(f"n{at}", gpus) for at, gpus in enumerate(sizes)])
    offered = configuration_set(capacities)
    found = usage(capacities, offered)
    for count in (1, 2, 3):
        for columns in combinations_with_replacement(range(len(offered)), count):
            fits = bool((found.takes[:, list(columns)].sum(axis=1) <= found.limits).all())
            assert fits == _packs(sizes, [offered[column] for column in columns])


def test_an_empty_pool_has_no_rows() -> None:
    found = usage(Capacities(), ())
    assert found.takes.shape == (0, 0)
    assert np.array_equal(found.limits, [])
