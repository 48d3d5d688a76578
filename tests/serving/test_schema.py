"""The server does what its OpenAPI document says, by schemathesis."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode, checks
from schemathesis.schemas import BaseSchema

from serving.running_server import Server
from serving.scrape import wait_until_idle

# Enough for each field to be wrong in some way: more by hand, with `schemathesis run`.
EXAMPLES = 15
# What the document does not say, since no schema can: how much room a prompt leaves, which tokens
# the model has, and which fields go together.
LEFT_OUT = [checks.positive_data_acceptance]


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/openapi.json").raise_for_status().json()
    return found


@pytest.fixture(scope="module")
def api(server: Server) -> Iterator[BaseSchema]:
    yield schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    wait_until_idle(server.url)
    assert not any("Traceback" in line for line in server.log)


def shortened(body: Any) -> Any:
    """The same request, for an answer that takes no time."""
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens"):
            asked = body.get(name)
            if asked is None or (type(asked) is int and asked > 4):
                body = {**body, name: 4}
    return body


OPERATIONS = [
    ("GET", "/health"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{name}"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]


# Without a body, whatever is sent is right.
CASES = [
    (method, path, mode)
    for method, path in OPERATIONS
    for mode in GenerationMode
    if method == "POST" or mode == GenerationMode.POSITIVE
]


@pytest.mark.parametrize(("method", "path", "mode"), CASES, ids=lambda part: str(part))
def test_whatever_is_sent_the_answer_is_one_of_those_described(
    api: BaseSchema, method: str, path: str, mode: GenerationMode
) -> None:
    operation = api[path][method]

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES if method == "POST" else 3,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def check(case: Any) -> None:
        if path in ("/v1/completions", "/v1/chat/completions"):
            case.body = shortened(case.body)
        case.call_and_validate(excluded_checks=LEFT_OUT)

    check()


def test_every_operation_is_tried(document: dict[str, Any]) -> None:
    documented = {
        (method.upper(), path) for path, found in document["paths"].items() for method in found
    }
    assert documented == set(OPERATIONS)


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    def references(part: Any) -> Iterator[str]:
        if isinstance(part, dict):
            for name, value in part.items():
                if name == "$ref":
                    yield value
                yield from references(value)
        elif isinstance(part, list):
            for value in part:
                yield from references(value)

    found = set(references(document))
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert "#/components/schemas/Error" in found
    assert found <= known


def test_fields_that_are_not_supported_have_only_values_that_ask_for_nothing(
    document: dict[str, Any],
) -> None:
    fields = document["components"]["schemas"]["ChatBody"]["properties"]
    assert fields["tools"] == {"enum": [None, []], "default": None}
    assert fields["response_format"]["enum"] == [None, {"type": "text"}]
    assert document["components"]["schemas"]["ChatBody"]["additionalProperties"] is False
