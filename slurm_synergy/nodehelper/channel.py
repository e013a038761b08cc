"""The line to the controller: asks for the leases of this node, and believes only what is signed.

Both sides prove who they are by MUNGE, for each answer: we that we are root, the controller that
the answer is its own, whole, and to this question.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from slurm_synergy.controller.auth import (
    Authenticator,
    new_nonce,
    node_leases_payload,
    node_request_payload,
)
from slurm_synergy.errors import LeaseError, NoControllerError
from slurm_synergy.nodehelper.leases import JobLease
from slurm_synergy.proto import node_pb2 as pb
from slurm_synergy.proto import node_pb2_grpc as pb_grpc

__all__ = ["PROTOCOL", "Answer", "Channel", "read_answer"]

PROTOCOL = 1

_LONGEST_LEASE_S = 86_400.0
_CALL_MARGIN_S = 5.0
_MAX_ANSWER_BYTES = 4 * 1024**2
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", _MAX_ANSWER_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The leases of this node, and the state that stands for them in the next question."""

    leases: tuple[JobLease, ...]
    state: bytes


def read_answer(content: bytes, node: str, received_s: float) -> Answer:
    """Take an authenticated answer apart. Raises LeaseError for one that makes no sense.

    ``received_s`` is on the monotonic clock. No more of the answer's age than the margin of the
    call can be unknown to us.
    """
    try:
        message = pb.NodeLeases.FromString(content)
    except DecodeError as err:
        raise LeaseError("the controller's answer is malformed") from err
    if message.node != node:
        raise LeaseError(f"the controller's answer is about node {message.node!r}, not {node!r}")
    return Answer(
        leases=tuple(_lease(one, received_s) for one in message.leases), state=message.state
    )


def _lease(one: pb.NodeLease, received_s: float) -> JobLease:
    lasts_s = one.expires_in_s if math.isfinite(one.expires_in_s) else 0.0
    return JobLease(
        job_id=one.job_id,
        owner_uid=one.owner_uid,
        incarnation=one.restart_count,
        generation=one.generation,
        until_s=received_s + min(max(0.0, lasts_s), _LONGEST_LEASE_S),
        cores=tuple(sorted(set(one.cores))),
        node_cores=one.node_cores,
        mem_mib=one.mem_mib,
    )


class Channel:
    """One helper's line to the controller at ``endpoint``.

    ``controller_uids`` are the accounts whose signature counts.
    """

    def __init__(
        self,
        endpoint: str,
        node: str,
        *,
        authenticator: Authenticator,
        controller_uids: Collection[int],
    ) -> None:
        self.endpoint = endpoint
        self._node, self._authenticator = node, authenticator
        self._controller_uids = frozenset(controller_uids)
        self._channel = grpc.insecure_channel(endpoint, options=_OPTIONS)
        self._stub = pb_grpc.NodeServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def ask(self, known: bytes, wait_s: float) -> Answer:
        """The leases of this node, once they differ from ``known`` or after ``wait_s`` at most.

        Raises NoControllerError when there is no answer, LeaseError for a refusal and for an
        answer that is not to be believed, MungeError when munge cannot be used here.
        """
        nonce = new_nonce()
        request = pb.NodeRequest(
            protocol=PROTOCOL,
            node=self._node,
            nonce=nonce,
            credential=self._authenticator.sign(node_request_payload(self._node, nonce)),
            wait_s=wait_s,
            known=known,
        )
        try:
            reply = self._stub.Leases(request, timeout=wait_s + _CALL_MARGIN_S)
        except grpc.RpcError as err:
            raise self._failure(err) from err
        received_s = time.monotonic()
        uid = self._authenticator.uid_of(
            reply.credential,
            payload=node_leases_payload(self._node, nonce, reply.leases),
            nonce=nonce,
        )
        if uid not in self._controller_uids:
            raise LeaseError(
                f"the answer of {self.endpoint} is signed by user id {uid}, which is not the "
                "controller's; name its account with --controller-user"
            )
        return read_answer(reply.leases, self._node, received_s)

    def _failure(self, err: grpc.RpcError) -> LeaseError:
        code, details = err.code(), err.details()
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return LeaseError(f"the controller at {self.endpoint} knows no helpers on nodes")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            return NoControllerError(f"no answer from the controller at {self.endpoint}: {details}")
        return LeaseError(f"the controller at {self.endpoint} refused: {details}")

    def close(self) -> None:
        """Break off a call that waits, and end the connection."""
        self._channel.close()
