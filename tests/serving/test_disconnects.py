"""Clients that go away, that do not read, and more of them than there is room for."""

import asyncio
import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from command import wait_until
from headrace import LLM, SamplingParams
from headrace.client import EventReader
from serving.running_server import Server
from serving.scrape import scrape, wait_for, wait_until_idle
from serving.tiny_model import MAX_QUEUED, MAX_SEQUENCES, MODEL, completion_arguments

PROMPT = "The mill wheel turns"
# An answer that takes far longer than the rest of its test, unless it is given up.
ENDLESS: dict[str, Any] = {"prompt": "On and on", "max_tokens": 15_000, "ignore_eos": True}


@pytest.fixture(autouse=True)
def idle_before_and_after(server: Server) -> Iterator[None]:
    """Slots and blocks are all back, and what was given up was not generated to its end."""
    wait_until_idle(server.url)
    steps = scrape(server.url)["steps_total"]
    yield
    wait_until_idle(server.url)
    assert scrape(server.url)["steps_total"] - steps < ENDLESS["max_tokens"]


@contextmanager
def sent(
    server: Server, receive_buffer: int | None = None, keep: bool = False, **body: Any
) -> Iterator[socket.socket]:
    """A connection that a request for a completion was sent on, in which nothing is read; keep:
    others may follow."""
    host, port = server.url.removeprefix("http://").split(":")
    data = json.dumps({"model": MODEL, **body}).encode()
    with socket.socket() as connection:
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.connect((host, int(port)))
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Connection: %b\r\nContent-Length: %d\r\n\r\n%b"
            % (b"keep-alive" if keep else b"close", len(data), data)
        )
        yield connection


def unchunked(answer: bytes) -> bytes:
    """The body of an answer that came in chunks."""
    chunks = answer.partition(b"\r\n\r\n")[2]
    body = bytearray()
    while chunks:
        size, _, chunks = chunks.partition(b"\r\n")
        body += chunks[: int(size, 16)]
        chunks = chunks[int(size, 16) + 2 :]
    return bytes(body)


@contextmanager
def full_slots(server: Server) -> Iterator[socket.socket]:
    """As many completions run as can, without end, until the connection is closed."""
    with sent(server, **ENDLESS, n=MAX_SEQUENCES, stream=True) as connection:
        wait_for(server.url, num_requests_running=MAX_SEQUENCES)
        yield connection


def answer(client: OpenAI) -> str:
    (choice,) = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, seed=7).choices
    return choice.text


def offline_answer(llm: LLM) -> str:
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=12, seed=7))
    return output.outputs[0].text


def test_a_stream_that_is_closed_in_the_middle_ends_its_request(
    client: OpenAI, server: Server, llm: LLM
) -> None:
    aborted = scrape(server.url)["request_success_total"]
    events = client.completions.create(**completion_arguments({**ENDLESS, "n": 2}), stream=True)
    with closing(events.response):
        next(iter(events))
        assert scrape(server.url)["num_requests_running"] == 2
        # Another request's answer is as ever, whoever comes and goes.
        assert answer(client) == offline_answer(llm)
    wait_until_idle(server.url)
    # Its two completions and the answer.
    assert scrape(server.url)["request_success_total"] == aborted + 3
    assert answer(client) == offline_answer(llm)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_request_whose_client_leaves_before_the_first_token_ends(
    server: Server, stream: bool
) -> None:
    with full_slots(server):
        with sent(server, **ENDLESS, n=3, stream=stream):
            wait_for(server.url, num_requests_waiting=3)
        wait_for(server.url, num_requests_waiting=0, num_requests_running=MAX_SEQUENCES)


def test_a_request_that_is_not_streamed_ends_with_its_connection(server: Server) -> None:
    with sent(server, **ENDLESS, n=2):
        wait_for(server.url, num_requests_running=2)


def test_a_request_ends_with_its_connection_though_another_waits_behind_it(server: Server) -> None:
    with sent(server, keep=True, **ENDLESS) as connection:
        wait_for(server.url, num_requests_running=1)
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        # The server has read it, since it answers what was sent later.
        scrape(server.url)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_task_that_is_cancelled_ends_its_request(server: Server, stream: bool) -> None:
    async def ask(client: AsyncOpenAI) -> None:
        fields = completion_arguments(ENDLESS)
        if stream:
            async for _ in await client.completions.create(**fields, stream=True):
                pass
        await client.completions.create(**fields)

    async def cancel() -> None:
        async with AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            task = asyncio.create_task(ask(client))
            await asyncio.to_thread(wait_for, server.url, num_requests_running=1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            # The client itself lives on, so it is not that which closes the connection.
            await asyncio.to_thread(wait_until_idle, server.url)

    asyncio.run(cancel())


def test_a_client_that_does_not_read_holds_up_nobody_and_gets_everything(
    client: OpenAI, server: Server, llm: LLM
) -> None:
    prompt = "Water turns the wheel. " * 4
    body: dict[str, Any] = {"prompt": prompt, "echo": True, "prompt_logprobs": -1, "n": 8,
                            "max_tokens": 2, "seed": 5}  # fmt: skip
    steps = scrape(server.url)["steps_total"]
    with sent(server, 4096, **body, stream=True) as connection:
        # The engine is done with it, though nobody has read a byte.
        wait_until(lambda: scrape(server.url)["steps_total"] > steps)
        wait_until_idle(server.url)
        assert answer(client) == offline_answer(llm)
        received = bytearray()
        while data := connection.recv(1 << 20):
            received += data
    # More than the system's buffer and the server's can have held.
    most = int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2])
    assert len(received) > most + 2 * 2**20
    *events, done = EventReader().feed(unchunked(bytes(received)))
    assert done == b"[DONE]"
    texts = [""] * 8
    for event in events:
        for choice in json.loads(event)["choices"]:
            texts[choice["index"]] += choice["text"]
    whole = client.completions.create(
        model=MODEL, prompt=prompt, n=8, max_tokens=2, seed=5, echo=True
    )
    assert texts == [choice.text for choice in whole.choices]


def test_more_requests_than_may_wait_are_told_to_come_back(
    client: OpenAI, http: httpx.Client, server: Server
) -> None:
    with full_slots(server):
        with sent(server, **ENDLESS, n=MAX_QUEUED):
            wait_for(server.url, num_requests_waiting=MAX_QUEUED)
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError) as caught:
                    client.completions.create(model=MODEL, prompt="a", stream=stream)
                assert (caught.value.status_code, caught.value.code) == (429, "queue_full")
                assert caught.value.type == "rate_limit_error"
                assert caught.value.response.headers["retry-after"] == "1"
            # It goes on serving what needs no slot.
            assert http.get("/health").status_code == 200
        wait_for(server.url, num_requests_waiting=0)
    wait_until_idle(server.url)
    assert len(answer(client)) > 0


def test_a_smaller_priority_goes_first(server: Server) -> None:
    """Behind full slots wait as many as there are slots, then a single one that is urgent. If it
    did not overtake them, one of them would have to end before it begins."""
    patient = {**ENDLESS, "n": MAX_SEQUENCES, "priority": 1}
    with full_slots(server) as running, sent(server, **patient):
        wait_for(server.url, num_requests_waiting=MAX_SEQUENCES)
        with sent(server, prompt="a", max_tokens=2, priority=0) as urgent:
            wait_for(server.url, num_requests_waiting=MAX_SEQUENCES + 1)
            running.close()
            urgent.settimeout(60.0)
            assert urgent.recv(1 << 16).startswith(b"HTTP/1.1 200")
