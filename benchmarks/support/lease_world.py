"""What the benchmarks of the lease service share: the real service, with a book of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from slurm_synergy.config import LeaseSettings
from slurm_synergy.controller.auth import Authenticator
from slurm_synergy.controller.control_service import ProfilePort
from slurm_synergy.controller.lease_service import LeaseServer
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.controller.ledger import Ledger
from slurm_synergy.core.model import Job, JobPhase, JobStatus, Node, Placement
from slurm_synergy.core.resources import Resources

__all__ = ["LeaseWorld", "munged", "node_of_job"]

JOBS_A_NODE = 4
CORES_A_JOB = 2


@contextlib.contextmanager
def munged() -> Iterator[str | None]:
    """The socket of a munged with a key of its own; None where MUNGE is not installed."""
    program = shutil.which("munged", path="/usr/sbin:/usr/local/sbin:/sbin:/usr/bin")
    if program is None:
        yield None
        return
    directory = Path(tempfile.mkdtemp(prefix="synergy-munge-", dir="/tmp"))
    directory.chmod(0o711)
    key = directory / "key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    argv = [program, "--force", "--foreground", "--syslog", f"--key-file={key}"]
    argv += [f"--{name}={directory / name}" for name in ("socket", "pid-file", "seed-file")]
    daemon = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 20
        while not (directory / "socket").exists():
            if daemon.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError("munged did not come up")
            time.sleep(0.02)
        yield str(directory / "socket")
    finally:
        os.kill(daemon.pid, signal.SIGTERM)
        daemon.wait(10)
        shutil.rmtree(directory, ignore_errors=True)


class _Clock:
    def now_s(self) -> float:
        return time.time()


class _Everybody:
    """Where MUNGE is missing: every caller is this user."""

    def uid_of(self, credential: str, *, payload: str, nonce: str) -> int:
        return os.getuid()


class _NoControl:
    def status(self) -> Mapping[str, object]:
        return {}

    def jobs(
        self, *, viewer_uid: int, operators: Collection[int]
    ) -> Sequence[Mapping[str, object]]:
        return ()

    def explain(
        self, job: str, *, viewer_uid: int, operators: Collection[int]
    ) -> Mapping[str, object]:
        return {}

    def set_draining(self, draining: bool) -> None:
        return None

    @property
    def shelf(self) -> ProfilePort:
        raise NotImplementedError("nobody asks for profiles here")


def node_of_job(job_id: int) -> str:
    """The node that a job of the world runs on."""
    return f"n{(job_id - 1) // JOBS_A_NODE}"


class LeaseWorld:
    """The lease service with ``jobs`` jobs of this user, of one GPU each, that hold a lease."""

    def __init__(
        self,
        state_dir: Path,
        munge_socket: str | None,
        *,
        jobs: int,
        lease_s: float = 60.0,
    ) -> None:
        self.munge_socket = munge_socket or ""
        self.job_ids = tuple(range(1, jobs + 1))
        full = Resources(gpus=JOBS_A_NODE, cpus=JOBS_A_NODE * CORES_A_JOB, mem_mib=100_000)
        self._nodes = {
            name: Node(name=name, gpu_type="v100", total=full, capacity=full)
            for name in map(node_of_job, self.job_ids)
        }
        self._ledger = Ledger(state_dir, clock=_Clock())
        self._book = LeaseBook(
            self._ledger, _Clock(), lease_s=lease_s, node_of=lambda name: self._nodes.get(name)
        )
        authenticator = Authenticator(Path(munge_socket)) if munge_socket else _Everybody()
        self._server = LeaseServer(
            LeaseSettings(listen="127.0.0.1:0", lease_s=lease_s),
            leases=self._book,
            control=_NoControl(),
            authenticator=authenticator,  # type: ignore[arg-type] # the one call that is made
            operators=frozenset(),
        )

    def __enter__(self) -> LeaseWorld:
        for job_id in self.job_ids:
            job = Job(job_id=job_id, user="bench", submitted_s=0.0, gpus=1, name="bench")
            placement = self._placement(job_id, 1)
            self._book.grant(
                status=JobStatus(job=job, phase=JobPhase.PENDING),
                owner_uid=os.getuid(),
                incarnation=0,
                placement=placement,
                granted=dict(placement.shares),
            )
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.stop()
        self._ledger.close()

    @property
    def endpoint(self) -> str:
        """Where the service listens."""
        return self._server.endpoint

    def resize(self, job_id: int, cpus: int) -> int:
        """Give the job ``cpus`` cores; the generation of its lease then."""
        lease = self._book.resize(job_id=job_id, placement=self._placement(job_id, cpus))
        return lease.generation

    def resize_all(self, cpus: int) -> dict[int, int]:
        """Give every job ``cpus`` cores, as one round does; the generations then, by job."""
        refused = self._book.resize_all([self._placement(job_id, cpus) for job_id in self.job_ids])
        if refused:
            raise next(iter(refused.values()))
        leases = ((job_id, self._book.lease(job_id)) for job_id in self.job_ids)
        return {job_id: lease.generation for job_id, lease in leases if lease is not None}

    def _placement(self, job_id: int, cpus: int) -> Placement:
        share = Resources(gpus=1, cpus=cpus, mem_mib=10_000)
        return Placement(job_id=job_id, gpu_type="v100", shares=((node_of_job(job_id), share),))
