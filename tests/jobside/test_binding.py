"""From core indices to OS CPUs, and pinning of real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_synergy.jobside import binding
from slurm_synergy.jobside.binding import choose_cpus, pin_tree, task_cores

CPUS = sorted(os.sched_getaffinity(0))


@given(st.sets(st.integers(0, 300)), st.integers(1, 16))
def test_tasks_share_out_all_cores_evenly_and_in_order(cores: set[int], tasks: int) -> None:
    parts = [task_cores(cores, rank, tasks) for rank in range(tasks)]
    if len(cores) < tasks:
        assert all(part == tuple(sorted(cores)) for part in parts)
        return
    assert [core for part in parts for core in part] == sorted(cores)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@given(
    st.sets(st.integers(0, 63), min_size=1),
    st.sets(st.integers(0, 200), min_size=1),
    st.integers(0, 64),
)
def test_a_choice_stays_within_what_slurm_granted(
    cores: set[int], granted: set[int], node_cores: int
) -> None:
    choice = choose_cpus(sorted(cores), granted, node_cores)
    assert choice.cpus <= granted
    assert bool(choice.cpus) != bool(choice.why)


def test_slurms_index_counts_the_granted_cpus_in_order() -> None:
    assert choose_cpus([0, 2], {4, 6, 8, 10}, 4).cpus == {4, 8}


def test_cores_that_cannot_be_translated_leave_the_mask_alone() -> None:
    assert "2 of the node's 24 cores" in choose_cpus([0], {0, 1}, 24).why
    assert "outside" in choose_cpus([7], {0, 1}, 2).why
    assert "no cores" in choose_cpus([], {0, 1}, 2).why


@pytest.fixture
def tree() -> Iterator[subprocess.Popen[str]]:
    """A process with three threads and a child that has a child."""
    code = (
        "import subprocess, sys, threading, time\n"
        "for _ in range(2): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
        "subprocess.Popen(['sh', '-c', 'sleep 60 & echo ready; wait'])\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    os.killpg(process.pid, 9)
    process.communicate()


def allowed(pid: int) -> list[str]:
    found = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        lines = (thread / "status").read_text().splitlines()
        found += [line.split()[1] for line in lines if line.startswith("Cpus_allowed_list")]
    return found


@pytest.mark.skipif(len(CPUS) < 2, reason="moving between CPUs needs two of them")
def test_every_thread_of_the_tree_is_pinned_and_read_back(tree: subprocess.Popen[str]) -> None:
    result = pin_tree(tree.pid, {CPUS[1]})
    assert result.threads >= 5
    assert result.changed == result.threads
    assert result.wrong == 0
    assert allowed(tree.pid) == [str(CPUS[1])] * 3
    children = Path(f"/proc/{tree.pid}/task/{tree.pid}/children").read_text().split()
    assert [allowed(int(child)) for child in children] == [[str(CPUS[1])]]
    assert pin_tree(tree.pid, {CPUS[1]}).changed == 0
    assert pin_tree(tree.pid, CPUS, strays_only=True).changed == 0
    assert pin_tree(tree.pid, CPUS).changed == result.threads


def test_a_kernel_without_children_files_is_walked_with_psutil(
    tree: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "_children", lambda _pid: None)
    assert pin_tree(tree.pid, {CPUS[0]}).threads >= 5


def test_masks_that_cannot_be_had_are_counted(tree: subprocess.Popen[str]) -> None:
    nowhere = max(CPUS) + 500
    result = pin_tree(tree.pid, {nowhere})
    assert result.wrong == result.threads >= 5


def test_a_tree_that_has_ended_is_nothing_to_pin() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert pin_tree(gone.pid, {CPUS[0]}) == binding.PinResult(threads=0, changed=0, wrong=0)
