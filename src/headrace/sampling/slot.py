"""All that the last stage keeps of choosing one sequence's tokens: its settings and its history."""

from collections import Counter

import torch

from headrace.protocol.plan import Admission

_FLOAT32 = torch.finfo(torch.float32)


class SlotSampling:
    """One sequence's settings, tokens so far, and what its logits need, worked out once.

    Made anew for each admission, so nothing of a slot's last sequence can reach the next.
    vocab_size is the logits' width; token ids of the settings beyond it are passed over, since
    they cannot be sampled.

    greedy: takes the likeliest token. adjusts: adjust() changes the logits. filters: min_p, top_k
    or top_p leave tokens out. top_k is in effect unless 0. outputs: the tokens it sampled so far.
    """

    def __init__(self, admission: Admission, vocab_size: int) -> None:
        sampling = admission.sampling
        self.seed = sampling.seed
        self.temperature = sampling.temperature
        self.min_p = sampling.min_p
        self.top_k = sampling.top_k if sampling.top_k < vocab_size else 0
        self.top_p = sampling.top_p
        self.outputs = list(admission.outputs)
        self.greedy = sampling.temperature == 0.0
        self.filters = not self.greedy and (self.min_p > 0 or self.top_k > 0 or self.top_p < 1)

        self._bad_words = [w for w in sampling.bad_words if max(w) < vocab_size]
        self._min_tokens = sampling.min_tokens
        self._end_tokens = [t for t in sampling.end_tokens if t < vocab_size]
        bias = {t: b for t, b in sampling.logit_bias.items() if t < vocab_size}
        self._biased = torch.tensor(list(bias), dtype=torch.int64)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float64)
        self._penalties: _Penalties | None = None
        if (
            sampling.repetition_penalty != 1
            or sampling.frequency_penalty != 0
            or sampling.presence_penalty != 0
        ):
            self._penalties = _Penalties(admission)
        self.adjusts = bool(
            self._bad_words
            or (self._end_tokens and self._min_tokens > len(self.outputs))
            or bias
            or self._penalties
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
        banned = self._banned()
        if banned:
            logits[banned] = -torch.inf
        if len(self._biased):
            where = self._biased.to(logits.device)
            logits[where] += self._bias.to(logits)
        if self._penalties is not None:
            self._penalties.apply(logits)

    def record(self, token: int) -> None:
        """Take note of the token that was sampled."""
        self.outputs.append(token)
        if self._penalties is not None:
            self._penalties.count(token)

    def _banned(self) -> list[int]:
        """Last tokens of bad words of which the outputs end with the rest; ends that are early."""
        banned = [
            word[-1]
            for word in self._bad_words
            if len(word) == 1 or self.outputs[1 - len(word) :] == word[:-1]
        ]
        if len(self.outputs) < self._min_tokens:
            banned += self._end_tokens
        return banned


class _Penalties:
    """A sequence's penalties, and how often it has which token.

    Tokens are kept apart from the vocabulary, so a step costs as much as the sequence has distinct
    tokens. The room for them doubles when it is used up.
    """

    def __init__(self, admission: Admission) -> None:
        sampling = admission.sampling
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
