"""Placing configurations: who stays, who is put elsewhere, and that nothing is left out."""

from __future__ import annotations

from builders import elastic, job, node, pending, placement, res, running, snapshot
from hypothesis import given
from hypothesis import strategies as st

from slurm_synergy.core.configurations import configuration_set, tally, usage
from slurm_synergy.core.elastic import as_granted
from slurm_synergy.core.model import Configuration, JobStatus, Node, Snapshot
from slurm_synergy.core.packing import Requests
from slurm_synergy.core.placer import Placed, place_configurations


def place(shot: Snapshot, wanted: dict[int, tuple[int, int]]) -> Placed:
    """Place jobs on ``wanted`` (GPUs, nodes) of V100."""
    requests = Requests.of_snapshot(shot)
    asked = []
    for status in shot.jobs:
        gpus, nodes = wanted[status.job.job_id]
        one = Configuration(gpus=gpus, nodes=nodes, gpu_type="v100")
        asked.append(requests.of(as_granted(shot, status, one), one))
    return place_configurations(requests.pool, asked)


def pool(count: int, gpus: int = 4) -> list[Node]:
    return [node(f"v100-{at}", "v100", gpus, 4 * gpus, 1000 * gpus) for at in range(count)]


def holds(job_id: int, name: str, gpus: int, **more: bool) -> JobStatus:
    where = placement(job_id, "v100", **{name: res(gpus, 4 * gpus, 1000 * gpus)})
    return running(elastic(job_id, gpus, **more), where)


def nodes_of(found: Placed) -> dict[int, list[str]]:
    return {job_id: [name for name, _ in parts] for job_id, (_, parts) in found.layouts.items()}


def test_who_keeps_a_configuration_keeps_its_gpus() -> None:
    shot = snapshot(pool(3), [holds(1, "v100_2", 2), pending(elastic(2)), pending(elastic(3))])
    found = place(shot, {1: (2, 1), 2: (2, 1), 3: (4, 1)})
    assert nodes_of(found) == {1: ["v100-2"], 2: ["v100-2"], 3: ["v100-0"]}
    assert not found.unplaced


def test_a_part_of_a_node_goes_to_the_fullest_one_that_has_it() -> None:
    shot = snapshot(pool(3), [holds(1, "v100_1", 3), holds(2, "v100_2", 2), pending(elastic(3))])
    assert nodes_of(place(shot, {1: (3, 1), 2: (2, 1), 3: (1, 1)}))[3] == ["v100-1"]


def test_the_smallest_job_in_the_way_is_put_elsewhere() -> None:
    """Three nodes with 1, 1 and 2 GPUs free: a job of four goes where one small job has to move."""
    shot = snapshot(
        pool(3),
        [
            *(holds(1, "v100_0", 1), holds(2, "v100_0", 1)),
            *(holds(3, "v100_1", 2), holds(4, "v100_1", 1)),
            *(holds(5, "v100_2", 1), pending(elastic(6))),
        ],
    )
    found = place(shot, {1: (1, 1), 2: (1, 1), 3: (2, 1), 4: (1, 1), 5: (1, 1), 6: (4, 1)})
    assert not found.unplaced
    placed = nodes_of(found)
    assert placed[6] == ["v100-2"]
    assert placed[5] != ["v100-2"]
    assert {at: placed[at] for at in (1, 2, 3, 4)} == {
        1: ["v100-0"],
        2: ["v100-0"],
        3: ["v100-1"],
        4: ["v100-1"],
    }


def test_whole_nodes_are_cleared_for_a_job_that_takes_whole_nodes() -> None:
    jobs = [holds(1, "v100_0", 1), holds(2, "v100_1", 1), holds(3, "v100_2", 1)]
    shot = snapshot(pool(4), [*jobs, pending(elastic(4))])
    found = place(shot, {1: (1, 1), 2: (1, 1), 3: (1, 1), 4: (12, 3)})
    assert not found.unplaced
    placed = nodes_of(found)
    assert len(set(placed[4])) == 3
    assert placed[1] == placed[2] == placed[3]


def test_nobody_makes_room_for_a_smaller_job_or_when_it_cannot_be_stopped() -> None:
    jobs = [holds(1, "v100_0", 3), holds(2, "v100_1", 3, preemptible=False)]
    shot = snapshot(pool(2), [*jobs, pending(elastic(3))])
    found = place(shot, {1: (3, 1), 2: (3, 1), 3: (2, 1)})
    assert found.unplaced == (3,)
    assert nodes_of(found) == {1: ["v100-0"], 2: ["v100-1"]}


def test_as_a_last_resort_all_are_packed_anew() -> None:
    """Two jobs of three GPUs, which is no power of two, and jobs of two around them."""
    nodes = pool(2, 8)
    jobs = [holds(1, "v100_0", 3), holds(2, "v100_1", 3), holds(3, "v100_0", 2)]
    shot = snapshot(nodes, [*jobs, holds(4, "v100_1", 2), pending(elastic(5))])
    found = place(shot, {1: (3, 1), 2: (3, 1), 3: (2, 1), 4: (2, 1), 5: (6, 1)})
    assert not found.unplaced


@st.composite
def feasible(draw: st.DrawFn) -> tuple[Snapshot, dict[int, tuple[int, int]]]:
    """Nodes with jobs, and new configurations for all of them that fit by the rows of usage."""
    size, count = draw(st.sampled_from([4, 8])), draw(st.integers(1, 4))
    nodes = pool(count, size)
    capacities = tally(nodes)
    offered = configuration_set(capacities)
    made = usage(capacities, offered)
    free = {one.name: size for one in nodes}
    left = made.limits.copy()
    statuses: list[JobStatus] = []
    wanted = {}
    for job_id in range(1, draw(st.integers(1, 12)) + 1):
        column = draw(st.integers(0, len(offered) - 1))
        if (made.takes[:, column] > left).any():
            continue
        left -= made.takes[:, column]
        wanted[job_id] = (offered[column].gpus, offered[column].nodes or 1)
        where = draw(st.sampled_from(sorted(free)))
        gpus = draw(st.sampled_from([0, 1, 2, 4]))
        if 0 < gpus <= free[where]:
            free[where] -= gpus
            statuses.append(holds(job_id, where.replace("-", "_"), gpus))
        else:
            statuses.append(pending(job(job_id, 1, elasticity=elastic().elasticity)))
    return snapshot(nodes, statuses), wanted


@given(feasible())
def test_what_fits_by_its_gpus_is_placed_whatever_was_there(
    given_: tuple[Snapshot, dict[int, tuple[int, int]]],
) -> None:
    shot, wanted = given_
    found = place(shot, wanted)
    assert not found.unplaced
    used = {one.name: 0 for one in shot.nodes}
    for job_id, (_, parts) in found.layouts.items():
        gpus, nodes = wanted[job_id]
        assert [each for _, each in parts] == [gpus // nodes] * nodes
        for name, each in parts:
            used[name] += each
    assert all(used[one.name] <= one.total.gpus for one in shot.nodes)


def test_nobody_is_stopped_for_a_job_that_would_not_be_placed_once_that_one_has_stopped() -> None:
    """One holds the small node; another, on three GPUs of each node, fits only beside the former
    on the large one. With nothing held the small node is the tightest for the first, so it would be
    started there again, and stopped again."""
    nodes = [node("v100-0", gpus=8), node("v100-1", gpus=4)]
    small, wide = elastic(1, 4), job(2, 6, nodes=2)
    where = placement(1, "v100", v100_1=res(4, 4, 1000))
    asked = {1: (4, 1), 2: (6, 2)}
    free = place(snapshot(nodes, [pending(small), pending(wide)]), asked)
    assert nodes_of(free) == {1: ["v100-1"]} and free.unplaced == (2,)
    found = place(snapshot(nodes, [running(small, where), pending(wide)]), asked)
    assert nodes_of(found) == {1: ["v100-1"]} and found.unplaced == (2,)
