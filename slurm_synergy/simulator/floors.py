"""Whether a job is ever slower than with its GPU-proportional share: promise P1, by the truth.

The controller checks its plans by what it believes. Here each share that a job was given is judged
by how fast the job really is with it, and would be with its proportional share of the same GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slurm_synergy.core.elastic import as_shaped
from slurm_synergy.core.model import Elasticity, JobStatus, Node, Placement, Profile
from slurm_synergy.core.pipeline import proportional_share
from slurm_synergy.simulator.truth import SimulatedJob, true_rate

__all__ = ["Floors"]

_EQUAL = 1 - 1e-9
_MOST_KNOWN = 50_000


class Floors:
    """What was judged so far.

    ``judged`` counts the shares given to jobs whose speed depends on cores or memory: each start
    and each change in place is one, for however many rounds it was kept. ``below`` counts those of
    them with which the job was slower than with its proportional share, ``worst`` is the least
    ratio of both speeds, None where nothing was judged. Nodes of one ``kind_of`` are alike.
    """

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes = {node.name: node for node in nodes}
        hardware = [(node.gpu_type, node.total) for node in nodes]
        self.kind_of = {node.name: hardware.index((node.gpu_type, node.total)) for node in nodes}
        # By job and where it is: its speed there with its proportional share. Rigid jobs of one
        # truth agree, which is kept so that its id stays its own.
        self._known: dict[object, tuple[Profile, float]] = {}
        self.judged = 0
        self.below = 0
        self.worst: float | None = None

    def judge(self, one: SimulatedJob, placement: Placement, rate: float | None = None) -> None:
        """Take in a share that a job was given, and its true samples/s if they are known."""
        self.count(self.ratio(one, placement, rate))

    def ratio(
        self, one: SimulatedJob, placement: Placement, rate: float | None = None
    ) -> float | None:
        """The job's speed over that with its proportional share; None if there is none to judge."""
        if one.truth.pipeline is None and one.truth.table is None:
            return None
        least = self._least(one, placement)
        if least <= 0:
            return None
        return (true_rate(one, placement) if rate is None else rate) / least

    def count(self, ratio: float | None) -> None:
        """Take in a share that was given, by its ``ratio``."""
        if ratio is None:
            return
        self.judged += 1
        self.below += int(ratio < _EQUAL)  # a rate may be of numpy, and JSON knows no such numbers
        self.worst = ratio if self.worst is None else min(self.worst, ratio)

    def _least(self, one: SimulatedJob, placement: Placement) -> float:
        shares, job = placement.shares, one.job
        where = tuple([(self.kind_of[name], share.gpus) for name, share in shares])
        who: object = job.job_id
        if job.elasticity is Elasticity.RIGID:
            who = (id(one.truth), job.min_mem_mib_per_node, job.tasks_per_node)
        key = (who, where, placement.batch)
        found = self._known.get(key)
        if found is None:
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()
            there = JobStatus(job=as_shaped(one.job, placement), profile=one.truth)
            even = tuple(
                (name, proportional_share(there, self._nodes[name], share.gpus))
                for name, share in shares
            )
            found = one.truth, true_rate(one, replace(placement, shares=even))
            self._known[key] = found
        return found[1]
