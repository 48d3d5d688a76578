"""Bad words are found from the end of the output: by brute force and by what it takes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.protocol.plan import TokenRules
from headrace.sampling.rules import BadWords, SlotRules

WORDS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=12)


def forbidden(words: list[list[int]], outputs: list[int]) -> set[int]:
    """Last tokens of the words of which the outputs end with the rest."""
    # Something that no word has goes before, for words longer than the outputs.
    padded = [-1] * 9 + outputs
    return {word[-1] for word in words if padded[len(padded) + 1 - len(word) :] == word[:-1]}


def banned(words: BadWords, outputs: list[int]) -> list[list[int]]:
    state = 0
    for token in outputs:
        state = words.step(state, token)
    return [tokens.tolist() for tokens in words.banned(state)]


@given(WORDS, st.lists(st.integers(0, 4), max_size=20))
@settings(max_examples=500, deadline=None)
def test_what_is_banned_is_what_a_search_through_all_words_bans(
    words: list[list[int]], outputs: list[int]
) -> None:
    made = BadWords(words)
    for end in range(len(outputs) + 1):
        found = [token for tokens in banned(made, outputs[:end]) for token in tokens]
        assert set(found) == forbidden(words, outputs[:end])


def test_what_a_token_costs_depends_on_the_end_of_the_output_and_not_on_the_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = [[1, 2, 3], [2, 4], [5]]
    many = few + [[n, n + 1, n + 2] for n in range(100, 2600)] + [[2, n] for n in range(3000, 3100)]
    looks = []
    for words in (few, many):
        made = BadWords(words)
        look, count = made._beginnings._child, 0

        def counted(node: int, symbol: int, look=look) -> int:  # type: ignore[no-untyped-def]
            nonlocal count
            count += 1
            return int(look(node, symbol))

        monkeypatch.setattr(made._beginnings, "_child", counted)
        # One tensor for each end that words begin with: 1 2, 2, and nothing at all.
        assert [tokens[0] for tokens in banned(made, [9, 1, 2])] == [3, 4, 5]
        # Views of one tensor: nothing is copied for a token.
        (storage,) = {
            tokens.untyped_storage().data_ptr()
            for state in (0, made.step(0, 2))
            for tokens in made.banned(state)
        }
        assert storage == made._tokens.untyped_storage().data_ptr()
        looks.append(count)
    assert looks[0] == looks[1]


def test_a_bias_is_made_ready_once_for_all_completions() -> None:
    rules = SlotRules(TokenRules(0, logit_bias={1: 0.1, 3: -2.0, 99: 5.0}), 4)
    ready = []
    for _ in range(3):
        logits = torch.zeros(4)
        rules.add_bias(logits)
        ready.append(rules._bias)
        assert torch.equal(logits, torch.tensor([0.0, 0.1, 0.0, -2.0]))
    assert ready[0] is ready[1] is ready[2]
