"""Sizes of elastic jobs that Slurm does not start because of a limit of an account or a QOS.

A policy that chooses the GPUs of a job knows no such limits. What Slurm has refused of a job is
not offered to it again until the limit that was in the way leaves room for it, while fewer GPUs
are (or more, where a least size was in the way): so a job comes to what it is allowed in a few
tries. Taking a running job's GPUs from it for a
try costs a restart, so a ceiling is lifted only where the numbers that Slurm shows say that it
would do now, and each time it comes back it stays for twice as long, up to an hour. A job to which
no size is left is tried on the smallest after that time anyhow. What is kept here can be lost with
the controller: it costs one more try.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from slurm_synergy.core.model import Ceiling, Placement, Reason, ReasonCode
from slurm_synergy.slurm.accounting import AccountingFacts, Asker
from slurm_synergy.slurm.facts import JobFacts
from slurm_synergy.slurm.limits import Obstacle, Trigger

__all__ = ["Ceilings"]

_LOG = logging.getLogger(__name__)

_LONGEST_WAIT_S = 3600.0

_Size = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refused:
    """A size that was refused: by what, since when, for how long; None once it may be offered.

    ``limits`` are those that were in the way and ``held`` the GPUs that the job had when they were
    first seen after that, None before.
    """

    obstacle: Obstacle
    text: str
    since_s: float
    wait_s: float
    asker: Asker
    comment: str
    limits: AccountingFacts | None = None
    held: int = 0
    lifted: bool = False

    def waited(self, now_s: float) -> bool:
        """Whether its time is over."""
        return now_s >= self.since_s + self.wait_s


class Ceilings:
    """By job and size what was refused. Not thread-safe."""

    def __init__(self, backoff_s: float) -> None:
        self._backoff_s = backoff_s
        self._refused: dict[int, dict[_Size, _Refused]] = {}
        self._told: dict[int, tuple[Ceiling, ...]] = {}
        self._stuck: set[int] = set()

    @property
    def accounts(self) -> frozenset[str]:
        """The accounts whose limits matter to some ceiling; empty for none."""
        return frozenset(
            one.asker.account
            for sizes in self._refused.values()
            for one in sizes.values()
            if not one.lifted
        )

    def of(self, job_id: int) -> tuple[Ceiling, ...]:
        """What the job is not to be offered: the same object until that changes."""
        return self._told.get(job_id, ())

    def add(
        self, facts: JobFacts, placement: Placement, obstacle: Obstacle, text: str, now_s: float
    ) -> bool:
        """The job was not started as placed because of a limit on its size, ``text`` in words.

        False: that size was not to be offered anyhow, by a policy that chooses sizes.
        """
        self._stuck.discard(facts.job_id)
        sizes = self._refused.setdefault(facts.job_id, {})
        size = placement.gpu_type, placement.gpus
        before = sizes.get(size)
        sizes[size] = _Refused(
            obstacle=obstacle,
            text=text,
            since_s=now_s,
            wait_s=min(2 * before.wait_s, _LONGEST_WAIT_S) if before else self._backoff_s,
            asker=Asker(uid=facts.uid, account=facts.account or "", qos=facts.qos or ""),
            comment=facts.comment,
        )
        self._tell(facts.job_id)
        return before is None or before.lifted

    def see(
        self, jobs: Mapping[int, JobFacts], accounting: AccountingFacts | None, now_s: float
    ) -> None:
        """A new reading. ``accounting`` None: nobody has looked at the limits this time."""
        for job_id in self._refused.keys() & jobs.keys():
            facts, sizes = jobs[job_id], self._refused[job_id]
            held = sum(len(part.gpu_ids) for part in facts.allocation) if facts.running else 0
            newest = self._newest(job_id) if job_id in self._stuck else None
            for size, one in sizes.items():
                if one.lifted:
                    continue
                is_last = one is newest
                if one.limits is None and accounting is not None:
                    one = sizes[size] = replace(one, limits=accounting, held=held)
                why = _eased(one, size, facts, held, accounting, now_s)
                if is_last and one.waited(now_s):
                    why = "no other is left"
                if why:
                    sizes[size] = replace(one, lifted=True)
                    _LOG.info("job %d: %d GPUs of type %s may do now: %s", job_id, *size[::-1], why)
            self._tell(job_id)

    def why(self, job_id: int) -> Reason | None:
        """Why the job waits, when no size is left to it; None when nothing is refused."""
        self._stuck.add(job_id)
        last = self._newest(job_id)
        return None if last is None else Reason(code=ReasonCode.LIMITED, text=last.text)

    def keep_only(self, known: Collection[int]) -> None:
        """Forget the jobs that are not in ``known``."""
        self._stuck = {job_id for job_id in self._stuck if job_id in known}
        for job_id in self._refused.keys() - known:
            del self._refused[job_id]
            self._told.pop(job_id, None)

    def _newest(self, job_id: int) -> _Refused | None:
        """What was refused last of what is not to be offered."""
        there = [one for one in self._refused.get(job_id, {}).values() if not one.lifted]
        return max(there, key=lambda one: one.since_s, default=None)

    def _tell(self, job_id: int) -> None:
        """Of each type the smallest size that is too large, and the largest that is too small."""
        found: dict[tuple[str, bool], Ceiling] = {}
        for (kind, gpus), one in self._refused[job_id].items():
            few = one.obstacle.of_least
            known = found.get((kind, few))
            if one.lifted or (known is not None and (gpus < known.refused) is few):
                continue
            found[kind, few] = Ceiling(gpu_type=kind, refused=gpus, text=one.text, too_few=few)
        told = tuple(found[key] for key in sorted(found))
        if told != self.of(job_id):
            self._told[job_id] = told


def _eased(
    one: _Refused,
    size: _Size,
    facts: JobFacts,
    held: int,
    now: AccountingFacts | None,
    now_s: float,
) -> str:
    """Why that size may do now, or that nothing says that it would not; empty if it would not."""
    asker = Asker(uid=facts.uid, account=facts.account or "", qos=facts.qos or "")
    if (asker, facts.comment) != (one.asker, one.comment):
        return "it was changed"
    if one.limits is None:
        return "the limits cannot be read" if one.waited(now_s) else ""
    if now is None:
        return ""
    if now.differs_from(one.limits):
        return "a limit was changed"
    if one.obstacle.trigger is Trigger.LIMIT_CHANGED or not one.waited(now_s):
        return ""
    if "GRES" not in one.obstacle.reason:
        return "less is in use" if now.eased_since(one.limits) else ""
    kind, gpus = size
    then, of_qos = one.limits.gpus_left(one.asker, kind), one.obstacle.reason.startswith("QOS")
    tight = [
        bound
        for bound, left in then.items()
        if left + one.held < gpus and of_qos is (bound[0] == "")
    ]
    left = now.gpus_left(one.asker, kind)
    if not tight:
        return "no limit is in the way"
    room = [bound for bound in tight if left.get(bound, gpus) + held >= gpus]
    return f"{' '.join(room[0]).strip()} has room" if room else ""
