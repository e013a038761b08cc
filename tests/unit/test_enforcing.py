"""Which enforcement suits a Slurm, and how its cores are named on a node."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm

from slurm_synergy.config import EnforcementChoice
from slurm_synergy.core.model import Enforcement
from slurm_synergy.errors import ConfigError
from slurm_synergy.jobside.binding import choose_cpus, machine_order, widest_mask
from slurm_synergy.slurm.enforcing import Chosen, choose_enforcement

PLAIN, BOTH = ("task/affinity",), ("task/affinity", "task/cgroup")


def chosen(
    choice: str, word: str, plugins: tuple[str, ...], cores: str | None, helpers: bool = False
) -> Chosen:
    slurm = FakeSlurm(oversubscribe=(word, 8))
    raw = {} if cores is None else {"ConstrainCores": cores}
    config = replace(slurm.read_config(), task_plugins=plugins, raw=raw)
    partition = slurm.read_partition("synergy")
    return choose_enforcement(EnforcementChoice(choice), partition, config, node_helpers=helpers)


@pytest.mark.parametrize(
    ("choice", "word", "plugins", "cores", "expected", "why"),
    [
        ("auto", "FORCE", BOTH, "yes", Enforcement.SHARED, "OverSubscribe=FORCE"),
        ("auto", "NO", PLAIN, None, Enforcement.BORROW, "TaskPlugin=task/affinity confines no"),
        ("auto", "NO", (), None, Enforcement.BORROW, "TaskPlugin=task/none"),
        ("auto", "NO", BOTH, "no", Enforcement.BORROW, "ConstrainCores=no"),
        ("auto", "YES", BOTH, "yes", Enforcement.REQUEUE, "ConstrainCores=yes"),
        ("auto", "NO", BOTH, None, Enforcement.REQUEUE, "does not show ConstrainCores"),
        ("shared", "FORCE", BOTH, "yes", Enforcement.SHARED, "FORCE"),
        ("borrow", "FORCE", PLAIN, None, Enforcement.BORROW, "confines no job"),
        ("requeue", "FORCE", PLAIN, None, Enforcement.REQUEUE, "as configured"),
    ],
)
def test_the_first_that_works_here_is_taken_and_why_is_told(
    choice: str,
    word: str,
    plugins: tuple[str, ...],
    cores: str | None,
    expected: Enforcement,
    why: str,
) -> None:
    found = chosen(choice, word, plugins, cores)
    assert found.enforcement is expected
    assert why in found.why


@pytest.mark.parametrize(
    ("choice", "word", "expected"),
    [
        ("auto", "NO", Enforcement.BORROW),
        ("borrow", "NO", Enforcement.BORROW),
        ("auto", "FORCE", Enforcement.SHARED),
        ("requeue", "NO", Enforcement.REQUEUE),
    ],
)
def test_with_helpers_on_the_nodes_confined_jobs_can_borrow(
    choice: str, word: str, expected: Enforcement
) -> None:
    found = chosen(choice, word, BOTH, "yes", helpers=True)
    assert found.enforcement is expected
    assert ("helpers on the nodes" in found.why) == (expected is Enforcement.BORROW)


@pytest.mark.parametrize("cores", ["yes", None])
def test_where_jobs_are_confined_nobody_can_borrow(cores: str | None) -> None:
    with pytest.raises(ConfigError, match=r"ConstrainCores.*ConstrainCores=no in cgroup.conf"):
        chosen("borrow", "NO", BOTH, cores)


def machine(place: Path, packages: int, cores: int) -> Path:
    """Two threads per core; the system counts first threads of alternating sockets first."""
    for cpu in range(2 * packages * cores):
        first = cpu % (packages * cores)
        topology = place / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{first % packages}\n")
        (topology / "core_id").write_text(f"{first // packages}\n")
    return place


def test_cores_are_counted_as_slurm_does_by_socket_core_and_thread(tmp_path: Path) -> None:
    place = machine(tmp_path, packages=2, cores=2)
    # Socket 0 has cores of the system's CPUs 0+4 and 2+6, socket 1 those of 1+5 and 3+7.
    assert machine_order(range(8), place) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert choose_cpus((0, 1), range(8), 8, place).cpus == {0, 4}
    assert choose_cpus((6, 7), range(8), 8, place).cpus == {3, 7}
    assert machine_order({3, 1, 2}, tmp_path / "nowhere") == [1, 2, 3]


def test_a_process_can_look_how_far_it_may_reach_and_stays_where_it_is() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert widest_mask() >= before
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)
