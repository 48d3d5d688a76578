"""Many patterns at once: the longest end that one begins with, in time that how many has no part
in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.patterns import Patterns

SYMBOLS = st.lists(st.integers(0, 2) | st.just(2**32 - 1), max_size=12)


def longest_beginning(read: list[int], patterns: list[list[int]]) -> int:
    beginnings = [p[:length] for p in patterns for length in range(len(p) + 1)]
    return max((len(b) for b in beginnings if b == read[len(read) - len(b) :]), default=0)


@given(st.lists(SYMBOLS, max_size=6), SYMBOLS)
def test_the_state_is_the_longest_end_that_a_pattern_begins_with(
    patterns: list[list[int]], read: list[int]
) -> None:
    made = Patterns(patterns)
    state = 0
    for count in range(len(read)):
        state = made.step(state, read[count])
        assert made.depth[state] == longest_beginning(read[: count + 1], patterns)
    for pattern, end in zip(patterns, made.ends, strict=True):
        assert made.depth[end] == len(pattern)
        assert made.inner[end] == any(
            len(p) > len(pattern) and p[: len(pattern)] == pattern for p in patterns
        )


def test_there_is_a_node_for_each_beginning_and_no_more() -> None:
    assert len(Patterns([])) == 1
    assert len(Patterns([[1, 2, 3], [1, 2, 4], [1, 2]])) == 1 + 4


@pytest.mark.parametrize("others", [0, 3000])
def test_a_symbol_takes_two_looks_at_most_however_many_patterns_there_are(
    others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Reading nearly all of a pattern again and again is the worst that there is.
    patterns = [[7] * 400 + [9], *([n, n + 1, n + 2] for n in range(10, 10 + others))]
    made = Patterns(patterns)
    looks = 0
    look = made._child

    def counted(node: int, symbol: int) -> int:
        nonlocal looks
        looks += 1
        return look(node, symbol)

    monkeypatch.setattr(made, "_child", counted)
    read = ([7] * 399 + [8]) * 3
    state = 0
    for symbol in read:
        state = made.step(state, symbol)
    # One for each that goes on; the 400th and the steps back from it for each that does not.
    assert looks == len(read) + 3 * 399
