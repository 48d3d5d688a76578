"""Offline generation from Python, with vLLM's class and argument names."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from headrace.checkpoint.tokenizer import Message
from headrace.config import EngineConfig
from headrace.engine.outputs import OutputDelta, OutputGatherer, RequestOutput
from headrace.errors import PipelineError, UsageError
from headrace.launcher import RunningEngine, launch
from headrace.progress import batch_progress
from headrace.prompts import (
    Prompt,
    TokenizedPrompt,
    as_conversations,
    as_params,
    as_prompts,
)
from headrace.protocol.checks import check_type
from headrace.protocol.messages import Loading, Timeline
from headrace.protocol.sampling_params import SamplingParams

# Seconds for stages to show their time lines, which are large.
_SHOW_TIMEOUT = 30.0


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
        self.config = EngineConfig.of("LLM", model, settings)
        self.running: RunningEngine = launch(self.config, on_progress)
        # What arrived for each open request and was not taken yet.
        self._arrived: dict[int, deque[OutputDelta]] = {}
        self._end_stages = weakref.finalize(self, self.running.stages.close, drain=False)
        self._ended_by = "close()"

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; the answers come in the prompts' order.

        A prompt is a text or a list of token ids. One SamplingParams serves all prompts, a list
        gives each its own. use_tqdm: show a progress bar if standard error is a terminal.
        priority: one number a prompt, smaller runs first. Raises UsageError for a request that can
        never run, PipelineError if the pipeline breaks. An error or interrupt inside the engine
        closes this LLM.
        """
        batch = as_prompts(prompts, self.running.tokenizer)
        return self._complete(batch, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, by the model's chat template.

        A conversation is a list of {"role": ..., "content": ...}. Otherwise as generate(); raises
        UsageError also if the model has no template or it refuses the messages.
        """
        conversations = as_conversations(messages)
        tokenizer = self.running.tokenizer
        batch = [
            TokenizedPrompt(tokenizer.render_chat(chat), tokenizer.encode_chat(chat))
            for chat in conversations
        ]
        return self._complete(batch, sampling_params, use_tqdm, priority)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> Iterator[OutputDelta]:
        """Complete one prompt, handing out each token as it comes.

        Several streams may be open at once, and generate() may run meanwhile.
        """
        (tokenized,) = as_prompts([prompt], self.running.tokenizer)
        (params,) = as_params(sampling_params, 1)
        request_id = self._add(tokenized.token_ids, params, priority)
        try:
            yield from self._deltas(request_id, params.n)
        finally:
            self._drop(request_id)

    def settle(self) -> None:
        """Run until nothing is in flight and every stage's report is in."""
        while not self.running.engine.settled:
            self._step()

    def timelines(self, last: int = 100_000) -> list[Timeline]:
        """What each stage did lately, in stage order, on this process's monotonic clock.

        At most its last so many activities; a stage remembers some 65,000, a few thousand steps.
        Raises PipelineError if one does not show them.
        """
        self._check_open()
        timelines = self.running.stages.timelines(last, _SHOW_TIMEOUT)
        if len(timelines) < len(self.running.shares):
            raise PipelineError(f"not every stage showed its time line within {_SHOW_TIMEOUT:g} s")
        return timelines

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

    def _complete(
        self,
        prompts: list[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        params = as_params(sampling_params, len(prompts))
        check_type("priority", priority, Sequence[int] | None)
        priorities = [0] * len(prompts) if priority is None else list(priority)
        if len(priorities) != len(prompts):
            raise UsageError(f"{len(priorities)} priorities were given for {len(prompts)} prompts")
        requests: dict[int, OutputGatherer] = {}
        try:
            for number, prompt in enumerate(prompts):
                choice = params[number]
                try:
                    request_id = self._add(prompt.token_ids, choice, priorities[number])
                except UsageError as error:
                    if len(prompts) == 1 or not self._end_stages.alive:
                        raise
                    raise UsageError(f"prompt {number}: {error}") from None
                requests[request_id] = OutputGatherer(
                    str(request_id), prompt.text, prompt.token_ids, choice
                )
            with batch_progress(sum(p.n for p in params), shown=use_tqdm) as progress:
                for request_id, gatherer in requests.items():
                    while not gatherer.finished:
                        delta = self._next_delta(request_id, on_step=progress)
                        gatherer.take(delta)
        finally:
            for request_id in requests:
                self._drop(request_id)
        return [gatherer.output() for gatherer in requests.values()]

    def _add(self, prompt: list[int], params: SamplingParams, priority: int) -> int:
        self._check_open()
        request_id = self.running.engine.add(prompt, params, priority)
        self._arrived[request_id] = deque()
        return request_id

    def _drop(self, request_id: int) -> None:
        """Forget a request, and end it if it still runs."""
        del self._arrived[request_id]
        self.running.engine.abort(request_id)

    def _deltas(self, request_id: int, completions: int) -> Iterator[OutputDelta]:
        """A request's deltas up to the last of the last completion."""
        while completions:
            delta = self._next_delta(request_id)
            completions -= delta.finish_reason is not None
            yield delta

    def _next_delta(
        self,
        request_id: int,
        on_step: Callable[[list[OutputDelta]], None] = lambda _: None,
    ) -> OutputDelta:
        arrived = self._arrived[request_id]
        while not arrived:
            on_step(self._step())
        return arrived.popleft()

    def _step(self) -> list[OutputDelta]:
        self._check_open()
        try:
            deltas = self.running.engine.step()
        except BaseException as error:
            # Also an interrupt: it may have come between two ranks' copies of one plan.
            self._end_stages()
            self._ended_by = f"{type(error).__name__}{f' ({error})' if str(error) else ''}"
            raise
        for delta in deltas:
            if delta.request_id in self._arrived:
                self._arrived[delta.request_id].append(delta)
        return deltas

    def _check_open(self) -> None:
        if not self._end_stages.alive:
            raise UsageError(f"this LLM is closed, by {self._ended_by}: make another")
