"""The lease service under random calls over real gRPC: it refuses, changes nothing, serves on."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service_world import ServiceWorld

from slurm_synergy.controller import call_guard
from slurm_synergy.proto import lease_pb2 as pb

UID = os.getuid()
LEASE_METHODS = ("Register", "Renew", "Finish")
CONTROL_METHODS = ("Status", "Jobs", "Explain", "Drain", "Resume")
PATHS = [f"/slurm_synergy.v1.LeaseService/{name}" for name in LEASE_METHODS]
PATHS += [f"/slurm_synergy.v1.ControlService/{name}" for name in CONTROL_METHODS]
REFUSALS = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
}
FEW = settings(max_examples=60)

u32 = st.integers(0, 2**32 - 1)
u64 = st.one_of(st.integers(0, 1000), st.integers(0, 2**53), st.integers(0, 2**64 - 1))
doubles = st.floats(width=64)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
tasks = st.builds(
    pb.TaskId,
    job_id=st.one_of(st.just(1), st.just(2), u64),
    restart_count=st.one_of(st.just(0), u32),
    rank=st.one_of(st.just(0), u32),
    ranks=st.one_of(st.just(1), u32),
    node=st.one_of(st.just("n1"), texts),
)
progresses = st.builds(
    pb.Progress,
    step=u64,
    samples=u64,
    epoch=u64,
    step_s=doubles,
    wait_s=doubles,
    pinned_cpus=u64,
    stepped_s=doubles,
    waited_s=doubles,
)
data_read = st.builds(
    pb.DataRead,
    dataset_mib=doubles,
    samples=u64,
    storage_mib_s=doubles,
    read_mib=doubles,
    in_memory=st.booleans(),
    cached=st.booleans(),
    how=texts,
)
measured = st.builds(
    pb.Measured,
    probe=st.one_of(st.just(1), u64),
    steps=u64,
    samples_per_s=doubles,
    waits_known=st.booleans(),
    wait_share=doubles,
    busy_samples_per_s=doubles,
    data=st.one_of(st.none(), data_read),
)
profilings = st.builds(
    pb.Profiling,
    known_probe=u64,
    measured=st.one_of(st.none(), measured),
    own_mem_mib=u64,
    program=texts,
)
renewals = st.builds(
    pb.RenewRequest,
    known_generation=u64,
    progress=progresses,
    proposed_stop_step=u64,
    accepted_stop_step=u64,
    refused_stop_step=u64,
    # Held calls have tests of their own.
    wait_s=st.sampled_from([0.0, -1.0, float("nan"), 0.01]),
    known_stop=st.builds(pb.StopStep, step=u64, committed=st.booleans()),
    profiling=st.one_of(st.none(), profilings),
)


def ledger_of(state_dir: Path) -> bytes:
    """All that the ledger holds, byte by byte: the file and what is not yet merged into it."""
    names = ("ledger.sqlite", "ledger.sqlite-wal")
    return b"|".join((state_dir / name).read_bytes() for name in names)


class Fuzzed:
    """A service with two jobs: 1 is ours, 2 somebody else's."""

    def __init__(self, world: ServiceWorld, state_dir: Path) -> None:
        self.world, self.state_dir = world, state_dir
        world.grant(1, 6, uid=UID)
        world.grant(2, 6, uid=UID + 1)
        self.token = world.register(world.task(1)).token

    def raw(self, path: str, payload: bytes) -> tuple[grpc.StatusCode, bytes]:
        call = self.world.channel.unary_unary(path, None, None)
        try:
            return grpc.StatusCode.OK, call(payload, timeout=20)
        except grpc.RpcError as err:
            return err.code(), b""

    def ledger(self) -> bytes:
        return ledger_of(self.state_dir)

    def still_serves(self) -> None:
        request = pb.RenewRequest(token=self.token, task=self.world.task(1))
        assert self.world.stub.Renew(request, timeout=20).lease.generation == 1


@pytest.fixture(scope="module")
def fuzzed(
    tmp_path_factory: pytest.TempPathFactory,
    munge_socket: Path,
) -> Iterator[Fuzzed]:
    patch = pytest.MonkeyPatch()
    # What a flood is answered with has a test of its own.
    patch.setattr(call_guard, "_SLOW_ANSWER_S", 0.0)
    patch.setattr("slurm_synergy.controller.lease_calls.Buckets", _Unlimited)
    state_dir = tmp_path_factory.mktemp("fuzz")
    world = ServiceWorld(state_dir, munge_socket, operators=frozenset())
    handler, logger = _Unexpected(), logging.getLogger()
    logger.addHandler(handler)
    yield Fuzzed(world, state_dir)
    logger.removeHandler(handler)
    world.close()
    patch.undo()
    assert handler.met == []


class _Unexpected(logging.Handler):
    """Keeps what the service logs with a traceback: a caller must not be able to cause that."""

    def __init__(self) -> None:
        super().__init__()
        self.met: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.met.append(self.format(record))


class _Unlimited:
    def __init__(self, **_: Any) -> None:
        pass

    def take(self, key: object) -> bool:
        return True


def harmless(code: grpc.StatusCode, path: str, answer: bytes) -> bool:
    """Refused, or told that there is nothing."""
    if code is not grpc.StatusCode.OK:
        return code in REFUSALS
    if path.endswith("Finish"):
        return not pb.FinishReply.FromString(answer).known
    reply = pb.LeaseReply.FromString(answer)
    return path.endswith("Renew") and reply.gone and not reply.token


@pytest.mark.parametrize("path", PATHS)
@FEW
@given(payload=st.binary(max_size=300))
def test_random_bytes_are_refused_and_change_nothing(
    fuzzed: Fuzzed, path: str, payload: bytes
) -> None:
    before = fuzzed.ledger()
    code, answer = fuzzed.raw(path, payload)
    assert harmless(code, path, answer), (code, answer)
    assert fuzzed.ledger() == before


@FEW
@given(request=renewals, task=tasks, token=texts)
def test_random_fields_without_a_token_are_refused_and_change_nothing(
    fuzzed: Fuzzed, request: pb.RenewRequest, task: pb.TaskId, token: str
) -> None:
    before = fuzzed.ledger()
    request.task.CopyFrom(task)
    request.token = token
    path = PATHS[1]
    code, answer = fuzzed.raw(path, request.SerializeToString())
    assert harmless(code, path, answer), (code, answer)
    ended = pb.FinishRequest(token=token, task=task, checkpointed=True)
    code, answer = fuzzed.raw(PATHS[2], ended.SerializeToString())
    assert harmless(code, PATHS[2], answer), (code, answer)
    assert fuzzed.ledger() == before


@settings(max_examples=25)
@given(task=tasks, protocol=st.one_of(st.just(1), u32), nonce=texts, tail=texts, step=u32)
def test_random_registrations_are_refused_and_change_nothing(
    fuzzed: Fuzzed, task: pb.TaskId, protocol: int, nonce: str, tail: str, step: int
) -> None:
    before = fuzzed.ledger()
    request = pb.RegisterRequest(
        protocol=protocol, task=task, credential=f"MUNGE:{tail}", nonce=nonce, step_id=step
    )
    code, _ = fuzzed.raw(PATHS[0], request.SerializeToString())
    assert code in REFUSALS
    assert fuzzed.ledger() == before


@FEW
@given(request=renewals)
def test_whatever_a_task_of_ours_reports_it_is_answered_or_refused_in_words(
    fuzzed: Fuzzed, request: pb.RenewRequest
) -> None:
    request.token = fuzzed.token
    request.task.CopyFrom(fuzzed.world.task(1))
    code, answer = fuzzed.raw(PATHS[1], request.SerializeToString())
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.FAILED_PRECONDITION)
    if code is grpc.StatusCode.OK:
        assert not pb.LeaseReply.FromString(answer).gone
    fuzzed.world.book.snapshot()
    fuzzed.world.ledger.read()


@FEW
@given(place=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.integers(0, 40))
def test_a_damaged_renewal_does_nothing_for_another_job(
    fuzzed: Fuzzed, place: int, byte: int, cut: int
) -> None:
    good = pb.RenewRequest(token=fuzzed.token, task=fuzzed.world.task(1)).SerializeToString()
    damaged = bytearray(good)
    damaged[place % len(damaged)] = byte
    before = fuzzed.world.book.snapshot()[2]["progress"]
    code, _ = fuzzed.raw(PATHS[1], bytes(damaged[: len(damaged) - cut]))
    assert code is grpc.StatusCode.OK or code in REFUSALS
    assert fuzzed.world.book.snapshot()[2]["progress"] == before


@FEW
@given(payload=st.binary(min_size=1, max_size=2000), greets=st.booleans())
def test_what_is_no_grpc_at_all_does_not_stop_the_service(
    fuzzed: Fuzzed, payload: bytes, greets: bool
) -> None:
    hello = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if greets else b""
    with socket.create_connection(("127.0.0.1", fuzzed.world.server.port), timeout=5) as raw:
        raw.sendall(hello + payload)
    fuzzed.still_serves()


def test_calls_of_any_size_are_answered(fuzzed: Fuzzed) -> None:
    for path in PATHS:
        for size in (0, 1, 70_000, 300_000):
            code, answer = fuzzed.raw(path, b"\xff" * size)
            assert harmless(code, path, answer), (path, size, code)
    fuzzed.still_serves()
