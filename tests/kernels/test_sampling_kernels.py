"""The native choice of tokens against its torch reference, settings and draws of every kind."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.sampling import CHOICE, choose
from headrace.sampling.sampler import draw_weights, waiting_times
from headrace.sampling_params import MAX_SEED
from kernels.bounds import guarded
from sampling.slots import slot

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# Around the kernel's groups of 64 tokens; the wide one is odd and has more groups than top_k.
WIDTHS = [1, 2, 7, 63, 64, 65, 200, 331]
WIDE = 49157
DRAWS = 500
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.3},
    {"temperature": 20.0},
    {"top_k": 50},
    {"top_k": 5000, "temperature": 3.0},
    {"top_p": 0.9},
    {"top_p": 0.99, "temperature": 3.0},
    {"min_p": 0.05},
    {"min_p": 1e-4, "top_k": 900, "top_p": 0.95, "temperature": 1.5},
]


def choices_of(
    seeds: list[int],
    indices: list[int],
    row: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """A choice for each seed and index, all else the same."""
    return np.array(
        [
            (seed, index, row, top_k, top_p, temperature, min_p)
            for seed, index in zip(seeds, indices, strict=True)
        ],
        dtype=CHOICE,
    )


@cache
def random_numbers(width: int) -> tuple[list[int], list[int], np.ndarray]:
    """DRAWS seeds, indices, and their waiting times [DRAWS, width]."""
    if width < WIDTHS[-1]:
        seeds, indices, times = random_numbers(WIDTHS[-1])
        return seeds, indices, times[:, :width]
    seeds = [n * 0x123456789ABCD % MAX_SEED for n in range(DRAWS)]
    indices = [n * n for n in range(DRAWS)]
    rows = [waiting_times(seed, index, width) for seed, index in zip(seeds, indices, strict=True)]
    return seeds, indices, np.stack(rows)


def assert_chosen(tokens: torch.Tensor, weights: torch.Tensor, times: np.ndarray) -> None:
    """Each draw took the token that arrives first, or one that arrives at the same moment.

    weights [vocab] are the reference's, times [draws, vocab].
    """
    speeds = weights.double().numpy() / times
    taken = np.take_along_axis(speeds, tokens.numpy()[:, None], axis=1)[:, 0]
    assert (taken >= speeds.max(axis=1) * (1 - 1e-5)).all()


@st.composite
def rows(draw: st.DrawFn) -> torch.Tensor:
    """One row of logits [vocab] in float32: with and without equals, in any arrangement."""
    width = draw(st.sampled_from(WIDTHS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    row = torch.randn(width, generator=generator) * draw(st.sampled_from([0.0, 0.1, 2.0, 30.0]))
    row = (row + draw(st.sampled_from([0.0, 50.0, -1000.0]))).bfloat16().float()
    if draw(st.booleans()):
        row[torch.rand(width, generator=generator) < 0.7] = -torch.inf
        row[width // 2] = 1.0
    arrangement = draw(st.sampled_from(["shuffled", "ascending", "descending"]))
    if arrangement != "shuffled":
        row = row.sort(descending=arrangement == "descending").values
    return row


@DTYPES
@given(
    row=rows(),
    temperature=st.sampled_from([1e-5, 0.3, 1.0, 3.0, 1000.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 10, 150, 10**6]),
    top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 1e-3, 0.2, 1.0]),
)
@settings(max_examples=60, deadline=None)
def test_draws_are_the_references_whatever_the_filters(
    native_path: str,
    dtype: torch.dtype,
    row: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> None:
    seeds, indices, times = random_numbers(len(row))
    kind: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
    }
    # The rows beside it must not matter.
    logits = guarded(torch.stack([row + 1e4, row, row + 1e4]).to(dtype))
    tokens = choose(logits, choices_of(seeds, indices, row=1, **kind))
    assert_chosen(tokens, draw_weights(row[None], [slot(len(row), **kind)])[0], times)


@cache
def wide_logits(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(2, WIDE, generator=generator) * 2.5).to(dtype)


@cache
def wide_reference(dtype: torch.dtype, kind: int) -> list[tuple[torch.Tensor, np.ndarray]]:
    """By row its weights [WIDE] and its times [1, WIDE]."""
    logits = wide_logits(dtype)
    weights = draw_weights(logits, [slot(WIDE, **KINDS[kind])] * 2)
    return [(weights[row], waiting_times(row, kind, WIDE)[None]) for row in range(2)]


@DTYPES
@pytest.mark.parametrize("kind", range(1, len(KINDS)))
def test_draws_from_a_real_vocabulary_are_the_references(
    native_path: str, dtype: torch.dtype, kind: int
) -> None:
    for row, (weights, times) in enumerate(wide_reference(dtype, kind)):
        tokens = choose(wide_logits(dtype), choices_of([row], [kind], row=row, **KINDS[kind]))
        assert_chosen(tokens, weights, times)


@DTYPES
@given(row=rows())
@settings(max_examples=60, deadline=None)
def test_greedy_rows_take_the_first_of_the_likeliest(
    native_path: str, dtype: torch.dtype, row: torch.Tensor
) -> None:
    logits = guarded(torch.stack([row + 1e4, row, row + 1e4]).to(dtype))
    # Filters and seeds are not looked at.
    choices = choices_of([5], [7], row=1, temperature=0.0, top_k=2, top_p=0.5, min_p=0.5)
    assert choose(logits, choices).tolist() == [int(row.argmax())]


@given(
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 2**63),
    width=st.integers(1, 3) | st.integers(60, 140),
)
@settings(max_examples=100, deadline=None)
def test_random_numbers_are_numpys(native_path: str, seed: int, index: int, width: int) -> None:
    # Among equals whoever's time is shortest.
    token = choose(torch.zeros(1, width), choices_of([seed], [index]))
    assert int(token) == waiting_times(seed, index, width).argmin()


def test_top_p_leaves_out_a_token_if_those_before_it_reach_top_p_exactly(native_path: str) -> None:
    seeds, indices, times = random_numbers(3)
    # Weights of 1, 1/2 and 1/2.
    row = torch.tensor([0.0, -math.log(2), -math.log(2)])
    assert choose(row[None], choices_of(seeds, indices, top_p=0.5)).tolist() == [0] * DRAWS
    tokens = choose(row[None], choices_of(seeds, indices, top_p=0.51))
    assert_chosen(tokens, row.exp(), times)


@pytest.mark.parametrize(
    ("kind", "least"),
    [({"min_p": 0.5}, math.log(0.5)), ({"top_k": 2}, -1.0), ({"top_p": 0.75}, math.log(1 / 3))],
    ids=str,
)
def test_a_token_just_below_the_last_that_stays_is_left_out(
    native_path: str, kind: dict[str, Any], least: float
) -> None:
    """least: the third token's logit at which it stays."""
    seeds, indices, times = random_numbers(3)
    for third, stays in ((least - 3e-5, False), (least + 3e-5, True)):
        row = torch.tensor([0.0, -1.0, third])
        if "top_p" in kind:
            row[1] = -torch.inf
        tokens = choose(row[None], choices_of(seeds, indices, **kind))
        assert (2 in tokens.tolist()) == stays
        assert_chosen(tokens, draw_weights(row[None], [slot(3, **kind)])[0], times)


# Found by search: the 32 bits of this seed, index and token are all 0, or the highest but few.
ALL_ZERO = (0, 1802453736, 4)
ALL_ONE = (0, 3080492, 5)


@pytest.mark.parametrize("filters", [{}, {"min_p": 1e-30}], ids=str)
def test_the_most_extreme_random_numbers_still_draw_a_token_of_some_weight(
    native_path: str, filters: dict[str, Any]
) -> None:
    for seed, index, token in (ALL_ZERO, ALL_ONE):
        time = waiting_times(seed, index, 8)[token]
        assert time == pytest.approx(2.0**-33 if token == 4 else 24 * math.log(2), rel=1e-6)
        only = torch.full((1, 8), -torch.inf)
        only[0, token] = 0.0
        assert choose(only, choices_of([seed], [index], **filters)).tolist() == [token]
    # Such a short time makes up for a weight of e^-20, but for none of e^-30.
    seed, index, token = ALL_ZERO
    for score, winner in ((-20.0, token), (-30.0, 65)):
        logits = torch.full((1, 80), -torch.inf)
        logits[0, 65], logits[0, token] = 0.0, score
        assert choose(logits, choices_of([seed], [index], **filters)).tolist() == [winner]


@DTYPES
@pytest.mark.parametrize("kind", [*KINDS, {"temperature": 1e-5}, {"temperature": 1e-40}], ids=str)
def test_rows_that_are_not_finite_give_a_token_that_is_possible(
    native_path: str, dtype: torch.dtype, kind: dict[str, Any]
) -> None:
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor(
        [
            [-inf, -inf, -inf],
            [nan, nan, nan],
            [-inf, -inf, -3e38],
            [0.0, inf, 0.0],
            [-1e38, 3e38, 0.0],
            [nan, -inf, 2.0],
        ]
    ).to(dtype)
    choices = np.concatenate([choices_of([9], [9], row=row, **kind) for row in range(6)])
    assert choose(logits, choices).tolist() == [0, 0, 2, 1, 1, 2]


@pytest.fixture
def thread_counts() -> Iterator[tuple[int, ...]]:
    before = torch.get_num_threads()
    yield 1, 2, 5
    torch.set_num_threads(before)


@DTYPES
def test_a_row_chooses_the_same_alone_in_any_batch_and_with_any_number_of_threads(
    native_path: str, dtype: torch.dtype, thread_counts: tuple[int, ...]
) -> None:
    logits = wide_logits(dtype)
    choices = np.concatenate(
        [
            choices_of([n], [n], row=n % 2, **kind)
            for n, kind in enumerate([*KINDS, *reversed(KINDS)])
        ]
    )
    alone = [int(choose(logits, choices[n : n + 1])) for n in range(len(choices))]
    for threads in thread_counts:
        torch.set_num_threads(threads)
        assert choose(logits, choices).tolist() == alone
        assert choose(logits, np.ascontiguousarray(choices[::-1])).tolist() == alone[::-1]
    own = logits[1:].clone()
    choices["row"] -= 1
    on_second = choices["row"] == 0
    expected = [token for token, second in zip(alone, on_second, strict=True) if second]
    assert choose(own, choices[on_second]).tolist() == expected


def test_rows_may_lie_apart_or_be_the_same_one(native_path: str) -> None:
    logits = torch.randn(6, 70, generator=torch.Generator().manual_seed(2))
    choices = np.concatenate([choices_of([n], [n], row=n, top_k=9) for n in range(3)])
    expected = choose(logits[::2].contiguous(), choices)
    assert torch.equal(choose(logits[::2], choices), expected)
    assert torch.equal(choose(logits[::2].T.contiguous().T, choices), expected)
    same = choose(logits[:1].expand(3, -1), choices)
    assert torch.equal(same, choose(logits[:1].repeat(3, 1), choices))
