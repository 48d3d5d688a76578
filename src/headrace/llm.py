"""Offline generation from Python, with vLLM's class and argument names."""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from headrace.config import EngineConfig
from headrace.engine.outputs import CompletionOutput, OutputDelta, RequestOutput
from headrace.errors import UsageError
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
        the pipeline breaks.
        """
        batch = _as_prompts(prompts)
        params = _as_params(sampling_params, len(batch))
        started = time.monotonic()
        requests = [_Request(p if isinstance(p, str) else None, self._token_ids(p)) for p in batch]
        ids: dict[int, _Request] = {}
        try:
            for request, choice in zip(requests, params, strict=True):
                ids[self.running.engine.add(request.prompt_token_ids, choice)] = request
            self._run(ids, started)
        except BaseException:
            for request_id in ids:
                self.running.engine.abort(request_id)
            raise
        return [request.output(request_id) for request_id, request in ids.items()]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams) -> Iterator[OutputDelta]:
        """Complete one prompt, handing out each token as it comes."""
        engine = self.running.engine
        request_id = engine.add(self._token_ids(prompt), sampling_params)
        try:
            finished = False
            while not finished:
                for delta in engine.step():
                    if delta.request_id == request_id:
                        yield delta
                        finished = delta.finish_reason is not None
        finally:
            engine.abort(request_id)

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

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.running.tokenizer.encode(prompt)
        return list(prompt)

    def _run(self, requests: "dict[int, _Request]", started: float) -> None:
        unfinished = set(requests)
        while unfinished:
            for delta in self.running.engine.step():
                if delta.request_id in unfinished:
                    requests[delta.request_id].take(delta, started)
                    if delta.finish_reason is not None:
                        unfinished.remove(delta.request_id)


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
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]
    return items


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise UsageError(f"{len(params)} sampling parameters were given for {count} prompts")
    return list(params)
