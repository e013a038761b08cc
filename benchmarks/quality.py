#!/usr/bin/env python3
"""How good TUNE is beside OPT, and how much quicker; part of ``benchmarks/decision.py``.

For each split of the paper, with single-GPU jobs and with mixed sizes, several random job sets fill
an empty cluster of the paper's nodes. Compared is the sum of GPUs times rate over proportional rate

* with the *paper's bound*: the allocation program (equations 1 to 5) for the pool as one machine;
* with *our OPT's bound*: the same, but a job that takes whole nodes has them to itself. No
  placement that keeps a job on the fewest nodes exceeds it.

The paper's program has a binary per job and cell of the grid, 24 core counts times 10 and a few
amounts of memory. It is solved so once per case, to be timed as a yardstick ("plain"), and with the
jobs that agree taken together (the same program without its symmetry) for its bound on every set.
Both are solved by HiGHS in the child process that OPT uses. Times are CPU time, that of the solver
included, of whole decisions (policy and mechanism) and of whole solutions, in the same run.

    python benchmarks/quality.py --seeds 8 --json
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import resource
import statistics
import time
from collections.abc import Sequence
from typing import Any

from queues import GPU_COUNTS, GPUS_PER_NODE, SPLITS, make_job, make_nodes, make_snapshot

from slurm_synergy.core.decide import check_plan, decide
from slurm_synergy.core.model import JobStatus, Node, Plan, Snapshot
from slurm_synergy.core.pipeline import demand, floor_share, job_rate, proportional_rate
from slurm_synergy.core.resources import Resources
from slurm_synergy.mechanisms import MECHANISMS
from slurm_synergy.milp import Constraint, Problem, Solution, Variable, solve
from slurm_synergy.policies import POLICIES

__all__ = ["compare"]

MEM_UNIT_MIB = 50_000
SOLVER_LIMIT_S = 120.0
GAP = 1e-4
NEAR = 0.95
EXIT_TOO_FAR = 1


def make_jobs(
    split: Sequence[int], counts: Sequence[int], gpus: int, seed: int
) -> tuple[Snapshot, list[JobStatus]]:
    """Random jobs for an empty cluster, and those that FIFO grants."""
    order = random.Random(seed)
    jobs: list[JobStatus] = []
    while sum(status.job.gpus for status in jobs) < gpus:
        jobs.append(make_job(len(jobs) + 1, order, split, counts))
    snapshot = make_snapshot(make_nodes(gpus // GPUS_PER_NODE), jobs)
    granted = {grant.job_id for grant in POLICIES["fifo"].choose(snapshot).grants}
    return snapshot, [status for status in jobs if status.job.job_id in granted]


def gain(snapshot: Snapshot, plan: Plan) -> tuple[float, float]:
    """Sum of GPUs times rate over proportional rate, and the least of the ratios."""
    statuses = {status.job.job_id: status for status in snapshot.jobs}
    total, least = 0.0, math.inf
    for placement in plan.placements:
        status = statuses[placement.job_id]
        rate = job_rate(status.profile, placement.gpu_type, [one for _, one in placement.shares])
        parts = [(snapshot.node(name), share.gpus) for name, share in placement.shares]
        base = proportional_rate(status, parts)
        ratio = rate / base if rate and base else 1.0
        total += placement.gpus * ratio
        least = min(least, ratio)
    return total, least


def cells(status: JobStatus, node: Node, gpus: int) -> list[tuple[int, int, float]]:
    """The whole grid of a job on one node: cores, MiB, rate relative to the proportional one."""
    share, wish, floor = (
        node.proportional(gpus),
        demand(status, node, gpus),
        floor_share(status, node, gpus),
    )
    memories = {*range(MEM_UNIT_MIB, node.total.mem_mib + 1, MEM_UNIT_MIB)}
    memories |= {share.mem_mib, wish.mem_mib, floor.mem_mib}
    base = job_rate(status.profile, node.gpu_type, (share,))
    assert base
    found = []
    for cpus in range(1, node.total.cpus + 1):
        for mem_mib in sorted(memories):
            there = (Resources(gpus=gpus, cpus=cpus, mem_mib=mem_mib),)
            rate = job_rate(status.profile, node.gpu_type, there) or 0.0
            found.append((cpus, mem_mib, rate / base))
    return found


def papers_program(nodes: Sequence[Node], groups: Sequence[tuple[JobStatus, int]]) -> Problem:
    """Equations 1 to 5 for groups of equal jobs; with one job per group, as the paper has it."""
    variables: list[Variable] = []
    constraints: list[Constraint] = []
    cores: list[tuple[int, float]] = []
    memory: list[tuple[int, float]] = []
    for status, count in groups:
        each = min(status.job.gpus, GPUS_PER_NODE)
        parts = status.job.gpus / each
        first = len(variables)
        grid = cells(status, nodes[0], each)
        for cpus, mem_mib, rate in grid:
            cores.append((len(variables), cpus * parts))
            memory.append((len(variables), mem_mib * parts))
            # Equation 5 of one job; for several it is that none takes a cell below its share.
            most = count if count == 1 or rate >= 1 - 1e-9 else 0
            variables.append(Variable(gain=rate * status.job.gpus, most=most))
        numbers = range(first, len(variables))
        once = tuple((number, 1.0) for number in numbers)
        fair = tuple((number, -rate) for number, (_, _, rate) in zip(numbers, grid, strict=True))
        constraints.append(Constraint(terms=once, limit=count, equal=True))
        constraints.append(Constraint(terms=fair, limit=-count * (1 - 1e-9)))
    limit_cores = sum(node.capacity.cpus for node in nodes)
    limit_mib = sum(node.capacity.mem_mib for node in nodes)
    constraints.append(Constraint(terms=tuple(cores), limit=limit_cores))
    constraints.append(Constraint(terms=tuple(memory), limit=limit_mib))
    return Problem(variables=tuple(variables), constraints=tuple(constraints))


def papers_bound(snapshot: Snapshot, jobs: Sequence[JobStatus], *, plain: bool) -> Solution:
    """The paper's program, job by job when ``plain``, else with equal jobs taken together."""
    groups: dict[object, tuple[JobStatus, int]] = {}
    for status in jobs:
        key = status.job.job_id if plain else (status.profile.key, status.job.gpus)
        groups[key] = (status, groups.get(key, (status, 0))[1] + 1)
    problem = papers_program(snapshot.nodes, list(groups.values()))
    return solve(problem, limit_s=SOLVER_LIMIT_S, gap=GAP)


def one_set(split: Sequence[int], counts: Sequence[int], gpus: int, seed: int) -> dict[str, float]:
    """One random set of jobs: what the mechanisms make of it, as parts of the bounds."""
    snapshot, jobs = make_jobs(split, counts, gpus, seed)
    plans = {
        name: decide(snapshot, POLICIES["fifo"], MECHANISMS[name])
        for name in ("proportional", "tune", "opt")
    }
    for plan in plans.values():
        check_plan(snapshot, plan)
    gains = {name: gain(snapshot, plan) for name, plan in plans.items()}
    # Where no job has a choice there is nothing to solve, and all plans are equal.
    solved = plans["opt"].solver["bound"]
    ours = float(solved) if isinstance(solved, float) else gains["opt"][0]
    papers = papers_bound(snapshot, jobs, plain=False).bound
    assert papers is not None, "the solver found no bound in time"
    return {
        "tune": gains["tune"][0] / ours,
        "tune_of_papers": gains["tune"][0] / papers,
        "ours_of_papers": ours / papers,
        "opt_placed": gains["opt"][0] / ours,
        "proportional": gains["proportional"][0] / ours,
        "worst_job": gains["tune"][1],
    }


def cpu_s() -> float:
    """CPU seconds of this process and of the children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def decision_ms(snapshot: Snapshot, mechanism: str) -> float:
    """CPU time of one decision on a snapshot that nobody has looked at before."""
    snapshot = make_snapshot(snapshot.nodes, snapshot.jobs)
    gc.collect()
    began_s = cpu_s()
    decide(snapshot, POLICIES["fifo"], MECHANISMS[mechanism])
    return (cpu_s() - began_s) * 1e3


def compare(
    split: Sequence[int], counts: Sequence[int], gpus: int, runs: int, seeds: int
) -> dict[str, Any]:
    """One case: the least over ``seeds`` job sets, and times on the first of them."""
    sets = [one_set(split, counts, gpus, seed) for seed in range(seeds)]
    snapshot, jobs = make_jobs(split, counts, gpus, 0)
    tune_ms = statistics.median(decision_ms(snapshot, "tune") for _ in range(runs))
    opt_ms = statistics.median(decision_ms(snapshot, "opt") for _ in range(2))
    began_s = cpu_s()
    plain = papers_bound(snapshot, jobs, plain=True)
    plain_ms = (cpu_s() - began_s) * 1e3
    least = {key: round(min(one[key] for one in sets), 4) for key in sets[0]}
    return {
        "split": list(split),
        "gpus_per_job": "1" if len(counts) == 1 else "mixed",
        "seeds": seeds,
        "tune_of_bound": least["tune"],
        "tune_of_papers_bound": least["tune_of_papers"],
        "bound_of_papers_bound": least["ours_of_papers"],
        "opt_placed_of_bound": least["opt_placed"],
        "proportional_of_bound": least["proportional"],
        "tune_worst_job": least["worst_job"],
        "tune_ms": round(tune_ms, 2),
        "opt_ms": round(opt_ms, 1),
        "plain_ms": round(plain_ms, 1),
        "plain_status": plain.status,
        "opt_over_tune": round(opt_ms / tune_ms, 1),
        "plain_over_tune": round(plain_ms / tune_ms, 1),
    }


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """The same for people."""
    for row in rows:
        print(
            f"split {row['split']}, {row['gpus_per_job']} GPUs, least of {row['seeds']} sets: "
            f"TUNE {row['tune_of_bound']:.1%}, proportional {row['proportional_of_bound']:.1%} "
            f"of our OPT's bound, which is {row['bound_of_papers_bound']:.1%} of the paper's; TUNE "
            f"{row['tune_of_papers_bound']:.1%} of the paper's; worst job {row['tune_worst_job']}; "
            f"{row['tune_ms']} ms, our OPT takes {row['opt_over_tune']}, the plain program "
            f"{row['plain_over_tune']} times as long ({row['plain_status']})"
        )


def main() -> int:
    """Measure and print; status 1 when TUNE is further than 5 % from our OPT's bound."""
    parser = argparse.ArgumentParser(description="TUNE beside OPT.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--seeds", type=int, default=3, help="job sets per case")
    options = parser.parse_args()
    rows = [
        compare(split, counts, 128, options.runs, options.seeds)
        for split in SPLITS
        for counts in ((1,), GPU_COUNTS)
    ]
    if options.json:
        print(json.dumps({"quality": rows}))
    else:
        print_rows(rows)
    far = [row for row in rows if row["tune_of_bound"] < NEAR or row["tune_worst_job"] < 1 - 1e-9]
    return EXIT_TOO_FAR if far else 0


if __name__ == "__main__":
    raise SystemExit(main())
