import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.deployment.partition import (
    LayerCosts,
    balanced_layers,
    parse_layer_partition,
    stage_shares,
)
from headrace.errors import UsageError

SMOLLM2 = LayerCosts(layers=(3_538_944,) * 30, embedding=576, head=28_311_552 // 3)


def test_the_head_of_smollm2_counts_as_two_to_three_layers() -> None:
    assert balanced_layers(2, SMOLLM2) == [16, 14]


@given(
    layers=st.lists(st.integers(1, 50), min_size=1, max_size=9),
    stages=st.integers(1, 4),
    embedding=st.integers(0, 120),
    head=st.integers(0, 120),
)
@settings(deadline=None)
def test_no_other_split_has_a_cheaper_dearest_stage(
    layers: list[int], stages: int, embedding: int, head: int
) -> None:
    if stages > len(layers):
        return

    def dearest(shares: tuple[int, ...]) -> int:
        ends = list(itertools.accumulate(shares))
        costs = [sum(layers[end - n : end]) for n, end in zip(shares, ends, strict=True)]
        costs[0] += embedding
        costs[-1] += head
        return max(costs)

    found = balanced_layers(stages, LayerCosts(tuple(layers), embedding, head))
    assert sum(found) == len(layers)
    assert min(found) >= 1
    every = [
        shares
        for shares in itertools.product(range(1, len(layers) + 1), repeat=stages)
        if sum(shares) == len(layers)
    ]
    assert dearest(tuple(found)) == min(map(dearest, every))


def test_more_stages_than_layers_is_refused_with_both_numbers() -> None:
    with pytest.raises(UsageError, match=r"5 .* 4 layers"):
        balanced_layers(5, LayerCosts((1,) * 4, 1, 1))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("19,x", "not a list of whole numbers"),
        ("", "not a list of whole numbers"),
        ("30", "for 1 stages"),
        ("10,10,10", "for 3 stages"),
        ("30,0", "at least one layer"),
        ("-1,31", "at least one layer"),
        ("19,12", "adds up to 31"),
    ],
)
def test_a_bad_partition_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        parse_layer_partition(text, 30, 2)


def test_shares_are_contiguous_and_only_the_ends_embed_and_sample() -> None:
    shares = stage_shares(parse_layer_partition("12, 13,5", 30, 3))
    assert [(s.first_layer, s.end_layer) for s in shares] == [(0, 12), (12, 25), (25, 30)]
    assert [s.embeds for s in shares] == [True, False, False]
    assert [s.samples for s in shares] == [False, False, True]
