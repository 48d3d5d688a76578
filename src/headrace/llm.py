"""Offline generation from Python, with vLLM's class and argument names."""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.outputs import CompletionOutput, OutputDelta, RequestOutput
from headrace.errors import PipelineError, UsageError
from headrace.launcher import RunningEngine, launch
from headrace.protocol.messages import Loading
from headrace.protocol.sampling_params import SamplingParams

Prompt = str | Sequence[int]


class LLM:
    """A model on its stages.

    Takes EngineConfig's settings as keyword arguments. Close it, or use it as a context manager;
    a forgotten one is closed when Python exits.
    """

    def __init__(
        self,
        model: str,
        *,
        on_progress: Callable[[Loading], None] = lambda _: None,
        **settings: Any,
    ) -> None:
        try:
            self.config = EngineConfig(model=model, **settings)
        except TypeError as error:
            raise UsageError(f"LLM: {error}") from error
        self.running: RunningEngine = launch(self.config, on_progress)
        self._close = weakref.finalize(self, self.running.stages.close, drain=False)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; the answers come in the prompts' order.

        A prompt is a text or a list of token ids. One SamplingParams serves all prompts, a list
        gives each its own. Raises UsageError for a request that can never run, PipelineError if
        the pipeline breaks; it is closed then.
        """
        batch = _as_prompts(prompts)
        params = _as_params(sampling_params, len(batch))
        started = time.monotonic()
        requests: dict[int, _Request] = {}
        with self._requests(requests):
            for prompt, choice in zip(batch, params, strict=True):
                request = _Request(
                    prompt if isinstance(prompt, str) else None, self._token_ids(prompt)
                )
                requests[self.running.engine.add(request.prompt_token_ids, choice)] = request
            unfinished = set(requests)
            while unfinished:
                for delta in self.running.engine.step():
                    if delta.request_id in unfinished:
                        requests[delta.request_id].take(delta, started)
                        if delta.finish_reason is not None:
                            unfinished.remove(delta.request_id)
        return [request.output(request_id) for request_id, request in requests.items()]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams) -> Iterator[OutputDelta]:
        """Complete one prompt, handing out each token as it comes."""
        engine = self.running.engine
        requests: dict[int, None] = {}
        with self._requests(requests):
            request_id = engine.add(self._token_ids(prompt), sampling_params)
            requests[request_id] = None
            finished = False
            while not finished:
                for delta in engine.step():
                    if delta.request_id == request_id:
                        yield delta
                        finished = delta.finish_reason is not None

    def settle(self) -> None:
        """Run until nothing is in flight, so that every stage's report is in."""
        while not self.running.engine.scheduler.idle:
            self.running.engine.step()
        self.running.engine.step(timeout_s=0.05)

    def close(self) -> None:
        """End the stages in order: they finish what they hold."""
        if self._close.detach():
            self.running.stages.close(drain=True)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._close()

    @contextmanager
    def _requests(self, requests: dict[int, Any]) -> Iterator[None]:
        """However it is left, none of the requests goes on running."""
        if not self._close.alive:
            raise UsageError("this LLM is closed: make a new one")
        try:
            yield
        except PipelineError:
            self._close()
            raise
        finally:
            for request_id in requests:
                self.running.engine.abort(request_id)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.running.tokenizer.encode(prompt)
        return list(prompt)


class _Request:
    """Gathers one request's deltas."""

    def __init__(self, prompt: str | None, prompt_token_ids: list[int]) -> None:
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._last: OutputDelta | None = None
        self._first_token_s: float | None = None
        self._total_s = 0.0

    def take(self, delta: OutputDelta, started: float) -> None:
        self._total_s = time.monotonic() - started
        if delta.token is not None:
            self._tokens.append(delta.token)
            if self._first_token_s is None:
                self._first_token_s = self._total_s
        self._text.append(delta.text)
        self._last = delta

    def output(self, request_id: int) -> RequestOutput:
        assert self._last is not None
        assert self._last.finish_reason is not None
        completion = CompletionOutput(
            0, "".join(self._text), self._tokens, self._last.finish_reason
        )
        return RequestOutput(
            request_id=request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion],
            first_token_s=self._first_token_s,
            total_s=self._total_s,
        )


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise UsageError(f"a prompt is a text or a list of token ids, not {prompts!r}")
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]
    for item in items:
        ids = isinstance(item, Sequence) and all(isinstance(token, int) for token in item)
        if not isinstance(item, str) and not ids:
            raise UsageError(f"a prompt is a text or a list of token ids, not {item!r}")
    return items


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise UsageError(
            f"sampling_params must be SamplingParams or a list of them, not {params!r}"
        )
    if len(params) != count:
        raise UsageError(f"{len(params)} sampling parameters were given for {count} prompts")
    return list(params)
