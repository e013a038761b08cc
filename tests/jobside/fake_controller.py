"""A controller for one task: the lease contract on a real gRPC server, driven by the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from slurm_synergy.proto import lease_pb2 as pb
from slurm_synergy.proto import lease_pb2_grpc as pb_grpc


class FakeController(pb_grpc.LeaseServiceServicer):
    """Hands out ``lease``; keeps what it was told in ``registered``, ``renewed``, ``finished``."""

    def __init__(self, port: int = 0, **lease: Any) -> None:
        self.registered: list[pb.RegisterRequest] = []
        self.renewed: list[pb.RenewRequest] = []
        self.finished: list[pb.FinishRequest] = []
        self.refuse: grpc.StatusCode | None = None
        self.gone = self.over = False
        self.stop_step = pb.StopStep()
        self.probe = pb.Probe()
        self.lease = pb.Lease(generation=1, **{"expires_in_s": 60, "node_cores": 1, **lease})
        self._news = threading.Condition()
        self._tokens: set[str] = set()
        self._closing = False
        self._server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        pb_grpc.add_LeaseServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        assert self.port, "the port is taken"
        self._server.start()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def grant(self, **changed: Any) -> None:
        """A new generation with these fields changed (``cores=[...]``, ``stop=True``)."""
        with self._news:
            new = pb.Lease()
            new.CopyFrom(self.lease)
            for name in changed:
                new.ClearField(name)
            new.MergeFrom(pb.Lease(**changed))
            new.generation += 1
            self.lease = new
            self._news.notify_all()

    def agree(self, step: int, *, committed: bool) -> None:
        with self._news:
            self.stop_step = pb.StopStep(step=step, committed=committed)
            self._news.notify_all()

    def measure(self, probe: pb.Probe, **changed: Any) -> None:
        """Have this measured (number 0: nothing any more) with these fields of the lease."""
        with self._news:
            self.probe = probe
            new = pb.Lease()
            new.CopyFrom(self.lease)
            for name in changed:
                new.ClearField(name)
            new.MergeFrom(pb.Lease(**changed))
            self.lease = new
            self._news.notify_all()

    def stop(self) -> None:
        with self._news:
            self._closing = True
            self._news.notify_all()
        self._server.stop(0.1).wait()

    def Register(self, request: pb.RegisterRequest, context: Any) -> pb.LeaseReply:
        self.registered.append(request)
        if self.refuse is not None:
            context.abort(self.refuse, "not this one")
        if self.gone:
            return pb.LeaseReply(gone=True, over=self.over)
        token = f"token-{id(self)}-{len(self.registered)}"
        self._tokens.add(token)
        return pb.LeaseReply(token=token, lease=self.lease, stop_step=self.stop_step)

    def Renew(self, request: pb.RenewRequest, context: Any) -> pb.LeaseReply:
        if request.token not in self._tokens:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "who is this?")
        self.renewed.append(request)
        if self.over:
            return pb.LeaseReply(gone=True, over=True)
        with self._news:
            self._news.wait_for(
                lambda: (
                    self._closing
                    or not context.is_active()
                    or self.lease.generation > request.known_generation
                    or self.stop_step != request.known_stop
                    or self.probe.number != request.profiling.known_probe
                ),
                timeout=min(request.wait_s, 2.0),
            )
            return pb.LeaseReply(lease=self.lease, stop_step=self.stop_step, probe=self.probe)

    def Finish(self, request: pb.FinishRequest, context: Any) -> pb.FinishReply:
        if request.token not in self._tokens:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "who is this?")
        self.finished.append(request)
        return pb.FinishReply(known=True)


def until(holds: Callable[[], Any], *, timeout_s: float = 15.0, what: str = "condition") -> Any:
    """Poll until ``holds()`` gives something true, and return that."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := holds()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.02)
    return found
