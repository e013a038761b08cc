"""Whom a sweep is about, whether there is anything to find out, and what is kept of it: pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from slurm_synergy.cluster import ObservedJob
from slurm_synergy.config import ProfilingSettings
from slurm_synergy.controller.probes import DataRead
from slurm_synergy.controller.profiling_data import data_facts, data_in_words
from slurm_synergy.core.model import Job, JobStatus, Lease, Node, Profile, ProfileOrigin
from slurm_synergy.core.pipeline import cpu_step, fit_to_job, proportional_share
from slurm_synergy.profiler.evidence import Evidence, StoredProfile, evidence_of, merged
from slurm_synergy.profiler.filling import filled
from slurm_synergy.profiler.sweep import SweepResult, SweepSpan

__all__ = [
    "MOST_OF_A_USER",
    "Target",
    "evidence_for",
    "is_anothers_own_key",
    "is_known",
    "is_somebody_elses",
    "kept_profile",
    "least_free",
    "own_key",
    "span_of",
    "target_of",
]

MOST_OF_A_USER = 500
"""Profiles that one user can have in the store."""

_LONGEST_SOURCE = 400  # of what an exported profile may hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The job to be measured, as it was when its sweep began.

    ``key`` is the user's own word if ``key_is_named``. ``mem_mib`` is its share on each node,
    ``least_mem_mib`` the least that its share would be on any node of the pool, ``node_cpus`` the
    cores of its smallest node.
    """

    job_id: int
    incarnation: int
    owner_uid: int
    key: str
    key_is_named: bool
    gpu_type: str
    nodes: tuple[str, ...]
    tasks_per_node: int
    node_cpus: int
    mem_mib: int
    least_mem_mib: int


def target_of(
    seen: ObservedJob,
    lease: Lease,
    nodes: Mapping[str, Node],
    *,
    key: str,
    owner_uid: int,
    incarnation: int,
) -> Target:
    """The target that this job is, with the nodes of its pool by name."""
    shares = [share for _, share in lease.placement.shares]
    return Target(
        job_id=seen.job.job_id,
        incarnation=incarnation,
        owner_uid=owner_uid,
        key=key,
        key_is_named=bool(seen.profile_key),
        gpu_type=lease.placement.gpu_type,
        nodes=lease.placement.nodes,
        tasks_per_node=seen.job.tasks_per_node,
        node_cpus=min(nodes[name].total.cpus for name in lease.placement.nodes),
        mem_mib=min(share.mem_mib for share in shares),
        least_mem_mib=_least_mem_mib(nodes, shares[0].gpus),
    )


def span_of(
    seen: ObservedJob, lease: Lease, held: Iterable[Node], free: Callable[[str], frozenset[int]]
) -> SweepSpan:
    """The core counts that can be tried on the nodes that the job has; ``free`` are a node's."""
    nodes, gpus = tuple(held), lease.placement.shares[0][1].gpus
    status = JobStatus(job=seen.job)
    most = min(len(free(node.name) | set(lease.cores.get(node.name, ()))) for node in nodes)
    threads = max(node.threads_per_core for node in nodes)
    return SweepSpan(
        gpus=gpus,
        most_cpus=max(1, most),
        proportional_cpus=min(proportional_share(status, node, gpus).cpus for node in nodes),
        step=max(cpu_step(seen.job, gpus), threads),
    )


def least_free(held: Iterable[Node], gpus: int, settings: ProfilingSettings) -> int:
    """Free cores to wait for; none where the job's GPUs are all that its nodes have."""
    whole = all(node.total.gpus == gpus for node in held)
    return 0 if whole else settings.min_free_cores


def is_known(found: Profile, job: Job, gpu_type: str, span: SweepSpan) -> bool:
    """Whether a sweep over ``span`` finds out nothing that is not believed already."""
    profile = fit_to_job(found, job)
    if profile.origin is ProfileOrigin.DEFAULT:
        return False  # only how it scales is known
    if profile.origin is not ProfileOrigin.MEASURED:
        return True
    if profile.pipeline is None or gpu_type not in profile.gpu_rate_per_gpu:
        return False
    return profile.confident or span.most_cpus <= profile.measured_cpus


def is_somebody_elses(kept: StoredProfile | None, owner_uid: int) -> bool:
    """Whether what is kept under a key is not for a job of this owner to change."""
    if kept is None:
        return False
    return kept.evidence is None or kept.evidence.owner_uid != owner_uid


def kept_profile(
    target: Target,
    result: SweepResult,
    *,
    own_mem_mib: float,
    before: Profile | None,
    stale: bool,
    data: DataRead | None = None,
) -> Profile:
    """The profile to keep under the target's key, with what ``before`` knows besides.

    ``own_mem_mib`` is what the job's processes were seen to have on one node. ``stale``: what was
    known does not hold any more. Raises ModelError.
    """
    facts = data_facts(
        data,
        own_mem_mib=own_mem_mib,
        share_mib=target.mem_mib,
        least_mib=target.least_mem_mib,
    )
    found = filled(result, key=target.key, gpu_type=target.gpu_type, facts=facts)
    if before is not None and not stale and _saw_more(before, found):
        # Few GPUs hide what the loader can do; theirs is all that is new.
        return merged(replace(before, gpu_rate_per_gpu=found.gpu_rate_per_gpu), before)
    saw_all = result.gpu_bound or result.span.counts[-1] >= target.node_cpus
    return replace(merged(found, before), confident=found.confident and saw_all)


def evidence_for(
    target: Target,
    result: SweepResult,
    measured_s: float,
    data: DataRead | None = None,
    unread: str = "",
) -> Evidence:
    """What is kept beside the profile; ``unread`` is why there is no ``data``."""
    words = data_in_words(data, unread or "its data were not looked at")
    return evidence_of(
        result,
        gpu_type=target.gpu_type,
        measured_s=measured_s,
        owner_uid=target.owner_uid,
        source=f"job {target.job_id} on {', '.join(target.nodes)}"[:_LONGEST_SOURCE],
        data="".join(one for one in words if one.isprintable())[:_LONGEST_SOURCE],
    )


def _saw_more(before: Profile, found: Profile) -> bool:
    """Whether more of the loader was seen before, behind more GPUs or behind none too slow."""
    known = before.origin is ProfileOrigin.MEASURED and before.pipeline is not None
    more = before.measured_gpus == 0 or before.measured_gpus > found.measured_gpus
    return known and before.confident and found.measured_gpus > 0 and more


def own_key(owner_uid: int, program: str) -> str:
    """The key of a program that its user gave none; never that of another user's."""
    return f"u{owner_uid}-{program}" if re.fullmatch(r"[A-Za-z0-9-]{1,64}", program) else ""


def is_anothers_own_key(key: str, uid: int) -> bool:
    """Whether ``key`` is where jobs of another user find their profile without naming any."""
    match = re.fullmatch(r"u(\d+)-run-[A-Za-z0-9-]+", key)
    return match is not None and match[1] != str(uid)


def _least_mem_mib(nodes: Mapping[str, Node], gpus: int) -> int:
    """The least proportional share of memory that the pool has for so many GPUs of a node.

    What a job's data need is not measured here, so it keeps at least that.
    """
    shares = [node.proportional(gpus).mem_mib for node in nodes.values() if node.total.gpus >= gpus]
    return min(shares, default=0)
