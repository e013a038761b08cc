"""What Slurm's word for "it does not start" means, and what may change it. Pure.

Slurm says in one word why a released job waits. Most words are a matter of seconds (``Resources``,
``Priority``). Those here are not: a limit of the partition, of an account or of a QOS, a licence, a
node. Such a job is held again at once, since it would keep its GPUs from others in vain, and tried
again when something has changed that the word is about.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

__all__ = ["Obstacle", "Trigger", "obstacle_of"]


class Trigger(Enum):
    """What may remove an obstacle, besides time."""

    JOB_ENDED = "job ended"  # something is given back when a job ends
    USE_OR_LIMIT = "use or limit"  # of an account or a QOS: less is in use, or more is allowed
    LIMIT_CHANGED = "limit changed"  # of an account or a QOS, or the job
    PARTITION_CHANGED = "partition changed"  # or the job itself
    NODES_CHANGED = "nodes changed"
    TIME_ONLY = "time only"  # an administrator's doing that is not seen from here

    @property
    def of_accounting(self) -> bool:
        """Whether it shows in what Slurm tells of accounts and QOS."""
        return self in (Trigger.USE_OR_LIMIT, Trigger.LIMIT_CHANGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Why Slurm does not start a job, in words, and what may change that.

    ``of_size``: a smaller job may be within it; ``of_least``: a larger one.
    """

    reason: str
    text: str
    trigger: Trigger
    of_size: bool = False
    of_least: bool = False


_PLAIN: dict[str, tuple[str, Trigger]] = {
    "PartitionTimeLimit": (
        "its time limit is longer than the partition's MaxTime; shorten it with "
        "scontrol update JobId=ID TimeLimit=TIME",
        Trigger.PARTITION_CHANGED,
    ),
    "PartitionNodeLimit": (
        "it asks for more nodes than the partition's MaxNodes (or fewer than MinNodes)",
        Trigger.PARTITION_CHANGED,
    ),
    "PartitionDown": ("the partition is down", Trigger.PARTITION_CHANGED),
    "PartitionInactive": ("the partition is inactive", Trigger.PARTITION_CHANGED),
    "Licenses": ("its licenses are in use", Trigger.JOB_ENDED),
    "DependencyNeverSatisfied": (
        "the job that it depends on did not end as asked for, so it can never start; cancel it",
        Trigger.TIME_ONLY,
    ),
    "BadConstraints": (
        "no node can satisfy all that it asks for; cancel it and submit it with less",
        Trigger.NODES_CHANGED,
    ),
    "ReservationDeleted": ("its reservation was deleted", Trigger.TIME_ONLY),
    "InvalidAccount": ("its account is not valid any more", Trigger.LIMIT_CHANGED),
    "InvalidQOS": ("its QOS is not valid any more", Trigger.LIMIT_CHANGED),
    "AccountNotAllowed": (
        "its account may not use the partition (AllowAccounts, DenyAccounts)",
        Trigger.PARTITION_CHANGED,
    ),
    "QOSNotAllowed": (
        "its QOS may not be used by this account or in this partition",
        Trigger.LIMIT_CHANGED,
    ),
    "QOSUsageThreshold": ("the QOS's usage threshold is passed", Trigger.USE_OR_LIMIT),
    "AssociationJobLimit": ("the account's limit of jobs is reached", Trigger.USE_OR_LIMIT),
    "AssociationResourceLimit": (
        "the account's limit of resources is reached",
        Trigger.USE_OR_LIMIT,
    ),
    "AssociationTimeLimit": ("the account's limit of time is reached", Trigger.USE_OR_LIMIT),
    "QOSJobLimit": ("the QOS's limit of jobs is reached", Trigger.USE_OR_LIMIT),
    "QOSResourceLimit": ("the QOS's limit of resources is reached", Trigger.USE_OR_LIMIT),
    "QOSTimeLimit": ("the QOS's limit of time is reached", Trigger.USE_OR_LIMIT),
    "NodeDown": ("a node that it needs is down", Trigger.NODES_CHANGED),
}
_NODES = ("ReqNodeNotAvail", "Nodes_required_for_job_are_DOWN", "Nodes required for job are DOWN")
_ACCOUNTING = re.compile(r"(Assoc|QOS)(Grp|Max|Min)([A-Za-z/_]+)")
_PER = {
    "PerJob": "of one job",
    "PerUser": "of all jobs of its user",
    "PerAccount": "of all jobs of its account",
    "PerNode": "on one node",
}
_JOBS = {
    "jobs": "run at once",
    "submitjobs": "be there at once",
    "submitjob": "be there at once",
    "jobspersubmit": "be there at once",
}
# What grows with the GPUs of a job.
_SIZES = ("cpu", "gres", "mem", "memory", "node", "nodes", "billing", "energy")
_WHAT = {
    "cpu": "CPUs",
    "gres": "GPUs",
    "mem": "memory",
    "memory": "memory",
    "node": "nodes",
    "nodes": "nodes",
    "jobs": "jobs",
    "jobspersubmit": "submitted jobs",
    "submitjobs": "submitted jobs",
    "wall": "time",
    "wallduration": "time",
    "billing": "billing units",
    "energy": "energy",
    "license": "licenses",
}


def obstacle_of(reason: str) -> Obstacle | None:
    """The obstacle that a ``Reason=`` names; None for a reason that passes by itself.

    A word of a newer release that looks like one of accounting's limits is understood as such.
    """
    plain = _PLAIN.get(reason)
    if plain is not None:
        return Obstacle(
            reason=reason,
            text=f"{plain[0]} ({reason})",
            trigger=plain[1],
            of_size=reason.endswith("ResourceLimit"),
        )
    if reason.startswith(_NODES):
        text = "a node of its placement cannot be used now"
        return Obstacle(reason=reason, text=f"{text} ({reason})", trigger=Trigger.NODES_CHANGED)
    match = _ACCOUNTING.fullmatch(reason)
    if match is None:
        return None
    scope, kind, rest = match.groups()
    body = rest.removesuffix("Limit").removesuffix("NotSatisfied")
    counted = re.sub("(Run)?Minutes", "", re.sub("|".join(_PER), "", body)).lower()
    return Obstacle(
        reason=reason,
        text=f"{_of_accounting(scope, kind, body, counted)} ({reason})",
        trigger=_lifted(reason),
        of_size=kind != "Min" and counted in _SIZES,
        of_least=kind == "Min" and counted in _SIZES,
    )


def _of_accounting(scope: str, kind: str, body: str, counted: str) -> str:
    """``AssocGrpGRES``, ``QOSMaxCpuPerUserLimit``, ``QOSMinGRES`` and their like, in words."""
    whose = "account" if scope == "Assoc" else "QOS"
    per = next((words for word, words in _PER.items() if word in body), "")
    minutes = "Minutes" in body
    what = _WHAT.get(counted, counted or "use")
    what = f"minutes of {what}" if minutes else what
    if kind == "Max" and counted in _JOBS and "PerJob" not in body:
        whom = "account" if "PerAccount" in body else "user"
        return f"its {whose} lets no more jobs of its {whom} {_JOBS[counted]}"
    if kind == "Grp":
        return f"all jobs of its {whose} together are at the limit of {what}"
    bound, where = ("least", "below") if kind == "Min" else ("most", "beyond")
    return f"its {whose} sets the {bound} {what} {per or 'of one job'}, and it is {where} that"


def _lifted(reason: str) -> Trigger:
    """A limit on one job is not lifted by others ending."""
    alone = "PerJob" in reason or re.match("(Assoc|QOS)Min", reason) is not None
    return Trigger.LIMIT_CHANGED if alone else Trigger.USE_OR_LIMIT
