"""Which cores of a node belong to which job: properties over random jobs and histories."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_synergy.controller.binding import CoreBinding, CoreRequest, assign_cores
from slurm_synergy.errors import ModelError


@st.composite
def nodes(draw: st.DrawFn) -> tuple[int, int, list[CoreRequest], set[int]]:
    """(cores, sockets, requests, reserved): floors always fit, as proportional shares do."""
    sockets = draw(st.sampled_from([1, 2, 4]))
    gpus = draw(st.integers(1, 8))
    cores = sockets * draw(st.integers(max(1, gpus // sockets), 16))
    taken_gpus = draw(st.lists(st.integers(1, gpus), max_size=6))
    while sum(taken_gpus) > gpus:
        taken_gpus.pop()
    spare_gpus = gpus - sum(taken_gpus)
    reserved = draw(st.sets(st.integers(0, cores - 1), max_size=cores * spare_gpus // gpus))
    left = cores - len(reserved)
    requests = []
    for number, held_gpus in enumerate(taken_gpus):
        want = draw(st.integers(0, left))
        left -= want
        requests.append(
            CoreRequest(
                job_id=100 + number,
                cores=want,
                floor=cores * held_gpus // gpus,
                held=tuple(draw(st.sets(st.integers(0, cores - 1), max_size=8))),
                held_floor=tuple(draw(st.sets(st.integers(0, cores - 1), max_size=8))),
            )
        )
    return cores, sockets, draw(st.permutations(requests)), reserved


def solve(
    node: tuple[int, int, list[CoreRequest], set[int]], requests: list[CoreRequest] | None = None
) -> dict[int, CoreBinding]:
    cores, sockets, first, reserved = node
    return dict(
        assign_cores(
            node_cores=cores,
            sockets=sockets,
            requests=first if requests is None else requests,
            reserved=reserved,
        )
    )


def again(request: CoreRequest, bound: CoreBinding, cores: int | None = None) -> CoreRequest:
    return CoreRequest(
        job_id=request.job_id,
        cores=request.cores if cores is None else cores,
        floor=request.floor,
        held=bound.cores,
        held_floor=bound.floor,
    )


@settings(max_examples=150, deadline=None)
@given(nodes())
def test_everybody_gets_what_fits_and_nobody_shares(
    node: tuple[int, int, list[CoreRequest], set[int]],
) -> None:
    total, _, requests, reserved = node
    bound = solve(node)
    for request in requests:
        got = bound[request.job_id]
        assert len(got.cores) == request.cores
        assert len(got.floor) == request.floor
        own_first = min(request.cores, request.floor)
        assert len(set(got.cores) & set(got.floor)) >= own_first
    for part in ("cores", "floor"):
        used = [core for got in bound.values() for core in getattr(got, part)]
        assert len(used) == len(set(used))
        assert set(used) <= set(range(total)) - reserved


@settings(max_examples=100, deadline=None)
@given(nodes(), st.randoms(use_true_random=False))
def test_the_order_of_requests_does_not_matter_and_nothing_moves_without_cause(
    node: tuple[int, int, list[CoreRequest], set[int]], rng: object
) -> None:
    bound = solve(node)
    shuffled = list(node[2])
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert solve(node, shuffled) == bound
    assert solve(node, [again(r, bound[r.job_id]) for r in node[2]]) == bound


@settings(max_examples=100, deadline=None)
@given(nodes(), st.data())
def test_floors_stay_when_shares_change(
    node: tuple[int, int, list[CoreRequest], set[int]], data: st.DataObject
) -> None:
    total, _, requests, reserved = node
    bound = solve(node)
    left = total - len(reserved)
    changed = []
    for request in requests:
        want = data.draw(st.integers(0, left))
        left -= want
        changed.append(again(request, bound[request.job_id], want))
    after = solve(node, changed)
    for request in changed:
        assert after[request.job_id].floor == bound[request.job_id].floor
        assert len(after[request.job_id].cores) == request.cores


def test_floors_of_two_sockets_are_not_mixed_where_they_fit() -> None:
    requests = [CoreRequest(job_id=i, cores=12, floor=12) for i in (1, 2)]
    bound = assign_cores(node_cores=24, sockets=2, requests=requests)
    assert bound[1].floor == tuple(range(12))
    assert bound[2].floor == tuple(range(12, 24))


def test_a_floor_moves_only_when_its_cores_are_reserved() -> None:
    held = CoreRequest(job_id=1, cores=2, floor=2, held=(0, 1), held_floor=(0, 1))
    other = CoreRequest(job_id=2, cores=2, floor=2, held=(2, 3), held_floor=(2, 3))
    bound = assign_cores(node_cores=8, sockets=1, requests=[held, other], reserved={1})
    assert 1 not in bound[1].floor
    assert 1 not in bound[1].cores
    assert bound[2] == CoreBinding(cores=(2, 3), floor=(2, 3))


def test_too_few_cores_serve_floors_first() -> None:
    requests = [
        CoreRequest(job_id=1, cores=8, floor=2),
        CoreRequest(job_id=2, cores=4, floor=2),
    ]
    bound = assign_cores(node_cores=8, sockets=1, requests=requests)
    assert len(bound[1].cores) == 6
    assert bound[2].cores == bound[2].floor


def test_a_job_that_appears_twice_is_refused() -> None:
    twice = CoreRequest(job_id=1, cores=1, floor=1)
    with pytest.raises(ModelError, match="twice"):
        assign_cores(node_cores=4, sockets=1, requests=[twice, twice])


def bind(
    *requests: CoreRequest, cores: int = 16, sockets: int = 2, threads: int = 1
) -> dict[int, CoreBinding]:
    return dict(
        assign_cores(node_cores=cores, sockets=sockets, requests=requests, threads_per_core=threads)
    )


def test_floors_are_near_the_gpus_and_spill_where_there_is_no_room() -> None:
    far = CoreRequest(job_id=1, cores=4, floor=4, near=(1,))
    assert bind(far)[1].floor == (8, 9, 10, 11)
    wide = CoreRequest(job_id=2, cores=8, floor=8, near=(1,))
    both = bind(far, wide)
    assert both[1].floor == (8, 9, 10, 11)
    assert {12, 13, 14, 15} < set(both[2].floor)
    # Somebody who only borrows there gives way.
    borrower = CoreRequest(
        job_id=3, cores=12, floor=4, held=tuple(range(12)), held_floor=(0, 1, 2, 3)
    )
    found = bind(CoreRequest(job_id=4, cores=4, floor=4, near=(0,)), borrower)
    assert found[3].floor == (0, 1, 2, 3)
    assert found[4].floor == (4, 5, 6, 7)
    assert set(found[3].cores).isdisjoint(found[4].cores)


@settings(max_examples=60)
@given(node=nodes(), threads=st.sampled_from([2, 4]))
def test_all_threads_of_a_core_are_one_jobs(
    node: tuple[int, int, list[CoreRequest], set[int]], threads: int
) -> None:
    cores, sockets, requests, reserved = node
    bound = assign_cores(
        node_cores=cores * threads,
        sockets=sockets,
        requests=requests,
        reserved=reserved,
        threads_per_core=threads,
    )
    owners: dict[int, int] = {}
    for job_id, one in bound.items():
        for ids in (one.cores, one.floor):
            assert {core // threads * threads + t for core in ids for t in range(threads)} == set(
                ids
            )
        for core in one.cores:
            assert owners.setdefault(core // threads, job_id) == job_id
            assert core // threads not in {taken // threads for taken in reserved}


def test_numbers_of_threads_are_rounded_down_to_whole_cores_but_not_to_none() -> None:
    odd, one = CoreRequest(job_id=1, cores=5, floor=5), CoreRequest(job_id=2, cores=1, floor=1)
    found = bind(odd, one, threads=2)
    assert [len(found[1].cores), len(found[1].floor)] == [4, 4]
    assert [len(found[2].cores), len(found[2].floor)] == [2, 0]
