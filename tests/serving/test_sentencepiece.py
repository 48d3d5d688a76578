"""Texts of a SentencePiece model: answers continue their prompts, and tokens keep their spaces."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace import LLM, SamplingParams
from serving.running_server import Server, running_server
from tiny_checkpoints import CHAT_TEMPLATE, write_tiny_gguf

# Single characters, so that any text of them can be spelled, and words with and without a space.
PIECES = ["▁", "t", "r", "u", "e", "tr", "ue", "true", "▁true", "日", "▁日", "e▁"]
FIRST = 259
TRUE, SPACE_TRUE = FIRST + PIECES.index("true"), FIRST + PIECES.index("▁true")
# Of the bytes that a character is spelled with where it is no piece.
EMOJI = [3 + byte for byte in "😀".encode()]
GREEDY: dict[str, Any] = {"temperature": 0, "logit_bias": {SPACE_TRUE: 100, TRUE: 50}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that recommends to take the likeliest token."""
    file = tmp_path_factory.mktemp("model") / "pieces.gguf"
    return write_tiny_gguf(
        file,
        512,
        chat_template=CHAT_TEMPLATE,
        pieces=PIECES,
        add=lambda writer: writer.add_float32("general.sampling.temp", 0.0),
    )


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Server]:
    flags = ("--model", str(path), "--max-logprobs", "-1", "--kv-cache-memory", "16MiB")
    with running_server(*flags) as running:
        yield running


@pytest.fixture(scope="module")
def pieces(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60.0) as made:
        yield made


def complete(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The choices of a completion."""
    answer = client.post("/v1/completions", json=body).raise_for_status().json()
    choices: list[dict[str, Any]] = answer["choices"]
    return choices


def stream(client: httpx.Client, **body: Any) -> dict[str, Any]:
    """One streamed choice, put together."""
    text, tokens, offsets = "", [], []
    body |= {"stream": True, "prompt": body["prompt"]}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                import json

                (choice,) = json.loads(line[6:])["choices"]
                text += choice["text"]
                tokens += choice["logprobs"]["tokens"]
                offsets += choice["logprobs"]["text_offset"]
    return {"text": text, "logprobs": {"tokens": tokens, "text_offset": offsets}}


def check_offsets(choice: dict[str, Any]) -> None:
    """Each token stands in the text where its offset says, save parts of characters, special tokens
    and the space that only a text's first token has."""
    text, found = choice["text"], choice["logprobs"]
    assert found["text_offset"] == sorted(found["text_offset"])
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        shown = token if offset else token.lstrip(" ")
        if "\ufffd" not in token and token not in ("<s>", "</s>", "<unk>"):
            assert text[offset:].startswith(shown), (token, offset, text)


@pytest.mark.parametrize("echo", [False, True])
def test_an_answer_begins_with_the_space_of_its_first_token(
    pieces: httpx.Client, echo: bool
) -> None:
    body = {"prompt": "true", "max_tokens": 2, "logprobs": 0, "echo": echo, **GREEDY}
    (choice,) = complete(pieces, **body)
    assert choice["text"] == "true true true"[0 if echo else 4 :]
    assert choice["logprobs"]["tokens"][-2:] == [" true", " true"]
    assert choice["logprobs"]["text_offset"] == ([0, 0, 4, 9] if echo else [0, 5])
    streamed = stream(pieces, **body)
    assert streamed["text"] == choice["text"]
    for name in ("tokens", "text_offset"):
        assert streamed["logprobs"][name] == choice["logprobs"][name]


def test_all_completions_of_a_prompt_and_stop_strings_see_the_space(pieces: httpx.Client) -> None:
    body = {"prompt": "true", "max_tokens": 4, **GREEDY, "temperature": 0.1}
    assert [choice["text"] for choice in complete(pieces, n=3, **body)] == [" true" * 4] * 3
    (choice,) = complete(pieces, stop=[" true true"], **body)
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_tokens_that_differ_by_a_space_have_keys_of_their_own(pieces: httpx.Client) -> None:
    (choice,) = complete(pieces, prompt="true", max_tokens=2, logprobs=300, **GREEDY)
    for top in choice["logprobs"]["top_logprobs"]:
        assert {"true", " true", "日", " 日", "e", "e "} <= top.keys()


def test_the_bytes_of_a_chats_tokens_add_up_to_its_text(pieces: httpx.Client) -> None:
    biased = dict.fromkeys((SPACE_TRUE, TRUE, FIRST + 9, FIRST + 10), 100)
    body = {
        "messages": [{"role": "user", "content": "true"}],
        "max_tokens": 20,
        "logprobs": True,
        "temperature": 1,
        "seed": 3,
        "logit_bias": biased,
    }
    answer = pieces.post("/v1/chat/completions", json=body).raise_for_status().json()
    (choice,) = answer["choices"]
    content = choice["logprobs"]["content"]
    assert (
        bytes(byte for token in content for byte in token["bytes"]).decode()
        == (choice["message"]["content"])
    )
    assert "".join(token["token"] for token in content) == choice["message"]["content"]
    assert {" true", "true", " 日", "日"} >= {token["token"] for token in content}
    assert len({token["token"] for token in content}) > 2


@pytest.mark.parametrize(
    ("prompt", "text", "offsets"),
    [
        ("true", "true", [0, 0]),
        ("tu", "tu", [0, 0, 0, 1]),
        ("日 日e", "日 日e", [0, 0, 1, 3]),
        ("😀 true", "😀 true", [0, 0, 0, 0, 0, 0, 1]),
        # What comes after a special token gets a space, which is not part of the text.
        ("true<s>true", "true<s>true", [0, 0, 4, 7]),
        ([1, SPACE_TRUE, 1, TRUE], "<s> true<s>true", [0, 3, 8, 11]),
        ([*EMOJI, TRUE], "😀true", [0, 0, 0, 0, 1]),
        (EMOJI[:2], "\ufffd\ufffd", [0, 0]),
    ],
)
def test_the_offsets_of_a_prompts_tokens_are_in_what_is_echoed(
    pieces: httpx.Client, prompt: Any, text: str, offsets: list[int]
) -> None:
    (choice,) = complete(pieces, prompt=prompt, max_tokens=0, echo=True, logprobs=0)
    assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)


def test_offsets_hold_whatever_is_answered(pieces: httpx.Client) -> None:
    # A byte that is a character of its own is none in a run of bytes that is not UTF-8.
    no_ascii = {3 + byte: -100 for byte in range(128)}
    for prompt in ("true 日😀", [1, SPACE_TRUE], [1], [TRUE, *EMOJI[:3]]):
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 60, "logprobs": 0, "seed": 5}
        body |= {"ignore_eos": True, "logit_bias": no_ascii, "temperature": 1}
        for echo in (False, True):
            (choice,) = complete(pieces, echo=echo, **body)
            check_offsets(choice)
            streamed = stream(pieces, echo=echo, **body)
            assert streamed["text"] == choice["text"]
            assert streamed["logprobs"]["text_offset"] == choice["logprobs"]["text_offset"]


def test_a_character_that_the_prompt_began_is_the_answers(pieces: httpx.Client) -> None:
    last = EMOJI[3]
    for echo, wanted in ((False, "😀"), (True, "true😀")):
        (choice,) = complete(
            pieces,
            prompt=[TRUE, *EMOJI[:3]],
            max_tokens=1,
            echo=echo,
            temperature=0,
            logit_bias={last: 100},
        )
        assert choice["text"] == wanted


def test_requests_that_give_no_temperature_take_the_models(
    server: Server, pieces: httpx.Client
) -> None:
    def texts(**params: Any) -> tuple[set[str], set[str]]:
        completed, chatted = set(), set()
        for seed in range(4):
            body = {"max_tokens": 8, "seed": seed, **params}
            completed.add(complete(pieces, prompt="true", **body)[0]["text"])
            body["messages"] = [{"role": "user", "content": "true"}]
            answer = pieces.post("/v1/chat/completions", json=body).raise_for_status().json()
            chatted.add(answer["choices"][0]["message"]["content"])
        return completed, chatted

    assert [len(found) for found in texts()] == [1, 1]
    assert all(len(found) > 1 for found in texts(temperature=1))
    assert any("temperature 0 (generation_config" in line for line in server.log)


def test_offline_answers_continue_their_prompts_too(path: Path) -> None:
    with LLM(str(path), kv_cache_memory="16MiB", max_logprobs=-1) as llm:
        params = SamplingParams(max_tokens=2, logprobs=0, prompt_logprobs=300, **GREEDY)
        (output,) = llm.generate("true", params)
        (completion,) = output.outputs
        assert completion.text == " true true"
        assert completion.logprobs is not None
        assert [e[SPACE_TRUE].decoded_token for e in completion.logprobs] == [" true"] * 2
        assert output.prompt_logprobs is not None
        entry = output.prompt_logprobs[1]
        assert entry is not None
        assert (entry[TRUE].decoded_token, entry[SPACE_TRUE].decoded_token) == ("true", " true")
        assert "".join(delta.text for delta in llm.stream("true", params)) == " true true"
        # Nothing but the start token: the answer is the beginning of the text.
        (output,) = llm.generate([[1]], params)
        assert output.outputs[0].text == "true true"
