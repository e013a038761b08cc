#!/usr/bin/env python3
"""How long one decision takes, over five sizes of cluster; and how good TUNE is beside OPT
(``quality.py``).

A decision is ``decide(snapshot, policy, mechanism)``: who runs, where, with which cores and memory.
The cluster is as it is between two rounds: nearly full, a hundredth of its jobs have just ended,
and more jobs wait than run anew. Nodes are those of the paper (8 GPUs, 24 cores, 500 GB), models
the catalogue's in the paper's split of 20 % image, 70 % language and 10 % speech, GPU counts about
those of the Philly log. Times are medians in ms; growth is the slope of log time over log GPUs, 1
being linear. All mechanisms take turns on the same snapshots in the same run. What jobs of a
profile need on a kind of node is computed once per process, as in a daemon; nothing else is taken
over from one decision to the next. A full search for cyclic garbage, which rounds put off until
they have decided, is told apart.

    python benchmarks/decision.py --json
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.decide import check_plan, decide, uncollected
from slurm_synergy.core.model import (
    Job,
    JobPhase,
    JobStatus,
    Lease,
    Node,
    Placement,
    Snapshot,
)
from slurm_synergy.core.resources import Resources
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES

SIZES = (128, 512, 2048, 8192, 16_384)
LIMITS_MS = {128: 5.0, 16_384: 300.0}
WAITING_AT_MOST = 10_000
EXIT_TOO_SLOW = 1
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
HELD_S = 1000.0
ENDED = 0.01
QUALITY_SEEDS = 2


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
        round_s=300.0,
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


def between_rounds(gpus: int, waiting: int, policy: str = "fifo", seed: int = 1) -> Snapshot:
    """A cluster of ``gpus`` GPUs at a round of its life with ``waiting`` jobs in the queue.

    It runs what the policy chose in the round before; since then a hundredth of those jobs have
    ended, and as many have been submitted.
    """
    order = random.Random(seed)
    nodes = make_nodes(gpus // GPUS_PER_NODE)
    jobs: list[JobStatus] = []
    while sum(status.job.gpus for status in jobs) < gpus:
        jobs.append(make_job(len(jobs) + 1, order))
    jobs += [make_job(len(jobs) + number, order) for number in range(1, waiting + 1)]
    plan = decide(make_snapshot(nodes, jobs), POLICIES[policy], MECHANISMS["tune"])
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
    return make_snapshot(nodes, left)


def timed_ms(snapshot: Snapshot, policy: str, mechanism: str) -> tuple[float, float]:
    """Milliseconds of one decision, on a snapshot that nobody has looked at before.

    And of the search for cyclic garbage that a round puts off until it has decided.
    """
    snapshot = make_snapshot(snapshot.nodes, snapshot.jobs)
    gc.collect()
    with uncollected():
        began_s = time.perf_counter()
        plan = decide(snapshot, POLICIES[policy], MECHANISMS[mechanism])
        decided_s = time.perf_counter()
    assert plan.placements
    collecting_s = time.perf_counter()
    gc.collect()
    return (decided_s - began_s) * 1e3, (time.perf_counter() - collecting_s) * 1e3


def time_sizes(policy: str, runs: int, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """Median times (ms) per size for TUNE and for proportional, taking turns, and the growth."""
    rows: list[dict[str, Any]] = []
    medians_ms: list[float] = []
    for gpus in sizes:
        waiting = WAITING_AT_MOST * gpus // max(SIZES)
        snapshot = between_rounds(gpus, waiting, policy)
        check_plan(snapshot, decide(snapshot, POLICIES[policy], MECHANISMS["tune"]))
        times: dict[str, list[float]] = {"tune": [], "proportional": []}
        collected_ms: list[float] = []
        for _ in range(runs):
            for mechanism, took_ms in times.items():
                decided_ms, after_ms = timed_ms(snapshot, policy, mechanism)
                took_ms.append(decided_ms)
                collected_ms.append(after_ms)
        tune_ms = statistics.median(times["tune"])
        base_ms = statistics.median(times["proportional"])
        medians_ms.append(tune_ms)
        rows.append(
            {
                "gpus": gpus,
                "running": sum(status.lease is not None for status in snapshot.jobs),
                "waiting": sum(status.lease is None for status in snapshot.jobs),
                "tune_ms": round(tune_ms, 2),
                "tune_best_ms": round(min(times["tune"]), 2),
                "proportional_ms": round(base_ms, 2),
                "ratio": round(tune_ms / base_ms, 2),
                "collection_ms": round(statistics.median(collected_ms), 2),
                "limit_ms": LIMITS_MS.get(gpus),
            }
        )
    slope = statistics.linear_regression(
        [math.log(gpus) for gpus in sizes], [math.log(took_ms) for took_ms in medians_ms]
    ).slope
    return {"policy": policy, "sizes": rows, "growth_exponent": round(slope, 3)}


def main() -> int:
    """Measure and print; status 1 when a decision takes longer than its limit."""
    parser = argparse.ArgumentParser(description="Speed and quality of decisions.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="fifo")
    parser.add_argument("--no-opt", action="store_true", help="leave the comparison with OPT out")
    options = parser.parse_args()
    result: dict[str, Any] = {"speed": time_sizes(options.policy, options.runs)}
    quality = None if options.no_opt else importlib.import_module("quality")
    if quality is not None:
        result["quality"] = [
            quality.compare(split, counts, 128, options.runs, QUALITY_SEEDS)
            for split in SPLITS
            for counts in ((1,), GPU_COUNTS)
        ]
    if options.json:
        print(json.dumps(result))
    else:
        print_tables(result)
        if quality is not None:
            quality.print_rows(result["quality"])
    slow = [
        row
        for row in result["speed"]["sizes"]
        if row["limit_ms"] is not None and row["tune_ms"] >= row["limit_ms"]
    ]
    return EXIT_TOO_SLOW if slow else 0


def print_tables(result: dict[str, Any]) -> None:
    """The same for people."""
    for row in result["speed"]["sizes"]:
        limit = f" (limit {row['limit_ms']:g})" if row["limit_ms"] else ""
        print(
            f"{row['gpus']:6} GPUs, {row['running']} running, {row['waiting']} waiting: "
            f"{row['tune_ms']} ms{limit}, {row['ratio']} times proportional; best "
            f"{row['tune_best_ms']} ms; garbage collection afterwards {row['collection_ms']} ms"
        )
    print(f"growth exponent {result['speed']['growth_exponent']}")


if __name__ == "__main__":
    raise SystemExit(main())
