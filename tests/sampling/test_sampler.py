import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.protocol.plan import Admission, Sampling, TokenRules
from headrace.sampling.rules import SlotRules
from headrace.sampling.sampler import (
    adjusted_logits,
    choose_by_torch,
    draw_weights,
    sample,
    waiting_times,
)
from headrace.sampling.slot import SlotSampling
from headrace.sampling_params import MAX_SEED
from sampling.slots import samplings, slot, token_rules

VOCAB = 61
FIRST_TIMES = [0.03535977005958557, 0.01161393616348505]


@dataclasses.dataclass(frozen=True)
class Case:
    """A sequence by itself: the logits that it sees at each step come from its own seed."""

    admission: Admission
    rules: TokenRules
    logits: torch.Tensor

    def slot(self, outputs: list[int] | None = None) -> SlotSampling:
        known = self.admission.outputs if outputs is None else outputs
        return SlotSampling(
            Admission(0, self.admission.prompt, known, 0, self.admission.sampling),
            self.logits.shape[-1],
            SlotRules(self.rules, self.logits.shape[-1]),
        )

    def alone(self) -> list[int]:
        own = self.slot()
        return [int(sample(row[None], [own])) for row in self.logits]


@st.composite
def cases(draw: st.DrawFn, vocab_size: int = VOCAB, steps: int = 4) -> Case:
    tokens = st.lists(st.integers(0, vocab_size - 1), max_size=4)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    logits = torch.randn(steps, vocab_size, generator=generator) * draw(st.sampled_from([0.5, 4]))
    # Rounded logits have ties.
    logits = logits.bfloat16().float() if draw(st.booleans()) else logits
    sampling = draw(samplings(vocab_size))
    admission = Admission(0, [1, *draw(tokens)], draw(tokens), 0, sampling)
    return Case(admission, draw(token_rules(vocab_size)), logits)


@given(seed=st.integers(0, MAX_SEED), index=st.integers(0, 2**31), count=st.integers(1, 50))
def test_random_numbers_depend_on_seed_and_index_alone(seed: int, index: int, count: int) -> None:
    times = waiting_times(seed, index, count)
    assert np.array_equal(times, waiting_times(seed, index, count))
    assert np.array_equal(times, waiting_times(seed, index, count + 3)[:count])
    assert ((times > 0) & np.isfinite(times)).all()
    assert not np.array_equal(times, waiting_times(seed, index + 1, count))
    assert not np.array_equal(times, waiting_times(seed ^ 1, index, count))


def test_random_numbers_are_those_of_the_first_release() -> None:
    bits = np.random.Philox(key=123456789, counter=[0, 42, 0, 0]).random_raw(2)
    low = [int(b) & 0xFFFFFFFF for b in bits], [int(b) >> 32 for b in bits]
    expected = [
        -math.log1p(-(half + 0.5) / 2**32) for pair in zip(*low, strict=True) for half in pair
    ]
    assert waiting_times(123456789, 42, 4) == pytest.approx(expected, rel=1e-6)
    assert waiting_times(0, 0, 2).tolist() == pytest.approx(FIRST_TIMES, rel=1e-6)


def test_waiting_times_are_exponential_and_of_mean_one() -> None:
    times = np.sort(waiting_times(1, 2, 100_000).astype(np.float64))
    # Kolmogorov and Smirnov: exceeds 1.95 / sqrt(n) once in a thousand times; the seed is fixed.
    steps = np.arange(1, len(times) + 1) / len(times)
    assert np.abs(steps - (1 - np.exp(-times))).max() < 1.95 / math.sqrt(len(times))


@given(batch=st.lists(cases(), min_size=1, max_size=24), seed=st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_rows_choose_the_same_alone_and_in_any_batch_and_order(
    batch: list[Case], seed: Any
) -> None:
    expected = [case.alone() for case in batch]
    slots = [case.slot() for case in batch]
    for step in range(4):
        order = list(range(len(batch)))
        seed.shuffle(order)
        # Some of them in one batch, the rest in another, as when microbatches change.
        cut = seed.randint(0, len(order))
        for rows in filter(None, (order[:cut], order[cut:])):
            logits = torch.stack([batch[row].logits[step] for row in rows])
            tokens = sample(logits, [slots[row] for row in rows]).tolist()
            assert tokens == [expected[row][step] for row in rows]


def test_rows_choose_the_same_alone_and_in_a_batch_over_a_real_vocabulary() -> None:
    # Not a multiple of any vector width, and long enough that threads share a row.
    vocab_size = 49157
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.0}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.02},
        {"top_p": 0.99, "top_k": 900, "temperature": 1.5}, {"repetition_penalty": 1.2},
    ]  # fmt: skip
    logits = torch.randn(21, vocab_size, generator=torch.Generator().manual_seed(0)) * 3

    def slots() -> list[SlotSampling]:
        return [slot(vocab_size, seed=n, **kinds[n % len(kinds)]) for n in range(21)]

    together = sample(logits, slots()).tolist()
    assert [int(sample(logits[n : n + 1], [s])) for n, s in enumerate(slots())] == together
    order = torch.randperm(21, generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = [slots()[n] for n in order]
    assert sample(logits[order], shuffled).tolist() == [together[n] for n in order]
    weights = draw_weights(logits, [slot(vocab_size, temperature=0.7) for _ in logits])
    for row in range(21):
        alone = draw_weights(logits[row : row + 1], [slot(vocab_size, temperature=0.7)])
        assert torch.equal(alone[0], weights[row])


@given(case=cases(), cut=st.integers(0, 4))
@settings(max_examples=50, deadline=None)
def test_a_sequence_admitted_again_with_its_outputs_goes_on_as_if_nothing_happened(
    case: Case, cut: int
) -> None:
    expected = case.alone()
    again = case.slot([*case.admission.outputs, *expected[:cut]])
    assert again.next_index == len(case.admission.outputs) + cut
    assert [int(sample(row[None], [again])) for row in case.logits[cut:]] == expected[cut:]


def test_a_slot_used_before_hands_nothing_on() -> None:
    logits = torch.randn(8, 1, VOCAB, generator=torch.Generator().manual_seed(3))
    sampling = Sampling(
        seed=5, repetition_penalty=1.5, frequency_penalty=2.0, min_tokens=4,
    )  # fmt: skip
    told = TokenRules(0, bad_words=[[3], [4, 5]], end_tokens=[7], logit_bias={2: 1.0})
    rules = SlotRules(told, VOCAB)
    admission = Admission(3, [1, 2], [], 0, sampling)

    def run(own: SlotSampling) -> list[int]:
        return [int(sample(row, [own])) for row in logits]

    first = run(SlotSampling(admission, VOCAB, rules))
    assert run(SlotSampling(admission, VOCAB, rules)) == first
    assert admission == Admission(3, [1, 2], [], 0, sampling)
    # The next sequence of the slot, with settings of another kind, is like one that came first.
    plain = SlotSampling(Admission(3, [1], [], 0, Sampling(seed=6)), VOCAB)
    assert plain.plain
    assert torch.equal(adjusted_logits(logits[0], [plain]), logits[0])


def test_greedy_rows_take_the_likeliest_token_and_the_first_among_equals() -> None:
    logits = torch.randn(5, 40)
    logits[0, [4, 9, 30]] = 100.0
    slots = [slot(40, seed=n, temperature=0.0) for n in range(5)]
    tokens = sample(logits, slots)
    assert torch.equal(tokens, logits.argmax(-1))
    assert tokens.dtype is torch.int64
    assert tokens[0] == 4
    assert [own.outputs for own in slots] == [[token] for token in tokens.tolist()]
    assert [own.next_index for own in slots] == [1] * 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_logits_stay_as_they_are(dtype: torch.dtype) -> None:
    logits = torch.randn(6, VOCAB).to(dtype)
    before = logits.clone()
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.0}, {"temperature": 0.0, "logit_bias": {1: 5.0}},
        {"repetition_penalty": 2.0}, {"top_p": 0.5, "min_p": 0.1}, {"bad_words": [[2]]},
    ]  # fmt: skip
    for rows in ([0, 1, 2, 3, 4, 5], [2], [3], [5], [1, 3, 5]):
        sample(logits[rows] if len(rows) < 6 else logits, [slot(VOCAB, **kinds[r]) for r in rows])
    for row, kind in enumerate(kinds):
        sample(logits[row : row + 1], [slot(VOCAB, **kind)])
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("plain", "kind"),
    [
        (True, {}),
        (True, {"temperature": 0.0}),
        (True, {"temperature": 0.0, "top_p": 0.5, "top_k": 3, "min_p": 0.5}),
        (True, {"temperature": 0.5, "top_k": VOCAB}),
        (True, {"end_tokens": [1]}),
        (True, {"min_tokens": 2, "end_tokens": [VOCAB]}),
        (False, {"top_k": 3}),
        (False, {"top_p": 0.99}),
        (False, {"min_p": 0.01}),
        (False, {"min_tokens": 2, "end_tokens": [1]}),
        (False, {"logit_bias": {1: 1.0}}),
        (False, {"bad_words": [[1]]}),
        (False, {"repetition_penalty": 1.1}),
        (False, {"presence_penalty": 0.1}),
        (False, {"frequency_penalty": 0.1}),
    ],
)
def test_rows_that_need_no_logits_processing_take_the_short_way(
    plain: bool, kind: dict[str, Any]
) -> None:
    own = slot(VOCAB, **kind)
    assert own.plain is plain
    if plain:
        logits = torch.randn(1, VOCAB)
        assert adjusted_logits(logits, [own]) is logits


def test_tiny_temperatures_and_infinite_logits_do_not_overflow() -> None:
    logits = torch.tensor([[0.0, 5.0, -torch.inf], [1e30, 0.0, -1e30]])
    assert sample(logits, [slot(3, temperature=1e-5), slot(3, temperature=1e-5)]).tolist() == [1, 0]


@pytest.mark.parametrize(
    "kind", [{}, {"top_p": 0.5}, {"top_k": 2, "min_p": 0.5}, {"temperature": 0.0}]
)
def test_a_row_without_any_possible_token_gives_token_0(kind: dict[str, Any]) -> None:
    nothing = torch.full((1, 4), -torch.inf)
    assert sample(nothing, [slot(4, **kind)]).tolist() == [0]
    banned = slot(4, bad_words=[[0], [1], [2], [3]], **kind)
    assert sample(torch.randn(1, 4), [banned]).tolist() == [0]


@pytest.mark.parametrize(
    "kind", [{}, {"top_p": 0.5}, {"top_k": 2, "min_p": 0.5}, {"temperature": 0.0}]
)
def test_logits_that_are_not_numbers_still_give_a_token_id(kind: dict[str, Any]) -> None:
    broken = torch.full((1, 4), torch.nan)
    assert 0 <= int(sample(broken, [slot(4, **kind)])) < 4


def test_a_token_of_no_probability_is_never_drawn() -> None:
    logits = torch.full((500, 4), -torch.inf)
    logits[:, 2] = 0.0
    slots = [slot(4, seed=n) for n in range(500)]
    assert set(sample(logits, slots).tolist()) == {2}


def test_extreme_random_numbers_still_draw_a_token_of_some_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, -torch.inf]])
    for extreme in (1.2e-10, 16.6):
        times = np.array([1.2e-10, extreme, 1.2e-10, 1.2e-10], dtype=np.float32)
        monkeypatch.setattr(
            "headrace.sampling.sampler.waiting_times", lambda *_, times=times: times
        )
        assert choose_by_torch(logits, [slot(4)]).tolist() == [1]


def test_the_last_bits_of_the_logits_hardly_ever_change_a_token() -> None:
    logits = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(0))
    noise = 1 + 3e-7 * torch.randn(1, 20_000, generator=torch.Generator().manual_seed(1))
    for seed in range(300):
        assert sample(logits, [slot(20_000, seed=seed)]) == sample(
            logits * noise, [slot(20_000, seed=seed)]
        )
