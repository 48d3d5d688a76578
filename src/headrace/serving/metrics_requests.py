"""Counters and histograms of requests, fed with what the engine gives back for each of them."""

from collections.abc import Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram

from headrace.engine.outputs import OutputDelta
from headrace.engine.request import FinishReason
from headrace.sampling_params import SamplingParams

# Buckets as in vLLM, but for counts of tokens up to the same number for every model, so that those
# of several servers can be added up.
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_TOKENS = tuple(digit * 10**zeros for zeros in range(6) for digit in (1, 2, 5))
_COMPLETIONS = (1, 2, 5, 10, 20)


class RequestTotals:
    """What all requests add up to.

    A request is counted in the histograms of requests when its first token comes, so those that
    were refused, or left while they waited, are in none.
    """

    def __init__(self, model_name: str, registry: CollectorRegistry) -> None:
        def counter(name: str, documentation: str) -> Counter:
            made = Counter(f"headrace:{name}", documentation, ["model_name"], registry=registry)
            return made.labels(model_name)

        def histogram(name: str, documentation: str, buckets: Sequence[float]) -> Histogram:
            made = Histogram(
                f"headrace:{name}",
                documentation,
                ["model_name"],
                buckets=buckets,
                registry=registry,
            )
            return made.labels(model_name)

        self.prompt_tokens = counter(
            "prompt_tokens", "Prompt tokens processed, those from the prefix cache included."
        )
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.cut = counter(
            "answers_cut", "Answers cut since too much waited to be read, of them and all others."
        )
        success = Counter(
            "headrace:request_success",
            "Completions that ended (a request has n of them), by reason.",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self.success: dict[FinishReason, Counter] = {
            reason: success.labels(model_name, reason) for reason in get_args(FinishReason)
        }
        self._model_name = model_name
        # The statuses are this server's own, so there are few.
        self._refusals = Counter(
            "headrace:request_refused",
            "Requests answered by an error before any of their answer, by HTTP status.",
            ["model_name", "status"],
            registry=registry,
        )
        self.first_token_s = histogram(
            "time_to_first_token_seconds",
            "From queueing a request to the first token of any of its completions.",
            _FIRST_TOKEN_S,
        )
        self.token_gap_s = histogram(
            "inter_token_latency_seconds", "Between tokens of a completion.", _TOKEN_S
        )
        self.per_token_s = histogram(
            "request_time_per_output_token_seconds",
            "Mean time between tokens of each completion that has two or more.",
            _TOKEN_S,
        )
        self.whole_s = histogram(
            "e2e_request_latency_seconds",
            "From queueing a request to the end of its last completion, unless one was aborted.",
            _REQUEST_S,
        )
        self.queue_s = histogram(
            "request_queue_time_seconds",
            "How long a request waited for a slot: its completion with the first token.",
            _REQUEST_S,
        )
        self.prompt_lengths = histogram(
            "request_prompt_tokens", "Prompt tokens of each request.", _TOKENS
        )
        self.output_lengths = histogram(
            "request_generation_tokens", "Tokens of each completion, also if aborted.", _TOKENS
        )
        self.asked_n = histogram("request_params_n", "The parameter n.", _COMPLETIONS)
        self.asked_max_tokens = histogram(
            "request_params_max_tokens", "The parameter max_tokens, where given.", _TOKENS
        )

    def refused(self, status: int) -> None:
        """A request was answered by an error of this HTTP status."""
        self._refusals.labels(self._model_name, status).inc()


class RequestWatch:
    """One request's part in the metrics, from being given to the engine to its end."""

    def __init__(self, metrics: RequestTotals, prompt_tokens: int, params: SamplingParams) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._params = params
        self._begun = False
        self._aborted = False
        self._open = set(range(params.n))
        # By completion: tokens so far, and when the first and the newest came.
        self._tokens = [0] * params.n
        self._first = [0.0] * params.n
        self._newest = [0.0] * params.n

    def take(self, deltas: Sequence[OutputDelta]) -> None:
        """Count what came for the request, in order; nothing any more once it is closed."""
        if not self._open:
            return
        tokens = 0
        observe_gap = self._metrics.token_gap_s.observe
        for delta in deltas:
            index, at = delta.index, delta.at
            if delta.token is not None:
                tokens += 1
                if self._tokens[index]:
                    observe_gap(at - self._newest[index])
                else:
                    self._first[index] = at
                    if not self._begun:
                        self._begin(delta)
                self._tokens[index] += 1
                self._newest[index] = at
            if delta.finish_reason is not None:
                self._end(index, delta.finish_reason)
                self._open.remove(index)
                if not self._open and not self._aborted:
                    self._metrics.whole_s.observe(at - delta.queued_at)
        if tokens:
            self._metrics.generation_tokens.inc(tokens)

    def close(self) -> None:
        """The request is over: completions that have not ended count as aborted."""
        for index in self._open:
            self._end(index, "abort")
        self._open.clear()

    def _begin(self, first: OutputDelta) -> None:
        """The request's first token came."""
        self._begun = True
        metrics, params = self._metrics, self._params
        metrics.prompt_tokens.inc(self._prompt_tokens)
        metrics.prompt_lengths.observe(self._prompt_tokens)
        metrics.asked_n.observe(params.n)
        if params.max_tokens is not None:
            metrics.asked_max_tokens.observe(params.max_tokens)
        metrics.first_token_s.observe(first.at - first.queued_at)
        if first.admitted_at is not None:
            metrics.queue_s.observe(first.admitted_at - first.queued_at)

    def _end(self, index: int, reason: FinishReason) -> None:
        metrics, tokens = self._metrics, self._tokens[index]
        self._aborted |= reason == "abort"
        metrics.success[reason].inc()
        metrics.output_lengths.observe(tokens)
        if tokens > 1:
            metrics.per_token_s.observe((self._newest[index] - self._first[index]) / (tokens - 1))
