"""temperature, min_p, top_k and top_p, with transformers' warpers as the oracle."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headrace.sampling.sampler import draw_weights, sample
from sampling.slots import slot

PROMPT = [3, 1, 4, 1, 5]

KINDS: list[dict[str, Any]] = [
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"min_p": 0.1},
    {"repetition_penalty": 1.5},
    {"temperature": 0.7, "top_k": 12, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.03, "top_p": 0.7},
    {"min_p": 0.05, "top_k": 15, "top_p": 0.9, "repetition_penalty": 1.2},
]


def warped(logits: torch.Tensor, kind: dict[str, Any]) -> torch.Tensor:
    """[R, vocab] float64 scores of transformers, in vLLM's order; -inf for what is left out."""
    warpers: list[Any] = []
    if "repetition_penalty" in kind:
        warpers.append(RepetitionPenaltyLogitsProcessor(kind["repetition_penalty"]))
    if "temperature" in kind:
        warpers.append(TemperatureLogitsWarper(kind["temperature"]))
    if "min_p" in kind:
        warpers.append(MinPLogitsWarper(kind["min_p"]))
    if "top_k" in kind:
        warpers.append(TopKLogitsWarper(kind["top_k"]))
    if "top_p" in kind:
        warpers.append(TopPLogitsWarper(kind["top_p"]))
    scores = logits.double()
    for warper in warpers:
        scores = warper(torch.tensor([PROMPT] * len(logits)), scores)
    return scores


def weights_of(logits: torch.Tensor, kind: dict[str, Any]) -> torch.Tensor:
    vocab_size = logits.shape[-1]
    return draw_weights(logits, [slot(vocab_size, PROMPT, **kind) for _ in logits])


def random_logits(rows: int, vocab_size: int, spread: float = 2.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator) * spread


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize(("vocab_size", "spread"), [(40, 2.0), (5000, 0.1), (5000, 4.0)])
def test_the_tokens_kept_are_exactly_those_of_transformers(
    vocab_size: int, spread: float, kind: dict[str, Any]
) -> None:
    logits = random_logits(10, vocab_size, spread)
    weights, scores = weights_of(logits, kind), warped(logits, kind)
    assert torch.equal(weights > 0, scores.isfinite())
    probabilities = weights.double() / weights.double().sum(-1, keepdim=True)
    torch.testing.assert_close(probabilities, scores.softmax(-1), rtol=1e-5, atol=1e-12)


@given(
    temperature=st.floats(0.3, 2),
    min_p=st.floats(0, 1),
    top_k=st.integers(1, 70),
    # Nearer to 1 the rounding of sums decides.
    top_p=st.floats(0.001, 0.999) | st.just(1.0),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=100, deadline=None)
def test_any_settings_together_keep_what_transformers_keeps(
    temperature: float, min_p: float, top_k: int, top_p: float, seed: int
) -> None:
    kind = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
    logits = random_logits(1, 60, seed=seed)
    assert torch.equal(weights_of(logits, kind) > 0, warped(logits, kind).isfinite())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_draws_are_distributed_as_those_of_transformers(kind: dict[str, Any]) -> None:
    draws, vocab_size = 2500, 40
    logits = random_logits(1, vocab_size, seed=7)
    slots = [slot(vocab_size, PROMPT, seed=n, **kind) for n in range(draws)]
    counts = torch.bincount(sample(logits.expand(draws, -1), slots), minlength=vocab_size)
    expected = warped(logits, kind)[0].softmax(-1) * draws
    assert counts[expected == 0].sum() == 0
    # Tokens too rare for the test's approximation count as one.
    common = expected >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]]).double()
    wanted = torch.cat([expected[common], expected[~common].sum()[None]])
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    degrees = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    if degrees > 0:
        # Pearson's test: its statistic's tail is an incomplete gamma function. The seeds are
        # fixed, so this is one number for each kind.
        assert torch.special.gammaincc(degrees, statistic / 2) > 1e-3


def test_tokens_as_likely_as_the_last_of_top_k_stay_as_in_transformers() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0, 2.0]])
    weights = weights_of(logits, {"top_k": 2})
    assert torch.equal(weights > 0, warped(logits, {"top_k": 2}).isfinite())
    assert (weights > 0).tolist() == [[False, True, True, True, False, True]]


def test_tokens_as_likely_as_the_last_of_top_p_stay() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.2, 0.1]]).log()
    # 0.4 and one 0.2 would do; nothing says which of the two.
    kept = weights_of(logits, {"top_p": 0.5}) > 0
    assert kept.tolist() == [[False, True, True, True, False]]


def test_top_p_leaves_out_a_token_if_those_before_it_reach_top_p_exactly() -> None:
    logits = torch.tensor([[0.25, 0.5, 0.25]]).log2() * torch.log(torch.tensor(2.0))
    kind = {"top_p": 0.5}
    assert (weights_of(logits, kind) > 0).tolist() == [[False, True, False]]
    assert torch.equal(weights_of(logits, kind) > 0, warped(logits, kind).isfinite())


def test_the_likeliest_token_always_stays() -> None:
    logits = random_logits(10, 40)
    for kind in ({"top_p": 1e-12}, {"min_p": 1.0}, {"top_k": 1}):
        assert torch.equal((weights_of(logits, kind) > 0).nonzero()[:, 1], logits.argmax(-1))


def test_rows_of_one_batch_have_filters_of_their_own() -> None:
    logits = random_logits(len(KINDS), 40)
    slots = [slot(40, PROMPT, **kind) for kind in KINDS]
    weights = draw_weights(logits, slots)
    for row, kind in enumerate(KINDS):
        assert torch.equal(weights[row], weights_of(logits[row : row + 1], kind)[0])
