"""Streams of a real server, through the official client, while a stage's process is killed.

What is sent is what nobody disturbed would have sent: nothing is lost of what was held back at that
moment, for a stop string or for a character of which only some bytes were there.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from serving.running_server import Server, running_server
from serving.scrape import scrape
from serving.tiny_model import MODEL, completion_arguments

TOKENS = 160
# A death is due when the stream that it is to hit has got so many characters.
SEEN = 60
# Tokens are bytes: these are a character each.
LETTERS = dict.fromkeys(range(65, 75), 60.0)
PROMPT = [72, 101, 97, 100]


@dataclass
class Stream:
    """What came of one, by completion. ends: why it finished, and the stop string that did it."""

    text: dict[int, str] = field(default_factory=dict)
    ends: dict[int, tuple[str, Any]] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    # Pieces before the death, and since.
    before: int = 0
    since: int = 0


def case(**params: Any) -> dict[str, Any]:
    return {
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 1.0,
        "seed": 4,
        "ignore_eos": True,
        **params,
    }


def read(
    client: OpenAI, params: dict[str, Any], dead: threading.Event, seen: Callable[[int], None]
) -> Stream:
    """One stream to its end. seen: told how many characters there are, after each piece."""
    found = Stream()
    event: Any
    for event in client.completions.create(**completion_arguments(params), stream=True):
        for choice in event.choices:
            assert choice.index not in found.ends, "a piece came after the last"
            found.text[choice.index] = found.text.get(choice.index, "") + choice.text
            if choice.logprobs is not None:
                found.tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens)
                found.logprobs.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
            if choice.finish_reason is not None:
                found.ends[choice.index] = choice.finish_reason, choice.stop_reason
        if dead.is_set():
            found.since += 1
        else:
            found.before += 1
        seen(len(found.text.get(0, "")))
    return found


@dataclass
class Answers:
    """By case: what nobody disturbed, and what came over a death of each stage."""

    calm: dict[str, Stream]
    over_deaths: list[dict[str, Stream]]
    restarts: float


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    """Steps take a while, so that a death comes in the middle of every stream."""
    with running_server(
        *("--model", str(tiny_model), "-pp", "2", "--dtype", "float32", "--max-num-seqs", "16"),
        *("--served-model-name", MODEL, "--max-restarts", "100", "--kv-cache-memory", "64MiB"),
        *("--link-latency-ms", "4"),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def cases(client: OpenAI, server: Server) -> dict[str, dict[str, Any]]:
    """By name, what is asked for. Texts of which half is held back are cut from the text without
    stop strings, so that they begin where the death is."""
    letters = case(logit_bias=LETTERS)
    free = read(client, letters, threading.Event(), lambda _: None).text[0]
    assert len(free) == TOKENS
    held = free[SEEN : SEEN + 40]
    return {
        "greedy": case(temperature=0.0),
        "seeded, several completions": case(n=2),
        "a stop string that comes": {**letters, "stop": [held]},
        "a stop string that is half there and does not come": {**letters, "stop": [held + "!"]},
        # F0 9F 98 80, in any order, is seldom a character, and often half of one.
        "bytes of characters": case(
            logit_bias=dict.fromkeys(tokens_of(server.url, "\N{GRINNING FACE}"), 60.0)
        ),
        "log-probabilities": case(logprobs=2),
    }


def tokens_of(url: str, text: str) -> list[int]:
    answer = httpx.post(f"{url}/tokenize", json={"model": MODEL, "prompt": text})
    found: list[int] = answer.json()["tokens"]
    return found


def run(
    client: OpenAI, cases: dict[str, dict[str, Any]], server: Server, victim: int | None
) -> dict[str, Stream]:
    """All at once; the victim is killed when the text that is to be held back begins."""
    dead = threading.Event()

    def kill(characters: int) -> None:
        if victim is not None and characters >= SEEN and not dead.is_set():
            os.kill(server.command.stages()[victim], signal.SIGKILL)
            dead.set()

    with ThreadPoolExecutor(len(cases)) as pool:
        reading = {
            name: pool.submit(
                read, client, params, dead,
                kill if name == "a stop string that comes" else lambda _: None,
            )
            for name, params in cases.items()
        }  # fmt: skip
        return {name: stream.result() for name, stream in reading.items()}


@pytest.fixture(scope="module")
def answers(client: OpenAI, cases: dict[str, dict[str, Any]], server: Server) -> Answers:
    calm = run(client, cases, server, None)
    over_deaths = [run(client, cases, server, victim) for victim in (0, 1)]
    return Answers(calm, over_deaths, scrape(server.url)["restarts_total"])


NAMES = [
    "greedy", "seeded, several completions", "a stop string that comes",
    "a stop string that is half there and does not come", "bytes of characters",
    "log-probabilities",
]  # fmt: skip


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_a_stream_over_the_death_of_a_stage_is_that_which_nobody_disturbed(
    answers: Answers, name: str, victim: int
) -> None:
    calm, found = answers.calm[name], answers.over_deaths[victim][name]
    assert (found.text, found.ends, found.tokens) == (calm.text, calm.ends, calm.tokens)
    assert found.logprobs.keys() == calm.logprobs.keys()
    for index, logprobs in found.logprobs.items():
        assert logprobs == pytest.approx(calm.logprobs[index], abs=1e-4)
    assert found.before
    assert found.since


def test_they_are_what_they_are_meant_to_be(
    answers: Answers, cases: dict[str, dict[str, Any]]
) -> None:
    assert answers.restarts == 2
    calm = answers.calm
    held = cases["a stop string that comes"]["stop"][0]
    assert calm["a stop string that comes"].ends == {0: ("stop", held)}
    assert len(calm["a stop string that comes"].text[0]) == SEEN
    whole = calm["a stop string that is half there and does not come"].text[0]
    assert whole[SEEN:].startswith(held)
    assert len(whole) == TOKENS
    assert "\N{REPLACEMENT CHARACTER}" in calm["bytes of characters"].text[0]
    assert len(calm["seeded, several completions"].text) == 2
    assert len(calm["log-probabilities"].logprobs[0]) == TOKENS
