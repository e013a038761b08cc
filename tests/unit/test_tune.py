from __future__ import annotations

import pytest
from builders import (
    CATALOGUE,
    GIB,
    job,
    node,
    pending,
    placement,
    profile,
    res,
    running,
    snapshot,
)

from slurm_synergy.core.decide import check_plan, decide
from slurm_synergy.core.model import Enforcement, JobStatus, Plan, Snapshot
from slurm_synergy.core.packing import Requests
from slurm_synergy.core.pipeline import demand, job_rate, proportional_rate
from slurm_synergy.core.resources import Resources
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.mechanisms.placing import by_size, make_parties
from slurm_synergy.mechanisms.tune import _runs, full_demand
from slurm_synergy.policies import POLICIES

PAIR = [node("v100-1"), node("v100-2")]


def plan(shot: Snapshot, mechanism: str = "tune") -> Plan:
    found = decide(shot, POLICIES["fifo"], MECHANISMS[mechanism])
    check_plan(shot, found)
    return found


def share(found: Plan, job_id: int) -> Resources:
    """The share of a job on its one node."""
    where = found.placement(job_id)
    assert where is not None and len(where.shares) == 1
    return where.shares[0][1]


def where(found: Plan, job_id: int) -> tuple[str, ...]:
    spot = found.placement(job_id)
    assert spot is not None
    return spot.nodes


def test_jobs_that_ask_for_the_same_are_placed_together_whatever_they_are_worth() -> None:
    sorts = [profile(per_core=4000, gpu_rate=1000), profile(per_core=8000, gpu_rate=2000)]
    others = [profile(per_core=100, gpu_rate=1000)]
    jobs = [pending(job(n), sorts[n % 2]) for n in range(1, 7)]
    shot = snapshot(PAIR, [*jobs, *[pending(job(n), others[0]) for n in (7, 8)]])
    requests = Requests.of_snapshot(shot)
    decision = POLICIES["fifo"].choose(shot)
    parties = by_size(make_parties(shot, decision, requests, full_demand))
    runs = [[party.job_id for party in run] for _, run in _runs(requests.pool, parties)]
    assert runs == [[7, 8], [1, 2, 3, 4, 5, 6]]


def paper_jobs() -> list[JobStatus]:
    """Synergy's motivating example: image and speech, and two language models, 4 GPUs each."""
    named = [
        ("resnet18-openimages", 0),
        ("m5-audio", 120 * GIB),  # four audio processes need about 30 GiB each
        ("gnmt-wmt16", 0),
        ("transformerxl-wikitext103", 0),
    ]
    return [
        pending(job(index, 4, min_mem_mib_per_node=min_mem), CATALOGUE[name])
        for index, (name, min_mem) in enumerate(named, start=1)
    ]


def relative_rates(found: Plan, jobs: list[JobStatus]) -> list[float]:
    rates = []
    for status in jobs:
        rate = job_rate(status.profile, "v100", [share(found, status.job.job_id)])
        base = proportional_rate(status, [(PAIR[0], 4)])
        assert rate is not None and base is not None
        rates.append(rate / base)
    return rates


def test_the_motivating_example_of_the_paper_comes_out() -> None:
    jobs = paper_jobs()
    even = plan(snapshot(PAIR, jobs), "proportional")
    assert {share(even, job_id) for job_id in (1, 2, 3, 4)} == {res(4, 12, 250_000)}

    tuned = plan(snapshot(PAIR, jobs))
    for hungry in (1, 2):
        assert share(tuned, hungry).cpus == 23
        assert 360_000 <= share(tuned, hungry).mem_mib <= 420_000
    for frugal in (3, 4):
        assert share(tuned, frugal).cpus == 1
        assert share(tuned, frugal).mem_mib <= 100_000
    assert where(tuned, 1) != where(tuned, 2) and where(tuned, 3) != where(tuned, 4)
    gain = sum(relative_rates(tuned, jobs)) / sum(relative_rates(even, jobs))
    assert gain > 1.45
    assert min(relative_rates(tuned, jobs)) >= 1


def test_a_job_whose_whole_demand_is_free_gets_it() -> None:
    status = pending(job(1, 4), profile(per_core=100, gpu_rate=500))
    found = plan(snapshot(PAIR, [status]))
    wish = demand(status, PAIR[0], 4)
    assert share(found, 1) == res(4, wish.cpus, wish.mem_mib)


def test_a_job_that_finds_less_gets_the_smaller_of_demand_and_share_in_each_part() -> None:
    # The second wants 24 cores and 20 GiB: it gets its 12 cores, and no memory it cannot use.
    first = pending(job(1, 4), profile(per_core=100, gpu_rate=1000))
    second = pending(job(2, 4), profile(per_core=100, gpu_rate=1000, process_mem_mib=20 * GIB))
    found = plan(snapshot([node()], [first, second]))
    assert share(found, 1).cpus == 12
    assert share(found, 2) == res(4, 12, 20 * GIB)


def test_victims_give_exactly_what_is_needed_and_keep_their_share() -> None:
    rich = pending(job(1, 4), profile(per_core=100, gpu_rate=1000))  # wants all 24
    poor = pending(job(2, 2), profile(per_core=1000, gpu_rate=1500))  # wants 3
    found = plan(snapshot([node()], [rich, poor]))
    assert (share(found, 1).cpus, share(found, 2).cpus) == (21, 3)


def test_the_job_with_the_largest_surplus_per_gpu_gives_first() -> None:
    wide = pending(job(1, 4), profile(per_core=100, gpu_rate=350))  # 14 of 12: surplus 2
    narrow = pending(job(2, 2), profile(per_core=100, gpu_rate=500))  # 10 of 6: surplus 4
    late = pending(job(3, 1), profile(per_core=100, gpu_rate=300))  # 3 of 3
    found = plan(snapshot([node()], [wide, narrow, late]))
    assert [share(found, n).cpus for n in (1, 2, 3)] == [14, 7, 3]


def test_a_victim_on_two_nodes_gives_on_both() -> None:
    # Tightest first puts job 2 on v100-1; both nodes of job 1 must still agree.
    wide = pending(job(1, 8, nodes=2), profile(per_core=100, gpu_rate=1000))
    late = pending(job(2, 4), profile(per_core=1000, gpu_rate=1000))
    found = plan(snapshot(PAIR, [wide, late]))
    spot = found.placement(1)
    assert spot is not None
    assert [one.cpus for _, one in spot.shares] == [20, 20]
    assert share(found, 2).cpus == 4


def test_no_part_of_a_job_gets_more_for_a_gpu_than_the_part_that_fills_its_node() -> None:
    wide = pending(job(1, 10, nodes=None), profile(per_core=100, gpu_rate=1200))
    hungry = pending(job(2, 1), profile(per_core=100, gpu_rate=1200))
    frugal = pending(job(3, 5), profile(per_core=2000, gpu_rate=500))
    found = plan(snapshot(PAIR, [wide, hungry, frugal]))
    split = found.placement(1)
    assert split is not None
    assert sorted((share.gpus, share.cpus) for _, share in split.shares) == [(2, 6), (8, 24)]
    assert share(found, 2).cpus == 12


def test_leftovers_beyond_demand_are_not_handed_out() -> None:
    found = plan(snapshot(PAIR, [pending(job(1, 4), profile(per_core=1000, gpu_rate=250))]))
    assert share(found, 1).cpus == 1


def test_jobs_without_a_profile_hold_their_proportional_share() -> None:
    hungry = pending(job(1, 4), profile(per_core=100, gpu_rate=1000))
    found = plan(snapshot([node()], [hungry, pending(job(2, 4))]))
    assert share(found, 2) == res(4, 12, 250_000)
    assert share(found, 1).cpus == 12


def test_cores_stay_multiples_of_the_tasks_on_a_node() -> None:
    rich = pending(job(1, 4, tasks_per_node=4), profile(per_core=100, gpu_rate=1000))
    poor = pending(job(2, 1), profile(per_core=1000, gpu_rate=1000))
    found = plan(snapshot([node()], [rich, poor]))
    assert (share(found, 1).cpus, share(found, 2).cpus) == (20, 1)


def test_a_hungry_job_goes_where_all_it_wants_is_free() -> None:
    pool = [node("a100-1", "a100", cpus=64, mem_mib=1_000_000), node("v100-1")]
    frugal = running(
        job(2, 2), placement(2, v100_1=res(2, 2, 20 * GIB)), profile(per_core=250, gpu_rate=250)
    )
    hungry = pending(job(1, 4), profile(per_core=100, gpu_rate=1000))
    found = plan(snapshot(pool, [hungry, frugal]))
    assert where(found, 1) == ("a100-1",)
    assert where(plan(snapshot(pool, [hungry])), 1) == ("v100-1",)


def test_running_jobs_keep_their_gpus() -> None:
    hungry = profile(per_core=100, gpu_rate=1000)
    together = [
        running(job(n, 4), placement(n, v100_1=res(4, 12, 250_000)), hungry) for n in (1, 2)
    ]
    found = plan(snapshot(PAIR, together))
    assert where(found, 1) == where(found, 2) == ("v100-1",)


def test_minimum_memory_beyond_the_share_is_respected_by_both_mechanisms() -> None:
    large = pending(job(1, 4, min_mem_mib_per_node=400_000))
    small = pending(job(2, 4), profile(per_core=1000, gpu_rate=250, process_mem_mib=20 * GIB))
    for mechanism in MECHANISMS:
        found = plan(snapshot([node()], [large, small]), mechanism)
        assert share(found, 1).mem_mib == 400_000
        assert 20 * GIB <= share(found, 2).mem_mib <= 100_000


def test_an_unwrapped_running_job_keeps_exactly_what_it_holds() -> None:
    plain = running(
        job(2, 4, wrapped=False, preemptible=False), placement(2, v100_1=res(4, 16, 300_000))
    )
    hungry = pending(job(1, 4), profile(per_core=100, gpu_rate=1000))
    found = plan(snapshot(PAIR[:1], [hungry, plain]))
    # Its share of cores, 12, is no longer there: the job must wait rather than run below it.
    assert found.placement(1) is None
    assert share(found, 2) == res(4, 16, 300_000)


@pytest.mark.parametrize("mechanism", sorted(MECHANISMS))
def test_where_only_a_restart_resizes_running_jobs_keep_their_shares(mechanism: str) -> None:
    run = running(
        job(2, 4), placement(2, v100_1=res(4, 14, 100_000)), profile(per_core=100, gpu_rate=300)
    )
    late = pending(job(3, 2), profile(per_core=1000, gpu_rate=500))
    found = plan(snapshot(PAIR[:1], [run, late], enforcement=Enforcement.REQUEUE), mechanism)
    assert share(found, 2) == res(4, 14, 100_000)


def test_in_place_a_running_job_is_not_promised_memory_beyond_its_grant() -> None:
    wants_all = profile(per_core=100, gpu_rate=300, dataset_mib=450_000, storage_mib_s=10)
    run = running(job(1, 4), placement(1, v100_1=res(4, 12, 300_000)), wants_all)
    assert demand(run, PAIR[0], 4).mem_mib > 300_000
    found = plan(snapshot(PAIR[:1], [run]))
    assert share(found, 1).mem_mib == 300_000


def test_all_gpus_are_used_even_if_a_clever_choice_of_nodes_fails() -> None:
    # By demand the first two go to different nodes; then no node has eight GPUs left.
    hungry = profile(per_core=100, gpu_rate=1000)
    jobs = [
        pending(job(1, 4, nodes=1), hungry),
        pending(job(2, 4, nodes=1), hungry),
        pending(job(3, 8, nodes=1)),
    ]
    found = plan(snapshot(PAIR, jobs))
    assert not found.waiting
    assert where(found, 1) == where(found, 2)


def test_several_victims_give_as_much_as_is_needed_together() -> None:
    # Surplus: job 1 has 2 cores, job 2 has 1; the third needs 3 of the 24 and finds none free.
    first = pending(job(1, 4), profile(per_core=100, gpu_rate=350))  # 14
    second = pending(job(2, 3), profile(per_core=100, gpu_rate=1000 / 3))  # 10
    third = pending(job(3, 1))
    found = plan(snapshot([node()], [first, second, third]))
    assert [share(found, n).cpus for n in (1, 2, 3)] == [12, 9, 3]


def test_a_job_that_cannot_be_stopped_does_not_push_out_others_by_a_grown_floor() -> None:
    # It started frugal; by now its memory need is known to be larger than what it holds.
    fixed = running(
        job(1, 4, preemptible=False, min_mem_mib_per_node=200_000),
        placement(1, v100_1=res(4, 4, 100_000)),
        profile(per_core=1000, gpu_rate=250),
    )
    other = running(job(2, 4), placement(2, v100_1=res(4, 12, 400_000)))
    needy = running(
        job(2, 4, min_mem_mib_per_node=400_000), placement(2, v100_1=res(4, 12, 400_000))
    )
    assert share(plan(snapshot(PAIR[:1], [fixed, other])), 2).mem_mib >= 250_000
    found = plan(snapshot(PAIR[:1], [fixed, needy]))
    assert share(found, 1).mem_mib == 100_000
    assert share(found, 2).mem_mib == 400_000


def test_cores_are_left_for_gpus_that_others_will_take() -> None:
    # Two hungry jobs fill the cores of a node and leave six GPUs; a third must go elsewhere even
    # though its 6 cores are free, for each of those GPUs will need a core.
    hungry = profile(per_core=100, gpu_rate=900)
    third = profile(per_core=100, gpu_rate=600)
    frugal = profile(per_core=1000, gpu_rate=1000)
    jobs = [pending(job(1), hungry), pending(job(2), hungry), pending(job(3), third)]
    jobs += [pending(job(n), frugal) for n in range(4, 17)]
    found = plan(snapshot(PAIR, jobs))
    assert where(found, 1) == where(found, 2) == ("v100-1",)
    assert where(found, 3) == ("v100-2",)
    assert [share(found, n).cpus for n in range(1, 17)] == [9, 9, 6] + [1] * 13


def test_a_job_that_finds_no_place_for_all_it_wants_goes_where_most_of_it_is_free() -> None:
    # Both nodes lack what the third wants; the second has more left though the first is tighter.
    def holds(job_id: int, gpus: int, where_: str, cores: int) -> JobStatus:
        spot = placement(job_id, **{where_: res(gpus, cores, 1000)})
        return running(
            job(job_id, gpus, wrapped=False, preemptible=False), spot, profile(1000, 250)
        )

    pool = [holds(1, 6, "v100_1", 20), holds(2, 5, "v100_2", 10)]
    wants_all = pending(job(3), profile(per_core=100, gpu_rate=2400))
    assert where(plan(snapshot(PAIR, [*pool, wants_all])), 3) == ("v100-2",)


def test_a_job_that_fits_one_node_is_not_split_for_more_cores() -> None:
    # Each wants 16 cores: once two have theirs, both nodes have 8 left, what half the third wants.
    hungry = profile(per_core=100, gpu_rate=400)
    jobs = [pending(job(n, 4, nodes=None), hungry) for n in (1, 2, 3)]
    found = plan(snapshot(PAIR, jobs))
    assert [len(where(found, n)) for n in (1, 2, 3)] == [1, 1, 1]
