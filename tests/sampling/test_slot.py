"""Bad words, min_tokens, bias and penalties: what a slot does to its logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from headrace.sampling.sampler import adjusted_logits, draw_weights, sample
from headrace.sampling.slot import SlotSampling
from sampling.slots import slot

VOCAB = 23
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=30)
PENALTY = st.floats(-2, 2).map(lambda x: round(x, 3))


def adjusted(logits: torch.Tensor, own: SlotSampling) -> torch.Tensor:
    return adjusted_logits(logits[None], [own])[0]


def banned(own: SlotSampling) -> set[int]:
    return set(adjusted(torch.zeros(VOCAB), own).isinf().nonzero().flatten().tolist())


@given(
    prompt=TOKENS,
    outputs=TOKENS,
    later=TOKENS,
    repetition=st.sampled_from([0.5, 1.0, 1.25, 3.0]),
    frequency=PENALTY,
    presence=PENALTY,
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_penalties_are_those_of_the_formula(
    prompt: list[int],
    outputs: list[int],
    later: list[int],
    repetition: float,
    frequency: float,
    presence: float,
    seed: int,
) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
    own = slot(
        VOCAB,
        [0, *prompt],
        outputs,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    for token in later:
        own.record(token)
    everything = [*outputs, *later]
    expected = []
    for token, logit in enumerate(logits.tolist()):
        if token in [0, *prompt, *everything]:
            logit = logit / repetition if logit > 0 else logit * repetition
        count = everything.count(token)
        expected.append(logit - frequency * count - (presence if count else 0.0))
    torch.testing.assert_close(adjusted(logits, own), torch.tensor(expected))


@given(prompt=TOKENS, outputs=TOKENS, penalty=st.sampled_from([0.3, 1.1, 2.5]))
def test_the_repetition_penalty_is_that_of_transformers(
    prompt: list[int], outputs: list[int], penalty: float
) -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(len(prompt))) * 5
    oracle = RepetitionPenaltyLogitsProcessor(penalty)
    expected = oracle(torch.tensor([[0, *prompt, *outputs]]), logits[None])[0]
    own = slot(VOCAB, [0, *prompt], outputs, repetition_penalty=penalty)
    assert torch.equal(adjusted(logits, own), expected)


@pytest.mark.parametrize(("penalty", "likeliest"), [(1e-300, 1), (1e300, 3)])
def test_an_absurd_repetition_penalty_makes_no_nan(penalty: float, likeliest: int) -> None:
    logits = torch.tensor([0.0, 3.0, -3.0, 1.0])
    greedy = slot(4, [0, 1, 2], repetition_penalty=penalty, temperature=0.0)
    assert not adjusted(logits, greedy).isnan().any()
    assert int(sample(logits[None], [greedy])) == likeliest
    weights = draw_weights(logits[None], [slot(4, [0, 1, 2], repetition_penalty=penalty)])
    assert not weights.isnan().any()
    assert int(weights.argmax()) == likeliest


@given(
    outputs=st.lists(st.integers(0, 4), max_size=8),
    words=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1, max_size=4),
)
def test_bad_words_ban_the_tokens_that_transformers_bans(
    outputs: list[int], words: list[list[int]]
) -> None:
    # The oracle wants some token before; 22 is in no word.
    oracle = NoBadWordsLogitsProcessor(words)
    scores = oracle(torch.tensor([[22, *outputs]]), torch.zeros(1, VOCAB))[0]
    expected = set(scores.isinf().nonzero().flatten().tolist())
    assert banned(slot(VOCAB, [22], outputs, bad_words=words)) == expected


def test_bad_words_look_at_the_output_only() -> None:
    own = slot(VOCAB, prompt=[5, 6], bad_words=[[6, 7], [6, 8, 9]])
    assert banned(own) == set()
    own.record(6)
    assert banned(own) == {7}
    own.record(8)
    assert banned(own) == {9}


def test_min_tokens_of_one_keeps_the_first_token_from_being_an_end() -> None:
    own = slot(VOCAB, min_tokens=1, end_tokens=[9], temperature=0.0)
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = 1.0
    assert sample(logits, [own]).tolist() != [9]
    assert sample(logits, [own]).tolist() == [9]


def test_ends_come_only_after_min_tokens() -> None:
    own = slot(VOCAB, prompt=[1, 2, 3], outputs=[4], min_tokens=3, end_tokens=[0, 9])
    oracle = MinNewTokensLengthLogitsProcessor(3, 3, [0, 9], device="cpu")
    tokens = [1, 2, 3, 4]
    for token in (11, 12, 13):
        scores = oracle(torch.tensor([tokens]), torch.zeros(1, VOCAB))[0]
        assert banned(own) == set(scores.isinf().nonzero().flatten().tolist())
        own.record(token)
        tokens.append(token)
    assert banned(own) == set()


def test_bias_is_added_before_penalties_and_does_not_lift_a_ban() -> None:
    logits = torch.tensor([1.0, 1.0, 1.0, 1.0])
    own = slot(
        4,
        prompt=[1],
        logit_bias={1: 3.0, 2: -100.0, 3: 100.0},
        bad_words=[[3]],
        repetition_penalty=2.0,
    )
    assert adjusted(logits, own).tolist() == [1.0, 2.0, -99.0, -torch.inf]


def test_bias_decides_what_is_drawn() -> None:
    logits = torch.zeros(50, VOCAB)
    slots = [slot(VOCAB, seed=n, logit_bias={17: 100.0}) for n in range(50)]
    assert set(sample(logits, slots).tolist()) == {17}


def test_token_ids_beyond_the_logits_are_passed_over() -> None:
    own = slot(
        VOCAB,
        min_tokens=5,
        end_tokens=[2, VOCAB],
        logit_bias={VOCAB + 7: 1.0},
        bad_words=[[VOCAB, 3], [1, VOCAB], [4]],
    )
    own.record(1)
    assert banned(own) == {2, 4}
