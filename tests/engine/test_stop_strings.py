"""Stop strings end a text where a search of the whole text finds them, piece by piece."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.stop_strings import StopPatterns, StopStrings

SMALL_TEXTS = ["".join(letters) for n in range(5) for letters in product("abc", repeat=n)]
stops = st.lists(st.sampled_from(SMALL_TEXTS[1:]), min_size=1, max_size=3).map(tuple)
# Few letters, and mostly two of them, so that stop strings overlap, repeat and nearly come about.
pieces_of_text = st.lists(
    st.sampled_from([text for text in SMALL_TEXTS if "c" not in text])
    | st.sampled_from(SMALL_TEXTS),
    max_size=8,
)


def run(stop: StopStrings, pieces: list[str]) -> tuple[str, str | None]:
    """All text handed out for a token a piece, and the stop string that ended it."""
    out = ""
    for number, piece in enumerate(pieces, 1):
        text, found = stop.push(piece, number)
        out += text
        if found is not None:
            assert stop.finish() == ""
            return out, found
    return out + stop.finish(), None


def searched(
    pieces: list[str], stop: tuple[str, ...], include: bool, min_tokens: int
) -> tuple[str, str | None]:
    """The same by searching the whole text, blind to pieces but for the first min_tokens."""
    text = "".join(pieces)
    ignored = len("".join(pieces[:min_tokens]))
    for end in range(ignored + 1, len(text) + 1):
        for string in stop:
            if text.find(string, max(0, end - len(string)), end) >= 0:
                return text[: end if include else end - len(string)], string
    return text, None


@given(pieces_of_text, stops, st.booleans(), st.integers(0, 4))
@settings(max_examples=500, deadline=None)
def test_the_text_ends_where_a_search_of_the_whole_finds_the_first_stop_string(
    pieces: list[str], stop: tuple[str, ...], include: bool, min_tokens: int
) -> None:
    result = run(StopStrings(StopPatterns(stop), include, min_tokens), pieces)
    assert result == searched(pieces, stop, include, min_tokens)


@given(pieces_of_text, stops, st.integers(0, 4))
@settings(max_examples=500, deadline=None)
def test_only_what_may_become_a_stop_string_is_held_back(
    pieces: list[str], stop: tuple[str, ...], min_tokens: int
) -> None:
    watched = StopStrings(StopPatterns(stop), False, min_tokens)
    beginnings = {string[:length] for string in stop for length in range(1, len(string))}
    pushed = out = ""
    for number, piece in enumerate(pieces, 1):
        pushed += piece
        text, found = watched.push(piece, number)
        out += text
        if found is not None:
            return
        held = next(
            (pushed[n:] for n in range(len(pushed)) if pushed[n:] in beginnings),
            "",
        )
        assert out + held == pushed
    assert out + watched.finish() == pushed


def test_the_stop_string_that_ends_first_wins_and_then_the_first_in_the_list() -> None:
    assert run(StopStrings(StopPatterns(("abcd", "bc")), False, 0), ["xabcdy"]) == ("xa", "bc")
    assert run(StopStrings(StopPatterns(("c", "abc")), False, 0), ["xabcy"]) == ("xab", "c")
    assert run(StopStrings(StopPatterns(("abc", "c")), False, 0), ["xabcy"]) == ("x", "abc")


@pytest.mark.parametrize(("include", "expected"), [(False, "one "), (True, "one STOP")])
def test_a_stop_string_over_several_tokens_is_cut_or_kept(include: bool, expected: str) -> None:
    pieces = ["one", " S", "T", "", "OP!", " more"]
    assert run(StopStrings(StopPatterns(("STOP",)), include, 0), pieces) == (expected, "STOP")


def test_a_stop_string_within_the_first_min_tokens_does_not_count_but_may_begin_there() -> None:
    assert run(StopStrings(StopPatterns(("ab",)), False, 2), ["ab", "ab", "cab"]) == ("ababc", "ab")
    assert run(StopStrings(StopPatterns(("ab",)), False, 2), ["ab", "a", "b"]) == ("ab", "ab")
    assert run(StopStrings(StopPatterns(("ab",)), False, 2), ["ab", "ab"]) == ("abab", None)


def test_a_short_stop_string_ignored_inside_a_longer_beginning_stays_ignored() -> None:
    assert run(StopStrings(StopPatterns(("abc", "b")), False, 1), ["ab", "x", "c"]) == (
        "abxc",
        None,
    )
