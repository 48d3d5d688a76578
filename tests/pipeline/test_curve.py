"""Sockets that a network can reach, tried as a stranger would."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq

from command import wait_until
from headrace.errors import StartError
from headrace.host.cluster_key import Secret
from headrace.pipeline.curve import Context, Gate, open_door, show_key
from headrace.pipeline.curve_link import CurveListener, EdgeKey, connect_curve
from headrace.pipeline.ledger import Channel, Tensors
from headrace.pipeline.links import End
from headrace.protocol.ranks import Ranks

SECRET, OTHER = Secret(b"\1" * 32), Secret(b"\2" * 32)
EDGE = Channel(Tensors.ACTIVATIONS, 0, 1)
HERE, THERE = End(EDGE, True, Ranks(2)), End(EDGE, False, Ranks(2))
# How a ZMTP 3.1 connection with CURVE begins (ZeroMQ RFC 37).
GREETING = (
    b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
)


@pytest.fixture
def contexts() -> Iterator[tuple[Context, Gate]]:
    context = zmq.Context()
    yield context, Gate(context)
    context.term()


def junk(address: str, count: int) -> list[socket.socket]:
    """So many connections: silent, with noise, slow, oversized, and half a greeting."""
    host, port = address.removeprefix("tcp://").split(":")
    huge = b"\x06" + (1 << 40).to_bytes(8, "big")
    says = [b"", os.urandom(2000), GREETING, GREETING + huge + b"x" * 9000, GREETING[:20]]
    connections = []
    for number in range(count):
        with suppress(OSError):
            connection = socket.create_connection((host, int(port)), timeout=0.2)
            connections.append(connection)
            connection.sendall(says[number % len(says)])
    return connections


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("encrypted", [True, False])
def test_an_edge_meets_its_peer_whatever_strangers_do(
    contexts: tuple[Context, Gate], encrypted: bool
) -> None:
    context, gate = contexts
    key = EdgeKey(SECRET, 3, encrypted)
    listener = CurveListener(context, gate, HERE, key, "127.0.0.1")
    before = resident_bytes()
    strangers = junk(listener.address, 300)
    sending = connect_curve(context, THERE, key, listener.address, 30)
    receiving = listener.accept(30)
    assert resident_bytes() - before < 64 << 20
    for connection in strangers:
        connection.close()
    sending.close()
    receiving.close()


@pytest.mark.parametrize(
    "wrong",
    [EdgeKey(OTHER, 3, True), EdgeKey(SECRET, 4, True), EdgeKey(SECRET, 3, False)],
    ids=["other_secret", "other_epoch", "not_encrypted"],
)
def test_the_right_port_with_a_wrong_key_is_refused(
    contexts: tuple[Context, Gate], wrong: EdgeKey
) -> None:
    context, gate = contexts
    listener = CurveListener(context, gate, HERE, EdgeKey(SECRET, 3, True), "127.0.0.1")
    with pytest.raises(StartError, match=r"stage 1 did not let this one in at tcp://127\.0\.0\.1"):
        connect_curve(context, THERE, wrong, listener.address, 0.5)
    with pytest.raises(StartError, match=r"stage 0 did not connect at tcp://127\.0\.0\.1"):
        listener.accept(0.2)


def test_a_password_of_a_plain_edge_is_good_for_no_other(contexts: tuple[Context, Gate]) -> None:
    context, gate = contexts
    listener = CurveListener(context, gate, HERE, EdgeKey(SECRET, 3, False), "127.0.0.1")
    for wrong in (EdgeKey(OTHER, 3, False), EdgeKey(SECRET, 2, False)):
        with pytest.raises(StartError, match="did not let this one in"):
            connect_curve(context, THERE, wrong, listener.address, 0.5)
    listener.close()


def test_once_the_peer_is_there_nobody_gets_in_any_more(contexts: tuple[Context, Gate]) -> None:
    context, gate = contexts
    key = EdgeKey(SECRET, 3, True)
    listener = CurveListener(context, gate, HERE, key, "127.0.0.1")
    sending = connect_curve(context, THERE, key, listener.address, 30)
    receiving = listener.accept(30)
    host, port = listener.address.removeprefix("tcp://").split(":")
    with pytest.raises(TimeoutError):
        socket.create_connection((host, int(port)), timeout=0.3)
    # Not with the right key either.
    with pytest.raises(StartError):
        connect_curve(context, THERE, key, listener.address, 0.3)
    sending.close()
    receiving.close()


def test_a_server_that_has_another_key_is_not_told_anything(
    contexts: tuple[Context, Gate],
) -> None:
    context, gate = contexts
    door = open_door("127.0.0.1", 0, "for a test")
    impostor = context.socket(zmq.ROUTER)
    impostor.linger = 0
    gate.guard(impostor, "control", OTHER)
    door.hand_to(impostor)
    honest = context.socket(zmq.DEALER)
    honest.linger = 0
    show_key(honest, "control", SECRET)
    honest.connect(door.address)
    assert not honest.poll(500, zmq.POLLOUT)
    assert not impostor.poll(0)
    honest.close()
    impostor.close()
    door.shut()


def test_a_port_that_is_taken_is_an_error_naming_it() -> None:
    door = open_door("127.0.0.1", 0, "for a test")
    port = int(door.address.rpartition(":")[2])
    with pytest.raises(StartError, match=rf"cannot listen on 127\.0\.0\.1:{port} for another"):
        open_door("127.0.0.1", port, "for another")
    door.shut()


def test_strangers_take_no_lasting_descriptors(contexts: tuple[Context, Gate]) -> None:
    context, gate = contexts
    listener = CurveListener(context, gate, HERE, EdgeKey(SECRET, 3, True), "127.0.0.1")
    before = len(os.listdir("/proc/self/fd"))
    for connection in junk(listener.address, 100):
        connection.close()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    listener.close()
