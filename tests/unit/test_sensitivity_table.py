"""A table of rates stands in for the loader in everything that is derived from a profile."""

from __future__ import annotations

import pytest
from builders import job, node, pending, res
from hypothesis import given
from hypothesis import strategies as st

from slurm_synergy.core.model import PipelineModel, Profile, SensitivityTable
from slurm_synergy.core.pipeline import (
    demand,
    floor_share,
    job_rate,
    proportional_share,
    table_rate,
)
from slurm_synergy.errors import ModelError

TABLE = SensitivityTable(
    cpus_per_gpu=(1, 3, 6),
    mem_mib_per_gpu=(1000, 4000),
    rates=((1.0, 2.0), (4.0, 8.0), (5.0, 20.0)),
)


def profile_of(table: SensitivityTable) -> Profile:
    return Profile(gpu_rate_per_gpu={"v100": table.rates[-1][-1]}, table=table)


def test_cores_count_between_the_rows_and_memory_by_whole_columns() -> None:
    assert table_rate(TABLE, 1, 3, 4000) == 8.0
    assert table_rate(TABLE, 1, 2, 3999) == 2.5
    assert table_rate(TABLE, 1, 99, 99_999) == 20.0
    assert table_rate(TABLE, 1, 3, 999) == 0.0
    assert table_rate(TABLE, 1, 0, 4000) == 0.0


def test_below_the_first_row_the_rate_is_proportional() -> None:
    assert table_rate(TABLE, 4, 2, 16_000) == pytest.approx(4 * 2.0 * 0.5)


def test_several_gpus_share_cores_and_memory_evenly() -> None:
    assert table_rate(TABLE, 2, 12, 8000) == 40.0


def test_the_slowest_node_decides() -> None:
    rate = job_rate(profile_of(TABLE), "v100", [res(1, 6, 4000), res(1, 3, 4000)])
    assert rate == 16.0


def test_demand_is_the_least_cell_that_saturates() -> None:
    status = pending(job(), profile_of(TABLE))
    found = demand(status, node(gpus=4, cpus=12, mem_mib=16_000), 1)
    assert (found.cpus, found.mem_mib) == (6, 4000)


def test_tables_that_make_no_sense_are_refused() -> None:
    for cpus, mem, rates in [
        ((), (1,), ()),
        ((2, 1), (1,), ((1.0,), (2.0,))),
        ((1, 2), (1,), ((2.0,), (1.0,))),
        ((1,), (1, 2), ((1.0,),)),
        ((1,), (1,), ((0.0,),)),
    ]:
        with pytest.raises(ModelError):
            SensitivityTable(cpus_per_gpu=cpus, mem_mib_per_gpu=mem, rates=rates)
    with pytest.raises(ModelError, match="both"):
        Profile(table=TABLE, pipeline=PipelineModel(preprocess=((1, 1.0),)))


@st.composite
def tables(draw: st.DrawFn) -> SensitivityTable:
    """Any non-decreasing table, most of them no minimum of a row and a column."""
    cpus = draw(st.lists(st.integers(1, 24), min_size=1, max_size=5, unique=True))
    mem = draw(st.lists(st.integers(1, 64_000), min_size=1, max_size=4, unique=True))
    steps = [[draw(st.floats(0.1, 10.0)) for _ in mem] for _ in cpus]
    rates: list[list[float]] = []
    for row, line in enumerate(steps):
        rates.append([])
        for column, step in enumerate(line):
            above = rates[row - 1][column] if row else 0.0
            left = rates[row][column - 1] if column else 0.0
            rates[row].append(max(above, left) + step)
    return SensitivityTable(
        cpus_per_gpu=tuple(sorted(cpus)),
        mem_mib_per_gpu=tuple(sorted(mem)),
        rates=tuple(tuple(line) for line in rates),
    )


@given(
    table=tables(),
    gpus=st.integers(1, 8),
    cpus=st.integers(1, 40),
    mem_mib=st.integers(8000, 500_000),
    mine=st.integers(1, 8),
)
def test_demand_and_floor_keep_the_proportional_rate(
    table: SensitivityTable, gpus: int, cpus: int, mem_mib: int, mine: int
) -> None:
    where = node(gpus=gpus, cpus=cpus, mem_mib=mem_mib)
    mine = min(mine, gpus)
    status = pending(job(gpus=mine), profile_of(table))
    share = proportional_share(status, where, mine)
    least = job_rate(status.profile, "v100", [share]) or 0.0
    wish = demand(status, where, mine)
    floor = floor_share(status, where, mine)
    wished = res(mine, wish.cpus, wish.mem_mib)
    assert (job_rate(status.profile, "v100", [wished]) or 0.0) >= least * (1 - 1e-9)
    assert (job_rate(status.profile, "v100", [floor]) or 0.0) >= least * (1 - 1e-9)
    assert floor.cpus <= share.cpus
    assert floor.mem_mib <= share.mem_mib
