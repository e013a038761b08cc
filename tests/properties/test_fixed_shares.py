"""Where shares cannot change (no helper is heard there) all have their own, by every mechanism."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import job, pending, profile, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from promises import telling
from strategies import nodes, snapshots

from slurm_synergy.core.decide import check_plan, decide
from slurm_synergy.core.model import Enforcement, Node, Snapshot
from slurm_synergy.core.pipeline import proportional_share
from slurm_synergy.core.snapshot import is_pinned
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES

# The solver is a program of its own, which takes its time.
QUICK = sorted(set(MECHANISMS) - {"opt"})
WHOLE_DEMANDS = sorted(name for name in QUICK if getattr(MECHANISMS[name], "may_skip", False))


@st.composite
def partly_fixed(draw: st.DrawFn) -> Snapshot:
    """Any snapshot in which the shares of some nodes cannot change."""
    shot = draw(snapshots())
    pool = tuple(replace(one, fixed_shares=draw(st.booleans())) for one in shot.nodes)
    return replace(shot, nodes=pool, enforcement=Enforcement.BORROW)


@settings(max_examples=25)
@given(shot=partly_fixed())
def test_every_job_there_has_its_proportional_cores(shot: Snapshot) -> None:
    for mechanism in QUICK:
        with telling("fifo", mechanism):
            assert_own_cores(mechanism, replace(shot))


@settings(max_examples=4, deadline=None)
@given(shot=partly_fixed())
def test_the_solver_gives_it_no_other_cores_either(shot: Snapshot) -> None:
    assert_own_cores("opt", shot)


def assert_own_cores(mechanism: str, shot: Snapshot) -> None:
    plan = decide(shot, POLICIES["fifo"], MECHANISMS[mechanism])
    check_plan(shot, plan)
    statuses = {status.job.job_id: status for status in shot.jobs}
    pinned = {job_id for job_id, status in statuses.items() if is_pinned(status, shot)}
    # What cannot be stopped may hold more, and then there is less for the others.
    crowded = {name for one in plan.placements if one.job_id in pinned for name in one.nodes}
    for one in plan.placements:
        for name, share in one.shares:
            if one.job_id in pinned or not shot.node(name).fixed_shares:
                continue
            own = proportional_share(statuses[one.job_id], shot.node(name), share.gpus)
            assert share.cpus == own.cpus or (name in crowded and share.cpus < own.cpus)


@pytest.mark.parametrize("mechanism", WHOLE_DEMANDS)
@settings(max_examples=15)
@given(data=st.data(), pool=nodes())
def test_nobody_is_left_out_for_cores_that_it_could_not_have(
    mechanism: str, data: st.DataObject, pool: list[Node]
) -> None:
    """However many cores jobs could use, on such nodes the baselines fill every GPU."""
    fixed = [replace(one, fixed_shares=True) for one in pool]
    speeds = data.draw(st.lists(st.sampled_from([5.0, 60.0, 900.0]), min_size=1, max_size=40))
    statuses = [
        pending(job(number), profile(per_core=speed)) for number, speed in enumerate(speeds, 1)
    ]
    shot = snapshot(fixed, statuses, enforcement=Enforcement.BORROW)
    plan = decide(shot, POLICIES["fifo"], MECHANISMS[mechanism])
    assert len(plan.placements) == min(len(speeds), sum(one.capacity.gpus for one in pool))
