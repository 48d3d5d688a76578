from collections.abc import Sequence
from typing import Any, Literal

import pytest

from headrace.checks import check_type, shortened, unknown_name
from headrace.errors import UsageError


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (int, "2", "must be a whole number, not '2'"),
        (float, None, "must be a number, not None"),
        (bool, 1, "must be True or False, not 1"),
        (int | None, 1.5, "must be a whole number or None, not 1.5"),
        (Sequence[str], 5, "must be a list of texts, not 5"),
        (Sequence[int], ["a"], r"must be a list of whole numbers, not \['a'\]"),
        (dict[int, float] | None, [], "must be a dict from whole number to number or None, not"),
        (Literal["a", "b"], "c", "must be one of a, b, not 'c'"),
    ],
)
def test_a_wrong_type_is_told_in_words(kind: Any, value: object, words: str) -> None:
    with pytest.raises(UsageError, match=f"^thing {words}"):
        check_type("thing", value, kind)


def test_a_right_type_passes() -> None:
    check_type("thing", 3, float)
    check_type("thing", ("a",), Sequence[str])


def test_a_name_that_is_nearly_right_is_offered() -> None:
    known = ["temperature", "top_p"]
    assert "did you mean temperature?" in str(unknown_name("X", "field", "temprature", known))
    assert "it takes temperature, top_p" in str(unknown_name("X", "field", "zzz", known))


def test_a_long_value_is_cut() -> None:
    assert len(shortened(list(range(10_000)))) == 100
    assert shortened([1]) == "[1]"
