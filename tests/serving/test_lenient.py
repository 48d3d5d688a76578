"""Numbers and truth values written in another way: taken as pydantic does, which vLLM uses."""

import json
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel, ValidationError

from headrace.serving.api_errors import ApiError
from headrace.serving.body import decoded
from headrace.serving.requests import ChatBody, CompletionBody, DetokenizeBody

REFUSED = "refused"


class Oracle(BaseModel):
    """How vLLM declares such fields."""

    max_tokens: int | None = None
    temperature: float | None = None
    stream: bool | None = None
    user: str | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None


NUMBERS = [
    1, 0, -1, 16.0, 16.5, -0.0, 1e2, 1e-2, "16", " 16 ", "+16", "-1", "16.0", "16.5", "1e2", "0.5",
    ".5", "", " ", "one", "0x10", "1 6", "16,0", None, [], {}, [1], "null", "9" * 30,
]  # fmt: skip
TRUTHS = [
    True, False, 0, 1, 2, 0.0, 1.0, 0.5, "true", "True", "FALSE", "yes", "no", "on", "off", "t",
    "f", "y", "n", "1", "0", "2", "", "truth", "null", None, [], {},
]  # fmt: skip
LISTS = [[1, 2.0, "3"], [1.5], ["a"], [None], [], "1", 1, None]
BIASES = [{"1": 1}, {"1": "1.5"}, {"1": "a"}, {}, None, []]
FIELDS: dict[str, list[Any]] = {
    "max_tokens": [v for v in NUMBERS if v not in (-1, "-1")],
    "temperature": NUMBERS,
    "stream": TRUTHS,
    "user": ["a", "", "1", None, 1, 1.5, True, []],
    "stop_token_ids": LISTS,
    "logit_bias": BIASES,
}
CASES: list[tuple[str, Any]] = [
    (field, value) for field, values in FIELDS.items() for value in values
]


def taken(field: str, value: Any) -> Any:
    """What becomes of a field, or its refusal, which names it."""
    data = bytearray(json.dumps({"prompt": "a", field: value}).encode())
    try:
        return getattr(decoded(data, CompletionBody), field)
    except ApiError as error:
        return REFUSED if error.status == 400 and (error.param or "").startswith(field) else error


@pytest.mark.parametrize(("field", "value"), CASES, ids=repr)
def test_values_are_taken_as_pydantic_takes_them(field: str, value: Any) -> None:
    try:
        expected = getattr(Oracle.model_validate_json(json.dumps({field: value})), field)
    except ValidationError:
        expected = REFUSED
    if value == "9" * 30 and field == "max_tokens":
        # pydantic's integers have no end.
        expected = REFUSED
    if field == "logit_bias" and isinstance(expected, dict):
        expected = {int(token): bias for token, bias in expected.items()}
    found = taken(field, value)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        # What pydantic takes, though something else may be meant.
        *(("logprobs", True), ("max_tokens", True), ("n", False), ("temperature", True)),
        *(("temperature", "nan"), ("temperature", "inf"), ("temperature", "1e999")),
        *(("max_tokens", "1_6"), ("logit_bias", {"1": True})),
    ],
    ids=repr,
)
def test_what_may_mean_something_else_is_refused(field: str, value: Any) -> None:
    assert taken(field, value) == REFUSED


def test_every_optional_field_may_be_null() -> None:
    for kind, required in ((CompletionBody, '"prompt":"a"'), (ChatBody, ""), (DetokenizeBody, "")):
        if kind is ChatBody:
            required = '"messages":[{"role":"user","content":"a"}]'
        elif kind is DetokenizeBody:
            required = '"tokens":[1]'
        for field in msgspec.structs.fields(kind):
            if not field.required:
                data = f'{{{required},"{field.encode_name}":null}}'
                assert getattr(decoded(bytearray(data.encode()), kind), field.name) is None


def test_options_within_a_field_are_read_alike_and_texts_stay_what_they_are() -> None:
    data = (
        b'{"prompt":"16.0","n":"2","stop":["1","true"],"stream_options":{"include_usage":"true"}}'
    )
    body = decoded(bytearray(data), CompletionBody)
    assert (body.prompt, body.n, body.stop) == ("16.0", 2, ["1", "true"])
    assert body.stream_options is not None
    assert body.stream_options.include_usage is True
