"""`AsyncLLM` as an asyncio program meets it."""

import asyncio
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forks import in_fork
from headrace import LLM, AsyncLLM, SamplingParams
from headrace.engine.outputs import RequestOutput
from headrace.engine.prepared import Prepared
from headrace.errors import PipelineError, UsageError
from tiny_checkpoints import write_tiny_gguf

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
# So long that it is never over before a test is.
ENDLESS = SamplingParams(temperature=0, max_tokens=8000, ignore_eos=True)
PROMPTS = ["one", "two", "six"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", max_positions=8192))


@pytest.fixture(scope="module")
def engine(model: str) -> Iterator[AsyncLLM]:
    with AsyncLLM(model, pipeline_parallel_size=2, max_num_seqs=4) as running:
        yield running


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, list[int]]:
    """What each prompt gives through LLM."""
    with LLM(model) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    return {prompt: o.outputs[0].token_ids for prompt, o in zip(PROMPTS, outputs, strict=True)}


async def last_of(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


def test_every_output_is_everything_so_far(
    engine: AsyncLLM, expected: dict[str, list[int]]
) -> None:
    async def run() -> list[RequestOutput]:
        return [output async for output in engine.generate("one", GREEDY)]

    outputs = asyncio.run(run())
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for output in outputs:
        tokens = output.outputs[0].token_ids
        assert tokens == expected["one"][: len(tokens)]
    whole = outputs[-1].outputs[0]
    assert whole.token_ids == expected["one"]
    assert whole.text == engine.tokenizer.decode(whole.token_ids)
    assert len(whole.token_times_s) == 12
    assert outputs[-1].prompt == "one"


def test_requests_at_once_have_answers_of_their_own_in_any_event_loop(
    engine: AsyncLLM, expected: dict[str, list[int]]
) -> None:
    async def run() -> list[RequestOutput]:
        return await asyncio.gather(*(last_of(engine.generate(p, GREEDY)) for p in PROMPTS * 4))

    for _ in range(2):
        for prompt, output in zip(PROMPTS * 4, asyncio.run(run()), strict=True):
            assert output.outputs[0].token_ids == expected[prompt]


def test_cancelling_a_task_aborts_its_request_and_harms_no_other(
    engine: AsyncLLM, expected: dict[str, list[int]]
) -> None:
    async def run() -> list[int]:
        started = asyncio.Event()

        async def cancelled() -> None:
            async for _ in engine.generate("cancel", ENDLESS):
                started.set()

        task = asyncio.create_task(cancelled())
        other = asyncio.create_task(last_of(engine.generate("two", GREEDY)))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        tokens = (await other).outputs[0].token_ids
        # Four slots, all needed: the cancelled request has given its own back.
        await asyncio.gather(*(last_of(engine.generate("six", LONG)) for _ in range(4)))
        return tokens

    assert asyncio.run(run()) == expected["two"]
    assert not engine._named
    assert not engine._thread._requests


def test_a_request_cancelled_before_the_engine_has_it_is_aborted(engine: AsyncLLM) -> None:
    async def run() -> None:
        tasks = [asyncio.create_task(last_of(engine.generate("early", ENDLESS))) for _ in range(20)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await last_of(engine.generate("one", GREEDY))

    asyncio.run(run())
    assert not engine._thread._requests


def test_a_slow_reader_holds_up_nobody_and_is_given_all_at_once(engine: AsyncLLM) -> None:
    async def run() -> list[int]:
        slow = engine.generate("slow", GREEDY)
        seen = [len((await anext(slow)).outputs[0].token_ids)]
        # Others run to their ends, this one too, while its reader is away.
        for _ in range(3):
            await last_of(engine.generate("fast", LONG))
        seen += [len(output.outputs[0].token_ids) async for output in slow]
        return seen

    seen = asyncio.run(run())
    assert len(seen) <= 2
    assert seen[-1] == 12


def test_abort_ends_the_stream_with_what_there_is(engine: AsyncLLM) -> None:
    async def run() -> RequestOutput:
        stream = engine.generate("abort", ENDLESS, "mine")
        await anext(stream)
        await engine.abort("mine")
        await engine.abort("nobody's")
        return await last_of(stream)

    output = asyncio.run(run())
    assert output.request_id == "mine"
    assert output.outputs[0].finish_reason == "abort"
    assert 0 < len(output.outputs[0].token_ids) < 8000


def test_leaving_the_loop_early_aborts_the_request(engine: AsyncLLM) -> None:
    async def run() -> None:
        async for _ in engine.generate("leave", ENDLESS):
            break
        gc.collect()
        await last_of(engine.generate("one", GREEDY))

    asyncio.run(run())
    assert not engine._named


def test_a_request_of_a_loop_that_is_closed_is_aborted(engine: AsyncLLM) -> None:
    loop = asyncio.new_event_loop()
    stream = engine.generate("orphan", ENDLESS)
    loop.run_until_complete(anext(stream))
    loop.close()

    async def run() -> None:
        while engine._thread._requests:
            await last_of(engine.generate("one", GREEDY))

    asyncio.run(run())


def test_a_running_request_id_is_refused(engine: AsyncLLM) -> None:
    async def run() -> None:
        # Numbers given by the engine keep clear of the user's own.
        number = next(engine._numbers) + 1
        own = engine.generate("a", ENDLESS, str(number))
        await anext(own)
        await last_of(engine.generate("b", GREEDY))
        await own.aclose()
        first = engine.generate("a", ENDLESS, "same")
        await anext(first)
        with pytest.raises(UsageError, match="request_id must be a text or None, not 5"):
            await anext(engine.generate("b", LONG, 5))  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="request_id 'same' is running already"):
            await anext(engine.generate("b", LONG, "same"))
        await first.aclose()
        await last_of(engine.generate("c", GREEDY, "same"))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("prompt", "params", "reason"),
    [
        ([1, 300], GREEDY, "prompt token 300 is not in the vocabulary"),
        ("", GREEDY, "empty"),
        ("x" * 9000, GREEDY, "9000 tokens"),
        (None, GREEDY, "prompt 0 must be a text or a list of token ids, not None"),
        ("a", SamplingParams(logit_bias={300: 1.0}), "logit_bias 300"),
        ("a", SamplingParams(stop_token_ids=[300]), "stop_token_ids 300"),
        ("a", SamplingParams(logprobs=21), "logprobs must be at most 20"),
        ("a", {"temperature": 0}, "sampling_params"),
    ],
)
def test_a_bad_request_is_a_value_error_and_harms_no_other(
    engine: AsyncLLM, expected: dict[str, list[int]], prompt: object, params: object, reason: str
) -> None:
    async def run() -> list[int]:
        other = asyncio.create_task(last_of(engine.generate("six", GREEDY)))
        with pytest.raises(ValueError, match=reason):
            await last_of(engine.generate(prompt, params))  # type: ignore[arg-type]
        return (await other).outputs[0].token_ids

    assert asyncio.run(run()) == expected["six"]


def test_loops_in_several_threads_share_it_and_a_name_belongs_to_one_of_them(
    engine: AsyncLLM, expected: dict[str, list[int]]
) -> None:
    async def run(prompt: str) -> list[list[int]]:
        streams = [last_of(engine.generate(prompt, GREEDY)) for _ in range(5)]
        return [output.outputs[0].token_ids for output in await asyncio.gather(*streams)]

    async def name() -> str:
        try:
            stream = engine.generate("one", ENDLESS, "shared")
            await anext(stream)
            await asyncio.to_thread(both.wait)
            await stream.aclose()
        except UsageError as error:
            both.wait()
            return str(error)
        return "taken"

    both = threading.Barrier(2)
    with ThreadPoolExecutor(3) as pool:
        for prompt, answers in zip(PROMPTS, pool.map(asyncio.run, map(run, PROMPTS)), strict=True):
            assert answers == [expected[prompt]] * 5
        told = sorted(pool.map(asyncio.run, [name(), name()]))
    assert told == ["request_id 'shared' is running already: choose another", "taken"]


def test_a_fork_that_uses_it_is_told_so_at_once(
    engine: AsyncLLM, expected: dict[str, list[int]]
) -> None:
    async def generate() -> None:
        await last_of(engine.generate("one", GREEDY))

    async def submit() -> None:
        await engine.submit([[1]], GREEDY)

    async def ended() -> None:
        await engine.ended()

    async def use_as_context() -> None:
        async with engine:
            raise UsageError("nothing else")

    uses: list[Callable[[], object]] = [
        lambda: asyncio.run(generate()),
        lambda: asyncio.run(submit()),
        lambda: asyncio.run(ended()),
        engine.close,
    ]
    for use in uses:
        assert in_fork(use).startswith("UsageError: this engine belongs to process ")
    assert in_fork(lambda: asyncio.run(use_as_context())) == "UsageError: nothing else"
    assert in_fork(engine._close_at_exit) == "nothing"
    answer = asyncio.run(last_of(engine.generate("one", GREEDY)))
    assert answer.outputs[0].token_ids == expected["one"]


def test_closing_ends_running_requests_and_refuses_new_ones(model: str) -> None:
    async def run() -> RequestOutput:
        async with AsyncLLM(model) as engine:
            stream = engine.generate("running", ENDLESS)
            await anext(stream)
        engine.close()
        with pytest.raises(UsageError, match="closed"):
            await anext(engine.generate("late", GREEDY))
        return await last_of(stream)

    before = threading.active_count()
    assert asyncio.run(run()).outputs[0].finish_reason == "abort"
    assert threading.active_count() == before


def test_a_dead_stage_ends_every_stream_with_its_error(model: str) -> None:
    async def run() -> None:
        with AsyncLLM(model, pipeline_parallel_size=2, max_num_seqs=4, max_restarts=0) as engine:
            streams = [engine.generate(prompt, ENDLESS) for prompt in PROMPTS]
            for stream in streams:
                await anext(stream)
            os.kill(engine._running.processes._processes[1].process.pid, signal.SIGKILL)
            for stream in streams:
                with pytest.raises(PipelineError, match=r"stage 1 .* was killed by signal 9"):
                    await last_of(stream)
            with pytest.raises(PipelineError, match="stage 1"):
                await anext(engine.generate("late", GREEDY))

    asyncio.run(run())


def test_a_forgotten_engine_ends_its_stages(tmp_path: Path, model: str) -> None:
    engine = AsyncLLM(model)
    processes = [stage.process for stage in engine._running.processes._processes]
    del engine
    gc.collect()
    assert all(process.poll() is not None for process in processes)


# The thread itself may fail then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_pipeline_that_cannot_even_be_closed_leaves_no_reader_waiting(model: str) -> None:
    async def run() -> None:
        engine = AsyncLLM(model)
        stages = engine._running.processes
        stream = engine.generate("one", ENDLESS)
        await anext(stream)
        close, broken = stages.close, OSError("no")

        def fail(drain: bool) -> None:
            close(drain=False)
            raise broken

        stages.close = fail  # type: ignore[method-assign]
        engine.close()
        assert (await last_of(stream)).outputs[0].finish_reason == "abort"
        with pytest.raises(UsageError, match="closed"):
            await anext(engine.generate("late", GREEDY))

    asyncio.run(run())


def test_long_lists_are_made_ready_beside_both_the_loop_and_the_engine(
    engine: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, threads = engine._running.engine, []
    prepare = running.prepare

    def watched(params: SamplingParams) -> Prepared:
        threads.append(threading.current_thread().name)
        return prepare(params)

    monkeypatch.setattr(running, "prepare", watched)

    async def ask() -> None:
        for words in (["a"], [f"{n}" for n in range(500)]):
            await last_of(
                engine.generate("a", SamplingParams(max_tokens=2, n=3, seed=1, bad_words=words))
            )

    asyncio.run(ask())
    # Once for each request; short lists at once, long ones neither in the loop nor by the engine.
    short, long = threads
    assert short == threading.main_thread().name
    assert long not in (short, "headrace-engine")
