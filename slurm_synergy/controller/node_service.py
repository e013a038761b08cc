"""The calls of the optional helper on a compute node (``slurm-synergyd --node``).

A helper acts as root on what it is told, so it is told under a signature: a MUNGE credential of
this controller over the answer, the node and the caller's nonce. See ``docs/adr/033-*.md``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from google.protobuf.message import Message

from slurm_synergy.controller.auth import node_leases_payload, node_request_payload
from slurm_synergy.controller.call_guard import (
    Calls,
    NotAllowed,
    answered,
    check_protocol,
    short_text,
)
from slurm_synergy.controller.node_helpers import NodeHelpers
from slurm_synergy.controller.node_view import NodeView, leases_message
from slurm_synergy.controller.throttle import Buckets, Busy
from slurm_synergy.errors import LeaseError
from slurm_synergy.proto import node_pb2 as pb

__all__ = ["NODE_CALLS", "NodePort", "NodeService"]

NODE_CALLS: Mapping[str, type[Message]] = {"Leases": pb.NodeRequest}
"""The methods of the service, and what each is asked with."""

_MAX_HOLD_S = 30.0
_MAX_WAITERS = 4096
_MAX_NODE_NAME, _MAX_STATE = 255, 64
# Several changes of one round are one answer.
_COLLECT_S = 0.05


class NodePort(Protocol):
    """What the service needs from the keeper of leases; thread-safe."""

    helpers: NodeHelpers

    def on_node(self, node: str) -> Sequence[NodeView]:
        """The leases of all jobs that hold something on that node, by job id."""
        ...


class NodeService:
    """Implements the service; ``lease_s`` bounds how long a call is held."""

    def __init__(self, calls: Calls, leases: NodePort, lease_s: float) -> None:
        self.calls, self._leases = calls, leases
        # Whoever asks again after this time has two thirds of every lease left.
        self._max_hold_s = min(_MAX_HOLD_S, lease_s / 3)
        self._events: dict[str, asyncio.Event] = {}
        self._nodes_of: dict[int, set[str]] = {}
        self._waiters = 0
        self._closing = False
        self._of_node = Buckets(per_s=5.0, burst=50)

    def wake(self, job_id: int, nodes: Collection[str]) -> None:
        """There may be news of this job, which is on ``nodes`` now (none: it has ended)."""
        for node in {*nodes, *self._nodes_of.pop(job_id, ())}:
            event = self._events.pop(node, None)
            if event is not None:
                event.set()

    def close(self) -> None:
        """Answer the calls that are held, and hold none from now on."""
        self._closing = True
        for event in self._events.values():
            event.set()

    @answered
    async def Leases(self, request: pb.NodeRequest, peer: str) -> pb.NodeReply:
        check_protocol(request.protocol)
        node = short_text(request.node, _MAX_NODE_NAME, "the name of a node")
        if not node or not node.isprintable():
            raise LeaseError("that is not the name of a node")
        if len(request.known) > _MAX_STATE:
            raise LeaseError(f"a state has at most {_MAX_STATE} bytes")
        payload = node_request_payload(node, request.nonce)
        uid = await self.calls.uid_of(peer, request.credential, payload, request.nonce)
        if uid != 0:
            raise NotAllowed(f"the leases of a node are told to root, not to user id {uid}")
        if not self._of_node.take(node):
            raise Busy(f"the helper of node {node} calls too often: try again")
        self._leases.helpers.heard(node)
        content = (await self._news(node, request)).SerializeToString()
        signed = node_leases_payload(node, request.nonce, content)
        reply = pb.NodeReply(leases=content, credential=await self.calls.sign(peer, signed))
        self._leases.helpers.heard(node)
        return reply

    async def _news(self, node: str, request: pb.NodeRequest) -> pb.NodeLeases:
        """The node's leases: as soon as they differ from those known, or after the wait."""
        loop = asyncio.get_running_loop()
        wait_s = request.wait_s if request.wait_s > 0 else 0.0  # NaN is 0 too
        deadline_s = loop.time() + min(wait_s, self._max_hold_s)
        self._waiters += 1
        try:
            while True:
                # The event is there before the look, so that no news falls between the two.
                event = self._events.setdefault(node, asyncio.Event())
                views = await self.calls.run(self._leases.on_node, node)
                self._note(node, (view.job_id for view in views))
                found = leases_message(node, views)
                left_s = 0.0 if self._closing else deadline_s - loop.time()
                if found.state != request.known or left_s <= 0 or self._waiters > _MAX_WAITERS:
                    return found
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), left_s)
                    await asyncio.sleep(_COLLECT_S)
        finally:
            self._waiters -= 1

    def _note(self, node: str, job_ids: Iterable[int]) -> None:
        for job_id in job_ids:
            self._nodes_of.setdefault(job_id, set()).add(node)
