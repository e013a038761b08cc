"""Profiling leases: for a moment a job has other cores than its lease says, and measures its speed.

A probe takes from a node's free cores only: those in no lease and no floor. It lies over the lease
and is never written down, so that nothing of it outlives the controller, the job or its launcher;
a launcher whose lease runs out falls back to its floor as always.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from slurm_synergy.core.model import Lease, Node

__all__ = ["DataRead", "Measured", "Probe", "Probes", "TaskProfiling", "choose_cores"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a job shall measure: on ``cores`` by node, ``steps`` after ``warmup_steps``.

    ``number`` grows with each probe of any job. It is answered after ``longest_s`` at the latest.
    With a ``batch_size`` the job takes so many samples a step meanwhile (0: what it has). With
    ``read_s`` its data are read for so long by so many ``readers``, and no steps are measured.
    """

    number: int
    warmup_steps: int
    steps: int
    longest_s: float
    batch_size: int = 0
    read_s: float = 0.0
    readers: int = 0
    cores: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRead:
    """A job's data as seen from one of its nodes; zeros for what is not known.

    ``samples`` items of an epoch are ``dataset_mib``; ``storage_mib_s`` is the bandwidth of reads
    that no cache serves. ``in_memory``: there is no storage behind them. ``cached``: the job keeps
    items in a data cache, which takes what its processes leave of its memory. ``how`` says in words
    what was read, or why not.
    """

    dataset_mib: float = 0.0
    samples: int = 0
    storage_mib_s: float = 0.0
    read_mib: float = 0.0
    in_memory: bool = False
    cached: bool = False
    how: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A task's answer to the probe of that number; ``steps`` 0: it could not measure.

    Samples/s are of the whole job. ``wait_share`` (0..1) and the rate without waits are None where
    the program does not tell them. ``data`` comes from one task of a node, where it was asked for.
    """

    probe: int
    steps: int = 0
    samples_per_s: float = 0.0
    wait_share: float | None = None
    busy_samples_per_s: float | None = None
    data: DataRead | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskProfiling:
    """What a launcher that can measure tells with each renewal.

    ``known_probe`` is in force there, ``own_mem_mib`` the most memory that its processes had for
    themselves (0: not known), ``program`` a name for what it runs.
    """

    known_probe: int = 0
    measured: Measured | None = None
    own_mem_mib: int = 0
    program: str = ""


def choose_cores(
    count: int,
    *,
    node: Node,
    own: Collection[int],
    floor: Collection[int],
    free: Collection[int],
) -> tuple[int, ...] | None:
    """``count`` cores for a job that has ``own`` now: its floor first, then own, then free ones.

    Free ones on the sockets of its own come first. Ascending; None when there are not enough.
    """
    mine = set(own) | set(floor)
    if len(mine | set(free)) < count:
        return None
    total = max(1, node.total.cpus)
    sockets = {core * node.sockets // total for core in mine}

    def rank(core: int) -> tuple[bool, bool, bool, int]:
        far = core * node.sockets // total not in sockets
        return core not in floor, core not in own, far, core

    return tuple(sorted(sorted(mine | set(free), key=rank)[:count]))


class Probes:
    """The probes over the leases of a book, whose keeper holds its lock around every call.

    ``node_of`` yields a node of the pool by name, ``leases_on`` the leases on a node, and
    ``reserved_on`` those of its cores that no lease may have.
    """

    def __init__(
        self,
        *,
        node_of: Callable[[str], Node | None],
        leases_on: Callable[[str], Iterable[Lease]],
        reserved_on: Callable[[str], Collection[int]],
    ) -> None:
        self._node_of, self._leases_on, self._reserved_on = node_of, leases_on, reserved_on
        self._probes: dict[int, Probe] = {}

    def of(self, job_id: int) -> Probe | None:
        """The job's probe, unless it has ended or its cores were taken back."""
        return self._probes.get(job_id)

    def begin(self, lease: Lease, probe: Probe, cpus: int) -> Probe | None:
        """Lay ``probe`` with ``cpus`` cores on each node over a lease, in place of one before.

        None when there are not that many cores now; one before stays then.
        """
        cores = {}
        for name in lease.placement.nodes:
            node = self._node_of(name)
            if node is None:
                return None
            taken = self._taken(name, but=lease.job_id)
            chosen = choose_cores(
                cpus,
                node=node,
                own=lease.cores.get(name, ()),
                floor=set(lease.floor.get(name, ())) - taken,
                free=frozenset(range(node.total.cpus)) - taken,
            )
            if chosen is None:
                return None
            cores[name] = chosen
        self._probes[lease.job_id] = replace(probe, cores=cores)
        return self._probes[lease.job_id]

    def end(self, job_id: int) -> bool:
        """The job has the cores of its lease again; False when it had them anyway."""
        return self._probes.pop(job_id, None) is not None

    def free(self, name: str) -> frozenset[int]:
        """Cores of a node that are nobody's: in no lease, no floor, no probe, not reserved."""
        node = self._node_of(name)
        return frozenset(range(node.total.cpus)) - self._taken(name) if node else frozenset()

    def take_back(self, nodes: Iterable[str]) -> set[int]:
        """End probes on ``nodes`` whose cores are somebody else's now; which jobs' they were."""
        if not self._probes:
            return set()
        ended = set()
        for name in nodes:
            for lease in self._leases_on(name):
                probe = self._probes.get(lease.job_id)
                if probe is None:
                    continue
                more = set(probe.cores.get(name, ())) - set(lease.cores.get(name, ()))
                if not more.isdisjoint(self._taken(name, but=lease.job_id)):
                    del self._probes[lease.job_id]
                    ended.add(lease.job_id)
        return ended

    def _taken(self, name: str, but: int | None = None) -> frozenset[int]:
        """Cores of a node that are somebody's, apart from those of job ``but``."""
        taken = set(self._reserved_on(name))
        for lease in self._leases_on(name):
            if lease.job_id == but:
                continue
            taken.update(lease.cores.get(name, ()))
            taken.update(lease.floor.get(name, ()))
            probe = self._probes.get(lease.job_id)
            if probe is not None:
                taken.update(probe.cores.get(name, ()))
        return frozenset(taken)
