"""The line between a node's helper and the controller: both prove who they are, for every word."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from service_world import NODE, ServiceWorld

from slurm_synergy.controller.auth import (
    Authenticator,
    encode_credential,
    new_nonce,
    node_leases_payload,
    node_request_payload,
)
from slurm_synergy.errors import LeaseError, NoControllerError
from slurm_synergy.nodehelper.channel import Answer, Channel
from slurm_synergy.proto import node_pb2 as pb
from slurm_synergy.proto import node_pb2_grpc as pb_grpc

UID = os.getuid()
NOBODY = 65534
Code = grpc.StatusCode

pytestmark = pytest.mark.skipif(UID != 0, reason="the leases of a node are told to root alone")


@pytest.fixture
def world(tmp_path: Path, munge_socket: Path) -> Iterator[ServiceWorld]:
    world = ServiceWorld(tmp_path, munge_socket, operators=frozenset({UID}))
    world.grant(1, 6, uid=1000)
    yield world
    world.close()


@pytest.fixture
def channel(world: ServiceWorld) -> Iterator[Channel]:
    channel = Channel(
        world.server.endpoint,
        NODE.name,
        authenticator=Authenticator(world.munge_socket),
        controller_uids={UID},
    )
    yield channel
    channel.close()


def test_root_is_told_the_leases_of_its_node(world: ServiceWorld, channel: Channel) -> None:
    answer = channel.ask(b"", 0.0)
    (lease,) = answer.leases
    held = world.book.lease(1)
    assert held is not None
    assert (lease.job_id, lease.owner_uid, lease.incarnation) == (1, 1000, 0)
    assert world.book.helpers.age_s(NODE.name) is not None
    assert (lease.generation, lease.cores) == (held.generation, held.cores[NODE.name])
    assert (lease.node_cores, lease.mem_mib) == (24, 50_000)
    again = channel.ask(b"", 0.0)
    assert again.state == answer.state, "time alone is no news"
    world.grant(2, 6, uid=1000)
    assert [one.job_id for one in channel.ask(answer.state, 30.0).leases] == [1, 2]


def test_of_another_node_it_is_told_nothing(world: ServiceWorld) -> None:
    other = Channel(
        world.server.endpoint,
        "n2",
        authenticator=Authenticator(world.munge_socket),
        controller_uids={UID},
    )
    assert other.ask(b"", 0.0).leases == ()
    other.close()


@pytest.mark.parametrize("change", ["resize", "end"])
def test_news_ends_the_wait(world: ServiceWorld, channel: Channel, change: str) -> None:
    known = channel.ask(b"", 0.0).state
    answers: list[Answer] = []
    waiting = threading.Thread(target=lambda: answers.append(channel.ask(known, 60.0)))
    waiting.start()
    waiting.join(0.5)
    assert waiting.is_alive(), "without news it waits"
    if change == "resize":
        world.book.resize(job_id=1, placement=world.placement(1, 3))
    else:
        world.book.end(1)
    # The call is held for 20 s (a third of a lease) at most: news must come long before.
    waiting.join(15)
    assert not waiting.is_alive()
    leases = answers[0].leases
    assert [len(lease.cores) for lease in leases] == ([3] if change == "resize" else [])


def request(
    world: ServiceWorld, node: str = NODE.name, signed: str | None = None, **changed: object
) -> pb.NodeRequest:
    nonce = new_nonce()
    payload = node_request_payload(signed or node, nonce)
    fields: dict[str, object] = {
        "protocol": 1,
        "node": node,
        "nonce": nonce,
        "credential": encode_credential(payload, world.munge_socket),
        **changed,
    }
    return pb.NodeRequest(**fields)


def of_nobody(world: ServiceWorld) -> pb.NodeRequest:
    made = request(world)
    argv = ["munge", "--no-input", f"--socket={world.munge_socket}", "--string"]
    done = subprocess.run(
        [*argv, node_request_payload(made.node, made.nonce)],
        user=NOBODY,
        capture_output=True,
        text=True,
        check=True,
    )
    made.credential = done.stdout.strip()
    return made


def used_before(world: ServiceWorld) -> pb.NodeRequest:
    made = request(world)
    pb_grpc.NodeServiceStub(world.channel).Leases(made, timeout=20)
    return made


@pytest.mark.parametrize(
    ("make", "code", "said"),
    [
        (of_nobody, Code.PERMISSION_DENIED, "told to root, not to user id 65534"),
        (used_before, Code.UNAUTHENTICATED, "Replayed"),
        (lambda w: request(w, signed="n2"), Code.UNAUTHENTICATED, "another call"),
        (lambda w: request(w, credential="MUNGE:x:"), Code.UNAUTHENTICATED, "not accepted"),
        (lambda w: request(w, credential=""), Code.UNAUTHENTICATED, "not a MUNGE credential"),
        (lambda w: request(w, protocol=2), Code.FAILED_PRECONDITION, "protocol 1"),
        (lambda w: request(w, node="n" * 300), Code.FAILED_PRECONDITION, "255 characters"),
        (lambda w: request(w, node=""), Code.FAILED_PRECONDITION, "not the name of a node"),
        (lambda w: request(w, node="a\nb"), Code.FAILED_PRECONDITION, "not the name of a node"),
        (lambda w: request(w, known=b"x" * 65), Code.FAILED_PRECONDITION, "64 bytes"),
    ],
)
def test_nobody_else_is_told_anything(
    world: ServiceWorld, make: Callable[[ServiceWorld], pb.NodeRequest], code: Code, said: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        pb_grpc.NodeServiceStub(world.channel).Leases(make(world), timeout=20)
    assert caught.value.code() is code
    assert said in caught.value.details()


# -- the helper's side: a controller that lies -----------------------------------------------------


class Liar:
    """A service that answers what a test wants."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self.before: pb.NodeReply | None = None
        self.lie: Callable[[pb.NodeRequest], pb.NodeReply] = self.honest

    def Leases(self, asked: pb.NodeRequest, context: object) -> pb.NodeReply:
        return self.lie(asked)

    def signed(self, asked: pb.NodeRequest, content: bytes, **other: str) -> pb.NodeReply:
        node, nonce = other.get("node", asked.node), other.get("nonce", asked.nonce)
        payload = node_leases_payload(node, nonce, content)
        return pb.NodeReply(leases=content, credential=encode_credential(payload, self._socket))

    def honest(self, asked: pb.NodeRequest) -> pb.NodeReply:
        lease = pb.NodeLease(job_id=1, generation=3, expires_in_s=60, cores=[0], node_cores=2)
        content = pb.NodeLeases(node=asked.node, leases=[lease]).SerializeToString()
        self.before = self.signed(asked, content)
        return self.before

    def altered(self, asked: pb.NodeRequest) -> pb.NodeReply:
        reply = self.honest(asked)
        message = pb.NodeLeases.FromString(reply.leases)
        message.leases[0].cores.append(1)
        reply.leases = message.SerializeToString()
        return reply

    def unsigned(self, asked: pb.NodeRequest) -> pb.NodeReply:
        return pb.NodeReply(leases=self.honest(asked).leases)

    def of_an_earlier_question(self, asked: pb.NodeRequest) -> pb.NodeReply:
        return self.signed(asked, self.honest(asked).leases, nonce=new_nonce())

    def about_another_node(self, asked: pb.NodeRequest) -> pb.NodeReply:
        return self.signed(asked, pb.NodeLeases(node="n2").SerializeToString())

    def for_another_node(self, asked: pb.NodeRequest) -> pb.NodeReply:
        return self.signed(asked, self.honest(asked).leases, node="n2")

    def rubbish(self, asked: pb.NodeRequest) -> pb.NodeReply:
        return self.signed(asked, b"\xff\xff\xff")

    def reflected(self, asked: pb.NodeRequest) -> pb.NodeReply:
        return pb.NodeReply(leases=self.honest(asked).leases, credential=asked.credential)


@pytest.fixture
def liar(munge_socket: Path) -> Iterator[tuple[Liar, Channel]]:
    liar = Liar(munge_socket)
    server = grpc.server(futures.ThreadPoolExecutor(2))
    pb_grpc.add_NodeServiceServicer_to_server(liar, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    channel = Channel(
        f"127.0.0.1:{port}", "n1", authenticator=Authenticator(munge_socket), controller_uids={UID}
    )
    yield liar, channel
    channel.close()
    server.stop(None).wait()


def test_an_honest_answer_is_believed(liar: tuple[Liar, Channel]) -> None:
    assert [lease.cores for lease in liar[1].ask(b"", 0.0).leases] == [(0,)]


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ("altered", "made for another call"),
        ("unsigned", "not a MUNGE credential"),
        ("of_an_earlier_question", "made for another call"),
        ("about_another_node", "about node 'n2', not 'n1'"),
        ("for_another_node", "made for another call"),
        ("rubbish", "malformed"),
        ("reflected", "made for another call"),
    ],
)
def test_an_answer_that_is_not_wholly_the_controllers_is_refused(
    liar: tuple[Liar, Channel], lie: str, said: str
) -> None:
    liar[0].lie = getattr(liar[0], lie)
    with pytest.raises(LeaseError, match=said):
        liar[1].ask(b"", 0.0)


def test_an_answer_that_was_used_is_refused(liar: tuple[Liar, Channel]) -> None:
    server, channel = liar
    channel.ask(b"", 0.0)
    kept = server.before
    assert kept is not None
    server.lie = lambda asked: kept
    with pytest.raises(LeaseError, match=r"Replayed|another call"):
        channel.ask(b"", 0.0)


def test_the_signature_of_anybody_else_does_not_count(
    liar: tuple[Liar, Channel], munge_socket: Path
) -> None:
    channel = Channel(
        liar[1].endpoint,
        "n1",
        authenticator=Authenticator(munge_socket),
        controller_uids={NOBODY},
    )
    with pytest.raises(LeaseError, match=r"signed by user id 0.*--controller-user"):
        channel.ask(b"", 0.0)
    channel.close()


def test_silence_is_told_as_such(munge_socket: Path) -> None:
    channel = Channel(
        "127.0.0.1:1", "n1", authenticator=Authenticator(munge_socket), controller_uids={UID}
    )
    with pytest.raises(NoControllerError, match="no answer from the controller"):
        channel.ask(b"", 0.0)
    channel.close()
