"""Answers of GPT-OSS: reasoning and answer come apart, whole and streamed, as the client has it."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from command import run
from headrace.config import EngineConfig
from headrace.deployment.model import read_model
from headrace.serving.harmony import HarmonyText
from planted import plant
from serving.running_server import running_server
from tiny_checkpoints import write_tiny_gguf

MARKERS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
THOUGHTS, WORDS = "They ask why. <b|x|> Hm…", "Because of the water."
ANSWER = (
    f"<|channel|>analysis<|message|>{THOUGHTS}<|end|>"
    f"<|start|>assistant<|channel|>final<|message|>{WORDS}"
)
TEMPLATE = "{{ messages[0].content }}<|start|>assistant"
# Has every slot sample the tokens of a file, one after the other, whatever the model says.
SCRIPT = """
def read_out(module):
    import weakref

    tokens = [int(t) for t in (FOLDER / "script").read_text().split()]
    told = weakref.WeakKeyDictionary()

    def sample(self, plan, logits):
        import torch
        chosen = []
        for _, sampling in self._sampling_rows(plan):
            at = told[sampling] = told.get(sampling, -1) + 1
            chosen.append(tokens[at % len(tokens)])
        return torch.tensor(chosen)

    module.ModelExecutor.sample = sample


if IS_STAGE:
    when_imported("headrace.execution.model_executor", read_out)
"""


def parts(pieces: list[str]) -> tuple[str, str]:
    text = HarmonyText()
    shown = [text.push(piece, last=n == len(pieces) - 1) for n, piece in enumerate(pieces)]
    return "".join(r for r, _ in shown), "".join(c for _, c in shown)


@given(st.lists(st.integers(0, len(ANSWER)), max_size=8))
def test_however_it_is_cut_reasoning_and_answer_are_the_same(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(ANSWER)]
    assert parts([ANSWER[a:b] for a, b in itertools.pairwise(bounds)]) == (
        THOUGHTS,
        WORDS,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain words", ("", "plain words")),
        ("<|channel|>final<|message|>a<|return|>", ("", "a")),
        ("<|channel|>analysis<|message|>cut off", ("cut off", "")),
        ("<|channel|>commentary<|message|>I look it up.<|end|>", ("", "I look it up.")),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assis", ("a", "")),
        ("1 < 2 <|mess", ("", "1 < 2 <|mess")),
    ],
)
def test_what_is_no_whole_answer_is_lost_nowhere(text: str, expected: tuple[str, str]) -> None:
    assert parts([text]) == parts(list(text)) == expected


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with GPT-OSS's special tokens. With its folder on PYTHONPATH it says ANSWER to
    everything."""
    folder = tmp_path_factory.mktemp("harmony")
    path = write_tiny_gguf(folder / "m.gguf", 512, chat_template=TEMPLATE, special=MARKERS)
    tokenizer = read_model(EngineConfig(model=str(path))).tokenizer()
    ids = tokenizer.encode(f"{ANSWER}<end>", add_special_tokens=False)
    (folder / "script").write_text(" ".join(map(str, ids)), encoding="ascii")
    plant(folder, SCRIPT)
    return path


@pytest.fixture(scope="module")
def gpt_oss(scripted: Path) -> Iterator[OpenAI]:
    """A server of it."""
    with (
        running_server(
            *("--model", str(scripted), "--served-model-name", "m"),
            PYTHONPATH=str(scripted.parent),
        ) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


ASK: Any = [{"role": "user", "content": "Why?"}]


def _reasoning(message: Any) -> str:
    return str(message.reasoning_content)


def test_a_whole_answer_has_its_reasoning_apart(gpt_oss: OpenAI) -> None:
    answer = gpt_oss.chat.completions.create(model="m", messages=ASK, max_tokens=200)
    (choice,) = answer.choices
    assert choice.message.content == WORDS
    assert _reasoning(choice.message) == THOUGHTS
    assert choice.finish_reason == "stop"


def test_a_stream_has_its_reasoning_apart_and_before(gpt_oss: OpenAI) -> None:
    stream = gpt_oss.chat.completions.create(
        model="m",
        messages=ASK,
        max_tokens=200,
        stream=True,
    )
    deltas = [chunk.choices[0].delta for chunk in stream if chunk.choices]
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    words = [delta.content or "" for delta in deltas]
    assert ("".join(thoughts), "".join(words)) == (THOUGHTS, WORDS)
    last_thought = max(n for n, thought in enumerate(thoughts) if thought)
    assert not any(words[: last_thought + 1])


def test_an_answer_that_ends_while_it_thinks_says_nothing(gpt_oss: OpenAI) -> None:
    answer = gpt_oss.chat.completions.create(model="m", messages=ASK, max_tokens=20)
    (choice,) = answer.choices
    assert choice.message.content is None
    assert THOUGHTS.startswith(_reasoning(choice.message))
    assert choice.finish_reason == "length"


def test_a_chat_without_a_server_shows_and_keeps_what_is_said_alone(
    scripted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(scripted.parent))
    saved = tmp_path / "said.json"
    lines = f"Why?\n/save {saved}\n"
    finished = run("chat", "--model", str(scripted), "--max-tokens", "200", stdin=lines.encode())
    assert (finished.code, finished.out) == (0, WORDS + "\n"), finished.err
    assert json.loads(saved.read_text(encoding="utf-8"))[-1]["content"] == WORDS


def test_who_wants_special_tokens_has_the_text_as_it_is(gpt_oss: OpenAI) -> None:
    answer = gpt_oss.chat.completions.create(
        model="m",
        messages=ASK,
        max_tokens=200,
        extra_body={"skip_special_tokens": False},
    )
    assert answer.choices[0].message.content == ANSWER
    plain = gpt_oss.completions.create(model="m", prompt="Why?", max_tokens=200)
    assert plain.choices[0].text == f"analysis{THOUGHTS}assistantfinal{WORDS}"
