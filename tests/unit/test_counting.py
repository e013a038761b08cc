"""Counting GPUs tells whether jobs can be packed, wherever it tells anything."""

from __future__ import annotations

import random

from builders import job, node, pending, placement, profile, res, running, snapshot

from slurm_synergy.core.counting import staying_if_all_fit
from slurm_synergy.core.model import JobStatus, Node
from slurm_synergy.core.packing import Requests, pack_gpus

FRUGAL = profile(per_core=4000, gpu_rate=1000)


def counted(nodes: list[Node], *jobs: JobStatus) -> frozenset[int] | None:
    desk = Requests(snapshot(nodes, jobs))
    return staying_if_all_fit(desk.pool, [desk.of(status) for status in jobs])


def pool(count: int) -> list[Node]:
    return [node(f"v100-{number}") for number in range(1, count + 1)]


def test_what_counting_tells_is_what_packing_finds() -> None:
    told = {True: 0, False: 0}
    for seed in range(300):
        order = random.Random(seed)
        nodes = pool(order.randint(1, 5))
        sizes = order.choice([(1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 3, 6), (2, 3)])
        held = []
        for number in range(1, order.randint(1, len(nodes)) + 1):
            gpus = order.choice((1, 2, 4))
            there = placement(number, **{f"v100_{number}": res(gpus, 3 * gpus, 62_500 * gpus)})
            held.append(running(job(number, gpus), there, order.choice((None, FRUGAL))))
        new = [
            pending(
                job(
                    100 + number,
                    gpus=order.choice(sizes),
                    nodes=None if order.random() < 0.95 else 1,
                    min_mem_mib_per_node=order.choice((0, 0, 0, 0, 90_000)),
                ),
                order.choice((None, FRUGAL)),
            )
            for number in range(order.randint(len(held), 8 * len(nodes)))
        ]
        jobs = [*new, *held]
        order.shuffle(jobs)
        desk = Requests(snapshot(nodes, jobs))
        asked = [desk.of(status) for status in jobs]
        staying = staying_if_all_fit(desk.pool, asked)
        told[staying is not None] += 1
        if staying is not None:
            packed = pack_gpus(desk.pool, asked)
            assert None not in packed.values()
            stays = {one.job_id for one in asked if one.held == packed[one.job_id]}
            assert staying == stays == {one.job.job_id for one in held}
    assert min(told.values()) > 30


def test_gpus_that_are_free_in_pieces_are_not_counted_for_a_larger_job() -> None:
    held = [
        running(job(n, gpus=2), placement(n, **{f"v100_{n}": res(2, 6, 125_000)})) for n in (1, 2)
    ]
    fours = [pending(job(n, gpus=4)) for n in (3, 4)]
    assert counted(pool(2), *held, *fours) == frozenset({1, 2})
    assert counted(pool(2), *held, *fours, pending(job(5, gpus=4))) is None


def test_it_does_not_tell_where_memory_or_unlike_nodes_decide() -> None:
    greedy = [pending(job(n, min_mem_mib_per_node=300_000)) for n in (1, 2)]
    assert counted(pool(1), *greedy) is None
    assert counted([*pool(1), node("a100-1", "a100")], pending(job(1))) is None
    assert counted(pool(2), pending(job(1, gpus=4, nodes=2))) is None
    assert counted(pool(2), pending(job(1, gpus=3)), pending(job(2, gpus=2))) is None
    assert counted(pool(2), pending(job(1, gpus=4)), pending(job(2, gpus=2))) == frozenset()
