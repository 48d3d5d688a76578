"""What a request forbids and favours, made ready once for all of its completions."""

from array import array
from collections.abc import Iterator

import torch

from headrace.patterns import Patterns
from headrace.protocol.plan import TokenRules


class BadWords:
    """Which tokens would complete a bad word, found from the end of the output alone.

    A state stands for that end: 0 before any output, then what step() gives. words: token
    sequences, none of them empty.
    """

    def __init__(self, words: list[list[int]]) -> None:
        # What a word's last token must come after; of words of one token nothing, so the root.
        self._beginnings = Patterns([word[:-1] for word in words])
        by_node = sorted(
            {(node, word[-1]) for node, word in zip(self._beginnings.ends, words, strict=True)}
        )
        self._tokens = torch.tensor([token for _, token in by_node], dtype=torch.int64)
        # Node n's tokens are those from place n up to place n + 1.
        self._places = array("i", [0])
        for node in range(len(self._beginnings)):
            place = self._places[-1]
            while place < len(by_node) and by_node[place][0] == node:
                place += 1
            self._places.append(place)
        # The longest end of each node, itself included, after which there is a last token; or 0.
        self._banning = array("i", [0]) * len(self._beginnings)
        for node in range(1, len(self._beginnings)):
            banning = self._places[node] < self._places[node + 1]
            self._banning[node] = node if banning else self._banning[self._beginnings.shorter[node]]

    def step(self, state: int, token: int) -> int:
        """The state after one more output token."""
        return self._beginnings.step(state, token)

    def banned(self, state: int) -> Iterator[torch.Tensor]:
        """Tokens that may not come now, int64; one tensor for each end that words begin with."""
        node = self._banning[state]
        while node:
            yield self._of(node)
            node = self._banning[self._beginnings.shorter[node]]
        if self._places[1]:
            yield self._of(0)

    def _of(self, node: int) -> torch.Tensor:
        return self._tokens[self._places[node] : self._places[node + 1]]


class SlotRules:
    """TokenRules as logits need them, read by every slot of the request.

    vocab_size is the logits' width; token ids beyond it are passed over, since they cannot be
    sampled. bad_words: None if there are none. end_tokens: int64.
    """

    def __init__(self, rules: TokenRules, vocab_size: int) -> None:
        words = [word for word in rules.bad_words if max(word) < vocab_size]
        self.bad_words = BadWords(words) if words else None
        self.end_tokens = torch.tensor(
            [token for token in rules.end_tokens if token < vocab_size], dtype=torch.int64
        )
        bias = {t: b for t, b in rules.logit_bias.items() if t < vocab_size}
        self._biased = torch.tensor(list(bias), dtype=torch.int64)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float64)

    @property
    def biases(self) -> bool:
        """Whether add_bias changes anything."""
        return len(self._biased) > 0

    def add_bias(self, logits: torch.Tensor) -> None:
        """To one row of logits, [vocab] of float32 or float64, in place."""
        if self._bias.dtype != logits.dtype or self._bias.device != logits.device:
            # Once: a stage's logits are all of a kind.
            self._biased, self._bias = self._biased.to(logits.device), self._bias.to(logits)
        logits[self._biased] += self._bias
