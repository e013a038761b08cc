"""What synergyctl shows: the last round, the leases and the queue as JSON values."""

from __future__ import annotations

import pwd
import threading
from collections.abc import Collection, Mapping, Sequence

import slurm_synergy
from slurm_synergy.cluster import Clock
from slurm_synergy.config import Settings
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.core.model import JobPhase, JobStatus, Node, Plan, Reason, Snapshot

__all__ = ["StatusView"]


class StatusView:
    """Answers synergyctl's questions from memory: no question reaches Slurm. Thread-safe."""

    def __init__(
        self, settings: Settings, *, ledger: Ledger, leases: LeaseBook, clock: Clock
    ) -> None:
        self._settings, self._ledger, self._leases = settings, ledger, leases
        self._clock = clock
        self._lock = threading.Lock()
        self._round: tuple[Snapshot, Plan, Mapping[str, float]] | None = None
        self._trouble = ""

    def publish(self, snapshot: Snapshot, plan: Plan, took_s: Mapping[str, float]) -> None:
        """A round has been run; earlier trouble is over."""
        with self._lock:
            self._round, self._trouble = (snapshot, plan, dict(took_s)), ""

    def failed(self, text: str) -> None:
        """The controller cannot do its work just now, in words."""
        with self._lock:
            self._trouble = text

    def reload(self, settings: Settings) -> None:
        """Show these settings from now on."""
        with self._lock:
            self._settings = settings

    def set_draining(self, draining: bool) -> None:
        """Start nothing (True) or go on (False), from the next round on."""
        self._ledger.set_draining(draining)

    def status(self) -> Mapping[str, object]:
        """The controller, its last round, its nodes, as one JSON object."""
        with self._lock:
            last, trouble, settings = self._round, self._trouble, self._settings
        now_s = self._clock.now_s()
        snapshot = last[0] if last else None
        phases = [status.phase for status in snapshot.jobs] if snapshot else []
        return {
            "version": slurm_synergy.__version__,
            "controller": settings.cluster.controller_name,
            "cluster": settings.cluster.name,
            "partition": settings.slurm.partition,
            "draining": self._ledger.draining(),
            "dry_run": settings.scheduling.dry_run,
            "policy": settings.scheduling.policy,
            "mechanism": settings.scheduling.mechanism,
            "enforcement": snapshot.enforcement.value if snapshot else None,
            "trouble": trouble or None,
            "round": snapshot.round if snapshot else None,
            "round_age_s": round(now_s - snapshot.now_s, 1) if snapshot else None,
            "round_took_s": dict(last[2]) if last else None,
            "solver": dict(last[1].solver) if last else {},
            "jobs": {phase.value: phases.count(phase) for phase in JobPhase},
            "leases": len(self._leases.job_ids()),
            "nodes": [_node(node, snapshot) for node in snapshot.nodes] if snapshot else [],
        }

    def jobs(
        self, *, viewer_uid: int, operators: Collection[int]
    ) -> Sequence[Mapping[str, object]]:
        """The jobs of the last round, by id. What came from hints is for owner and operators."""
        with self._lock:
            last = self._round
        if last is None:
            return []
        snapshot, plan, _ = last
        leases, viewer = self._leases.snapshot(), _user_name(viewer_uid)
        return [
            _job(
                status,
                plan.waiting.get(status.job.job_id),
                leases.get(status.job.job_id),
                private=viewer_uid in operators or status.job.user == viewer,
            )
            for status in snapshot.jobs
        ]


def _user_name(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def _node(node: Node, snapshot: Snapshot) -> Mapping[str, object]:
    held = [
        status.lease.placement.on(node.name) for status in snapshot.jobs if status.lease is not None
    ]
    return {
        "node": node.name,
        "gpu_type": node.gpu_type,
        "gpus": node.total.gpus,
        "cpus": node.total.cpus,
        "mem_mib": node.total.mem_mib,
        "usable": node.capacity.gpus > 0,
        "gpus_used": sum(share.gpus for share in held),
        "cpus_used": sum(share.cpus for share in held),
        "mem_mib_used": sum(share.mem_mib for share in held),
    }


def _job(
    status: JobStatus,
    waits: Reason | None,
    lease: Mapping[str, object] | None,
    *,
    private: bool,
) -> Mapping[str, object]:
    job = status.job
    reason = waits or status.blocked
    shown: dict[str, object] = {
        "job_id": job.job_id,
        "name": job.name if private else None,
        "user": job.user,
        "phase": status.phase.value,
        "gpus": job.gpus,
        "nodes": job.nodes,
        "gpu_types": list(job.gpu_types),
        "wrapped": job.wrapped,
        "preemptible": job.preemptible,
        "restarts": status.restarts,
        "submitted_s": job.submitted_s,
        "attained_service_gpu_s": round(status.attained_service_gpu_s, 1),
        "reason": {"code": reason.code.value, "text": reason.text} if reason else None,
        "lease": lease,
    }
    if private:
        shown |= {
            "profile": status.profile.key or None,
            "min_mem_mib_per_node": job.min_mem_mib_per_node,
            "total_samples": job.total_samples,
            "done_samples": status.done_samples,
        }
    return shown
