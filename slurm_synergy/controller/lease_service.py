"""The gRPC server that running jobs and synergyctl talk to (contract: ``proto/lease.proto``).

It runs in a thread of its own, so that a round that takes long delays no lease. Every call is
bounded in size, time and number; nothing of an unexpected error but its existence is told to the
caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from slurm_synergy.config import LeaseSettings, parse_address
from slurm_synergy.controller.auth import Authenticator, register_payload
from slurm_synergy.controller.call_guard import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Calls,
    NotAllowed,
    answered,
    bounded,
    check_protocol,
    handlers,
    short_text,
)
from slurm_synergy.controller.control_service import CONTROL_CALLS, ControlPort, ControlService
from slurm_synergy.controller.learning_points import MOST_TIMES, StepTime, TrainingReport
from slurm_synergy.controller.lease_table import Listener
from slurm_synergy.controller.leases import Gone, LeaseBook, Over, TaskView
from slurm_synergy.controller.node_service import NODE_CALLS, NodeService
from slurm_synergy.controller.probes import Measured, TaskProfiling
from slurm_synergy.controller.tasks import TaskIdentity, TaskReport
from slurm_synergy.controller.throttle import Buckets, Busy
from slurm_synergy.errors import LeaseError
from slurm_synergy.proto import lease_pb2 as pb

__all__ = ["LEASE_CALLS", "MAX_HOLD_S", "PROTOCOL", "LeaseServer", "advertised_endpoint"]

MAX_HOLD_S = 10.0
"""Longest time that a Renew call is held open, in seconds."""

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
# Somewhat more than is taken apart, so that it is we who refuse a call that is a little too large.
_MAX_RECEIVED_BYTES = 4 * MAX_MESSAGE_BYTES
_MAX_STREAMS = 256  # calls at a time over one connection; a launcher makes one or two
_MAX_IDLE_MS = 300_000
_WANTED_FILES = 65_536
_MAX_CALLS = 8192
_MAX_WAITERS = 4096
_THREADS = 8
_LOGIN_THREADS = 4
_MAX_NODE_NAME, _MAX_TOKEN = 255, 128
_MAX_PROGRAM = 64
_LONGEST_SUM_S = 1e10  # of seconds since a process began
_LEAST_RATE, _MOST_RATE = 1e-6, 1e9  # samples/s of a whole job
_START_TIMEOUT_S = 10.0
_STOP_GRACE_S = 0.5


def advertised_endpoint(settings: LeaseSettings, port: int) -> str:
    """``HOST:PORT`` that jobs shall call when the server is bound to ``port``."""
    if settings.advertise is not None:
        host, wanted = parse_address(settings.advertise)
        return f"{_bracketed(host)}:{wanted or port}"
    host, _ = parse_address(settings.listen)
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"{_bracketed(host)}:{port}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class LeaseServer:
    """The server's life: ``start`` binds and returns, ``stop`` ends it; also a context manager."""

    def __init__(
        self,
        settings: LeaseSettings,
        *,
        leases: LeaseBook,
        control: ControlPort,
        authenticator: Authenticator,
        operators: Collection[int],
    ) -> None:
        self._settings, self._leases = settings, leases
        self._control, self._operators = control, frozenset(operators)
        self._authenticator = authenticator
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self.port = 0

    def __enter__(self) -> LeaseServer:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def endpoint(self) -> str:
        """``HOST:PORT`` that jobs shall call."""
        return advertised_endpoint(self._settings, self.port)

    def start(self) -> None:
        """Listen, or raise LeaseError when the address cannot be had."""
        self._thread = threading.Thread(target=self._run, name="lease-service", daemon=True)
        self._thread.start()
        if not self._started.wait(_START_TIMEOUT_S):
            raise LeaseError(f"the lease service did not start within {_START_TIMEOUT_S:g} s")
        if self._failure is not None:
            raise LeaseError(
                f"cannot listen on {self._settings.listen}: {self._failure}; set leases.listen to "
                "a free port of this machine"
            ) from self._failure

    def stop(self) -> None:
        """End open calls and the thread; idempotent. Leases stay as they are."""
        loop, ending, thread = self._loop, self._ending, self._thread
        if loop is not None and ending is not None and not loop.is_closed():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(ending.set)
        if thread is not None:
            thread.join(_START_TIMEOUT_S)
            self._thread = None

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as err:  # noqa: BLE001 - told by start()
            self._failure = err
            if self._started.is_set():
                _LOG.exception("the lease service ended")
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        _allow_many_files()
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", _MAX_RECEIVED_BYTES),
                ("grpc.max_concurrent_streams", _MAX_STREAMS),
                ("grpc.max_connection_idle_ms", _MAX_IDLE_MS),
                # A second controller on the same port must fail, not share the calls.
                ("grpc.so_reuseport", 0),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
            ],
            maximum_concurrent_rpcs=_MAX_CALLS,
        )
        with (
            ThreadPoolExecutor(_THREADS, thread_name_prefix="lease-call") as pool,
            ThreadPoolExecutor(_LOGIN_THREADS, thread_name_prefix="lease-login") as logins,
        ):
            calls = Calls(self._loop, pool, logins, self._authenticator)
            service = _LeaseService(calls, self._leases, self._settings.lease_s)
            control = ControlService(calls, self._control, self._operators)
            server.add_generic_rpc_handlers([handlers("LeaseService", service, LEASE_CALLS)])
            nodes = NodeService(calls, self._leases, self._settings.lease_s)
            server.add_generic_rpc_handlers([handlers("ControlService", control, CONTROL_CALLS)])
            server.add_generic_rpc_handlers([handlers("NodeService", nodes, NODE_CALLS)])
            self.port = server.add_insecure_port(self._settings.listen)
            if self.port == 0:
                raise OSError("the address is in use or not of this machine")
            await server.start()
            self._leases.subscribe(self._wake_with(service, nodes))
            self._started.set()
            await self._ending.wait()
            await server.stop(_STOP_GRACE_S)

    def _wake_with(self, service: _LeaseService, nodes: NodeService) -> Listener:
        loop = self._loop
        assert loop is not None

        def wake(job_ids: Collection[int]) -> None:
            nodes_of = self._leases.nodes_of(job_ids)
            # All in one call: each is a system call, and lets the threads change.
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(both, nodes_of)

        def both(nodes_of: Mapping[int, tuple[str, ...]]) -> None:
            service.wake(nodes_of)
            for job_id, names in nodes_of.items():
                nodes.wake(job_id, names)

        return wake


def _allow_many_files() -> None:
    """One connection a task is one open file: the usual soft limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _LeaseService:
    def __init__(self, calls: Calls, leases: LeaseBook, lease_s: float) -> None:
        self.calls, self._leases = calls, leases
        # A call held longer than the lease would let it run out at the caller.
        self._max_hold_s = min(MAX_HOLD_S, lease_s / 3)
        self._events: dict[int, asyncio.Event] = {}
        self._waiters = 0
        self._news = 0
        # A job may be as large as it likes, its tasks call every ten seconds and when they must.
        self._of_task = Buckets(per_s=10.0, burst=100)
        self._of_job = Buckets(per_s=300.0, burst=6000)
        self._ends_of_job = Buckets(per_s=20.0, burst=4000)

    def wake(self, job_ids: Iterable[int]) -> None:
        """There may be news for the tasks of these jobs."""
        self._news += 1
        for job_id in job_ids:
            event = self._events.pop(job_id, None)
            if event is not None:
                event.set()

    @answered
    async def Register(self, request: pb.RegisterRequest, peer: str) -> pb.LeaseReply:
        check_protocol(request.protocol)
        task = request.task
        identity = TaskIdentity(
            job_id=task.job_id,
            restart_count=task.restart_count,
            rank=task.rank,
            ranks=task.ranks,
            node=short_text(task.node, _MAX_NODE_NAME, "the name of a node"),
            step_id=request.step_id,
        )
        payload = register_payload(task.job_id, task.restart_count, task.rank, request.nonce)
        uid = await self.calls.uid_of(peer, request.credential, payload, request.nonce)
        try:
            return await self._admit(identity, uid)
        except Gone as err:
            return pb.LeaseReply(gone=True, over=isinstance(err, Over))

    async def _admit(self, identity: TaskIdentity, uid: int) -> pb.LeaseReply:
        owner = await self.calls.run(
            self._leases.owner_uid, identity.job_id, identity.restart_count
        )
        if uid != owner:
            raise NotAllowed(f"job {identity.job_id} is not a job of user id {uid}")
        token, view = await self.calls.run(self._leases.register, identity)
        return _reply(view, token=token)

    @answered
    async def Renew(self, request: pb.RenewRequest, peer: str) -> pb.LeaseReply:
        report = _report_of_renewal(request)
        try:
            identity = await self._identity(request.token, request.task)
            self._count(identity)
            news = self._news
            view = self._leases.renew_at_once(identity, report)
            if view is None:
                view = await self.calls.run(self._leases.renew, identity, report)
            if request.wait_s > 0 and not _is_news(view, request):
                view = await self._hold(identity, request, view, news)
            return _reply(view)
        except Gone as err:
            return pb.LeaseReply(gone=True, over=isinstance(err, Over))

    @answered
    async def Finish(self, request: pb.FinishRequest, peer: str) -> pb.FinishReply:
        report = TaskReport(
            step=bounded(request.step, "step"), samples=bounded(request.samples, "samples")
        )
        try:
            identity = await self._identity(request.token, request.task)
            self._count(identity)
            if not self._ends_of_job.take(identity.job_id):
                raise Busy(f"tasks of job {identity.job_id} end too often: try again")
            await self.calls.run(
                self._leases.finish,
                identity,
                exit_code=request.exit_code,
                checkpointed=request.checkpointed,
                report=report,
            )
            return pb.FinishReply(known=True)
        except Gone:
            return pb.FinishReply(known=False)

    async def _identity(self, token: str, task: pb.TaskId) -> TaskIdentity:
        short_text(token, _MAX_TOKEN, "a session token")
        return await self._look(
            self._leases.identity, token, task.job_id, task.restart_count, task.rank
        )

    async def _look(self, look: Callable[..., _T], *args: Any) -> _T:
        """What only looks into the book is done here, unless that would have to wait."""
        found = self._leases.unless_busy(look, *args)
        return found if found is not None else await self.calls.run(look, *args)

    def _count(self, identity: TaskIdentity) -> None:
        """Raises Busy for a task, or a job, that calls too often."""
        if not self._of_task.take(identity) or not self._of_job.take(identity.job_id):
            raise Busy(f"a task of job {identity.job_id} calls too often: try again")

    async def _hold(
        self, identity: TaskIdentity, request: pb.RenewRequest, view: TaskView, news: int
    ) -> TaskView:
        """Wait for news, as long as the caller asked for and we allow.

        ``news`` is the count of news from before ``view`` was made.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + min(request.wait_s, self._max_hold_s)
        if self._waiters >= _MAX_WAITERS:
            return view
        self._waiters += 1
        try:
            while loop.time() < deadline_s:
                # The event is there before the look, so that no news falls between the two.
                event = self._events.setdefault(identity.job_id, asyncio.Event())
                if news != self._news:
                    news = self._news
                    view = await self._look(self._leases.view, identity)
                    if _is_news(view, request):
                        return view
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(deadline_s):
                        await event.wait()
            return await self._look(self._leases.view, identity)
        finally:
            self._waiters -= 1


def _report_of_renewal(request: pb.RenewRequest) -> TaskReport:
    progress = request.progress
    return TaskReport(
        step=bounded(progress.step, "step"),
        samples=bounded(progress.samples, "samples"),
        epoch=bounded(progress.epoch, "epoch"),
        step_s=_sane(progress.step_s),
        wait_s=_sane(progress.wait_s),
        pinned_cpus=bounded(progress.pinned_cpus, "pinned_cpus"),
        proposed_stop_step=bounded(request.proposed_stop_step, "stop step"),
        accepted_stop_step=bounded(request.accepted_stop_step, "stop step"),
        refused_stop_step=bounded(request.refused_stop_step, "stop step"),
        stepped_s=_sane(progress.stepped_s, _LONGEST_SUM_S),
        waited_s=_sane(progress.waited_s, _LONGEST_SUM_S),
        profiling=_profiling(request.profiling) if request.HasField("profiling") else None,
        training=_training(request.training) if request.HasField("training") else None,
    )


def _training(told: pb.Training) -> TrainingReport:
    """As it was told: whoever learns from it refuses it in words, and the lease is renewed."""
    return TrainingReport(
        times=tuple(
            StepTime(
                local_batch=one.local_batch,
                accumulation=one.accumulation,
                replicas=one.replicas,
                steps=one.steps,
                gradient_s=one.gradient_s,
                step_s=one.step_s,
            )
            # One too many is enough to be refused.
            for one in told.times[: MOST_TIMES + 1]
        ),
        square=told.gradient_square,
        variance=told.gradient_variance,
        initial_batch=told.initial_batch,
        local_most=told.local_most,
        progress=told.progress,
    )


def _profiling(told: pb.Profiling) -> TaskProfiling:
    return TaskProfiling(
        known_probe=bounded(told.known_probe, "probe"),
        measured=_measured(told.measured) if told.HasField("measured") else None,
        own_mem_mib=bounded(told.own_mem_mib, "own_mem_mib"),
        program=short_text(told.program, _MAX_PROGRAM, "the name of a program"),
    )


def _measured(told: pb.Measured) -> Measured:
    rate, busy = _sane(told.samples_per_s, _MOST_RATE), _sane(told.busy_samples_per_s, _MOST_RATE)
    share = told.wait_share if 0 <= told.wait_share <= 1 else None
    return Measured(
        probe=bounded(told.probe, "probe"),
        steps=bounded(told.steps, "steps") if rate >= _LEAST_RATE else 0,
        samples_per_s=rate,
        wait_share=share if told.waits_known else None,
        busy_samples_per_s=busy if told.waits_known and busy >= _LEAST_RATE else None,
    )


def _sane(seconds: float, most_s: float = 1e6) -> float:
    # Also turns NaN into 0, which would poison means and JSON.
    return seconds if 0 <= seconds < most_s else 0.0


def _is_news(view: TaskView, request: pb.RenewRequest) -> bool:
    known = (request.known_stop.step, request.known_stop.committed)
    if request.HasField("profiling"):
        probe = view.probe.number if view.probe else 0
        if probe != request.profiling.known_probe:
            return True
    return (
        view.generation != request.known_generation
        or (view.stop_step, view.stop_committed) != known
    )


def _reply(view: TaskView, *, token: str = "") -> pb.LeaseReply:
    probe = view.probe
    return pb.LeaseReply(
        token=token,
        probe=None
        if probe is None
        else pb.Probe(
            number=probe.number,
            warmup_steps=probe.warmup_steps,
            steps=probe.steps,
            longest_s=probe.longest_s,
        ),
        lease=pb.Lease(
            generation=view.generation,
            expires_in_s=view.expires_in_s,
            cores=view.cores,
            floor_cores=view.floor_cores,
            mem_mib=view.mem_mib,
            floor_mem_mib=view.floor_mem_mib,
            stop=view.stop,
            stop_within_s=view.stop_within_s,
            node_cores=view.node_cores,
            grace_s=view.grace_s,
            batch_size=view.batch_size,
        ),
        stop_step=pb.StopStep(step=view.stop_step, committed=view.stop_committed),
    )


LEASE_CALLS: Mapping[str, type[Message]] = {
    "Register": pb.RegisterRequest,
    "Renew": pb.RenewRequest,
    "Finish": pb.FinishRequest,
}
"""The methods of the service, and what each is asked with."""
