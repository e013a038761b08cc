"""The order of samples and each rank's share of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_synergy.errors import ModelError
from slurm_synergy.jobside.sampler import EpochSampler, derive_seed, epoch_order, steps_left

_MASK = (1 << 64) - 1


def _order_by_definition(samples: int, seed: int, epoch: int) -> list[int]:
    """SplitMix64 in plain integers: what the tensor version must agree with."""

    def mix(value: int) -> int:
        value &= _MASK
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
        value ^= value >> 31
        return value - (1 << 64) if value >> 63 else value

    base = derive_seed(seed, epoch)
    keys = [mix(base + index * 0x9E3779B97F4A7C15) for index in range(samples)]
    return sorted(range(samples), key=keys.__getitem__)


@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 1000), samples=st.integers(0, 300))
@settings(max_examples=50, deadline=None)
def test_the_order_is_the_documented_permutation(seed: int, epoch: int, samples: int) -> None:
    order = epoch_order(samples, seed=seed, epoch=epoch).tolist()
    assert order == _order_by_definition(samples, seed, epoch)


def test_the_order_of_a_seed_never_changes() -> None:
    # A job may continue an epoch under another release of PyTorch or of this package.
    assert epoch_order(10, seed=1, epoch=0).tolist() == [3, 4, 8, 0, 5, 2, 7, 9, 6, 1]


def test_epochs_and_seeds_differ_and_no_place_is_preferred() -> None:
    orders = {tuple(epoch_order(50, seed=s, epoch=e).tolist()) for s in range(4) for e in range(4)}
    assert len(orders) == 16
    places = [epoch_order(10, seed=s, epoch=0).tolist().index(0) for s in range(4000)]
    counts = [places.count(place) for place in range(10)]
    assert min(counts) > 300 and max(counts) < 500  # 400 expected, 5 standard deviations


def test_without_shuffling_the_order_is_the_data_sets() -> None:
    assert epoch_order(5, seed=9, epoch=3, shuffle=False).tolist() == [0, 1, 2, 3, 4]


incarnations = st.lists(
    st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(0, 12)), min_size=3, max_size=3
)


@given(
    samples=st.integers(0, 200),
    interrupted=incarnations,
    last=st.tuples(st.integers(1, 6), st.integers(1, 9)),
    drop_last=st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_each_sample_once_over_three_interruptions_with_other_rank_counts(
    samples: int,
    interrupted: list[tuple[int, int, int]],
    last: tuple[int, int],
    drop_last: bool,
) -> None:
    seen: list[int] = []
    consumed = 0
    for ranks, batch_size, steps in [*interrupted, (*last, 10**6)]:
        team = [
            EpochSampler(
                samples,
                batch_size=batch_size,
                seed=5,
                epoch=2,
                consumed=consumed,
                rank=rank,
                ranks=ranks,
                drop_last=drop_last,
            )
            for rank in range(ranks)
        ]
        assert len({len(sampler) for sampler in team}) == 1
        iterators = [iter(sampler) for sampler in team]
        for _ in range(min(steps, len(team[0]))):
            shares = [next(iterator) for iterator in iterators]
            taken = min(ranks * batch_size, samples - consumed)
            handed_out = [index for indices in shares for index in indices]
            distinct = set(handed_out)
            assert len(distinct) == taken
            if taken >= ranks:
                assert len(handed_out) == len(distinct)  # nothing is repeated
            sizes = [len(indices) for indices in shares]
            assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
            seen.extend(sorted(distinct))
            consumed += taken
    assert len(seen) == len(set(seen))
    left = samples - consumed
    assert left == 0 or (drop_last and left < last[0] * last[1])


def test_ranks_without_a_sample_of_the_tail_repeat_one() -> None:
    last = [list(EpochSampler(7, batch_size=2, seed=1, rank=r, ranks=3))[-1] for r in range(3)]
    assert last[0] == last[1] == last[2]
    assert len(last[0]) == 1


def test_all_ranks_raise_stop_at_the_same_step() -> None:
    team = [EpochSampler(10, batch_size=2, seed=1, rank=rank, ranks=2) for rank in range(2)]
    assert [len(list(sampler)) for sampler in team] == [3, 3]


def test_steps_left_counts_the_tail_unless_it_is_dropped() -> None:
    assert steps_left(10, 4, per_step=4, drop_last=False) == 2
    assert steps_left(10, 4, per_step=4, drop_last=True) == 1
    assert steps_left(10, 12, per_step=4, drop_last=False) == 0


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"batch_size": 0}, "batch size 0"),
        ({"rank": 2, "ranks": 2}, "rank 2 of 2"),
        ({"consumed": 11}, "did the data set change"),
    ],
)
def test_impossible_shares_are_refused(changes: dict[str, int], what: str) -> None:
    with pytest.raises(ModelError, match=what):
        EpochSampler(10, **{"batch_size": 2, "seed": 1, **changes})
