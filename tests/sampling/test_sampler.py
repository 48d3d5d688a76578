from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.protocol.sampling_params import MAX_SEED
from headrace.sampling.sampler import SlotSampling, sample, uniform


@given(seed=st.integers(0, MAX_SEED), index=st.integers(0, 2**31))
def test_random_numbers_depend_on_seed_and_index_alone(seed: int, index: int) -> None:
    assert uniform(seed, index) == uniform(seed, index)
    assert 0.0 <= uniform(seed, index) < 1.0
    assert uniform(seed, index) != uniform(seed, index + 1)


def test_greedy_rows_take_the_likeliest_token() -> None:
    logits = torch.randn(5, 40)
    slots = [SlotSampling(seed=n, temperature=0.0, next_index=0) for n in range(5)]
    assert torch.equal(sample(logits, slots), logits.argmax(-1))
    assert [slot.next_index for slot in slots] == [1] * 5


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    logits = torch.randn(6, 100)
    temperatures = [0.0, 0.7, 1.0, 0.0, 2.0, 1.3]

    def slots() -> list[SlotSampling]:
        return [SlotSampling(n, t, 3 * n) for n, t in enumerate(temperatures)]

    together = sample(logits, slots())
    for row, slot in enumerate(slots()):
        assert sample(logits[row : row + 1], [slot])[0] == together[row]
    order = [4, 1, 0, 5, 3, 2]
    shuffled = slots()
    assert torch.equal(sample(logits[order], [shuffled[n] for n in order]), together[order])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_softmax_of_logits_over_temperature(temperature: float) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0])
    draws = 4000
    slots = [SlotSampling(seed=n, temperature=temperature, next_index=5) for n in range(draws)]
    counts = Counter(sample(logits.expand(draws, -1), slots).tolist())
    expected = torch.softmax(logits / temperature, -1) * draws
    statistic = sum((counts[n] - float(e)) ** 2 / float(e) for n, e in enumerate(expected))
    # The seeds are fixed, so this is one number; 18.5 is the chi-square bound for four degrees
    # of freedom at one in a thousand.
    assert statistic < 18.5


def test_tiny_temperatures_and_infinite_logits_do_not_overflow() -> None:
    logits = torch.tensor([[0.0, 5.0, -torch.inf], [1e30, 0.0, -1e30]])
    slots = [SlotSampling(1, 1e-30, 0), SlotSampling(2, 1e-5, 0)]
    assert sample(logits, slots).tolist() == [1, 0]


def test_a_token_of_no_probability_is_never_drawn() -> None:
    logits = torch.full((500, 4), -torch.inf)
    logits[:, 2] = 0.0
    slots = [SlotSampling(n, 1.0, 0) for n in range(500)]
    assert set(sample(logits, slots).tolist()) == {2}
