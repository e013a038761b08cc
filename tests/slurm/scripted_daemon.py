"""``slurm-synergyd`` with the policy ``scripted``: a file says each job's configuration.

SYNERGY_SCRIPT names a JSON file, read anew in each round: by job name GPU type, GPUs and nodes, and
batch size [local, replicas, accumulation] where there is one. A job that it does not name waits.
SYNERGY_FAULT_AT is as in ``faults/faulty_daemon.py``. Only tests run this.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from slurm_synergy.controller import daemon, wiring
from slurm_synergy.core.elastic import configuration_of
from slurm_synergy.core.model import Configuration, Decision, Grant, Reason, ReasonCode, Snapshot
from slurm_synergy.core.scaling import BatchSize
from slurm_synergy.core.snapshot import held, is_pinned
from slurm_synergy.policies import POLICIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted:
    """Grants what the file says."""

    path: Path
    name: str = "scripted"

    def choose(self, snapshot: Snapshot) -> Decision:
        """See ``Policy``."""
        wanted = json.loads(self.path.read_text(encoding="utf-8"))
        grants: list[Grant] = []
        waiting: dict[int, Reason] = {}
        for status in snapshot.jobs:
            job, now = status.job, held(status)
            if now is not None and is_pinned(status, snapshot):
                kept = configuration_of(now) or job.configuration
                grants.append(Grant(job_id=job.job_id, configuration=kept))
            elif now is None and status.blocked is not None:
                waiting[job.job_id] = status.blocked
            elif job.name in wanted:
                one = _configuration(wanted[job.name])
                grants.append(Grant(job_id=job.job_id, configuration=one))
            else:
                text = "the script does not name it"
                waiting[job.job_id] = Reason(code=ReasonCode.NO_GPUS, text=text)
        return Decision(grants=tuple(grants), waiting=waiting)


def _configuration(said: dict[str, object]) -> Configuration:
    batch = said.pop("batch", None)
    if isinstance(batch, list):
        local, replicas, accumulation = batch
        size = BatchSize(local=local, replicas=replicas, accumulation=accumulation)
        return Configuration(**said, batch=size)  # type: ignore[arg-type]
    return Configuration(**said)  # type: ignore[arg-type]


if __name__ == "__main__":
    scripted = Scripted(path=Path(os.environ["SYNERGY_SCRIPT"]))
    wiring.POLICIES = {**POLICIES, scripted.name: scripted}
    if "SYNERGY_FAULT_AT" in os.environ:
        sys.path.insert(0, str(Path(__file__).resolve().parent / "faults"))
        from faulty_daemon import arm

        arm(os.environ["SYNERGY_FAULT_AT"])
    sys.exit(daemon.main())
