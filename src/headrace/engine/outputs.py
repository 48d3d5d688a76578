"""What requests give back: a delta for each token, and the output that deltas add up to."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from headrace.engine.request import FinishReason
from headrace.protocol.messages import TokenLogprobs
from headrace.sampling_params import SamplingParams


class Logprob(NamedTuple):
    """A token's log-probability at some position, named as in vLLM; rank counts from 1."""

    logprob: float
    rank: int
    decoded_token: str


Logprobs = dict[int, Logprob]


def readable(entry: TokenLogprobs, text_of: Callable[[int], str]) -> Logprobs:
    """By token id, the likeliest in order; ids[0] is the token itself, wherever it ranks.

    text_of: how a token reads.
    """
    own = entry.ids[0]
    found: Logprobs = {own: Logprob(entry.logprobs[0], entry.rank, text_of(own))}
    for place, (token, logprob) in enumerate(
        zip(entry.ids[1:], entry.logprobs[1:], strict=True), start=1
    ):
        if token not in found:
            found[token] = Logprob(logprob, place, text_of(token))
    return found


# Without gc: hundreds are made a step, none is part of a cycle.
class OutputDelta(msgspec.Struct, gc=False):
    """What one step brought for one completion of a request.

    token is None when there is none: the request was aborted, or only prompt logprobs came. text
    is what may be shown now, possibly nothing yet. prompt_logprobs are those of the next prompt
    tokens. Log-probabilities are as the last stage told them, for the reader to make readable():
    that takes longer than a step where there are many. at, queued_at, admitted_at: seconds of
    time.monotonic.
    """

    request_id: int
    index: int
    token: int | None
    text: str
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: TokenLogprobs | None
    prompt_logprobs: list[TokenLogprobs] | None
    cached_tokens: int
    at: float
    queued_at: float
    admitted_at: float | None


@dataclass
class CompletionOutput:
    """One completion, named as in vLLM.

    token_ids include the token that ended it; text leaves out what ended it unless
    include_stop_str_in_output. logprobs: one entry a token, if asked for. stop_reason: the stop
    string or token id, None for an end-of-text token. token_times_s: when each token came, in
    seconds since the request was added.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_times_s: list[float] = field(default_factory=list)

    def finished(self) -> bool:
        """Whether nothing more comes; a method, as in vLLM."""
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds: waiting for a slot; from arrival to the first token and to the last; and
    between tokens, on average over all completions (None before there are two)."""

    queue_s: float
    first_token_s: float | None
    total_s: float
    per_token_s: float | None


@dataclass
class RequestOutput:
    """What a request has so far, named as in vLLM; it is complete when finished.

    prompt_logprobs, if asked for: one entry a prompt token, None for the first. num_cached_tokens:
    prompt tokens found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[Logprobs | None] | None
    num_cached_tokens: int
    metrics: RequestMetrics


class OutputGatherer:
    """Adds up one request's deltas. text_of: how a token reads by itself."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        text_of: Callable[[int], str],
    ) -> None:
        self._text_of = text_of
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = prompt_token_ids
        self._prompt_logprobs: list[Logprobs | None] | None = None
        if params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]
        self._completions = [CompletionOutput(index) for index in range(params.n)]
        # Pieces of text are joined when somebody looks: adding up strings is not linear.
        self._text: list[list[str]] = [[] for _ in range(params.n)]
        self._unfinished = params.n
        self._cached_tokens = 0
        self._queue_s = 0.0
        self._total_s = 0.0

    @property
    def finished(self) -> bool:
        """Whether every completion has ended."""
        return self._unfinished == 0

    def take(self, delta: OutputDelta) -> None:
        """Take in the request's next delta."""
        completion = self._completions[delta.index]
        if delta.prompt_logprobs and self._prompt_logprobs is not None and delta.index == 0:
            self._prompt_logprobs += [readable(e, self._text_of) for e in delta.prompt_logprobs]
        self._total_s = delta.at - delta.queued_at
        if delta.index == 0:
            admitted = delta.at if delta.admitted_at is None else delta.admitted_at
            self._queue_s = admitted - delta.queued_at
            self._cached_tokens = delta.cached_tokens
        if delta.token is not None:
            completion.token_ids.append(delta.token)
            completion.token_times_s.append(self._total_s)
            if delta.logprobs is not None:
                if completion.logprobs is None:
                    completion.logprobs, completion.cumulative_logprob = [], 0.0
                completion.logprobs.append(readable(delta.logprobs, self._text_of))
                assert completion.cumulative_logprob is not None
                completion.cumulative_logprob += delta.logprobs.logprobs[0]
        if delta.text:
            self._text[delta.index].append(delta.text)
        if delta.finish_reason is not None:
            completion.finish_reason = delta.finish_reason
            completion.stop_reason = delta.stop_reason
            self._unfinished -= 1

    def output(self) -> RequestOutput:
        """The output so far, which later deltas leave as it is; copies all there is."""
        for pieces, completion in zip(self._text, self._completions, strict=True):
            if len(pieces) > 1:
                pieces[:] = ["".join(pieces)]
            completion.text = pieces[0] if pieces else ""
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[_copy(completion) for completion in self._completions],
            finished=self.finished,
            prompt_logprobs=None if self._prompt_logprobs is None else list(self._prompt_logprobs),
            num_cached_tokens=self._cached_tokens,
            metrics=self._metrics(),
        )

    def _metrics(self) -> RequestMetrics:
        timed = [c.token_times_s for c in self._completions if c.token_times_s]
        gaps = sum(len(times) - 1 for times in timed)
        spans = sum(times[-1] - times[0] for times in timed)
        return RequestMetrics(
            queue_s=self._queue_s,
            first_token_s=min((times[0] for times in timed), default=None),
            total_s=self._total_s,
            per_token_s=spans / gaps if gaps else None,
        )


def _copy(completion: CompletionOutput) -> CompletionOutput:
    return replace(
        completion,
        token_ids=list(completion.token_ids),
        logprobs=None if completion.logprobs is None else list(completion.logprobs),
        token_times_s=list(completion.token_times_s),
    )
