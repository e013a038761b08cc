"""How fast a job runs with some CPU and memory, and how much of both it can use.

The model is a chain (Synergy, OSDI '22, section 3.1): a node fetches samples from its cache or from
storage, preprocesses them on its cores, and feeds them to its GPUs; the slowest link decides, and
over several nodes the slowest node decides. A measured table of rates (Synergy's W) may stand in
for the loader's part of the chain.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from slurm_synergy.core.model import (
    Demand,
    Job,
    JobStatus,
    Node,
    PipelineModel,
    Profile,
    SensitivityTable,
)
from slurm_synergy.core.resources import Resources

__all__ = [
    "MEM_STEP_MIB",
    "THETA",
    "cpu_step",
    "demand",
    "fetch_rate",
    "fit_to_job",
    "floor_share",
    "job_rate",
    "loader_rate",
    "min_mem_mib",
    "preprocess_rate",
    "proportional_rate",
    "proportional_share",
    "reference_rate",
    "supply_rate",
    "table_rate",
]

# Profiles are measured to about 3 % (paper, section 3.1): the last 3 % of the plateau are noise,
# and buying them would cost cores that a neighbour can use.
THETA = 0.97

# Memory is handed out in GiB: finer steps would change the leases without changing any rate.
MEM_STEP_MIB = 1024

_MOST_FITTED = 8192
# By profile and process memory. The profile is kept beside, so that its id stays its own.
_fitted: dict[tuple[int, int], tuple[Profile, Profile]] = {}


def preprocess_rate(model: PipelineModel, cpus: int) -> float:
    """Samples/s that ``cpus`` cores of one node preprocess: linear between points, flat after."""
    if cpus <= 0:
        return 0.0
    points = model.preprocess
    first_cpus, first_rate = points[0]
    if cpus <= first_cpus:
        return first_rate * cpus / first_cpus
    for (low, low_rate), (high, high_rate) in pairwise(points):
        if cpus <= high:
            return low_rate + (high_rate - low_rate) * (cpus - low) / (high - low)
    return points[-1][1]


def fetch_rate(model: PipelineModel, mem_mib: int) -> float:
    """Samples/s that one node can read when ``mem_mib`` is its memory; infinite if all is cached.

    A cache that never evicts has a fixed hit ratio of cached/dataset in every epoch, so an epoch
    waits for storage only for the rest (Synergy, section 3.1: MinIO).
    """
    cached_mib = min(max(mem_mib - model.process_mem_mib, 0.0), model.dataset_mib)
    missed_mib = model.dataset_mib - cached_mib
    if missed_mib <= 0:
        return math.inf
    return model.samples_per_epoch * model.storage_mib_s / missed_mib


def loader_rate(model: PipelineModel, cpus: int, mem_mib: int) -> float:
    """Samples/s that one node can deliver to its GPUs with that many cores and memory (MiB)."""
    return min(preprocess_rate(model, cpus), fetch_rate(model, mem_mib))


def table_rate(table: SensitivityTable, gpus: int, cpus: int, mem_mib: int) -> float:
    """Samples/s of ``gpus`` GPUs of one node that share that many cores and that memory (MiB)."""
    column = bisect_right(table.mem_mib_per_gpu, mem_mib / gpus) - 1
    if column < 0 or cpus <= 0:
        return 0.0
    per_gpu, axis = cpus / gpus, table.cpus_per_gpu
    row = bisect_right(axis, per_gpu) - 1
    if row < 0:
        rate = table.rates[0][column] * per_gpu / axis[0]
    elif row + 1 == len(axis):
        rate = table.rates[row][column]
    else:
        low, high = table.rates[row][column], table.rates[row + 1][column]
        rate = low + (high - low) * (per_gpu - axis[row]) / (axis[row + 1] - axis[row])
    return rate * gpus


def supply_rate(profile: Profile, gpus: int, cpus: int, mem_mib: int) -> float:
    """Samples/s that one node of a job with a known profile can deliver to ``gpus`` GPUs.

    The profile has a pipeline model or a table.
    """
    if profile.table is not None:
        return table_rate(profile.table, gpus, cpus, mem_mib)
    assert profile.pipeline is not None
    return loader_rate(profile.pipeline, cpus, mem_mib)


def job_rate(profile: Profile, gpu_type: str, shares: Sequence[Resources]) -> float | None:
    """Samples/s of a whole job with ``shares`` node by node; None when the profile is unknown.

    All ranks advance in step, so the node with the least per GPU decides.
    """
    per_gpu = profile.gpu_rate_per_gpu.get(gpu_type)
    if per_gpu is None or not shares or (profile.pipeline is None and profile.table is None):
        return None
    if len(shares) == 1:  # most jobs; a generator takes three times as long
        (share,) = shares
        gpus = share.gpus
        fed = supply_rate(profile, gpus, share.cpus, share.mem_mib) * gpus / gpus
    else:
        gpus = sum(share.gpus for share in shares)
        fed = min(
            supply_rate(profile, share.gpus, share.cpus, share.mem_mib) * gpus / share.gpus
            for share in shares
        )
    return min(per_gpu * gpus, fed)


def fit_to_job(profile: Profile, job: Job) -> Profile:
    """The profile as far as it holds for this very job.

    With the process memory that the user named, if any; without the pipeline where it was measured
    behind fewer GPUs than the job has on a node, which is as good as not known. Jobs that are alike
    get the same object: what follows from a profile is known by it.
    """
    if profile.pipeline is None:
        return profile
    is_known = not 0 < profile.measured_gpus < job.gpus // (job.nodes or 1)
    mem_mib = job.min_mem_mib_per_node if is_known else -1
    if not mem_mib:
        return profile
    key = (id(profile), mem_mib)
    found = _fitted.get(key)
    if found is None:
        pipeline = replace(profile.pipeline, process_mem_mib=mem_mib) if is_known else None
        if len(_fitted) >= _MOST_FITTED:
            _fitted.clear()
        found = _fitted[key] = (profile, replace(profile, pipeline=pipeline))
    return found[1]


def min_mem_mib(status: JobStatus) -> int:
    """What the job's processes need on each node besides any cache, in MiB (promise P7)."""
    if status.job.min_mem_mib_per_node:
        return status.job.min_mem_mib_per_node
    return status.profile.pipeline.process_mem_mib if status.profile.pipeline else 0


def cpu_step(job: Job, gpus_on_node: int) -> int:
    """Cores come in this many at a time, so that every task of a node gets the same number."""
    return job.tasks_per_node if gpus_on_node % job.tasks_per_node == 0 else 1


def proportional_share(status: JobStatus, node: Node, gpus_on_node: int) -> Resources:
    """The job's GPU-proportional share of ``node``: what promise P1 compares with.

    Cores are rounded down to whole cores per task, but a job gets at least one core; memory is
    raised to what its processes need.
    """
    share = node.proportional(gpus_on_node)
    step = cpu_step(status.job, gpus_on_node)
    return Resources(
        gpus=gpus_on_node,
        cpus=share.cpus // step * step or max(share.cpus, 1),
        mem_mib=max(share.mem_mib, min_mem_mib(status)),
    )


def _knows(status: JobStatus, gpu_type: str) -> bool:
    profile = status.profile
    known = profile.pipeline is not None or profile.table is not None
    return known and gpu_type in profile.gpu_rate_per_gpu and status.job.wrapped


def demand(status: JobStatus, node: Node, gpus_on_node: int) -> Demand:
    """Least CPU and memory on ``node`` for full speed on ``gpus_on_node`` of its GPUs.

    Full speed is the larger of THETA times the plateau (what the whole node would give) and the
    rate at the proportional share. An unknown profile, or a job that cannot follow a lease,
    demands its proportional share.
    """
    return _demand(status, node, gpus_on_node, proportional_share(status, node, gpus_on_node))


def _demand(status: JobStatus, node: Node, gpus_on_node: int, share: Resources) -> Demand:
    if not _knows(status, node.gpu_type):
        return Demand(cpus=share.cpus, mem_mib=share.mem_mib)
    step = cpu_step(status.job, gpus_on_node)
    most_cpus = max(node.total.cpus // step * step, share.cpus)
    most_mem_mib = max(node.total.mem_mib, share.mem_mib)
    top = Resources(gpus=gpus_on_node, cpus=most_cpus, mem_mib=most_mem_mib)
    plateau = job_rate(status.profile, node.gpu_type, (top,)) or 0.0
    floor = job_rate(status.profile, node.gpu_type, (share,)) or 0.0
    target = max(THETA * plateau, floor)
    cpus, mem_mib = _for_rate(status, target, top, step)
    error = status.profile.rate_error
    if not status.profile.confident:
        cpus, mem_mib = max(cpus, share.cpus), max(mem_mib, share.mem_mib)
    elif error and (cpus < share.cpus or mem_mib < share.mem_mib):
        # Of its share nothing is spared that it needs if it is faster than believed.
        faster = _for_rate(status, target * (1 + error), top, step)
        cpus = max(cpus, min(faster[0], share.cpus))
        mem_mib = max(mem_mib, min(faster[1], share.mem_mib))
    return Demand(cpus=cpus, mem_mib=mem_mib)


def _for_rate(status: JobStatus, target: float, top: Resources, step: int) -> tuple[int, int]:
    """Least cores and MiB for ``target`` samples/s: at most ``top``, cores in whole steps."""
    steps = range(step, top.cpus, step)
    at = bisect_left(steps, target, key=_rate_by_cores(status.profile, top.gpus, top.mem_mib))
    cpus = steps[at] if at < len(steps) else top.cpus
    most = Resources(gpus=top.gpus, cpus=cpus, mem_mib=top.mem_mib)
    return cpus, _least_mem_mib(status, target, most)


def _rate_by_cores(profile: Profile, gpus: int, mem_mib: int) -> Callable[[int], float]:
    """Samples/s over cores when memory is no concern, on one node of a known profile."""
    pipeline, table = profile.pipeline, profile.table
    if table is not None:
        return lambda cpus: table_rate(table, gpus, cpus, mem_mib)
    assert pipeline is not None
    return lambda cpus: preprocess_rate(pipeline, cpus)


def _least_mem_mib(status: JobStatus, target: float, most: Resources) -> int:
    """Least memory (MiB) at which ``target`` samples/s are reached with the cores of ``most``."""
    if status.profile.table is not None:
        return _least_column_mib(status, status.profile.table, target, most)
    assert status.profile.pipeline is not None
    return _least_cache_mib(status, status.profile.pipeline, target, most.mem_mib)


def _least_column_mib(
    status: JobStatus, table: SensitivityTable, target: float, most: Resources
) -> int:
    for column_mib in table.mem_mib_per_gpu:
        mem_mib = max(column_mib * most.gpus, min_mem_mib(status))
        if mem_mib >= most.mem_mib:
            break
        if table_rate(table, most.gpus, most.cpus, mem_mib) >= target:
            return mem_mib
    return most.mem_mib


def _least_cache_mib(status: JobStatus, model: PipelineModel, target: float, most_mib: int) -> int:
    """Least memory (MiB, whole GiB) at which ``target`` samples/s can be fetched."""
    need_mib = min_mem_mib(status)
    if fetch_rate(model, need_mib) >= target:
        return min(max(_round_up(need_mib), need_mib), most_mib)
    missed_mib = model.samples_per_epoch * model.storage_mib_s / target
    mem_mib = _round_up(model.process_mem_mib + model.dataset_mib - missed_mib)
    while mem_mib < most_mib and fetch_rate(model, mem_mib) < target:
        mem_mib += MEM_STEP_MIB  # the closed form may be one rounding error short
    return min(max(mem_mib, need_mib), most_mib)


def _round_up(mem_mib: float) -> int:
    return math.ceil(mem_mib / MEM_STEP_MIB) * MEM_STEP_MIB


def floor_share(status: JobStatus, node: Node, gpus_on_node: int) -> Resources:
    """Least resources on ``node`` that keep promises P1 and P7.

    The smaller of demand and proportional share in each component: since the loader is a minimum
    of a CPU term and a memory term, this still reaches the proportional rate (algorithms B.8). A
    table need not be such a minimum; where it is not, the floor is the whole share.
    """
    share = proportional_share(status, node, gpus_on_node)
    wish = _demand(status, node, gpus_on_node, share)
    least = Resources(
        gpus=gpus_on_node,
        cpus=min(wish.cpus, share.cpus),
        mem_mib=max(min(wish.mem_mib, share.mem_mib), min_mem_mib(status)),
    )
    if status.profile.table is None or not _knows(status, node.gpu_type):
        return least
    rates = [job_rate(status.profile, node.gpu_type, (one,)) or 0.0 for one in (least, share)]
    return least if rates[0] >= rates[1] else share


def proportional_rate(status: JobStatus, shares: Sequence[tuple[Node, int]]) -> float | None:
    """Samples/s of the job with its proportional share on these (node, GPUs); None if unknown."""
    gpu_type = shares[0][0].gpu_type
    return job_rate(
        status.profile,
        gpu_type,
        [proportional_share(status, node, gpus) for node, gpus in shares],
    )


def reference_rate(status: JobStatus, nodes: Sequence[Node]) -> float | None:
    """Best rate (samples/s) of the job at a proportional share on any allowed kind of node.

    The same whether the job runs or waits, so an order made from it does not change by starting
    a job. A job that may be split is taken as filling whole nodes.
    """
    best: float | None = None
    seen: set[tuple[str, Resources]] = set()
    for node in nodes:
        kind = (node.gpu_type, node.total)
        if kind in seen or (status.job.gpu_types and node.gpu_type not in status.job.gpu_types):
            continue
        seen.add(kind)
        parts = _even_split(status.job, node)
        rate = proportional_rate(status, [(node, gpus) for gpus in parts]) if parts else None
        if rate is not None and (best is None or rate > best):
            best = rate
    return best


def _even_split(job: Job, node: Node) -> list[int]:
    """GPUs per node on nodes like ``node``; empty when the job's shape does not fit them."""
    if job.nodes is not None:
        per_node = job.gpus // job.nodes
        return [per_node] * job.nodes if per_node <= node.total.gpus else []
    whole, rest = divmod(job.gpus, node.total.gpus)
    return [node.total.gpus] * whole + ([rest] if rest else [])
