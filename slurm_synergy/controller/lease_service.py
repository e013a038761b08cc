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
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio

from slurm_synergy.config import LeaseSettings, parse_address
from slurm_synergy.controller.auth import Authenticator
from slurm_synergy.controller.call_guard import MAX_MESSAGE_BYTES, Calls, handlers
from slurm_synergy.controller.control_service import CONTROL_CALLS, ControlPort, ControlService
from slurm_synergy.controller.lease_calls import LEASE_CALLS, LeaseService
from slurm_synergy.controller.lease_table import Listener
from slurm_synergy.controller.leases import LeaseBook
from slurm_synergy.controller.node_service import NODE_CALLS, NodeService
from slurm_synergy.errors import LeaseError

__all__ = ["LeaseServer", "advertised_endpoint"]

_LOG = logging.getLogger(__name__)
# Somewhat more than is taken apart, so that it is we who refuse a call that is a little too large.
_MAX_RECEIVED_BYTES = 4 * MAX_MESSAGE_BYTES
_MAX_STREAMS = 256  # calls at a time over one connection; a launcher makes one or two
_MAX_IDLE_MS = 300_000
_WANTED_FILES = 65_536
_MAX_CALLS = 8192
_THREADS = 8
_LOGIN_THREADS = 4
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
            service = LeaseService(calls, self._leases, self._settings.lease_s)
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
            service.close()
            nodes.close()
            await server.stop(_STOP_GRACE_S)

    def _wake_with(self, service: LeaseService, nodes: NodeService) -> Listener:
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
