"""The lease service over real gRPC, with credentials of a real munged."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pwd
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from service_world import ServiceWorld

from slurm_synergy.cli.control import Target, ask
from slurm_synergy.cluster import StopState
from slurm_synergy.config import LeaseSettings
from slurm_synergy.controller.auth import control_payload, encode_credential, new_nonce
from slurm_synergy.controller.lease_service import advertised_endpoint
from slurm_synergy.controller.probes import DataRead, Probe
from slurm_synergy.core.model import Plan, Reason, ReasonCode
from slurm_synergy.errors import LeaseError
from slurm_synergy.proto import lease_pb2 as pb

UID = os.getuid()
MOVED = Reason(code=ReasonCode.MOVED, text="elsewhere")


@pytest.fixture
def world(tmp_path: Path, munge_socket: Path) -> Iterator[ServiceWorld]:
    world = ServiceWorld(tmp_path, munge_socket, operators=frozenset({UID}))
    yield world
    world.close()


def refused(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
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


def test_the_owner_registers_and_gets_the_lease_of_its_node(world: ServiceWorld) -> None:
    lease = world.grant(1, 10, uid=UID)
    reply = world.register(world.task(1))
    assert reply.token
    assert tuple(reply.lease.cores) == lease.cores["n1"]
    assert tuple(reply.lease.floor_cores) == lease.floor["n1"]
    assert (reply.lease.mem_mib, reply.lease.floor_mem_mib) == (50_000, 60_000)
    assert (reply.lease.node_cores, reply.lease.generation) == (24, 1)
    assert 59 < reply.lease.expires_in_s <= 60
    assert not reply.gone


def test_somebody_elses_job_is_refused_even_to_operators(world: ServiceWorld) -> None:
    world.grant(1, 10, uid=UID + 1)
    code, text = refused(lambda: world.register(world.task(1)))
    assert code is grpc.StatusCode.PERMISSION_DENIED
    assert "job 1 is not a job of user" in text


def test_a_refused_credential_is_logged_once_per_cause(
    world: ServiceWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.grant(1, 6, uid=UID)
    for _ in range(3):
        request = world.registration(world.task(1))
        request.credential = "MUNGE:AAAA:"
        code, _ = refused(lambda: world.stub.Register(request, timeout=10))  # noqa: B023
        assert code is grpc.StatusCode.UNAUTHENTICATED
    request.credential = "nonsense"
    refused(lambda: world.stub.Register(request, timeout=10))
    told = [one.message for one in caplog.records]
    assert len(told) == 2
    assert all(text.startswith("a caller was refused: ") for text in told)


def test_without_munged_on_the_controllers_host_a_caller_may_try_again(
    tmp_path: Path, munge_socket: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = ServiceWorld(tmp_path / "a", tmp_path / "none", operators=frozenset())
    try:
        world.grant(1, 6, uid=UID)
        world.munge_socket = munge_socket
        for _ in range(2):
            code, text = refused(lambda: world.register(world.task(1)))
            assert code is grpc.StatusCode.UNAVAILABLE
            assert text.startswith("the controller could not check the credential: ")
        target = Target(endpoint=world.server.endpoint, source="t", munge_socket=munge_socket)
        with pytest.raises(LeaseError, match=r"cannot answer: the controller could not check"):
            ask(target, "status")
    finally:
        world.close()
    assert len([one for one in caplog.records if "could not check" in one.message]) == 1


def test_a_registration_cannot_be_replayed_or_redirected(world: ServiceWorld) -> None:
    world.grant(1, 6, uid=UID)
    world.grant(2, 6, uid=UID)
    request = world.registration(world.task(1))
    world.stub.Register(request, timeout=10)
    code, text = refused(lambda: world.stub.Register(request, timeout=10))
    assert (code, "Replayed" in text) == (grpc.StatusCode.UNAUTHENTICATED, True)
    other = world.registration(world.task(1))
    other.task.job_id = 2
    code, text = refused(lambda: world.stub.Register(other, timeout=10))
    assert (code, "another call" in text) == (grpc.StatusCode.UNAUTHENTICATED, True)


def test_unknown_jobs_and_old_incarnations_are_gone(world: ServiceWorld) -> None:
    world.grant(1, 6, uid=UID, incarnation=2)
    assert world.register(world.task(9)).gone
    assert world.register(world.task(1, restart=1)).gone
    code, text = refused(lambda: world.register(world.task(1, restart=3)))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "not known yet" in text
    reply = world.register(world.task(1, restart=2))
    world.book.end(1)
    task = world.task(1, restart=2)
    assert world.stub.Renew(renewal(reply, task), timeout=10).gone
    assert not world.stub.Finish(pb.FinishRequest(token=reply.token, task=task), timeout=10).known


def test_calls_without_a_good_token_are_told_to_register(world: ServiceWorld) -> None:
    world.grant(1, 6, uid=UID)
    world.grant(2, 6, uid=UID)
    reply = world.register(world.task(1))
    for token, job_id in (("", 1), ("guess", 1), (reply.token, 2)):
        request = pb.RenewRequest(token=token, task=world.task(job_id))
        code, _ = refused(lambda request=request: world.stub.Renew(request, timeout=10))
        assert code is grpc.StatusCode.UNAUTHENTICATED
        ended = pb.FinishRequest(token=token, task=world.task(job_id))
        code, _ = refused(lambda ended=ended: world.stub.Finish(ended, timeout=10))
        assert code is grpc.StatusCode.UNAUTHENTICATED


def test_malformed_calls_are_refused_in_words(world: ServiceWorld) -> None:
    world.grant(1, 6, uid=UID)
    old = world.registration(world.task(1))
    old.protocol = 7
    code, text = refused(lambda: world.stub.Register(old, timeout=10))
    assert (code, text) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "this controller speaks protocol 1, the caller 7",
    )
    task = world.task(1)
    task.rank, task.ranks = 5, 2
    code, text = refused(lambda: world.register(task))
    assert (code, text) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "rank 5 of 2 tasks is out of range",
    )
    huge = pb.RegisterRequest(protocol=1, nonce="n" * 100_000)
    code, _ = refused(lambda: world.stub.Register(huge, timeout=10))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_bug_of_ours_is_not_shown_to_the_caller(
    world: ServiceWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.grant(1, 6, uid=UID)

    def broken(*_: object) -> None:
        raise KeyError("secret detail")

    monkeypatch.setattr(world.book, "register", broken)
    code, text = refused(lambda: world.register(world.task(1)))
    assert (code, text) == (
        grpc.StatusCode.INTERNAL,
        "internal error: see the controller's log",
    )
    assert "secret detail" in caplog.text


def test_renew_waits_for_news_and_is_woken_at_once(world: ServiceWorld) -> None:
    world.grant(1, 6, uid=UID)
    task = world.task(1)
    reply = world.register(task)
    started_s = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(world.stub.Renew, renewal(reply, task, wait_s=10), timeout=20)
        time.sleep(0.5)
        assert not waiting.done()
        changed_s = time.monotonic()
        world.book.resize(job_id=1, placement=world.placement(1, 12))
        newer = waiting.result(5)
    assert time.monotonic() - changed_s < 1.0
    assert changed_s - started_s >= 0.5
    assert newer.lease.generation == 2
    assert len(newer.lease.cores) == 12


def test_renew_returns_when_the_time_is_over_and_at_once_with_old_knowledge(
    world: ServiceWorld,
) -> None:
    world.grant(1, 6, uid=UID)
    task = world.task(1)
    reply = world.register(task)
    started_s = time.monotonic()
    same = world.stub.Renew(renewal(reply, task, wait_s=0.4), timeout=10)
    assert 0.35 < time.monotonic() - started_s < 3
    assert same.lease.generation == 1
    request = renewal(reply, task, wait_s=10)
    request.known_generation = 0
    started_s = time.monotonic()
    world.stub.Renew(request, timeout=10)
    assert time.monotonic() - started_s < 2


def test_a_call_is_never_held_so_long_that_the_lease_runs_out(
    tmp_path: Path, munge_socket: Path
) -> None:
    world = ServiceWorld(tmp_path, munge_socket, operators=frozenset(), lease_s=1.5)
    try:
        world.grant(1, 6, uid=UID)
        task = world.task(1)
        reply = world.register(task)
        started_s = time.monotonic()
        again = world.stub.Renew(renewal(reply, task, wait_s=1e9), timeout=20)
        assert time.monotonic() - started_s < 1.4
        assert again.lease.expires_in_s == 1.5
    finally:
        world.close()


def test_a_probe_reaches_launchers_that_can_measure_and_is_answered(world: ServiceWorld) -> None:
    world.grant(1, 6, uid=UID)
    task = world.task(1)
    reply = world.register(task)
    able = renewal(reply, task, wait_s=10)
    able.progress.step = 1
    able.profiling.program = "run-1"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(world.stub.Renew, able, timeout=20)
        wanted = Probe(number=7, warmup_steps=9, steps=50, longest_s=60.0)
        while world.book.measurable_jobs() != (1,):
            assert not waiting.done()
        assert world.book.probe(1, wanted, 20) is not None
        told = waiting.result(10)
    assert told.probe == pb.Probe(number=7, warmup_steps=9, steps=50, longest_s=60.0)
    assert (told.lease.generation, len(told.lease.cores)) == (1, 20)
    # It is no news to who knows it; who cannot measure is not told, and not kept busy.
    able.profiling.known_probe = 7
    able.wait_s = 0.1
    assert world.stub.Renew(able, timeout=10).probe.number == 7
    able.profiling.measured.CopyFrom(
        pb.Measured(probe=7, steps=50, samples_per_s=100.0, waits_known=True, wait_share=0.5)
    )
    world.stub.Renew(able, timeout=10)
    (answer,) = world.book.answers(1)
    assert (answer.samples_per_s, answer.wait_share, answer.busy_samples_per_s) == (100, 0.5, None)
    # One that asks for the storage is another word of the same kind.
    reading = Probe(number=8, warmup_steps=0, steps=1, longest_s=5.0, read_s=2.0, readers=7)
    assert world.book.probe(1, reading, 6) is not None
    told = world.stub.Renew(able, timeout=10)
    assert (told.probe.number, told.probe.read_s, told.probe.readers) == (8, 2.0, 7)
    able.profiling.measured.CopyFrom(
        pb.Measured(
            probe=8, data=pb.DataRead(dataset_mib=5.0, samples=0, storage_mib_s=-1.0, cached=True)
        )
    )
    world.stub.Renew(able, timeout=10)
    (answer,) = world.book.answers(1)
    assert answer.data == DataRead(cached=True)  # a size without a number says nothing
    world.book.end_probe(1)
    back = world.stub.Renew(renewal(reply, task), timeout=10)
    assert (back.probe.number, len(back.lease.cores)) == (0, 6)


def test_two_ranks_stop_at_one_step_over_the_wire(world: ServiceWorld) -> None:
    world.grant(1, 6, uid=UID)
    tasks = [world.task(1, rank=rank, ranks=2) for rank in (0, 1)]
    tokens = [world.register(task) for task in tasks]
    world.book.stop(job_id=1, reason=MOVED, grace_s=30)
    told = world.stub.Renew(renewal(tokens[0], tasks[0]), timeout=10)
    assert told.lease.stop
    assert 29 < told.lease.stop_within_s <= 30
    proposed = world.stub.Renew(
        renewal(tokens[0], tasks[0], proposed_stop_step=50, accepted_stop_step=50), timeout=10
    )
    assert (proposed.stop_step.step, proposed.stop_step.committed) == (50, False)
    world.stub.Renew(
        renewal(tokens[0], tasks[0], proposed_stop_step=50, accepted_stop_step=50), timeout=10
    )
    with concurrent.futures.ThreadPoolExecutor() as pool:
        known = pb.LeaseReply(token=tokens[0].token, lease=told.lease, stop_step=proposed.stop_step)
        waiting = pool.submit(world.stub.Renew, renewal(known, tasks[0], wait_s=10), timeout=20)
        time.sleep(0.2)
        accepted = world.stub.Renew(renewal(tokens[1], tasks[1], accepted_stop_step=50), timeout=10)
        assert (accepted.stop_step.step, accepted.stop_step.committed) == (50, True)
        assert waiting.result(5).stop_step.committed
    for task, token in zip(tasks, tokens, strict=True):
        ended = pb.FinishRequest(
            token=token.token, task=task, exit_code=85, checkpointed=True, step=50, samples=800
        )
        assert world.stub.Finish(ended, timeout=10).known
    assert world.book.stop_state(1) is StopState.CHECKPOINTED
    assert world.ledger.read()[1].done_samples == 800


def test_many_waiters_of_one_job_are_all_woken(world: ServiceWorld) -> None:
    world.grant(1, 6, uid=UID)
    tasks = [world.task(1, rank=rank, ranks=20) for rank in range(20)]
    replies = [world.register(task) for task in tasks]
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        waiting = [
            pool.submit(world.stub.Renew, renewal(reply, task, wait_s=10), timeout=20)
            for reply, task in zip(replies, tasks, strict=True)
        ]
        time.sleep(0.5)
        changed_s = time.monotonic()
        world.book.resize(job_id=1, placement=world.placement(1, 8))
        assert {call.result(5).lease.generation for call in waiting} == {2}
    assert time.monotonic() - changed_s < 2


def control(world: ServiceWorld, method: str, *, purpose: str | None = None) -> dict[str, object]:
    nonce = new_nonce(purpose or method.lower())
    request = pb.ControlRequest(
        protocol=1,
        credential=encode_credential(control_payload(nonce), world.munge_socket),
        nonce=nonce,
    )
    content: dict[str, object] = json.loads(
        getattr(world.control, method)(request, timeout=10).json
    )
    return content


def test_control_calls_show_and_steer(world: ServiceWorld) -> None:
    empty = control(world, "Status")
    assert (empty["round"], empty["draining"], empty["nodes"]) == (None, False, [])
    lease = world.grant(1, 10, uid=UID)
    plan = Plan(
        round=3,
        policy="srtf",
        mechanism="tune",
        placements=(lease.placement,),
        waiting={2: MOVED},
    )
    me = pwd.getpwuid(UID).pw_name
    world.publish((world.status(1, lease=lease, user=me), world.status(2, user="else")), plan)
    world.view.failed("Slurm is away")
    shown = control(world, "Status")
    assert shown["round"] == 3
    assert shown["trouble"] == "Slurm is away"
    assert shown["nodes"][0]["gpus_used"] == 2  # type: ignore[index]
    jobs = control(world, "Jobs")["jobs"]
    assert [job["job_id"] for job in jobs] == [1, 2]  # type: ignore[attr-defined]
    assert jobs[0]["lease"]["nodes"][0]["cpus"] == 10  # type: ignore[index]
    assert jobs[1]["reason"] == {"code": "moved", "text": "elsewhere"}  # type: ignore[index]
    assert control(world, "Drain") == {"draining": True}
    assert world.ledger.draining()
    assert control(world, "Status")["draining"] is True
    assert control(world, "Resume") == {"draining": False}


def test_a_credential_for_reading_does_not_change_anything(world: ServiceWorld) -> None:
    code, _ = refused(lambda: control(world, "Drain", purpose="status"))
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert not world.ledger.draining()


def test_steering_is_for_operators_and_hints_are_for_owners(
    tmp_path: Path, munge_socket: Path
) -> None:
    world = ServiceWorld(tmp_path, munge_socket, operators=frozenset({UID + 1}))
    try:
        code, text = refused(lambda: control(world, "Drain"))
        assert code is grpc.StatusCode.PERMISSION_DENIED
        assert "drain is for operators" in text
        assert not world.ledger.draining()
        plan = Plan(round=1, policy="p", mechanism="m", placements=(), waiting={2: MOVED})
        mine = world.status(1, user=pwd.getpwuid(UID).pw_name)
        world.publish((mine, world.status(2, user="somebody-else")), plan)
        own, other = control(world, "Jobs")["jobs"]  # type: ignore[misc]
        assert own["name"] == "job-1"
        assert "profile" in own
        assert other["name"] is None
        assert "profile" not in other
    finally:
        world.close()


def test_a_taken_port_is_reported_with_a_remedy(world: ServiceWorld, tmp_path: Path) -> None:
    with pytest.raises(LeaseError, match=r"cannot listen on 127\.0\.0\.1:.*leases\.listen"):
        ServiceWorld(
            tmp_path / "second",
            world.munge_socket,
            operators=frozenset(),
            listen=f"127.0.0.1:{world.server.port}",
        )


def test_the_server_stops_with_calls_open_and_leaves_no_thread(
    tmp_path: Path, munge_socket: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = ServiceWorld(tmp_path, munge_socket, operators=frozenset())
    world.grant(1, 6, uid=UID)
    task = world.task(1)
    reply = world.register(task)
    waiting = world.stub.Renew.future(renewal(reply, task, wait_s=10), timeout=20)
    time.sleep(0.3)
    started_s = time.monotonic()
    world.server.stop()
    world.server.stop()
    assert time.monotonic() - started_s < 5
    # Answered: a call that is cut off would be an error in the log of every stop.
    assert waiting.result(5).lease.generation == 1
    assert not [line for line in caplog.records if line.levelname == "ERROR"]
    assert not [t for t in threading.enumerate() if t.name.startswith("lease-")]
    world.book.resize(job_id=1, placement=world.placement(1, 7))  # nobody to tell: no error
    world.close()


def test_the_address_that_jobs_are_told() -> None:
    here = socket.gethostname()
    assert advertised_endpoint(LeaseSettings(listen="0.0.0.0:0"), 5) == f"{here}:5"
    assert advertised_endpoint(LeaseSettings(listen="127.0.0.1:0"), 5) == "127.0.0.1:5"
    assert advertised_endpoint(LeaseSettings(listen="[::1]:0"), 5) == "[::1]:5"
    assert advertised_endpoint(LeaseSettings(advertise="head:0"), 5) == "head:5"
    assert advertised_endpoint(LeaseSettings(advertise="head:9"), 5) == "head:9"
