"""What TUNE's shares must be like, whatever the jobs (algorithms B.8, invariants 3, 5, 8 and 9)."""

from __future__ import annotations

import pytest
from builders import GIB, job, node, pending, profile, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import jobs, nodes, profiles, tables

from slurm_synergy.core.decide import check_plan, decide
from slurm_synergy.core.model import Node, Plan, Profile, Snapshot
from slurm_synergy.core.pipeline import demand, proportional_share
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES

FILLING = sorted(
    name
    for name, one in MECHANISMS.items()
    if name != "opt" and not getattr(one, "may_skip", False)
)


@st.composite
def equal_nodes(draw: st.DrawFn) -> list[Node]:
    """Up to five nodes of one shape, any number of GPUs and cores."""
    gpus = draw(st.integers(1, 9))
    cpus = gpus * draw(st.integers(1, 8)) + draw(st.integers(0, 5))
    mem_mib = gpus * draw(st.integers(8, 64)) * GIB
    count = draw(st.integers(1, 5))
    return [node(f"v100-{n}", gpus=gpus, cpus=cpus, mem_mib=mem_mib) for n in range(count)]


def plan(shot: Snapshot, mechanism: str = "tune") -> Plan:
    found = decide(shot, POLICIES["fifo"], MECHANISMS[mechanism])
    check_plan(shot, found)
    return found


@settings(max_examples=120)
@given(data=st.data(), pool=equal_nodes())
def test_all_nodes_of_a_job_have_the_same_cores_per_gpu(
    data: st.DataObject, pool: list[Node]
) -> None:
    beliefs = data.draw(st.lists(st.one_of(profiles(), tables()), min_size=1, max_size=9))
    statuses = [
        pending(data.draw(jobs(number)), belief) for number, belief in enumerate(beliefs, start=1)
    ]
    found = plan(snapshot(pool, statuses))
    for placement in found.placements:
        if statuses[placement.job_id - 1].job.nodes is not None:
            assert len({share for _, share in placement.shares}) == 1


@settings(max_examples=60)
@given(data=st.data(), pool=nodes())
def test_jobs_of_which_nothing_is_known_get_their_proportional_shares(
    data: st.DataObject, pool: list[Node]
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=9))
    statuses = [pending(job(number, gpus)) for number, gpus in enumerate(sizes, start=1)]
    shot = snapshot(pool, statuses)
    found = plan(shot)
    assert {one.job_id for one in found.placements} == {
        one.job_id for one in plan(shot, "proportional").placements
    }
    for placement in found.placements:
        for name, share in placement.shares:
            status = statuses[placement.job_id - 1]
            assert share == proportional_share(status, shot.node(name), share.gpus)


@settings(max_examples=60)
@given(data=st.data(), pool=equal_nodes())
def test_where_nobody_wants_more_than_its_share_all_get_what_they_want(
    data: st.DataObject, pool: list[Node]
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=9))
    frugal = profile(per_core=10_000, gpu_rate=data.draw(st.floats(1.0, 1000.0)))
    statuses = [pending(job(number, gpus), frugal) for number, gpus in enumerate(sizes, start=1)]
    shot = snapshot(pool, statuses)
    for placement in plan(shot).placements:
        for name, share in placement.shares:
            wish = demand(statuses[placement.job_id - 1], shot.node(name), share.gpus)
            assert wish.cpus <= shot.node(name).proportional(share.gpus).cpus
            assert (share.cpus, share.mem_mib) == (wish.cpus, wish.mem_mib)


@pytest.mark.parametrize("mechanism", FILLING)
@settings(max_examples=40)
@given(data=st.data(), pool=nodes())
def test_a_flood_of_single_gpu_jobs_fills_every_gpu(
    mechanism: str, data: st.DataObject, pool: list[Node]
) -> None:
    """Whatever they can use; nodes with different ratios of cores and memory to GPUs included."""
    kinds: list[Profile] = data.draw(
        st.lists(st.one_of(profiles(), tables()), min_size=1, max_size=4)
    )
    # Memory that a process cannot do without may leave GPUs idle; that is another promise (P7).
    kinds = [kind for kind in kinds if not (kind.pipeline and kind.pipeline.process_mem_mib)]
    order = data.draw(st.randoms(use_true_random=False))
    usable = sum(one.capacity.gpus for one in pool)
    statuses = [pending(job(number), order.choice([*kinds, Profile()])) for number in range(1, 60)]
    found = plan(snapshot(pool, statuses), mechanism)
    assert sum(one.gpus for one in found.placements) == min(usable, len(statuses))
