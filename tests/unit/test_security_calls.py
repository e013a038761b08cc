"""Hostile calls to the lease service: refused, told once, without effect, at nobody else's cost."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from service_world import ServiceWorld

from slurm_synergy.controller import call_guard
from slurm_synergy.controller.auth import Authenticator, new_nonce, register_payload
from slurm_synergy.controller.control_service import CONTROL_CALLS
from slurm_synergy.controller.lease_calls import LEASE_CALLS
from slurm_synergy.controller.node_service import NODE_CALLS
from slurm_synergy.controller.throttle import Buckets, Busy, Turns
from slurm_synergy.proto import lease_pb2 as pb
from slurm_synergy.proto import lease_pb2_grpc as pb_grpc
from slurm_synergy.proto import node_pb2

UID = os.getuid()
NOBODY = 65534
Code = grpc.StatusCode
# Of more than 256 calls at once over one connection gRPC itself refuses the rest.
TOO_MANY_STREAMS = Code.UNAVAILABLE


@pytest.fixture
def world(tmp_path: Path, munge_socket: Path) -> Iterator[ServiceWorld]:
    world = ServiceWorld(tmp_path, munge_socket, operators=frozenset({UID}), listen="[::]:0")
    world.grant(1, 6, uid=UID)
    world.grant(2, 6, uid=UID + 1)
    yield world
    world.close()


def state_of(directory: Path) -> bytes:
    names = ("ledger.sqlite", "ledger.sqlite-wal")
    return b"|".join((directory / name).read_bytes() for name in names)


def refused(call: Callable[[], object]) -> tuple[Code, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def renewal(reply: pb.LeaseReply, task: pb.TaskId, **fields: object) -> pb.RenewRequest:
    return pb.RenewRequest(
        token=reply.token,
        task=task,
        known_generation=reply.lease.generation,
        known_stop=reply.stop_step,
        **fields,
    )


def registration_of_nobody(world: ServiceWorld, task: pb.TaskId) -> pb.RegisterRequest:
    nonce = new_nonce()
    payload = register_payload(task.job_id, task.restart_count, task.rank, nonce)
    made = subprocess.run(
        ["munge", "--no-input", "--string", payload, f"--socket={world.munge_socket}"],
        user=NOBODY,
        capture_output=True,
        text=True,
        check=True,
    )
    return pb.RegisterRequest(protocol=1, task=task, credential=made.stdout.strip(), nonce=nonce)


@pytest.mark.skipif(UID != 0, reason="only root can call as another user")
def test_another_user_gets_nothing_of_a_job(
    world: ServiceWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = state_of(tmp_path)
    for _ in range(5):
        request = registration_of_nobody(world, world.task(1))
        code, text = refused(lambda request=request: world.stub.Register(request, timeout=20))
        assert code is Code.PERMISSION_DENIED
        assert text == f"job 1 is not a job of user id {NOBODY}"
    assert state_of(tmp_path) == before
    told = [one.message for one in caplog.records if f"user id {NOBODY}" in one.message]
    assert len(told) == 1


def test_every_hostile_call_is_refused_and_logged_and_leaves_the_ledger_alone(
    world: ServiceWorld, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = world.task(1)
    replayed, other = world.registration(task), world.registration(task)
    redirected, version = world.registration(task), world.registration(task)
    reply = world.stub.Register(replayed, timeout=20)
    redirected.task.job_id = 2
    version.protocol = 2
    other.task.node = "n" * 300
    long_token = pb.RenewRequest(token="t" * 5000, task=task)
    far = renewal(reply, task, progress=pb.Progress(step=2**63))
    ended = pb.FinishRequest(token=reply.token, task=task, step=2**64 - 1)
    stolen = pb.RenewRequest(token=reply.token, task=world.task(2))
    calls: list[tuple[Callable[[], object], Code, str]] = [
        (lambda: world.stub.Register(replayed, timeout=20), Code.UNAUTHENTICATED, "Replayed"),
        (lambda: world.stub.Register(redirected, timeout=20), Code.UNAUTHENTICATED, "another call"),
        (lambda: world.stub.Register(version, timeout=20), Code.FAILED_PRECONDITION, "protocol 1"),
        (lambda: world.stub.Register(other, timeout=20), Code.FAILED_PRECONDITION, "255 char"),
        (lambda: world.stub.Renew(long_token, timeout=20), Code.FAILED_PRECONDITION, "128 char"),
        (lambda: world.stub.Renew(far, timeout=20), Code.FAILED_PRECONDITION, "out of range"),
        (lambda: world.stub.Finish(ended, timeout=20), Code.FAILED_PRECONDITION, "out of range"),
        (lambda: world.stub.Renew(stolen, timeout=20), Code.UNAUTHENTICATED, "session token"),
    ]
    raw = world.channel.unary_unary("/slurm_synergy.v1.LeaseService/Renew", None, None)
    calls.append((lambda: raw(b"\xff\xff", timeout=20), Code.INVALID_ARGUMENT, "malformed"))
    large = b"\0" * 70_000
    calls.append((lambda: raw(large, timeout=20), Code.RESOURCE_EXHAUSTED, "65536 bytes"))
    before = state_of(tmp_path)
    for call, code, words in calls:
        got, text = refused(call)
        assert (got, words in text) == (code, True), (got, text)
        assert any(words in one.message for one in caplog.records), words
    assert state_of(tmp_path) == before
    assert world.stub.Renew(renewal(reply, task), timeout=20).lease.generation == 1


def test_a_text_from_outside_cannot_forge_a_line_of_the_log(
    world: ServiceWorld, caplog: pytest.LogCaptureFixture
) -> None:
    task = world.task(1)
    task.node = "x\nCRITICAL all is lost\x1b[2J"
    refused(lambda: world.register(task))
    assert not any("\n" in one.message or "\x1b" in one.message for one in caplog.records)


def test_a_flood_of_refusals_is_a_few_lines_and_slow_answers(
    world: ServiceWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_guard, "_SLOW_ANSWER_S", 0.6)
    began_s = time.monotonic()
    calls = [
        world.stub.Renew.future(pb.RenewRequest(token="guess", task=world.task(1)), timeout=60)
        for _ in range(500)
    ]
    codes = {call.code() for call in calls}
    assert Code.UNAUTHENTICATED in codes
    assert codes <= {Code.UNAUTHENTICATED, TOO_MANY_STREAMS}
    # 200 at once and what comes back at 20 a second are answered as they come, 200 slowly.
    assert time.monotonic() - began_s > 0.6
    assert 1 <= len(caplog.records) <= 3
    assert any("slowly" in one.message for one in caplog.records)


def test_a_task_that_renews_without_a_pause_is_told_to_wait_and_others_are_served(
    world: ServiceWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_guard, "_SLOW_ANSWER_S", 0.3)
    world.grant(3, 6, uid=UID)
    greedy, modest = world.task(1), world.task(3)
    greeting, quiet = world.register(greedy), world.register(modest)
    flood = [world.stub.Renew.future(renewal(greeting, greedy), timeout=60) for _ in range(600)]
    with grpc.insecure_channel(
        f"[::1]:{world.server.port}", options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        reply = pb_grpc.LeaseServiceStub(channel).Renew(renewal(quiet, modest), timeout=20)
    assert reply.lease.generation >= 1
    codes = [call.code() for call in flood]
    assert {Code.OK, Code.RESOURCE_EXHAUSTED} <= set(codes)
    assert set(codes) <= {Code.OK, Code.RESOURCE_EXHAUSTED, TOO_MANY_STREAMS}
    assert 100 <= codes.count(Code.OK) < 500
    assert not reply.gone


def test_registrations_from_one_place_do_not_shut_out_those_from_another(
    world: ServiceWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here, so no second address on one machine")
    admitted, uid_of = threading.Event(), Authenticator.uid_of

    def slowly(self: Authenticator, credential: str, *, payload: str, nonce: str) -> int:
        if credential == "MUNGE:AAAA:":
            admitted.wait(0.5)
        return uid_of(self, credential, payload=payload, nonce=nonce)

    monkeypatch.setattr(Authenticator, "uid_of", slowly)
    bad = pb.RegisterRequest(
        protocol=1, task=world.task(1), credential="MUNGE:AAAA:", nonce=new_nonce()
    )
    with grpc.insecure_channel(f"127.0.0.1:{world.server.port}") as channel:
        stub = pb_grpc.LeaseServiceStub(channel)
        flood = [stub.Register.future(bad, timeout=120) for _ in range(250)]
        mine = world.registration(world.task(1))
        with grpc.insecure_channel(f"[::1]:{world.server.port}") as other:
            reply = pb_grpc.LeaseServiceStub(other).Register(mine, timeout=60)
        waiting = sum(not call.done() for call in flood)
        admitted.set()
        codes = {call.code() for call in flood}
    assert reply.token
    # It was not the last in the line, whatever the machine does meanwhile.
    assert waiting > 0
    assert codes <= {Code.UNAUTHENTICATED, Code.RESOURCE_EXHAUSTED, TOO_MANY_STREAMS}


def test_buckets_fill_again_and_forget_the_oldest() -> None:
    now_s = 0.0
    buckets = Buckets(per_s=2.0, burst=3, keys=2, now_s=lambda: now_s)
    assert [buckets.take("a") for _ in range(4)] == [True, True, True, False]
    now_s = 1.0
    assert [buckets.take("a") for _ in range(3)] == [True, True, False]
    assert buckets.take("b")
    assert buckets.take("c")
    assert buckets.take("a")  # forgotten, so full again


def test_turns_go_round_the_keys_and_cancelled_waiters_lose_none() -> None:
    order: list[str] = []

    async def caller(turns: Turns, key: str) -> None:
        async with turns.turn(key):
            order.append(key)
            await asyncio.sleep(0)

    async def scene() -> None:
        turns = Turns(1, waiting=8, waiting_per_key=5)
        async with turns.turn("first"):
            many = [asyncio.create_task(caller(turns, "many")) for _ in range(5)]
            await asyncio.sleep(0)
            with pytest.raises(Busy):
                await caller(turns, "many")
            few = [asyncio.create_task(caller(turns, "few")) for _ in range(2)]
            await asyncio.sleep(0)
            many[1].cancel()
        await asyncio.gather(*many, *few, return_exceptions=True)
        async with asyncio.timeout(5), turns.turn("last"):
            order.append("last")

    asyncio.run(scene())
    # Whoever gives up gives up a turn of its key.
    assert order == ["many", "few", "few", "many", "many", "many", "last"]


def test_at_most_so_many_wait() -> None:
    async def scene() -> int:
        turns = Turns(1, waiting=3, waiting_per_key=3)
        async with turns.turn("holder"):
            tasks = [asyncio.create_task(_once(turns, str(key))) for key in range(5)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        return sum(isinstance(one, Busy) for one in found)

    async def _once(turns: Turns, key: str) -> None:
        async with turns.turn(key):
            pass

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(asyncio.run, scene()).result(10) == 2


def test_every_method_of_the_contract_is_served_and_none_besides() -> None:
    for file, name, served in (
        (pb.DESCRIPTOR, "LeaseService", LEASE_CALLS),
        (pb.DESCRIPTOR, "ControlService", CONTROL_CALLS),
        (node_pb2.DESCRIPTOR, "NodeService", NODE_CALLS),
    ):
        methods = file.services_by_name[name].methods
        assert {one.name: one.input_type.name for one in methods} == {
            method: request.DESCRIPTOR.name for method, request in served.items()
        }
