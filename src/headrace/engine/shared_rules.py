"""Token rules that completions share: which of them the last stage has, and until when."""

from dataclasses import dataclass

import msgspec

from headrace.protocol.plan import TokenRules


@dataclass(eq=False, slots=True)
class SharedRules:
    """What TokenRules say, for all sequences made from one SamplingParams.

    bad_words: MessagePack of the token sequences, a tenth of what lists of them take: many requests
    may wait. users: sequences that have not ended.
    """

    bad_words: bytes
    logit_bias: dict[int, float]
    end_tokens: list[int]
    users: int = 0

    @property
    def size(self) -> int:
        """How much the last stage has to take in of them, in entries and bytes of words."""
        return len(self.bad_words) + len(self.logit_bias) + len(self.end_tokens)

    def numbered(self, number: int) -> TokenRules:
        """As the last stage is told of them."""
        words = msgspec.msgpack.decode(self.bad_words, type=list[list[int]])
        return TokenRules(number, words, self.logit_bias, self.end_tokens)


class RulesOnStage:
    """Sends rules with the first admission that goes by them, and drops them when all their
    sequences have ended, however often those are preempted and admitted again meanwhile.

    Of one epoch: the next one's last stage has none. unused: whether rules are to be dropped.
    """

    def __init__(self) -> None:
        self._next_number = 0
        # What the last stage calls those that it has.
        self._numbers: dict[SharedRules, int] = {}
        self._unused: list[int] = []

    @property
    def unused(self) -> bool:
        return bool(self._unused)

    def join(self, rules: SharedRules | None) -> None:
        """One more sequence goes by these rules."""
        if rules is not None:
            rules.users += 1

    def leave(self, rules: SharedRules | None) -> None:
        """One of them has ended; its slot, if it has one, is released by the next plan."""
        if rules is None:
            return
        rules.users -= 1
        if not rules.users and rules in self._numbers:
            # Whoever comes now has them sent anew.
            self._unused.append(self._numbers.pop(rules))

    def unsent(self, rules: SharedRules | None) -> int:
        """How much an admission would bring the last stage of them: 0 if it has them."""
        return 0 if rules is None or rules in self._numbers else rules.size

    def number(self, rules: SharedRules | None, sent: list[TokenRules]) -> int | None:
        """What an admission calls its rules. sent: the plan's, to which these are added unless the
        last stage has them."""
        if rules is None:
            return None
        if rules not in self._numbers:
            self._numbers[rules] = self._next_number
            self._next_number += 1
            sent.append(rules.numbered(self._numbers[rules]))
        return self._numbers[rules]

    def drop_unused(self) -> list[int]:
        """The numbers that the plan drops, after its releases."""
        unused, self._unused = self._unused, []
        return unused
