"""Slurm's words for the state of a job, of every release, as a base state and flags.

Text has one word, JSON from 23.02 on a list of them. Several words name no base state but what is
happening to the job just now; ``squeue(1)`` says what they mean. A word of a newer release gives
``JobState.UNKNOWN``: a job in a state that we do not know is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from slurm_synergy.slurm.facts import Hold, JobState

__all__ = ["hold_of", "state_of"]

_IMPLIED = {
    # Nodes are allocated: they boot, or processes are held up for a moment.
    "CONFIGURING": JobState.RUNNING,
    "POWER_UP_NODE": JobState.RUNNING,
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STOPPED": JobState.RUNNING,
    # The processes of a run are being ended; the resources are not free yet.
    "REQUEUED": JobState.COMPLETING,
    "STAGE_OUT": JobState.COMPLETING,
    "RESV_DEL_HOLD": JobState.PENDING,
}


def state_of(words: Sequence[str]) -> tuple[JobState, frozenset[str]]:
    """The base state that ``words`` tell, and the other words as flags.

    Several words read as text has them in one: a job that is being ended is ``COMPLETING``
    whatever comes after it, one that waits after a special exit is ``SPECIAL_EXIT``.
    """
    known = [word for word in words if word in JobState.__members__]
    told = next((word for word in ("COMPLETING", "SPECIAL_EXIT") if word in known), None)
    if told or known:
        base = JobState[told or known[0]]
    else:
        implied = [_IMPLIED[word] for word in words if word in _IMPLIED]
        base = implied[0] if implied else JobState.UNKNOWN
    return base, frozenset(word for word in words if word not in (base.name, "PENDING"))


def hold_of(priority: int, reason: str) -> Hold:
    """Who holds a job of that priority and reason."""
    if priority:
        return Hold.NONE
    # One task of a held array can read "JobHeldUser,JobHeldAdmin".
    return Hold.ADMIN if "JobHeldAdmin" in reason else Hold.USER
