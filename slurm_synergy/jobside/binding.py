"""Which OS CPUs a task's lease means, and pinning a whole process tree to them.

The first half is pure. The second half sets affinity masks thread by thread, because a mask
belongs to a thread, and reads every one back, because a cpuset narrows a request without an error.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = [
    "CpuChoice",
    "PinResult",
    "choose_cpus",
    "machine_order",
    "pin_tree",
    "process_tree",
    "task_cores",
    "widest_mask",
]

_PASSES = 8
_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuChoice:
    """The OS CPUs to pin to; empty means "do not pin", and ``why`` says the reason."""

    cpus: frozenset[int]
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinResult:
    """``threads`` that were looked at, ``changed`` ones, and ``wrong``: masks that differ still."""

    threads: int
    changed: int
    wrong: int


def task_cores(cores: Collection[int], local_rank: int, local_ranks: int) -> tuple[int, ...]:
    """This task's part of the job's cores on the node: contiguous slices, sizes differ by one.

    With fewer cores than tasks all tasks share all cores.
    """
    ordered = sorted(set(cores))
    if len(ordered) < local_ranks:
        return tuple(ordered)
    first = local_rank * len(ordered) // local_ranks
    last = (local_rank + 1) * len(ordered) // local_ranks
    return tuple(ordered[first:last])


def machine_order(cpus: Collection[int], place: Path = _CPUS) -> list[int]:
    """OS CPUs in the order in which Slurm numbers them: by socket, core and thread.

    The numbers of the operating system may alternate between sockets, and hold the second threads
    of all cores back to the end. ``place`` is the kernel's description; without it by number.
    """

    def at(cpu: int) -> tuple[int, int, int]:
        topology = place / f"cpu{cpu}" / "topology"
        package = int((topology / "physical_package_id").read_text())
        return package, int((topology / "core_id").read_text()), cpu

    try:
        return sorted(cpus, key=at)
    except (OSError, ValueError):
        return sorted(cpus)


def widest_mask() -> frozenset[int]:
    """The CPUs that this process could have: those of its cpuset, whatever it is bound to now."""
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
        return frozenset(os.sched_getaffinity(0))
    except OSError:
        return frozenset(before)
    finally:
        os.sched_setaffinity(0, before)


def choose_cpus(
    cores: Sequence[int], granted: Collection[int], node_cores: int, place: Path = _CPUS
) -> CpuChoice:
    """The OS CPUs of Slurm's core indices ``cores`` inside the mask ``granted``.

    Slurm numbers a node's cores from 0; a mask over the whole node lists the same cores in OS
    numbers (see ``machine_order``). A mask narrower than the node (a part of a node, or a node that
    is only pretended) cannot be translated, and what Slurm gave stays.
    """
    if not cores:
        return CpuChoice(cpus=frozenset(), why="the lease names no cores")
    ordered = machine_order(granted, place)
    if node_cores <= 0 or len(ordered) < node_cores:
        why = f"{len(ordered)} of the node's {node_cores} cores are visible here"
        return CpuChoice(cpus=frozenset(), why=why)
    chosen = frozenset(ordered[core] for core in cores if core < len(ordered))
    if not chosen:
        return CpuChoice(cpus=frozenset(), why=f"cores {list(cores)} are outside the granted ones")
    return CpuChoice(cpus=chosen)


def pin_tree(pid: int, cpus: Collection[int], *, strays_only: bool = False) -> PinResult:
    """Pin all threads of ``pid`` and of its descendants to ``cpus``.

    Passes over the tree until one finds nothing to change, since threads may start meanwhile. With
    ``strays_only`` a thread that confined itself to a part of ``cpus`` (OMP_PROC_BIND, a NUMA
    binding) is left alone. Threads that end meanwhile do not count.
    """
    wanted = frozenset(cpus)
    changed = 0
    threads = 0
    wrong: set[int] = set()
    for _ in range(_PASSES):
        threads = 0
        changed_now = 0
        for tid in _threads(pid):
            mask = _mask(tid)
            if mask is None:
                continue
            threads += 1
            if mask == wanted or (strays_only and mask <= wanted):
                wrong.discard(tid)
                continue
            if tid in wrong:
                continue
            changed_now += 1
            if not _set(tid, wanted):
                wrong.add(tid)
        changed += changed_now
        if changed_now == 0:
            break
    return PinResult(threads=threads, changed=changed, wrong=len(wrong))


def _threads(pid: int) -> Iterator[int]:
    for process in process_tree(pid):
        try:
            names = [entry.name for entry in Path(f"/proc/{process}/task").iterdir()]
        except OSError:
            continue
        yield from map(int, names)


def process_tree(pid: int) -> list[int]:
    """``pid`` and all its descendants, parents first."""
    found = [pid]
    for parent in found:
        children = _children(parent)
        if children is None:
            # A kernel without CONFIG_PROC_CHILDREN: the slower walk over all processes.
            try:
                return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
            except psutil.Error:
                return found
        found.extend(children)
    return found


def _children(pid: int) -> list[int] | None:
    found: list[int] = []
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return found
    for thread in threads:
        try:
            found.extend(map(int, (thread / "children").read_text().split()))
        except FileNotFoundError:
            if thread.exists():
                return None
        except OSError:
            continue
    return found


def _mask(tid: int) -> frozenset[int] | None:
    try:
        return frozenset(os.sched_getaffinity(tid))
    except OSError:
        return None


def _set(tid: int, wanted: frozenset[int]) -> bool:
    try:
        os.sched_setaffinity(tid, wanted)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    mask = _mask(tid)
    return mask is None or mask == wanted
