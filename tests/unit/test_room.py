"""The indexed search for GPUs gives what a plain look at every node gives."""

from __future__ import annotations

from builders import job, node, pending, res
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_synergy.core.model import Node
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.room import GpuLayout, Need, Needs, Parts, Pool, Room, Shape, parts_of


def need_of(cpus: int, mem_mib: int) -> Need:
    return Need(lambda _kind, gpus: (gpus, cpus * gpus, mem_mib * gpus))


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    found: list[Node] = []
    for index in range(draw(st.integers(1, 6))):
        gpu_type = draw(st.sampled_from(["v100", "a100"]))
        gpus = draw(st.sampled_from([2, 4, 5]))
        found.append(node(f"n{index}", gpu_type, gpus, 3 * gpus, 10 * gpus))
    return Pool(found)


shapes = st.builds(
    lambda each, nodes, types: (each * (nodes or 1), nodes, types),
    st.integers(1, 6),
    st.sampled_from([1, 2, 3, None]),
    st.sampled_from([(), ("v100",), ("a100", "v100")]),
)
needs = st.builds(need_of, st.integers(0, 5), st.integers(0, 15))


def plainly(pool: Pool, room: Room, shape: Shape, need: Need) -> GpuLayout | None:
    """Jobs on whole shapes: the tightest nodes of one type, looked at one by one."""
    gpus, nodes, types = shape
    assert nodes is not None
    each = gpus // nodes
    best = None
    for gpu_type, _ in pool.types:
        if types and gpu_type not in types:
            continue
        fitting = [
            number
            for number, one in enumerate(pool.nodes)
            if one.gpu_type == gpu_type
            and room.fits([(number, need.at(pool.kind_of[number], each))])
        ]
        if len(fitting) >= nodes:
            chosen = sorted(fitting, key=lambda number: (room.free(number), number))[:nodes]
            score = (sorted(room.free(number) for number in chosen), gpu_type)
            parts = tuple((pool.nodes[number].name, each) for number in sorted(chosen))
            if best is None or score < best[0]:
                best = (score, (gpu_type, parts))
    return best[1] if best else None


@settings(max_examples=150)
@given(pool=pools(), asked=st.lists(st.tuples(shapes, needs, st.booleans()), max_size=12))
def test_find_agrees_with_a_plain_search_while_jobs_come_and_go(
    pool: Pool, asked: list[tuple[Shape, Need, bool]]
) -> None:
    room = Room(pool)
    taken = []
    for shape, need, leaves in asked:
        found = room.find(shape, need)
        if shape[1] is not None:
            assert found == plainly(pool, room, shape, need)
        if found is not None:
            assert sum(gpus for _, gpus in found[1]) == shape[0]
            parts = [
                (pool.number[name], need.at(pool.kind_of[pool.number[name]], gpus))
                for name, gpus in found[1]
            ]
            assert room.fits(parts)
            room.take(parts)
            taken.append(parts)
        if leaves and taken:
            room.give(taken.pop(0))
        free = [room.free(number)[0] for number in range(len(pool.nodes))]
        by_type = {one.gpu_type: 0 for one in pool.nodes}
        for one, gpus in zip(pool.nodes, free, strict=True):
            by_type[one.gpu_type] += max(gpus, 0)
        assert room.free_gpus() == max(by_type.values())


@settings(max_examples=100)
@given(
    pool=pools(),
    asked=st.lists(st.tuples(shapes, needs, st.integers(1, 6), st.booleans()), max_size=6),
)
def test_jobs_that_are_alike_are_booked_where_one_after_the_other_would_go(
    pool: Pool, asked: list[tuple[Shape, Need, int, bool]]
) -> None:
    """``book_all`` is as many ``book``, and that is ``find`` and ``take``."""
    at_once, singly, plain = Room(pool), Room(pool), Room(pool)
    for shape, need, count, leaves in asked:
        booked = at_once.book_all(shape, need, count)
        for number in range(count):
            found = plain.find(shape, need)
            put = singly.book(shape, need)
            if found is None:
                assert put is None
                assert len(booked) == number
                break
            parts = parts_of(pool, found, need)
            assert put == booked[number] == (found, parts)
            plain.take(parts)
        for number in range(len(pool.nodes)):
            assert at_once.free(number) == singly.free(number) == plain.free(number)
        if leaves and booked:
            for room in (at_once, singly, plain):
                room.give(booked[0][1])
    assert at_once.free_gpus() == singly.free_gpus() == plain.free_gpus()


def test_a_job_free_to_split_fills_the_emptiest_nodes_and_then_the_tightest() -> None:
    pool = Pool([node(f"n{n}", gpus=n, cpus=3 * n, mem_mib=10) for n in (2, 3, 4, 5)])
    found = Room(pool).find((8, None, ()), need_of(1, 0))
    assert found == ("v100", (("n3", 3), ("n5", 5)))
    assert Room(pool).find((15, None, ()), need_of(1, 0)) is None


def test_what_was_not_found_is_found_once_it_is_given_back() -> None:
    pool = Pool([node(gpus=2, cpus=6, mem_mib=10)])
    room, need = Room(pool), need_of(3, 0)
    room.take([(0, (1, 3, 0))])
    assert room.find((2, 1, ()), need) is None
    room.give([(0, (1, 3, 0))])
    assert room.find((2, 1, ()), need) == ("v100", (("v100-1", 2),))


def test_the_first_node_by_name_is_not_the_tightest() -> None:
    pool = Pool([node("n1", gpus=8), node("n2", gpus=2)])
    assert Room(pool).first((), need_of(1, 0), 2) == ("v100", (("n1", 2),))
    assert Room(pool).first(("a100",), need_of(1, 0), 2) is None


def test_jobs_that_a_rule_treats_alike_share_their_need() -> None:
    def rule(status: object, one: Node, gpus: int) -> Resources:
        return res(gpus, gpus, 7)

    shared = Needs(Pool([node()]), rule)
    first, second = pending(job(1)), pending(job(2, 4))
    other = pending(job(3, min_mem_mib_per_node=5))
    assert shared.of(first) is shared.of(second)
    assert shared.of(first) is not shared.of(other)
    assert shared.own(first) is not shared.own(first)
    assert shared.of(first).at(0, 4) == (4, 4, 7)


@settings(max_examples=80)
@given(
    pool=pools(),
    asked=st.lists(st.tuples(shapes, needs, st.integers(0, 2), st.booleans()), max_size=14),
)
def test_a_room_finds_what_one_without_a_past_finds(
    pool: Pool, asked: list[tuple[Shape, Need, int, bool]]
) -> None:
    """However many nodes were changed since the last search, and however often each."""
    room = Room(pool)
    taken: list[Parts] = []
    for shape, need, change, looks in asked:
        number = shape[0] % len(pool.nodes)
        parts = [(number, need.at(pool.kind_of[number], shape[0]))]
        fits = room.fits(parts)
        if change == 0 and taken:
            room.give(taken.pop(0))
        elif change == 1:  # what stays in any case, whether it is free or not
            room.take(parts)
            taken.append(parts)
        elif change == 2:
            before = room.free(number)
            assert room.take_if_free(parts) == fits
            after = tuple(a - b for a, b in zip(before, parts[0][1], strict=True))
            assert room.free(number) == (after if fits else before)
            taken += [parts] if fits else []
        if looks:
            assert room.find(shape, need) == room.copy().find(shape, need)
            assert room.free_gpus() == room.copy().free_gpus()
