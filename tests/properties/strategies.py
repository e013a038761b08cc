"""Random pools, jobs and histories for the properties of planning."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from builders import GIB, job, node, pending, placement, profile, res, running
from hypothesis import strategies as st

from slurm_synergy.core.model import (
    Enforcement,
    Job,
    JobPhase,
    JobStatus,
    Node,
    Profile,
    SensitivityTable,
    Snapshot,
)
from slurm_synergy.core.resources import Resources
from slurm_synergy.policies.pollux import POLLUX

__all__ = ["RIVALS", "SHORT_POLLUX", "jobs", "nodes", "profiles", "snapshots", "tables"]

RIVALS = {"gavel", "pollux", "shockwave", "themis"}
"""Policies to compare with; they have a module of tests of their own."""

SHORT_POLLUX = replace(POLLUX, population=20, generations=12, patience=6)
"""Pollux with searches that cost little: its promises do not depend on how well they end."""


# Strategies that are made once: hypothesis looks at each new one for longer than it draws from it.
COIN = st.booleans()
between = functools.cache(st.integers)
amount = functools.cache(st.floats)
CORES = st.sets(between(1, 16), min_size=1, max_size=4)
MEMORIES = st.sets(between(1, 64), min_size=1, max_size=3)


@functools.lru_cache(maxsize=None, typed=True)
def either(*values: Any) -> st.SearchStrategy[Any]:
    """One of these; name one twice and it is drawn twice as often."""
    return st.sampled_from(values)


@st.composite
def nodes(draw: st.DrawFn) -> list[Node]:
    """One to five nodes of up to two types, odd GPU and core counts, some of them down."""
    found = []
    for index in range(draw(between(1, 5))):
        gpu_type = draw(either("v100", "a100"))
        gpus = draw(between(1, 9))
        found.append(
            node(
                f"{gpu_type}-{index}",
                gpu_type,
                gpus,
                gpus * draw(between(1, 8)) + draw(between(0, 5)),
                gpus * draw(between(1, 64)) * GIB + draw(between(0, 2000)),
                usable=draw(between(0, 9)) > 0,
            )
        )
    return found


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Unknown, hungry or frugal; sometimes for one GPU type only."""
    if draw(between(0, 3)) == 0:
        return Profile()
    return profile(
        draw(amount(1.0, 2000.0)),
        draw(amount(1.0, 3000.0)),
        dataset_mib=draw(either(0.0, 500.0, 60_000.0, 700_000.0)),
        samples=draw(between(1000, 5_000_000)),
        storage_mib_s=draw(amount(10.0, 2000.0)),
        process_mem_mib=draw(either(0, 700, 4 * GIB)),
        types=draw(either(("v100", "a100"), ("v100",))),
    )


@st.composite
def tables(draw: st.DrawFn) -> Profile:
    """A table of rates over cores and memory, which need not be the minimum of two terms."""
    cores = sorted(draw(CORES))
    memory = sorted(draw(MEMORIES))
    rates: list[tuple[float, ...]] = []
    for row in range(len(cores)):
        line: list[float] = []
        for column in range(len(memory)):
            before = max(line[-1] if line else 1.0, rates[row - 1][column] if row else 1.0)
            line.append(before * draw(either(1.0, 1.0, 1.2, 2.5)))
        rates.append(tuple(line))
    table = SensitivityTable(
        cpus_per_gpu=tuple(cores),
        mem_mib_per_gpu=tuple(each * GIB for each in memory),
        rates=tuple(rates),
    )
    return Profile(
        key="table",
        gpu_rate_per_gpu=dict.fromkeys(("v100", "a100"), draw(amount(1.0, 20.0))),
        table=table,
    )


BELIEFS = st.one_of(profiles(), tables())


@st.composite
def jobs(draw: st.DrawFn, job_id: int) -> Job:
    """Any shape: single GPU, several nodes, free to split, larger than the pool."""
    count = draw(either(1, 1, 1, 2, 3, None))
    gpus = draw(between(1, 8)) * (count or 1) if count else draw(between(1, 20))
    wrapped = draw(between(0, 5)) > 0
    return job(
        job_id,
        gpus,
        nodes=count,
        submitted_s=float(draw(between(0, 20))),
        gpu_types=draw(either((), (), ("v100",), ("a100", "v100"))),
        tasks_per_node=draw(either(1, 1, 2, 4)),
        min_mem_mib_per_node=draw(either(0, 0, 1000, 5 * GIB, 40 * GIB)),
        wrapped=wrapped,
        preemptible=wrapped and draw(between(0, 5)) > 0,
        total_samples=draw(either(None, 1e5, 1e7)),
        time_limit_s=draw(either(None, 3600.0)),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """A pool with running, starting, stopping and pending jobs.

    Running jobs hold between their bare minimum and all that was left on their node, so the state
    is one that some history could have led to, not one that the planner would have made.
    """
    pool = draw(nodes())
    left = {one.name: one.total for one in pool}
    statuses: list[JobStatus] = []
    for job_id in range(1, draw(between(1, 9)) + 1):
        one, belief = draw(jobs(job_id)), draw(BELIEFS)
        where = draw(st.sampled_from(pool))
        room = left[where.name]
        share = where.proportional(one.gpus) if one.gpus <= where.total.gpus else None
        fits = (
            share is not None
            and one.nodes in (1, None)
            and (not one.gpu_types or where.gpu_type in one.gpu_types)
            and share.fits_in(room)
            and one.min_mem_mib_per_node <= share.mem_mib
        )
        if share is None or not fits or draw(COIN):
            statuses.append(pending(one, belief))
            continue
        held = _between(draw, share, room)
        left[where.name] = room - held
        phase = draw(either(*[JobPhase.RUNNING] * 3, JobPhase.STARTING))
        if one.wrapped and draw(between(0, 4)) == 0:
            phase = JobPhase.STOPPING
        spot = placement(job_id, where.gpu_type, **{where.name.replace("-", "_"): held})
        statuses.append(running(one, spot, belief, phase=phase))
    return Snapshot(
        round=1,
        now_s=0.0,
        round_s=300.0,
        nodes=tuple(sorted(pool, key=lambda one: one.name)),
        jobs=tuple(statuses),
        enforcement=draw(either(*Enforcement)),
        draining=draw(between(0, 9)) == 0,
    )


def _between(draw: st.DrawFn, share: Resources, room: Resources) -> Resources:
    return res(
        share.gpus,
        draw(st.integers(share.cpus, room.cpus)),
        draw(st.integers(share.mem_mib, room.mem_mib)),
    )
