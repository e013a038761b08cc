"""A real lease service with a ledger, a book and a munged behind it, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import grpc

from slurm_synergy.cluster import Clock, Observation, ObservedJob
from slurm_synergy.config import LeaseSettings, Settings
from slurm_synergy.controller.auth import Authenticator, encode_credential, new_nonce
from slurm_synergy.controller.auth import register_payload as payload_of
from slurm_synergy.controller.learning import Learner
from slurm_synergy.controller.lease_service import LeaseServer
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.controller.status import StatusView
from slurm_synergy.core.model import (
    Job,
    JobPhase,
    JobStatus,
    Lease,
    Node,
    Placement,
    Plan,
    Snapshot,
)
from slurm_synergy.core.resources import Resources
from slurm_synergy.proto import lease_pb2 as pb
from slurm_synergy.proto import lease_pb2_grpc as pb_grpc

FULL = Resources(gpus=8, cpus=24, mem_mib=800_000)
NODE = Node(name="n1", gpu_type="v100", total=FULL, capacity=FULL, sockets=2)


class SystemClock:
    def now_s(self) -> float:
        return time.time()


class ServiceWorld:
    """Open from construction to ``close``."""

    def __init__(
        self,
        state_dir: Path,
        munge_socket: Path,
        *,
        operators: frozenset[int],
        lease_s: float = 60.0,
        listen: str = "127.0.0.1:0",
        learner_clock: Clock | None = None,
        on_measured: Callable[[int], None] = lambda job_id: None,
    ) -> None:
        self.munge_socket = munge_socket
        self.clock = SystemClock()
        self.ledger = Ledger(state_dir, clock=self.clock)
        clock = learner_clock or self.clock
        self.learner = Learner(self.ledger, clock, least_between_s=0.0)
        self.book = LeaseBook(
            self.ledger,
            self.clock,
            lease_s=lease_s,
            node_of=lambda name: NODE if name == NODE.name else None,
            on_training=self.learner.reported,
            on_measured=on_measured,
        )
        self.settings = Settings()
        self.view = StatusView(
            self.settings, ledger=self.ledger, leases=self.book, clock=self.clock
        )
        self.view.learning = self.learner.describe
        self.server = LeaseServer(
            LeaseSettings(listen=listen, lease_s=lease_s),
            leases=self.book,
            control=self.view,
            authenticator=Authenticator(munge_socket),
            operators=operators,
        )
        try:
            self.server.start()
        except BaseException:
            self.ledger.close()
            raise
        self.channel = grpc.insecure_channel(
            self.server.endpoint, options=[("grpc.enable_http_proxy", 0)]
        )
        self.stub = pb_grpc.LeaseServiceStub(self.channel)
        self.control = pb_grpc.ControlServiceStub(self.channel)

    def close(self) -> None:
        self.channel.close()
        self.server.stop()
        self.learner.close()
        self.ledger.close()

    def status(self, job_id: int, *, lease: Lease | None = None, user: str = "root") -> JobStatus:
        job = Job(job_id=job_id, user=user, submitted_s=0.0, gpus=2, name=f"job-{job_id}")
        phase = JobPhase.PENDING if lease is None else JobPhase.RUNNING
        return JobStatus(job=job, phase=phase, lease=lease)

    def placement(self, job_id: int, cpus: int) -> Placement:
        share = Resources(gpus=2, cpus=cpus, mem_mib=50_000)
        return Placement(job_id=job_id, gpu_type="v100", shares=(("n1", share),))

    def grant(self, job_id: int, cpus: int, *, uid: int, incarnation: int = 0) -> Lease:
        return self.book.grant(
            status=self.status(job_id),
            owner_uid=uid,
            incarnation=incarnation,
            placement=self.placement(job_id, cpus),
            granted={"n1": Resources(gpus=2, cpus=24, mem_mib=60_000)},
        )

    def publish(self, statuses: tuple[JobStatus, ...], plan: Plan) -> None:
        snapshot = Snapshot(
            round=plan.round,
            now_s=self.clock.now_s(),
            round_s=300.0,
            nodes=(NODE,),
            jobs=statuses,
        )
        self.observe(statuses)
        self.view.publish(snapshot, plan, {"decide": 0.01, "total": 0.02})

    def observe(self, statuses: tuple[JobStatus, ...], profile_key: str = "") -> Observation:
        """Slurm has been read, and showed these jobs."""
        jobs = tuple(
            ObservedJob(
                job=status.job,
                phase=status.phase,
                allocated=status.lease.placement.shares if status.lease else (),
                profile_key=profile_key,
            )
            for status in statuses
        )
        observation = Observation(nodes=(NODE,), jobs=jobs, free={"n1": FULL})
        self.view.observed(observation)
        self.learner.observed(observation)
        return observation

    def task(self, job_id: int, *, rank: int = 0, ranks: int = 1, restart: int = 0) -> pb.TaskId:
        return pb.TaskId(
            job_id=job_id,
            restart_count=restart,
            rank=rank,
            ranks=ranks,
            local_rank=rank,
            local_ranks=ranks,
            node="n1",
        )

    def registration(self, task: pb.TaskId) -> pb.RegisterRequest:
        nonce = new_nonce()
        payload = payload_of(task.job_id, task.restart_count, task.rank, nonce)
        return pb.RegisterRequest(
            protocol=1,
            task=task,
            credential=encode_credential(payload, self.munge_socket),
            nonce=nonce,
        )

    def register(self, task: pb.TaskId) -> pb.LeaseReply:
        return self.stub.Register(self.registration(task), timeout=10)
