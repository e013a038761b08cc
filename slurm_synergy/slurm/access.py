"""Where a job may go: the rules that the site has given the partitions of its GPU types.

The managed partition spans nodes of several GPU types. A site that keeps one of them for some
accounts or groups says so with a partition of that type; its rules are then ours too. Slurm itself
checks them only for the partition that a job is submitted to.
"""

from __future__ import annotations

import contextlib
import grp
import pwd
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from slurm_synergy.core.model import Elasticity, Job
from slurm_synergy.errors import ModelError
from slurm_synergy.slurm.facts import JobFacts, NodeFacts, PartitionFacts

__all__ = ["Access", "admits", "groups_of_user"]


def groups_of_user(user: str) -> frozenset[str]:
    """The names of the groups that a user of this machine is in; none for an unknown user."""
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        return frozenset()
    names = {one.gr_name for one in grp.getgrall() if user in one.gr_mem}
    with contextlib.suppress(KeyError):  # a primary group without a name
        names.add(grp.getgrgid(account.pw_gid).gr_name)
    return frozenset(names)


def admits(
    partition: PartitionFacts, facts: JobFacts, groups_of: Callable[[str], frozenset[str]]
) -> bool:
    """Whether Slurm would take the job's owner and account in that partition."""
    account = (facts.account or "").lower()
    if partition.allow_accounts is not None and account not in partition.allow_accounts:
        return False
    if partition.allow_accounts is None and account in partition.deny_accounts:
        return False
    if partition.allow_groups is None or facts.uid == 0:
        return True
    return bool(groups_of(facts.user) & set(partition.allow_groups))


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The rules. ``by_type`` are the partitions of GPU types that have one, ``max_nodes`` the most
    nodes of a job in the managed partition (None: no bound), ``gpus`` the fewest GPUs on a node of
    each type of the pool."""

    by_type: Mapping[str, PartitionFacts] = field(default_factory=dict)
    max_nodes: int | None = None
    gpus: Mapping[str, int] = field(default_factory=dict)
    groups_of: Callable[[str], frozenset[str]] = groups_of_user

    def on(self, nodes: Iterable[NodeFacts]) -> Access:
        """The rules for a pool of these nodes; the same object while its types stay the same."""
        fewest: dict[str, int] = {}
        for node in nodes:
            for kind, count in node.gpus.items():
                fewest[kind] = min(count, fewest.get(kind, count))
        return self if fewest == self.gpus else replace(self, gpus=fewest)

    def bounded(self, job: Job, facts: JobFacts) -> Job:
        """The job with what is left of its choices. Raises ModelError when nothing is."""
        kinds = self._kinds(job, facts)
        if kinds is not None:
            job = replace(job, gpu_types=kinds)
        if job.elasticity is Elasticity.RIGID:
            return job
        most = self._most_gpus(job)
        if most is None or most >= job.most_gpus:
            return job
        if most < job.least_gpus:
            raise ModelError(
                f"needs at least {job.least_gpus} GPUs, and MaxNodes of the partition allows {most}"
            )
        return replace(job, max_gpus=most)

    def _kinds(self, job: Job, facts: JobFacts) -> tuple[str, ...] | None:
        """The types that are left to the job; None when all are."""
        wished = job.gpu_types or tuple(sorted(self.gpus))
        closed = [
            kind
            for kind in wished
            if kind in self.by_type and not admits(self.by_type[kind], facts, self.groups_of)
        ]
        if not closed:
            return None
        kinds = tuple(kind for kind in wished if kind not in closed)
        if not kinds:
            names = ", ".join(f"{kind} ({self.by_type[kind].name})" for kind in closed)
            raise ModelError(
                f"user {facts.user} with account {facts.account or '(none)'} may not use GPUs of "
                f"type {names}: AllowAccounts, DenyAccounts or AllowGroups of the partition; ask "
                "for another type, or use another account (sbatch -A)"
            )
        return kinds

    def _most_gpus(self, job: Job) -> int | None:
        """The most GPUs that the bounds on nodes leave, wherever the job goes."""
        found = []
        for kind in job.gpu_types or tuple(self.gpus):
            of_type = self.by_type[kind].max_nodes if kind in self.by_type else None
            bounds = [one for one in (self.max_nodes, of_type) if one is not None]
            if bounds and kind in self.gpus:
                found.append(min(bounds) * self.gpus[kind])
        return min(found, default=None)
