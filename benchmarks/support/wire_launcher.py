"""What the lease service sees of a launcher: a connection of its own, a session, renewals.

For loads that no two cores could make with launchers as they are: those have a process each, on
nodes of their own. The messages are the launchers', and so is the reading of the answers.
"""

from __future__ import annotations

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
from lease_world import node_of_job

from slurm_synergy.controller.auth import new_nonce, register_payload
from slurm_synergy.jobside.lease_client import PROTOCOL, munge_credential
from slurm_synergy.proto import lease_pb2 as pb
from slurm_synergy.proto import lease_pb2_grpc as pb_grpc

__all__ = ["WireLauncher"]

_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))


class WireLauncher:
    """One task of a job with ``ranks`` tasks; made inside the event loop that it lives in."""

    def __init__(self, endpoint: str, job_id: int, rank: int = 0, *, ranks: int = 1) -> None:
        self._channel = grpc.aio.insecure_channel(endpoint, options=_OPTIONS)
        self._stub: Any = pb_grpc.LeaseServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self.job_id = job_id
        self._task = pb.TaskId(
            job_id=job_id,
            rank=rank,
            ranks=ranks,
            local_rank=rank,
            local_ranks=ranks,
            node=node_of_job(job_id),
        )
        self.reply = pb.LeaseReply()

    async def register(self, pool: ThreadPoolExecutor, munge_socket: str) -> pb.LeaseReply:
        """Introduce the task; again while the service has others to look at first."""
        loop = asyncio.get_running_loop()
        while True:
            nonce = new_nonce()
            payload = register_payload(self._task.job_id, 0, self._task.rank, nonce)
            credential = "MUNGE:"
            if munge_socket:
                credential = await loop.run_in_executor(
                    pool, munge_credential, payload, munge_socket
                )
            request = pb.RegisterRequest(
                protocol=PROTOCOL, task=self._task, credential=credential, nonce=nonce
            )
            try:
                self.reply = await self._stub.Register(request, timeout=60)
                return self.reply
            except grpc.aio.AioRpcError as err:
                if err.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                await asyncio.sleep(random.uniform(0.2, 1.0))

    async def renew(self, progress: pb.Progress, wait_s: float) -> pb.LeaseReply:
        """Tell ``progress`` and what is known, and wait for an answer."""
        token = self.reply.token
        request = pb.RenewRequest(
            token=token,
            task=self._task,
            known_generation=self.reply.lease.generation,
            known_stop=self.reply.stop_step,
            progress=progress,
            profiling=pb.Profiling(),
            wait_s=wait_s,
        )
        self.reply = await self._stub.Renew(request, timeout=wait_s + 30)
        self.reply.token = token
        return self.reply

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close(None)
