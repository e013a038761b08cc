"""What a simulation came to: one line per job, and the summary that scripts read."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_synergy.core.model import Elasticity
from slurm_synergy.simulator.cluster import Running
from slurm_synergy.simulator.engine import Played
from slurm_synergy.simulator.isolated import Isolation

__all__ = [
    "JobResult",
    "job_results",
    "percentile",
    "summarise",
]

_S_PER_H = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """One finished job. Times are seconds of the trace.

    ``run_s`` is the time in which it held GPUs, ``queue_s`` the rest of its ``jct_s``; ``speedup``
    its running speed relative to its GPU-proportional share alone, restarts included; ``ftf`` and
    ``ftf_pooled`` its finish-time fairness (see :func:`summarise`); ``gpu_s`` the GPU seconds that
    it held. ``gpus`` are those that it asked for.
    """

    job_id: int
    model: str
    user: str
    gpus: int
    submitted_s: float
    started_s: float
    completed_s: float
    jct_s: float
    queue_s: float
    run_s: float
    restarts: int
    speedup: float
    ftf: float
    gpu_s: float = 0.0
    ftf_pooled: float = 1.0


def job_results(played: Played, measured: Collection[int] = ()) -> list[JobResult]:
    """Results of the measured jobs (all finished ones when none are named), by id."""
    total_gpus = sum(node.total.gpus for node in played.world.nodes)
    wanted = set(measured)
    isolation = Isolation(played.world.nodes)
    found = [
        _result(one, total_gpus, isolation)
        for one in played.world.finished
        if not wanted or one.job_id in wanted
    ]
    return sorted(found, key=lambda one: one.job_id)


def _result(one: Running, total_gpus: int, isolation: Isolation) -> JobResult:
    assert one.completed_s is not None
    assert one.started_s is not None
    job = one.spec.job
    jct_s = one.completed_s - one.arrived_s
    run_s = one.gpu_s / job.gpus if job.elasticity is Elasticity.RIGID else one.held_s
    ftf, pooled = _fairness(one, jct_s, total_gpus, isolation)
    return JobResult(
        job_id=one.job_id,
        model=one.spec.model,
        user=job.user,
        gpus=job.gpus,
        submitted_s=one.arrived_s,
        started_s=one.started_s,
        completed_s=one.completed_s,
        jct_s=jct_s,
        queue_s=max(jct_s - run_s, 0.0),
        run_s=run_s,
        restarts=one.restarts,
        speedup=one.spec.share_s / run_s if run_s > 0 else 1.0,
        gpu_s=one.gpu_s,
        ftf=ftf,
        ftf_pooled=pooled,
    )


def _fairness(
    one: Running, jct_s: float, total_gpus: int, isolation: Isolation
) -> tuple[float, float]:
    """The job's time over that alone on its even part of the pool, by type and pooled.

    The part is the pool's GPUs over the average number of jobs in the system during its life. With
    fewer GPUs than it asks for, a rigid job gets them in turns; more do not make it faster.
    """
    if jct_s <= 0:
        return 1.0, 1.0
    part, job = total_gpus / max(one.queue_area / jct_s, 1.0), one.spec.job
    if one.spec.training is None:
        ratio = jct_s / (one.spec.share_s * max(1.0, job.gpus / part))
        return ratio, ratio
    rigid = job.elasticity is Elasticity.RIGID
    most = job.gpus if rigid else job.most_gpus
    alone = isolation.alone_s(one.spec.training, part, most, rigid=rigid)
    return alone.ratio(jct_s), alone.pooled(jct_s)


def _fair(ratios: Sequence[float]) -> dict[str, float]:
    return {"worst": max(ratios), "unfair_fraction": sum(one > 1.0 for one in ratios) / len(ratios)}


def percentile(values: Iterable[float], fraction: float) -> float:
    """The element at index floor(fraction × n) of the ascending values (algorithms A)."""
    ordered = sorted(values)
    return ordered[min(math.floor(fraction * len(ordered)), len(ordered) - 1)]


def summarise(
    played: Played, results: Sequence[JobResult], *, policy: str, mechanism: str, wall_s: float
) -> dict[str, Any]:
    """The summary of architecture section 9; utilisations are what leases hold, over time.

    ``ftf`` is Themis' finish-time fairness: JCT over the time on the job's even part of the pool;
    ``unfair_fraction`` the part of jobs above 1. Where GPU types differ it is the average of the
    types' ratios (Sia, equation 6), and ``pooled`` the ratio to the average of the types' times, as
    Sia's artifact has it. Contention counts running and waiting jobs.
    ``floor`` counts shares that jobs were given, and those below the GPU-proportional speed.
    """
    world, usage, floors = played.world, played.world.usage, played.world.floors
    span_s = max(world.now_s - played.began_s, 1e-9)
    totals = [node.total for node in world.nodes]
    jcts = [one.jct_s for one in results]
    count = len(results)
    began_s = min(one.submitted_s for one in results)
    return {
        "policy": policy,
        "mechanism": mechanism,
        "jobs": count,
        "avg_jct_s": sum(jcts) / count,
        "p99_jct_s": percentile(jcts, 0.99),
        "makespan_s": max(one.completed_s for one in results) - began_s,
        "gpu_hours_per_job": sum(one.gpu_s for one in results) / count / _S_PER_H,
        "restarts_per_job": sum(one.restarts for one in results) / count,
        "gpu_util": usage.gpu_s / span_s / sum(total.gpus for total in totals),
        "cpu_util": usage.cpu_s / span_s / sum(total.cpus for total in totals),
        "mem_util": usage.mem_mib_s / span_s / sum(total.mem_mib for total in totals),
        "contention": {"mean": usage.active_s / span_s, "max": usage.most_active},
        "ftf": {
            **_fair([one.ftf for one in results]),
            "pooled": _fair([one.ftf_pooled for one in results]),
        },
        "floor": {"judged": floors.judged, "below": floors.below, "worst": floors.worst},
        "round_ms": {
            "median": percentile(played.round_ms, 0.5),
            "p95": percentile(played.round_ms, 0.95),
        },
        "wall_s": wall_s,
    }
