"""Token rules that completions share: which of them the last stage has, and until when."""

from dataclasses import dataclass

import msgspec

from headrace.protocol.plan import TokenRules


@dataclass(eq=False, slots=True)
class SharedRules:
    """What TokenRules say, for all sequences made from one SamplingParams.

    bad_words: MessagePack of the token sequences, a tenth of what lists of them take: many requests
    may wait. users: sequences that have not ended. number: what the last stage calls them, if it
    has them.
    """

    bad_words: bytes
    logit_bias: dict[int, float]
    end_tokens: list[int]
    users: int = 0
    number: int | None = None

    @property
    def unsent(self) -> int:
        """How much the last stage would have to take in of them, in entries and bytes of words: 0
        if it has them."""
        if self.number is not None:
            return 0
        return len(self.bad_words) + len(self.logit_bias) + len(self.end_tokens)

    def numbered(self, number: int) -> TokenRules:
        """As the last stage is told of them."""
        words = msgspec.msgpack.decode(self.bad_words, type=list[list[int]])
        return TokenRules(number, words, self.logit_bias, self.end_tokens)


class RulesOnStage:
    """Sends rules with the first admission that goes by them, and drops them when all their
    sequences have ended, however often those are preempted and admitted again meanwhile.

    unused: whether rules are to be dropped.
    """

    def __init__(self) -> None:
        self._next_number = 0
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
        if not rules.users and rules.number is not None:
            self._unused.append(rules.number)
            # Whoever comes now has them sent anew.
            rules.number = None

    def number(self, rules: SharedRules | None, sent: list[TokenRules]) -> int | None:
        """What an admission calls its rules. sent: the plan's, to which these are added unless the
        last stage has them."""
        if rules is None:
            return None
        if rules.number is None:
            rules.number = self._next_number
            self._next_number += 1
            sent.append(rules.numbered(rules.number))
        return rules.number

    def drop_unused(self) -> list[int]:
        """The numbers that the plan drops, after its releases."""
        unused, self._unused = self._unused, []
        return unused
