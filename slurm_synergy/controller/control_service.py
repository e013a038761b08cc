"""The calls of ``synergyctl``: reading is for every authenticated user, changing for operators."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from google.protobuf.message import Message

from slurm_synergy.controller.auth import control_payload
from slurm_synergy.controller.call_guard import (
    Calls,
    NotAllowed,
    NotAuthenticated,
    answered,
    check_protocol,
    short_text,
)
from slurm_synergy.proto import lease_pb2 as pb

__all__ = ["CONTROL_CALLS", "ControlPort", "ControlService", "ProfilePort"]

CONTROL_CALLS: Mapping[str, type[Message]] = dict.fromkeys(
    ("Status", "Jobs", "Explain", "Drain", "Resume", "Profiles", "Import", "Forget"),
    pb.ControlRequest,
)
"""The methods of the service, and what each is asked with."""

_LOG = logging.getLogger(__name__)
_MAX_JOB_NAME = 32


class ProfilePort(Protocol):
    """What the control calls need from the store of profiles; thread-safe."""

    def profiles(self, *, viewer_uid: int, operators: Collection[int]) -> Mapping[str, object]:
        """The profiles that this viewer may see, as one JSON object."""
        ...

    def import_profile(
        self, text: str, *, uid: int, operators: Collection[int]
    ) -> Mapping[str, object]:
        """Keep a profile that is a JSON document. Raises LeaseError."""
        ...

    def forget_profile(
        self, key: str, *, uid: int, operators: Collection[int]
    ) -> Mapping[str, object]:
        """Drop a profile. Raises LeaseError."""
        ...


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

    def explain(
        self, job: str, *, viewer_uid: int, operators: Collection[int]
    ) -> Mapping[str, object]:
        """Why a job waits or has what it has, with what this viewer may see. Raises LeaseError."""
        ...

    def set_draining(self, draining: bool) -> None:
        """Start nothing more, or go on."""
        ...

    @property
    def shelf(self) -> ProfilePort:
        """The store of profiles."""
        ...


class ControlService:
    """Implements the service over ``control``; ``operators`` may steer."""

    def __init__(self, calls: Calls, control: ControlPort, operators: frozenset[int]) -> None:
        self.calls, self._control, self._operators = calls, control, operators

    @answered
    async def Status(self, request: pb.ControlRequest, peer: str) -> pb.ControlReply:
        await self._caller(request, peer, "status")
        return _json_reply(dict(await self.calls.run(self._control.status)))

    @answered
    async def Jobs(self, request: pb.ControlRequest, peer: str) -> pb.ControlReply:
        uid = await self._caller(request, peer, "jobs")
        jobs = await self.calls.run(self._control.jobs, viewer_uid=uid, operators=self._operators)
        return _json_reply({"jobs": list(jobs)})

    @answered
    async def Explain(self, request: pb.ControlRequest, peer: str) -> pb.ControlReply:
        uid = await self._caller(request, peer, "explain")
        short_text(request.job, _MAX_JOB_NAME, "a job id")
        found = await self.calls.run(
            self._control.explain, request.job, viewer_uid=uid, operators=self._operators
        )
        return _json_reply(found)

    @answered
    async def Drain(self, request: pb.ControlRequest, peer: str) -> pb.ControlReply:
        return await self._set_draining(request, peer, "drain", True)

    @answered
    async def Resume(self, request: pb.ControlRequest, peer: str) -> pb.ControlReply:
        return await self._set_draining(request, peer, "resume", False)

    @answered
    async def Profiles(self, request: pb.ControlRequest, peer: str) -> pb.ControlReply:
        uid = await self._caller(request, peer, "profiles")
        call = self._control.shelf.profiles
        return _json_reply(await self.calls.run(call, viewer_uid=uid, operators=self._operators))

    @answered
    async def Import(self, request: pb.ControlRequest, peer: str) -> pb.ControlReply:
        return await self._change_profiles(request, peer, "import")

    @answered
    async def Forget(self, request: pb.ControlRequest, peer: str) -> pb.ControlReply:
        return await self._change_profiles(request, peer, "forget")

    async def _change_profiles(
        self, request: pb.ControlRequest, peer: str, method: str
    ) -> pb.ControlReply:
        uid = await self._caller(request, peer, method)
        shelf = self._control.shelf
        change = shelf.import_profile if method == "import" else shelf.forget_profile
        done = await self.calls.run(change, request.body, uid=uid, operators=self._operators)
        _LOG.info("user id %d: profile %s: %s", uid, done["key"], method)
        return _json_reply(done)

    async def _set_draining(
        self, request: pb.ControlRequest, peer: str, method: str, draining: bool
    ) -> pb.ControlReply:
        uid = await self._caller(request, peer, method)
        if uid not in self._operators:
            raise NotAllowed(
                f"{method} is for operators, and user id {uid} is none; an administrator can "
                "add it to 'operators' in the settings"
            )
        await self.calls.run(self._control.set_draining, draining)
        _LOG.info("user id %d: %s", uid, method)
        return _json_reply({"draining": draining})

    async def _caller(self, request: pb.ControlRequest, peer: str, method: str) -> int:
        check_protocol(request.protocol)
        # The method is part of the nonce: a credential for reading cannot be used for changing.
        if not request.nonce.startswith(f"{method}-"):
            raise NotAuthenticated(f"the nonce of this call begins with '{method}-'")
        payload = control_payload(request.nonce, request.body)
        return await self.calls.uid_of(peer, request.credential, payload, request.nonce)


def _json_reply(content: Mapping[str, object]) -> pb.ControlReply:
    return pb.ControlReply(json=json.dumps(content, allow_nan=False))
