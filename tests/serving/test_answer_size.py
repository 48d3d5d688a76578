"""How much one answer may hold, and that a large one holds what small ones do."""

import json
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sampling_params import SamplingParams
from headrace.serving.answer_size import MOST_ENTRIES, check_answer_size
from headrace.serving.api_errors import ApiError
from headrace.serving.pieces import LATER, fill, joined
from headrace.serving.responses import CompletionChoice
from serving.tiny_model import MAX_LENGTH, MODEL, completion_arguments

FIELDS = {name: name for name in ("n", "max_tokens", "logprobs", "prompt_logprobs")}


def check(lengths: list[int], shown: int = 1, limit: int = 8192, **params: Any) -> None:
    check_answer_size(
        [[1] * length for length in lengths],
        SamplingParams(**params),
        report_shown=shown,
        echoed=False,
        max_model_len=limit,
        vocab_size=49152,
        fields=FIELDS,
    )


def test_what_load_generators_and_harnesses_ask_for_is_taken() -> None:
    check([8000] * 64, prompt_logprobs=1, logprobs=1, max_tokens=1)
    for limit in (8192, 131_072):
        check([limit - 16], limit=limit, prompt_logprobs=20, logprobs=20, max_tokens=16)
        check([16], limit=limit, logprobs=20, max_tokens=None)


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 4000), min_size=1, max_size=8),
    st.integers(1, 64),
    st.one_of(st.none(), st.integers(-1, 20)),
    st.one_of(st.none(), st.integers(-1, 20)),
    st.integers(1, 4000),
)
def test_exactly_what_could_be_more_is_refused_with_field_and_bound(
    lengths: list[int], n: int, of_prompt: int | None, of_answer: int | None, max_tokens: int
) -> None:
    def entries(count: int | None) -> int:
        return 0 if count is None else 49153 if count == -1 else count + 1

    total = n * sum(
        length * entries(of_prompt) + max_tokens * entries(of_answer) for length in lengths
    )
    params: dict[str, Any] = {"n": n, "prompt_logprobs": of_prompt, "logprobs": of_answer}
    if total <= MOST_ENTRIES:
        check(lengths, shown=n, max_tokens=max_tokens, **params)
        return
    with pytest.raises(ApiError) as caught:
        check(lengths, shown=n, max_tokens=max_tokens, **params)
    assert caught.value.status == 400
    assert caught.value.param in ("logprobs", "prompt_logprobs")
    assert str(MOST_ENTRIES) in caught.value.message
    assert str(total) in caught.value.message


PROMPT = [100 + place % 60 for place in range(3000)]
TOO_LARGE: dict[str, tuple[str, dict[str, Any], str]] = {
    "a report many times": (
        "completions",
        {"prompt": PROMPT, "n": 40, "prompt_logprobs": 20, "max_tokens": 1},
        "prompt_logprobs",
    ),
    "echo": (
        "completions",
        {"prompt": PROMPT, "n": 40, "logprobs": 20, "echo": True, "max_tokens": 1},
        "logprobs",
    ),
    "many prompts": (
        "completions",
        {"prompt": [PROMPT] * 40, "prompt_logprobs": 20, "max_tokens": 1},
        "prompt_logprobs",
    ),
    "long answers": (
        "completions",
        {"prompt": "a", "n": 40, "logprobs": 5, "max_tokens": 5000},
        "logprobs",
    ),
    "a chat without an end": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": -1},
        "top_logprobs",
    ),
}


@pytest.mark.parametrize("name", TOO_LARGE)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_too_large_is_refused_before_it_runs(
    http: httpx.Client, name: str, stream: bool
) -> None:
    path, body, field = TOO_LARGE[name]
    answer = http.post(f"/v1/{path}", json={"model": MODEL, "stream": stream, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert str(max(MOST_ENTRIES, 21 * MAX_LENGTH)) in error["message"]
    assert "lower" in error["message"]


def test_forty_choices_show_one_report(client: Any) -> None:
    """In an answer and in a stream, some megabytes each."""
    fields = completion_arguments(
        {"prompt": PROMPT[:150], "max_tokens": 1, "seed": 1, "echo": True, "logprobs": 20,
         "prompt_logprobs": 20}
    )  # fmt: skip
    (alone,) = client.completions.create(**fields).choices
    whole = client.completions.create(**fields, n=40).choices
    streamed = [
        choice
        for event in client.completions.create(**fields, n=40, stream=True)
        for choice in event.choices
    ]
    assert sorted(choice.index for choice in streamed) == list(range(40))
    assert [choice.index for choice in whole] == list(range(40))
    for choices in (whole, streamed):
        first = choices[0]
        for choice in choices:
            assert choice.prompt_logprobs == first.prompt_logprobs
            for column in ("text_offset", "token_logprobs", "tokens", "top_logprobs"):
                own = getattr(choice.logprobs, column)
                assert own[:150] == getattr(first.logprobs, column)[:150]
                assert len(own) == 151
        # Computed anew, beside other rows: the last bits may differ.
        assert first.logprobs.tokens[:150] == alone.logprobs.tokens[:150]
        assert first.logprobs.text_offset == alone.logprobs.text_offset
        assert first.logprobs.token_logprobs[1:150] == pytest.approx(
            alone.logprobs.token_logprobs[1:150], abs=1e-4
        )
        assert len(first.prompt_logprobs) == len(alone.prompt_logprobs) == 150


@given(st.text(), st.lists(st.binary(min_size=1, max_size=200_000), max_size=5))
def test_what_is_written_later_goes_where_it_belongs_whatever_the_text(
    text: str, values: list[bytes]
) -> None:
    choice = CompletionChoice(0, text, LATER, None, None, LATER)
    encoded = msgspec.json.encode(choice)
    pieces = fill(encoded, [b"[1,", b"2]"], [b"null"])
    read = json.loads(b"".join(joined(pieces)))
    assert (read["text"], read["logprobs"], read["prompt_logprobs"]) == (text, [1, 2], None)
    assert b"".join(joined(values)) == b"".join(values)
