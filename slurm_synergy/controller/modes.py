"""From one mode to another on a live cluster: what the old one did is undone first.

Acting leaves holds, requests, leases and a reservation behind, advising a section in comments. The
mode in force is in the ledger, so it does not matter whether the settings changed by a reload or
over a restart, nor whether the controller died on the way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from slurm_synergy.cluster import Action, Foresight, Observation, Outcome, Resize, Together
from slurm_synergy.config import Mode
from slurm_synergy.controller.loop import LiveCluster
from slurm_synergy.core.model import JobPhase, JobStatus, Reason, ReasonCode

__all__ = ["Changeover", "ModeMemory", "under_way"]

_LOG = logging.getLogger(__name__)

_UNDER_WAY = (JobPhase.STARTING, JobPhase.ENDING)
_NAMED = 5


class ModeMemory(Protocol):
    """Where the mode in force is remembered."""

    def mode(self) -> str:
        """The mode that was last in force; empty when none ever was."""
        ...

    def set_mode(self, mode: str) -> None:
        """Remember it, durably."""
        ...


class Changeover:
    """``LiveCluster`` that leaves the mode ``before`` and then is ``after``.

    Until then ``leaving`` is driven: what was begun is followed to its end, nothing new is begun.
    As soon as ``waits_for`` names nothing any more ``undo`` is called; when that worked ``mode``
    is in force. An error of ``undo`` is the turn's error: it is tried again.
    """

    def __init__(
        self,
        *,
        mode: Mode,
        memory: ModeMemory,
        leaving: LiveCluster,
        after: LiveCluster,
        waits_for: Callable[[Observation], str],
        undo: Callable[[], str],
    ) -> None:
        self._mode, self._memory = mode, memory
        self._leaving, self._after = leaving, after
        self._waits_for, self._undo = waits_for, undo
        self._left, self._told = False, ""

    @property
    def left(self) -> bool:
        """Whether the old mode is left for good."""
        return self._left

    def tick(self) -> Observation:
        """See ``LiveCluster``."""
        if self._left:
            return self._after.tick()
        observation = self._leaving.tick()
        waits_for = self._waits_for(observation)
        if waits_for:
            text = f"leaving mode {self._memory.mode()} for {self._mode.value}: {waits_for} first"
            if text != self._told:
                _LOG.info("%s", text)
            self._told = text
            return observation
        _LOG.info("mode %s: %s", self._mode.value, self._undo())
        self._memory.set_mode(self._mode.value)
        self._left = True
        self._after.prepare()
        return self._after.tick()

    def prepare(self) -> None:
        """See ``LiveCluster``. The old mode prepares nothing any more."""
        if self._left:
            self._after.prepare()

    def observe(self) -> Observation:
        """See ``Cluster``."""
        return self._after.observe() if self._left else self._leaving.observe()

    def foresee(self, actions: Sequence[Action], statuses: Mapping[int, JobStatus]) -> None:
        """See ``Foresight``."""
        if self._left and isinstance(self._after, Foresight):
            self._after.foresee(actions, statuses)

    def resize_all(
        self, resizes: Sequence[Resize], statuses: Mapping[int, JobStatus]
    ) -> tuple[Outcome, ...]:
        """See ``Together``; one by one where the new mode has no such thing."""
        if self._left and isinstance(self._after, Together):
            return self._after.resize_all(resizes, statuses)
        return tuple(self.apply(action, statuses[action.job_id]) for action in resizes)

    def apply(self, action: Action, status: JobStatus) -> Outcome:
        """See ``Cluster``. Nothing new is begun before the old mode is left."""
        if self._left:
            return self._after.apply(action, status)
        text = f"the mode changes to {self._mode.value}: nothing new is begun"
        return Outcome(
            action=action, done=False, reason=Reason(code=ReasonCode.ONLY_SHOWN, text=text)
        )


def under_way(observation: Observation, stopping: Collection[int]) -> str:
    """What acting began and has not ended yet: starts, stops and requeues; empty for nothing."""
    found = {seen.job.job_id: seen.phase.value for seen in observation.jobs}
    busy = [
        f"job {job_id} ({phase if job_id not in stopping else 'stopping'})"
        for job_id, phase in sorted(found.items())
        if job_id in stopping or JobPhase(phase) in _UNDER_WAY
    ]
    more = f" and {len(busy) - _NAMED} more" if len(busy) > _NAMED else ""
    return ", ".join(busy[:_NAMED]) + more
