#!/usr/bin/env python3
"""How long one decision of the rival Pollux takes on the 64 GPUs of the Sia paper.

Cluster and jobs are those of ``sia_decision``, all jobs unlike each other; the decision is one in
the middle of their lives, in which every running job has new statistics of its gradient. Searches
begin with the population of the round before. The paper measured a median of 2.2 s (Sia, SOSP '23,
figure 9); that is the limit, ``AIM_MS`` what keeps a whole table of simulations short.

Times are CPU milliseconds of this process; on a busy machine these are longer as well: ``loop_ms``
is that of a million additions in the same run, about 50 on a quiet machine. Exit status 1 when the
median is above the limit.

    python benchmarks/pollux_search.py --json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import replace
from typing import Any

from sia_decision import GPUS, loop_ms, make_job, make_nodes, make_snapshot, remeasured, started

from slurm_synergy.core.decide import begun, check_plan, decide
from slurm_synergy.core.model import JobStatus
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.policies.pollux import POLLUX

JOBS = (7, 20, 31)
"""Active jobs: the paper's average, a busy hour, and about a job for every two GPUs."""

LIMIT_MS = 2200.0
AIM_MS = 300.0
REFITTED = 0.1
EXIT_MISSED = 1


def measure(jobs: int, rounds: int, generations: int, seed: int) -> dict[str, Any]:
    """``rounds`` decisions in a row, each with what the one before has started."""
    order = random.Random(seed)
    policy = begun(replace(POLLUX, generations=generations, patience=generations))
    lazy = begun(replace(POLLUX, generations=generations))
    statuses: list[JobStatus] = [make_job(at, order) for at in range(1, jobs + 1)]
    took: dict[str, list[float]] = {"full": [], "patient": []}
    worth: dict[str, list[float]] = {"full": [], "patient": []}
    snapshot = make_snapshot(make_nodes(1), statuses)
    for number in range(rounds + 1):
        snapshot = replace(remeasured(snapshot, order, REFITTED), round=number, now_s=60.0 * number)
        for name, one in (("full", policy), ("patient", lazy)):
            began_s = time.process_time()
            plan = decide(snapshot, one, MECHANISMS["proportional"])
            took[name].append((time.process_time() - began_s) * 1e3)
            worth[name].append(float(plan.solver["objective"]))  # type: ignore[arg-type]
            check_plan(snapshot, plan)
        placed = {placement.job_id: placement for placement in plan.placements}
        statuses = [
            started(status, placed[status.job.job_id]) if status.job.job_id in placed else status
            for status in snapshot.jobs
        ]
        snapshot = replace(snapshot, jobs=tuple(statuses))
    return {
        "gpus": GPUS,
        "jobs": jobs,
        # Without the first round, which has no earlier one to begin with.
        "full_ms": round(statistics.median(took["full"][1:]), 1),
        "ms": round(statistics.median(took["patient"][1:]), 1),
        "p95_ms": round(sorted(took["patient"][1:])[int(0.95 * rounds)], 1),
        "worth": round(statistics.mean(worth["patient"]) / statistics.mean(worth["full"]), 4),
    }


def main() -> int:
    """Measure and print; exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12, help="decisions of each size")
    parser.add_argument("--generations", type=int, default=POLLUX.generations)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given = parser.parse_args()
    rows = [measure(jobs, given.rounds, given.generations, given.seed) for jobs in JOBS]
    unit_ms = loop_ms()
    missed = [row["jobs"] for row in rows if row["full_ms"] > LIMIT_MS]
    if given.json:
        print(
            json.dumps({"rows": rows, "loop_ms": unit_ms, "limit_ms": LIMIT_MS, "missed": missed})
        )
    else:
        for row in rows:
            print(
                f"{row['jobs']:3} jobs: {row['ms']:6.1f} ms (p95 {row['p95_ms']:.1f}; all "
                f"{given.generations} generations {row['full_ms']:.1f}, aim {AIM_MS:.0f}, limit "
                f"{LIMIT_MS:.0f}), {row['worth']:.3f} of the fitness of all generations"
            )
        print(f"a million additions: {unit_ms} ms (50 on a quiet machine)")
        for jobs in missed:
            print(f"missed: {jobs} jobs take longer than the paper's search")
    return EXIT_MISSED if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
