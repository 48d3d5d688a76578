"""Offline generation from Python, with vLLM's class and argument names."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from headrace.checkpoint.chat_template import Message
from headrace.checkpoint.tokenizer import Tokenizer
from headrace.checks import check_type
from headrace.config import EngineConfig
from headrace.deployment.model_card import ModelCard
from headrace.deployment.start import RunningEngine, StartWatch, launch
from headrace.engine.outputs import OutputDelta, OutputGatherer, RequestOutput
from headrace.engine.prepared import Prepared
from headrace.engine.snapshot import EngineSnapshot
from headrace.errors import PipelineError, UsageError
from headrace.progress import batch_progress
from headrace.prompts import (
    Prompt,
    TokenizedPrompt,
    as_conversations,
    as_params,
    as_prompts,
    tokenized_chat,
)
from headrace.protocol.messages import Loading, Timeline
from headrace.sampling_params import SamplingParams

# Seconds for stages to show their time lines, which are large.
_SHOW_TIMEOUT = 30.0
# Seconds in which a thread that waits for the engine takes it, at most, and between two looks.
_MAKE_WAY_S, _LOOK_S = 0.01, 0.0001


class LLM:
    """A model on its stages.

    model: as EngineConfig has it, with EngineConfig's other settings as keyword arguments; or an
    EngineConfig. Close it, or use it as a context manager; a forgotten one is closed when Python
    exits. Several threads may use it at once: what they ask for runs together, and each is given
    its own. A process forked from this one cannot: there UsageError is raised.
    """

    def __init__(
        self,
        model: str | EngineConfig,
        *,
        on_progress: Callable[[Loading], None] = lambda _: None,
        **settings: Any,
    ) -> None:
        self.config = EngineConfig.of("LLM", model, settings)
        self._running = launch(self.config, StartWatch(on_progress=on_progress))
        self.card: ModelCard = self._running.card
        self.tokenizer: Tokenizer = self._running.tokenizer
        # Of each open request: what arrived and was not taken yet by its reader, who may read more
        # than one.
        self._arrived: dict[int, deque[OutputDelta]] = {}
        # Requests whose readers left. The engine is told later: the garbage collector, which ends
        # forgotten streams, comes by at any moment, also while this very thread is in the engine.
        self._dropped: deque[int] = deque()
        # Whoever uses engine or stages holds it. Reentrant, since a signal's handler may close.
        self._lock = threading.RLock()
        self._waiting: set[int] = set()
        self._end_stages = weakref.finalize(self, _end, self._running, self._lock)
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
        gives each its own, None takes get_default_sampling_params(). use_tqdm: show a progress bar
        if standard error is a terminal. priority: one number a prompt, smaller runs first, if
        scheduling_policy is "priority"; an error under "fcfs", unless all are 0. Raises UsageError
        for a request that can never run, PipelineError if the pipeline breaks. An error or
        interrupt inside the engine closes this LLM.
        """
        batch = as_prompts(prompts, self.tokenizer)
        return self._complete(batch, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, by the model's chat template.

        A conversation is a list of {"role": ..., "content": ...}, with whatever else the server
        takes, and becomes the same prompt. add_generation_prompt: end it with the beginning of the
        answer. chat_template_kwargs: variables of the template. Otherwise as generate(); raises
        UsageError also if the model has no template or it refuses the messages.
        """
        check_type("add_generation_prompt", add_generation_prompt, bool)
        check_type("chat_template_kwargs", chat_template_kwargs, Mapping[str, Any] | None)
        conversations = as_conversations(messages)
        batch = []
        for number, chat in enumerate(conversations):
            try:
                prompt = tokenized_chat(
                    chat,
                    self.tokenizer,
                    self.card.max_model_len,
                    add_generation_prompt,
                    chat_template_kwargs or {},
                )
            except UsageError as error:
                if len(conversations) == 1:
                    raise
                raise UsageError(f"conversation {number}: {error}") from None
            batch.append(prompt)
        return self._complete(batch, sampling_params, use_tqdm, priority)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0
    ) -> Iterator[OutputDelta]:
        """Complete one prompt, handing out each token as it comes.

        Log-probabilities are as the last stage tells them.

        Several streams may be open at once, and generate() may run meanwhile.
        """
        (tokenized,) = as_prompts([prompt], self.tokenizer)
        (params,) = as_params(sampling_params, 1, self.get_default_sampling_params())
        arrived: deque[OutputDelta] = deque()
        request_id = self._add(tokenized, params, priority, arrived)
        completions = params.n
        try:
            while completions:
                self._wait_for_news(arrived)
                delta = arrived.popleft()
                completions -= delta.finish_reason is not None
                yield delta
        finally:
            self._drop(request_id)

    def get_default_sampling_params(self) -> SamplingParams:
        """What holds where no SamplingParams are given: the model's own defaults, if it has some
        and generation_config is auto."""
        return SamplingParams(**self.card.sampling_defaults)

    @property
    def snapshot(self) -> EngineSnapshot:
        """The engine's newest figures."""
        return self._running.engine.snapshot

    def settle(self) -> None:
        """Run until nothing is in flight and every stage's report is in."""
        while True:
            self._check_open()
            self._make_way()
            with self._lock:
                self._abort_dropped()
                if self._running.recovery.settled:
                    return
                self._step()

    def timelines(self, last: int = 100_000) -> list[Timeline]:
        """What each stage did lately, in stage order, on this process's monotonic clock.

        At most its last so many activities; a stage remembers some 65,000, a few thousand steps.
        Raises PipelineError if one does not show them.
        """
        self._check_open()
        self._ask_for_engine()
        with self._lock:
            self._waiting.discard(threading.get_ident())
            self._check_open()
            timelines = self._running.processes.timelines(last, _SHOW_TIMEOUT)
        if len(timelines) < len(self.card.stages):
            raise PipelineError(f"not every stage showed its time line within {_SHOW_TIMEOUT:g} s")
        return timelines

    def close(self) -> None:
        """End the stages in order: they finish what they hold.

        What other threads wait for ends with UsageError, and so does this in a fork of the process
        that made it.
        """
        self._running.processes.check_owner()
        self._ask_for_engine()
        with self._lock:
            self._waiting.discard(threading.get_ident())
            if self._end_stages.alive:
                try:
                    self._running.processes.close(drain=True)
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
        if kind is None and self._running.processes.owned:
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
        params = as_params(sampling_params, len(prompts), self.get_default_sampling_params())
        check_type("priority", priority, Sequence[int] | None)
        priorities = [0] * len(prompts) if priority is None else list(priority)
        if len(priorities) != len(prompts):
            raise UsageError(f"{len(priorities)} priorities were given for {len(prompts)} prompts")
        requests: dict[int, OutputGatherer] = {}
        arrived: deque[OutputDelta] = deque()
        # By identity: mostly all prompts have the same.
        prepared: dict[int, Prepared] = {}
        try:
            for number, prompt in enumerate(prompts):
                choice = params[number]
                try:
                    if id(choice) not in prepared:
                        prepared[id(choice)] = self._running.engine.prepare(choice)
                    request_id = self._add(
                        prompt, prepared[id(choice)], priorities[number], arrived
                    )
                except UsageError as error:
                    if len(prompts) == 1 or not self._end_stages.alive:
                        raise
                    raise UsageError(f"prompt {number}: {error}") from None
                requests[request_id] = OutputGatherer(
                    str(request_id),
                    prompt.text,
                    prompt.token_ids,
                    choice,
                    self._running.engine.reader.text_of,
                )
            unfinished = sum(choice.n for choice in params)
            with batch_progress(unfinished, shown=use_tqdm) as progress:
                while unfinished:
                    self._wait_for_news(arrived)
                    news = [arrived.popleft() for _ in range(len(arrived))]
                    for delta in news:
                        requests[delta.request_id].take(delta)
                        unfinished -= delta.finish_reason is not None
                    progress(news)
        finally:
            for request_id in requests:
                self._drop(request_id)
        return [gatherer.output() for gatherer in requests.values()]

    def _add(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams | Prepared,
        priority: int,
        reader: deque[OutputDelta],
    ) -> int:
        self._check_open()
        self._ask_for_engine()
        with self._lock:
            self._waiting.discard(threading.get_ident())
            self._check_open()
            try:
                request_id = self._running.engine.add(
                    prompt.token_ids, params, priority, prompt.salt
                )
                self._arrived[request_id] = reader
            except UsageError:
                raise
            except BaseException as error:
                # Also an interrupt: it may have come between two completions.
                self._give_up(error)
                raise
        return request_id

    def _drop(self, request_id: int) -> None:
        """Forget a request, which ends if it still runs."""
        del self._arrived[request_id]
        self._dropped.append(request_id)

    def _abort_dropped(self) -> None:
        while self._dropped:
            self._running.engine.abort(self._dropped.popleft())

    def _wait_for_news(self, reader: deque[OutputDelta]) -> None:
        """Until something arrived for the reader, whichever thread has the engine meanwhile."""
        while not reader:
            self._check_open()
            self._make_way()
            self._waiting.add(threading.get_ident())
            with self._lock:
                self._waiting.discard(threading.get_ident())
                if not reader:
                    self._step()

    def _ask_for_engine(self) -> None:
        """Have a thread that waits for the stages let go of the engine."""
        self._waiting.add(threading.get_ident())
        self._running.processes.wake()

    def _make_way(self) -> None:
        """Let one of the threads have the engine that wait for it: a lock alone is not fair."""
        others = self._waiting - {threading.get_ident()}
        deadline = time.monotonic() + _MAKE_WAY_S
        while others and others <= self._waiting and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def _step(self) -> None:
        """With the lock held: one step of the engine, and to each reader what it brought."""
        self._check_open()
        try:
            self._abort_dropped()
            deltas = self._running.recovery.step()
        except BaseException as error:
            # Also an interrupt: it may have come between two ranks' copies of one plan.
            self._give_up(error)
            raise
        for delta in deltas:
            if (reader := self._arrived.get(delta.request_id)) is not None:
                reader.append(delta)

    def _give_up(self, error: BaseException) -> None:
        """End the stages, since nobody knows how far the engine got."""
        # First what other threads will tell of it.
        self._ended_by = f"{type(error).__name__}{f' ({error})' if str(error) else ''}"
        self._end_stages()

    def _check_open(self) -> None:
        self._running.processes.check_owner()
        if not self._end_stages.alive:
            raise UsageError(f"this LLM is closed, by {self._ended_by}: make another")


def _end(running: RunningEngine, lock: "threading.RLock") -> None:
    """End the stages at once, as soon as no other thread has to do with them."""
    # In a fork of their process another thread may have held the lock, and never lets go of it.
    if running.processes.owned:
        running.processes.wake()
        with lock:
            running.processes.close(drain=False)
