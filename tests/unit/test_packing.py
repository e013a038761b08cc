from __future__ import annotations

import random

from builders import job, node, pending, placement, res, running, snapshot

from slurm_synergy.core.model import JobStatus, Node
from slurm_synergy.core.packing import Packer, Request, Requests, pack_gpus


def pack(nodes: list[Node], *jobs: JobStatus) -> dict[int, object]:
    """Packs in the given order; the result without GPU types."""
    shot = snapshot(nodes, jobs)
    desk = Requests(shot)
    packed = pack_gpus(desk.pool, [desk.of(status) for status in jobs])
    return {job_id: layout[1] if layout else None for job_id, layout in packed.items()}


def pool(*gpus: int, gpu_type: str = "v100") -> list[Node]:
    return [
        node(f"{gpu_type}-{index}", gpu_type, count, 3 * count, 64_000 * count)
        for index, count in enumerate(gpus, start=1)
    ]


def test_a_job_goes_to_the_tightest_node() -> None:
    assert pack(pool(8, 2, 4), pending(job(gpus=2)))[1] == (("v100-2", 2),)


def test_three_jobs_of_four_gpus_do_not_fit_on_two_nodes_of_six() -> None:
    found = pack(pool(6, 6), *[pending(job(n, gpus=4)) for n in (1, 2, 3)])
    assert found[1] and found[2] and found[3] is None


def test_large_jobs_find_room_that_a_walk_in_order_would_break_up() -> None:
    # In order, 4+4 on different nodes would be tight; largest first finds 6 beside 2.
    found = pack(
        pool(8, 4), pending(job(1, gpus=2)), pending(job(2, gpus=2)), pending(job(3, gpus=8))
    )
    assert found[3] == (("v100-1", 8),)
    assert found[1] == found[2] == (("v100-2", 2),)


def test_an_exact_node_count_takes_equal_gpus_on_that_many_nodes() -> None:
    found = pack(pool(8, 8, 8), pending(job(gpus=6, nodes=2)))
    assert found[1] == (("v100-1", 3), ("v100-2", 3))


def test_a_job_free_to_split_stays_on_one_node_if_it_can() -> None:
    assert pack(pool(4, 8), pending(job(gpus=6, nodes=None)))[1] == (("v100-2", 6),)


def test_a_job_free_to_split_takes_the_fewest_nodes() -> None:
    found = pack(pool(2, 3, 4, 5), pending(job(gpus=8, nodes=None)))
    assert found[1] == (("v100-2", 3), ("v100-4", 5))


def test_one_job_never_mixes_gpu_types() -> None:
    mixed = pool(4) + pool(4, gpu_type="a100")
    assert pack(mixed, pending(job(gpus=8, nodes=None)))[1] is None
    assert pack(mixed, pending(job(gpus=8, nodes=2)))[1] is None


def test_only_allowed_types_are_used() -> None:
    mixed = pool(8) + pool(2, gpu_type="a100")
    assert pack(mixed, pending(job(gpus=1, gpu_types=("v100",))))[1] == (("v100-1", 1),)
    assert pack(mixed, pending(job(gpus=1)))[1] == (("a100-1", 1),)


def test_nothing_is_put_on_an_unusable_node() -> None:
    assert pack([node(usable=False)], pending(job()))[1] is None


def test_running_jobs_stay_where_they_are() -> None:
    one = running(job(1, gpus=2), placement(1, v100_2=res(2, 6, 128_000)))
    found = pack(pool(8, 8), one, pending(job(2, gpus=8)))
    assert found == {1: (("v100-2", 2),), 2: (("v100-1", 8),)}


def test_a_running_job_moves_for_one_of_higher_priority() -> None:
    low = running(job(2, gpus=2), placement(2, v100_1=res(2, 6, 128_000)))
    found = pack(pool(8, 2), pending(job(1, gpus=8)), low)
    assert found == {1: (("v100-1", 8),), 2: (("v100-2", 2),)}


def test_as_few_running_jobs_move_as_the_packing_needs() -> None:
    # In the order of priority, job 3 would take GPUs beside job 5 and push it off its node.
    jobs = [
        pending(job(1, gpus=2)),
        pending(job(2, gpus=2)),
        pending(job(3, gpus=3)),
        running(job(4, gpus=4), placement(4, v100_1=res(4, 12, 256_000))),
        running(job(5, gpus=5), placement(5, v100_2=res(5, 15, 320_000))),
    ]
    found = pack(pool(8, 8), *jobs)
    assert found[4] == (("v100-1", 4),) and found[5] == (("v100-2", 5),)
    assert found[3] == (("v100-2", 3),)


def test_jobs_that_cannot_be_stopped_never_move() -> None:
    fixed = running(job(2, gpus=2, preemptible=False), placement(2, v100_1=res(2, 6, 128_000)))
    found = pack(pool(8, 2), fixed, pending(job(1, gpus=8)))
    assert found == {2: (("v100-1", 2),), 1: None}


def test_minimum_memory_counts() -> None:
    hungry = [pending(job(n, gpus=1, min_mem_mib_per_node=300_000)) for n in (1, 2)]
    found = pack([node()], *hungry)
    assert found[1] and found[2] is None


def test_cores_count_where_there_are_fewer_than_gpus() -> None:
    found = pack([node(gpus=4, cpus=2)], *[pending(job(n)) for n in (1, 2, 3)])
    assert found[1] and found[2] and found[3] is None


def test_a_refused_job_changes_nothing_for_the_next() -> None:
    shot = snapshot(pool(4), [pending(job(1, gpus=3)), pending(job(2, gpus=2))])
    desk = Requests(shot)
    first, second = (desk.of(status) for status in shot.jobs)
    packer = Packer(desk.pool, [first, second])
    assert packer.add(first) and not packer.add(second)
    assert packer.free_gpus(()) == 1


def walked(order: random.Random) -> tuple[Requests, list[Request]]:
    """New and running jobs on a few nodes, as a policy might walk them."""
    nodes = pool(*(order.choice((4, 8)) for _ in range(order.randint(1, 5))))
    free = [one.total.gpus for one in nodes]
    jobs = [pending(job(100 + at, order.choice((1, 1, 2, 4, 8)))) for at in range(6)]
    for number in range(1, order.randint(2, 12)):
        gpus, at = order.choice((1, 1, 2, 4)), order.randrange(len(nodes))
        if gpus <= free[at]:
            free[at] -= gpus
            there = placement(number, **{nodes[at].name.replace("-", "_"): res(gpus, gpus)})
            jobs.append(running(job(number, gpus, preemptible=order.random() < 0.9), there))
    order.shuffle(jobs)
    desk = Requests(snapshot(nodes, jobs))
    asked = [desk.of(status) for status in jobs]
    return desk, sorted(asked, key=lambda one: not one.pinned)


def test_a_run_of_jobs_is_added_as_one_after_the_other() -> None:
    """Also how they are packed again then is what ``pack_gpus`` finds, if it is known."""
    known = 0
    for seed in range(300):
        desk, asked = walked(random.Random(seed))
        at_once, singly = desk.packer(asked), desk.packer(asked)
        added: list[Request] = []
        rest = asked
        while rest:
            more = at_once.extend(rest)
            added += more
            rest = rest[len(more) :]
            if rest and at_once.add(rest[0]):
                added.append(rest[0])
            rest = rest[1:]
        assert added == [one for one in asked if singly.add(one)]
        assert at_once.layouts == singly.layouts
        assert at_once.free_gpus(()) == singly.free_gpus(())
        again = at_once.packed_again()
        assert again == singly.packed_again()
        if again is not None:
            known += 1
            assert again == pack_gpus(desk.pool, added)
    assert known > 100
