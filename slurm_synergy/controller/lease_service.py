"""The gRPC server that running jobs and synergyctl talk to (contract: ``proto/lease.proto``).

It runs in a thread of its own, so that a round that takes long delays no lease. Every call is
bounded in size, time and number; nothing of an unexpected error but its existence is told to the
caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from slurm_synergy.config import LeaseSettings, parse_address
from slurm_synergy.controller.auth import Authenticator, control_payload, register_payload
from slurm_synergy.controller.leases import Gone, LeaseBook, NotYetKnown, TaskView, UnknownToken
from slurm_synergy.controller.tasks import TaskIdentity, TaskReport
from slurm_synergy.errors import LeaseError, LedgerError, MungeError
from slurm_synergy.proto import lease_pb2 as pb
from slurm_synergy.proto import lease_pb2_grpc as pb_grpc

__all__ = ["MAX_HOLD_S", "PROTOCOL", "ControlPort", "LeaseServer", "advertised_endpoint"]

PROTOCOL = 1
MAX_HOLD_S = 10.0
"""Longest time that a Renew call is held open, in seconds."""

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_Request = TypeVar("_Request")
_MAX_MESSAGE_BYTES = 64 * 1024
_MAX_CALLS = 8192
_MAX_WAITERS = 4096
_MAX_LOGINS = 256
_THREADS = 8
_LOGIN_THREADS = 4
_MAX_CAUSES = 64
_START_TIMEOUT_S = 10.0
_STOP_GRACE_S = 0.5


class ControlPort(Protocol):
    """What the control calls need from the controller; thread-safe, answers at once."""

    def status(self) -> Mapping[str, object]:
        """The state of the controller as one JSON object."""
        ...

    def jobs(
        self, *, viewer_uid: int, operators: Collection[int]
    ) -> Sequence[Mapping[str, object]]:
        """The jobs as JSON objects, with what this viewer may see."""
        ...

    def set_draining(self, draining: bool) -> None:
        """Start nothing more, or go on."""
        ...


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
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
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
            calls = _Calls(self._loop, pool, logins, self._authenticator)
            service = _LeaseService(calls, self._leases, self._settings.lease_s)
            control = _ControlService(calls, self._control, self._operators)
            pb_grpc.add_LeaseServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
            pb_grpc.add_ControlServiceServicer_to_server(control, server)  # type: ignore[no-untyped-call]
            self.port = server.add_insecure_port(self._settings.listen)
            if self.port == 0:
                raise OSError("the address is in use or not of this machine")
            await server.start()
            self._leases.subscribe(self._wake_with(service))
            self._started.set()
            await self._ending.wait()
            await server.stop(_STOP_GRACE_S)

    def _wake_with(self, service: _LeaseService) -> Callable[[int], None]:
        loop = self._loop
        assert loop is not None

        def wake(job_id: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(service.wake, job_id)

        return wake


class _Calls:
    """What all calls share: threads for what may block, and authentication."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: ThreadPoolExecutor,
        login_pool: ThreadPoolExecutor,
        authenticator: Authenticator,
    ) -> None:
        self._loop, self._pool, self._authenticator = loop, pool, authenticator
        # Threads of their own: a munged that hangs must not keep leases from being renewed.
        self._login_pool, self._logins = login_pool, 0
        self._told: set[str] = set()

    def refused(self, why: str) -> None:
        """Log why a credential was refused, each cause once: callers may try it all day."""
        if why not in self._told and len(self._told) < _MAX_CAUSES:
            self._told.add(why)
            _LOG.warning("a caller was refused: %s (said once)", why)

    async def run(self, call: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """``call`` in a thread: it may wait for a lock or a disk."""
        return await self._loop.run_in_executor(
            self._pool, functools.partial(call, *args, **kwargs)
        )

    async def uid_of(self, credential: str, payload: str, nonce: str) -> int:
        """The authenticated caller. Raises LeaseError."""
        if self._logins >= _MAX_LOGINS:
            raise NotYetKnown("too many callers register at once: try again")
        self._logins += 1
        try:
            return await self._loop.run_in_executor(
                self._login_pool,
                functools.partial(
                    self._authenticator.uid_of, credential, payload=payload, nonce=nonce
                ),
            )
        finally:
            self._logins -= 1


class _NotAuthenticated(LeaseError):
    pass


class _NotAllowed(LeaseError):
    pass


def _answered(
    call: Callable[[Any, _Request], Awaitable[_T]],
) -> Callable[[Any, _Request, Any], Awaitable[_T]]:
    """A gRPC method from ``call``: our errors as statuses; of others only that they happened."""

    @functools.wraps(call)
    async def method(self: Any, request: _Request, context: Any) -> _T:
        try:
            return await call(self, request)
        except (UnknownToken, _NotAuthenticated) as err:
            code, text = grpc.StatusCode.UNAUTHENTICATED, str(err)
        except _NotAllowed as err:
            code, text = grpc.StatusCode.PERMISSION_DENIED, str(err)
        except (NotYetKnown, MungeError) as err:
            code, text = grpc.StatusCode.UNAVAILABLE, str(err)
        except LeaseError as err:
            code, text = grpc.StatusCode.FAILED_PRECONDITION, str(err)
        except LedgerError:
            _LOG.exception("a call met an unusable ledger")
            code, text = grpc.StatusCode.UNAVAILABLE, "the controller's ledger is unusable"
        except Exception:  # noqa: BLE001 - whatever it is, it is not the caller's business
            _LOG.exception("%s failed", call.__name__)
            code, text = grpc.StatusCode.INTERNAL, "internal error: see the controller's log"
        await context.abort(code, text)
        raise AssertionError("abort returned")

    return method


class _LeaseService(pb_grpc.LeaseServiceServicer):
    def __init__(self, calls: _Calls, leases: LeaseBook, lease_s: float) -> None:
        self._calls, self._leases = calls, leases
        # A call held longer than the lease would let it run out at the caller.
        self._max_hold_s = min(MAX_HOLD_S, lease_s / 3)
        self._events: dict[int, asyncio.Event] = {}
        self._waiters = 0

    def wake(self, job_id: int) -> None:
        """There may be news for the tasks of this job."""
        event = self._events.pop(job_id, None)
        if event is not None:
            event.set()

    @_answered
    async def Register(self, request: pb.RegisterRequest) -> pb.LeaseReply:
        _check_protocol(request.protocol)
        task = request.task
        identity = TaskIdentity(
            job_id=task.job_id,
            restart_count=task.restart_count,
            rank=task.rank,
            ranks=task.ranks,
            node=task.node,
            step_id=request.step_id,
        )
        payload = register_payload(task.job_id, task.restart_count, task.rank, request.nonce)
        uid = await _authenticated(self._calls, request.credential, payload, request.nonce)
        try:
            return await self._admit(identity, uid)
        except Gone:
            return pb.LeaseReply(gone=True)

    async def _admit(self, identity: TaskIdentity, uid: int) -> pb.LeaseReply:
        owner = await self._calls.run(
            self._leases.owner_uid, identity.job_id, identity.restart_count
        )
        if uid != owner:
            raise _NotAllowed(f"job {identity.job_id} is not a job of user id {uid}")
        token, view = await self._calls.run(self._leases.register, identity)
        return _reply(view, token=token)

    @_answered
    async def Renew(self, request: pb.RenewRequest) -> pb.LeaseReply:
        try:
            identity = await self._identity(request.token, request.task)
            view = await self._calls.run(self._leases.renew, identity, _report_of_renewal(request))
            if not _is_news(view, request):
                view = await self._hold(identity, request, view)
            return _reply(view)
        except Gone:
            return pb.LeaseReply(gone=True)

    @_answered
    async def Finish(self, request: pb.FinishRequest) -> pb.FinishReply:
        try:
            identity = await self._identity(request.token, request.task)
            await self._calls.run(
                self._leases.finish,
                identity,
                exit_code=request.exit_code,
                checkpointed=request.checkpointed,
                report=TaskReport(step=request.step, samples=request.samples),
            )
            return pb.FinishReply(known=True)
        except Gone:
            return pb.FinishReply(known=False)

    async def _identity(self, token: str, task: pb.TaskId) -> TaskIdentity:
        return await self._calls.run(
            self._leases.identity, token, task.job_id, task.restart_count, task.rank
        )

    async def _hold(
        self, identity: TaskIdentity, request: pb.RenewRequest, view: TaskView
    ) -> TaskView:
        """Wait for news, as long as the caller asked for and we allow."""
        loop = asyncio.get_running_loop()
        wait_s = request.wait_s if request.wait_s > 0 else 0.0
        deadline_s = loop.time() + min(wait_s, self._max_hold_s)
        if self._waiters >= _MAX_WAITERS:
            return view
        self._waiters += 1
        try:
            while loop.time() < deadline_s:
                # The event is there before the look, so that no news falls between the two.
                event = self._events.setdefault(identity.job_id, asyncio.Event())
                view = await self._calls.run(self._leases.view, identity)
                if _is_news(view, request):
                    return view
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), max(0.0, deadline_s - loop.time()))
            return await self._calls.run(self._leases.view, identity)
        finally:
            self._waiters -= 1


class _ControlService(pb_grpc.ControlServiceServicer):
    def __init__(self, calls: _Calls, control: ControlPort, operators: frozenset[int]) -> None:
        self._calls, self._control, self._operators = calls, control, operators

    @_answered
    async def Status(self, request: pb.ControlRequest) -> pb.ControlReply:
        await self._caller(request, "status")
        return _json_reply(dict(await self._calls.run(self._control.status)))

    @_answered
    async def Jobs(self, request: pb.ControlRequest) -> pb.ControlReply:
        uid = await self._caller(request, "jobs")
        jobs = await self._calls.run(self._control.jobs, viewer_uid=uid, operators=self._operators)
        return _json_reply({"jobs": list(jobs)})

    @_answered
    async def Drain(self, request: pb.ControlRequest) -> pb.ControlReply:
        return await self._set_draining(request, "drain", True)

    @_answered
    async def Resume(self, request: pb.ControlRequest) -> pb.ControlReply:
        return await self._set_draining(request, "resume", False)

    async def _set_draining(
        self, request: pb.ControlRequest, method: str, draining: bool
    ) -> pb.ControlReply:
        uid = await self._caller(request, method)
        if uid not in self._operators:
            raise _NotAllowed(
                f"{method} is for operators, and user id {uid} is none; an administrator can "
                "add it to 'operators' in the settings"
            )
        await self._calls.run(self._control.set_draining, draining)
        _LOG.info("user id %d: %s", uid, method)
        return _json_reply({"draining": draining})

    async def _caller(self, request: pb.ControlRequest, method: str) -> int:
        _check_protocol(request.protocol)
        # The method is part of the nonce: a credential for reading cannot be used for changing.
        if not request.nonce.startswith(f"{method}-"):
            raise _NotAuthenticated(f"the nonce of this call begins with '{method}-'")
        payload = control_payload(request.nonce)
        return await _authenticated(self._calls, request.credential, payload, request.nonce)


async def _authenticated(calls: _Calls, credential: str, payload: str, nonce: str) -> int:
    try:
        return await calls.uid_of(credential, payload, nonce)
    except NotYetKnown:
        raise
    except MungeError as err:
        # Not the caller's fault: it may try again.
        calls.refused(str(err))
        raise
    except LeaseError as err:
        calls.refused(str(err))
        raise _NotAuthenticated(str(err)) from err


def _check_protocol(protocol: int) -> None:
    if protocol != PROTOCOL:
        raise LeaseError(f"this controller speaks protocol {PROTOCOL}, the caller {protocol}")


def _report_of_renewal(request: pb.RenewRequest) -> TaskReport:
    progress = request.progress
    return TaskReport(
        step=progress.step,
        samples=progress.samples,
        epoch=progress.epoch,
        step_s=_sane(progress.step_s),
        wait_s=_sane(progress.wait_s),
        pinned_cpus=progress.pinned_cpus,
        proposed_stop_step=request.proposed_stop_step,
        accepted_stop_step=request.accepted_stop_step,
        refused_stop_step=request.refused_stop_step,
    )


def _sane(seconds: float) -> float:
    # Also turns NaN into 0, which would poison means and JSON.
    return seconds if 0 <= seconds < 1e6 else 0.0


def _is_news(view: TaskView, request: pb.RenewRequest) -> bool:
    known = (request.known_stop.step, request.known_stop.committed)
    return (
        view.generation != request.known_generation
        or (view.stop_step, view.stop_committed) != known
    )


def _reply(view: TaskView, *, token: str = "") -> pb.LeaseReply:
    return pb.LeaseReply(
        token=token,
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
        ),
        stop_step=pb.StopStep(step=view.stop_step, committed=view.stop_committed),
    )


def _json_reply(content: Mapping[str, object]) -> pb.ControlReply:
    return pb.ControlReply(json=json.dumps(content, allow_nan=False))
