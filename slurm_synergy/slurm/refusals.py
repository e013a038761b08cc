"""Starts that failed: how long each job is left out of the plan, and what ends that earlier.

A job that can never start would otherwise keep GPUs from others, or even stop running jobs for its
sake, again and again. Each failure doubles the wait, up to an hour. What is kept here can be lost
with the controller: it costs one more try.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from slurm_synergy.core.model import Reason, ReasonCode
from slurm_synergy.slurm.accounting import AccountingFacts
from slurm_synergy.slurm.facts import JobFacts, NodeFacts, PartitionFacts
from slurm_synergy.slurm.limits import Trigger

__all__ = ["Refusals", "Surroundings"]

_LONGEST_WAIT_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a limit may depend on, as of one reading.

    ``ended`` counts the jobs that have ended since the controller began, ``usable`` are the nodes
    on which something may be started. ``partition`` and ``accounting`` are None while nobody asked
    for them.
    """

    ended: int = 0
    usable: frozenset[str] = frozenset()
    partition: PartitionFacts | None = None
    accounting: AccountingFacts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """A start that failed: why, since when, for how long, and in which surroundings."""

    since_s: float
    wait_s: float
    reason: Reason
    trigger: Trigger | None
    around: Surroundings
    shape: tuple[object, ...] = ()
    account: str = ""


class Refusals:
    """One entry per job whose last start failed. Not thread-safe."""

    def __init__(self, backoff_s: float) -> None:
        self._backoff_s = backoff_s
        self._refused: dict[int, _Refusal] = {}
        self._around = Surroundings()
        self._holding: frozenset[int] = frozenset()

    @property
    def watches_partition(self) -> bool:
        """Whether some job waits for a change of the partition."""
        return any(one.trigger is Trigger.PARTITION_CHANGED for one in self._waiting())

    def _waiting(self) -> Iterable[_Refusal]:
        """The refusals of jobs that have not started since."""
        return (one for job_id, one in self._refused.items() if job_id not in self._holding)

    @property
    def accounts(self) -> frozenset[str]:
        """The accounts of jobs that wait for a limit of an account or a QOS; empty for none."""
        return frozenset(
            one.account
            for one in self._waiting()
            if one.trigger is not None and one.trigger.of_accounting
        )

    def see(
        self,
        *,
        holding: Collection[int],
        nodes: Iterable[NodeFacts],
        partition: PartitionFacts | None = None,
        accounting: AccountingFacts | None = None,
    ) -> None:
        """A new reading: the jobs that hold resources, and the nodes.

        The partition and the limits of accounts are those of the last reading when not given;
        where no job waits for them they are forgotten, since they are not looked at then.
        """
        gone = len(self._holding - frozenset(holding))
        self._holding = frozenset(holding)
        before = self._around
        if not self.watches_partition:
            before = replace(before, partition=None)
        if not self.accounts:
            before = replace(before, accounting=None)
        self._around = now = Surroundings(
            ended=before.ended + gone,
            usable=frozenset(node.name for node in nodes if node.usable),
            partition=partition or before.partition,
            accounting=accounting or before.accounting,
        )
        for job_id, one in self._refused.items():
            # First seen after the refusal: from here on a difference is a change.
            around = replace(
                one.around,
                partition=one.around.partition or now.partition,
                accounting=one.around.accounting or now.accounting,
            )
            if around != one.around:
                self._refused[job_id] = replace(one, around=around)

    def add(
        self,
        job_id: int,
        text: str,
        now_s: float,
        *,
        trigger: Trigger | None = None,
        facts: JobFacts | None = None,
    ) -> Reason:
        """A start failed. ``trigger`` and the job's ``facts`` are given for a limit of Slurm's."""
        before = self._refused.get(job_id)
        wait_s = self._backoff_s
        if before is not None:
            wait_s = max(wait_s, min(2 * before.wait_s, _LONGEST_WAIT_S))
        code = ReasonCode.START_REFUSED if trigger is None else ReasonCode.LIMITED
        reason = Reason(code=code, text=text)
        self._refused[job_id] = _Refusal(
            since_s=now_s,
            wait_s=wait_s,
            reason=reason,
            trigger=trigger,
            around=self._around,
            shape=_shape(facts),
            account=(facts.account if facts else None) or "",
        )
        return reason

    def why(self, facts: JobFacts, now_s: float) -> Reason | None:
        """Why the job is not to be planned now, if its last start failed recently."""
        last = self._refused.get(facts.job_id)
        if last is None or now_s >= last.since_s + last.wait_s:
            return None
        # Never sooner than the first wait: in a busy cluster something changes all the time.
        if now_s >= last.since_s + self._backoff_s and self._changed(last, facts):
            return None
        return last.reason

    def _changed(self, last: _Refusal, facts: JobFacts) -> bool:
        now, then = self._around, last.around
        if last.trigger is None or last.trigger is Trigger.TIME_ONLY:
            return False
        if last.shape != _shape(facts):
            return True
        if last.trigger is Trigger.JOB_ENDED:
            return now.ended != then.ended
        if last.trigger is Trigger.NODES_CHANGED:
            return now.usable != then.usable
        if last.trigger.of_accounting:
            return self._eased(last)
        return now.partition != then.partition

    def _eased(self, last: _Refusal) -> bool:
        """Whether the account or QOS of the job has another limit now, or less in use."""
        now, then = self._around, last.around
        if last.trigger is Trigger.USE_OR_LIMIT and now.ended != then.ended:
            return True
        if now.accounting is None or then.accounting is None:
            return False
        if last.trigger is Trigger.LIMIT_CHANGED:
            return now.accounting.differs_from(then.accounting)
        return now.accounting.eased_since(then.accounting)

    def known(self, job_id: int) -> bool:
        """Whether the job's last start failed."""
        return job_id in self._refused

    def drop(self, job_id: int) -> None:
        """The job has run: what failed before that does not count any more."""
        self._refused.pop(job_id, None)

    def keep_only(self, known: Collection[int]) -> None:
        """Forget the jobs that are not in ``known``."""
        self._refused = {job: one for job, one in self._refused.items() if job in known}


def _shape(facts: JobFacts | None) -> tuple[object, ...]:
    """What a person may change about a job to get it past a limit."""
    if facts is None:
        return ()
    return facts.time_limit_s, facts.comment, facts.dependency, facts.account, facts.qos
