"""Requests that are wrong inside, each told so, and none of them harms the others."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from serving.running_server import Server
from serving.scrape import scrape, wait_for, wait_until_idle

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RIGHT = {"prompt": "a", "max_tokens": 2, "seed": 1, "logprobs": 0}
USER = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    """Afterwards nothing runs, no file is open more, and the log has no traceback."""
    with httpx.Client(base_url=server.url, timeout=60.0) as client:
        right = client.post(COMPLETIONS, json=RIGHT).json()["choices"]
        wait_until_idle(server.url)
        files = scrape(server.url)["process_open_fds"]
        yield client
        assert client.post(COMPLETIONS, json=RIGHT).json()["choices"] == right
        wait_until_idle(server.url)
        wait_for(server.url, process_open_fds=files)
    assert not any("Traceback" in line for line in server.log)


def send(http: httpx.Client, path: str, body: bytes | str) -> httpx.Response:
    return http.post(path, content=body, headers={"content-type": "application/json"})


def error(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error, in OpenAI's shape."""
    assert answer.status_code == status, answer.text[:500]
    assert answer.headers["content-type"] == "application/json"
    (found,) = answer.json().values()
    assert found.keys() == {"message", "type", "param", "code"}
    assert found["message"]
    # Whatever the client sent, it is not sent all of it back.
    assert len(answer.content) < 10_000
    assert isinstance(found, dict)
    return found


NO_NUMBERS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    "9" * 30,
    "9" * 5000,
    '"one"',
    "[]",
]
NUMBERS = [
    "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "length_penalty", "n",
    "seed", "top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs", "best_of",
]  # fmt: skip


@pytest.mark.parametrize("field", NUMBERS)
def test_a_number_that_is_none_or_out_of_range_is_named(http: httpx.Client, field: str) -> None:
    for value in NO_NUMBERS:
        answer = send(http, COMPLETIONS, f'{{"prompt": "a", "{field}": {value}}}')
        found = error(answer)
        # NaN and the infinities are no JSON at all.
        assert found["param"] == (None if value[-1] in "Ny" else field), value


DEEP = "[" * 100_000
BRACKETS = DEEP + "]" * 100_000
NO_JSON: dict[str, bytes | str] = {
    "empty": b"",
    "nothing": "null",
    "list": "[]",
    "cut": '{"prompt": "a',
    "more behind": '{"prompt": "a"} {}',
    "no utf-8": b'{"prompt": "\xff\xfe"}',
    "utf-16": '{"prompt": "a"}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"prompt": "a"}',
    "half a surrogate pair": r'{"prompt": "\ud800"}',
    "half a pair in a name": r'{"\udc00": 1}',
    "deep": '{"prompt": ' + BRACKETS + "}",
    "deep without end": '{"response_format": ' + DEEP,
    "deep where anything may be": '{"prompt": "a", "response_format": ' + BRACKETS + "}",
    "deep objects": '{"prompt": "a", "response_format": ' + '{"a":' * 100_000,
    "long number": '{"prompt": "a", "response_format": {"a": ' + "9" * 100_000 + "}}",
}


@pytest.mark.parametrize("body", NO_JSON.values(), ids=NO_JSON)
def test_a_body_that_is_no_request_is_refused(http: httpx.Client, body: bytes | str) -> None:
    error(send(http, COMPLETIONS, body))


@pytest.mark.parametrize("kind", [None, "", "text/plain", "application/jsonx", "multipart/x"])
def test_other_types_of_content_are_refused(http: httpx.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    found = error(http.post(COMPLETIONS, content=json.dumps(RIGHT), headers=headers), 415)
    assert "Content-Type: application/json" in found["message"]
    right = {"content-type": "Application/JSON; charset=utf-8"}
    assert http.post(COMPLETIONS, content=json.dumps(RIGHT), headers=right).status_code == 200


PROMPTS: dict[str, Any] = {
    "empty text": "",
    "no ids": [],
    "no ids in a list": [[]],
    "one of two is empty": ["a", ""],
    "mixed": ["a", 1],
    "negative": [-1],
    "beyond the vocabulary": [300],
    "beyond 64 bits": [10**30],
    "fraction": [1.5],
    "truth": [True],
    "deeper": [[[1]]],
    "object": {"a": 1},
    "nothing": None,
    "longer than there is room for": "a" * 500_000,
    "far too many": ["a"] * 300_000,
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_a_prompt_that_cannot_be_continued_is_refused(http: httpx.Client, prompt: Any) -> None:
    found = error(http.post(COMPLETIONS, json={"prompt": prompt}))
    assert found["param"].startswith("prompt")


FIELDS: dict[str, dict[str, Any]] = {
    "n": {"n": 16_384},
    "best_of": {"best_of": 16_384},
    "stop": {"stop": ["never"] * 100_000},
    "stop ": {"stop": [""]},
    "bad_words": {"bad_words": ["never"] * 100_000},
    "stop_token_ids": {"stop_token_ids": [300]},
    "logit_bias": {"logit_bias": {str(token): 1 for token in range(100_000)}},
    "logit_bias ": {"logit_bias": {"-1": 1}},
    "logit_bias  ": {"logit_bias": {"1e1": 1}},
    "model": {"model": 1},
    "promt": {"promt": "a"},
    "x" * 1000: {"x" * 1000: 1},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=[name[:20] for name in FIELDS])
def test_a_field_that_asks_for_too_much_is_named(
    http: httpx.Client, fields: dict[str, Any]
) -> None:
    found = error(http.post(COMPLETIONS, json={"prompt": "a", **fields}))
    name = found["param"].split("[")[0].removesuffix("...")
    assert any(field.startswith(name) for field in fields)


def test_what_a_message_quotes_is_cut(http: httpx.Client) -> None:
    long = "x" * 1_000_000
    assert (
        error(http.post(COMPLETIONS, json={"prompt": "a", "model": long}), 404)["param"] == "model"
    )
    error(http.post(COMPLETIONS, json={"prompt": "a", long: 1}))
    error(http.post(COMPLETIONS, json={"prompt": "a", "stop": [long, ""]}))
    error(http.post(CHAT, json={"messages": [{"role": long, "content": "a"}]}))


MANY, LONG = 3_000_000, "x" * 15_000_000
LARGE = {
    "name of a field": (f'{{"prompt": "a", "{LONG}": 1}}', "xxx"),
    "name within a field": (f'{{"prompt": "a", "stream_options": {{"{LONG}": 1}}}}', "stream_"),
    "name where any may be": (f'{{"prompt": "a", "logit_bias": {{"{LONG}": 1}}}}', "logit_bias"),
    "wrong value": (f'{{"prompt": "a", "n": "{LONG}"}}', "n"),
    "unsupported value": (f'{{"prompt": "a", "suffix": "{LONG}"}}', "suffix"),
    "numbers": (f'{{"prompt": [{"1," * MANY}1]}}', "prompt"),
    "numbers that are few enough": (f'{{"prompt": [{"7," * 1_000_000}1]}}', "prompt"),
    "lists": (f'{{"prompt": [{"[1]," * MANY}[1]]}}', "prompt"),
    "texts": ('{"prompt": [' + '"a",' * MANY + '"a"]}', "prompt"),
    "stop": ('{"prompt": "a", "stop": [' + '"a",' * MANY + '"a"]}', "stop"),
    "numbers written as texts": ('{"prompt": "a", "n": "1", "tools": ' + '"a",' * MANY, "tools"),
    "long numbers": (f'{{"prompt": "a", "tools": [{("9" * 4000 + ",") * 3000}1]}}', "tools"),
    "spaces": (f'{{"prompt": "a", "n": {" " * 15_000_000}1}}', "n"),
}


@pytest.mark.parametrize(("body", "field"), LARGE.values(), ids=LARGE)
def test_large_bodies_are_refused_and_the_others_go_on(
    http: httpx.Client, body: str, field: str
) -> None:
    """That the event loop did not stand still is looked at after each test."""
    found = error(send(http, COMPLETIONS, body))
    assert found["param"].startswith(field)
    assert len(found["param"]) < 200
    assert len(found["message"]) < 1000


MESSAGES: dict[str, Any] = {
    "none": [],
    "no list": USER,
    "role": [{"role": "king", "content": "a"}],
    "no role": [{"content": "a"}],
    "no content": [{"role": "user", "content": None}],
    "image": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    "no answer": [USER, {"role": "assistant"}],
    "deep arguments": [
        {"role": "assistant",
         "tool_calls": [{"id": "1", "type": "function",
                         "function": {"name": "f", "arguments": '{"a": ' + BRACKETS + "}"}}]}
    ],
    "refused by the template": [{"role": "user", "content": "refuse"}],
}  # fmt: skip


@pytest.mark.parametrize("messages", MESSAGES.values(), ids=MESSAGES)
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_messages_that_cannot_be_answered_are_refused(
    http: httpx.Client, path: str, messages: Any
) -> None:
    assert error(http.post(path, json={"messages": messages}))["param"].startswith("messages")


def test_more_messages_than_there_is_room_for_are_refused(http: httpx.Client) -> None:
    found = error(http.post(CHAT, json={"messages": [USER] * 5_000}))
    assert (found["param"], found["code"]) == ("messages", "context_length_exceeded")


def chat(http: httpx.Client, options: str) -> httpx.Response:
    messages = json.dumps([USER])
    return send(
        http,
        CHAT,
        f'{{"messages": {messages}, "max_tokens": 1, "chat_template_kwargs": {options}}}',
    )


@pytest.mark.parametrize(
    "name", ["messages", "add_generation_prompt", "chat_template", "tools", "tokenize"]
)
def test_options_of_the_template_cannot_take_the_place_of_the_chat(
    http: httpx.Client, name: str
) -> None:
    assert name in error(chat(http, json.dumps({name: [USER]})))["message"]


def test_options_of_the_template_are_values_and_never_code(http: httpx.Client) -> None:
    def tokens(options: dict[str, Any]) -> int:
        answer = chat(http, json.dumps(options))
        assert answer.status_code == 200
        count: int = answer.json()["usage"]["prompt_tokens"]
        return count

    bare = tokens({})
    for text in ("{{ 7 * 7 }}", "{% raw %}", "{{ ''.__class__.__mro__ }}"):
        # As many as the text has characters, and a space: nothing in it was carried out.
        assert tokens({"mood": text}) == bare + 1 + len(text)
    # Names that mean something elsewhere mean nothing here.
    assert tokens({"self": 1, "loop": 1, "range": 1, "raise_exception": 1, "__class__": 1}) == bare
    # Large ones that no template asks for cost nothing, and deep ones are none.
    assert tokens({"unused": ["x" * 1000] * 1000}) == bare
    error(chat(http, '{"mood": ' + BRACKETS + "}"))
    error(send(http, CHAT, f'{{"messages": {json.dumps([USER])}, "metadata": {BRACKETS}}}'))


def test_tokens_that_are_none_have_no_text(http: httpx.Client) -> None:
    for token in (-1, 300, 10**30, 2**63):
        assert error(http.post("/detokenize", json={"tokens": [0, token]}))["param"] == "tokens"
    for wrong in (None, "a", [1.5], [[1]]):
        assert error(http.post("/detokenize", json={"tokens": wrong}))["param"].startswith("tokens")


def test_unknown_paths_and_wrong_methods_are_told_in_the_same_shape(http: httpx.Client) -> None:
    for path in ("/", "/v1", "/v1/embeddings", "/health/", "/v1/completions/"):
        error(http.get(path), 404)
    error(http.get("/v1/models/other"), 404)
    for method in ("GET", "PUT", "DELETE", "PATCH"):
        answer = http.request(method, COMPLETIONS)
        error(answer, 405)
        assert answer.headers["allow"] == "POST"
