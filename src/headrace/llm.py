"""Offline generation from Python, with vLLM's class and argument names."""

import operator
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any, SupportsIndex, cast

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
        known = {field.name for field in fields(EngineConfig)}
        for name in settings:
            if name not in known:
                raise UsageError(f"LLM has no setting {name}: it takes {', '.join(sorted(known))}")
        self.config = EngineConfig(model=model, **settings)
        self.running: RunningEngine = launch(self.config, on_progress)
        # What arrived for each open request and was not taken yet.
        self._arrived: dict[int, deque[OutputDelta]] = {}
        self._end_stages = weakref.finalize(self, self.running.stages.close, drain=False)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; the answers come in the prompts' order.

        A prompt is a text or a list of token ids. One SamplingParams serves all prompts, a list
        gives each its own. Raises UsageError for a request that can never run, PipelineError if
        the pipeline breaks. An error or interrupt inside the engine closes this LLM.
        """
        batch = _as_prompts(prompts)
        params = _as_params(sampling_params, len(batch))
        started = time.monotonic()
        requests: dict[int, _Request] = {}
        try:
            for prompt, choice in zip(batch, params, strict=True):
                ids = self._token_ids(prompt)
                text = prompt if isinstance(prompt, str) else None
                requests[self._add(ids, choice)] = _Request(text, ids)
            for request_id, request in requests.items():
                for delta in self._deltas(request_id):
                    request.take(delta, started)
        finally:
            for request_id in requests:
                self._drop(request_id)
        return [request.output(request_id) for request_id, request in requests.items()]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams) -> Iterator[OutputDelta]:
        """Complete one prompt, handing out each token as it comes.

        Several streams may be open at once, and generate() may run meanwhile.
        """
        (ids,) = (self._token_ids(p) for p in _as_prompts([prompt]))
        request_id = self._add(ids, *_as_params(sampling_params, 1))
        try:
            yield from self._deltas(request_id)
        finally:
            self._drop(request_id)

    def settle(self) -> None:
        """Run until nothing is in flight and every stage's report is in."""
        while not self.running.engine.settled:
            self._step()

    def close(self) -> None:
        """End the stages in order: they finish what they hold."""
        if self._end_stages.alive:
            try:
                self.running.stages.close(drain=True)
            finally:
                self._end_stages()

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
            self._end_stages()

    def _add(self, prompt: list[int], params: SamplingParams) -> int:
        self._check_open()
        request_id = self.running.engine.add(prompt, params)
        self._arrived[request_id] = deque()
        return request_id

    def _drop(self, request_id: int) -> None:
        """Forget a request, and end it if it still runs."""
        del self._arrived[request_id]
        self.running.engine.abort(request_id)

    def _deltas(self, request_id: int) -> Iterator[OutputDelta]:
        """A request's deltas up to its last."""
        arrived = self._arrived[request_id]
        finished = False
        while not finished:
            while not arrived:
                self._step()
            delta = arrived.popleft()
            finished = delta.finish_reason is not None
            yield delta

    def _step(self) -> None:
        self._check_open()
        try:
            deltas = self.running.engine.step()
        except BaseException:
            # Also an interrupt: it may have come between two ranks' copies of one plan.
            self._end_stages()
            raise
        for delta in deltas:
            if delta.request_id in self._arrived:
                self._arrived[delta.request_id].append(delta)

    def _check_open(self) -> None:
        if not self._end_stages.alive:
            raise UsageError("this LLM is closed, by close() or by an error: make another")

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.running.tokenizer.encode(prompt)
        return [operator.index(token) for token in prompt]


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
    if isinstance(prompts, str) or (prompts and _is_ids(prompts)):
        return [cast(Prompt, prompts)]
    if not isinstance(prompts, list | tuple):
        raise UsageError(f"a prompt is a text or a list of token ids, not {prompts!r}")
    for item in prompts:
        if not isinstance(item, str) and not _is_ids(item):
            raise UsageError(f"a prompt is a text or a list of token ids, not {item!r}")
    return list(prompts)


def _is_ids(prompt: object) -> bool:
    """Whether it is a list of whole numbers, numpy's among them; a truth value is none."""
    return isinstance(prompt, list | tuple) and all(
        isinstance(token, SupportsIndex) and not isinstance(token, bool) for token in prompt
    )


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple) or not all(
        isinstance(p, SamplingParams) for p in params
    ):
        raise UsageError(
            f"sampling_params must be SamplingParams or a list of them, not {params!r}"
        )
    if len(params) != count:
        raise UsageError(f"{len(params)} sampling parameters were given for {count} prompts")
    return list(params)
