"""A small OpenAI-compatible server that can be told to misbehave, in a thread of this process."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

FIRST_TOKEN_S = 0.02
TEMPLATE_LEN = 7


@dataclass
class FakeServer:
    """Answers with max_tokens words. A token is a word; a chat's template adds TEMPLATE_LEN.

    troubles: what goes wrong with the request of that number, from 0: "status" is a 400, "error" an
    error event, "cut" a connection closed in the middle, "short" an end without [DONE]. asked: the
    bodies so far, keys: their Authorization headers. peak: most requests at the same time. hung_up:
    set when a client goes early.
    """

    troubles: dict[int, str] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    connections: set[Any] = field(default_factory=set)
    running: int = 0
    peak: int = 0
    cpu_seconds: float = 0.0
    hung_up: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    words: dict[str, int] = field(default_factory=dict)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}, {"id": "other"}]})

    async def metrics(self, _: web.Request) -> web.Response:
        self.cpu_seconds += 0.5
        return web.Response(text=f"# HELP x\nprocess_cpu_seconds_total {self.cpu_seconds}\n")

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"tokens": self._ids(body)})

    async def detokenize(self, request: web.Request) -> web.Response:
        ids = (await request.json())["tokens"]
        words = list(self.words)
        return web.json_response({"prompt": " ".join(words[token] for token in ids)})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        trouble = self.troubles.get(len(self.asked))
        self.asked.append(body)
        self.keys.append(request.headers.get("Authorization"))
        self.connections.add(request.transport)
        if trouble == "status":
            error = {"message": "max_tokens: too many,\nby far", "type": "BadRequest"}
            return web.json_response({"error": error}, status=400)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            return await self._stream(request, body, trouble)
        except (ConnectionError, asyncio.CancelledError):
            self.hung_up.set()
            raise
        finally:
            self.running -= 1

    async def _stream(
        self, request: web.Request, body: dict[str, Any], trouble: str | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: dict[str, Any]) -> None:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())

        chat = "messages" in body
        if chat:
            await send({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(FIRST_TOKEN_S)
        count = body.get("max_tokens") or body["max_completion_tokens"]
        for number in range(count):
            text = f" {number}"
            await send({"choices": [{"delta": {"content": text}} if chat else {"text": text}]})
            if trouble == "error":
                await send({"error": {"message": "the pipeline broke"}})
                return response
            if trouble == "cut":
                assert request.transport is not None
                request.transport.close()
                return response
            await asyncio.sleep(0)
        if chat:
            await send({"choices": [{"delta": {}, "finish_reason": "length"}]})
        prompt = body.get("prompt")
        length = len(prompt) if isinstance(prompt, list) else len(self._ids(body))
        await send({"choices": [], "usage": {"prompt_tokens": length, "completion_tokens": count}})
        if trouble != "short":
            await response.write(b"data: [DONE]\n\n")
        return response

    def _ids(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            text = " ".join(message["content"] for message in body["messages"])
            added = ["<template>"] * TEMPLATE_LEN
        else:
            text, added = body["prompt"], []
        return [self.words.setdefault(w, len(self.words)) for w in [*added, *text.split()]]


@contextmanager
def fake_server(troubles: dict[int, str] | None = None) -> Iterator[FakeServer]:
    """On a free port of loopback, until the end of the block."""
    server = FakeServer(troubles or {})
    loop = asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", server.models)
        app.router.add_get("/metrics", server.metrics)
        app.router.add_post("/tokenize", server.tokenize)
        app.router.add_post("/detokenize", server.detokenize)
        app.router.add_post("/v1/completions", server.complete)
        app.router.add_post("/v1/chat/completions", server.complete)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
