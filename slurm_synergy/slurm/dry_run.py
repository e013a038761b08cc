"""Live Slurm that is only looked at: what a round would do is said, and not done."""

from __future__ import annotations

import logging

from slurm_synergy.cluster import Action, Hold, Observation, Outcome, Renew, Resize, Start, Stop
from slurm_synergy.core.model import JobStatus, Placement, Reason, ReasonCode
from slurm_synergy.core.wording import counted
from slurm_synergy.slurm.cluster import SlurmCluster

__all__ = ["DryRun", "in_words"]

_LOG = logging.getLogger(__name__)


def in_words(action: Action) -> str:
    """An action as a sentence for people."""
    match action:
        case Start():
            return f"start job {action.job_id} on {_shares(action.placement)}"
        case Resize():
            return f"resize job {action.job_id} to {_shares(action.placement)}"
        case Stop():
            return f"stop job {action.job_id} ({action.reason.code.value}: {action.reason.text})"
        case Hold():
            return f"hold job {action.job_id}"
        case Renew():
            return f"leave job {action.job_id} as it is"
    return f"{type(action).__name__.lower()} job {action.job_id}"


def _shares(placement: Placement) -> str:
    return ", ".join(
        f"{node} ({counted(share.gpus, 'GPU')}, {counted(share.cpus, 'CPU')}, {share.mem_mib} MiB)"
        for node, share in placement.shares
    )


class DryRun:
    """``Cluster`` that reads through ``cluster`` and changes nothing.

    ``word`` begins what is said ("dry run", "observe", "advise"). What would be done with a job is
    said when it changes: a round repeats what was not done in the one before.
    """

    def __init__(self, cluster: SlurmCluster, word: str = "dry run") -> None:
        self._cluster, self._word = cluster, word
        self._said = ""
        self._said_of: dict[int, str] = {}

    def tick(self) -> Observation:
        """Read Slurm; nothing is followed."""
        observation = self._cluster.look()
        known = {seen.job.job_id for seen in observation.jobs}
        self._said_of = {job: said for job, said in self._said_of.items() if job in known}
        return observation

    def prepare(self) -> None:
        """Read which nodes the reservation could cover, and say what would be done about it."""
        self._cluster.forget_gone()
        self._cluster.prepare(read_only=True)
        keeper = self._cluster.reservation
        wanted = keeper.intention if keeper else ""
        if wanted and wanted != self._said:
            _LOG.info("%s: would %s", self._word, wanted)
        self._said = wanted

    def observe(self) -> Observation:
        """See ``Cluster``."""
        return self._cluster.observe()

    def apply(self, action: Action, status: JobStatus) -> Outcome:
        """See ``Cluster``. Never done."""
        said = in_words(action)
        if said != self._said_of.get(action.job_id):
            self._said_of[action.job_id] = said
            level = logging.DEBUG if isinstance(action, Renew) else logging.INFO
            _LOG.log(level, "%s: would %s", self._word, said)
        return Outcome(
            action=action,
            done=False,
            reason=Reason(
                code=ReasonCode.ONLY_SHOWN, text=f"{self._word}: nothing is changed in Slurm"
            ),
        )
