"""What stands before every call of the lease service: bounds, shares, refusals.

A request is taken apart only if it is small enough and well formed. A refusal changes nothing, is
logged (the like of it once in ten minutes, so that nobody fills the log), and is answered slowly to
a caller that collects many. Who is refused gets words, but of an unexpected error only that it
happened.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from slurm_synergy.controller.auth import MAX_CREDENTIAL_BYTES, Authenticator
from slurm_synergy.controller.leases import NotYetKnown, UnknownToken
from slurm_synergy.controller.throttle import Buckets, Busy, Turns
from slurm_synergy.errors import LeaseError, LedgerError, MungeError, UnknownJobError

__all__ = [
    "MAX_MESSAGE_BYTES",
    "PROTOCOL",
    "Calls",
    "NotAllowed",
    "NotAuthenticated",
    "Unusable",
    "answered",
    "bounded",
    "check_protocol",
    "handlers",
    "peer_of",
    "reader",
    "short_text",
]

PROTOCOL = 1
"""The version of ``lease.proto`` that this controller speaks."""
MAX_MESSAGE_BYTES = 64 * 1024
"""Largest request that is taken apart, in bytes."""

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_LOGIN_THREADS = 4
_MAX_LOGINS, _MAX_LOGINS_OF_A_PEER = 1024, 128
_QUIET_S = 600.0
_MAX_CAUSES = 64
_MAX_TEXT = 400
_LARGEST = 2**53  # what a double, JSON and SQLite hold exactly
_SLOW_ANSWER_S = 1.0
_MAX_SLOW, _MAX_SLOW_OF_A_PEER = 1024, 256


class NotAuthenticated(LeaseError):
    """The credential does not tell who calls."""


class NotAllowed(LeaseError):
    """It is known who calls, and that this caller may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unusable:
    """A request that was not taken apart: the status to answer with, and why."""

    code: grpc.StatusCode
    text: str


def reader(parse: Callable[[bytes], _T]) -> Callable[[bytes], _T | Unusable]:
    """A deserializer that never raises: what it cannot read becomes ``Unusable``."""

    def read(raw: bytes) -> _T | Unusable:
        if len(raw) > MAX_MESSAGE_BYTES:
            text = f"a request has at most {MAX_MESSAGE_BYTES} bytes, this one {len(raw)}"
            return Unusable(code=grpc.StatusCode.RESOURCE_EXHAUSTED, text=text)
        try:
            return parse(raw)
        except DecodeError:
            text = "the request is malformed"
            return Unusable(code=grpc.StatusCode.INVALID_ARGUMENT, text=text)

    return read


def peer_of(context: Any) -> str:
    """The address that a call came from, without the port."""
    return str(context.peer()).rpartition(":")[0] or "unknown"


def bounded(value: int, what: str) -> int:
    """``value`` if it is one that can be counted with. Raises LeaseError."""
    if value > _LARGEST:
        raise LeaseError(f"{what} {value} is out of range")
    return value


def short_text(text: str, most: int, what: str) -> str:
    """``text`` if it has at most ``most`` characters. Raises LeaseError."""
    if len(text) > most:
        raise LeaseError(f"{what} has at most {most} characters")
    return text


class _Refusals:
    """Logs refusals, the like of one only once in a while, and slows down who collects many."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], float] = {}
        self._full_since_s: float | None = None
        self._of_peer = Buckets(per_s=20.0, burst=200)
        self._slow: Counter[str] = Counter()

    def note(self, who: str, text: str, *, trace: bool = False) -> None:
        """Log that ``who`` was refused because of ``text``; ``trace``: with the exception."""
        kind = (who, re.sub(r"\d+|'[^']*'|\"[^\"]*\"", "#", text))
        now_s = time.monotonic()
        if len(self._told) >= _MAX_CAUSES:
            self._told = {key: at for key, at in self._told.items() if now_s - at < _QUIET_S}
        if now_s - self._told.get(kind, -_QUIET_S) < _QUIET_S:
            return
        if len(self._told) >= _MAX_CAUSES:
            if self._full_since_s is None or now_s - self._full_since_s >= _QUIET_S:
                self._full_since_s = now_s
                _LOG.warning("more callers are refused than are told one by one")
            return
        self._told[kind] = now_s
        shown = text.encode("unicode_escape").decode()
        _LOG.warning(
            "a caller was refused: %s: %s (the like is not told again for %d minutes)",
            *(who, shown[:_MAX_TEXT], _QUIET_S / 60),
            exc_info=trace,
        )

    async def slow_down(self, peer: str) -> None:
        """Before the answer to a refused ``peer``: nothing, or a pause if it collects many."""
        if self._of_peer.take(peer):
            return
        self.note(peer, "many calls are refused: the answers come slowly from now on")
        if self._slow[peer] >= _MAX_SLOW_OF_A_PEER or self._slow.total() >= _MAX_SLOW:
            return
        self._slow[peer] += 1
        try:
            await asyncio.sleep(_SLOW_ANSWER_S)
        finally:
            self._slow[peer] -= 1
            if not self._slow[peer]:
                del self._slow[peer]


class Calls:
    """What all calls share: threads for what may block, authentication, and refusals."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: ThreadPoolExecutor,
        login_pool: ThreadPoolExecutor,
        authenticator: Authenticator,
    ) -> None:
        self._loop, self._pool, self._authenticator = loop, pool, authenticator
        # Threads of their own: a munged that hangs must not keep leases from being renewed.
        self._login_pool = login_pool
        self._logins = Turns(
            _LOGIN_THREADS, waiting=_MAX_LOGINS, waiting_per_key=_MAX_LOGINS_OF_A_PEER
        )
        self._of_user = Buckets(per_s=100.0, burst=4000)
        self.refusals = _Refusals()

    async def run(self, call: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """``call`` in a thread: it may wait for a lock or a disk."""
        return await self._loop.run_in_executor(
            self._pool, functools.partial(call, *args, **kwargs)
        )

    async def uid_of(self, peer: str, credential: str, payload: str, nonce: str) -> int:
        """The authenticated caller. Raises NotAuthenticated, Busy, MungeError."""
        if len(credential) > MAX_CREDENTIAL_BYTES:
            raise NotAuthenticated("that is not a MUNGE credential")
        async with self._logins.turn(peer):
            check = functools.partial(
                self._authenticator.uid_of, credential, payload=payload, nonce=nonce
            )
            try:
                uid = await self._loop.run_in_executor(self._login_pool, check)
            except MungeError:
                raise  # not the caller's fault: it may try again
            except LeaseError as err:
                raise NotAuthenticated(str(err)) from err
        if not self._of_user.take(uid):
            raise Busy(f"user id {uid} calls too often: try again")
        return uid

    async def sign(self, peer: str, payload: str) -> str:
        """A credential of ours over ``payload``, for that caller. Raises Busy, MungeError."""
        async with self._logins.turn(peer):
            return await self._loop.run_in_executor(
                self._login_pool, self._authenticator.sign, payload
            )


def _status(err: Exception) -> tuple[grpc.StatusCode, str]:
    """What a caller is told of ``err``."""
    text = str(err)[:_MAX_TEXT]
    if isinstance(err, UnknownToken | NotAuthenticated):
        return grpc.StatusCode.UNAUTHENTICATED, text
    if isinstance(err, NotAllowed):
        return grpc.StatusCode.PERMISSION_DENIED, text
    if isinstance(err, Busy):
        return grpc.StatusCode.RESOURCE_EXHAUSTED, text
    if isinstance(err, NotYetKnown | MungeError):
        return grpc.StatusCode.UNAVAILABLE, text
    if isinstance(err, UnknownJobError):
        return grpc.StatusCode.NOT_FOUND, text
    if isinstance(err, LeaseError):
        return grpc.StatusCode.FAILED_PRECONDITION, text
    if isinstance(err, LedgerError):
        return grpc.StatusCode.UNAVAILABLE, "the controller's ledger is unusable"
    return grpc.StatusCode.INTERNAL, "internal error: see the controller's log"


def answered(call: Callable[[Any, Any, str], Awaitable[_T]]) -> Callable[[Any, Any, Any], Any]:
    """A gRPC method from ``call`` (self, request, peer): errors become statuses."""

    @functools.wraps(call)
    async def method(self: Any, request: Any, context: Any) -> _T:
        refusals: _Refusals = self.calls.refusals
        peer = peer_of(context)
        if isinstance(request, Unusable):
            code, text = request.code, request.text
            refusals.note(peer, f"{call.__name__}: {text}")
        else:
            try:
                return await call(self, request, peer)
            except Exception as err:  # noqa: BLE001 - all become a status; ours in words
                code, text = _status(err)
                _note(refusals, peer, call.__name__, err)
        await refusals.slow_down(peer)
        await context.abort(code, text)
        raise AssertionError("abort returned")

    return method


def _note(refusals: _Refusals, peer: str, name: str, err: Exception) -> None:
    if isinstance(err, NotYetKnown | UnknownJobError):
        return  # everyday: a restart of a job that we have not read yet, a question about one
    if isinstance(err, MungeError):
        refusals.note("everybody", str(err))
    elif isinstance(err, LeaseError):
        refusals.note(peer, f"{name}: {err}")
    else:
        refusals.note("everybody", f"{name}: {type(err).__name__}", trace=True)


def check_protocol(protocol: int) -> None:
    """Raises LeaseError for another protocol than ours."""
    if protocol != PROTOCOL:
        raise LeaseError(f"this controller speaks protocol {PROTOCOL}, the caller {protocol}")


def handlers(name: str, service: object, requests: Mapping[str, type[Message]]) -> Any:
    """The service ``name`` of our contract, with requests that are read leniently."""
    return grpc.method_handlers_generic_handler(
        f"slurm_synergy.v1.{name}",
        {
            method: grpc.unary_unary_rpc_method_handler(
                getattr(service, method),
                request_deserializer=reader(request.FromString),
                response_serializer=lambda reply: reply.SerializeToString(),
            )
            for method, request in requests.items()
        },
    )
