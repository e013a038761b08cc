"""Clusters between two rounds, for benchmarks of decisions: the paper's nodes, random jobs.

Nodes have 8 GPUs, 24 cores and 500 GB, models are the catalogue's in the paper's split of 20 %
image, 70 % language and 10 % speech, GPU counts about those of the Philly log.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.decide import decide
from slurm_synergy.core.model import Job, JobPhase, JobStatus, Lease, Node, Placement, Snapshot
from slurm_synergy.core.resources import Resources
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES

__all__ = [
    "GPUS_PER_NODE",
    "GPU_COUNTS",
    "SPLITS",
    "Rounds",
    "grown",
    "make_job",
    "make_nodes",
    "make_snapshot",
    "submitted_at_once",
]

GPUS_PER_NODE = 8
GPU_COUNTS = (1, 2, 4, 8, 16)
GPU_WEIGHTS = (70, 10, 8, 10, 2)
MODELS = {
    "image": ["alexnet-imagenet", "shufflenet-imagenet", "resnet18-imagenet", "resnet50-imagenet"],
    "language": ["gnmt-wmt16", "transformerxl-wikitext103", "lstm-wikitext2"],
    "speech": ["m5-audio", "deepspeech2-librispeech"],
}
PAPER_SPLIT = (20, 70, 10)
SPLITS = ((20, 70, 10), (50, 0, 50), (30, 60, 10), (33, 33, 34), (100, 0, 0), (0, 100, 0))
ROUND_S = 300.0
HELD_S = 1000.0
ENDED = 0.01
DECIDED = 6
# Jobs come at this many times the rate at which the cluster could serve them.
LOAD = 4.0
# Lengths as in the derived traces: powers of ten of a minute, drawn evenly from one of two ranges.
SHORT, LONG, PART_SHORT = (1.5, 3.0), (3.0, 4.0), 0.8
MEAN_LENGTH_S = 60.0 * 1006.0


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The snapshot of a round, and that of the round before it."""

    earlier: Snapshot
    now: Snapshot


def make_nodes(count: int) -> tuple[Node, ...]:
    """``count`` nodes of the paper's shape."""
    total = Resources(gpus=GPUS_PER_NODE, cpus=24, mem_mib=500_000)
    return tuple(
        Node(name=f"gpu-{number:05d}", gpu_type="v100", total=total, capacity=total)
        for number in range(count)
    )


def make_job(
    job_id: int,
    order: random.Random,
    split: Sequence[int] = PAPER_SPLIT,
    counts: Sequence[int] = GPU_COUNTS,
) -> JobStatus:
    """A pending job of a model drawn by ``split`` (image, language, speech), free to be split."""
    task = order.choices(list(MODELS), weights=split)[0]
    weights = GPU_WEIGHTS[: len(counts)]
    job = Job(
        job_id=job_id,
        user="u",
        submitted_s=float(job_id),
        gpus=order.choices(counts, weights=weights)[0],
        nodes=None,
        total_samples=order.uniform(1e6, 1e9),
    )
    return JobStatus(job=job, profile=CATALOGUE[order.choice(MODELS[task])])


def make_snapshot(nodes: Sequence[Node], jobs: Sequence[JobStatus]) -> Snapshot:
    """The jobs on the nodes, at a time at which all have been submitted."""
    return Snapshot(
        round=1,
        now_s=1e6,
        round_s=ROUND_S,
        nodes=tuple(nodes),
        jobs=tuple(sorted(jobs, key=lambda status: status.job.job_id)),
    )


def started(status: JobStatus, placement: Placement) -> JobStatus:
    """The job as it runs where it was placed."""
    lease = Lease(
        job_id=status.job.job_id,
        generation=1,
        placement=placement,
        expires_s=1e6,
        granted=dict(placement.shares),
    )
    return JobStatus(
        job=status.job,
        profile=status.profile,
        phase=JobPhase.RUNNING,
        lease=lease,
        attained_service_gpu_s=HELD_S * status.job.gpus,
    )


def submitted_at_once(gpus: int, waiting: int, policy: str = "fifo", seed: int = 1) -> Rounds:
    """A cluster of ``gpus`` GPUs that was empty when all its jobs came, with ``waiting`` of them.

    It runs what the policy chose in the round before; since then a hundredth of those jobs have
    ended, and as many have been submitted. Whoever waits has had nothing, whoever runs has had the
    same time: under ``las`` nearly all of them change places.
    """
    order = random.Random(seed)
    nodes = make_nodes(gpus // GPUS_PER_NODE)
    jobs: list[JobStatus] = []
    while sum(status.job.gpus for status in jobs) < gpus:
        jobs.append(make_job(len(jobs) + 1, order))
    jobs += [make_job(len(jobs) + number, order) for number in range(1, waiting + 1)]
    earlier = make_snapshot(nodes, jobs)
    plan = decide(earlier, POLICIES[policy], MECHANISMS["tune"])
    placed = {placement.job_id: placement for placement in plan.placements}
    left: list[JobStatus] = []
    for status in jobs:
        placement = placed.get(status.job.job_id)
        if placement is None:
            left.append(status)
        elif order.random() > ENDED:
            left.append(started(status, placement))
    arrived = max(round(ENDED * len(placed)), 1)
    left += [make_job(len(jobs) + number, order) for number in range(1, arrived + 1)]
    return Rounds(earlier=earlier, now=make_snapshot(nodes, left))


class _Queue:
    """The jobs of an overloaded cluster under ``las``, from its first on."""

    def __init__(self, gpus: int, order: random.Random) -> None:
        self._gpus, self._order = gpus, order
        each = sum(map(int.__mul__, GPU_COUNTS, GPU_WEIGHTS)) / sum(GPU_WEIGHTS)
        self._per_round = LOAD * gpus / each / MEAN_LENGTH_S * ROUND_S
        self._due, self._last_id = 0.0, 0
        self._left_s: dict[int, float] = {}
        self._running: set[int] = set()
        self.jobs: dict[int, JobStatus] = {}
        self._had_gpu_s: dict[int, float] = {}

    def arrive(self) -> None:
        """Jobs are submitted."""
        self._due += self._per_round
        while self._due >= 1.0:
            self._due -= 1.0
            self._last_id += 1
            low, high = SHORT if self._order.random() < PART_SHORT else LONG
            self._left_s[self._last_id] = 60.0 * 10 ** self._order.uniform(low, high)
            self.jobs[self._last_id] = make_job(self._last_id, self._order)
            self._had_gpu_s[self._last_id] = 0.0

    def chosen(self) -> list[int]:
        """Whom ``las`` would run if places did not matter."""
        line = []
        for job_id, status in self.jobs.items():
            had_gpu_s = self._had_gpu_s[job_id]
            if job_id in self._running:
                had_gpu_s = max(had_gpu_s - status.profile.restart_s * status.job.gpus, 0.0)
            line.append((had_gpu_s, job_id))
        line.sort()
        free, found = self._gpus, []
        for _, job_id in line:
            gpus = self.jobs[job_id].job.gpus
            if gpus <= free:
                found.append(job_id)
                free -= gpus
                if not free:
                    break
        return found

    def run(self, chosen: Collection[int]) -> None:
        """A round in which just these run."""
        self._running = set(chosen)
        for job_id in chosen:
            self._left_s[job_id] -= ROUND_S
            self._had_gpu_s[job_id] += ROUND_S * self.jobs[job_id].job.gpus
            if self._left_s[job_id] <= 0.0:
                del self.jobs[job_id], self._left_s[job_id], self._had_gpu_s[job_id]

    def waiting(self) -> int:
        """Jobs that did not run in the last round."""
        return len(self.jobs) - len(self._running & self.jobs.keys())

    def statuses(self, placed: dict[int, Placement]) -> list[JobStatus]:
        """All jobs, those of ``placed`` running there."""
        found = []
        for job_id, status in self.jobs.items():
            placement = placed.get(job_id)
            now = status if placement is None else started(status, placement)
            found.append(replace(now, attained_service_gpu_s=self._had_gpu_s[job_id]))
        return found


def grown(gpus: int, waiting: int, seed: int = 1) -> Rounds:
    """A cluster of ``gpus`` GPUs under ``las`` whose queue has grown to ``waiting`` jobs.

    Jobs have come since it was empty, more than it can serve, and have all been served for a while:
    those that wait have had more than those that run. Only the last few rounds are really decided;
    it is the one of them in which most jobs are displaced.
    """
    queue = _Queue(gpus, random.Random(seed))
    while queue.waiting() < waiting:
        queue.arrive()
        queue.run(queue.chosen())
    nodes, placed = make_nodes(gpus // GPUS_PER_NODE), dict[int, Placement]()
    rounds: list[Rounds] = []
    displaced: list[int] = []
    earlier = None
    for _ in range(DECIDED):
        queue.arrive()
        now = make_snapshot(nodes, queue.statuses(placed))
        plan = decide(now, POLICIES["las"], MECHANISMS["tune"])
        if earlier is not None:
            rounds.append(Rounds(earlier=earlier, now=now))
            displaced.append(len(placed.keys() & plan.waiting.keys()))
        placed = {placement.job_id: placement for placement in plan.placements}
        queue.run(placed)
        earlier = now
    # The first of them places all jobs afresh.
    return rounds[displaced.index(max(displaced[1:]), 1)]
