"""The calls of running jobs: register, renew (held open until there is news), finish."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from slurm_synergy.controller.auth import register_payload
from slurm_synergy.controller.call_guard import (
    Calls,
    NotAllowed,
    answered,
    bounded,
    check_protocol,
    short_text,
)
from slurm_synergy.controller.lease_messages import reply_of, report_of_renewal
from slurm_synergy.controller.leases import Gone, LeaseBook, Over, TaskView
from slurm_synergy.controller.tasks import TaskIdentity, TaskReport
from slurm_synergy.controller.throttle import Buckets, Busy
from slurm_synergy.proto import lease_pb2 as pb

__all__ = ["LEASE_CALLS", "MAX_HOLD_S", "LeaseService"]

MAX_HOLD_S = 10.0
"""Longest time that a Renew call is held open, in seconds."""

_T = TypeVar("_T")
_MAX_WAITERS = 4096
_MAX_NODE_NAME, _MAX_TOKEN = 255, 128


class LeaseService:
    """Answers the calls of tasks. Of the event loop of the server, whose thread alone uses it."""

    def __init__(self, calls: Calls, leases: LeaseBook, lease_s: float) -> None:
        self.calls, self._leases = calls, leases
        # A call held longer than the lease would let it run out at the caller.
        self._max_hold_s = min(MAX_HOLD_S, lease_s / 3)
        self._events: dict[int, asyncio.Event] = {}
        self._waiters = 0
        self._news = 0
        self._closing = False
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

    def close(self) -> None:
        """Answer the calls that are held, and hold none from now on."""
        self._closing = True
        self.wake(tuple(self._events))

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
        return reply_of(view, token=token)

    @answered
    async def Renew(self, request: pb.RenewRequest, peer: str) -> pb.LeaseReply:
        report = report_of_renewal(request)
        try:
            identity = await self._identity(request.token, request.task)
            self._count(identity)
            news = self._news
            view = self._leases.renew_at_once(identity, report)
            if view is None:
                view = await self.calls.run(self._leases.renew, identity, report)
            if request.wait_s > 0 and not _is_news(view, request):
                view = await self._hold(identity, request, view, news)
            return reply_of(view)
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
            while loop.time() < deadline_s and not self._closing:
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


LEASE_CALLS: Mapping[str, type[Message]] = {
    "Register": pb.RegisterRequest,
    "Renew": pb.RenewRequest,
    "Finish": pb.FinishRequest,
}
"""The methods of the service, and what each is asked with."""
