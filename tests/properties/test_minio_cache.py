"""What the data cache promises for every order, size and budget."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slurm_synergy.jobside import minio_store
from slurm_synergy.jobside.minio_item import stride_of
from slurm_synergy.jobside.minio_store import MinioStore, Offer, Source


def _content(index: int, size: int) -> bytes:
    return (index.to_bytes(4, "little") * (size // 4 + 1))[:size]


def _epoch(
    stores: list[MinioStore], source: Source, sizes: list[int], order: list[int]
) -> list[int]:
    """Each item once, by the stores in turn; the items that hit. All content must be right."""
    hits = []
    for turn, index in enumerate(order):
        store, content = stores[turn % len(stores)], _content(index, sizes[index])
        view = store.get(source.key_of_index(index))
        if view is None:
            store.put(source.of_index(index), content)
        else:
            assert view == content
            hits.append(index)
    return sorted(hits)


def _in_batches(
    stores: list[MinioStore], source: Source, sizes: list[int], order: list[int], batch: int
) -> None:
    """A first epoch; each batch asks twice for its first item, as a sampler may."""
    for turn, first in enumerate(range(0, len(order), batch)):
        store, numbers = stores[turn % len(stores)], order[first : first + batch]
        numbers.append(numbers[0])
        assert store.get_all([source.key_of_index(number) for number in numbers]) == (
            [None] * len(numbers)
        )
        offers: list[Offer] = [
            (source.of_index(number), _content(number, sizes[number]), 0) for number in numbers
        ]
        store.put_all(offers)


@given(items=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1))
def test_places_are_a_permutation(items: int, seed: int) -> None:
    source = Source(0, seed, items, stride_of(items))
    places = [source.of_index(index).place for index in range(items)]
    assert sorted(places) == [(rank << 64) // items for rank in range(items)]


@settings(max_examples=40, deadline=None)
@given(
    items=st.integers(1, 80),
    size=st.integers(1, 300),
    budget=st.integers(0, 12_000),
    readers=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_every_epoch_hits_exactly_what_fits(
    items: int, size: int, budget: int, readers: int, seed: int
) -> None:
    shuffled = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        stores = [MinioStore(Path(folder) / "cache") for _ in range(readers)]
        stores[0].set_budget(budget)
        source = stores[0].enter(f"set {seed}", items)
        order, sizes = list(range(items)), [size] * items
        counted = []
        for _ in range(4):
            shuffled.shuffle(order)
            counted.append(_epoch(stores, source, sizes, order))
        prefix = sorted(order, key=lambda index: source.of_index(index).place)
        held = sorted(prefix[: budget // size])
        assert counted[0] == [] and counted[1:] == [held] * 3
        for store in stores:
            store.close()


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 7, 64, 64, 64, 64, 300]), min_size=1, max_size=90),
    budget=st.integers(0, 12_000),
    readers=st.integers(1, 2),
    second=st.booleans(),
    batch=st.integers(1, 20),
)
def test_items_that_are_taken_in_quickly_leave_what_the_long_way_leaves(
    sizes: list[int], budget: int, readers: int, second: bool, batch: int
) -> None:
    def filled(place: Path, together: int) -> tuple[object, ...]:
        stores = [MinioStore(place) for _ in range(readers)]
        stores[0].set_budget(budget)
        source = stores[0].enter("set", len(sizes))
        if second:
            stores[0].enter("other", 3)
        first = list(range(len(sizes)))
        if together:
            _in_batches(stores, source, sizes, first, together)
        else:
            _epoch(stores, source, sizes, first)
        found = stores[0].head, stores[0]._index.namespaces(), stores[0].keys()
        again = _epoch(stores, source, sizes, list(range(len(sizes))))
        for store in stores:
            store.close()
        return *found, again

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        by_both = filled(Path(folder) / "both", 0)
        assert filled(Path(folder) / "batches", batch) == by_both
        patch.setattr(minio_store, "insert_quickly", lambda *_: 0)
        assert filled(Path(folder) / "long", 0) == by_both


def test_the_usual_item_goes_the_quick_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MinioStore(tmp_path / "cache")
    store.set_budget(1 << 20)
    source = store.enter("set", 50)
    _epoch([store], source, [64] * 50, [7])
    monkeypatch.setattr(store._index, "acquire", lambda _patient: pytest.fail("the long way"))
    _epoch([store], source, [64] * 50, [number for number in range(50) if number != 7])
    assert store.head.items == 50 and store.head.used_bytes == 50 * 64


@settings(max_examples=30, deadline=None)
@example(sizes=[0, 0, 72, 0, 0, 238], budgets=[0, 0, 11999, 169], seed=0)
@given(
    sizes=st.lists(st.integers(0, 400), min_size=1, max_size=60),
    budgets=st.lists(st.integers(0, 12_000), min_size=2, max_size=5),
    seed=st.integers(0, 2**32),
)
def test_budgets_up_and_down_lose_nothing_but_the_end_of_the_prefix(
    sizes: list[int], budgets: list[int], seed: int
) -> None:
    shuffled = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        stores = [MinioStore(Path(folder) / "cache") for _ in range(2)]
        source = stores[0].enter("set", len(sizes))
        order = list(range(len(sizes)))
        held: set[bytes] = set()
        for budget in budgets:
            stores[0].set_budget(budget)
            kept = stores[1].keys()
            assert kept == _prefix(source, sizes, held, budget)
            shuffled.shuffle(order)
            hits = _epoch(stores, source, sizes, order)
            assert {source.key_of_index(index) for index in hits} == kept
            held = stores[0].keys()
            assert kept <= held and stores[1].head.used_bytes <= budget
            assert stores[1].head.used_bytes == sum(
                sizes[index] for index in order if source.key_of_index(index) in held
            )
        for store in stores:
            store.close()


def _prefix(source: Source, sizes: list[int], held: set[bytes], budget: int) -> set[bytes]:
    """What may stay of the items held: those that come first, as many as fit."""
    kept: set[bytes] = set()
    for index in sorted(range(len(sizes)), key=lambda index: source.of_index(index).place):
        key = source.key_of_index(index)
        if key not in held:
            continue
        budget -= sizes[index]
        if budget < 0:
            break
        kept.add(key)
    return kept
