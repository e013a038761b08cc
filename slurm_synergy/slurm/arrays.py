"""Job arrays: which members are jobs of their own now, and which may start. Pure.

Slurm keeps the members of an array that were never touched in one record. A member becomes a job
of its own, with an id, once something is done to it. Ten thousand records would make every reading
slow, so only as many members are split off as could run at once; the rest stays in the one record,
which is shown as one waiting job.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slurm_synergy.core.model import Reason, ReasonCode
from slurm_synergy.slurm.facts import Hold, JobFacts
from slurm_synergy.slurm.fields import first_tasks

__all__ = ["ArrayPlan", "plan_arrays"]

_MOST_AT_ONCE = 64
"""Members split off an array in one go, so that one command line stays short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlan:
    """``split``: members to split off, by the array's id; ``waiting``: why jobs must not start."""

    split: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    waiting: Mapping[int, Reason] = field(default_factory=dict)


def plan_arrays(jobs: Iterable[JobFacts], *, pool_gpus: int) -> ArrayPlan:
    """What to split, and which members the ``%limit`` of their array holds back.

    ``pool_gpus`` are all GPUs of the pool: with them no more members could run at once than
    ``pool_gpus`` divided by what one member asks for.
    """
    arrays: dict[int, list[JobFacts]] = {}
    for facts in jobs:
        if facts.array_job_id is not None and not (facts.state.finished and not facts.completing):
            arrays.setdefault(facts.array_job_id, []).append(facts)
    split: dict[int, tuple[int, ...]] = {}
    waiting: dict[int, Reason] = {}
    for array_id, records in sorted(arrays.items()):
        members = sorted(
            (facts for facts in records if not facts.array_pending),
            key=lambda facts: int(facts.array_task_id or 0),
        )
        _hold_back(array_id, members, waiting)
        for rest in records:
            if rest.array_pending:
                waiting[rest.job_id] = _rest(rest)
                tasks = _to_split(rest, members, pool_gpus)
                if tasks:
                    split[array_id] = tasks
    return ArrayPlan(split=split, waiting=waiting)


def _hold_back(array_id: int, members: list[JobFacts], waiting: dict[int, Reason]) -> None:
    """The members that would exceed the limit, the lowest tasks going first."""
    limit = min((facts.array_limit for facts in members if facts.array_limit), default=None)
    if limit is None:
        return
    # A released member counts: it may run at any moment.
    active = sum(not facts.pending or facts.priority != 0 for facts in members)
    may_start = max(0, limit - active)
    for facts in members:
        if facts.pending and facts.priority == 0:
            may_start -= 1
            if may_start < 0:
                text = f"the limit of its array: {limit} members of {array_id} at once"
                waiting[facts.job_id] = Reason(code=ReasonCode.NOT_OURS, text=text)


def _rest(facts: JobFacts) -> Reason:
    tasks = (facts.array_task_id or "").partition("%")[0].strip("[]")
    text = f"members {tasks} of the array wait behind its first ones"
    return Reason(code=ReasonCode.NOT_OURS, text=text)


def _to_split(rest: JobFacts, members: list[JobFacts], pool_gpus: int) -> tuple[int, ...]:
    if rest.held is not Hold.ADMIN:
        # A member is split off in the state of the record: first see to it that this is held.
        return ()
    if rest.dependency and not rest.dependency.startswith("aftercorr"):
        return ()
    room = max(1, pool_gpus // max(1, rest.gpu_total))
    if rest.array_limit:
        room = min(room, rest.array_limit)
    lack = min(room - len(members), _MOST_AT_ONCE)
    return first_tasks(rest.array_task_id or "", lack) if lack > 0 else ()
