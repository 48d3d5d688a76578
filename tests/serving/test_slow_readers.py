"""Readers that take nothing, or a byte at a time, and streams in which nothing happens."""

import json
import socket
from collections.abc import Iterator

import httpx2
import pytest
from openai import OpenAI, Stream
from openai.types import Completion

from command import wait_until
from headrace.client import EventReader
from serving.handed_out import SLOTS, Served, delta, served

PATH = "/v1/completions"
MIB = 2**20


def asked(n: int = 1) -> bytes:
    return json.dumps({"prompt": "w1", "max_tokens": 8000, "n": n, "stream": True}).encode()


def rest_of(connection: socket.socket) -> bytes:
    received = bytearray()
    while data := connection.recv(1 << 20):
        received += data
    return bytes(received)


def body_of(answer: bytes) -> bytes:
    """Of an answer in chunks, as far as it came."""
    chunks = answer.partition(b"\r\n\r\n")[2]
    body = bytearray()
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        body += chunks[: int(size, 16)]
        chunks = chunks[int(size, 16) + 2 :]
    return bytes(body)


def texts_of(answer: bytes, n: int = 1) -> list[str]:
    """What each choice says in a stream that came to its end."""
    *events, done = EventReader().feed(body_of(answer))
    assert done == b"[DONE]"
    texts = [""] * n
    for event in events:
        for choice in json.loads(event)["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


@pytest.fixture
def full() -> Iterator[Served]:
    """A server without a queue."""
    with served(max_queued_requests=0) as running:
        yield running


def status(server: Served) -> int:
    """Of another request, that is given up when it was let in."""
    with socket.create_connection(server.address, timeout=60) as connection:
        body = asked()
        connection.sendall(
            b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (PATH.encode(), len(body), body)
        )
        return int(connection.recv(1000).split()[1])


def test_places_belong_to_work_and_not_to_readers(full: Served) -> None:
    text = "x" * (4 * MIB)
    with full.ask(PATH, asked(SLOTS)) as connection:
        assert status(full) == 429
        for index in range(SLOTS):
            full.hand_out(0, [delta(index, text, "length")])
        # The engine is done: nobody has read a byte, the tokens count and others are let in.
        metrics = full.service.metrics.render()[0].decode()
        assert f'headrace:generation_tokens_total{{model_name="m"}} {SLOTS:.1f}' in metrics
        assert status(full) == 200
        # So much was sent that the system cannot hold it: the answer is on its way all the same.
        begin = b"".join(connection.recv(1) for _ in range(200))
        assert not full.service.quiet.is_set()
        assert texts_of(begin + rest_of(connection), SLOTS) == [text] * SLOTS
    wait_until(full.service.quiet.is_set)
    assert full.service.backlog.bytes == 0


def test_the_largest_backlog_is_cut_and_others_are_not() -> None:
    most = 16 * MIB
    with (
        served(most) as server,
        server.ask(PATH, asked()) as greedy,
        server.ask(PATH, asked()) as modest,
    ):
        server.hand_out(1, [delta(0, "y" * MIB)])
        # The system takes some of it, but not without end.
        for _ in range(1000):
            assert server.hand_out(0, [delta(0, "x" * MIB)]) <= most
            if server.engine.aborted:
                break
        assert server.engine.aborted == [server.engine.submissions[0]]
        metrics = server.service.metrics.render()[0].decode()
        assert 'headrace:answers_cut_total{model_name="m"} 1.0' in metrics
        # Its connection ends, without the end of an answer.
        assert not rest_of(greedy).endswith(b"0\r\n\r\n")
        server.hand_out(1, [delta(0, "z", "stop")])
        assert texts_of(rest_of(modest)) == ["y" * MIB + "z"]
        wait_until(server.service.quiet.is_set)
        assert server.service.backlog.bytes == 0


def test_an_answer_that_is_not_streamed_counts_while_it_is_gathered() -> None:
    with served(MIB) as server:
        body = asked().replace(b"true", b"false")
        with server.ask(PATH, body) as connection:
            server.hand_out(0, [delta(0, "x" * (MIB // 2))])
            server.hand_out(0, [delta(0, "x" * MIB)])
            assert len(server.engine.aborted) == 1
            server.hand_out(0, [delta(0, "", "abort")])
            head, _, body = rest_of(connection).partition(b"\r\n\r\n")
            assert head.split()[1] == b"503"
            assert b"more answers wait to be read" in body


def test_a_stream_that_waits_says_so_between_its_events() -> None:
    comment = b": keep-alive\n\n"
    with served(sse_keep_alive_interval=0.01) as server, server.ask(PATH, asked()) as connection:
        received = b""

        def receive_comments() -> None:
            nonlocal received
            newest = b""
            while newest.count(comment) < 2:
                newest += connection.recv(1 << 16)
            received += newest

        # Before the first token, as while it waits in the queue, and between tokens.
        receive_comments()
        assert b"data" not in received
        server.hand_out(0, [delta(0, "one ")])
        receive_comments()
        server.hand_out(0, [delta(0, "two", "stop")])
        received += rest_of(connection)
    assert texts_of(received) == ["one two"]
    for event in body_of(received).split(b"\n\n"):
        assert event in (b"", comment.strip()) or event.startswith(b"data: ")
    # What the official client makes of it.
    answer = httpx2.Response(200, content=body_of(received))
    with OpenAI(base_url="http://x", api_key="none") as client:
        events = Stream(cast_to=Completion, response=answer, client=client)
        assert "".join(event.choices[0].text for event in events) == "one two"


def test_a_stream_without_silences_or_with_the_interval_0_has_no_comments() -> None:
    for interval in (0.0, 1000.0):
        with (
            served(sse_keep_alive_interval=interval) as server,
            server.ask(PATH, asked()) as connection,
        ):
            server.hand_out(0, [delta(0, "one", "stop")])
            assert b": keep-alive" not in rest_of(connection)
