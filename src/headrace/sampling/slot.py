"""All that the last stage keeps of choosing one sequence's tokens: its settings and its history."""

from collections import Counter

import torch

from headrace.protocol.plan import Admission, Sampling
from headrace.sampling.rules import SlotRules

_FLOAT32 = torch.finfo(torch.float32)


class SlotSampling:
    """One sequence's settings, tokens so far, and what its logits need, worked out once.

    Made anew for each admission, so nothing of a slot's last sequence can reach the next.
    vocab_size is the logits' width. rules: those of the admission, which all completions of a
    request share; None if it goes by none.

    greedy: takes the likeliest token. adjusts: adjust() changes the logits. filters: min_p, top_k
    or top_p leave tokens out. top_k is in effect unless 0. logprobs, prompt_logprobs: those of
    Sampling. outputs: the tokens it sampled so far.
    """

    def __init__(
        self, admission: Admission, vocab_size: int, rules: SlotRules | None = None
    ) -> None:
        sampling = admission.sampling
        assert sampling is not None, "the last stage was not told how to choose tokens"
        self.seed = sampling.seed
        self.temperature = sampling.temperature
        self.min_p = sampling.min_p
        self.top_k = sampling.top_k if sampling.top_k < vocab_size else 0
        self.top_p = sampling.top_p
        self.logprobs = sampling.logprobs
        self.prompt_logprobs = sampling.prompt_logprobs
        self.outputs = list(admission.outputs)
        self.greedy = sampling.temperature == 0.0
        self.filters = not self.greedy and (self.min_p > 0 or self.top_k > 0 or self.top_p < 1)

        self._min_tokens = sampling.min_tokens
        self._rules = rules
        self._bad_words = None if rules is None else rules.bad_words
        # Of the bad words: the end of the outputs that some of them begin with.
        self._word_state = 0
        if self._bad_words is not None:
            for token in self.outputs:
                self._word_state = self._bad_words.step(self._word_state, token)
        self._penalties: _Penalties | None = None
        if (
            sampling.repetition_penalty != 1
            or sampling.frequency_penalty != 0
            or sampling.presence_penalty != 0
        ):
            self._penalties = _Penalties(admission, sampling)
        self.adjusts = self._penalties is not None or (
            rules is not None
            and (
                rules.bad_words is not None
                or rules.biases
                or (len(rules.end_tokens) > 0 and self._min_tokens > len(self.outputs))
            )
        )

    @property
    def plain(self) -> bool:
        """Whether its rows take the short way: one argmax, or one draw from a softmax."""
        return not (self.adjusts or self.filters)

    @property
    def next_index(self) -> int:
        """The number of the token it samples next, from 0; with the seed it fixes the draw."""
        return len(self.outputs)

    def adjust(self, logits: torch.Tensor) -> None:
        """Change one row of logits, [vocab] of float32 or float64, in place; in vLLM's order."""
        rules = self._rules
        if self._bad_words is not None:
            for tokens in self._bad_words.banned(self._word_state):
                logits[tokens] = -torch.inf
        if rules is not None:
            if len(self.outputs) < self._min_tokens:
                logits[rules.end_tokens] = -torch.inf
            if rules.biases:
                rules.add_bias(logits)
        if self._penalties is not None:
            self._penalties.apply(logits)

    def record(self, token: int) -> None:
        """Take note of the token that was sampled."""
        self.outputs.append(token)
        if self._bad_words is not None:
            self._word_state = self._bad_words.step(self._word_state, token)
        if self._penalties is not None:
            self._penalties.count(token)


class _Penalties:
    """A sequence's penalties, and how often it has which token.

    Tokens are kept apart from the vocabulary, so a step costs as much as the sequence has distinct
    tokens. The room for them doubles when it is used up.
    """

    def __init__(self, admission: Admission, sampling: Sampling) -> None:
        # Beyond float32's range it would turn a logit of 0 into a NaN.
        self._repetition = min(max(sampling.repetition_penalty, _FLOAT32.tiny), _FLOAT32.max)
        self._frequency = sampling.frequency_penalty
        self._presence = sampling.presence_penalty
        in_outputs = Counter(admission.outputs)
        # A prompt's tokens matter to the repetition penalty alone: they count nothing.
        tokens = list(dict.fromkeys([*admission.prompt, *admission.outputs]))
        self._place = {token: place for place, token in enumerate(tokens)}
        self._tokens = torch.tensor(tokens, dtype=torch.int64)
        self._counts = torch.tensor([in_outputs[t] for t in tokens], dtype=torch.float32)

    def count(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._tokens):
            self._tokens = torch.cat([self._tokens, torch.zeros_like(self._tokens)])
            self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
        self._tokens[place] = token
        self._counts[place] += 1

    def apply(self, logits: torch.Tensor) -> None:
        tokens = self._tokens[: len(self._place)].to(logits.device)
        counts = self._counts[: len(self._place)].to(logits)
        values = logits[tokens]
        values = torch.where(values > 0, values / self._repetition, values * self._repetition)
        values -= self._frequency * counts
        values -= self._presence * (counts > 0)
        logits[tokens] = values.clamp_(max=_FLOAT32.max)
