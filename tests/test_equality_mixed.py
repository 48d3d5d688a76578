"""No request can tell who it was batched with: 200 mixed requests give what each gives alone.

On a tiny random model, through real stage processes. HEADRACE_EQUALITY_MODEL=smollm2 runs the same
on the packaged model, which takes a while. Four combinations of stages, chunk and cache run;
HEADRACE_EQUALITY_ALL=1 runs all twelve.
"""

import asyncio
import os
import random
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest

from headrace import LLM, AsyncLLM, SamplingParams
from headrace.engine.outputs import CompletionOutput, RequestOutput
from tiny_checkpoints import write_tiny_gguf

MODEL = os.environ.get("HEADRACE_EQUALITY_MODEL")
REQUESTS = 200
MAX_MODEL_LEN = 256
BLOCK_SIZE = 8
# Of the tiny model: keys and values, four layers, two heads of eight float32 numbers.
TINY_POSITION_BYTES = 2 * 4 * 2 * 8 * 4
SMOLLM2_POSITION_BYTES = 2 * 30 * 3 * 64 * 4


@dataclass(frozen=True)
class Request:
    prompt: list[int]
    params: SamplingParams
    # Aborted once it has so many tokens; None: never.
    abort_after: int | None


def mixed_requests(vocabulary: int) -> list[Request]:
    rng = random.Random(3)
    shared = [[rng.randrange(vocabulary) for _ in range(60)] for _ in range(4)]

    def prompt() -> list[int]:
        kind = rng.random()
        if kind < 0.3:
            return [rng.randrange(vocabulary) for _ in range(rng.randint(1, 12))]
        if kind < 0.5:
            return [rng.randrange(vocabulary) for _ in range(rng.randint(100, 200))]
        own = [rng.randrange(vocabulary) for _ in range(rng.randint(0, 9))]
        return rng.choice(shared)[: rng.randint(1, 60)] + own

    def params() -> SamplingParams:
        choice: dict[str, Any] = {
            "max_tokens": rng.randint(1, 30),
            "seed": rng.randrange(2**40),
            "temperature": rng.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
            "ignore_eos": rng.random() < 0.5,
            "stop_token_ids": rng.sample(range(vocabulary), 3),
        }
        extras: list[dict[str, Any]] = [
            {"top_k": 20},
            {"top_p": 0.9},
            {"min_p": 0.05},
            {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
            {"repetition_penalty": 1.3},
            {"presence_penalty": 0.6, "frequency_penalty": 0.4},
            {"logit_bias": {7: 3.0, 11: -50.0}},
            {"min_tokens": min(5, choice["max_tokens"])},
            {"logprobs": 2},
            {"stop": ["e", "xy"]},
            {"bad_words": ["a"]},
            {"prompt_logprobs": 1},
        ]
        for extra in rng.sample(extras, rng.choice([0, 0, 1, 2])):
            choice.update(extra)
        return SamplingParams(**choice)

    return [
        Request(prompt(), params(), rng.randint(0, 12) if rng.random() < 0.15 else None)
        for _ in range(REQUESTS)
    ]


@dataclass(frozen=True)
class Alone:
    """The requests and what each gives with the engine to itself."""

    model: str
    position_bytes: int
    requests: list[Request]
    outputs: list[RequestOutput]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    model = MODEL or str(
        write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", max_positions=256)
    )
    # One thread: with one row at a time there is nothing to share, and two would only wait for each
    # other. Those who run together have as many as there are cores, and still give the same.
    with LLM(
        model,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
        cpu_threads=None if MODEL else 1,
    ) as llm:
        requests = mixed_requests(llm._running.engine.vocab_size)
        outputs = [llm.generate([r.prompt], r.params)[0] for r in requests]
    size = SMOLLM2_POSITION_BYTES if MODEL else TINY_POSITION_BYTES
    return Alone(model, size, requests, outputs)


async def together(engine: AsyncLLM, requests: list[Request]) -> list[RequestOutput]:
    """All at once; those to be aborted are left once they have their tokens."""

    async def run(request: Request) -> RequestOutput:
        last = None
        stream = engine.generate(request.prompt, request.params)
        async for last in stream:
            if request.abort_after is not None and (
                len(last.outputs[0].token_ids) >= request.abort_after
            ):
                break
        await stream.aclose()
        assert last is not None
        return last

    return await asyncio.gather(*(run(request) for request in requests))


def essence(completion: CompletionOutput) -> tuple[Any, ...]:
    return completion.token_ids, completion.text, completion.finish_reason, completion.stop_reason


def approximately(reports: list[Any] | None, count: int | None = None) -> Any:
    """The same reports up to the last bits of their log-probabilities; None for none at all."""
    if reports is None or count == 0:
        return None
    return [
        report
        and {
            token: (pytest.approx(entry.logprob, abs=1e-4), entry.rank, entry.decoded_token)
            for token, entry in report.items()
        }
        for report in reports[:count]
    ]


CACHES = {
    "prefix cache": (True, 64),
    "no prefix cache": (False, 64),
    # One sequence of full length fits, and everybody else is preempted again and again.
    "tiny cache": (True, 1),
}


PAIRS = [
    (1, 16, "prefix cache"),
    (2, 512, "prefix cache"),
    (2, 16, "no prefix cache"),
    (2, 16, "tiny cache"),
]
EVERY = list(product([1, 2], [16, 512], CACHES))


@pytest.mark.parametrize(
    ("stages", "chunk", "cache"), EVERY if os.environ.get("HEADRACE_EQUALITY_ALL") else PAIRS
)
def test_mixed_requests_give_what_each_gives_alone(
    alone: Alone, stages: int, chunk: int, cache: str
) -> None:
    caching, sequences = CACHES[cache]
    # Stages have the same number of layers, so of the cache.
    # Blocks of fewer positions take as much memory as blocks of 16.
    block_rows = max(16, BLOCK_SIZE)
    cache_bytes = alone.position_bytes * MAX_MODEL_LEN * block_rows // BLOCK_SIZE * sequences
    with AsyncLLM(
        alone.model,
        dtype="float32",
        pipeline_parallel_size=stages,
        layer_partition="15,15" if MODEL and stages == 2 else "2,2" if stages == 2 else None,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=min(chunk, 64),
        max_num_batched_tokens=chunk,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=caching,
        kv_cache_memory=cache_bytes // stages,
        # So that the number of microbatches has reason to change.
        link_latency_ms=3.0 if (stages, chunk) == (2, 512) else 0.0,
    ) as engine:
        outputs = asyncio.run(together(engine, alone.requests))
        scheduler = engine._running.engine.scheduler
    for request, expected, output in zip(alone.requests, alone.outputs, outputs, strict=True):
        (whole,), (got,) = expected.outputs, output.outputs
        if request.abort_after is None:
            assert essence(got) == essence(whole)
            assert output.finished
            assert output.prompt_logprobs == approximately(expected.prompt_logprobs)
        else:
            assert got.token_ids == whole.token_ids[: len(got.token_ids)]
            assert whole.text.startswith(got.text)
        assert got.logprobs == approximately(whole.logprobs, len(got.token_ids))
    cached = sum(output.num_cached_tokens for output in outputs)
    assert (cached > 0) == caching, "the prefix cache was used, or was off"
    assert (scheduler.counters.preemptions > 0) == (sequences == 1), "preemption was part of it"
    assert scheduler.free_blocks == scheduler.config.num_blocks, "blocks leaked"
