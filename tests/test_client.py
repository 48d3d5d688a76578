import asyncio
import socket
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_server import fake_server
from headrace.client import Client, EventReader, _error_message, environment_api_key
from headrace.errors import ServerError, UsageError

BODY = {"prompt": "one two", "max_tokens": 3, "stream": True}

texts = st.binary(max_size=8).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b""))
line_ends = st.sampled_from([b"\n", b"\r\n"])
others = st.lists(st.sampled_from([b": keep alive", b":", b"event: x", b"id: 1", b"retry: 5"]))


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """Bytes of a stream, and the data of its events."""
    written, events = b"", []
    for data in draw(st.lists(st.lists(texts, max_size=3), max_size=4)):
        for text in data:
            for line in [*draw(others), b"data: " + text]:
                written += line + draw(line_ends)
        written += draw(line_ends)
        if data:
            events.append(b"\n".join(data))
    return written, events


@given(streams(), st.data())
def test_events_are_the_same_wherever_the_stream_is_cut(
    stream: tuple[bytes, list[bytes]], data: st.DataObject
) -> None:
    written, events = stream
    cuts = sorted(data.draw(st.lists(st.integers(0, len(written)))))
    reader = EventReader()
    chunks = [written[a:b] for a, b in zip([0, *cuts], [*cuts, len(written)], strict=True)]
    assert [event for chunk in chunks for event in reader.feed(chunk)] == events


def test_the_space_after_data_may_be_missing() -> None:
    assert EventReader().feed(b"data:x\n\ndata:  y\n\ndata:\n\n") == [b"x", b" y", b""]


def talk(url: str, conversation: Any, api_key: str | None = None) -> Any:
    """The result of conversation(client)."""

    async def run() -> Any:
        async with Client(url, api_key) as client:
            return await conversation(client)

    return asyncio.run(run())


async def read(client: Client, path: str = "/v1/completions") -> list[bytes]:
    return [event async for event in client.stream(path, BODY)]


def fail(url: str, conversation: Any) -> ServerError:
    with pytest.raises(ServerError) as caught:
        talk(url, conversation)
    assert "\n" not in str(caught.value)
    return caught.value


def test_an_answer_comes_event_by_event_over_one_connection() -> None:
    async def twice(client: Client) -> list[bytes]:
        await read(client)
        return await read(client)

    with fake_server() as server:
        # Whichever way the address is written.
        assert talk(server.url + "/v1/", Client.models) == ["fake", "other"]
        events = talk(server.url + "/", twice)
        assert [b'"text"' in event for event in events] == [True, True, True, False]
        assert len(server.connections) == 1


def test_each_failure_is_one_line_that_says_what_and_where() -> None:
    troubles = {0: "status", 1: "error", 2: "cut", 3: "short"}
    with fake_server(troubles) as server:
        where = f"{server.url}/v1/completions"
        refused = fail(server.url, read)
        assert str(refused) == f"{where} answered 400: max_tokens: too many, by far"
        assert refused.status == 400
        failed = fail(server.url, read)
        assert str(failed) == f"{where} failed while it answered: the pipeline broke"
        cut = "broke its answer off: the connection was closed, did the server end?"
        assert str(fail(server.url, read)) == f"{where} {cut}"
        assert str(fail(server.url, read)) == f"{where} ended its answer without [DONE]"
        unknown = fail(server.url, lambda client: client.get("/nothing"))
        assert str(unknown) == f"{server.url}/nothing answered 404: 404: Not Found"
        assert unknown.status == 404


def test_a_server_that_is_not_there_is_told_with_its_address() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    error = fail(url, Client.models)
    assert str(error).startswith(f"{url} cannot be reached (connection refused)")
    assert error.status is None


def test_closing_the_stream_hangs_up() -> None:
    async def leave(client: Client) -> None:
        async with aclosing(client.stream("/v1/completions", {**BODY, "max_tokens": 10**9})) as s:
            assert b'"text"' in await anext(s)

    with fake_server() as server:
        talk(server.url, leave)
        assert server.hung_up.wait(30)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (b'{"choices":[{"text":"error"}],"error":null}', None),
        (b'{"choices":[{"text":"error"}]}', None),
        (b'{"error":{"message":"full","code":503}}', "full"),
        (b'{"error":{"code":503}}', "{'code': 503}"),
        (b'{"error":"full"}', "full"),
        (b'{"object":"error","message":"full"}', "full"),
        (b'"error"', None),
    ],
)
def test_an_error_is_told_from_a_text_that_says_error(event: bytes, message: str | None) -> None:
    assert _error_message(event) == message


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http://x:99999"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="no server's address"):
        Client(url)


def test_the_key_is_ours_and_never_openais(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "theirs")
    assert environment_api_key() is None
    monkeypatch.setenv("HEADRACE_API_KEY", "ours")
    assert environment_api_key() == "ours"
