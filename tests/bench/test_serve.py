import asyncio
import itertools
import json
import math
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import typer

from fake_server import FIRST_TOKEN_S, TEMPLATE_LEN, FakeServer, fake_server
from headrace.bench.serve_data import (
    RandomPrompts,
    ServerTokenizer,
    SonnetPrompts,
    Work,
    arrivals,
)
from headrace.bench.serve_figures import LoadRun, Timing
from headrace.bench.serve_load import _decode, timed_answer
from headrace.cli.bench import app
from headrace.client import Client
from headrace.errors import ServerError, UsageError

RANDOM = ["--random-input-len", "12", "--random-output-len", "5"]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


def run(*arguments: str) -> int:
    return typer.main.get_command(app).main(["serve", *arguments], standalone_mode=False)  # type: ignore[no-any-return]


def works(url: str, dataset: RandomPrompts | SonnetPrompts, chat: bool, count: int) -> list[Work]:
    async def make() -> list[Work]:
        async with Client(url) as client:
            return await dataset.works(ServerTokenizer(client, "fake", chat), count, Random(3))

    return asyncio.run(make())


def test_figures_are_those_of_known_times() -> None:
    timings = [
        Timing(10.0, [10.5, 10.6, 11.0], input_tokens=7, output_tokens=6),
        # One token: no time per further token, and nothing between chunks.
        Timing(10.0, [10.1], input_tokens=3, output_tokens=1),
    ]
    figures = LoadRun(timings, ["no", "no more"], 2.0, 2, 0.014, 0.007).as_json()
    assert figures == {
        "completed": 2, "failed": 2, "duration": 2.0, "max_concurrent_requests": 2,
        "total_input_tokens": 10, "total_output_tokens": 7, "request_throughput": 1.0,
        "output_throughput": 3.5, "total_token_throughput": 8.5,
        "mean_ttft_ms": pytest.approx(300), "median_ttft_ms": pytest.approx(300),
        "p90_ttft_ms": pytest.approx(460), "p99_ttft_ms": pytest.approx(496),
        "mean_tpot_ms": pytest.approx(100), "median_tpot_ms": pytest.approx(100),
        "p90_tpot_ms": pytest.approx(100), "p99_tpot_ms": pytest.approx(100),
        "mean_itl_ms": pytest.approx(250), "median_itl_ms": pytest.approx(250),
        "p90_itl_ms": pytest.approx(370), "p99_itl_ms": pytest.approx(397),
        "mean_e2el_ms": pytest.approx(550), "median_e2el_ms": pytest.approx(550),
        "p90_e2el_ms": pytest.approx(910), "p99_e2el_ms": pytest.approx(991),
        "server_cpu_ms_per_token": pytest.approx(2), "client_cpu_ms_per_token": pytest.approx(1),
        "first_error": "no",
    }  # fmt: skip


def test_a_run_in_which_all_failed_has_figures_too() -> None:
    figures = LoadRun([], ["no"], 2.0, 1, None, 0.1).as_json()
    assert (figures["completed"], figures["output_throughput"]) == (0, 0)
    assert "mean_ttft_ms" not in figures
    assert "client_cpu_ms_per_token" not in figures


@pytest.mark.parametrize(
    ("event", "has_token"),
    [
        (b'{"choices":[{"text":"x"}]}', True),
        (b'{"choices":[{"text":""}]}', True),
        (b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}', False),
        (b'{"choices":[{"delta":{"role":"assistant","content":""}}]}', False),
        (b'{"choices":[{"delta":{"role":"assistant"}}]}', False),
        (b'{"choices":[{"delta":{"role":"assistant","content":"x"}}]}', True),
        (b'{"choices":[{"delta":{"content":"x"}}]}', True),
        (b'{"choices":[{"delta":{"content":""}}]}', True),
        (b'{"choices":[{"delta":{"reasoning_content":"x"}}]}', True),
        (b'{"choices":[{"delta":{},"finish_reason":"stop"}]}', False),
    ],
)
def test_a_chunk_counts_once_a_token_is_behind_it(event: bytes, has_token: bool) -> None:
    assert _decode(event).has_token() == has_token


def test_arrivals_are_the_seeds_and_come_at_the_rate() -> None:
    assert arrivals(3, math.inf, 1.0, 0) == [0.0] * 3
    assert arrivals(50, 4.0, 1.0, 7) == arrivals(50, 4.0, 1.0, 7) != arrivals(50, 4.0, 1.0, 8)
    for burstiness in (0.5, 1.0, 100.0):
        times = arrivals(20_000, 4.0, burstiness, 0)
        assert times == sorted(times)
        assert times[-1] == pytest.approx(20_000 / 4, rel=0.05)
    even = [b - a for a, b in itertools.pairwise(times)]
    assert 0.1 < min(even) < max(even) < 0.4


def test_random_prompts_have_the_lengths_asked_for(server: FakeServer) -> None:
    for work in works(server.url, RandomPrompts(20, 6), chat=False, count=3):
        assert (len(work.prompt), work.output_len) == (20, 6)
    found = works(server.url, RandomPrompts(20, 6, range_ratio=0.5), chat=False, count=200)
    assert {len(work.prompt) for work in found} == set(range(10, 31))
    assert {work.output_len for work in found} == set(range(3, 10))
    assert len({tuple(work.prompt) for work in found}) == 200
    for work in works(server.url, RandomPrompts(20, 6), chat=True, count=3):
        assert isinstance(work.prompt, str)
        assert len(work.prompt.split()) == 20 - TEMPLATE_LEN
    with pytest.raises(UsageError, match="a chat prompt of 5 tokens is too short"):
        works(server.url, RandomPrompts(5, 6), chat=True, count=1)


@pytest.mark.parametrize("chat", [False, True])
def test_sonnet_prompts_fill_the_length_and_share_their_beginning(
    server: FakeServer, chat: bool
) -> None:
    lines = [f"line {n} of a poem with eight words\n" for n in range(100)]
    added = TEMPLATE_LEN if chat else 0
    made = works(server.url, SonnetPrompts(lines, 100, 6, 50), chat, 10)
    texts = [str(work.prompt) for work in made]
    assert all(92 < len(text.split()) + added <= 100 for text in texts)
    assert len(set(texts)) == 10
    task, *first = texts[0].splitlines()
    assert task == "Pick as many lines as you can from these poem lines:"
    same = [line for line in zip(*(text.splitlines() for text in texts), strict=False)
            if len(set(line)) == 1]  # fmt: skip
    assert len(same) == 1 + round((50 - 11 - added) / 8)
    assert [line + "\n" for line in first[: len(same) - 1]] == lines[: len(same) - 1]
    with pytest.raises(UsageError, match="--sonnet-input-len 12 has no room for a line"):
        works(server.url, SonnetPrompts(lines, 12, 6, 0), chat, 1)


def test_time_starts_before_the_request_and_tokens_are_the_servers(server: FakeServer) -> None:
    async def ask(body: dict[str, Any]) -> Timing:
        async with Client(server.url) as client:
            return await timed_answer(client, "/v1/completions", body)

    timing = asyncio.run(ask({"prompt": "one two", "max_tokens": 3}))
    assert (timing.input_tokens, timing.output_tokens, len(timing.chunk_times)) == (2, 3, 3)
    assert FIRST_TOKEN_S <= timing.ttft <= timing.e2el
    with pytest.raises(ServerError, match="answered without a token"):
        asyncio.run(ask({"prompt": "one", "max_tokens": 0, "max_completion_tokens": 0}))


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_load_reports_every_token_and_holds_its_concurrency(
    backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_server() as server:
        flags = ["--backend", backend, "--base-url", server.url, "--num-prompts", "9", *RANDOM]
        code = run(*flags, "--max-concurrency", "3", "--ignore-eos", "--json")
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    assert (code, captured.err) == (0, "")
    said = {
        "backend": backend, "model_id": "fake", "completed": 9, "failed": 0,
        "total_input_tokens": 9 * 12, "total_output_tokens": 9 * 5, "request_rate": "inf",
        "max_concurrency": 3, "max_concurrent_requests": 3,
    }  # fmt: skip
    assert {key: answer[key] for key in said} == said
    # The fake says half a second more each time it is asked.
    assert answer["server_cpu_ms_per_token"] == pytest.approx(500 / 45, rel=1e-3)
    assert answer["client_cpu_ms_per_token"] > 0
    assert answer["median_ttft_ms"] >= FIRST_TOKEN_S * 1e3
    assert answer["machine"]["cores"] >= 1
    assert server.peak == 3
    # The warm-up is one more, and nobody's figure.
    assert len(server.asked) == 10
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in server.asked)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_single_request_of_a_single_token_has_figures(
    server: FakeServer, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ["--random-input-len", "1" if backend == "openai" else str(TEMPLATE_LEN + 1)]
    lengths += ["--random-output-len", "1", "--num-prompts", "1"]
    flags = ["--backend", backend, "--base-url", server.url, *lengths]
    assert run(*flags, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["completed"], answer["total_output_tokens"]) == (1, 1)
    assert run(*flags) == 0


def test_failures_are_counted_and_the_first_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    # Number 0 is the warm-up.
    with fake_server({1: "cut", 3: "error", 4: "status"}) as server:
        flags = ["--base-url", server.url, "--num-prompts", "5", *RANDOM]
        code = run(*flags, "--max-concurrency", "1", "--request-rate", "1000")
    captured = capsys.readouterr()
    assert code == 1
    assert "3 of 5 requests failed, the first with" in captured.err
    assert "completions broke its answer off" in captured.err
    assert "3 failed" in captured.out
    assert "ttft" in captured.out


def test_a_failing_warm_up_ends_it_at_once() -> None:
    with (
        fake_server({0: "status"}) as server,
        pytest.raises(ServerError, match="answered 400: max_tokens: too many"),
    ):
        run("--base-url", server.url, *RANDOM)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "grpc"], "--backend must be one of openai, vllm, openai-chat"),
        (["--num-prompts", "0"], "--num-prompts must be from 1"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--request-rate", "nan"], "--request-rate must be above 0"),
        (["--burstiness", "0"], "--burstiness must be above 0"),
        (["--max-concurrency", "0"], "--max-concurrency must be from 1"),
        (["--random-range-ratio", "1"], "--random-range-ratio must be from 0 to below 1"),
        (["--dataset-name", "poem"], "--dataset-name must be one of random, sonnet"),
        (["--dataset-name", "sonnet"], "needs --dataset-path"),
        (["--dataset-name", "sonnet", "--dataset-path", "/nowhere"], "cannot be read: No such"),
        (["--base-url", "here"], "no server's address"),
    ],
)
def test_wrong_usage_says_what_to_do(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(*arguments)
