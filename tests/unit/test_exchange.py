"""New jobs find better neighbours by an exchange; running ones stay where they are."""

from __future__ import annotations

import random

import pytest
from builders import CATALOGUE, job, node, pending, placement, profile, res, running, snapshot

from slurm_synergy.core.decide import check_plan, decide
from slurm_synergy.core.model import JobStatus, Plan, Snapshot
from slurm_synergy.core.pipeline import job_rate, proportional_rate
from slurm_synergy.mechanisms import MECHANISMS, exchange, tune
from slurm_synergy.mechanisms.exchange import _Sort, _worth
from slurm_synergy.policies import POLICIES

HUNGRY = profile(per_core=100, gpu_rate=900)  # 9 cores per GPU
FRUGAL = profile(per_core=4000, gpu_rate=1000)  # a core for four GPUs


def plan(shot: Snapshot) -> Plan:
    found = decide(shot, POLICIES["fifo"], MECHANISMS["tune"])
    check_plan(shot, found)
    return found


def where(found: Plan, job_id: int) -> tuple[str, ...]:
    spot = found.placement(job_id)
    assert spot is not None
    return spot.nodes


def cores(found: Plan, job_id: int) -> int:
    spot = found.placement(job_id)
    assert spot is not None
    return sum(share.cpus for _, share in spot.shares)


def total_gain(shot: Snapshot, found: Plan) -> float:
    statuses = {status.job.job_id: status for status in shot.jobs}
    total = 0.0
    for one in found.placements:
        status = statuses[one.job_id]
        rate = job_rate(status.profile, one.gpu_type, [share for _, share in one.shares])
        base = proportional_rate(status, [(shot.node(name), s.gpus) for name, s in one.shares])
        total += one.gpus * (rate / base if rate and base else 1.0)
    return total


def without_exchange(monkeypatch: pytest.MonkeyPatch, shot: Snapshot) -> Plan:
    with monkeypatch.context() as patch:
        patch.setattr(tune, "exchange", lambda *_args: {})
        return plan(shot)


def crowd() -> list[JobStatus]:
    """Two frugal jobs of 4 GPUs, which best fit puts together, and eight hungry ones of one."""
    large = [pending(job(n, 4), FRUGAL) for n in (1, 2)]
    return large + [pending(job(n), HUNGRY) for n in range(3, 11)]


def test_frugal_jobs_of_several_gpus_are_spread_among_hungry_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shot = snapshot([node("v100-1"), node("v100-2")], crowd())
    before, after = without_exchange(monkeypatch, shot), plan(shot)
    assert where(before, 1) == where(before, 2)
    assert where(after, 1) != where(after, 2)
    assert sum(cores(after, n) for n in range(3, 11)) == 46
    assert total_gain(shot, after) > total_gain(shot, before) + 5


def test_nodes_that_look_the_same_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, asked = 12, 0
    best = exchange._best

    def counted(*hosts: object) -> object:
        nonlocal asked
        asked += 1
        return best(*hosts)  # type: ignore[arg-type]

    monkeypatch.setattr(exchange, "_best", counted)
    large = [pending(job(n, 4), FRUGAL) for n in range(1, 2 * pairs + 1)]
    small = [pending(job(100 + n), HUNGRY) for n in range(8 * pairs)]
    shot = snapshot([node(f"v100-{n:02}") for n in range(2 * pairs)], large + small)
    found = plan(shot)
    # Each node has a frugal job of 4 GPUs, and four hungry ones that share what it leaves.
    assert {where(found, n)[0] for n in range(1, 2 * pairs + 1)} == {one.name for one in shot.nodes}
    assert sum(cores(found, 100 + n) for n in range(8 * pairs)) == 46 * pairs
    assert 1 <= asked < pairs


def test_a_job_moves_to_gpus_that_nobody_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [pending(job(n), HUNGRY) for n in range(1, 9)]
    shot = snapshot([node("v100-1"), node("v100-2"), node("v100-3")], jobs)
    found = plan(shot)
    used = {where(found, n)[0] for n in range(1, 9)}
    assert used == {"v100-1", "v100-2", "v100-3"}
    # Two nodes give 24 cores to three jobs, the third gives two all that they want.
    assert sum(cores(found, n) for n in range(1, 9)) == 66
    assert total_gain(shot, found) >= total_gain(shot, without_exchange(monkeypatch, shot))


def test_running_jobs_are_not_exchanged() -> None:
    run = [running(job(n, 4), placement(n, v100_1=res(4, 1, 20_000)), FRUGAL) for n in (1, 2)]
    found = plan(snapshot([node("v100-1"), node("v100-2")], [*run, *crowd()[2:]]))
    assert where(found, 1) == where(found, 2) == ("v100-1",)


def test_an_exchange_stays_within_nodes_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Floors and demands differ between kinds, so what fits one need not fit the other."""
    shot = snapshot([node("v100-1"), node("v100-2", cpus=25)], crowd())
    assert plan(shot) == without_exchange(monkeypatch, shot)


def test_a_job_of_two_nodes_takes_no_part_but_is_counted() -> None:
    wide = pending(job(11, 2, nodes=2), profile(per_core=100, gpu_rate=300))
    shot = snapshot([node(f"v100-{n}", gpus=9, cpus=27) for n in (1, 2)], [*crowd(), wide])
    found = plan(shot)
    assert not found.waiting
    assert where(found, 11) == ("v100-1", "v100-2")
    assert where(found, 1) != where(found, 2)


def test_memory_pairs_jobs_as_cores_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that read a large data set gain from memory that frugal neighbours leave."""
    caching = profile(
        per_core=1000, gpu_rate=1000, dataset_mib=400_000, samples=1_000_000, storage_mib_s=200
    )
    jobs = [pending(job(n, 4), FRUGAL) for n in (1, 2)]
    jobs += [pending(job(n, 4), caching) for n in (3, 4)]
    shot = snapshot([node("v100-1"), node("v100-2")], jobs)
    found = plan(shot)
    assert where(found, 3) != where(found, 4)
    assert total_gain(shot, found) >= total_gain(shot, without_exchange(monkeypatch, shot))


@pytest.mark.parametrize("seed", range(12))
def test_an_exchange_never_costs_gain(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    order = random.Random(seed)
    names = sorted(CATALOGUE)
    jobs = [
        pending(job(n, order.choice([1, 1, 2, 3, 4, 6])), CATALOGUE[order.choice(names)])
        for n in range(1, 25)
    ]
    pool = [node(f"v100-{n}", gpus=order.choice([6, 8]), cpus=30) for n in range(6)]
    shot = snapshot(pool, jobs)
    before, after = without_exchange(monkeypatch, shot), plan(shot)
    placed = [one.job_id for one in before.placements]
    assert [one.job_id for one in after.placements] == placed
    # Whole cores and the order of sharing can cost what the rule does not see: a part of a GPU.
    assert total_gain(shot, after) >= total_gain(shot, before) - 0.5


def test_what_a_node_lacks_does_not_concern_those_who_want_no_more_of_it() -> None:
    """A node can be short of memory, where jobs that cannot leave hold more than it has."""
    wants_cores = _Sort(-2.0, 1.0, 4, 0, 1, 2, 100, 0.5)
    wants_both = _Sort(-1.0, 1.0, 4, 10, 1, 2, 100, 0.5)
    assert _worth([wants_both, wants_cores], 6, -50) == (1.0, 2.0, -50.0)
    assert _worth([wants_cores], -1, 10) == (0.0, -1, 10)
