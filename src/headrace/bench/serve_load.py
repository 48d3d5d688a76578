"""A load on a server: requests that arrive at given moments, their answers timed chunk by chunk."""

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec

from headrace.bench.serve_data import (
    RandomPrompts,
    ServerTokenizer,
    SonnetPrompts,
    Work,
    arrivals,
)
from headrace.bench.serve_figures import LoadRun, Timing
from headrace.client import Client
from headrace.errors import ServerError

_CPU_METRIC = b"process_cpu_seconds_total "
_RETRY_S = 0.5


@dataclass(frozen=True)
class Load:
    """What to ask for. path: of the requests; chat: whether it takes messages. request_rate,
    burstiness: as in arrivals(). max_concurrency: requests that run at the same time at most, None
    for any number. ignore_eos: answers have their full length."""

    path: str
    chat: bool
    model: str
    dataset: RandomPrompts | SonnetPrompts
    num_prompts: int
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    temperature: float
    ignore_eos: bool
    seed: int

    def body(self, work: Work) -> dict[str, Any]:
        """One request. ignore_eos is in it only if it is wanted: OpenAI itself does not know it."""
        content: dict[str, Any]
        if self.chat:
            content = {
                "messages": [{"role": "user", "content": work.prompt}],
                "max_completion_tokens": work.output_len,
            }
        else:
            content = {"prompt": work.prompt, "max_tokens": work.output_len}
        return {
            "model": self.model,
            **content,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
        }


async def models_when_ready(client: Client, timeout_s: float) -> list[str]:
    """The server's models, as soon as it answers. Raises ServerError if it does not in time."""
    deadline = time.perf_counter() + timeout_s
    while True:
        try:
            return await client.models()
        except ServerError as error:
            if error.status not in (None, 503) or time.perf_counter() + _RETRY_S > deadline:
                raise
        await asyncio.sleep(_RETRY_S)


async def measure_load(client: Client, load: Load, say: Callable[[str], None]) -> LoadRun:
    """Make the prompts, warm up with one of their kind, and run the load. say: told what runs.

    Failures of the load's requests are counted. Raises ServerError for one before.
    """
    say("making prompts")
    tokenizer = ServerTokenizer(client, load.model, load.chat)
    works = await load.dataset.works(tokenizer, load.num_prompts + 1, Random(load.seed))
    say("warm-up")
    await timed_answer(client, load.path, load.body(works.pop()))
    return await _run(client, load, works, say)


async def _run(
    client: Client, load: Load, works: list[Work], say: Callable[[str], None]
) -> LoadRun:
    timings: list[Timing] = []
    errors: list[str] = []
    # Without a limit there is room for all.
    room = asyncio.Semaphore(load.max_concurrency or len(works))
    running = peak = 0

    async def ask(work: Work, arrival: float) -> None:
        nonlocal running, peak
        await asyncio.sleep(began + arrival - time.perf_counter())
        async with room:
            running += 1
            peak = max(peak, running)
            try:
                timings.append(await timed_answer(client, load.path, load.body(work)))
            except ServerError as error:
                errors.append(str(error))
            running -= 1
        say(f"{len(timings) + len(errors)} of {len(works)} requests")

    moments = arrivals(len(works), load.request_rate, load.burstiness, load.seed)
    server_cpu = await _server_cpu(client)
    client_cpu = time.process_time()
    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for work, arrival in zip(works, moments, strict=True):
            tasks.create_task(ask(work, arrival))
    duration = time.perf_counter() - began
    client_cpu = time.process_time() - client_cpu
    server_cpu_after = await _server_cpu(client)
    return LoadRun(
        timings=timings,
        errors=errors,
        duration=duration,
        peak_concurrency=peak,
        server_cpu=(
            None
            if server_cpu is None or server_cpu_after is None
            else server_cpu_after - server_cpu
        ),
        client_cpu=client_cpu,
    )


async def timed_answer(client: Client, path: str, body: dict[str, Any]) -> Timing:
    """Send one request and read its answer to the end. Raises ServerError."""
    chunk_times: list[float] = []
    usage = None
    began = time.perf_counter()
    async with aclosing(client.stream(path, body)) as events:
        async for data in events:
            now = time.perf_counter()
            chunk = _decode(data)
            if chunk.has_token():
                chunk_times.append(now)
            usage = chunk.usage or usage
    if usage is None:
        raise ServerError(f"{client.root}{path} counted no tokens: it knows no stream_options")
    if not chunk_times:
        raise ServerError(f"{client.root}{path} answered without a token")
    return Timing(began, chunk_times, usage.prompt_tokens, usage.completion_tokens)


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None

    def has_token(self) -> bool:
        """A token may have no text yet. But a chat's first chunk may only tell the role, before
        there is any token, and its last only why it ended."""
        if not self.choices:
            return False
        delta = self.choices[0].delta
        if delta is None:
            return True
        text = delta.content or delta.reasoning_content
        return bool(text) or (delta.content is not None and delta.role is None)


_chunks = msgspec.json.Decoder(_Chunk)


def _decode(data: bytes) -> _Chunk:
    try:
        return _chunks.decode(data)
    except msgspec.DecodeError as error:
        raise ServerError(f"an event is no chunk of a completion: {error}") from error


async def _server_cpu(client: Client) -> float | None:
    """Seconds of processor time that the server's process has used; None if it does not tell."""
    try:
        metrics = await client.get("/metrics")
    except ServerError:
        return None
    for line in metrics.splitlines():
        if line.startswith(_CPU_METRIC):
            return float(line[len(_CPU_METRIC) :])
    return None
