"""What came for the choices of an answer and was not shown yet."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.engine.outputs import OutputDelta
from headrace.engine.request import FinishReason as EngineFinishReason
from headrace.protocol.messages import TokenLogprobs
from headrace.sampling_params import SamplingParams
from headrace.serving.logprobs import TextOffsets
from headrace.serving.responses import FinishReason
from headrace.serving.usage import TokenCount

# Texts of so many tokens are made one: each has its own overhead.
_TEXTS_APART = 64


@dataclass
class Choice:
    """One completion. tokens: those that have log-probabilities. logprob_sum: of all that ever
    came, num_tokens of them. begun: something of it was shown; offsets:
    where its tokens begin in what is shown, if that is asked for."""

    tokens: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprob_sum: float = 0.0
    num_tokens: int = 0
    begun: bool = False
    offsets: TextOffsets | None = None
    _texts: list[str] = field(default_factory=list)

    def add(self, delta: OutputDelta) -> None:
        """The next of its deltas."""
        if delta.text:
            self._texts.append(delta.text)
            if len(self._texts) > _TEXTS_APART:
                self._texts = ["".join(self._texts)]
        if delta.token is not None:
            self.num_tokens += 1
            if delta.logprobs is not None:
                self.tokens.append((delta.token, delta.logprobs))
                self.logprob_sum += delta.logprobs.logprobs[0]
        self.finish_reason = finish_reason(delta.finish_reason)
        self.stop_reason = delta.stop_reason

    def take(self) -> tuple[str, list[tuple[int, TokenLogprobs]]]:
        """Text and tokens that came since the last time."""
        text, tokens = "".join(self._texts), self.tokens
        self._texts, self.tokens = [], []
        return text, tokens

    @property
    def mean_logprob(self) -> float:
        """Of its tokens."""
        return self.logprob_sum / max(1, self.num_tokens)


class Choices:
    """All of a request's. count: of its tokens. reports: each prompt's log-probabilities, from its
    second token on."""

    def __init__(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        self.count = TokenCount(prompts)
        self.reports: list[list[TokenLogprobs]] = [[] for _ in prompts]
        self._prompts = prompts
        self._reported = params.prompt_logprobs is not None
        self._choices = [[Choice() for _ in range(params.n)] for _ in prompts]
        # By prompt the choices that have something new, in the order in which it came.
        self._news: list[dict[int, None]] = [{} for _ in prompts]

    def add(self, number: int, deltas: Sequence[OutputDelta]) -> None:
        """The next deltas of the prompt of this number."""
        self.count.take(number, deltas)
        choices, news = self._choices[number], self._news[number]
        for delta in deltas:
            if delta.prompt_logprobs:
                self.reports[number] += delta.prompt_logprobs
            if delta.token is not None or delta.finish_reason is not None:
                choices[delta.index].add(delta)
                news[delta.index] = None

    def is_reported(self, number: int) -> bool:
        """Whether all of a prompt's log-probabilities are there, if they are wanted: they come with
        the first completion, and others may be ahead of it."""
        return not self._reported or len(self.reports[number]) == len(self._prompts[number]) - 1

    def of(self, number: int) -> list[Choice]:
        """A prompt's choices."""
        return self._choices[number]

    def take_news(self, number: int) -> list[int]:
        """The prompt's choices that have something new since the last time."""
        news = list(self._news[number])
        self._news[number].clear()
        return news


def finish_reason(reason: EngineFinishReason | None) -> FinishReason | None:
    """As the API has it. Completions that were aborted or ended by an error are not shown: a
    Generation raises for them."""
    assert reason != "abort"
    assert reason != "error"
    return reason
