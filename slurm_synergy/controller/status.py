"""What synergyctl shows: the queue and the leases as they are, the last round, as JSON values.

Jobs and nodes are those of the last reading of Slurm, merged with the leases and the records of
this very moment, so that what a round has just started or told to stop is shown as such.
"""

from __future__ import annotations

import pwd
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import slurm_synergy
from slurm_synergy.cluster import Clock, Observation, ObservedJob
from slurm_synergy.config import Settings
from slurm_synergy.controller.codec import encode
from slurm_synergy.controller.explaining import explained
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.controller.policy_inputs import missing_inputs
from slurm_synergy.controller.profile_shelf import ProfileShelf
from slurm_synergy.core.catalogue import CATALOGUE
from slurm_synergy.core.model import JobPhase, JobStatus, Node, Plan, Profile, Reason, Snapshot
from slurm_synergy.core.resources import Resources
from slurm_synergy.core.snapshot import status_of
from slurm_synergy.errors import ModelError, UnknownJobError
from slurm_synergy.round import build_snapshot

__all__ = ["StatusView"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Now:
    """The queue at this moment; what Slurm gave the jobs and the profile keys they named, by id."""

    snapshot: Snapshot
    observed_s: float
    profile_keys: Mapping[int, str]
    allocated: Mapping[int, Sequence[tuple[str, Resources]]]


class StatusView:
    """Answers synergyctl's questions from what is known: none reaches Slurm. Thread-safe."""

    def __init__(
        self, settings: Settings, *, ledger: Ledger, leases: LeaseBook, clock: Clock
    ) -> None:
        self._settings, self._ledger, self._leases = settings, ledger, leases
        self._clock = clock
        self._lock = threading.Lock()
        self._round: tuple[Snapshot, Plan, Mapping[str, float]] | None = None
        self._observed: tuple[Observation, float] | None = None
        self._trouble, self._cluster_name = "", settings.cluster.name
        self.shelf = ProfileShelf(ledger, CATALOGUE.get)
        """The store of profiles."""
        self.slow_because: Callable[[], str] = str
        """Asks why Slurm is read less often than settings say; empty when it is not."""
        self.enforced_because: Callable[[], str] = str
        """Asks why the enforcement is what it is; empty before Slurm was read."""
        self.profiling: Callable[[int], Mapping[str, object] | None] = lambda job_id: None
        """Asks how far a job's measurement is; None while it is not measured."""
        self.learning: Callable[[int], Mapping[str, object] | None] = lambda job_id: None
        """Asks what an elastic job told of its speed; None when it told nothing."""

    def observed(self, observation: Observation) -> None:
        """Slurm has been read."""
        with self._lock:
            self._observed = (observation, self._clock.now_s())

    def named(self, cluster_name: str) -> None:
        """What Slurm calls the cluster; a name in the settings goes before it."""
        with self._lock:
            self._cluster_name = self._settings.cluster.name or cluster_name

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
            cluster_name = self._cluster_name
        now, now_s = self._now(), self._clock.now_s()
        snapshot, current = last[0] if last else None, now.snapshot if now else None
        phases = [status.phase for status in current.jobs] if current else []
        return {
            "version": slurm_synergy.__version__,
            "controller": settings.cluster.controller_name,
            "cluster": cluster_name,
            "partition": settings.slurm.partition,
            "draining": self._ledger.draining(),
            "dry_run": settings.scheduling.dry_run,
            "mode": self._ledger.mode() or settings.mode.value,
            "policy": settings.scheduling.policy,
            "mechanism": settings.scheduling.mechanism,
            "enforcement": current.enforcement.value if current else None,
            "enforcement_reason": self.enforced_because() or None,
            "trouble": trouble or None,
            "slow": self.slow_because() or None,
            "observed_age_s": round(now_s - now.observed_s, 1) if now else None,
            "round": snapshot.round if snapshot else None,
            "round_age_s": round(now_s - snapshot.now_s, 1) if snapshot else None,
            "round_took_s": dict(last[2]) if last else None,
            "solver": dict(last[1].solver) if last else {},
            "missing_inputs": encode(
                missing_inputs(settings.scheduling.policy, current) if current else ()
            ),
            "jobs": {phase.value: phases.count(phase) for phase in JobPhase},
            "leases": len(self._leases.job_ids()),
            "nodes": self._nodes(current, settings) if current else [],
        }

    def _nodes(self, current: Snapshot, settings: Settings) -> list[Mapping[str, object]]:
        return [
            {**_node(node, current), "helper": self._helper(node, settings)}
            for node in current.nodes
        ]

    def _helper(self, node: Node, settings: Settings) -> Mapping[str, object] | None:
        """When the node's helper was last heard; None where the settings say that none runs."""
        if not settings.pool.node_helpers:
            return None
        age_s = self._leases.helpers.age_s(node.name)
        return {
            "heard_s": None if age_s is None else round(age_s, 1),
            "silent": self._leases.helpers.silent(node.name),
            "needed": node.fixed_shares,
        }

    def explain(
        self, job: str, *, viewer_uid: int, operators: Collection[int]
    ) -> Mapping[str, object]:
        """Why the job waits or has what it has, by the last round.

        Everybody may ask about every job; what follows from hints is for owner and operators.
        Raises UnknownJobError when that round does not know the job.
        """
        record, now, viewer = self._ledger.last_round(), self._now(), _user_name(viewer_uid)
        if record is None:
            raise UnknownJobError("there was no round yet: ask again in a moment")
        current = status_of(now.snapshot) if now else {}

        def phase_now(job_id: int) -> JobPhase | None:
            return current[job_id].phase if job_id in current else None

        try:
            return explained(
                record,
                job,
                now_s=self._clock.now_s(),
                may_see_all=lambda user: viewer_uid in operators or user == viewer,
                phase_now=phase_now,
            )
        except ModelError as err:
            if job.isascii() and job.isdigit() and int(job) in current:
                raise UnknownJobError(
                    f"job {job} came after round {record.snapshot.round}: the next round plans it"
                ) from err
            raise UnknownJobError(str(err)) from err

    def _now(self) -> _Now | None:
        """The last reading of Slurm with the leases as they are; None before the first reading."""
        with self._lock:
            observed, last, settings = self._observed, self._round, self._settings
        if observed is None:
            return None
        observation, observed_s = observed
        records = self._ledger.read()
        leased = {job_id for job_id, record in records.items() if record.lease is not None}
        jobs = tuple(_begun(seen, leased) for seen in observation.jobs)
        snapshot = build_snapshot(
            replace(observation, jobs=jobs),
            records,
            round_number=last[0].round if last else 0,
            now_s=self._clock.now_s(),
            round_s=settings.scheduling.round_s,
            profile_of=self._profile_of,
            draining=self._ledger.draining(),
        )
        keys = {
            seen.job.job_id: seen.profile_key
            or (records[seen.job.job_id].profile_key if seen.job.job_id in records else "")
            for seen in jobs
        }
        return _Now(
            snapshot=snapshot,
            observed_s=observed_s,
            profile_keys=keys,
            allocated={seen.job.job_id: seen.allocated for seen in jobs},
        )

    def _profile_of(self, key: str) -> Profile | None:
        return self._ledger.profile(key) or CATALOGUE.get(key)

    def jobs(
        self, *, viewer_uid: int, operators: Collection[int]
    ) -> Sequence[Mapping[str, object]]:
        """The jobs as they are, by id. What came from hints is for owner and operators."""
        now = self._now()
        if now is None:
            return []
        with self._lock:
            plan = self._round[1] if self._round else None
        leases, viewer = self._leases.snapshot(), _user_name(viewer_uid)
        shown = [
            _job(
                status,
                plan.waiting.get(status.job.job_id) if plan else None,
                leases.get(status.job.job_id),
                now.profile_keys[status.job.job_id],
                now.allocated[status.job.job_id],
                private=viewer_uid in operators or status.job.user == viewer,
            )
            for status in now.snapshot.jobs
        ]
        measured = [_with_profiling(job, self.profiling(int(str(job["job_id"])))) for job in shown]
        return [
            {**job, "learning": self.learning(int(str(job["job_id"])))} if "note" in job else job
            for job in measured
        ]


def _with_profiling(
    job: Mapping[str, object], profiling: Mapping[str, object] | None
) -> Mapping[str, object]:
    """The job, with how far its measurement is; all but that is for those who see its hints."""
    if profiling is None:
        return {**job, "profiling": None}
    if "note" not in job:
        return {**job, "profiling": {"since_s": profiling["since_s"]}}
    note = (
        f"is being measured: {profiling['cpus_per_node']} cores a node, "
        f"{profiling['points']} of at most {profiling['most_points']} points known"
    )
    return {**job, "profiling": dict(profiling), "note": note}


def _begun(seen: ObservedJob, leased: Collection[int]) -> ObservedJob:
    """A job that was not released yet when Slurm was read, but has a lease since: it starts."""
    if seen.phase is JobPhase.PENDING and seen.job.job_id in leased:
        return replace(seen, phase=JobPhase.STARTING, blocked=None)
    return seen


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
    profile_key: str,
    allocated: Sequence[tuple[str, Resources]],
    *,
    private: bool,
) -> Mapping[str, object]:
    job = status.job
    # The plan's word is as old as the round; a job that got a lease since does not wait.
    reason = status.blocked or (waits if status.phase is JobPhase.PENDING else None)
    shown: dict[str, object] = {
        "job_id": job.job_id,
        "array": job.array or None,
        "name": job.name if private else None,
        "user": job.user,
        "phase": status.phase.value,
        "gpus": job.gpus,
        "nodes": job.nodes,
        "gpu_types": list(job.gpu_types),
        "elasticity": job.elasticity.value,
        "wrapped": job.wrapped,
        "preemptible": job.preemptible,
        "restarts": status.restarts,
        "submitted_s": job.submitted_s,
        "attained_service_gpu_s": round(status.attained_service_gpu_s, 1),
        "held_s": {kind: round(one, 1) for kind, one in status.held_s.items()},
        "reason": {"code": reason.code.value, "text": reason.text} if reason else None,
        "lease": lease,
        "allocated": _allocated(status, allocated) if lease is None else None,
    }
    if private:
        shown |= {
            "profile": profile_key or None,
            "note": _note(status, profile_key),
            "min_mem_mib_per_node": job.min_mem_mib_per_node,
            "least_gpus": job.least_gpus,
            "most_gpus": job.most_gpus,
            "total_samples": job.total_samples,
            "done_samples": status.done_samples,
        }
    return shown


def _allocated(
    status: JobStatus, shares: Sequence[tuple[str, Resources]]
) -> Mapping[str, object] | None:
    """What a job has that holds no lease of ours: others started it, or nothing is acted on."""
    if status.lease is None or not shares:
        return None
    return {
        "gpu_type": status.lease.placement.gpu_type,
        "nodes": [
            {"node": name, "gpus": share.gpus, "cpus": share.cpus, "mem_mib": share.mem_mib}
            for name, share in shares
        ],
    }


def _note(status: JobStatus, profile_key: str) -> str | None:
    """What the owner should know about the hints, if anything."""
    if profile_key and status.profile.key != profile_key:
        return f"profile {profile_key!r} is not in the catalogue: proportional share"
    return None
