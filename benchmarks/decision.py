#!/usr/bin/env python3
"""How long one decision takes, over five sizes of cluster; and how good TUNE is beside OPT
(``quality.py``).

A decision is ``decide(snapshot, policy, mechanism)``: who runs, where, with which cores and memory.
The cluster is as it is between two rounds: nearly full, a hundredth of its jobs have just ended,
and more jobs wait than run anew (``queues.py``). Nodes are those of the paper (8 GPUs, 24 cores,
500 GB). Times are medians of CPU time in ms (a decision is made by one thread, and waits for
nothing); growth is the slope of log time over log GPUs, 1 being linear.
All mechanisms take turns on the same snapshots in the same run. What jobs of a profile need on a
kind of node is computed once per process, as in a daemon; nothing else is taken over from one
decision to the next. ``lasting_ms`` is the time where, as in a daemon too, the round takes over
from the one before what follows from nodes that are the same. A full search for cyclic garbage,
which rounds put off until they have decided, is told apart. ``loop_ms`` is the median of a loop
of plain Python that is timed before each decision, by which runs on a machine whose clock drifts
can be compared.

Under ``las`` two queues are decided on. ``sizes`` are clusters whose queue has grown, as that of
any cluster has that has run for a while: whoever waits has had more than those that run, and new
jobs displace a few of them. ``at_once`` are clusters that were empty when all jobs came: whoever
waits has had nothing, whoever runs has had as much as the others, and nearly all change places.

    python benchmarks/decision.py --policy las --json
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

from queues import GPU_COUNTS, SPLITS, Rounds, grown, make_snapshot, submitted_at_once

from slurm_synergy.core.decide import check_plan, decide, uncollected
from slurm_synergy.core.snapshot import inherit
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies import POLICIES

SIZES = (128, 512, 2048, 8192, 16_384)
LIMITS_MS = {128: 5.0, 16_384: 300.0}
WAITING_AT_MOST = 10_000
EXIT_TOO_SLOW = 1
QUALITY_SEEDS = 2


def timed_ms(
    rounds: Rounds, policy: str, mechanism: str, *, lasting: bool = False
) -> tuple[float, float]:
    """CPU milliseconds of one decision, on a snapshot that nobody has looked at before.

    And of the search for cyclic garbage that a round puts off until it has decided. ``lasting``
    tells that the round before was decided by the same process, as all but its first are.
    """
    now = make_snapshot(rounds.now.nodes, rounds.now.jobs)
    if lasting:
        earlier = make_snapshot(rounds.earlier.nodes, rounds.earlier.jobs)
        decide(earlier, POLICIES[policy], MECHANISMS[mechanism])
        inherit(now, earlier)
    gc.collect()
    with uncollected():
        began_s = time.process_time()
        plan = decide(now, POLICIES[policy], MECHANISMS[mechanism])
        decided_s = time.process_time()
    assert plan.placements
    collecting_s = time.process_time()
    gc.collect()
    return (decided_s - began_s) * 1e3, (time.process_time() - collecting_s) * 1e3


def loop_ms() -> float:
    """CPU milliseconds of a million additions: how fast this machine is just now."""
    began_s, total = time.process_time(), 0
    for number in range(1_000_000):
        total += number
    return (time.process_time() - began_s) * 1e3


def time_size(gpus: int, rounds: Rounds, policy: str, runs: int) -> dict[str, Any]:
    """Median times (ms) for TUNE and for proportional, taking turns."""
    before = {one.job.job_id for one in rounds.now.jobs if one.lease is not None}
    plan = decide(rounds.now, POLICIES[policy], MECHANISMS["tune"])
    check_plan(rounds.now, plan)
    times: dict[str, list[float]] = {"tune": [], "lasting": [], "proportional": []}
    collected_ms: list[float] = []
    clock_ms: list[float] = []
    for _ in range(runs):
        for name, took_ms in times.items():
            clock_ms.append(loop_ms())
            mechanism = "tune" if name == "lasting" else name
            decided_ms, after_ms = timed_ms(rounds, policy, mechanism, lasting=name == "lasting")
            took_ms.append(decided_ms)
            collected_ms.append(after_ms)
    medians = {name: statistics.median(took_ms) for name, took_ms in times.items()}
    return {
        "gpus": gpus,
        "running": len(before),
        "waiting": len(rounds.now.jobs) - len(before),
        "displaced": len(before & plan.waiting.keys()),
        "tune_ms": round(medians["tune"], 2),
        "tune_best_ms": round(min(times["tune"]), 2),
        "lasting_ms": round(medians["lasting"], 2),
        "lasting_best_ms": round(min(times["lasting"]), 2),
        "proportional_ms": round(medians["proportional"], 2),
        "ratio": round(medians["tune"] / medians["proportional"], 2),
        "collection_ms": round(statistics.median(collected_ms), 2),
        "loop_ms": round(statistics.median(clock_ms), 1),
        "limit_ms": LIMITS_MS.get(gpus),
    }


def time_sizes(policy: str, runs: int, sizes: Sequence[int] = SIZES) -> dict[str, Any]:
    """The times per size, and how they grow."""
    queues = {"sizes": "grown", "at_once": "at once"} if policy == "las" else {"sizes": "at once"}
    found: dict[str, Any] = {"policy": policy}
    for name, queue in queues.items():
        rows = []
        for gpus in sizes if name == "sizes" else LIMITS_MS:
            waiting = WAITING_AT_MOST * gpus // max(SIZES)
            made = grown(gpus, waiting) if queue == "grown" else None
            rounds = made or submitted_at_once(gpus, waiting, policy)
            rows.append(time_size(gpus, rounds, policy, runs))
        found[name] = rows
    medians_ms = [row["tune_ms"] for row in found["sizes"]]
    slope = statistics.linear_regression(
        [math.log(gpus) for gpus in sizes], [math.log(took_ms) for took_ms in medians_ms]
    ).slope
    return {**found, "growth_exponent": round(slope, 3)}


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
    for row in (*result["speed"]["sizes"], *result["speed"].get("at_once", ())):
        limit = f" (limit {row['limit_ms']:g})" if row["limit_ms"] else ""
        print(
            f"{row['gpus']:6} GPUs, {row['running']} running, {row['waiting']} waiting: "
            f"{row['tune_ms']} ms{limit}, {row['ratio']} times proportional; best "
            f"{row['tune_best_ms']} ms, after a round before {row['lasting_ms']} ms; "
            f"a loop {row['loop_ms']} ms; {row['displaced']} displaced; garbage collection "
            f"afterwards {row['collection_ms']} ms"
        )
    print(f"growth exponent {result['speed']['growth_exponent']}")


if __name__ == "__main__":
    raise SystemExit(main())
