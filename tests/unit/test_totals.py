"""What many placements take together, also where only a few differ from those before."""

from __future__ import annotations

from builders import node, placement, res, snapshot
from hypothesis import given
from hypothesis import strategies as st

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
