"""The event loop's turns are shared by all requests: one of them does one piece of work in each."""

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest

from headrace.serving.app import make_app
from headrace.serving.service import Service
from headrace.serving.settings import ServerSettings


def test_however_many_requests_have_texts_one_is_tokenized_in_a_turn() -> None:
    tokenized: list[str] = []

    def tokenize(text: str, add_special_tokens: bool) -> list[int]:
        tokenized.append(text)
        return []

    async def main() -> list[int]:
        service = Service(ServerSettings(served_model_names=("m",)))
        requests = [
            asyncio.ensure_future(service._tokenized(tokenize, str(number), True))
            for number in range(10)
        ]
        after_turns = []
        while not all(request.done() for request in requests):
            await asyncio.sleep(0)
            after_turns.append(len(tokenized))
        return after_turns

    after_turns = asyncio.run(main())
    assert tokenized == [str(number) for number in range(10)]
    assert all(now - before <= 1 for before, now in pairwise(after_turns))


@pytest.mark.parametrize(
    ("path", "work", "body"),
    [
        ("/v1/completions", "complete", {"prompt": "a"}),
        ("/v1/chat/completions", "answer_chat", {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", "tokenize", {"prompt": "a"}),
        ("/detokenize", "detokenize", {"tokens": [1]}),
    ],
)
def test_nothing_is_prepared_for_a_client_that_has_gone(
    path: str, work: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, given_up = asyncio.Event(), asyncio.Event()

    async def endless(*_: object) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            given_up.set()

    monkeypatch.setattr(f"headrace.serving.app.{work}", endless)
    app = make_app(Service(ServerSettings(served_model_names=("m",))))
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        """Nobody reads it."""

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    asyncio.run(app(scope, receive, send))
    assert given_up.is_set()
