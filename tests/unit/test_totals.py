"""What many placements take together, also where only a few differ from those before."""

from __future__ import annotations

from dataclasses import replace
from operator import is_

from builders import node, placement, res, snapshot
from hypothesis import given
from hypothesis import strategies as st

from slurm_synergy.core.sequences import alike, changes
from slurm_synergy.core.totals import Totals

SPOTS = [
    placement(number, **{f"n{number % 3}": res(1 + number % 2, number, 100 * number)})
    for number in range(8)
] + [placement(9, n0=res(2, 3, 50), n2=res(2, 4, 60))]


@given(asked=st.lists(st.lists(st.sampled_from(SPOTS)), max_size=6))
def test_sums_are_the_same_whatever_was_asked_before(asked: list) -> None:  # type: ignore[type-arg]
    totals = Totals.of_snapshot(snapshot([node()], []))
    for placements in asked:
        plain: dict[str, tuple[int, int, int]] = {}
        for one in placements:
            for name, share in one.shares:
                gpus, cpus, mem_mib = plain.get(name, (0, 0, 0))
                plain[name] = gpus + share.gpus, cpus + share.cpus, mem_mib + share.mem_mib
        found = totals.by_node(placements)
        assert {name: row for name, row in found.items() if any(row)} == plain


@given(asked=st.lists(st.lists(st.sampled_from(SPOTS)), max_size=6), before=st.booleans())
def test_a_turn_tells_what_is_not_as_it_was(asked: list, before: bool) -> None:  # type: ignore[type-arg]
    totals = Totals()
    if before:
        totals.by_node(SPOTS)
    last: set[int] = set(map(id, SPOTS)) if before else set()
    stamp = None
    for placements in asked:
        turn = totals.turn(placements)
        if len({one.job_id for one in placements}) < len(placements):
            assert turn is None
            last, stamp = set(), None
            continue
        assert turn is not None
        now = set(map(id, placements))
        since = turn.since(stamp)
        if since is not None:
            assert set(map(id, since[0])) == now - last
            assert set(map(id, since[1])) == last - now
        assert stamp is None or since is not None
        assert turn.since(turn.stamp) == ((), ())
        assert dict(turn.by_job) == {one.job_id: one for one in placements}
        assert totals.turn(tuple(placements)) is turn
        last, stamp = now, turn.stamp


_EACH_ONCE = st.lists(st.sampled_from(SPOTS), unique_by=id)


@given(before=_EACH_ONCE, now=_EACH_ONCE)
def test_changes_are_found_by_identity(before: list, now: list) -> None:  # type: ignore[type-arg]
    copies = [replace(one) for one in before[:2]]
    came, left = changes(before, now + copies)
    was, there = set(map(id, before)), set(map(id, now + copies))
    assert set(map(id, came)) == there - was
    assert set(map(id, left)) == was - there
    same = alike(before, now)
    assert all(map(is_, before[:same], now[:same]))
    assert same in (len(before), len(now)) or before[same] is not now[same]
