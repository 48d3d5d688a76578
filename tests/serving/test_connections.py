"""Bytes that are no request, or come too slowly, or too many of them: raw sockets."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from headrace.serving.connection import with_limits
from serving.running_server import Server, running_server
from serving.scrape import scrape, wait_for

READ_TIMEOUT = 1.0
LARGEST_BODY = 128 * 1024
ASK = b'{"prompt": "w1", "max_tokens": 1}'


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    """A server with small limits."""
    with running_server(
        # The model as vLLM's users give it.
        *("synthetic:1+0", "--read-timeout", str(READ_TIMEOUT)),
        *("--max-body-size", str(LARGEST_BODY), "--kv-cache-memory", "16MiB"),
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def lives_on_and_kept_nothing(strict: Server) -> Iterator[None]:
    """Whatever a test sent: the server answers, has no file open more, and logs no traceback."""
    with httpx.Client(base_url=strict.url) as client:
        client.get("/health")
        files = scrape(strict.url)["process_open_fds"]
        yield
        answer = client.post("/v1/completions", json={"prompt": "w1", "max_tokens": 2})
        assert answer.json()["usage"]["completion_tokens"] == 2
        wait_for(strict.url, process_open_fds=files, slots_used=0.0, kv_blocks_used=0.0)
    assert not any("Traceback" in line for line in strict.log)


def request(start: bytes, *headers: bytes, body: bytes = b"") -> bytes:
    """A request; with headers for a JSON body if it is a POST."""
    lines = [start + b" HTTP/1.1", b"Host: x"]
    if start.startswith(b"POST"):
        lines.append(b"Content-Type: application/json")
    return b"\r\n".join([*lines, *headers]) + b"\r\n\r\n" + body


def post(body: bytes = ASK, *headers: bytes, path: bytes = b"/v1/completions") -> bytes:
    return request(b"POST " + path, b"Content-Length: %d" % len(body), *headers, body=body)


def chunked(*chunks: bytes) -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
    return request(b"POST /v1/completions", b"Transfer-Encoding: chunked", CLOSE, body=body)


CLOSE = b"Connection: close"


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30.0)


def talk(server: Server, *parts: bytes) -> bytes:
    """All that the server says until it ends the connection."""
    with connect(server) as connection:
        for part in parts:
            connection.sendall(part)
        return rest_of(connection)


def rest_of(connection: socket.socket) -> bytes:
    received = b""
    while data := connection.recv(1 << 16):
        received += data
    return received


def one_answer(connection: socket.socket) -> bytes:
    """The next answer, on a connection that goes on afterwards."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1 << 16)
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += connection.recv(1 << 16)
    return head + b"\r\n\r\n" + body


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


def error_of(answer: bytes) -> tuple[int, str]:
    """Status and message of the only answer, which has the shape of OpenAI's errors."""
    (status,) = statuses(answer)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    assert b"connection: close" in head
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return status, error["message"]


NO_HTTP = {
    "binary": b"\x00\xff\x01\x02" * 50,
    "tls": bytes.fromhex("160301020001000001fc0303") + bytes(300),
    "http2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "version": b"GET /health HTTP/3.0\r\n\r\n",
    "method": request(b"BREW /health"),
    "connect": request(b"CONNECT example.com:443"),
    "path": request("GET /café".encode()),
    "no path": request(b"GET http://x"),
    "null in a header": request(b"GET /health", b"X-A: \x00"),
    "two lengths": request(b"POST /v1/completions", b"Content-Length: 5", b"Content-Length: 6"),
    "length and chunks": post(b"0\r\n\r\n", b"Transfer-Encoding: chunked"),
    "negative length": request(b"POST /v1/completions", b"Content-Length: -1"),
    "huge length": request(b"POST /v1/completions", b"Content-Length: " + b"9" * 30),
    "bad chunk": request(b"POST /v1/completions", b"Transfer-Encoding: chunked", body=b"ZZ\r\n"),
}


@pytest.mark.parametrize("sent", NO_HTTP.values(), ids=NO_HTTP)
def test_what_is_no_http_is_told_so(strict: Server, sent: bytes) -> None:
    assert error_of(talk(strict, sent)) == (400, "the request is no valid HTTP")


@pytest.mark.parametrize("pieces", [1, 200], ids=["at once", "in pieces"])
def test_a_header_too_large_is_refused(strict: Server, pieces: int) -> None:
    header = b"".join(b"X-%d: %b\r\n" % (n, b"y" * 2000) for n in range(200))
    size = len(header) // pieces
    parts = [header[at : at + size] for at in range(0, len(header), size)]
    answer = talk(strict, b"GET /health HTTP/1.1\r\n", *parts)
    assert error_of(answer) == (431, "the header is larger than 65536 bytes")


def test_a_header_too_large_behind_a_request_ends_the_connection(strict: Server) -> None:
    endless = request(b"POST /v1/completions", b"X-A: " + b"y" * 1_000_000)
    with connect(strict) as connection:
        connection.sendall(post(b'{"prompt": "w1", "max_tokens": 4000, "stream": true}'))
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        with pytest.raises(ConnectionError):
            connection.sendall(endless[:-4] * 100)


SLOW = {
    "header": (b"GET /health HTTP/1.1\r\n", b"X-A: y\r\n"),
    "one line": (b"GET /", b"a"),
    "body": (request(b"POST /v1/completions", b"Content-Length: 100000"), b"{"),
    "chunks": (request(b"POST /v1/completions", b"Transfer-Encoding: chunked"), b"1\r\n{\r\n"),
    "half a header": (b"GET /health HTT", b""),
    "half a body": (request(b"POST /v1/completions", b"Content-Length: 9"), b""),
}


def test_a_request_that_does_not_arrive_in_time_is_given_up(strict: Server) -> None:
    """Byte by byte, or not at all any more; all at once, since they take their time."""
    connections = {name: connect(strict) for name in SLOW}
    started = time.monotonic()
    for name, (begin, _) in SLOW.items():
        connections[name].sendall(begin)
    answers: dict[str, bytes] = {}

    def dribble(name: str) -> None:
        connection, more = connections[name], SLOW[name][1]
        connection.settimeout(0.05)
        answers[name] = b""
        while b"}}" not in answers[name]:
            try:
                answers[name] += connection.recv(1 << 16)
            except TimeoutError:
                connection.sendall(more)

    threads = [threading.Thread(target=dribble, args=[name]) for name in SLOW]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started >= READ_TIMEOUT
    for name, answer in answers.items():
        connections[name].close()
        what = "body" if name in ("body", "chunks", "half a body") else "header"
        status, message = error_of(answer)
        assert status == 408, name
        assert what in message
        assert "within 1 s" in message


def test_a_connection_that_asks_for_nothing_is_closed_without_a_word(strict: Server) -> None:
    # A proxy that keeps connections on stock would take a word for the answer to its next request.
    assert talk(strict) == b""


def test_a_kept_connection_has_a_deadline_for_each_header(strict: Server) -> None:
    with connect(strict) as connection:
        connection.sendall(request(b"GET /version"))
        assert statuses(one_answer(connection)) == [200]
        connection.sendall(b"GET /hea")
        assert error_of(rest_of(connection))[0] == 408


def test_a_connection_may_be_idle_between_requests_for_longer_than_a_header_may_take(
    strict: Server,
) -> None:
    with connect(strict) as connection:
        connection.sendall(request(b"GET /version"))
        assert statuses(one_answer(connection)) == [200]
        connection.settimeout(READ_TIMEOUT * 1.5)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.sendall(request(b"GET /version", CLOSE))
        assert statuses(rest_of(connection)) == [200]


def body_of(size: int) -> bytes:
    """JSON of this size that asks for a token."""
    return ASK[:-1] + b" " * (size - len(ASK)) + b"}"


def test_a_body_of_the_largest_size_is_taken(strict: Server) -> None:
    whole = body_of(LARGEST_BODY)
    assert statuses(talk(strict, post(whole, CLOSE))) == [200]
    with connect(strict) as connection:
        connection.sendall(chunked(whole[:70_000], whole[70_000:]))
        assert statuses(rest_of(connection)) == [200]


TOO_LARGE = {
    "one byte": post(body_of(LARGEST_BODY + 1)),
    "far": post(body_of(LARGEST_BODY * 100)),
    "one byte in chunks": chunked(body_of(LARGEST_BODY + 1)),
    "far in chunks": chunked(*[b" " * 65536] * 100),
}


@pytest.mark.parametrize("sent", TOO_LARGE.values(), ids=TOO_LARGE)
def test_a_body_too_large_is_refused_and_the_client_gets_to_read_that(
    strict: Server, sent: bytes
) -> None:
    status, message = error_of(talk(strict, sent))
    assert status == 413
    assert "--max-body-size" in message


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (post(b"x" * 10**6, path=b"/nowhere"), 404),
        (post(b"x" * 10**6, path=b"/health"), 405),
        (request(b"POST /tokenize", b"Content-Type: text/plain", b"Content-Length: 1000000",
                 body=b"x" * 10**6), 415),
    ],
    ids=["unknown path", "wrong method", "wrong type"],
)  # fmt: skip
def test_what_is_refused_before_its_body_was_read_is_answered_once(
    strict: Server, sent: bytes, expected: int
) -> None:
    if expected == 415:
        sent = sent.replace(b"Content-Type: application/json\r\n", b"", 1)
    assert error_of(talk(strict, sent))[0] == expected


def test_a_client_that_waits_for_a_go_ahead_gets_one_or_a_refusal(strict: Server) -> None:
    with connect(strict) as connection:
        connection.sendall(
            request(b"POST /v1/completions", b"Expect: 100-continue", CLOSE,
                    b"Content-Length: %d" % len(ASK))
        )  # fmt: skip
        assert statuses(connection.recv(1000)) == [100]
        connection.sendall(ASK)
        assert statuses(rest_of(connection)) == [200]
    with connect(strict) as connection:
        connection.sendall(
            request(b"POST /v1/completions", b"Expect: 100-continue", b"Content-Length: 9999999")
        )
        # Without waiting for a body that may never come.
        assert error_of(one_answer(connection))[0] == 413


def test_requests_in_a_row_on_one_connection_are_answered_in_their_order(strict: Server) -> None:
    long = post(b'{"prompt": "w1", "max_tokens": 20}')
    answer = talk(strict, long + request(b"GET /nowhere") + request(b"GET /version", CLOSE))
    assert statuses(answer) == [200, 404, 200]
    assert b'"completion_tokens":20' in answer.split(b"HTTP/1.1 ")[1]


def test_a_request_with_rubbish_behind_it_is_given_up(strict: Server) -> None:
    with connect(strict) as connection:
        connection.sendall(post(b'{"prompt": "w1", "max_tokens": 4000}'))
        wait_for(strict.url, num_requests_running=1.0)
        connection.sendall(b"\x00rubbish\r\n\r\n")
        assert error_of(rest_of(connection))[0] == 400


def test_an_offer_to_upgrade_is_passed_over_but_not_with_a_body(strict: Server) -> None:
    upgrade = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk")
    with connect(strict) as connection:
        connection.sendall(request(b"GET /version", *upgrade))
        assert statuses(one_answer(connection)) == [200]
        connection.sendall(request(b"GET /version", CLOSE))
        assert statuses(rest_of(connection)) == [200]
    # The parser would read the body as a request of its own.
    hidden = request(b"GET /version")
    status, message = error_of(talk(strict, post(hidden, *upgrade)))
    assert (status, message[:23]) == (400, "a request with a body m")


def test_clients_that_leave_in_the_middle_of_a_request_leave_nothing(strict: Server) -> None:
    for cut in (5, 60, len(post()) - 3):
        with connect(strict) as connection:
            connection.sendall(post()[:cut])


def test_other_methods_and_old_versions_of_http_are_answered(strict: Server) -> None:
    assert statuses(talk(strict, b"GET /version HTTP/1.0\r\n\r\n")) == [200]
    assert statuses(talk(strict, b"GET /version\r\n\r\n")) == [200]
    head = talk(strict, request(b"HEAD /health", CLOSE))
    assert (statuses(head), head.partition(b"\r\n\r\n")[2]) == ([405], b"")
    assert b"allow: GET" in head
    assert statuses(talk(strict, request(b"OPTIONS *", CLOSE))) == [404]
    assert statuses(talk(strict, request(b"DELETE /v1/completions", CLOSE))) == [405]
    assert statuses(talk(strict, request(b"GET /%ff%00%2e%2e", CLOSE))) == [404]


class _Recorded(asyncio.Transport):
    """What is written to it, until its end was."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.ended = False

    def write(self, data: Any) -> None:
        assert not self.ended
        self.written.append(bytes(data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing is open."""


def test_what_is_wrong_in_two_ways_at_once_is_refused_once() -> None:
    """No HTTP, and longer than any header, in one read."""

    async def main() -> list[bytes]:
        async def app(scope: object, receive: object, send: object) -> None:
            raise AssertionError

        config = uvicorn.Config(app, log_config=None)
        config.load()
        kind = with_limits(read_timeout=60.0, most=10)
        connection = kind(config, ServerState(), {})
        transport = _Recorded()
        connection.connection_made(transport)
        connection.data_received(b"A" * 100_000)
        connection.data_received(b"A")
        connection.connection_lost(None)
        return transport.written

    (answer,) = asyncio.run(main())
    assert answer.startswith(b"HTTP/1.1 400 ")
